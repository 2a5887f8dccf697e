"""A model with a token that makes everything NaN: whoever sends it gets an error that says so, and nobody else does."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from novainfer import Engine, EngineConfig, SamplingParams, StepFailedError
from novainfer.fsm.schedule.ladder import Rung
from novainfer.kernels.demo import model_path
from tests.api.helpers import ask, blocks_back, greedy

pytestmark = pytest.mark.slow

POISON = 300
PROMPT = [5, 9, 70, 21] * 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo model with an output head of its own, and one embedding that is NaN."""
    shutil.copytree(model_path(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


async def test_who_sends_a_poisonous_token_gets_an_error_that_names_it_and_nobody_else_does(folder: Path) -> None:
    ways = [greedy(), SamplingParams(max_tokens=8, seed=1, top_k=20), SamplingParams(max_tokens=8, seed=1, logprobs=2)]
    async with Engine(EngineConfig(model=folder, max_num_seqs=16)) as engine:
        alone = [(await ask(engine, PROMPT, way)).token_ids() for way in ways]
        for _ in range(3):
            wrong = [[*PROMPT[:17], POISON, *PROMPT[:at]] for at in range(6)]
            asked = [ask(engine, PROMPT, way) for way in ways]
            asked += [ask(engine, prompt, way) for prompt in wrong for way in ways]
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert [answer.token_ids() for answer in found[:3]] == alone
            for error in found[3:]:
                assert isinstance(error, StepFailedError)
                assert str(error) == (
                    "the model's output for this request is not a number: no token can be drawn from it"
                )
            incidents = [found for found in engine.errors() if found.kind == "not_a_number"]
            assert all(
                len(found.requests) == 1 for found in incidents
            )  # each is its own request's, and not everybody's
            assert len({found.requests[0] for found in incidents}) == len(incidents)
        found = engine.statistics()
        assert found.rung == Rung.FULL
        await blocks_back(engine)
