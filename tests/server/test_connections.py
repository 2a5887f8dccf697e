"""More connections than there are file descriptors for: idle and unfinished ones make room, others are left alone."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from novainfer.server.http import connection, listen
from novainfer.server.http.connection import Connection, HttpConfig
from novainfer.server.serve import Server
from tests.server.conftest import TIMEOUT_S, Serve, eventually
from tests.server.fakes import FakeEngine
from tests.server.rawh2 import RawH2
from tests.server.test_http2 import START, app_of, serving

MOST = 3


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has room for three connections."""
    monkeypatch.setattr(HttpConfig, "count_descriptors", lambda self: setattr(self, "connections_max", MOST))


async def closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(TIMEOUT_S):
        return await reader.read() == b""


@pytest.mark.usefixtures("few")
async def test_the_connection_that_was_idle_for_longest_makes_room(serve: Serve) -> None:
    server = await serve(FakeEngine(is_paced=True))
    busy = await RawH2.connect(server.port)
    await busy.request("/v1/completions", b'{"prompt": "a", "stream": true}')
    await eventually(lambda: server.service.live.num_live == 1)
    idle = []
    for number in range(1, 6):
        idle.append(await asyncio.open_connection("127.0.0.1", server.port))
        await eventually(lambda n=number: len(server.service.connections) == min(1 + n, MOST))  # type: ignore[misc]
    for reader, _ in idle[:3]:
        assert await closed(reader)
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).status_code == 200
    assert server.service.live.num_live == 1
    for _, writer in idle:
        writer.close()
    await busy.close()


@pytest.mark.usefixtures("few")
async def test_connections_that_come_in_one_millisecond_go_in_the_order_they_came(serve: Serve) -> None:
    server = await serve(FakeEngine())
    first = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(MOST)]
    await eventually(lambda: sum(one.idle_task.since_s is not None for one in server.service.connections) == MOST)
    more = await asyncio.open_connection("127.0.0.1", server.port)
    assert await closed(first[0][0])
    assert not any(reader.at_eof() for reader, _ in [*first[1:], more])
    for _, writer in [*first, more]:
        writer.close()


@pytest.mark.usefixtures("few")
async def test_when_all_connections_are_busy_one_more_is_told_to_come_back(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        tasks = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"})) for _ in range(MOST)]
        await engine.wait_until(lambda: len(engine.active) == MOST)
        refused = await client.get("/health")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        engine.is_paced = False
        engine.release()
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {200}
        assert (await client.get("/health")).status_code == 200


def test_what_is_open_for_other_things_is_not_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = len(connection.os.listdir("/proc/self/fd")) + connection.DESCRIPTORS_KEPT + 10
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    assert 9 <= HttpConfig().connections_max <= 11  # the look itself takes one
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert HttpConfig().connections_max == float("inf")


def test_the_server_takes_as_many_descriptors_as_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, taken = (64, 4096), []
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda what, wanted: taken.append(wanted))
    listen.raise_descriptor_limit()
    assert taken == [(4096, 4096)]
    limits = (64, resource.RLIM_INFINITY)
    listen.raise_descriptor_limit()
    assert taken[1:] == [(listen.DESCRIPTORS_MAX, resource.RLIM_INFINITY)]
    limits = (200_000, 200_000)
    listen.raise_descriptor_limit()
    assert len(taken) == 2


async def begun(port: int, address: str, path: str = "/v1/completions") -> tuple[asyncio.StreamReader, Any]:
    """A connection from `address` with a request whose body does not come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
    return reader, writer


def num_busy(server: Server) -> int:
    return sum(one.idle_task.since_s is None for one in server.service.connections)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("settings", [{}, {"api_keys": ("right",)}], ids=["incomplete", "refused"])
async def test_connections_whose_requests_are_not_let_in_make_room_when_none_is_idle(
    serve: Serve, settings: dict[str, Any]
) -> None:
    server = await serve(FakeEngine(), **settings)
    slow = []
    for number in range(1, MOST + 1):
        slow.append(await begun(server.port, "127.0.0.2"))
        await eventually(lambda n=number: num_busy(server) == n)  # type: ignore[misc]
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        assert (await client.get("/health")).status_code == 200
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionResetError):
                assert await slow[0][0].read() == b""
        assert not any(reader.at_eof() for reader, _ in slow[1:])
    for _, writer in slow:
        writer.close()


@pytest.mark.usefixtures("few")
async def test_idle_connections_of_an_address_outlive_unfinished_ones_of_one_that_has_more(serve: Serve) -> None:
    server = await serve(FakeEngine())
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await eventually(lambda: len(server.service.connections) == 1)
    slow = [await begun(server.port, "127.0.0.2") for _ in range(MOST - 1)]
    await eventually(lambda: num_busy(server) == MOST - 1)
    slow.append(await begun(server.port, "127.0.0.2"))
    await eventually(lambda: len(server.service.connections) == MOST and num_busy(server) == MOST - 1)
    assert not reader.at_eof()
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(TIMEOUT_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    for _, one in [*slow, (reader, writer)]:
        one.close()


@pytest.mark.usefixtures("few")
async def test_a_connection_with_a_request_that_was_let_in_is_not_closed_for_its_unfinished_ones(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    client = await RawH2.connect(server.port)
    live = await client.request("/v1/completions", b'{"prompt": "a"}')
    await client.request("/v1/completions", b'{"prompt":', end=False)
    await engine.wait_until(lambda: len(engine.active) == 1)
    slow = [await begun(server.port, "127.0.0.1") for _ in range(MOST - 1)]
    await eventually(lambda: num_busy(server) == MOST)
    for number in range(MOST):
        slow.append(await begun(server.port, "127.0.0.1"))
        await eventually(lambda n=number: sum(one.at_eof() or bool(one.exception()) for one, _ in slow) > n)  # type: ignore[misc]
    engine.is_paced = False
    engine.release()
    assert (await client.response(live))[0] == 200
    for _, writer in slow:
        writer.close()


@pytest.mark.parametrize("how", ["shut down", "idle"])
async def test_a_connection_that_is_over_ends_though_its_client_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    known: list[Connection] = []
    run = Connection.run

    async def noted(self: Connection) -> None:
        known.append(self)
        await run(self)

    monkeypatch.setattr(Connection, "run", noted)
    sent = 0

    async def write(send: Send) -> None:
        nonlocal sent
        await send(START)
        for _ in range(2000):
            if how == "idle" and known[0].writer.transport.get_write_buffer_size():
                break  # no more of it is taken, and its request ends
            await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
            sent += 1
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(write(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()

    async with serving(app_of(handler), keep_alive_timeout_s=0.2) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /much HTTP/1.1\r\nhost: test\r\n\r\n")
        before = -1
        while sent == 0 or sent > before:  # until nothing more has room anywhere
            before = sent
            await asyncio.sleep(0.1)
        if how == "shut down":
            writer.write_eof()
        (one,) = known
        assert isinstance(one.config, HttpConfig)
        connections = one.config.connections
        await eventually(lambda: not connections)
        writer.transport.abort()
