"""A model's own folder says how it wants to be sampled; what a request says goes before it."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from novainfer import Engine, EngineConfig, ModelLoadError, SamplingParams
from novainfer.actors.device.sampling_defaults import FILE, sampling_defaults
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine, FakeModelInfo

DEMO = Path(str(files("novainfer.kernels"))) / "demo" / "model"
QWEN = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
WANTED = {name: value for name, value in QWEN.items() if name != "do_sample"}


def written(folder: Path, content: str) -> Path:
    (folder / FILE).write_text(content)
    return folder


def test_what_a_folder_sets_is_found_and_the_rest_is_left_alone(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    assert sampling_defaults(written(tmp_path, json.dumps({**QWEN, "max_new_tokens": 5, "min_p": None}))) == WANTED
    assert sampling_defaults(DEMO) == {}, "the demo model is sampled as every test expects"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "cannot be read"),
        ("[]", "must hold a JSON object"),
        pytest.param("[" * 100_000, "cannot be read: it is nested more than 64 levels deep", id="without end"),
        ('{"temperature": "hot"}', "temperature: expected `float`, got `str`; mend it, or set generation_config"),
        ('{"repetition_penalty": 1e-38}', "repetition_penalty must be between 0.01 and 100.0, not 1e-38"),
    ],
)
def test_a_file_that_no_request_could_follow_is_refused_by_name(tmp_path: Path, content: str, why: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        sampling_defaults(written(tmp_path, content))
    assert str(tmp_path / FILE) in caught.value.message
    assert why in caught.value.message


@pytest.mark.parametrize(("how", "found"), [("auto", {"top_k": 1}), ("none", {})])
async def test_an_engine_takes_the_defaults_of_its_model_unless_told_otherwise(
    tmp_path: Path, how: Any, found: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    written(folder, json.dumps({**json.loads((DEMO / FILE).read_text()), "top_k": 1}))
    config = EngineConfig(model=folder, generation_config=how, max_num_seqs=2, recorder=False, seed=1)
    async with Engine(config) as engine:
        assert engine.model_info.sampling_defaults == found
        text = "".join([delta.text async for delta in engine.generate("Hello") if delta.index == 0])
        greedy = SamplingParams(temperature=0.0, max_tokens=None)
        likeliest = "".join([delta.text async for delta in engine.generate("Hello", greedy)])
        assert (text == likeliest) == (how == "auto"), "top_k 1 takes the likeliest token always"


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_over_http_a_field_that_is_left_out_or_null_has_the_models_default(serve: Serve, path: str) -> None:
    engine = FakeEngine()
    engine.model_info = FakeModelInfo(sampling_defaults=WANTED)
    server = await serve(engine)
    body = {"messages": [{"role": "user", "content": "hi"}]} if path.startswith("chat") else {"prompt": "hi"}
    async with httpx.AsyncClient(base_url=server.url) as client:
        await client.post(f"/v1/{path}", json={**body, "temperature": None, "top_p": 0.5, "top_k": 0})
    params = engine.seen[0][1]
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.7, 0.5, 0, 1.05)
