"""Hypercorn 0.18's HTTP/1.1, with one fault less: a connection that the client has closed is closed at once.

Stock Hypercorn waits for its idle timer first: with a keep-alive of 75 s, every `curl` would hold a file descriptor for
75 s, and a hundred of them a second would run out of descriptors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import hypercorn.protocol
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Closed, Event
from hypercorn.protocol.h11 import H11Protocol


class Http1(H11Protocol):
    """One HTTP/1.1 connection."""

    async def handle(self, event: Event) -> None:
        await super().handle(event)
        if isinstance(event, Closed):
            cancel_idle_timer(self.send)


def cancel_idle_timer(send: Callable[[Event], Awaitable[None]]) -> None:
    """End the timer of the connection that `send` belongs to, whose task group would wait for it.

    Not by `Updated(idle=False)`, which waits for the timer's end: the timer may be what is closing the connection.
    """
    connection = getattr(send, "__self__", None)
    assert isinstance(connection, TCPServer)
    timer = connection.idle_task._handle
    if timer is not None:
        timer.cancel()


def install() -> None:
    """Put `Http1` where Hypercorn looks for its HTTP/1.1; raises `AssertionError` when another is there already."""
    known = hypercorn.protocol.H11Protocol in (H11Protocol, Http1)  # type: ignore[attr-defined]
    assert known, "Hypercorn's HTTP/1.1 was replaced by someone else"
    hypercorn.protocol.H11Protocol = Http1  # type: ignore[attr-defined]
