"""Where HTTP is spoken: in this process's loop, or in others that forward to it (`novainfer.server.processes`)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence, Sized
from typing import Protocol

import hypercorn.asyncio
import msgspec
from starlette.types import ASGIApp

from novainfer.server.http import connection, http1, http2
from novainfer.server.http.listen import hypercorn_config
from novainfer.server.http.tls import Certificate
from novainfer.server.settings import ServerSettings


class ApiProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process that speaks HTTP: `pid` is 0 while there is none; `cpu_s` and `lag_s` are what it says of itself."""

    index: int
    state: str
    pid: int
    num_connections: int
    num_requests: int
    num_losses: int
    lag_s: float
    cpu_s: float


class Front(Protocol):
    """What stands between clients and an app."""

    @property
    def connections(self) -> Sized:
        """Those that are open."""

    @property
    def has_failed(self) -> bool:
        """True when it serves no client any more, though the server did not stop."""

    async def run(self, on_listening: Callable[[], None], closing: asyncio.Event) -> None:
        """Serve until it is time for `closing`, then take no more connections, and end with those that are open."""

    def abort_connections(self) -> None:
        """Close the connections that are left, whatever their clients have not read."""

    def use_certificate(self, certificate: Certificate) -> None:
        """Give this certificate, which was read and checked, to connections to come."""

    def count_descriptors(self) -> None:
        """See how many connections there may be, now that all else is open."""

    def processes(self) -> Sequence[ApiProcessRecord]:
        """Those that it has beside this one."""


class LocalFront:
    """HTTP in this loop, on one socket that listens, which it takes over."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, sock: socket.socket, certificate: Certificate | None
    ) -> None:
        self._app = app
        self.config = hypercorn_config(settings, sock, certificate)

    @property
    def connections(self) -> Sized:
        return self.config.connections

    @property
    def has_failed(self) -> bool:
        return False

    async def run(self, on_listening: Callable[[], None], closing: asyncio.Event) -> None:
        """As `Front.run`."""
        for protocol in (connection, http1, http2):
            protocol.install()

        async def until_closed() -> None:
            on_listening()
            await closing.wait()

        await hypercorn.asyncio.serve(self._app, self.config, shutdown_trigger=until_closed)  # type: ignore[arg-type]

    def abort_connections(self) -> None:
        self.config.abort_connections()

    def use_certificate(self, certificate: Certificate) -> None:
        self.config.use_certificate(certificate)

    def count_descriptors(self) -> None:
        self.config.count_descriptors()

    def processes(self) -> Sequence[ApiProcessRecord]:
        return ()
