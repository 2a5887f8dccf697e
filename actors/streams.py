"""The streams actor exists because readers have their own pace: it owns what each client has not read yet.

One batched Outputs message comes per step; each output goes to its stream's machine, and a reader that waits is woken
at most once. `StreamHandle` is what a reader holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from novainfer.fsm.events import End, Finished, Outputs, Read, Stop
from novainfer.fsm.machine import Send
from novainfer.fsm.outputs import Delta
from novainfer.fsm.stream import Stream, StreamState


class StreamHandle:
    """One stream's reading end; for one reader at a time."""

    __slots__ = ("_forget", "_route", "_stream", "_waiter", "is_over")

    def __init__(self, stream: Stream, route: Callable[[str, Any, bool], None], forget: Callable[[int], None]) -> None:
        self._stream = stream
        self._route = route
        self._forget = forget
        self._waiter: asyncio.Future[None] | None = None
        self.is_over = False

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
        found: Delta | Finished | End | None = None
        for effect in self._stream.handle(Read()):
            assert isinstance(effect, Send)
            if effect.to == "reader":
                found = effect.event
            else:
                self._route(effect.to, effect.event, effect.urgent)
        if isinstance(found, Finished | End):
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

    def wake(self) -> None:
        """Wake the reader, if one waits."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Streams:
    """All open streams. `take` is the actor's way to hand it a message."""

    def __init__(
        self, route: Callable[[str, Any, bool], None], gone: Callable[[Stream], None] = lambda stream: None
    ) -> None:
        self._route = route
        self._gone = gone  # hears of each stream that is forgotten
        self._streams: dict[int, tuple[Stream, StreamHandle]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream_id: int, name: str, num_choices: int) -> StreamHandle:
        """Open a stream; `name` is the request id its deltas carry."""
        stream = Stream(stream_id, name, num_choices)
        handle = StreamHandle(stream, self._route, self.forget)
        self._streams[stream_id] = (stream, handle)
        return handle

    def find(self, stream_id: int) -> Stream | None:
        """The stream, unless it is forgotten."""
        entry = self._streams.get(stream_id)
        return entry[0] if entry is not None else None

    def name_of(self, stream_id: int) -> tuple[str, str] | None:
        """The request id of a stream, and its owner; None when it is forgotten."""
        entry = self._streams.get(stream_id)
        return (entry[0].name, "") if entry is not None else None

    def forget(self, stream_id: int) -> None:
        """Nobody will read this stream (any more); its outputs, if more come, go nowhere."""
        entry = self._streams.pop(stream_id, None)
        if entry is not None:
            self._gone(entry[0])

    def take(self, event: Any) -> None:
        """Outputs of a step, or the stop of everything."""
        if isinstance(event, Stop):
            for stream, handle in list(self._streams.values()):
                stream.handle(event)
                handle.wake()
            return
        assert isinstance(event, Outputs)
        streams, route = self._streams, self._route
        for output in event.outputs:
            entry = streams.get(output.stream_id)
            if entry is None:  # its reader has left
                continue
            stream, handle = entry
            for effect in stream.handle(output):
                route(effect.to, effect.event, effect.urgent)  # type: ignore[union-attr]
            waiter = handle._waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
