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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import hypercorn.asyncio

from novainfer import EngineDead, InvalidParameter
from novainfer.server.app import create_app, create_metrics_app
from novainfer.server.engine import ServedEngine
from novainfer.server.http import connection, http1, http2
from novainfer.server.http.connection import HttpConfig
from novainfer.server.http.listen import (
    FLUSH_TIMEOUT_S,
    bind,
    check_certificate,
    hypercorn_config,
    raise_descriptor_limit,
    reload_certificate,
)
from novainfer.server.http.tls import write_self_signed
from novainfer.server.logs import announce
from novainfer.server.loop import loop_factory
from novainfer.server.operate import garbage, systemd
from novainfer.server.operate.recorder import dump_on_signal
from novainfer.server.operate.said import Throughput, about
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
    """One listening socket and what is served on it; `run` returns when it has been stopped and all is closed.

    Raises `InvalidParameter` when the address or the certificate cannot be used.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.service = Service(None, settings)
        self.stop = asyncio.Event()
        self.is_listening = asyncio.Event()
        self.ready = asyncio.Event()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._config: HttpConfig | None = None
        self._reading: asyncio.Task[None] | None = None  # of the keys, for a SIGHUP
        self._certificate = self._find_certificate()
        if settings.otlp_traces_endpoint is not None:
            self.service.tracing = Tracing(settings.otlp_traces_endpoint, self.service.version)
        self._sock = bind(settings, settings.port)
        self.port: int = self._sock.getsockname()[1]
        self._metrics_sock: socket.socket | None = None
        self.metrics_port: int | None = None
        if settings.metrics_port is not None:
            try:
                self._metrics_sock = bind(settings, settings.metrics_port, field="metrics_port")
            except InvalidParameter:
                self._sock.close()
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
        if settings.ssl_certfile is None or settings.ssl_keyfile is None or self._config is None:
            log.info("there is no certificate to be read again (--ssl-certfile)")
            return
        try:
            reload_certificate(self._config, settings.ssl_certfile, settings.ssl_keyfile)
        except InvalidParameter as error:
            log.error("%s: connections get the certificate that was read before", error.message)
        else:
            log.info("the certificate %s was read again: new connections get it", settings.ssl_certfile)

    async def run(self, make_engine: MakeEngine, *, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` is set; raises what `make_engine` or `engine.start` raise, after closing everything."""
        close_http = asyncio.Event()
        config = self._config = hypercorn_config(self.settings, self._sock, self._certificate)
        self.service.connections = config.connections
        connection.install()
        http1.install()
        http2.install()

        num_listening = 0

        async def until_closed() -> None:
            nonlocal num_listening
            num_listening += 1
            if num_listening == len(listeners):
                self.is_listening.set()
            await close_http.wait()

        def is_warm() -> None:
            config.count_descriptors()
            on_ready()

        listeners = [(create_app(self.service), config)]
        if self._metrics_sock is not None:
            metrics_config = hypercorn_config(self.settings, self._metrics_sock, None)
            listeners.append((create_metrics_app(self.service), metrics_config))
        http = {
            asyncio.create_task(hypercorn.asyncio.serve(app, its, shutdown_trigger=until_closed))  # type: ignore[arg-type]
            for app, its in listeners
        }
        try:
            await self._run_engine(make_engine, is_warm)
        finally:
            self.service.is_draining = True
            await self.service.end_background(BACKGROUND_TIMEOUT_S)
            self.service.end_feeds()
            close_http.set()
            await asyncio.wait(http, timeout=FLUSH_TIMEOUT_S)
            for _, its in listeners:
                its.abort_connections()  # of clients that do not read what is there for them
            await asyncio.wait(http, timeout=FLUSH_TIMEOUT_S)
            for task in http:
                task.cancel()
            await asyncio.gather(*http, return_exceptions=True)
            if self.service.engine is not None:
                await self.service.engine.aclose()
            if (tracing := self.service.tracing) is not None:
                await asyncio.to_thread(tracing.close)
            if self._folder is not None:
                self._folder.cleanup()

    def _find_certificate(self) -> tuple[Path, Path] | None:
        settings = self.settings
        if settings.self_signed:
            self._folder = tempfile.TemporaryDirectory(prefix="novainfer-")
            return write_self_signed(Path(self._folder.name), settings.host)
        if settings.ssl_certfile is None or settings.ssl_keyfile is None:
            return None
        check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
        return settings.ssl_certfile, settings.ssl_keyfile

    async def _run_engine(self, make_engine: MakeEngine, on_ready: Callable[[], None]) -> None:
        stop = asyncio.create_task(self.stop.wait())
        try:
            engine = await asyncio.to_thread(make_engine)
            self.service.engine = engine
            start = asyncio.create_task(engine.start())
            try:
                await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not start.done():
                    start.cancel()
                    await asyncio.gather(start, return_exceptions=True)
            if start.cancelled():
                return
            start.result()
            self.service.was_ready = True
            self.ready.set()
            on_ready()
            throughput = Throughput(time.monotonic())
            is_watched = systemd.has_watchdog()
            while not stop.done():
                await asyncio.wait({stop}, timeout=ALIVE_CHECK_S)
                if not self.service.live.num_live:
                    garbage.collect_when_idle()
                if is_watched and engine.health().is_live:
                    systemd.notify(systemd.MOVING)
                self.service.store.sweep()
                if (line := throughput.line(engine.statistics, time.monotonic())) is not None:
                    log.info("%s", line)
                if not stop.done() and not engine.is_ready:
                    raise EngineDead("The engine died; every request has been told, and the log says why")
            self.service.is_draining = True
            timeout_s = self.settings.shutdown_timeout_s
            with suppress(TimeoutError):  # what has ended may still wait for a client to read it
                await asyncio.wait_for(engine.drain(timeout_s), timeout_s + FLUSH_TIMEOUT_S)
        finally:
            stop.cancel()


def run_server(settings: ServerSettings, make_engine: MakeEngine) -> int:
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

        await server.run(make_engine, on_ready=on_ready)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())
    return 0


def ready_line(server: Server, elapsed_s: float) -> str:
    """What a user sees when the server is warm: where it is, what it has, and a command to try."""
    engine = server.service.engine
    assert engine is not None, "ready without an engine"
    name = engine.model_info.name
    options = " -k" if server.settings.self_signed else ""
    key = " \\\n    -H 'authorization: Bearer KEY'" if server.service.keys.are_needed else ""
    metrics = f"metrics at {server.metrics_url}\n" if server.metrics_url is not None else ""
    path, ask = EXAMPLES[engine.model_info.prompt_kind]
    return (
        f"NovaInfer {server.service.version} serves {name} at {server.url} (ready in {elapsed_s:.1f} s)\n"
        f"{about(engine)}\n{metrics}"
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
