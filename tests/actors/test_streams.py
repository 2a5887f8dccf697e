"""A reader gets what its stream has, wakes once a batch, and leaves no trace when it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from novainfer.actors.core.streams import StreamHandle, Streams
from novainfer.fsm.client.stream import STALL_TOKENS_HIGH
from novainfer.fsm.messages.events import (
    Cancel,
    Cause,
    End,
    Finished,
    Incident,
    Output,
    Outputs,
    Pause,
    Resume,
    StallOver,
    Stop,
)
from novainfer.fsm.messages.outputs import Delta, FinishReason
from tests.actors.helpers import eventually


class Desk:
    """Streams, and what they asked of the engine."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.streams = Streams(self._route, stall_timeout_s=0.0)

    def _route(self, to: str, event: Any, urgent: bool) -> None:
        if to == "streams":
            self.streams.take(event)
        else:
            self.asked.append(event)

    def give(self, *outputs: Output) -> None:
        self.streams.take(Outputs(list(outputs)))


def output(stream_id: int, *token_ids: int, choice: int = 0, end: End | None = None) -> Output:
    return Output(stream_id, stream_id, choice, list(token_ids), "".join(map(chr, token_ids)), end=end)


STOP = End(finish_reason=FinishReason.STOP)
FAILED = End(error="no luck")


@pytest.fixture
def desk() -> Desk:
    return Desk()


def open_stream(desk: Desk, stream_id: int = 1, num_choices: int = 1) -> StreamHandle:
    return desk.streams.add(stream_id, "name", num_choices)


async def test_reading_waits_for_a_delta_and_then_for_the_end(desk: Desk) -> None:
    handle = open_stream(desk)
    reader = asyncio.create_task(handle.read())
    await asyncio.sleep(0)
    assert not reader.done()
    desk.give(output(1, 65))
    first = await reader
    assert isinstance(first, Delta)
    assert (first.text, first.request_id) == ("A", "name")
    desk.give(output(1, 66, end=STOP))
    last = await handle.read()
    assert isinstance(last, Delta)
    assert last.finish_reason is FinishReason.STOP
    assert isinstance(await handle.read(), Finished)
    assert handle.is_over
    assert len(desk.streams) == 0


def test_polling_gives_nothing_when_there_is_nothing(desk: Desk) -> None:
    handle = open_stream(desk)
    assert handle.read_nowait() is None
    assert not handle.has_deltas
    desk.give(output(1, 65))
    assert handle.has_deltas
    assert isinstance(handle.read_nowait(), Delta)
    assert handle.read_nowait() is None


async def test_a_bad_end_comes_after_what_was_not_read(desk: Desk) -> None:
    handle = open_stream(desk)
    desk.give(output(1, 65), output(1, end=FAILED))
    assert isinstance(await handle.read(), Delta)
    assert await handle.read() == FAILED
    assert not handle.ended_well


async def test_a_stop_ends_every_stream_and_wakes_every_reader(desk: Desk) -> None:
    handles = [open_stream(desk, i) for i in range(3)]
    readers = [asyncio.create_task(handle.read()) for handle in handles]
    await asyncio.sleep(0)
    desk.streams.take(Stop("lightning"))
    ends = await asyncio.gather(*readers)
    assert [end.error for end in ends if isinstance(end, End)] == ["lightning"] * 3


async def test_a_cancelled_reader_may_be_followed_by_another(desk: Desk) -> None:
    handle = open_stream(desk)
    reader = asyncio.create_task(handle.read())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    desk.give(output(1, 65))
    assert isinstance(await handle.read(), Delta)


async def test_a_delta_that_comes_while_its_reader_is_cancelled_is_not_lost(desk: Desk) -> None:
    handle = open_stream(desk)
    reader = asyncio.create_task(handle.read())
    await asyncio.sleep(0)
    desk.give(output(1, 65))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    found = await handle.read()
    assert isinstance(found, Delta)
    assert found.token_ids == [65]


def collecting(taken: list[Delta], *, most: int = 1000) -> Callable[[Delta], bool]:
    """A function that reads, until it has so many."""

    def take(delta: Delta) -> bool:
        taken.append(delta)
        return len(taken) < most

    return take


async def test_a_function_that_reads_has_each_delta_when_all_streams_have_taken_the_step(desk: Desk) -> None:
    first, second = open_stream(desk, 1, num_choices=2), open_stream(desk, 2)
    seen: list[tuple[str, bool]] = []

    def take(delta: Delta) -> bool:
        seen.append((delta.text, second.has_deltas))
        return True

    reader = asyncio.create_task(first.forward(take))
    await asyncio.sleep(0)
    desk.give(output(1, 65), output(2, 66), output(1, 67, choice=1))
    assert seen == [("A", True), ("C", True)]
    assert not first.has_deltas
    desk.give(output(1, 68, end=STOP))
    await asyncio.sleep(0)
    assert not reader.done()  # the other choice
    desk.give(output(1, 69, choice=1, end=STOP))
    assert [text for text, _ in seen[2:]] == ["D", "E"]
    await reader
    assert isinstance(await first.read(), Finished)


async def test_a_function_that_reads_has_what_was_there_before_and_ends_where_nothing_comes(desk: Desk) -> None:
    handle, taken = open_stream(desk), list[Delta]()
    desk.give(output(1, 65), output(1, 66))
    reader = asyncio.create_task(handle.forward(collecting(taken)))
    await asyncio.sleep(0)
    assert [delta.text for delta in taken] == ["AB"]
    desk.give(output(1, 67), output(1, end=FAILED))
    await reader
    assert [delta.text for delta in taken] == ["AB", "C"]
    assert await handle.read() == FAILED
    await handle.forward(collecting(taken))  # again is fine
    assert len(taken) == 2


async def test_what_comes_behind_a_refusal_is_there_to_read(desk: Desk) -> None:
    handle, taken = open_stream(desk), list[Delta]()
    reader = asyncio.create_task(handle.forward(collecting(taken, most=1)))
    await asyncio.sleep(0)
    desk.give(output(1, 65))
    desk.give(output(1, 66))
    await reader
    desk.give(output(1, 67))
    assert [delta.text for delta in taken] == ["A"]
    assert (await handle.read()).text == "BC"  # type: ignore[union-attr]


async def test_what_a_function_that_reads_raises_is_its_own_streams_business(desk: Desk) -> None:
    def fail(delta: Delta) -> bool:
        raise ValueError(delta.text)

    handles, taken = [open_stream(desk, 1), open_stream(desk, 2)], list[Delta]()
    readers = [asyncio.create_task(h.forward(t)) for h, t in zip(handles, (fail, collecting(taken)), strict=True)]
    await asyncio.sleep(0)
    desk.give(output(1, 65), output(2, 66))
    with pytest.raises(ValueError, match="A"):
        await readers[0]
    desk.give(output(1, 67), output(2, 68, end=STOP))
    await readers[1]
    assert [delta.text for delta in taken] == ["B", "D"]
    assert (await handles[0].read()).text == "C"  # type: ignore[union-attr]


async def test_a_function_that_has_failed_is_given_nothing_more(desk: Desk) -> None:
    taken: list[str] = []

    def fail(delta: Delta) -> bool:
        taken.append(delta.text)
        raise ValueError(delta.text)

    handle = open_stream(desk)
    reader = asyncio.create_task(handle.forward(fail))
    await asyncio.sleep(0)
    desk.give(output(1, 65))
    desk.give(output(1, 66))  # before the task has heard of it
    with pytest.raises(ValueError, match="A"):
        await reader
    assert taken == ["A"]
    assert (await handle.read()).text == "B"  # type: ignore[union-attr]


async def test_a_cancelled_task_loses_nothing_and_leaves_no_function_in_its_place(desk: Desk) -> None:
    handle, taken = open_stream(desk), list[Delta]()
    reader = asyncio.create_task(handle.forward(collecting(taken)))
    await asyncio.sleep(0)
    reader.cancel()
    desk.give(output(1, 65))  # before the task has heard of it
    with pytest.raises(asyncio.CancelledError):
        await reader
    desk.give(output(1, 66))
    assert [delta.text for delta in taken] == ["A"]
    assert (await handle.read()).text == "B"  # type: ignore[union-attr]


async def test_a_function_that_leaves_while_it_reads_leaves_the_others_what_is_theirs(desk: Desk) -> None:
    handle, other, taken = open_stream(desk, 1), open_stream(desk, 2), list[Delta]()

    def leave(delta: Delta) -> bool:
        readers[0].cancel()
        return True

    readers = [asyncio.create_task(one.forward(take)) for one, take in ((handle, leave), (other, collecting(taken)))]
    await asyncio.sleep(0)
    desk.give(output(1, 65), output(2, 66))
    with pytest.raises(asyncio.CancelledError):
        await readers[0]
    assert [delta.text for delta in taken] == ["B"]
    readers[1].cancel()


async def test_a_stop_wakes_who_has_left_a_function_in_its_place(desk: Desk) -> None:
    handle, taken = open_stream(desk), list[Delta]()
    reader = asyncio.create_task(handle.forward(collecting(taken)))
    await asyncio.sleep(0)
    desk.streams.take(Stop("lightning"))
    await reader
    found = await handle.read()
    assert isinstance(found, End)
    assert found.error == "lightning"


async def test_two_readers_of_one_stream_are_a_programmers_error(desk: Desk) -> None:
    handle = open_stream(desk)
    reader = asyncio.create_task(handle.read())
    await asyncio.sleep(0)
    with pytest.raises(AssertionError, match="one reader"):
        await handle.read()
    reader.cancel()


async def test_a_waiting_reader_wakes_once_for_a_batch_of_outputs(desk: Desk) -> None:
    handle = open_stream(desk)
    reader = asyncio.create_task(handle.read())
    await asyncio.sleep(0)
    desk.give(*(output(1, 65 + i) for i in range(10)))
    found = await reader
    assert isinstance(found, Delta)
    assert found.text == "ABCDEFGHIJ"


def test_outputs_of_a_stream_that_was_forgotten_go_nowhere(desk: Desk) -> None:
    open_stream(desk)
    desk.streams.forget(1)
    desk.streams.forget(1)
    desk.give(output(1, 65), output(77, 65))
    assert len(desk.streams) == 0


async def test_a_reader_that_does_not_keep_up_pauses_its_stream_and_reading_resumes_it(desk: Desk) -> None:
    handle = open_stream(desk)
    desk.give(output(1, *[65] * (STALL_TOKENS_HIGH + 1)))
    assert desk.asked == [Pause(1)]
    assert handle.state == "STALLED"
    assert isinstance(handle.read_nowait(), Delta)
    assert desk.asked == [Pause(1), Resume(1)]
    assert handle.state == "OPEN"


async def test_choices_are_read_one_at_a_time_oldest_first(desk: Desk) -> None:
    handle = open_stream(desk, num_choices=2)
    desk.give(output(1, 66, choice=1), output(1, 65, choice=0), output(1, 67, choice=1))
    first, second = await handle.read(), await handle.read()
    assert isinstance(first, Delta)
    assert isinstance(second, Delta)
    assert [(first.index, first.text), (second.index, second.text)] == [(1, "BC"), (0, "A")]


# ---- stalls ----------------------------------------------------------------


def stall(desk: Desk, stream_id: int = 1) -> None:
    """More than its reader may leave unread."""
    desk.give(output(stream_id, *[65] * (STALL_TOKENS_HIGH + 1)))


async def test_a_stall_that_lasts_ends_the_stream_once_and_its_reader_finds_everything(desk: Desk) -> None:
    handle = open_stream(desk)
    stall(desk)
    assert desk.streams.num_stalled == 1
    await eventually(lambda: len(desk.asked) == 3)
    pause, cancel, incident = desk.asked
    assert (pause, cancel) == (Pause(1), Cancel(1, Cause.STALLED))
    assert isinstance(incident, Incident)
    delta, end = await handle.read(), await handle.read()
    assert isinstance(delta, Delta)
    assert len(delta.token_ids) == STALL_TOKENS_HIGH + 1
    assert isinstance(end, End)
    assert end.code == "stalled"
    assert (desk.streams.num_stalled, len(desk.streams), desk.streams.stalls_total) == (0, 0, 1)


@pytest.mark.parametrize("way", ["read", "leave", "stop"])
async def test_the_timer_of_a_stall_dies_with_it(desk: Desk, way: str) -> None:
    handle = open_stream(desk)
    stall(desk)
    assert desk.streams.timers() == [StallOver(1)]
    if way == "read":
        await handle.read()
    elif way == "leave":
        desk.streams.forget(1)
    else:
        desk.streams.take(Stop())
    assert desk.streams.timers() == []
    for _ in range(5):  # it would be due
        await asyncio.sleep(0)
    assert not any(isinstance(event, Cancel) for event in desk.asked)


async def test_what_ended_before_its_time_is_counted_by_cause(desk: Desk) -> None:
    desk.give(output(1, end=End(cause=Cause.QUEUE)), output(2, end=End(cause=Cause.QUEUE)), output(3, end=STOP))
    assert desk.streams.cancelled_total == {"queue": 2}
