"""The demo model is reconfigured under load: what is told to 32 clients is what they would have been told anyway."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from novainfer import Engine, EngineConfig, ReconfigureFailed, SamplingParams
from novainfer.fsm.messages.mode import CHECKPOINT, INT8
from novainfer.kernels.demo import model_path
from tests.actors.helpers import WAIT_S, eventually
from tests.api.helpers import Answer, ask, blocks_back

NUM_STREAMS = 32
EXACT: dict[str, Any] = {
    "dtype": "float32",
    "batch_invariant": True,
    "max_num_seqs": 16,
    "kv_cache_capacity_mode": "fixed",
    "num_kv_blocks": 400,
    "max_model_len": 512,
    "seed": 0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "thread": {},
    "thread, one step, swap": {"async_scheduling": False, "swap_space_gib": 0.02},
    "thread, drafts of its own": {
        "speculative_config": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}
    },
    "process, swap": {"worker": "process", "swap_space_gib": 0.02},
    "process, spare": {"worker": "process", "warm_spare": True},
    "process, looked up": {
        "worker": "process",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    },
}
MOVES: list[dict[str, Any]] = [{"num_kv_blocks": 600}, {"num_kv_blocks": 64}, {"num_kv_blocks": 450}]


def asked(at: int) -> tuple[str, SamplingParams]:
    """Greedy ones and seeded ones, short and long, some with penalties, with stop strings, with several choices."""
    draw = random.Random(at)
    prompt = draw.choice(["Once upon a time", "What is 7 + 5?", "The capital of France is", "hello " * 40])
    if at % 3 == 0:
        return prompt, SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
    more: dict[str, Any] = draw.choice([{}, {"frequency_penalty": 0.5}, {"logprobs": 2}, {"n": 2}, {"stop": ["the"]}])
    return prompt, SamplingParams(temperature=0.9, seed=at, max_tokens=draw.choice([20, 60, 120]), **more)


def told(answer: Answer) -> list[Any]:
    found = []
    for choice in range(max(delta.index for delta in answer.deltas) + 1):
        last = [delta for delta in answer.deltas if delta.index == choice][-1]
        found.append((answer.token_ids(choice), answer.text(choice), last.finish_reason, last.num_generated_tokens))
    return found


async def all_told(engine: Engine) -> list[Any]:
    answers = await asyncio.gather(*(ask(engine, *asked(at)) for at in range(NUM_STREAMS)))
    return [told(answer) for answer in answers]


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    async def run() -> list[Any]:
        async with Engine(EngineConfig(**EXACT)) as engine:
            return await all_told(engine)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def rounded() -> tuple[list[Any], int]:
    """What is told in int8, and the bytes of its weights."""

    async def run() -> tuple[list[Any], int]:
        async with Engine(EngineConfig(**{**EXACT, "quantization": "int8"})) as engine:
            return await all_told(engine), engine.model_info.weight_bytes

    return asyncio.run(run())


async def steps(engine: Engine, num_steps: int) -> None:
    """Wait until so many more have been computed."""
    goal = engine.statistics().steps + num_steps
    async with asyncio.timeout(WAIT_S):
        while engine.statistics().steps < goal:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
async def test_whatever_becomes_of_the_kv_cache_answers_are_the_same(name: str, undisturbed: list[Any]) -> None:
    async with Engine(EngineConfig(**{**EXACT, **SETTINGS[name]})) as engine:
        load = asyncio.create_task(all_told(engine))
        for move in MOVES:
            await steps(engine, 6)
            info = await engine.reconfigure(**move)
            assert info.num_kv_blocks == move["num_kv_blocks"]
            assert engine.statistics().kv_blocks_total in (0, info.num_kv_blocks)
        assert not load.done(), "it was reconfigured under load"
        assert await load == undisturbed
        found = engine.statistics()
        assert (found.worker_losses, found.step_failures, engine.errors()) == (0, 0, [])
        assert (found.swapped_out_blocks > 0) == ("swap" in name)
        await blocks_back(engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["thread", "process, swap", "process, spare"])
async def test_in_another_precision_no_token_is_missing_and_the_way_back_is_exact(
    name: str, undisturbed: list[Any], rounded: tuple[list[Any], int]
) -> None:
    in_int8, int8_bytes = rounded
    assert in_int8 != undisturbed
    async with Engine(EngineConfig(**{**EXACT, **SETTINGS[name]})) as engine:
        before = engine.model_info
        load = asyncio.create_task(all_told(engine))
        await steps(engine, 6)
        info = await engine.reconfigure(precision=INT8, num_kv_blocks=300)
        assert (info.modes[0].precision, info.num_kv_blocks, info.weight_bytes) == (INT8, 300, int8_bytes)
        assert not load.done(), "it was reconfigured under load"
        for at, choices in enumerate(await load):
            for token_ids, _, reason, count in choices:
                assert len(token_ids) == count
                assert reason == "stop" or count == asked(at)[1].max_tokens
        assert await all_told(engine) == in_int8
        assert not any(step.mode.precision != INT8 for step in engine.steps(20))
        info = await engine.reconfigure(precision=CHECKPOINT)
        assert (info.weight_bytes, info.modes[0]) == (before.weight_bytes, before.modes[0])
        assert await all_told(engine) == undisturbed
        assert (engine.statistics().worker_losses, engine.errors()) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["thread", "process, swap"])
async def test_more_than_there_is_room_for_leaves_everything_as_it_was(name: str, undisturbed: list[Any]) -> None:
    async with Engine(EngineConfig(**{**EXACT, **SETTINGS[name]})) as engine:
        before = engine.model_info
        load = asyncio.create_task(all_told(engine))
        for precision in (None, INT8):
            await steps(engine, 6)
            with pytest.raises(ReconfigureFailed, match=r"goes on as before: 99999999 KV blocks need .* blocks fit$"):
                await engine.reconfigure(num_kv_blocks=99_999_999, precision=precision)
            found = engine.model_info  # a worker of its own has measured anew what its steps cost
            assert replace(found, step_costs=before.step_costs) == before
        assert await load == undisturbed
        await blocks_back(engine)


@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_without_the_files_of_the_model_no_other_precision_is_tried(worker: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_path(), folder)
    async with Engine(EngineConfig(**{**EXACT, "model": folder, "worker": worker})) as engine:
        before, (weights,) = engine.model_info, folder.glob("*.safetensors")
        weights.rename(tmp_path / "elsewhere")
        with pytest.raises(ReconfigureFailed, match=f"goes on as before: .*{folder}"):
            await engine.reconfigure(precision=INT8)
        assert (engine.model_info, engine.statistics().state) == (before, "IDLE")
        assert (await engine.reconfigure(num_kv_blocks=300)).num_kv_blocks == 300, "in place, no file is read"
        assert (await ask(engine, *asked(0))).token_ids()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["process, swap", "process, spare"])
async def test_killed_in_the_middle_of_it_every_answer_is_right(name: str, undisturbed: list[Any]) -> None:
    async with Engine(EngineConfig(**{**EXACT, **SETTINGS[name]})) as engine:
        load = asyncio.create_task(all_told(engine))
        for delay_s in (0.0, 0.004, 0.02):
            await steps(engine, 6)
            caller = asyncio.create_task(engine.reconfigure(num_kv_blocks=500 - int(1000 * delay_s)))
            await eventually(lambda: engine.statistics().state == "RECONFIGURING")
            await asyncio.sleep(delay_s)
            if (pid := engine._runtime._link.pid) != 0:
                os.kill(pid, signal.SIGKILL)
            await asyncio.gather(caller, return_exceptions=True)
            assert caller.exception() is None or isinstance(caller.exception(), ReconfigureFailed)
        assert await load == undisturbed
        await blocks_back(engine)
