"""Runs an engine behind HTTP until told to stop, in one event loop.

bind            a port in use is told before the model loads
listen          /health answers 503 `model_loading`, everything else too
engine.start    then the ready line
stop            by SIGINT, SIGTERM or `stop.set()`: new requests get 503 `draining`, running ones go on for
                `shutdown_timeout_s`, the rest end with an error event
close           what is written is flushed, connections and engine are closed; a second signal ends at once
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from novainfer import EngineDead, InvalidParameter, ServerError
from novainfer.models import Models
from novainfer.server.app import create_app, create_metrics_app
from novainfer.server.engine import ServedEngine
from novainfer.server.http.front import Front, LocalFront
from novainfer.server.http.listen import (
    FLUSH_TIMEOUT_S,
    bind,
    bind_each,
    raise_descriptor_limit,
    read_certificate,
)
from novainfer.server.http.tls import Certificate, write_self_signed
from novainfer.server.journal.journal import Journal
from novainfer.server.logs import announce
from novainfer.server.loop import loop_factory
from novainfer.server.operate import garbage, systemd
from novainfer.server.operate.recorder import dump_on_signal
from novainfer.server.operate.resume import resume
from novainfer.server.operate.said import Throughput, about, about_models
from novainfer.server.processes.supervisor import ApiProcesses
from novainfer.server.service import Service
from novainfer.server.settings import ServerSettings
from novainfer.server.tracing import Tracing

log = logging.getLogger("novainfer.server")

MakeEngine = Callable[[], ServedEngine]
BACKGROUND_TIMEOUT_S = 1.0  # for responses whose requests have ended, to say so
ALIVE_CHECK_S = 0.5  # between looks at whether the engine lives: a dead one must not keep a server alive
# What the start line suggests to ask, by what prompts of the model can be.
EXAMPLES = {
    "chat": ("/v1/chat/completions", '"messages": [{"role": "user", "content": "Hello, who are you?"}]'),
    "text": ("/v1/completions", '"prompt": "Once upon a time"'),
    "token_ids": ("/v1/completions", '"prompt": [1, 2, 3]'),
}
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count


class Server:
    """What listens at one port, and what is served there; `run` returns when it has been stopped and all is closed.

    Raises `InvalidParameter` when the address or the certificate cannot be used.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.service = Service(None, settings)
        self.stop = asyncio.Event()
        self.is_listening = asyncio.Event()
        self.ready = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None  # of the keys, for a SIGHUP
        self._certificate = self._find_certificate()
        if settings.otlp_traces_endpoint is not None:
            self.service.tracing = Tracing(settings.otlp_traces_endpoint, self.service.version)
        number = settings.api_processes
        self._sockets = bind_each(settings, number) if number else [bind(settings, settings.port)]
        self.port: int = self._sockets[0].getsockname()[1]
        self._metrics_sock: socket.socket | None = None
        self.metrics_port: int | None = None
        if settings.metrics_port is not None:
            try:
                self._metrics_sock = bind(settings, settings.metrics_port, field="metrics_port")
            except InvalidParameter:
                for sock in self._sockets:
                    sock.close()
                raise
            self.metrics_port = self._metrics_sock.getsockname()[1]
        self.service.address = (settings.host, self.port)

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the server."""
        has_tls = self.settings.self_signed or self.settings.ssl_certfile is not None
        return f"{'https' if has_tls else 'http'}://{self._host}:{self.port}"

    @property
    def metrics_url(self) -> str | None:
        """Where `/metrics` needs no key, where it has a port of its own."""
        return None if self.metrics_port is None else f"http://{self._host}:{self.metrics_port}/metrics"

    @property
    def _host(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.settings.host, self.settings.host)
        return f"[{host}]" if ":" in host and not host.startswith("[") else host

    def reload(self) -> None:
        """Read again what files say: the certificate, and the keys. Requests that run go on."""
        if self.service.keys.has_file:
            self._reading = asyncio.create_task(self._read_keys())
        if self.settings.ssl_certfile is not None or not self.service.keys.has_file:
            self.reload_certificate()

    async def _read_keys(self) -> None:
        await self.service.keys.refresh(always=True)
        log.info("%s was read again", self.settings.keys_file)

    def reload_certificate(self) -> None:
        """Read the certificate's files again, for connections to come; what cannot be used is told, and not used."""
        settings = self.settings
        if settings.ssl_certfile is None or settings.ssl_keyfile is None or self.service.front is None:
            log.info("there is no certificate to be read again (--ssl-certfile)")
            return
        try:
            self.service.front.use_certificate(read_certificate(settings.ssl_certfile, settings.ssl_keyfile))
        except InvalidParameter as error:
            log.error("%s: connections get the certificate that was read before", error.message)
        else:
            log.info("the certificate %s was read again: new connections get it", settings.ssl_certfile)

    async def run(
        self, hosted: MakeEngine | Models[ServedEngine], *, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        """Serve one engine, or several models, until `stop` is set.

        Raises what making an engine and starting it raise, after closing everything.
        """
        self._open_journal()
        close_http = asyncio.Event()
        fronts = self._fronts()
        self.service.front = fronts[0]
        num_listening = 0

        def on_listening() -> None:
            nonlocal num_listening
            num_listening += 1
            if num_listening == len(fronts):
                self.is_listening.set()

        def is_warm() -> None:
            for front in fronts:
                front.count_descriptors()
            on_ready()

        http = {asyncio.create_task(front.run(on_listening, close_http)) for front in fronts}
        try:
            if isinstance(hosted, Models):
                await self._run_models(hosted, is_warm)
            else:
                await self._run_engine(hosted, is_warm)
        finally:
            self.service.is_draining = True
            await self.service.end_background(BACKGROUND_TIMEOUT_S)
            self.service.end_feeds()
            close_http.set()
            await asyncio.wait(http, timeout=FLUSH_TIMEOUT_S)
            for front in fronts:
                front.abort_connections()  # of clients that do not read what is there for them
            await asyncio.wait(http, timeout=FLUSH_TIMEOUT_S)
            for task in http:
                task.cancel()
            await asyncio.gather(*http, return_exceptions=True)
            if self.service.engine is not None:
                await self.service.engine.aclose()
            if self.service.models is not None:
                await self.service.models.aclose()
            if (journal := self.service.journal) is not None:
                await asyncio.to_thread(journal.close)
            if (tracing := self.service.tracing) is not None:
                await asyncio.to_thread(tracing.close)

    def _fronts(self) -> list[Front]:
        """What serves requests, and then what serves metrics alone, where these have a port of their own."""
        app, settings = create_app(self.service), self.settings
        found: list[Front] = [
            ApiProcesses(settings, app, self._sockets, self._certificate)
            if settings.api_processes
            else LocalFront(app, settings, self._sockets[0], self._certificate)
        ]
        if self._metrics_sock is not None:
            found.append(LocalFront(create_metrics_app(self.service), settings, self._metrics_sock, None))
        return found

    def _open_journal(self) -> None:
        settings = self.settings
        if settings.journal is None:
            return
        try:
            self.service.use_journal(Journal(settings.journal, settings.journal_max_bytes, settings.journal_ttl_s))
        except InvalidParameter:
            for sock in (*self._sockets, self._metrics_sock):
                if sock is not None:
                    sock.close()
            raise

    def _find_certificate(self) -> Certificate | None:
        settings = self.settings
        if settings.self_signed:
            with tempfile.TemporaryDirectory(prefix="novainfer-") as folder:
                return read_certificate(*write_self_signed(Path(folder), settings.host))
        if settings.ssl_certfile is None or settings.ssl_keyfile is None:
            return None
        return read_certificate(settings.ssl_certfile, settings.ssl_keyfile)

    async def _run_engine(self, make_engine: MakeEngine, on_ready: Callable[[], None]) -> None:
        stop = asyncio.create_task(self.stop.wait())
        try:
            engine = await asyncio.to_thread(make_engine)
            self.service.engine = engine
            if not await _has_started(engine.start(), stop):
                return
            await self.service.note_coming(engine.model_info.name, engine)
            await resume(self.service)
            self._tell_ready(on_ready)
            await self._until_stopped(stop, lambda: engine.is_ready)
            await self._drain(engine)
        finally:
            stop.cancel()

    async def _run_models(self, models: Models[ServedEngine], on_ready: Callable[[], None]) -> None:
        stop = asyncio.create_task(self.stop.wait())
        try:
            models.open(self.service.note_going, self.service.note_coming)
            self.service.models = models
            if not await _has_started(self._start_models(models), stop):
                await self._drain(models)  # requests wait for them already, and are told
                return
            self._tell_ready(on_ready)
            await self._until_stopped(stop, lambda: models.is_ready)  # also while none is loaded, or one has died
            await self._drain(models)
        finally:
            stop.cancel()

    async def _start_models(self, models: Models[ServedEngine]) -> None:
        """What the journal holds waits for its models as requests do that come now, and behind the first ones."""
        loading = asyncio.create_task(models.start())
        try:
            await resume(self.service)
            await loading
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    def _tell_ready(self, on_ready: Callable[[], None]) -> None:
        self.service.was_ready = True
        self.ready.set()
        on_ready()

    async def _until_stopped(self, stop: asyncio.Task[Any], is_alive: Callable[[], bool]) -> None:
        throughputs: dict[str, Throughput] = {}
        is_watched = systemd.has_watchdog()
        while not stop.done():
            await asyncio.wait({stop}, timeout=ALIVE_CHECK_S)
            if not self.service.live.num_live:
                garbage.collect_when_idle()
            engines, now_s = self.service.engines(), time.monotonic()
            if is_watched and all(engine.health().is_live for engine in engines.values()):
                systemd.notify(systemd.MOVING)
            self.service.store.sweep()
            for name, engine in engines.items():
                if self.settings.disable_log_stats:
                    continue
                throughput = throughputs.setdefault(name, Throughput(now_s))
                if (line := throughput.line(engine.statistics, now_s)) is not None:
                    log.info("%s", f"{name}: {line}" if name else line)
            for name in throughputs.keys() - engines.keys():
                del throughputs[name]
            if not stop.done() and not is_alive():
                raise EngineDead("The engine died; every request has been told, and the log says why")
            if not stop.done() and self.service.front is not None and self.service.front.has_failed:
                raise ServerError("No API process stays alive, and nothing can be served: the log says why")

    async def _drain(self, host: ServedEngine | Models[ServedEngine]) -> None:
        self.service.is_draining = True
        timeout_s = self.settings.shutdown_timeout_s
        with suppress(TimeoutError):  # what has ended may still wait for a client to read it
            await asyncio.wait_for(host.drain(timeout_s), timeout_s + FLUSH_TIMEOUT_S)


async def _has_started(starting: Coroutine[Any, Any, None], stop: asyncio.Task[Any]) -> bool:
    """Whether it has, or was told to `stop` before; raises what it raises."""
    start = asyncio.create_task(starting)
    try:
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not start.done():
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
    if start.cancelled():
        return False
    start.result()
    return True


def run_server(settings: ServerSettings, hosted: MakeEngine | Models[ServedEngine]) -> int:
    """The command `novainfer serve`: until a signal comes; returns the exit code."""
    started = time.perf_counter()
    raise_descriptor_limit()

    async def main() -> None:
        server = Server(settings)
        _stop_on_signals(server)
        announce(f"Loading the model; {server.url}/health says when it is ready")

        def on_ready() -> None:
            garbage.settle()
            announce(ready_line(server, time.perf_counter() - started), to=sys.stdout)
            systemd.notify(systemd.READY, f"STATUS=at {server.url}")

        await server.run(hosted, on_ready=on_ready)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())
    return 0


def ready_line(server: Server, elapsed_s: float) -> str:
    """What a user sees when the server is warm: where it is, what it has, and a command to try."""
    service = server.service
    engines = service.engines()
    first = next(iter(engines.values()), None)
    name = first.model_info.name if first is not None else "NAME"
    if service.models is None:
        assert first is not None, "ready without an engine"
        what, told = name, about(first)
    else:
        what, told = f"{len(service.models.names)} models", about_models(service.models)
    options = " -k" if server.settings.self_signed else ""
    key = " \\\n    -H 'authorization: Bearer KEY'" if service.keys.are_needed else ""
    metrics = f"metrics at {server.metrics_url}\n" if server.metrics_url is not None else ""
    path, ask = EXAMPLES[first.model_info.prompt_kind if first is not None else "text"]
    return (
        f"NovaInfer {service.version} serves {what} at {server.url} (ready in {elapsed_s:.1f} s)\n"
        f"{told}\n{metrics}"
        f"  curl -N{options} {server.url}{path} -H 'content-type: application/json'{key} \\\n"
        f'    -d \'{{"model": "{name}", "stream": true, {ask}}}\''
    )


def _stop_on_signals(server: Server) -> None:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if server.stop.is_set():
            os._exit(EXIT_INTERRUPTED)
        server.stop.set()
        num_live = server.service.live.num_live
        wait = f": {num_live} running requests have up to {server.settings.shutdown_timeout_s:g} s" if num_live else ""
        announce(f"\nStopping{wait}; once more ends at once")
        systemd.notify(systemd.STOPPING)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    # Else a terminal that is closed ends its server, as ever; a service manager has no terminal.
    reads_files = server.settings.ssl_certfile is not None or server.service.keys.has_file
    if reads_files or systemd.SOCKET_VARIABLE in os.environ:
        loop.add_signal_handler(signal.SIGHUP, server.reload)
    dump_on_signal(server.service, loop)
