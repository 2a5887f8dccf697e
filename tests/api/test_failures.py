"""The demo model under steps that fail, kernels that are left, and memory that is short: every text is exact.

Served in fp32 with row-invariant kernels, so a request's greedy text does not depend on what happened around it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from novainfer import Engine, EngineConfig, NovaInferError, StepFailedError
from novainfer.actors.device.device import Device
from novainfer.assembly import model_spec
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.schedule.ladder import Rung
from novainfer.fsm.simulation.world.shape import BEST, LEAN
from tests.api.helpers import ask, blocks_back, eventually, greedy

pytestmark = pytest.mark.slow

THINGS = ["sun", "rain", "fox", "ship", "tree", "king", "door", "star"]
PROMPTS = [f"{n} years ago there was a {thing} that" for n in range(8) for thing in THINGS]


class Unreliable:
    """The model's device; `fault(plan)` says what becomes of a step: an exception to raise, or None.

    The step is computed all the same, so that what it wrote into its blocks is there.
    """

    def __init__(self, device: Device, fault: Callable[[StepPlan], BaseException | None]) -> None:
        self._device = device
        self._fault = fault
        self.modes_seen: list[Mode] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, plan: StepPlan) -> StepDone:
        done = self._device.run(plan)
        if not self.modes_seen or self.modes_seen[-1] != plan.mode:
            self.modes_seen.append(plan.mode)
        if (error := self._fault(plan)) is not None:
            raise error
        return done


@asynccontextmanager
async def engine_with(
    fault: Callable[[StepPlan], BaseException | None] = lambda plan: None, **config: Any
) -> AsyncIterator[tuple[Engine, Unreliable]]:
    """A started engine over such a device."""
    settings = EngineConfig(max_num_seqs=64, **config)
    device = Unreliable(model_spec(settings).make(), fault)
    engine = Engine(settings, device=device)
    await engine.start()
    try:
        yield engine, device
        await blocks_back(engine)
    finally:
        await engine.aclose()


async def texts(engine: Engine, prompts: list[str], max_tokens: int = 24, **more: Any) -> list[str]:
    """The greedy text of each prompt, all at once."""
    answers = await asyncio.gather(*(ask(engine, prompt, greedy(max_tokens, **more)) for prompt in prompts))
    return [answer.text() for answer in answers]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def right() -> list[str]:
    """What the prompts get when nothing fails."""
    async with engine_with() as (engine, _):
        return await texts(engine, PROMPTS)


@pytest.mark.parametrize(("error", "number"), [(MemoryError("no memory"), 16), (RuntimeError("broken"), 64)])
async def test_every_second_step_fails_and_nobody_notices(right: list[str], error: BaseException, number: int) -> None:
    count = 0

    def fault(plan: StepPlan) -> BaseException | None:
        nonlocal count
        count += 1
        return error if count % 2 else None

    async with engine_with(fault) as (engine, _):
        assert await texts(engine, PROMPTS) == right
        assert engine.statistics().step_failures > 10


async def test_a_request_that_breaks_every_step_ends_alone_and_the_error_queue_says_so(right: list[str]) -> None:
    def fault(plan: StepPlan) -> BaseException | None:
        return RuntimeError("bad token") if 7 in plan.input_ids else None

    async with engine_with(fault) as (engine, _):
        bad = asyncio.create_task(_all_of(engine.generate([7, 8, 9], greedy(), request_id="bad")))
        assert await texts(engine, PROMPTS) == right
        with pytest.raises(
            StepFailedError, match="the step that computed this request failed: RuntimeError: bad token"
        ):
            await bad
        last = engine.errors()[-1]
        assert (last.kind, last.action, last.requests) == ("exception", "the request ended with an error", ["bad"])


async def test_a_lack_of_memory_goes_down_the_ladder_and_up_again_when_it_is_quiet(right: list[str]) -> None:
    is_short = True

    def fault(plan: StepPlan) -> BaseException | None:
        return MemoryError("no memory") if is_short and plan.mode != LEAN else None

    async with engine_with(fault, ladder_quiet_s=0.2) as (engine, device):
        await texts(engine, PROMPTS[:4])  # as INT8 would have it: no error, that is all
        assert engine.statistics().rung == "INT8"
        is_short = False

        async def asked_until_it_is_well() -> None:
            while engine.statistics().rung != Rung.FULL:
                await ask(engine, "Once", greedy(2))

        async with asyncio.timeout(60):
            await asked_until_it_is_well()
        assert await texts(engine, PROMPTS) == right
        assert device.modes_seen[0] == device.modes_seen[-1] == BEST
        assert LEAN in device.modes_seen
        rungs = [record.action for record in engine.errors() if record.kind == "ladder"]
        assert "-> INT8" in rungs[0] or "-> INT8" in rungs[1]
        assert rungs[-1].endswith("-> FULL")


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("broken")])
async def test_requests_that_break_every_step_they_are_in_change_no_other_answer(
    right: list[str], error: BaseException
) -> None:
    def fault(plan: StepPlan) -> BaseException | None:
        return error if 7 in plan.input_ids else None

    async with engine_with(fault) as (engine, device):
        for _ in range(8):  # one after the other, each with the engine to itself: nothing goes well in between
            with pytest.raises(StepFailedError):
                await ask(engine, [7, 8, 9], greedy())
        poison = [asyncio.create_task(_all_of(engine.generate([7, 8, 9], greedy()))) for _ in range(8)]
        assert await texts(engine, PROMPTS) == right
        assert {type(found) for found in await asyncio.gather(*poison, return_exceptions=True)} == {StepFailedError}
        assert device.modes_seen == [BEST]


async def test_what_is_computed_without_memory_is_said_to_be_degraded_and_nothing_of_it_is_shared(
    right: list[str],
) -> None:
    is_short = True

    def fault(plan: StepPlan) -> BaseException | None:
        return MemoryError("no memory") if is_short and plan.mode != LEAN else None

    prompt = PROMPTS[0] * 8  # several blocks
    async with engine_with() as (engine, _):
        exact = (await ask(engine, prompt, greedy(24))).text()
    async with engine_with(fault, ladder_quiet_s=0.2) as (engine, _):
        assert (await ask(engine, prompt, greedy(24))).deltas[-1].is_degraded
        is_short = False
        async with asyncio.timeout(60):
            while engine.statistics().rung != Rung.FULL:
                await ask(engine, "Once", greedy(2))
        again = await ask(engine, prompt, greedy(24))
        assert again.text() == exact
        assert not again.deltas[-1].is_degraded


async def test_swapped_requests_go_on_where_they_were() -> None:
    # An answer grows by eight blocks, and an admission leaves half a block free for each that runs: some are preempted.
    small = {"kv_cache_capacity_mode": "fixed", "num_kv_blocks": 32, "block_size": 8, "max_model_len": 256}
    async with engine_with() as (engine, _):
        undisturbed = await texts(engine, PROMPTS[:32], 64, ignore_eos=True)
    async with engine_with(**small, swap_space_gib=0.01, enable_prefix_caching=False) as (engine, _):
        assert await texts(engine, PROMPTS[:32], 64, ignore_eos=True) == undisturbed
        found = engine.statistics()
        assert found.preemptions > 0
        assert found.swapped_in_blocks > 0


async def test_a_step_that_needs_more_memory_than_the_process_may_have_is_one_error_for_one_request() -> None:
    def fault(plan: StepPlan) -> BaseException | None:
        if 7 not in plan.input_ids:
            return None
        try:
            return bytearray(1 << 62) and None  # a real MemoryError
        except MemoryError as error:
            return error

    async with engine_with(fault) as (engine, _):
        with pytest.raises(NovaInferError, match="ran out of memory"):
            await ask(engine, [7], greedy())
        await eventually(lambda: engine.statistics().kv_blocks_owned == 0)
        assert (await ask(engine, "Once", greedy())).text()


async def _all_of(deltas: AsyncIterator[Any]) -> None:
    async for _ in deltas:
        pass
