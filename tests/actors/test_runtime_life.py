"""An engine's actors come up, serve, and go down, whoever closes them and whenever."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any

import pytest

from novainfer.actors.device.fake import ByteTokenizer, FakeDevice
from novainfer.actors.runtime import Runtime
from novainfer.fsm.messages.errors import EngineClosed, ModelLoadError
from novainfer.fsm.messages.events import CancelRequest, Cause, Departed, Fault, Incident, Output, Outputs
from novainfer.fsm.messages.params import NUM_CHOICES_MAX
from novainfer.fsm.schedule.lifetimes import PARKED_PER_SLOT
from novainfer.fsm.schedule.planner import Limits
from tests.actors.helpers import (
    WAIT_S,
    Valve,
    all_blocks_back,
    answer,
    ask,
    eventually,
    expected,
    make_runtime,
    params,
    read_all,
    running,
)
from tests.leftovers import other_tasks


class FailingDevice(FakeDevice):
    """Fails in one of its jobs."""

    def __init__(self, job: str, error: BaseException) -> None:
        super().__init__()
        self._job = job
        self._error = error

    def load(self, precision: str | None = None) -> dict[str, Any]:
        return self._maybe("load", super().load(precision))

    def fit(self, num_blocks: int | None = None, *, is_new: bool = False) -> dict[str, Any]:
        return self._maybe("fit", super().fit(num_blocks, is_new=is_new))

    def warm(self, *, measures: bool = True) -> None:
        self._maybe("warm", None)

    def _maybe(self, job: str, value: Any) -> Any:
        if job == self._job:
            raise self._error
        return value


class SlowDevice(FakeDevice):
    """Loads when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_load = threading.Event()
        self.is_loading = threading.Event()

    def load(self, precision: str | None = None) -> dict[str, Any]:
        self.is_loading.set()
        assert self.may_load.wait(WAIT_S)
        return super().load(precision)


def fail_to_load() -> ByteTokenizer:
    raise ModelLoadError("cannot load a tokenizer from nowhere", param="tokenizer")


async def test_a_full_life() -> None:
    device = FakeDevice()
    runtime = make_runtime(device)
    assert not runtime.is_ready
    ready = await runtime.start()
    assert ready.num_blocks == 4096
    assert runtime.is_ready
    found = await answer(runtime, "hello")
    assert found.is_well
    assert found.token_ids == expected("hello", 8)
    assert "".join(delta.text for delta in found.deltas) == bytes(expected("hello", 8)).decode()
    await all_blocks_back(runtime)
    await runtime.aclose()
    assert device.is_closed
    assert not runtime.is_ready
    assert other_tasks() == set()


async def test_many_streams_at_once_get_their_own_tokens() -> None:
    async with running() as runtime:
        prompts = [f"prompt number {i}" for i in range(150)]
        found = await asyncio.gather(*(answer(runtime, prompt, params(12)) for prompt in prompts))
        assert [f.token_ids for f in found] == [expected(prompt, 12) for prompt in prompts]
        await all_blocks_back(runtime)


@pytest.mark.parametrize("job", ["load", "fit", "warm"])
async def test_a_device_that_fails_to_come_up_says_why_in_one_sentence(
    job: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = FailingDevice(job, RuntimeError("there is a hole in the disk"))
    runtime = make_runtime(device)
    with pytest.raises(ModelLoadError, match=r"^RuntimeError: there is a hole in the disk$"):
        await runtime.start()
    assert caplog.messages == []  # who has started it is told
    assert [record.kind for record in runtime.incidents.records()] == ["gave_up"]
    assert device.is_closed
    assert other_tasks() == set()


async def test_an_error_that_novainfer_wrote_is_told_as_it_is() -> None:
    runtime = make_runtime(FailingDevice("load", ModelLoadError("model x is a file")))
    with pytest.raises(ModelLoadError, match=r"^model x is a file$"):
        await runtime.start()


async def test_a_tokenizer_that_fails_to_load_ends_the_start() -> None:
    runtime = make_runtime(load_tokenizer=fail_to_load)
    with pytest.raises(ModelLoadError, match=r"^cannot load a tokenizer from nowhere$"):
        await runtime.start()
    assert other_tasks() == set()


async def test_a_tokenizer_of_the_wrong_kind_ends_the_start_with_the_kind_of_its_error() -> None:
    def load() -> ByteTokenizer:
        raise KeyError("Ġ")

    runtime = make_runtime(load_tokenizer=load)
    with pytest.raises(ModelLoadError, match="KeyError: 'Ġ'"):
        await runtime.start()


async def test_both_failing_is_one_error_the_devices() -> None:
    """A damaged folder fails both, and the reader of the weights knows better what is wrong."""
    runtime = make_runtime(FailingDevice("load", OSError("no disk")), load_tokenizer=fail_to_load)
    with pytest.raises(ModelLoadError, match="no disk"):
        await runtime.start()
    assert other_tasks() == set()


async def test_nothing_is_let_in_before_it_is_ready() -> None:
    device = SlowDevice()
    runtime = make_runtime(device)
    start = asyncio.create_task(runtime.start())
    await asyncio.to_thread(device.is_loading.wait, WAIT_S)
    with pytest.raises(EngineClosed):
        ask(runtime, "hello")
    device.may_load.set()
    await start
    assert (await answer(runtime, "hello")).is_well
    await runtime.aclose()


async def test_closing_before_the_start_does_nothing() -> None:
    runtime = make_runtime()
    await runtime.aclose()
    await runtime.start()  # it was not used up
    assert (await answer(runtime, "hello")).is_well
    await runtime.aclose()


async def test_draining_before_the_start_does_nothing() -> None:
    runtime = make_runtime()
    await runtime.drain(1.0)
    await runtime.start()
    assert (await answer(runtime, "hello")).is_well
    await runtime.aclose()


async def test_closing_twice_and_from_several_tasks_at_once_is_closing_once() -> None:
    runtime = make_runtime()
    await runtime.start()
    await asyncio.gather(*(asyncio.create_task(runtime.aclose()) for _ in range(5)))
    await runtime.aclose()
    assert other_tasks() == set()


async def test_closing_from_another_task_while_it_loads_ends_the_start_with_an_error() -> None:
    device = SlowDevice()
    runtime = make_runtime(device)
    start = asyncio.create_task(runtime.start())
    await asyncio.to_thread(device.is_loading.wait, WAIT_S)
    close = asyncio.create_task(runtime.aclose())
    device.may_load.set()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(EngineClosed, match="closed while it was starting"):
            await start
        await close
    assert device.is_closed
    assert other_tasks() == set()


async def test_closing_while_the_tokenizer_loads() -> None:
    is_loading, may_load = threading.Event(), threading.Event()

    def load() -> ByteTokenizer:
        is_loading.set()
        assert may_load.wait(WAIT_S)
        return ByteTokenizer()

    runtime = make_runtime(load_tokenizer=load)
    start = asyncio.create_task(runtime.start())
    await asyncio.to_thread(is_loading.wait, WAIT_S)
    close = asyncio.create_task(runtime.aclose())
    await asyncio.sleep(0)
    may_load.set()
    with pytest.raises(EngineClosed):
        await start
    await close
    assert other_tasks() == set()


async def test_the_caller_cancelled_while_it_starts_leaves_nothing() -> None:
    device = SlowDevice()
    runtime = make_runtime(device)
    start = asyncio.create_task(runtime.start())
    await asyncio.to_thread(device.is_loading.wait, WAIT_S)
    start.cancel()
    await asyncio.sleep(0)
    device.may_load.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert device.is_closed
    assert other_tasks() == set()


@pytest.mark.parametrize("cancel_while", ["device loads", "tokenizer loads"])
def test_the_whole_loop_ending_while_it_starts_leaves_nothing(cancel_while: str) -> None:
    device = SlowDevice()
    may_go = threading.Event()

    def load() -> ByteTokenizer:
        assert may_go.wait(WAIT_S)
        return ByteTokenizer()

    async def main() -> None:
        runtime = make_runtime(device, load_tokenizer=load)
        start = asyncio.create_task(runtime.start())
        await asyncio.to_thread(device.is_loading.wait, WAIT_S)
        if cancel_while == "device loads":
            may_go.set()
            await eventually(lambda: runtime._scheduler is not None)
        assert not start.done()
        # asyncio.run now cancels every task there is, the root task among them.
        asyncio.get_running_loop().call_later(0.01, device.may_load.set)
        asyncio.get_running_loop().call_later(0.01, may_go.set)

    asyncio.run(main())


async def test_closing_waits_for_the_step_on_the_device_and_then_frees_it() -> None:
    valve = Valve()
    device = FakeDevice(on_step=valve)
    runtime = make_runtime(device)
    await runtime.start()
    reader = asyncio.create_task(answer(runtime, "hello"))
    await valve.step_arrived()
    close = asyncio.create_task(runtime.aclose())
    found = await reader  # the reader need not wait for the step
    assert found.end.code == "draining"
    assert not close.done()
    assert not device.is_closed
    valve.open()
    await close
    assert device.is_closed


async def test_closing_does_not_wait_for_prompts_in_the_tokenizers_queue() -> None:
    started, go = threading.Event(), threading.Event()
    tokenized: list[int] = []

    class Slow(ByteTokenizer):
        def encode_batch(self, prompts: Any) -> Any:
            started.set()
            assert go.wait(WAIT_S)
            tokenized.append(len(prompts))
            return super().encode_batch(prompts)

    runtime = make_runtime(tokenizer=Slow())
    await runtime.start()
    readers = [asyncio.create_task(answer(runtime, f"{i}")) for i in range(500)]
    await asyncio.to_thread(started.wait, WAIT_S)
    close = asyncio.create_task(runtime.aclose())
    await asyncio.wait(readers)
    go.set()
    await close
    assert sum(tokenized) < 200
    assert {reader.result().end.code for reader in readers} == {"draining"}


async def test_a_device_that_cannot_be_closed_is_told_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(FakeDevice):
        def close(self) -> None:
            raise OSError("it will not let go")

    async with running(Stuck()) as runtime:
        assert (await answer(runtime, "hello")).is_well
    assert caplog.messages == ["the device could not be closed: OSError: it will not let go"]
    assert other_tasks() == set()


async def test_after_it_was_closed_it_refuses_politely() -> None:
    runtime = make_runtime()
    await runtime.start()
    await runtime.aclose()
    with pytest.raises(EngineClosed):
        ask(runtime, "hello")
    runtime.cancel(0, Cause.CLIENT)
    runtime.abandon(0)
    await runtime.drain(0.0)
    assert {actor.state for actor in runtime.actors()} == {"DEAD"}


async def test_two_systems_in_one_loop_do_not_meet() -> None:
    async with running() as one, running() as two:
        a, b = await asyncio.gather(answer(one, "abc"), answer(two, "xyz"))
        assert a.token_ids == expected("abc", 8)
        assert b.token_ids == expected("xyz", 8)
        await one.aclose()
        assert (await answer(two, "still")).token_ids == expected("still", 8)


def test_it_can_be_made_outside_the_loop_that_it_will_live_on() -> None:
    runtime = make_runtime()

    async def live(runtime: Runtime) -> list[int]:
        await runtime.start()
        try:
            return (await answer(runtime, "abc")).token_ids
        finally:
            await runtime.aclose()

    assert asyncio.run(live(runtime)) == expected("abc", 8)


async def test_what_was_computed_before_the_close_can_still_be_read() -> None:
    valve = Valve()
    runtime = make_runtime(FakeDevice(on_step=valve))
    await runtime.start()
    handle = ask(runtime, [65])
    valve.let(3)
    for _ in range(4):
        await valve.step_arrived()
    close = asyncio.create_task(runtime.aclose())
    valve.open()
    await close
    found = await read_all(handle)
    assert found.token_ids == expected([65], 3)
    assert found.end.code == "draining"


async def test_a_drain_ends_with_the_last_stream() -> None:
    async with running() as runtime:
        reader = asyncio.create_task(answer(runtime, "last", params(5)))
        await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):
            await runtime.drain(timeout_s=100 * WAIT_S)
        assert (await reader).is_well


async def test_what_is_urgent_waits_on_the_control_lane() -> None:
    async with running() as runtime:
        late = CancelRequest(0, Cause.CLIENT)
        for urgent in (False, True):
            runtime._route("scheduler", late, urgent)
        assert runtime._actors["scheduler"].waiting() == ([late], [late], [])


async def test_what_finds_no_room_in_a_mailbox_is_a_bug_that_is_told() -> None:
    async with running() as runtime:
        gate = runtime._actors["gate"]
        gate._limit = 0
        with pytest.raises(AssertionError, match="the mailbox of gate is full"):
            runtime._route("gate", Departed([]), False)
        gate.close()
        runtime._route("gate", Departed([]), False)  # whoever is dead hears nothing, and the system stops already


async def test_streams_are_told_one_after_the_other_in_turns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that of the worker, which was asked for before: the device begins first. Readers are next."""
    async with running() as runtime:
        told: list[Any] = []
        monkeypatch.setattr(runtime._streams, "take", lambda outputs: told.append(outputs.outputs))
        runtime._turns.ask(lambda: told.append("the worker") or 1)  # type: ignore[func-returns-value]
        outputs: list[list[Any]] = [[Output(i, i, 0, [], "")] for i in range(2)]
        for each in outputs:
            runtime._route("streams", Outputs(each), False)
        asyncio.get_running_loop().call_soon(told.append, "readers")
        assert told == []
        await eventually(lambda: len(told) == 4)
        assert told == ["the worker", outputs[0], "readers", outputs[1]]
        monkeypatch.undo()


async def test_an_incident_of_the_worker_touches_all_that_it_computes() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        for name in ("one", "two"):
            runtime.add(name, [65], params(4), 0)
        await valve.step_arrived()
        for stream_ids in ([], [1]):
            incident = Incident(kind=Fault.LOST, message="gone", action="none", stream_ids=stream_ids)
            runtime._route("incidents", incident, False)
        whole, single = runtime.incidents.records()
        assert (whole.requests, single.requests) == (["one", "two"], ["two"])


class Planned(deque[tuple[int, int, float]]):
    """Remembers of which steps it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.step_ids: list[int] = []

    def append(self, item: tuple[int, int, float]) -> None:
        self.step_ids.append(item[0])
        super().append(item)


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_each_step_is_noted_when_it_is_asked_for_planned_launched_and_handed_on(max_in_flight: int) -> None:
    async with running(max_in_flight=max_in_flight) as runtime:
        planned = runtime.steps._planned = Planned()
        await answer(runtime, "abc", params(6))
        await eventually(lambda: runtime.steps.totals().outputs[1] >= 6)
        records = runtime.last_steps(10)
        assert planned.step_ids == [record.step_id for record in records]
        asked = [record.time - record.schedule_us / 1e6 for record in records]
        assert asked == sorted(set(asked))
        assert all(record.outputs_us is not None for record in records[:6])


async def test_a_drain_ends_though_an_actor_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("novainfer.actors.runtime.DRAIN_GRACE_S", 0.01)
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        handle = ask(runtime, [65], params(3))
        await valve.step_arrived()
        runtime._actors["scheduler"].freeze()
        await runtime.drain(0.0)
        assert not handle.is_over  # nothing has ended it
        valve.open()
        runtime._actors["scheduler"].thaw()


def test_mailboxes_have_room_for_every_request_that_may_be_there() -> None:
    limits = Limits(max_num_seqs=4)
    runtime = make_runtime(limits=limits, max_queue=(1, 100))
    num_streams = 1 + (2 + PARKED_PER_SLOT) * limits.max_num_seqs
    assert runtime._mailbox_limit >= 2 * NUM_CHOICES_MAX * num_streams
