"""One TCP connection, whatever it speaks: Hypercorn 0.18's, with ends that are quiet, and on a list that can be asked.

A client may end its connection in any way at any moment: stock Hypercorn knows three of the ways, and the others
(a timeout in the kernel, a route that is gone) reach the log as tracebacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypercorn.asyncio.run
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import AsyncioSingleTask
from hypercorn.config import Config
from hypercorn.events import Closed, Event
from hypercorn.typing import TaskGroup


class HttpConfig(Config):
    """Hypercorn's configuration, and the connections that live under it: Hypercorn itself keeps no list."""

    def __init__(self) -> None:
        self.connections: set[Connection] = set()

    def abort_connections(self) -> None:
        """Close all of them now, whatever their clients have not read."""
        for connection in list(self.connections):
            connection.writer.transport.abort()


class Connection(TCPServer):
    """What Hypercorn makes for each connection that it accepts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.idle_task: IdleTimer = IdleTimer()

    async def run(self) -> None:
        assert isinstance(self.config, HttpConfig)
        self.config.connections.add(self)
        try:
            await super().run()
        except* OSError:
            pass  # the client has gone, in whatever way: its requests were told
        finally:
            self.config.connections.discard(self)

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
        except BaseException:
            self.idle_task.end()  # its task group takes no more tasks
            raise

    async def protocol_send(self, event: Event) -> None:
        try:
            await super().protocol_send(event)
        except OSError:
            await self.protocol.handle(Closed())


class IdleTimer(AsyncioSingleTask):
    """Closes a connection without a request; the connection's task group waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._is_over = False

    async def restart(self, task_group: TaskGroup, action: Callable[..., Any]) -> None:
        if not self._is_over:
            await super().restart(task_group, action)

    def end(self) -> None:
        """The connection is over. Not by `stop`, which waits: the timer itself may be what is closing."""
        self._is_over = True
        if self._handle is not None:
            self._handle.cancel()


def end_idle_timer(send: Any) -> None:
    """End the timer of the connection that a protocol's `send` belongs to."""
    connection = getattr(send, "__self__", None)
    assert isinstance(connection, Connection)
    connection.idle_task.end()


def install() -> None:
    """Put `Connection` where Hypercorn looks for it; raises `AssertionError` when another is there already."""
    known = hypercorn.asyncio.run.TCPServer in (TCPServer, Connection)  # type: ignore[attr-defined]
    assert known, "Hypercorn's connection was replaced by another"
    hypercorn.asyncio.run.TCPServer = Connection  # type: ignore[attr-defined, assignment]
