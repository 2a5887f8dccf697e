"""One TCP connection, whatever it speaks: Hypercorn 0.18's, with ends that are quiet, and on a list that can be asked.

A client may end its connection in any way at any moment: stock Hypercorn knows three of the ways, and the others
(a timeout in the kernel, a route that is gone) reach the log as tracebacks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from ssl import SSLContext
from typing import Any

import hypercorn.asyncio.run
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import AsyncioSingleTask
from hypercorn.config import Config
from hypercorn.events import Closed, Event
from hypercorn.typing import TaskGroup

from novainfer.server.http.errors import TooManyConnections, error_body
from novainfer.server.http.exchange import ADMITTED_KEY, Admitted
from novainfer.server.http.tls import Certificate, as_files

log = logging.getLogger("novainfer.server")

DESCRIPTORS_KEPT = 16  # for what is not a connection: a worker that is started again, a recording
DESCRIPTORS_GUESSED = 64  # where a system does not tell: an engine and its worker take some twenty
WARN_EACH_S = 60.0
LINGER_S = 30.0  # for which a client may still take what was written when its connection ended; asyncio's, of TLS
NO_ROOM = error_body(TooManyConnections("All connections that there is room for (ulimit -n) are busy: try again later"))
NO_ROOM = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"retry-after: 1\r\nconnection: close\r\n\r\n%b" % (len(NO_ROOM), NO_ROOM)
)


class HttpConfig(Config):
    """Hypercorn's configuration, and the connections that live under it: Hypercorn itself keeps no list."""

    def __init__(self, certificate: Certificate | None = None) -> None:
        self.certificate = certificate
        self.connections: set[Connection] = set()
        self.h2_connection_window_bytes = 65_535  # RFC 9113's, until it is told another
        self._warned_s = -math.inf
        self.connections_max: float = math.inf
        self._ssl_context: SSLContext | None = None
        self.count_descriptors()

    @property
    def ssl_enabled(self) -> bool:
        """Whether connections are encrypted."""
        return self.certificate is not None

    def create_ssl_context(self) -> SSLContext | None:
        """As Hypercorn's, which has one for all connections to come; it is kept, so that they can get another chain."""
        if self.certificate is not None:
            with as_files(self.certificate) as (certfile, keyfile):
                self.certfile, self.keyfile = str(certfile), str(keyfile)
                self._ssl_context = super().create_ssl_context()
        return self._ssl_context

    def use_certificate(self, certificate: Certificate) -> None:
        """Give this certificate to connections from now on; those that are open keep theirs.

        It must be one that a context of its own has taken: what OpenSSL refuses half-way would leave this one broken.
        """
        assert self._ssl_context is not None, "a server with TLS has a context"
        with as_files(certificate) as (certfile, keyfile):
            self._ssl_context.load_cert_chain(certfile, keyfile)

    def count_descriptors(self) -> None:
        """See how many connections there may be, from the descriptors that are open for other things now."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY:
            folder = "/proc/self/fd"
            num_open = len(os.listdir(folder)) if os.path.isdir(folder) else DESCRIPTORS_GUESSED
            num_others = num_open - len(self.connections)
            self.connections_max = max(limit - num_others - DESCRIPTORS_KEPT, 1)

    def is_full(self) -> bool:
        """True when there is one connection more than there may be."""
        if len(self.connections) <= self.connections_max:
            return False
        now_s = time.monotonic()
        if now_s - self._warned_s > WARN_EACH_S:
            self._warned_s = now_s
            log.warning(
                "%d connections are open, and file descriptors run out (ulimit -n): idle and unfinished ones are "
                "closed for new ones",
                len(self.connections),
            )
        return True

    def abort_connections(self) -> None:
        """Close all of them now, whatever their clients have not read."""
        for connection in list(self.connections):
            connection.writer.transport.abort()


class Connection(TCPServer):
    """What Hypercorn makes for each connection that it accepts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.idle_task: IdleTimer = IdleTimer()
        self._admitted = Admitted()
        self._began_s = time.monotonic()
        name = self.writer.get_extra_info("peername")
        self.address = str(name[0]) if name else ""  # of its client; looked at for each connection where room is made
        self._is_closing = False
        self._abort: asyncio.TimerHandle | None = None
        self.state = {**self.state, ADMITTED_KEY: self._admitted}

    async def run(self) -> None:
        assert isinstance(self.config, HttpConfig)
        self.config.connections.add(self)
        try:
            if self.config.is_full() and not await self._make_room():
                self._is_closing = True
                self.writer.write(NO_ROOM)
                await self._close()
                return
            await super().run()
        except* OSError:
            pass  # the client has gone, in whatever way: its requests were told
        finally:
            self.config.connections.discard(self)
            if self._abort is not None:
                self._abort.cancel()

    async def _make_room(self) -> bool:
        """Close one that has no request that was let in; False when all have one.

        Of the address that has most connections it is the one that has been idle for longest; where none is idle, the
        oldest one, whose requests are incomplete or refused.
        """
        assert isinstance(self.config, HttpConfig)
        connections = self.config.connections
        closable = [one for one in connections if one is not self and not one._is_closing and one._has_nothing]
        if not closable:
            return False
        number = Counter(one.address for one in connections)

        def rank(one: Connection) -> tuple[int, bool, float]:
            since_s = one.idle_task.since_s
            return -number[one.address], since_s is None, one._began_s if since_s is None else since_s

        first = min(closable, key=rank)
        first._is_closing = True  # the next one that comes closes another, though this one is not gone yet
        if first.idle_task.since_s is not None:
            await first._initiate_server_close()
        else:
            first.writer.transport.abort()
        return True

    @property
    def _has_nothing(self) -> bool:
        """True when it would lose no request that was let in."""
        return not self._admitted.num_requests

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
        except BaseException:
            self.idle_task.end()  # its task group takes no more tasks
            raise

    async def _close(self) -> None:
        self._end_in_time()
        await super()._close()

    async def _initiate_server_close(self) -> None:
        self._end_in_time()
        await super()._initiate_server_close()

    def _end_in_time(self) -> None:
        """Have it end although its client reads nothing: TCP alone would keep what is written, and it, for ever."""
        if self._abort is None:
            self._abort = self.loop.call_later(LINGER_S, self.writer.transport.abort)

    @property
    def is_clear(self) -> bool:
        """True where nothing waits to be written, and the transport takes more."""
        transport = self.writer.transport
        return not (self.send_lock.locked() or transport.is_closing() or transport.get_write_buffer_size())

    def write_now(self, data: bytes) -> bool:
        """Write `data` if nothing waits to be written; False where something does."""
        if not self.is_clear:
            return False
        self.writer.transport.write(data)
        return True

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
        self.since_s: float | None = None  # None while busy; of `time.monotonic`: uvloop's clock has milliseconds

    async def restart(self, task_group: TaskGroup, action: Callable[..., Any]) -> None:
        if not self._is_over:
            self.since_s = time.monotonic()
            await super().restart(task_group, action)

    async def stop(self) -> None:
        self.since_s = None
        await super().stop()

    def end(self) -> None:
        """The connection is over. Not by `stop`, which waits: the timer itself may be what is closing."""
        self._is_over = True
        self.since_s = None
        if self._handle is not None:
            self._handle.cancel()


def connection_of(send: Any) -> Connection:
    """The connection that a protocol's `send` belongs to."""
    connection = getattr(send, "__self__", None)
    assert isinstance(connection, Connection)
    return connection


def install() -> None:
    """Put `Connection` where Hypercorn looks for it; raises `AssertionError` when another is there already."""
    known = hypercorn.asyncio.run.TCPServer in (TCPServer, Connection)  # type: ignore[attr-defined]
    assert known, "Hypercorn's connection was replaced by another"
    hypercorn.asyncio.run.TCPServer = Connection  # type: ignore[attr-defined, assignment]
