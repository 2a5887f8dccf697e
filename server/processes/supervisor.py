"""The API processes of a server, from the engine's process: each place has a listening socket, and a process or none.

The sockets share one port (SO_REUSEPORT), and the kernel spreads connections over them by a hash of their addresses.
They stay open here for as long as their places are used: when a process is lost, connections that it had not accepted
wait in its socket, and the next process takes them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence, Sized
from typing import Any, Protocol

from starlette.types import ASGIApp

from novainfer.fsm.client.api_process import (
    CONNECT_LIMIT_S,
    ApiProcess,
    ApiProcessState,
    Begin,
    Connected,
    Drain,
    End,
    GiveUp,
    Lost,
    Overdue,
    Shut,
    Spawn,
)
from novainfer.fsm.core.machine import After, Drop, Start
from novainfer.server.http.front import ApiProcessRecord
from novainfer.server.http.listen import FLUSH_TIMEOUT_S
from novainfer.server.http.tls import Certificate
from novainfer.server.logs import is_json
from novainfer.server.processes.link import Link
from novainfer.server.processes.requests import Beginnings, Requests
from novainfer.server.processes.wire import (
    Abort,
    Asks,
    Beat,
    Close,
    Hello,
    LinkError,
    Listening,
    Pem,
    Renewed,
    from_process,
)
from novainfer.server.settings import ServerSettings

log = logging.getLogger("novainfer.server")

PROGRAM = "novainfer.server.processes.process"
SILENCE_S = 10.0  # without a sign of life, of four a second: a loop that stands still serves nothing
ABORT_TIMEOUT_S = 2.0  # for its end, after the connections that are left have been closed
LOOK_S = 1.0  # between looks at that
LOGGERS = ("novainfer", "novainfer.http", "novainfer.access")
SETTINGS = (  # what listening is told
    *("backlog", "keep_alive_timeout_s", "http2_max_concurrent_streams", "http2_initial_connection_window_size"),
)


class Running(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    async def wait(self) -> int: ...


class ApiProcesses:
    """All of them; `run` lives from their start until the server stops, and leaves none behind."""

    def __init__(
        self,
        settings: ServerSettings,
        app: ASGIApp,
        sockets: Sequence[socket.socket],
        certificate: Certificate | None,
        start: Callable[[socket.socket, socket.socket], Awaitable[Running]] | None = None,
    ) -> None:
        """Serve `app` on `sockets`, which it takes over; `start(link, listening)` is how a process is started."""
        self._certificate = Pem(*certificate) if certificate is not None else None
        self._settings = {name: getattr(settings, name) for name in SETTINGS}
        beginnings = Beginnings()
        self._places = [
            _Place(index, sock, app, beginnings, self._hello, start or start_process)
            for index, sock in enumerate(sockets)
        ]

    @property
    def connections(self) -> Sized:
        """Those that are open, in all processes, as each has said."""
        return range(sum(place.beat.num_connections for place in self._places))

    @property
    def has_failed(self) -> bool:
        """As `Front.has_failed`: every place is given up."""
        return all(place.machine.state is ApiProcessState.CLOSED for place in self._places)

    def processes(self) -> Sequence[ApiProcessRecord]:
        """One record a place."""
        return [place.record() for place in self._places]

    def use_certificate(self, certificate: Certificate) -> None:
        """As `Front.use_certificate`; processes to come have it, too."""
        self._certificate = Pem(*certificate)
        for place in self._places:
            place.say(Renewed(self._certificate))

    async def run(self, on_listening: Callable[[], None], closing: asyncio.Event) -> None:
        """As `Front.run`; they listen when all of them do, or are given up."""
        begun = asyncio.gather(*(place.has_begun.wait() for place in self._places))
        begun.add_done_callback(lambda done: None if done.cancelled() else on_listening())
        watching = asyncio.create_task(self._watch())
        try:
            for place in self._places:
                place.handle(Begin())
            await closing.wait()
        finally:
            begun.cancel()
            watching.cancel()
            await asyncio.gather(begun, watching, return_exceptions=True)
            for place in self._places:
                place.handle(Drain())
            await asyncio.gather(*(place.end(FLUSH_TIMEOUT_S + ABORT_TIMEOUT_S) for place in self._places))

    def count_descriptors(self) -> None:
        """Each process has its own, and counts them itself."""

    def abort_connections(self) -> None:
        """As `Front.abort_connections`."""
        for place in self._places:
            place.say(Abort())

    def _hello(self) -> Hello:
        levels = {name: logging.getLogger(name).level for name in LOGGERS}
        return Hello(self._settings, self._certificate, levels, is_json())

    async def _watch(self) -> None:
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            if now_s - looked_s < 2 * LOOK_S:  # else this process itself was held up, and blames none
                for place in self._places:
                    place.look(now_s)
            else:
                for place in self._places:
                    place.heard_s = now_s
            looked_s = now_s


class _Place:
    """One place: performs what its machine decides."""

    def __init__(
        self,
        index: int,
        listening: socket.socket,
        app: ASGIApp,
        beginnings: Beginnings,
        hello: Callable[[], Hello],
        start: Callable[[socket.socket, socket.socket], Awaitable[Running]],
    ) -> None:
        self.index = index
        self.machine = ApiProcess()
        self.has_begun = asyncio.Event()  # it listens, or is given up
        self.heard_s = 0.0  # when its process said something last, or was started
        self.beat = Beat(0, 0.0, 0.0)
        self._listening = listening
        self._app = app
        self._beginnings = beginnings
        self._hello = hello
        self._start = start
        self._link: Link | None = None
        self._process: Running | None = None
        self._requests = Requests(app, beginnings)
        self._life: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def record(self) -> ApiProcessRecord:
        """As it is now."""
        return ApiProcessRecord(
            index=self.index,
            state=self.machine.state,
            pid=self._process.pid if self._process is not None else 0,
            num_connections=self.beat.num_connections,
            num_requests=self._requests.num_open,
            num_losses=self.machine.num_losses,
            lag_s=self.beat.lag_s,
            cpu_s=self.beat.cpu_s,
        )

    def say(self, message: Any) -> None:
        """Tell its process, where there is one."""
        if self._link is not None:
            self._link.send(message)

    def look(self, now_s: float) -> None:
        """The watchdog: its process must say something now and then."""
        is_coming_up = self.machine.state is ApiProcessState.CONNECTING
        limit_s = CONNECT_LIMIT_S if is_coming_up else SILENCE_S
        if self._process is not None and now_s - self.heard_s > limit_s:
            log.error("%s gave no sign of life for %g s, and is ended", self._name, limit_s)
            self.handle(Overdue())

    async def end(self, timeout_s: float) -> None:
        """Wait for its process to end, which it was told to; end it after `timeout_s`."""
        if self._life is not None:
            await asyncio.wait({self._life}, timeout=timeout_s)
            if not self._life.done():
                self._kill()
                await asyncio.wait({self._life})
        if self._timer is not None:
            self._timer.cancel()
        self._listening.close()

    def handle(self, event: Any) -> None:
        """Take `event`, and do what follows from it."""
        for effect in self.machine.handle(event):
            match effect:
                case Start(Spawn()):
                    self._life = asyncio.get_running_loop().create_task(self._live())
                case Start(Shut()):
                    self._listening.close()  # the process closes its own: only then does the port listen no more
                    self.say(Close())
                case Start(End()):
                    self._kill()
                case Start(GiveUp()):
                    log.error("%s was lost %d times, and is not started again", self._name, self.machine.num_losses)
                    self._listening.close()
                    self.has_begun.set()
                case After(delay_s, due):
                    self._timer = asyncio.get_running_loop().call_later(delay_s, self.handle, due)
                case Drop():
                    assert self._timer is not None, "a timer that was set"
                    self._timer.cancel()

    @property
    def _name(self) -> str:
        return f"API process {self.index}"

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        if self._link is not None:
            self._link.end("it was ended")

    async def _live(self) -> None:
        """One process, from its start to its end."""
        why = "it could not be started"
        try:
            why = await self._serve()
        except OSError as error:
            why = f"it could not be started: {error.strerror or error}"
        finally:
            self._link = self._process = None
            self._requests = Requests(self._app, self._beginnings)
            self.beat = Beat(0, 0.0, 0.0)
            if self.machine.state is not ApiProcessState.DRAINING:
                log.error("%s is lost: %s", self._name, why)
            self.handle(Lost(time.monotonic()))

    async def _serve(self) -> str:
        """Start a process, and take what it says until it is gone; returns why it is."""
        if self.machine.state is ApiProcessState.DRAINING:
            return "the server stopped before it was started"
        self.heard_s = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            process = self._process = await self._start(theirs, self._listening)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        link = self._link = await Link.on(ours, from_process(), self._take)
        self._requests.over(link)
        link.send(self._hello())
        if self.machine.state is not ApiProcessState.CONNECTING:
            link.send(Close())  # the server stopped while it was started
        why = await asyncio.shield(link.lost)
        self._requests.leave()
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                code = await process.wait()
        except TimeoutError:
            process.kill()  # it lives on without a link, of no use
            code = await process.wait()
        return f"process {process.pid}: {why}; its exit code is {code}"

    def _take(self, message: Any) -> None:
        self.heard_s = time.monotonic()
        match message:
            case Asks():
                self._requests.take(message)
            case Beat():
                self.beat = message
            case Listening() if self.machine.state in (ApiProcessState.CONNECTING, ApiProcessState.DRAINING):
                self.handle(Connected())
                self.has_begun.set()
            case _:
                raise LinkError(f"a {type(message).__name__} at a time when it means nothing")


async def start_process(link: socket.socket, listening: socket.socket) -> Running:
    """Start an API process with these sockets, which it inherits; raises OSError."""
    numbers = (link.fileno(), listening.fileno())
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", PROGRAM, *map(str, numbers)),
        pass_fds=numbers,
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # the terminal's Ctrl-C is for the engine's process
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
    )
