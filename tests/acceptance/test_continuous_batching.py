"""Continuous batching: a step does more when more is there, and nobody's tokens depend on who else is in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from novainfer import Engine, EngineConfig
from novainfer.actors.device.device import ModelDevice
from novainfer.fsm.messages.step import StepDone, StepPlan
from tests.acceptance.reference import Reference, exactly, read, tokens_of

pytestmark = pytest.mark.slow


def config(reference: Reference, **more: object) -> EngineConfig:
    settings = {"dtype": "float32", "max_num_seqs": 32, "max_num_batched_tokens": 128, **more}
    return EngineConfig(model=reference.folder, **settings)  # type: ignore[arg-type]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Every plan that goes to the device."""
    seen: list[StepPlan] = []
    run = ModelDevice.run

    def watched(device: ModelDevice, plan: StepPlan) -> StepDone:
        seen.append(plan)
        return run(device, plan)

    monkeypatch.setattr(ModelDevice, "run", watched)
    return seen


async def test_tokens_per_step_rise_with_load(tiny: Callable[[str], Reference]) -> None:
    reference = tiny("mha")
    per_step: list[float] = []
    async with Engine(config(reference)) as engine:
        for load in (1, 4, 16, 32):
            before = engine.statistics()
            prompts = [reference.prompt(10, seed=100 * load + i) for i in range(load)]
            await asyncio.gather(*(read(engine, p, exactly(40)) for p in prompts))
            after = engine.statistics()
            tokens = after.generation_tokens_total - before.generation_tokens_total
            assert tokens == load * 40
            per_step.append(tokens / (after.steps - before.steps))
    print("tokens per step at 1, 4, 16, 32 requests:", [round(x, 2) for x in per_step])
    assert per_step[0] == pytest.approx(1.0, abs=0.05)
    assert per_step[1] > 3
    assert per_step[2] > 12
    assert per_step[3] > 20


async def test_together_is_one_by_one(tiny: Callable[[str], Reference]) -> None:
    reference = tiny("wide-heads")
    prompts = [reference.prompt(3 + 5 * i, seed=i) for i in range(20)]
    async with Engine(config(reference, enable_prefix_caching=False)) as engine:
        alone = [tokens_of(await read(engine, p, exactly(15))) for p in prompts]
        together = await asyncio.gather(*(read(engine, p, exactly(15)) for p in prompts))
    assert [tokens_of(deltas) for deltas in together] == alone
    assert alone == [reference.greedy(p, 15) for p in prompts]


async def test_requests_join_and_leave_the_batch_between_steps(
    tiny: Callable[[str], Reference], plans: list[StepPlan]
) -> None:
    reference = tiny("mha")
    async with Engine(config(reference)) as engine:
        long = asyncio.create_task(read(engine, reference.prompt(10, seed=0), exactly(100)))
        while engine.statistics().num_running == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for i in range(1, 6):
            short = await read(engine, reference.prompt(10, seed=i), exactly(5))
            assert tokens_of(short) == reference.greedy(reference.prompt(10, seed=i), 5)
            assert not long.done()
        assert tokens_of(await long) == reference.greedy(reference.prompt(10, seed=0), 100)
    sizes = [len(plan.slots) for plan in plans]
    assert max(sizes) == 2
    assert len(plans) <= 104, "the long request waited for the short ones"


async def test_a_long_prompt_is_prefilled_in_chunks_beside_those_who_decode(
    tiny: Callable[[str], Reference], plans: list[StepPlan]
) -> None:
    reference = tiny("mha")
    async with Engine(config(reference, prefill_chunk_tokens=16, max_num_batched_tokens=32)) as engine:
        decoding = asyncio.create_task(read(engine, reference.prompt(8, seed=1), exactly(60)))
        while engine.statistics().generation_tokens_total < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        begin = len(plans)
        long = reference.prompt(150, seed=2)
        assert tokens_of(await read(engine, long, exactly(5))) == reference.greedy(long, 5)
        assert tokens_of(await decoding) == reference.greedy(reference.prompt(8, seed=1), 60)
    mixed = [plan for plan in plans[begin:] if max(plan.query_lens) > 1]
    assert len(mixed) >= 150 // 32
    assert all(1 in plan.query_lens for plan in mixed), "decoding stopped while a prompt was read"
    assert all(sum(plan.query_lens) <= 32 for plan in plans)


async def test_a_step_never_holds_more_than_it_may(tiny: Callable[[str], Reference], plans: list[StepPlan]) -> None:
    reference = tiny("mha")
    async with Engine(config(reference, max_num_seqs=6, max_num_batched_tokens=40)) as engine:
        prompts = [reference.prompt(30 + i, seed=i) for i in range(25)]
        found = await asyncio.gather(*(read(engine, p, exactly(10)) for p in prompts))
    assert all(len(plan.slots) <= 6 and sum(plan.query_lens) <= 40 for plan in plans)
    assert max(len(plan.slots) for plan in plans) == 6
    assert [tokens_of(deltas) for deltas in found] == [reference.greedy(p, 10) for p in prompts]


async def test_first_come_first_served(tiny: Callable[[str], Reference]) -> None:
    reference = tiny("mha")
    finished: list[int] = []

    async def user(engine: Engine, number: int) -> None:
        await read(engine, reference.prompt(10, seed=number), exactly(4))
        finished.append(number)

    async with Engine(config(reference, max_num_seqs=1)) as engine:
        await asyncio.gather(*(user(engine, number) for number in range(10)))
    assert finished == list(range(10))
