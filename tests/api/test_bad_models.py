"""A model that cannot be served is one clear sentence, from the engine and from the LLM, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from novainfer import LLM, Engine, EngineConfig, InvalidParameter, ModelLoadError
from novainfer.actors.device.device import ModelDevice
from novainfer.assembly import callers_tokenizer, tokenizer_loader
from tests.actors.devices import model
from tests.api.helpers import ask, greedy
from tests.leftovers import other_tasks

DEMO = Path(str(files("novainfer.kernels"))) / "demo" / "model"


def test_a_chat_template_that_is_none_ends_the_start_and_one_that_is_holds_for_callers_too(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"chat_template .*none.jinja cannot be used: No such file") as caught:
        LLM(chat_template=tmp_path / "none.jinja")
    assert caught.value.param == "chat_template"
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    config = EngineConfig(chat_template=template)
    assert callers_tokenizer(config).chat_template == "{{ messages[0].content }}"
    assert tokenizer_loader(config)().info().chat_template == "{{ messages[0].content }}"
    with pytest.raises(InvalidParameter, match="chat_template must be a file"):
        EngineConfig(chat_template="a\0b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model, to be damaged."""
    for path in DEMO.iterdir():
        shutil.copy(path, tmp_path / path.name)
    return tmp_path


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def truncate(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def lose_a_shard(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def break_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "corrupt config": (break_json, "config.json"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "truncated weights": (truncate, "model.safetensors"),
    "garbage weights": (lambda f: (f / "model.safetensors").write_bytes(b"not tensors"), "model.safetensors"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors"),
    "missing shard": (lose_a_shard, "model-00001-of-00002.safetensors"),
    "wrong shapes": (lambda f: edit_config(f, intermediate_size=640), r"\[640, "),
    "a missing layer": (lambda f: edit_config(f, num_hidden_layers=9), "layers"),
    "an unexpected layer": (lambda f: edit_config(f, num_hidden_layers=1), "layers"),
    "another architecture": (
        lambda f: edit_config(f, architectures=["MambaForCausalLM"], model_type="mamba"),
        "MambaForCausalLM",
    ),
    "heads that do not divide": (lambda f: edit_config(f, num_key_value_heads=4), "num_key_value_heads"),
    "a word for a number": (lambda f: edit_config(f, hidden_size="many"), "hidden_size"),
    "a number left out": (lambda f: edit_config(f, num_attention_heads=...), "num_attention_heads"),
    "config without end": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json"),
    "modules without end": (lambda f: (f / "modules.json").write_text("[" * 100_000), "modules.json"),
    "modules that are deep": (lambda f: (f / "modules.json").write_text("[" * 900 + "]" * 900), "modules.json"),
    "defaults without end": (
        lambda f: (f / "generation_config.json").write_text("[" * 100_000),
        "generation_config.json",
    ),
    "tokenizer config without end": (lambda f: (f / "tokenizer_config.json").write_text("[" * 100_000), "tokenizer"),
    "damaged tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer"),
}


# What is read once a process has been started, or beside it.
LATER = {"modules without end", "modules that are deep", "tokenizer config without end", "damaged tokenizer"}


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message
    assert 20 < len(message) < 600, message
    assert "Traceback" not in message
    assert not message.startswith(("KeyError", "TypeError", "AttributeError", "AssertionError")), message


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_model_is_one_sentence_that_names_what_is_wrong(folder: Path, damage: str) -> None:
    break_it, named = DAMAGES[damage]
    break_it(folder)
    engine = Engine(EngineConfig(model=folder))
    with pytest.raises(ModelLoadError, match=named) as caught:
        await engine.start()
    print(caught.value.message)
    assert_one_sentence(caught.value.message)
    assert other_tasks() == set()
    assert not engine.is_ready


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/no/such/folder", "neither a folder here nor a hub id"),
        ("./no-such-folder", "neither a folder here nor a hub id"),
        ("just-a-word", "neither a folder here nor a hub id"),
        (Path("nowhere/at-all"), "neither a folder here nor a hub id"),
    ],
    ids=str,
)
async def test_a_model_that_is_nowhere_is_one_sentence(name: str | Path, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said) as caught:
        await Engine(EngineConfig(model=name)).start()
    assert_one_sentence(caught.value.message)


async def test_a_file_is_not_a_model(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"is a file; the folder that holds config\.json is needed"):
        await Engine(EngineConfig(model=folder / "model.safetensors")).start()


async def test_a_hub_id_without_the_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="nobody/nothing is not a folder here, and ") as caught:
        await Engine(EngineConfig(model="nobody/nothing")).start()
    assert_one_sentence(caught.value.message)


async def test_an_empty_folder_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        await Engine(EngineConfig(model=tmp_path)).start()


async def test_a_context_that_the_model_was_not_made_for_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="more than the 2048 tokens the model was made for"):
        await Engine(EngineConfig(max_model_len=4096)).start()


async def test_too_few_blocks_for_one_request_say_how_many_tokens_fit() -> None:
    config = EngineConfig(kv_cache_capacity_mode="fixed", num_kv_blocks=4)
    with pytest.raises(ModelLoadError, match="max_model_len must be at most 64"):
        await Engine(config).start()


async def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    config = EngineConfig(kv_cache_capacity_mode="fixed", num_kv_blocks=10**9)
    with pytest.raises(ModelLoadError, match="GiB are free"):
        await Engine(config).start()


async def test_a_device_that_is_not_there_is_one_sentence() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ModelLoadError, match="no CUDA device"):
        await Engine(EngineConfig(device="cuda")).start()


def test_a_device_that_was_never_there_is_not_taken_for_a_broken_one() -> None:
    settings = model("demo").settings
    assert ModelDevice(msgspec.structs.replace(settings, device="cuda")).is_usable()


def test_a_device_whose_allocator_waits_for_the_end_of_a_capture_is_of_no_more_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before torch 2.12 a capture that was broken off is under way for ever."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    device = ModelDevice(msgspec.structs.replace(model("demo").settings, device="cuda"))
    assert device.is_usable()

    def assert_fails() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", assert_fails)
    assert not device.is_usable()


async def test_a_tokenizer_that_is_nowhere_is_one_sentence(tmp_path: Path) -> None:
    for path, said in [
        ("/no/such/tokenizer", "neither a folder here nor a hub id"),
        (tmp_path, "there is no tokenizer in"),
    ]:
        with pytest.raises(ModelLoadError, match=said) as caught:
            await Engine(EngineConfig(tokenizer=path)).start()
        assert_one_sentence(caught.value.message)
        assert "model" not in caught.value.message
        assert caught.value.param == "tokenizer"


async def test_a_damaged_tokenizer_of_the_model_itself_is_the_models_fault(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    for config, param in [(EngineConfig(model=folder), "model"), (EngineConfig(tokenizer=folder), "tokenizer")]:
        with pytest.raises(ModelLoadError, match="cannot load a tokenizer from") as caught:
            await Engine(config).start()
        assert caught.value.param == param


@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if damage not in LATER])
async def test_what_files_and_their_headers_tell_is_told_before_a_process_is_started(
    folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def no_process(*args: object, **how: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("asyncio.create_subprocess_exec", no_process)
    monkeypatch.setattr("subprocess.Popen.__init__", lambda *args, **how: pytest.fail("a process was started"))
    break_it, named = DAMAGES[damage]
    break_it(folder)
    with pytest.raises(ModelLoadError, match=named):
        await Engine(EngineConfig(model=folder, worker="process")).start()
    assert caplog.messages == []


async def test_a_recorder_without_a_folder_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = EngineConfig(recorder_dir=tmp_path / "file")
    with pytest.raises(InvalidParameter, match=r"recorder_dir .* cannot be written: File exists"):
        await Engine(config).start()


async def test_weights_alone_are_served_with_token_ids(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    async with Engine(EngineConfig(model=folder, max_num_seqs=4)) as engine:
        found = await ask(engine, [40, 41, 42], greedy(4, ignore_eos=True))
        assert (len(found.token_ids()), found.text()) == (4, "")
        with pytest.raises(InvalidParameter, match="its prompts must be token ids"):
            await ask(engine, "Hello", greedy(4))
    async with Engine(EngineConfig(max_num_seqs=4)) as engine:
        assert (await ask(engine, [40, 41, 42], greedy(4, ignore_eos=True))).token_ids() == found.token_ids()


def test_the_blocking_llm_says_the_same(folder: Path) -> None:
    truncate(folder)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors") as caught:
        LLM(folder)
    assert_one_sentence(caught.value.message)
