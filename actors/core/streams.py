"""The streams actor exists because readers have their own pace: it owns what each client has not read yet.

One batched Outputs message comes per step; each output goes to its stream's machine. A reader is a task that waits, and
is woken at most once; or a function that it has left in its place (`StreamHandle.forward`), which is given what is new
when all streams have taken the step: a task's turn a token costs more than the token's way to the socket. To the
machine both are the same: outputs, then reads. A stream has one timer, which dies with its stall.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from novainfer.fsm.client.stream import STALL_TIMEOUT_S, Stream, StreamState
from novainfer.fsm.core.machine import After, Drop, Effect, Send
from novainfer.fsm.messages.events import End, Finished, Output, Outputs, Read, StallOver, Stop
from novainfer.fsm.messages.outputs import Delta
from novainfer.fsm.recording.log import read_code

if TYPE_CHECKING:
    from novainfer.actors.inspection.recorder import Recorder
    from novainfer.fsm.recording.log import Codes


READ = Read()
Moved = Callable[[Stream, StreamState, Any], None]  # hears of a stream that an event took from a state to another


class StreamHandle:
    """One stream's reading end; for one reader at a time."""

    __slots__ = (
        "_forget",
        "_log",
        "_moved",
        "_perform",
        "_read_code",
        "_stream",
        "_take",
        "_waiter",
        "is_over",
        "prompt_field",
    )

    def __init__(
        self,
        stream: Stream,
        perform: Callable[[Stream, Sequence[Effect]], None],
        forget: Callable[[int], None],
        moved: Moved,
    ) -> None:
        self._stream = stream
        self._perform = perform
        self._forget = forget
        self._moved = moved
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[Delta], bool] | None = None  # what reads in the place of the task that waits
        self._log: bytearray | None = None  # the recorder's
        self._read_code = read_code(stream.stream_id)
        self.is_over = False
        self.prompt_field = "prompt"  # what the client calls its prompt

    @property
    def stream_id(self) -> int:
        """The stream's id inside the engine."""
        return self._stream.stream_id

    @property
    def state(self) -> StreamState:
        """Whether the reader keeps up."""
        return self._stream.state

    @property
    def has_deltas(self) -> bool:
        """True when there is something to read before the end."""
        return self._stream.num_choices_unread > 0

    @property
    def ended_well(self) -> bool:
        """True once every choice has its finish reason."""
        return self._stream.ended_well

    def read_nowait(self) -> Delta | Finished | End | None:
        """What is new: a delta, the good end, the bad end, or None when there is nothing yet."""
        effects = self._stream.handle(READ)
        if not effects:  # a look that finds nothing changes nothing
            return None
        if self._log is not None:
            self._log += self._read_code
        first = effects[0]
        if len(effects) == 1 and type(first) is Send and type(first.event) is Delta:  # as mostly
            return first.event
        found: Delta | Finished | End | None = None
        more: list[Effect] = []
        for effect in effects:
            if type(effect) is Send and effect.to == "reader":
                found = effect.event
            else:
                more.append(effect)
        if more:
            if self._stream.state is StreamState.OPEN:  # all that a read leads to: its reader has caught up
                self._moved(self._stream, StreamState.STALLED, READ)
            self._perform(self._stream, more)
        if found is not None and type(found) is not Delta:
            self.is_over = True
            self._forget(self._stream.stream_id)
        return found

    async def read(self) -> Delta | Finished | End:
        """Wait for what is new."""
        stream = self._stream
        while not stream.has_news:  # asked first: most reads of a reader that keeps up find nothing yet
            assert self._waiter is None, "a stream has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        found = self.read_nowait()
        assert found is not None, "there was news"
        return found

    async def forward(self, take: Callable[[Delta], bool]) -> None:
        """Give each delta to `take` in the turn in which it comes, until it answers False, or none will come.

        What is there then is there to `read`. An exception of `take` is raised here.
        """
        if not self._give(take):
            return
        assert self._waiter is None, "a stream has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        self._take = take
        try:
            await self._waiter
        finally:
            self._waiter = self._take = None

    def push(self) -> None:
        """Give what is new to the function that reads, if one does; its task is woken for what that does not take."""
        take = self._take
        if take is None:
            return
        try:
            if self._give(take):
                return
        except Exception as error:
            self._take = None
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
        else:
            self._take = None
            self.wake()

    def _give(self, take: Callable[[Delta], bool]) -> bool:
        """All that is new; False where `take` wants no more of it, or nothing will come."""
        stream = self._stream
        for _ in range(stream.num_choices_unread):
            delta = self.read_nowait()
            assert type(delta) is Delta, "ends come behind all that is unread"
            if not take(delta):
                return False
        return stream.state is not StreamState.CLOSED

    def wake(self) -> None:
        """Wake the reader, if one waits."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Streams:
    """All open streams. `take` is the actor's way to hand it a message."""

    def __init__(
        self,
        route: Callable[[str, Any, bool], None],
        gone: Callable[[Stream], None] = lambda stream: None,
        *,
        died: Callable[[Exception], None] = lambda error: None,
        moved: Moved = lambda stream, before, event: None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self._route = route
        self._moved = moved
        self._died = died  # hears of an exception that no caller would hear of
        self._stall_timeout_s = stall_timeout_s
        self._timers: dict[int, tuple[asyncio.TimerHandle, StallOver]] = {}
        self.cancelled_total: Counter[str] = Counter()  # choices ended before their time, by cause
        self.stalls_total = 0
        self._gone = gone  # hears of each stream that is forgotten
        self._streams: dict[int, tuple[Stream, StreamHandle]] = {}
        self._to_push: list[StreamHandle] = []  # that have something new, for a function that reads
        self._recorder: Recorder | None = None
        self._codes: Codes | None = None
        self._direct: Codes | None = None  # of what comes from no mailbox: timers
        self._took: Callable[[list[Output]], None]  # while there are codes

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream_id: int, name: str, num_choices: int) -> StreamHandle:
        """Open a stream; `name` is the request id its deltas carry."""
        stream = Stream(stream_id, name, num_choices, stall_timeout_s=self._stall_timeout_s)
        handle = StreamHandle(stream, self._perform, self.forget, self._moved)
        if self._recorder is not None:
            self._recorder.adds(stream, not self._streams)
            handle._log = self._recorder.log if self._recorder is not None else None
        self._streams[stream_id] = (stream, handle)
        return handle

    def find(self, stream_id: int) -> Stream | None:
        """The stream, unless it is forgotten."""
        entry = self._streams.get(stream_id)
        return entry[0] if entry is not None else None

    def forget(self, stream_id: int) -> None:
        """This stream will not be read (any more); its outputs, if more come, go nowhere."""
        entry = self._streams.pop(stream_id, None)
        if entry is not None:
            self._stop_timer(stream_id)
            self._gone(entry[0])
            if self._recorder is not None:
                self._recorder.forgot(stream_id)

    def record(self, recorder: Recorder | None) -> None:
        """Write all that the streams take, and every read, to `recorder` from now on; None: no more."""
        self._recorder = recorder
        self._codes = self._direct = None
        if recorder is not None and recorder.recording is not None:
            self._codes = recorder.lane("streams", False)
            self._direct = recorder.lane("streams", None)
            self._took = recorder.recording.took
        for _, handle in self._streams.values():
            handle._log = recorder.log if recorder is not None else None

    def machines(self) -> dict[int, Stream]:
        """The machines of the streams that are open, by id."""
        return {stream_id: stream for stream_id, (stream, _) in self._streams.items()}

    def take(self, event: Any) -> None:
        """Outputs of a step, or the stop of everything."""
        self._take_recorded(event, self._codes)
        if self._to_push:  # behind all of it: a reader's next event must not be recorded before this one
            to_push, self._to_push = self._to_push, []
            for handle in to_push:
                handle.push()

    def _take_recorded(self, event: Any, codes: Codes | None) -> None:
        recorder = self._recorder
        if recorder is None or codes is None:
            self._take(event)
            return
        if type(event) is Outputs:
            try:
                self._took(event.outputs)
            except Exception as error:
                recorder.give_up(error)
        try:
            self._take(event)
        except Exception as error:
            recorder.raised(codes, "", event, error)
            raise
        recorder.log.extend(codes[type(event), ""])

    def _take(self, event: Any) -> None:
        if isinstance(event, Stop):
            for stream, handle in list(self._streams.values()):
                self._handle(stream, event)
                handle.wake()
            return
        streams, to_push = self._streams, self._to_push
        if isinstance(event, StallOver):
            if event.stream_id in streams:
                stream, handle = streams[event.stream_id]
                self._handle(stream, event)
                handle.wake()
            return
        assert isinstance(event, Outputs)
        for output in event.outputs:
            if output.end is not None and output.end.cause is not None:
                self.cancelled_total[output.end.cause] += 1
            entry = streams.get(output.stream_id)
            if entry is None:  # its reader has left
                continue
            stream, handle = entry
            before = stream.state
            if effects := stream.handle(output):
                self._perform(stream, effects)
            if stream.state is not before:
                self._moved(stream, before, output)
            if handle._take is not None:
                to_push.append(handle)
                continue
            waiter = handle._waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def _handle(self, stream: Stream, event: StallOver | Stop) -> None:
        before = stream.state
        self._perform(stream, stream.handle(event))
        if stream.state is not before:
            self._moved(stream, before, event)

    def _perform(self, stream: Stream, effects: Sequence[Effect]) -> None:
        """What concerns others than the reader. Only a stream that stalls, or did, has such effects."""
        for effect in effects:
            if type(effect) is Send:
                self._route(effect.to, effect.event, effect.urgent)
            elif type(effect) is After:
                self._set_timer(stream.stream_id, effect)
            elif type(effect) is Drop:
                self._stop_timer(stream.stream_id)

    def _set_timer(self, stream_id: int, effect: After) -> None:
        self.stalls_total += stream_id not in self._timers
        self._stop_timer(stream_id)
        timer = asyncio.get_running_loop().call_later(effect.delay_s, self._fire, effect.event)
        self._timers[stream_id] = (timer, effect.event)

    def _stop_timer(self, stream_id: int) -> None:
        found = self._timers.pop(stream_id, None)
        if found is not None:
            found[0].cancel()

    def _fire(self, event: StallOver) -> None:
        """Taken at once, before what waits for the streams: so there is no time in which its stall could end."""
        del self._timers[event.stream_id]
        codes = self._direct
        if self._recorder is not None and codes is not None:
            self._recorder.called(codes, event)
        try:
            self._take_recorded(event, codes)
        except Exception as error:
            self._died(error)

    def timers(self) -> list[StallOver]:
        """The events of the timers that are set."""
        return [event for _, event in self._timers.values()]

    @property
    def num_stalled(self) -> int:
        """Streams whose readers are slow."""
        return len(self._timers)
