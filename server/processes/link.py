"""One end of the Unix socket between an API process and the engine's: messages in, batches out, once a turn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from novainfer.server.processes.wire import FrameReader, LinkError, frame


class Link(asyncio.Protocol):
    """An open socket; `on_message` may raise `LinkError`, which ends it. `lost` becomes the reason for its end."""

    def __init__(self, reader: FrameReader[Any], on_message: Callable[[Any], None]) -> None:
        self._reader = reader
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._free: asyncio.Future[None] | None = None  # while the other end does not read
        self._is_due = False
        self._take_batch: Callable[[], Any] = lambda: None
        self.lost: asyncio.Future[str] = self._loop.create_future()

    @classmethod
    async def on(cls, sock: socket.socket, reader: FrameReader[Any], on_message: Callable[[Any], None]) -> Link:
        """A link over `sock`, which it takes over."""
        link = cls(reader, on_message)
        await link._loop.create_unix_connection(lambda: link, sock=sock)
        return link

    def batches(self, take: Callable[[], Any]) -> None:
        """`take` gives what there is to send once a turn that had something to say is over; None: nothing."""
        self._take_batch = take

    def send(self, message: Any) -> None:
        """Put a message on its way; over a link that has ended it goes nowhere."""
        if self._transport is not None and not self.lost.done():
            self._transport.write(frame(message))

    def has_more(self) -> None:
        """There is something for the batch: it goes when all that is ready now has had its turn."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._turn_is_over)

    def flush(self) -> None:
        """Send the batch now."""
        self._is_due = False
        if (batch := self._take_batch()) is not None:
            self.send(batch)

    def _turn_is_over(self) -> None:
        if self._is_due:  # else the turn said so much that it went already
            self.flush()

    async def until_free(self) -> None:
        """Wait while the other end does not read what it was sent."""
        while self._free is not None and not self.lost.done():
            await asyncio.wait([self._free])

    def end(self, why: str) -> None:
        """End it at once, because of `why`."""
        if not self.lost.done():
            self.lost.set_result(why)
        self._go_on()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's knows no base of asyncio's

    def data_received(self, data: bytes) -> None:
        if self.lost.done():
            return
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
                if self.lost.done():
                    return
        except LinkError as error:
            self.end(f"it sent {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.end("it closed its link")

    def pause_writing(self) -> None:
        if self._free is None:
            self._free = self._loop.create_future()

    def resume_writing(self) -> None:
        self._go_on()

    def _go_on(self) -> None:
        if self._free is not None:
            self._free.set_result(None)
            self._free = None
