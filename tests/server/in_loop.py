"""API processes that are none: each is a task of the test's own loop, at the other end of a real link."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from novainfer.server.processes.process import ApiServer
from novainfer.server.processes.supervisor import Running


class InLoop:
    """One of them; `pid` tells them apart."""

    last_pid = 0

    def __init__(self, link: socket.socket, listening: socket.socket) -> None:
        InLoop.last_pid += 1
        self.pid = InLoop.last_pid
        self._link = link.dup()
        self.server = ApiServer(listening.dup())
        self._task = asyncio.create_task(self.server.run(self._link))

    def kill(self) -> None:
        self._task.cancel()

    async def wait(self) -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({self._task})
        return 0


async def start_in_loop(link: socket.socket, listening: socket.socket) -> Running:
    """In the place of `start_process`."""
    return InLoop(link, listening)
