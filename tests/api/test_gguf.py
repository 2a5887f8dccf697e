"""A GGUF file is a model as any other: its own tokenizer, chat template and end tokens, in a thread or a process."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from novainfer import LLM, Engine, EngineConfig, InvalidParameter, ModelLoadError
from tests.api.helpers import CHAT, ask, greedy
from tests.kernels.gguf_checkpoints import Type, save_gguf, write_tokenizer

DEMO = Path(str(files("novainfer.kernels"))) / "demo" / "model"
PROMPTS = ["5 years ago there was a fox that", "Two plus two is"]


def demo_as(kind: Type, folder: Path) -> Path:
    path = folder / f"demo-{kind.name}.gguf"
    save_gguf(DEMO, path, lambda name: kind, change=lambda writer: write_tokenizer(writer, DEMO))
    return path


@pytest.mark.slow
def test_the_same_weights_give_the_same_answers_as_from_a_folder(tmp_path: Path) -> None:
    answers = []
    for model in (str(DEMO), str(demo_as(Type.F32, tmp_path))):
        with LLM(model, max_num_seqs=4) as llm:
            outputs = llm.generate(PROMPTS, greedy(24), use_tqdm=False)
            outputs += llm.chat([{"role": "user", "content": "What is 7 plus 5?"}], greedy(24), use_tqdm=False)
            assert llm.model_info.prompt_kind == "chat"
            answers.append([(o.prompt_token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs])
    assert answers[0] == answers[1]
    assert answers[0][2][2] == "stop"  # its end token is known


@pytest.mark.slow
async def test_codes_are_served_by_a_process_of_their_own(tmp_path: Path) -> None:
    path = demo_as(Type.Q8_0, tmp_path)
    config = EngineConfig(model=path, worker="process", max_num_seqs=4, dtype="float32")
    async with Engine(config) as engine, Engine(EngineConfig(max_num_seqs=4, dtype="float32")) as full:
        info = engine.model_info
        assert info.precision == "Q8_0 (gguf)"
        assert {mode.precision for mode in info.modes} == {"checkpoint"}
        assert info.weight_bytes < 0.4 * full.model_info.weight_bytes
        assert (await ask(engine, CHAT, greedy(24))).text() == (await ask(full, CHAT, greedy(24))).text()
        assert full.model_info.precision == "float32"


@pytest.mark.slow
def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path) -> None:
    path = demo_as(Type.Q8_0, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelLoadError, match=r"demo-Q8_0\.gguf was cut off: .* should end at byte"):
        LLM(str(path))
    path.write_bytes(whole)
    with pytest.raises(ModelLoadError, match=r"already: Q8_0 \(gguf\); leave the setting out"):
        LLM(str(path), quantization="int8")
    with pytest.raises((ModelLoadError, InvalidParameter), match=r"gone\.gguf is not there"):
        LLM(str(tmp_path / "gone.gguf"))
