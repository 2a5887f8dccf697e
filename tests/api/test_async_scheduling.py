"""Steps that are planned before the one before has ended: the same answers, whatever is asked for or goes wrong."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from itertools import pairwise
from typing import Any, Literal

import pytest

from novainfer import Engine, EngineConfig, InvalidParameter, SamplingParams
from novainfer.actors.device.fake import ByteTokenizer, FakeDevice
from novainfer.fsm.messages.step import StepPlan
from tests.actors.devices import spec
from tests.actors.helpers import eventually, expected
from tests.api.helpers import Answer, ask, blocks_back, greedy

WORKERS: tuple[Literal["thread"], Literal["process"]] = ("thread", "process")
PROMPT = "Once upon a time there was a fox who"
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.8, max_tokens=60, seed=3, logprobs=2),
    SamplingParams(temperature=1.0, max_tokens=60, seed=4, frequency_penalty=0.8, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, max_tokens=60, seed=5, n=3, presence_penalty=0.5, top_p=0.9),
    SamplingParams(temperature=0.7, max_tokens=60, seed=6, stop=["the", "."], logprobs=0),
    SamplingParams(temperature=0.7, max_tokens=60, seed=6, stop=["a "], include_stop_str_in_output=True),
    SamplingParams(temperature=1.0, max_tokens=60, seed=7, min_tokens=20, stop_token_ids=[11, 12, 13, 14]),
    SamplingParams(temperature=0.9, max_tokens=1, seed=8, logprobs=1),
    SamplingParams(temperature=0.9, max_tokens=2, seed=9),
]


def told(answer: Answer) -> list[Any]:
    """All that a client can tell one answer from another by, but for how the deltas were cut."""
    found = []
    for choice in range(max(delta.index for delta in answer.deltas) + 1):
        deltas = [delta for delta in answer.deltas if delta.index == choice]
        logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
        ends = [(delta.finish_reason, delta.stop_reason) for delta in deltas if delta.finish_reason]
        found.append((answer.token_ids(choice), answer.text(choice), logprobs, ends, deltas[-1].num_generated_tokens))
    return found


async def answers(**config: Any) -> list[Any]:
    """Of all that is asked, at once, and then one after the other."""
    async with Engine(EngineConfig(max_num_seqs=8, seed=0, dtype="float32", batch_invariant=True, **config)) as engine:
        together = await asyncio.gather(*(ask(engine, PROMPT, params) for params in ASKED))
        found = [*map(told, together), *[told(await ask(engine, PROMPT, params)) for params in ASKED]]
        await blocks_back(engine)
        return found


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """With one step in flight."""
    return asyncio.run(answers(async_scheduling=False))


@pytest.mark.slow
@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_answers_are_the_same(plain: list[Any], worker: str, is_async: bool) -> None:
    if (worker, is_async) != ("thread", False):
        assert await answers(worker=worker, async_scheduling=is_async) == plain


@pytest.mark.slow
async def test_answers_are_the_same_where_memory_is_short(plain: list[Any]) -> None:
    """Requests are preempted, swapped and recomputed all the time."""
    small = {"kv_cache_capacity_mode": "fixed", "num_kv_blocks": 16, "max_model_len": 128, "swap_space_gib": 0.001}
    for is_async in (False, True):
        assert await answers(async_scheduling=is_async, **small) == plain


# ---- over a fake device ----------------------------------------------------------------------------------------------


def engine_of(worker: str = "process", *, device: Any = None, **config: Any) -> Engine:
    settings: dict[str, Any] = {"worker": worker, "async_scheduling": True, "max_num_seqs": 32, **config}
    return Engine(EngineConfig(**settings), device=device or spec(), tokenizer=ByteTokenizer())


@pytest.mark.parametrize("worker", WORKERS)
async def test_an_end_that_is_found_a_step_late_costs_a_row_and_leaves_nothing(worker: str) -> None:
    """Lengths, stop tokens and stop strings end requests while a step that holds them is planned already."""
    async with engine_of(worker) as engine:
        chance = random.Random(1)

        async def one(at: int) -> None:
            prompt = f"a prompt of its own, {at}"
            length = chance.randint(1, 40)
            wanted = expected(prompt, length)
            kind = at % 3
            if kind == 0:
                answer = await ask(engine, prompt, greedy(length))
                assert answer.token_ids() == wanted
            elif kind == 1:
                answer = await ask(engine, prompt, greedy(200, stop_token_ids=[wanted[-1]]))
                assert answer.token_ids() == wanted[: wanted.index(wanted[-1]) + 1]
            else:
                answer = await ask(engine, prompt, greedy(200, stop=[bytes(wanted[-1:]).decode()]))
                assert answer.text() == bytes(wanted[: wanted.index(wanted[-1])]).decode()
            assert answer.last.finish_reason == ("length" if kind == 0 else "stop")

        for _ in range(3):
            await asyncio.gather(*(one(at) for at in range(60)))
        await blocks_back(engine)


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_storm_of_aborts(worker: str) -> None:
    """Half of all readers leave at any moment; the others have every token, and no block is lost."""
    async with engine_of(worker, max_num_seqs=16) as engine:
        chance = random.Random(2)

        async def one(at: int) -> None:
            prompt, length = f"storm {at}", chance.randint(20, 200)
            if at % 2:
                assert (await ask(engine, prompt, greedy(length))).token_ids() == expected(prompt, length)
                return
            leaves_at, got = chance.randint(0, length - 1), 0
            stream = engine.generate(prompt, greedy(length))
            with suppress(asyncio.TimeoutError):
                async for delta in stream:
                    got += len(delta.token_ids)
                    if got >= leaves_at:
                        break
            await stream.aclose()

        await asyncio.gather(*(one(at) for at in range(120)))
        await blocks_back(engine)
        assert engine.statistics().num_running == 0


@pytest.mark.parametrize("fault", ["oom", "exception"])
@pytest.mark.parametrize("worker", WORKERS)
async def test_a_step_that_fails_takes_the_one_behind_it_along_and_both_are_done_again(worker: str, fault: str) -> None:
    async with engine_of(worker) as engine:
        seen: list[int] = []

        async def one(at: int) -> list[int]:
            found: list[int] = []
            async for delta in engine.generate(str(at), greedy(300)):
                found += delta.token_ids
                seen.extend(delta.token_ids)
            return found

        streams = asyncio.gather(*(one(at) for at in range(8)))
        for at in range(4):
            await eventually(lambda at=at: len(seen) > 400 * (at + 1))
            engine._runtime.inject(fault)
        assert await streams == [expected(str(at), 300) for at in range(8)]
        assert engine.statistics().step_failures >= 4
        await blocks_back(engine)


@pytest.mark.slow
@pytest.mark.parametrize("warm_spare", [False, True])
async def test_killed_with_two_steps_in_flight_every_token_is_right(warm_spare: bool) -> None:
    async with engine_of(device=spec("fake", step_s=0.002), warm_spare=warm_spare, max_restarts=10) as engine:
        seen: list[int] = []

        async def one(at: int) -> list[int]:
            found: list[int] = []
            async for delta in engine.generate(f"stream {at}", greedy(900)):
                found += delta.token_ids
                seen.extend(delta.token_ids)
            return found

        link = engine._runtime._link
        streams = asyncio.gather(*(one(at) for at in range(12)))
        kills = 4
        for at in range(kills):
            await eventually(lambda at=at: len(seen) > (at + 1) * 2000)
            if warm_spare:
                await eventually(lambda: link.roster.spare is not None and "Load" in link.roster.spare.ahead)
            pid = link.pid
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda pid=pid: link.pid not in (0, pid))
        assert await streams == [expected(f"stream {at}", 900) for at in range(12)]
        assert len(seen) == 12 * 900, "none was sent twice"
        assert engine.statistics().worker_losses == kills
        await blocks_back(engine)


async def test_two_steps_are_in_flight_and_the_second_does_not_tell_the_tokens() -> None:
    plans: list[StepPlan] = []
    async with engine_of("thread", device=FakeDevice(on_step=plans.append, step_s=0.001)) as engine:
        assert (await ask(engine, "hello", greedy(50))).token_ids() == expected("hello", 50)
    ahead = [plan for plan in plans if plan.after]
    assert len(ahead) > 40
    assert all(plan.input_ids == [-1] for plan in ahead)
    assert all(plan.after == before.step_id for before, plan in pairwise(plans) if plan.after)


# ---- the setting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "ahead"),
    [
        ({}, False),
        ({"worker": "process"}, True),
        ({"device": "cuda"}, True),
        ({"async_scheduling": True}, True),
        ({"worker": "process", "async_scheduling": False}, False),
        ({"worker": "process", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, False),
    ],
)
def test_steps_are_planned_ahead_where_that_pays(fields: dict[str, Any], ahead: bool) -> None:
    assert EngineConfig(**fields).plans_ahead is ahead


def test_speculation_and_planning_ahead_exclude_each_other() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(InvalidParameter, match="async_scheduling must be off, or left out") as caught:
        EngineConfig(speculative_config=drafts, async_scheduling=True)
    assert caught.value.param == "async_scheduling"
    with pytest.raises(InvalidParameter, match="async_scheduling"):
        EngineConfig(async_scheduling="yes")  # type: ignore[arg-type]
