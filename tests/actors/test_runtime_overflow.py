"""Who is willing to wait for room in a full queue: in order, within limits, and gone without a trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from novainfer.actors.core.streams import StreamHandle
from novainfer.actors.device.fake import FakeDevice
from novainfer.actors.runtime import Runtime, Timeouts
from novainfer.fsm.messages.errors import EngineOverloaded
from novainfer.fsm.messages.events import Cause
from novainfer.fsm.schedule.planner import Limits
from tests.actors.helpers import Valve, all_blocks_back, ask, eventually, expected, params, read_all, running

ONE_AT_A_TIME = Limits(
    max_num_seqs=1, max_num_batched_tokens=64, prefill_chunk_tokens=64, block_size=16, enable_prefix_caching=False
)
LONG_S = 3600.0


class Full:
    """One stream runs, two are queued, and two may wait for room."""

    def __init__(self, runtime: Runtime, valve: Valve) -> None:
        self.runtime = runtime
        self.valve = valve
        self.handles: list[StreamHandle] = []

    def patient(self, **more: Any) -> StreamHandle:
        """A stream that waits for room."""
        wish = {"max_tokens": 2, "max_queue_s": LONG_S, **more}
        handle = ask(self.runtime, [80 + len(self.handles)], params(**wish))
        self.handles.append(handle)
        assert self.runtime.is_overflowed(handle.stream_id)
        return handle

    async def finish(self) -> None:
        """Everybody who was let in gets an exact answer, and nothing is left."""
        self.valve.open()
        for at, handle in enumerate(self.handles):
            found = await read_all(handle)
            assert found.token_ids == expected([80 + at], 2)
        await eventually(lambda: self.runtime.num_queued == 0)
        await all_blocks_back(self.runtime)
        assert self.runtime.admission_statistics().num_overflow == 0
        assert len(self.runtime._streams) == 0
        assert not self.runtime._engine._tombstones


@asynccontextmanager
async def full_queue() -> AsyncIterator[Full]:
    valve = Valve()
    async with running(FakeDevice(on_step=valve), limits=ONE_AT_A_TIME, max_queue=(2, 10_000, 2)) as runtime:
        full = Full(runtime, valve)
        for at in range(3):
            full.handles.append(ask(runtime, [80 + at], params(2)))
            if at == 0:
                await valve.step_arrived()
                await eventually(lambda: runtime.num_queued == 0)
        yield full


async def test_they_are_let_in_in_their_order_and_get_their_exact_answers() -> None:
    async with full_queue() as full:
        order: list[int] = []
        for _ in range(2):
            full.patient()
        with pytest.raises(EngineOverloaded, match="the list of those who wait for it: 2 requests"):
            full.patient()
        with pytest.raises(EngineOverloaded, match="4 requests are waiting"):
            ask(full.runtime, [99])

        async def read(handle: StreamHandle) -> None:
            await handle.read()
            order.append(handle.stream_id)

        readers = [asyncio.create_task(read(handle)) for handle in full.handles]
        full.valve.open()
        await asyncio.gather(*readers)
        assert order == [0, 1, 2, 3, 4]
        statistics = full.runtime.admission_statistics()
        assert (statistics.overflowed_total, statistics.rejected_total) == (2, {"overflow": 1, "requests": 1})
        for handle in full.handles:
            assert (await read_all(handle)).is_well


async def test_who_has_waited_long_enough_ends_and_the_others_go_on() -> None:
    async with full_queue() as full:
        soon = full.patient(max_queue_s=0.01)
        full.patient()
        assert (await read_all(soon)).end.cause is Cause.QUEUE
        full.handles.remove(soon)
        full.handles.insert(3, full.handles.pop())
        assert full.runtime.admission_statistics().cancelled_total == {"queue": 1}
        full.valve.open()
        for handle in full.handles:
            assert (await read_all(handle)).is_well


async def test_one_that_was_let_in_and_has_no_token_in_time_ends_too_in_the_queue_and_in_its_first_step() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve), limits=ONE_AT_A_TIME) as runtime:
        runs = ask(runtime, [65], params(3, max_queue_s=0.01))
        await valve.step_arrived()
        waits = ask(runtime, [66], params(3, max_queue_s=0.01))
        assert (await read_all(waits)).end.cause is Cause.QUEUE
        assert (await read_all(runs)).end.cause is Cause.QUEUE
        valve.open()
        await all_blocks_back(runtime)


@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
async def test_who_leaves_while_it_waits_leaves_nothing_behind(how: str) -> None:
    async with full_queue() as full:
        leaves = full.patient(timeout_s=0.01 if how == "deadline" else None)
        full.handles.remove(leaves)
        if how == "disconnect":
            full.runtime.abandon(leaves.stream_id)
        else:
            if how == "cancel":
                full.runtime.cancel(leaves.stream_id, Cause.CLIENT)
                full.runtime.cancel(leaves.stream_id, Cause.CLIENT)
            end = (await read_all(leaves)).end
            assert end.cause is (Cause.CLIENT if how == "cancel" else Cause.TIMEOUT)
        assert full.runtime.admission_statistics().num_overflow == 0
        full.patient()  # there is room again
        await full.finish()


async def test_its_deadline_goes_on_when_it_is_let_in() -> None:
    async with full_queue() as full:
        late = full.patient(max_tokens=1000, timeout_s=0.05)
        full.handles.remove(late)
        for handle in full.handles:
            full.runtime.cancel(handle.stream_id, Cause.CLIENT)
        await eventually(lambda: not full.runtime.is_overflowed(late.stream_id))
        assert (await read_all(late)).end.cause is Cause.TIMEOUT
        full.valve.open()
        await all_blocks_back(full.runtime)


async def test_the_timers_of_a_stream_go_with_it() -> None:
    async with full_queue() as full:
        gate = full.runtime._actors["gate"]
        full.patient(timeout_s=LONG_S)
        left = full.patient(timeout_s=LONG_S)
        full.handles.remove(left)
        assert len(gate.waiting()[2]) == 4
        full.runtime.abandon(left.stream_id)
        assert len(gate.waiting()[2]) == 2
        await full.finish()
        assert gate.waiting()[2] == []
        assert not gate._timers_of


async def test_a_drain_ends_those_who_wait_for_room_at_once_and_lets_the_others_finish() -> None:
    async with full_queue() as full:
        waits = full.patient()
        full.handles.remove(waits)
        drain = asyncio.create_task(full.runtime.drain(LONG_S))
        assert (await read_all(waits)).end.cause is Cause.DRAIN
        assert not drain.done()
        await full.finish()
        await drain


async def test_a_drain_that_takes_too_long_ends_also_those_on_their_way_to_the_engine() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        handles = [ask(runtime, prompt, params(100)) for prompt in ([65], "text", [66])]  # the engine has not turned
        await runtime.drain(0.0)
        assert {(await read_all(handle)).end.cause for handle in handles} == {Cause.DRAIN}


async def test_closing_ends_those_who_wait_for_room() -> None:
    async with full_queue() as full:
        waits = full.patient()
        reader = asyncio.create_task(read_all(waits))
        full.valve.open()
        await full.runtime.aclose()
        assert (await reader).end.code == "draining" or (await reader).end.cause is Cause.DRAIN


async def test_each_choice_takes_a_credit() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve), limits=ONE_AT_A_TIME, max_queue=(4, 10_000, 0)) as runtime:
        first = ask(runtime, [65], params(2, n=3))
        with pytest.raises(EngineOverloaded, match="3 requests are waiting"):
            ask(runtime, [66], params(2, n=2))
        assert runtime.num_queued == 3
        second = ask(runtime, [67], params(2))
        valve.open()
        found = await read_all(first)
        assert [found.tokens_of(choice) for choice in range(3)] == [expected([65], 2)] * 3
        assert (await read_all(second)).is_well
        await eventually(lambda: runtime.num_queued == 0)


async def test_what_a_text_was_thought_to_hold_is_settled_when_it_is_tokenised() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve), limits=ONE_AT_A_TIME, max_queue=(10, 100, 10)) as runtime:
        runs = ask(runtime, [65], params(2))
        await valve.step_arrived()
        waits = ask(runtime, "x" * 60, params(2))  # thought to be 21 tokens, and the byte tokenizer makes 60
        await eventually(lambda: runtime.admission_statistics().num_queued_tokens == 60)
        with pytest.raises(EngineOverloaded, match="60 prompt tokens are waiting"):
            ask(runtime, [65] * 50)
        valve.open()
        for handle in (runs, waits):
            assert (await read_all(handle)).is_well


# ---- readers that stay away ----------------------------------------------------------------


async def test_a_reader_that_stays_away_loses_its_request_and_the_others_never_notice() -> None:
    async with running(timeouts=Timeouts(stall_timeout_s=0.05)) as runtime:
        slow = ask(runtime, [65], params(1800))
        await eventually(lambda: slow.state == "STALLED")
        others = [ask(runtime, [70 + i], params(50)) for i in range(5)]
        for at, handle in enumerate(others):
            assert (await read_all(handle)).token_ids == expected([70 + at], 50)
        await eventually(lambda: slow.state == "CLOSED")
        await all_blocks_back(runtime)
        await eventually(lambda: runtime._engine.num_streams == 0)
        found = await read_all(slow)
        assert found.end.code == "stalled"
        assert found.token_ids == expected([65], len(found.token_ids))
        (record,) = runtime.incidents.records()
        assert (record.kind, record.requests) == ("stall", ["request"])


async def test_a_reader_that_comes_back_before_gets_all_of_it_as_often_as_it_likes() -> None:
    async with running(timeouts=Timeouts(stall_timeout_s=LONG_S)) as runtime:
        slow = ask(runtime, [65], params(1800))
        tokens: list[int] = []
        while len(tokens) < 1800:
            await eventually(lambda: slow.state in ("STALLED", "CLOSED"))
            delta = slow.read_nowait()
            tokens += delta.token_ids  # type: ignore[union-attr]
        assert tokens == expected([65], 1800)
        statistics = runtime.admission_statistics()
        assert (statistics.num_stalled, statistics.stalls_total) == (0, 3)
