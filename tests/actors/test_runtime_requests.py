"""Admission, cancel and deadlines, with the steps of a fake device in the test's hand."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from novainfer.actors.device.fake import FakeDevice, successor
from novainfer.actors.runtime import Runtime
from novainfer.fsm.client.drain import RETRY_AFTER_S_DEFAULT, RETRY_AFTER_S_MAX
from novainfer.fsm.messages.errors import EngineOverloaded
from novainfer.fsm.messages.events import Cancel, Cause
from novainfer.fsm.schedule.planner import Limits
from tests.actors.helpers import (
    WAIT_S,
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

ONE_AT_A_TIME = Limits(
    max_num_seqs=1, max_num_batched_tokens=64, prefill_chunk_tokens=64, block_size=16, enable_prefix_caching=False
)

# ---- four messages a step ----------------------------------------------------------------


def count_messages(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what the actors tell each other from now on, by the kind of message."""
    counted: Counter[str] = Counter()
    take = runtime._streams.take

    def counted_take(event: Any) -> None:
        counted["to streams"] += 1
        take(event)

    listen(runtime, monkeypatch, lambda event: counted.update([type(event).__name__]))
    monkeypatch.setattr(runtime._streams, "take", counted_take)
    return counted


def listen(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, hear: Callable[[Any], None]) -> None:
    """Have `hear` called with each message that is put into a mailbox."""

    def heard(tell: Callable[[Any, bool], bool], event: Any, urgent: bool = False) -> bool:
        hear(event)
        return tell(event, urgent)

    for actor in runtime._actors.values():
        monkeypatch.setattr(actor, "tell", partial(heard, actor.tell))


@pytest.mark.parametrize("batch", [1, 8, 60])
async def test_a_step_is_four_messages_and_one_of_outputs_whatever_the_batch(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        readers = [asyncio.create_task(answer(runtime, [65 + i % 26], params(1000))) for i in range(batch)]
        valve.let(8)
        for _ in range(9):  # all prompts are in, every stream decodes
            await valve.step_arrived()
        assert len(valve.plans[-1].slots) == batch
        steps_before = len(valve.plans)
        counted = count_messages(runtime, monkeypatch)
        valve.let(10)
        for _ in range(10):
            await valve.step_arrived()
        assert len(valve.plans) == steps_before + 10
        # StepDone is told twice: by the device's thread to the worker, and by the worker to the engine.
        assert counted == {"StepDone": 20, "MakeBatch": 10, "Batch": 10, "Launch": 10, "to streams": 10}
        for reader in readers:
            reader.cancel()
        valve.open()
        await asyncio.wait(readers)


async def test_the_next_step_is_sent_off_before_readers_hear_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    async with running() as runtime:
        take = runtime._streams.take
        listen(runtime, monkeypatch, lambda event: order.append(type(event).__name__))
        monkeypatch.setattr(runtime._streams, "take", lambda event: (order.append("outputs"), take(event)))
        await answer(runtime, [65], params(3))
    steps = [what for what in order if what in ("Launch", "outputs")]
    assert steps[:6] == ["Launch", "Launch", "outputs", "Launch", "outputs", "outputs"]


# ---- admission ----------------------------------------------------------------


async def test_a_full_queue_is_an_answer_with_the_time_to_wait() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve), limits=ONE_AT_A_TIME, max_queue=(3, 10_000)) as runtime:
        readers = [asyncio.create_task(answer(runtime, [65], params(2)))]
        await valve.step_arrived()
        readers += [asyncio.create_task(answer(runtime, [70 + i], params(2))) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloaded, match="the queue is full: 3 requests are waiting") as refused:
            ask(runtime, [99])
        assert refused.value.retry_after_s == RETRY_AFTER_S_DEFAULT
        valve.open()
        found = await asyncio.gather(*readers)
        assert all(f.is_well for f in found)
        assert (await answer(runtime, [99])).is_well


async def test_a_queue_full_of_prompt_tokens_is_full() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve), max_queue=(100, 50)) as runtime:
        first = asyncio.create_task(answer(runtime, [65] * 500, params(1)))  # one is always let in
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloaded, match="500 prompt tokens are waiting"):
            ask(runtime, [66])
        valve.open()
        assert (await first).is_well
        assert (await answer(runtime, [66])).is_well


async def test_a_refused_stream_leaves_nothing_behind() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve), max_queue=(1, 100)) as runtime:
        handle = ask(runtime, [65])
        for _ in range(50):
            with pytest.raises(EngineOverloaded):
                ask(runtime, [66])
        assert len(runtime._streams) == 1
        valve.open()
        assert (await read_all(handle)).is_well
        assert len(runtime._streams) == 0


class Costly(FakeDevice):
    """Says that a step takes half a second, and a millisecond more for each token."""

    def warm(self, *, measures: bool = True) -> dict[str, Any]:  # type: ignore[override]
        return {"step_costs": [(1, 501.0), (64, 564.0)]}


async def test_before_anything_has_left_the_queue_retry_after_is_worked_out_of_what_steps_cost() -> None:
    valve = Valve()
    async with running(Costly(on_step=valve), limits=ONE_AT_A_TIME, max_queue=(3, 10_000)) as runtime:
        readers = [asyncio.create_task(answer(runtime, [65], params(2)))]
        await valve.step_arrived()
        readers += [asyncio.create_task(answer(runtime, [70 + i] * 64, params(2))) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloaded) as refused:
            ask(runtime, [99])
        assert refused.value.retry_after_s == RETRY_AFTER_S_MAX, "three answers of 128 tokens come first"
        assert runtime._scheduler is not None
        runtime._scheduler.answer_tokens = 2.0
        with pytest.raises(EngineOverloaded) as refused:
            ask(runtime, [99])
        assert refused.value.retry_after_s == pytest.approx(3 * 0.564 + 3 * 2 * 0.501)
        valve.open()
        await asyncio.gather(*readers)


async def test_retry_after_is_the_time_the_queue_takes_to_drain_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve), limits=ONE_AT_A_TIME, max_queue=(1000, 10_000)) as runtime:
        now_s = 1000.0
        monkeypatch.setattr(runtime._admission, "_clock", lambda: now_s)
        readers = [asyncio.create_task(answer(runtime, [65], params(1))) for _ in range(40)]
        await valve.step_arrived()
        # One stream a step and one step every two seconds: half a stream a second leaves the queue.
        for _ in range(9):
            now_s += 2.0
            valve.let()
            await valve.step_arrived()
        now_s += 2.0
        assert runtime.num_queued == 30
        assert runtime.retry_after_s() == pytest.approx(60.0, rel=0.15)
        # What it did ten minutes ago says nothing about now.
        now_s += 600.0
        assert runtime.retry_after_s() == RETRY_AFTER_S_DEFAULT
        valve.open()
        await asyncio.gather(*readers)


def test_retry_after_has_bounds() -> None:
    assert 0 < RETRY_AFTER_S_DEFAULT < RETRY_AFTER_S_MAX <= 120


# ---- cancel in each state ----------------------------------------------------------------


async def test_cancelled_before_the_engine_has_seen_it() -> None:
    async with running() as runtime:
        handle = ask(runtime, "hello")
        runtime.cancel(handle.stream_id, Cause.CLIENT)
        found = await read_all(handle)
        assert (found.token_ids, found.end.cause) == ([], Cause.CLIENT)
        await eventually(lambda: runtime.num_queued == 0)
        await all_blocks_back(runtime)


async def test_cancelled_at_the_tokenizer() -> None:
    async with running() as runtime:
        handle = ask(runtime, "hello")
        await eventually(lambda: runtime._engine._encoding)
        runtime.cancel(handle.stream_id, Cause.CLIENT)
        assert (await read_all(handle)).end.cause is Cause.CLIENT
        await all_blocks_back(runtime)
        assert (await answer(runtime, "next")).is_well


async def test_cancelled_while_it_waits_for_its_first_step() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        running_one = asyncio.create_task(answer(runtime, [65], params(3)))
        await valve.step_arrived()
        waiting = ask(runtime, [66])
        scheduler = runtime._scheduler
        assert scheduler is not None
        await eventually(lambda: scheduler.statistics().num_waiting == 1)
        runtime.cancel(waiting.stream_id, Cause.CLIENT)
        assert (await read_all(waiting)).end.cause is Cause.CLIENT  # though the device is still busy
        valve.open()
        assert (await running_one).token_ids == expected([65], 3)
        await all_blocks_back(runtime)
        assert all(66 not in plan.input_ids[:1] for plan in valve.plans[:1])


async def test_cancelled_while_it_is_on_the_device_it_ends_at_once_and_its_blocks_follow_with_the_step() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        other = asyncio.create_task(answer(runtime, [90], params(30)))
        handle = ask(runtime, [65] * 100, params(1000))
        valve.let(5)
        for _ in range(6):
            await valve.step_arrived()
        scheduler = runtime._scheduler
        assert scheduler is not None
        steps = len(valve.plans)
        runtime.cancel(handle.stream_id, Cause.CLIENT)
        found = await read_all(handle)
        assert found.end.cause is Cause.CLIENT
        assert scheduler.statistics().blocks.num_owned >= 7  # the step may still write into them
        valve.let()
        await valve.step_arrived()
        assert scheduler.statistics().blocks.num_owned <= 3
        assert all(len(plan.slots) == 1 for plan in valve.plans[steps:])
        valve.open()
        assert (await other).token_ids == expected([90], 30)
        await all_blocks_back(runtime)


async def test_cancelled_while_its_reader_is_slow() -> None:
    async with running() as runtime:
        handle = ask(runtime, [65], params(1500))
        await eventually(lambda: handle.state == "STALLED")
        runtime.cancel(handle.stream_id, Cause.CLIENT)
        found = await read_all(handle)
        assert found.end.cause is Cause.CLIENT
        assert found.token_ids == expected([65], len(found.token_ids))
        await all_blocks_back(runtime)


async def test_cancelling_after_the_end_and_twice_is_harmless() -> None:
    async with running() as runtime:
        handle = ask(runtime, [65])
        assert (await read_all(handle)).is_well
        for cause in (Cause.CLIENT, Cause.DISCONNECT):
            runtime.cancel(handle.stream_id, cause)
        other = ask(runtime, [66], params(100))
        runtime.cancel(other.stream_id, Cause.CLIENT)
        runtime.cancel(other.stream_id, Cause.CLIENT)
        assert (await read_all(other)).end.cause is Cause.CLIENT
        assert (await answer(runtime, [67])).is_well
        await all_blocks_back(runtime)


async def test_cancelling_one_of_many_touches_nobody_else() -> None:
    async with running() as runtime:
        handles = [ask(runtime, [65 + i], params(60)) for i in range(20)]
        tasks = [asyncio.create_task(read_all(handle)) for handle in handles]
        for _ in range(5):
            await asyncio.sleep(0)
        for handle in handles[::3]:
            runtime.cancel(handle.stream_id, Cause.CLIENT)
        found = await asyncio.gather(*tasks)
        assert {f.end.cause for f in found[::3]} == {Cause.CLIENT}
        for i, f in enumerate(found):
            assert f.token_ids == expected([65 + i], 60 if i % 3 else len(f.token_ids))
        await all_blocks_back(runtime)


async def test_a_reader_that_leaves_frees_everything_and_is_forgotten() -> None:
    async with running() as runtime:
        handles = [ask(runtime, [65 + i], params(1000)) for i in range(10)]
        for _ in range(20):
            await asyncio.sleep(0)
        for handle in handles:
            runtime.abandon(handle.stream_id)
        assert len(runtime._streams) == 0
        await all_blocks_back(runtime)


async def test_all_choices_of_a_cancelled_stream_end() -> None:
    async with running() as runtime:
        handle = ask(runtime, [65], params(1000, n=5))
        for _ in range(20):
            await asyncio.sleep(0)
        runtime.cancel(handle.stream_id, Cause.CLIENT)
        found = await read_all(handle)
        assert found.end.cause is Cause.CLIENT
        await all_blocks_back(runtime)
        assert runtime._engine.num_streams == 0


# ---- deadlines ----------------------------------------------------------------


async def test_a_deadline_ends_a_request_that_runs() -> None:
    hold = threading.Event()

    def on_step(plan: Any) -> None:
        if plan.context_lens[0] == 100:
            assert hold.wait(WAIT_S)

    async with running(FakeDevice(on_step=on_step)) as runtime:
        found = await answer(runtime, [65], params(2000, timeout_s=0.05))
        hold.set()
        assert found.end.cause is Cause.TIMEOUT
        assert found.token_ids == expected([65], len(found.token_ids))
        await all_blocks_back(runtime)


async def test_a_deadline_counts_the_time_in_the_queue() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        first = asyncio.create_task(answer(runtime, [65], params(2)))
        await valve.step_arrived()
        found = await answer(runtime, [66], params(2, timeout_s=0.01))  # the device is held: it cannot begin
        assert (found.end.cause, found.token_ids) == (Cause.TIMEOUT, [])
        valve.open()
        assert (await first).is_well
        await all_blocks_back(runtime)


async def test_a_deadline_that_comes_after_the_end_is_harmless() -> None:
    async with running() as runtime:
        handle = ask(runtime, [65], params(2, timeout_s=3600.0))
        assert (await read_all(handle)).is_well
        runtime._tell("engine", Cancel(handle.stream_id, Cause.TIMEOUT), True)  # what the timer would say
        assert (await answer(runtime, [66])).is_well
        await all_blocks_back(runtime)


def test_the_fake_device_goes_round_in_printable_bytes() -> None:
    assert [successor(i) for i in (31, 32, 125, 126)] == [32, 33, 126, 32]
