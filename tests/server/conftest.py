"""Servers on ephemeral loopback ports, each in the test's own event loop, over a fake engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from novainfer.models import Models
from novainfer.server.engine import ServedEngine
from novainfer.server.loop import loop_factory
from novainfer.server.processes import supervisor
from novainfer.server.serve import Server
from novainfer.server.settings import ServerSettings
from tests.server.fakes import FakeEngine
from tests.server.in_loop import start_in_loop
from tests.server.rawh2 import RawH2
from tests.witness import one_ending, watched

__all__ = ["one_ending", "watched"]

TIMEOUT_S = 10.0
# What depends on how a loop treats sockets.
BOTH_LOOPS = {"test_http2.py", "test_endings.py", "test_leaving.py", "test_serve.py", "test_api_processes.py"}
# What must be the same when HTTP is spoken at the other end of a link: their servers run both ways.
BOTH_FRONTS = {"test_endings.py", "test_guard.py", "test_leaving.py", "test_tls_reload.py"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that `novainfer serve` runs in, and asyncio's own where it might matter."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {}
    if (factory := loop_factory()) is not None:
        factories["uvloop"] = factory
    if not factories or item.path.name in BOTH_LOOPS:
        factories["asyncio"] = asyncio.new_event_loop
    return factories


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Files of `BOTH_FRONTS` run as they are, and with two API processes, which are tasks of the test's loop."""
    if metafunc.definition.path.name in BOTH_FRONTS and "api_processes" in metafunc.fixturenames:
        metafunc.parametrize("api_processes", [0, 2], ids=["one process", "API processes"])


@pytest.fixture
def api_processes() -> int:
    """How many API processes `serve` gives its servers."""
    return 0


@asynccontextmanager
async def running(engine: ServedEngine | Models, *, wait_ready: bool = True, **settings: Any) -> AsyncIterator[Server]:
    """A server of `engine`, or of several models, on a free port, stopped at the end."""
    server = Server(ServerSettings(port=0, **settings))
    task = asyncio.create_task(server.run(engine if isinstance(engine, Models) else lambda: engine))
    try:
        waits = {asyncio.create_task(server.is_listening.wait())}
        if wait_ready:
            waits.add(asyncio.create_task(server.ready.wait()))
        async with asyncio.timeout(TIMEOUT_S):
            while waits and not task.done():
                _, pending = await asyncio.wait({task, *waits}, return_when=asyncio.FIRST_COMPLETED)
                waits = pending - {task}
        for wait in waits:
            wait.cancel()
        if task.done():
            task.result()
        yield server
    finally:
        server.stop.set()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(task, return_exceptions=True)


async def eventually(condition: Callable[[], object]) -> None:
    """Let the loop turn until `condition` holds: for what has no event to wait for."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def keep_log_levels() -> Iterator[None]:
    """A command that a test runs here says at which level this process logs: no other test must live with that."""
    loggers = [logging.getLogger(name) for name in ("novainfer", "novainfer.http", "novainfer.access")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
async def close_raw_clients() -> AsyncIterator[None]:
    yield
    while RawH2.opened:
        client = RawH2.opened.pop()
        client.writer.transport.abort()
        await asyncio.gather(client.writer.wait_closed(), return_exceptions=True)


Serve = Callable[..., Awaitable[Server]]


@pytest.fixture
async def serve(api_processes: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serve]:
    """`await serve(engine, **settings)`: a running server, stopped after the test."""
    if api_processes:
        monkeypatch.setattr(supervisor, "start_process", start_in_loop)
    async with AsyncExitStack() as stack:

        async def start(engine: ServedEngine | Models, **settings: Any) -> Server:
            settings.setdefault("shutdown_timeout_s", 0.0)
            settings.setdefault("api_processes", api_processes)
            return await stack.enter_async_context(running(engine, **settings))

        yield start


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def server(serve: Serve, engine: FakeEngine) -> Server:
    return await serve(engine)


@pytest.fixture(params=["http/1.1", "h2c"])
async def client(request: pytest.FixtureRequest, server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `server`, over each version of HTTP."""
    http2 = request.param == "h2c"
    async with httpx.AsyncClient(base_url=server.url, http1=not http2, http2=http2, timeout=TIMEOUT_S) as client:
        yield client
