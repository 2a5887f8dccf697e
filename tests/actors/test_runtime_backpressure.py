"""Draining, and readers that are slower than the device."""

from __future__ import annotations

import asyncio

import pytest

from novainfer.actors.device.fake import FakeDevice
from novainfer.fsm.messages.errors import EngineDraining
from novainfer.fsm.messages.events import Cause
from tests.actors.helpers import (
    Valve,
    all_blocks_back,
    answer,
    ask,
    eventually,
    expected,
    params,
    read_all,
    running,
)

# ---- drain ----------------------------------------------------------------


async def test_draining_lets_those_here_finish_and_takes_nobody_else() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        readers = [asyncio.create_task(answer(runtime, [65 + i], params(10))) for i in range(5)]
        await valve.step_arrived()
        drain = asyncio.create_task(runtime.drain(60.0))
        await asyncio.sleep(0)
        assert not runtime.is_ready
        with pytest.raises(EngineDraining):
            ask(runtime, [99])
        assert not drain.done()
        valve.open()
        await drain
        found = await asyncio.gather(*readers)
        assert [f.token_ids for f in found] == [expected([65 + i], 10) for i in range(5)]
        await all_blocks_back(runtime)


async def test_draining_ends_those_who_take_too_long() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        readers = [asyncio.create_task(answer(runtime, prompt, params(10))) for prompt in ([65], "text", [66])]
        await valve.step_arrived()
        await runtime.drain(0.01)
        found = await asyncio.gather(*readers)
        assert {f.end.cause for f in found} == {Cause.DRAIN}
        valve.open()
        await all_blocks_back(runtime)


async def test_draining_an_idle_engine_is_over_at_once_and_twice_is_once() -> None:
    async with running() as runtime:
        await answer(runtime, [65])
        await asyncio.gather(runtime.drain(60.0), runtime.drain(60.0))
        await runtime.drain(0.0)


async def test_closing_ends_a_drain() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        reader = asyncio.create_task(answer(runtime, [65], params(10)))
        await valve.step_arrived()
        drain = asyncio.create_task(runtime.drain(60.0))
        await asyncio.sleep(0)
        close = asyncio.create_task(runtime.aclose())
        assert (await reader).end.code == "draining"
        await drain
        valve.open()
        await close


# ---- slow readers ----------------------------------------------------------------


async def test_a_slow_reader_pauses_and_others_never_notice() -> None:
    async with running() as runtime:
        slow = ask(runtime, [65], params(1800))
        await eventually(lambda: slow.state == "STALLED")
        scheduler = runtime._scheduler
        assert scheduler is not None
        await eventually(lambda: scheduler.statistics().num_paused == 1 and not scheduler.flights)
        paused_at = scheduler.statistics().generation_tokens_total
        others = await asyncio.gather(*(answer(runtime, [70 + i], params(50)) for i in range(5)))
        assert [f.token_ids for f in others] == [expected([70 + i], 50) for i in range(5)]
        assert scheduler.statistics().generation_tokens_total == paused_at + 250
        found = await read_all(slow)
        assert found.token_ids == expected([65], 1800)
        assert found.is_well
        await all_blocks_back(runtime)


async def test_what_a_slow_reader_has_not_read_is_merged() -> None:
    async with running() as runtime:
        handle = ask(runtime, [65], params(400))
        await eventually(lambda: handle.state == "CLOSED")
        found = await read_all(handle)
        assert len(found.deltas) == 1
        assert found.token_ids == expected([65], 400)
        assert found.deltas[0].num_generated_tokens == 400


async def test_choices_of_a_stream_each_get_their_own_deltas() -> None:
    async with running() as runtime:
        found = await answer(runtime, [65], params(5, n=3))
        assert found.is_well
        assert [found.tokens_of(choice) for choice in range(3)] == [expected([65], 5)] * 3
        reasons = {delta.index: delta.finish_reason for delta in found.deltas if delta.finish_reason}
        assert reasons == {0: "length", 1: "length", 2: "length"}
