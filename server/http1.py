"""Hypercorn 0.18's HTTP/1.1, with one fault less: a connection that the client has closed is closed at once.

Stock Hypercorn waits for its idle timer first: with a keep-alive of 75 s, every `curl` would hold a file descriptor for
75 s, and a hundred of them a second would run out of descriptors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakSet

import hypercorn.protocol
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config
from hypercorn.events import Closed, Event
from hypercorn.protocol.h11 import H11Protocol


class HttpConfig(Config):
    """Hypercorn's configuration, and the connections that live under it: Hypercorn itself keeps no list."""

    def __init__(self) -> None:
        self.connections: WeakSet[TCPServer] = WeakSet()

    def abort_connections(self) -> None:
        """Close all of them now, whatever their clients have not read."""
        for connection in list(self.connections):
            connection.writer.transport.abort()


class Http1(H11Protocol):
    """One HTTP/1.1 connection, or one that does not know yet that it is HTTP/2."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        note_connection(self.config, self.send)

    async def handle(self, event: Event) -> None:
        await super().handle(event)
        if isinstance(event, Closed):
            cancel_idle_timer(self.send)


def _connection_of(send: Callable[[Event], Awaitable[None]]) -> TCPServer:
    connection = getattr(send, "__self__", None)
    assert isinstance(connection, TCPServer)
    return connection


def note_connection(config: Config, send: Callable[[Event], Awaitable[None]]) -> None:
    """Put the connection that `send` belongs to on its list."""
    assert isinstance(config, HttpConfig)
    config.connections.add(_connection_of(send))


def cancel_idle_timer(send: Callable[[Event], Awaitable[None]]) -> None:
    """End the timer of the connection that `send` belongs to, whose task group would wait for it.

    Not by `Updated(idle=False)`, which waits for the timer's end: the timer may be what is closing the connection.
    """
    timer = _connection_of(send).idle_task._handle
    if timer is not None:
        timer.cancel()


def install() -> None:
    """Put `Http1` where Hypercorn looks for its HTTP/1.1; raises `AssertionError` when another is there already."""
    known = hypercorn.protocol.H11Protocol in (H11Protocol, Http1)  # type: ignore[attr-defined]
    assert known, "Hypercorn's HTTP/1.1 was replaced by someone else"
    hypercorn.protocol.H11Protocol = Http1  # type: ignore[attr-defined, assignment]
