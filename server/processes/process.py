"""An API process: takes connections from a listening socket, speaks HTTP on them, and forwards what is asked for.

    python -P -m novainfer.server.processes.process LINK LISTENING      (two inherited descriptors)

It ends when it is told to, and when the engine's process is gone, whether its loop turns or not. Signals that a service
manager or a terminal sends to every process are for the engine's, which ends this one when its answers are out.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from novainfer.server.http.front import LocalFront
from novainfer.server.http.listen import FLUSH_TIMEOUT_S, raise_descriptor_limit
from novainfer.server.logs import set_up_logging
from novainfer.server.loop import loop_factory
from novainfer.server.processes.forward import Forward
from novainfer.server.processes.link import Link
from novainfer.server.processes.wire import (
    BEAT_S,
    Abort,
    Answers,
    Beat,
    Close,
    Hello,
    LinkError,
    Listening,
    Renewed,
    to_process,
)
from novainfer.server.settings import LogSettings, ServerSettings

log = logging.getLogger("novainfer.server")

HELLO_TIMEOUT_S = 60.0
PARENT_LOOK_S = 1.0  # between looks at whether the engine's process is there
ORPHAN_S = 2 * FLUSH_TIMEOUT_S + 2.0  # without it: as long as the end takes, and some more
EXIT_ORPHAN = 70  # EX_SOFTWARE: its loop stood still
QUIET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ApiServer:
    """One process's HTTP: `run` serves on the socket it was given until the link says so, or ends."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._forward = Forward()
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._front: LocalFront | None = None

    async def run(self, link_sock: socket.socket) -> None:
        """Serve, and leave nothing open."""
        link = await Link.on(link_sock, to_process(), self._take)
        either: set[asyncio.Future[Any]] = {self._hello, link.lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED, timeout=HELLO_TIMEOUT_S)
        try:
            if self._hello.done() and not link.lost.done():
                await self._serve(link, self._hello.result())
        finally:
            link.end("it ends")
            self._listening.close()

    async def _serve(self, link: Link, hello: Hello) -> None:
        _log_as(hello)
        self._forward.over(link)
        certificate = (pem.chain, pem.key) if (pem := hello.certificate) is not None else None
        settings = ServerSettings(**hello.settings)
        front = self._front = LocalFront(self._forward, settings, self._listening, certificate)

        def on_listening() -> None:
            front.count_descriptors()
            link.send(Listening())

        http = asyncio.create_task(front.run(on_listening, self._closing))
        beats = asyncio.create_task(self._beat(link, front))
        lost = asyncio.create_task(self._until_lost(link))
        try:
            await asyncio.wait({http, lost}, return_when=asyncio.FIRST_COMPLETED)
            self._closing.set()
            await asyncio.wait({http}, timeout=FLUSH_TIMEOUT_S)
            front.abort_connections()  # of clients that do not read what is there for them
            await asyncio.wait({http}, timeout=FLUSH_TIMEOUT_S)
        finally:
            for task in (http, beats, lost):
                task.cancel()
            await asyncio.gather(beats, lost, return_exceptions=True)
        if http.done():
            http.result()

    async def _until_lost(self, link: Link) -> None:
        await asyncio.wait({link.lost})
        self._forward.lose()

    async def _beat(self, link: Link, front: LocalFront) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + BEAT_S, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())
            lag_s = max(time.monotonic() - due_s, 0.0)
            link.send(Beat(len(front.connections), lag_s, time.process_time()))

    def _take(self, message: Any) -> None:
        match message:
            case Answers():
                self._forward.take(message)
            case Close():
                self._closing.set()
            case Abort() if self._front is not None:
                self._front.abort_connections()
            case Renewed(pem) if self._front is not None:
                self._front.use_certificate((pem.chain, pem.key))
            case Hello() if not self._hello.done():
                self._hello.set_result(message)
            case _:
                raise LinkError(f"a {type(message).__name__} at a time when it means nothing")


def _log_as(hello: Hello) -> None:
    set_up_logging(LogSettings(log_format="json" if hello.logs_json else "text"))
    for name, level in hello.log_levels.items():
        logging.getLogger(name).setLevel(level)


def end_with_parent() -> None:
    """Let this process end `ORPHAN_S` after its parent at the latest, though its loop stands still."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOK_S)
        time.sleep(ORPHAN_S)
        os._exit(EXIT_ORPHAN)

    threading.Thread(target=watch, name="novainfer-parent", daemon=True).start()


def main(link: int, listening: int) -> None:
    """The process's whole life; both are inherited descriptors."""
    end_with_parent()
    for number in QUIET:
        signal.signal(number, signal.SIG_IGN)
    raise_descriptor_limit()
    os.set_inheritable(link, False)
    os.set_inheritable(listening, False)

    async def run() -> None:
        gc.freeze()  # modules stay for good
        await ApiServer(socket.socket(fileno=listening)).run(socket.socket(fileno=link))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
