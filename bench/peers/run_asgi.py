"""ASGI servers under the streams of `novainfer bench http`: `run_asgi.py SERVER PORT HTTP STEP_MS TICKS_FILE`.

All of them serve the least app that sends what NovaInfer's server sends: a clock in the server's loop wakes all streams
at once, as a step of a device does, and each sends one event of the size of NovaInfer's own. There is no engine, no
tokenizer, no limit, and no JSON but the request's. `novainfer` is our own HTTP under that app.

Each server has its best settings: uvloop, httptools, one worker, no log of accesses, room for all streams.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["SERVERS", "Ticks", "make_app"]

App = Callable[[Any, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

STREAMS_MAX = 1000  # of one HTTP/2 connection: NovaInfer's default
REQUESTS_MAX = 1_000_000_000  # of one connection: Hypercorn's own limit silences streams in flight
KEEP_ALIVE_S = 75
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1763900000,'
    b'"model":"fake","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null,"token_ids":[97]}]}\n\n'
)
DONE = b"data: [DONE]\n\n"


class Ticks:
    """The moments at which tokens were there to be sent, in a file: doubles, seconds of `time.perf_counter`."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self) -> None:
        """One more, now."""
        os.write(self._file, struct.pack("d", time.perf_counter()))


class Clock:
    """Wakes everyone who waits, each `step_s`."""

    def __init__(self, step_s: float, ticks: Ticks) -> None:
        self._step_s = step_s
        self._ticks = ticks
        self._tick = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._at_s = self._loop.time()
        self._run()

    def _run(self) -> None:
        self._ticks.note()
        self._tick.set()
        self._tick.clear()  # whoever waited has been woken
        self._at_s = max(self._at_s + self._step_s, self._loop.time())  # what is late is not caught up with
        self._loop.call_at(self._at_s, self._run)

    async def next(self) -> None:
        """Until the next tick."""
        await self._tick.wait()


def make_app(step_s: float, ticks: Ticks) -> App:
    """Streams as many events as a request's `max_tokens`, one a tick."""
    clock: Clock | None = None

    async def app(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
        nonlocal clock
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        num_events = json.loads(body + message["body"])["max_tokens"]
        clock = clock or Clock(step_s, ticks)
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        for _ in range(num_events):
            await clock.next()
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})

    return app


def app_of_arguments() -> App:
    """For servers that make the app in a process of their own: by what this one was started with."""
    return make_app(float(os.environ["BENCH_STEP_MS"]) / 1e3, Ticks(os.environ["BENCH_TICKS"]))


def run_hypercorn(port: int, http: str) -> None:
    """Stock Hypercorn; whoever connects says which HTTP."""
    import hypercorn.asyncio
    import uvloop
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.h2_max_concurrent_streams = STREAMS_MAX
    config.keep_alive_max_requests = REQUESTS_MAX
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.backlog = STREAMS_MAX
    uvloop.run(hypercorn.asyncio.serve(app_of_arguments(), config))


def run_uvicorn(port: int, http: str) -> None:
    """uvicorn over httptools."""
    import uvicorn

    uvicorn.run(
        app_of_arguments(),
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def run_granian(port: int, http: str) -> None:
    """granian, with one worker and one thread of its runtime."""
    from granian import Granian
    from granian.constants import HTTPModes, Interfaces, Loops
    from granian.http import HTTP2Settings
    from granian.log import LogLevels

    Granian(
        f"{__spec__.name}:app_of_arguments",
        address="127.0.0.1",
        port=port,
        interface=Interfaces.ASGI,
        factory=True,
        workers=1,
        runtime_threads=1,
        loop=Loops.uvloop,
        http=HTTPModes.http2 if http == "h2" else HTTPModes.http1,
        http2_settings=HTTP2Settings(max_concurrent_streams=STREAMS_MAX),
        websockets=False,
        log_level=LogLevels.warning,
        log_access=False,
    ).serve()


def run_novainfer(port: int, http: str) -> None:
    """NovaInfer's HTTP."""
    import uvloop

    from novainfer.server.http.front import LocalFront
    from novainfer.server.http.listen import bind
    from novainfer.server.settings import ServerSettings

    settings = ServerSettings(host="127.0.0.1", port=port)

    async def serve() -> None:
        front = LocalFront(app_of_arguments(), settings, bind(settings, port), None)
        await front.run(lambda: None, asyncio.Event())

    uvloop.run(serve())


SERVERS: dict[str, Callable[[int, str], None]] = {
    "novainfer": run_novainfer,
    "hypercorn": run_hypercorn,
    "uvicorn": run_uvicorn,
    "granian": run_granian,
}


def main() -> None:
    """See the module."""
    server, port, http, step_ms, ticks = sys.argv[1:]
    os.environ |= {"BENCH_STEP_MS": step_ms, "BENCH_TICKS": ticks}
    SERVERS[server](int(port), http)


if __name__ == "__main__":
    main()
