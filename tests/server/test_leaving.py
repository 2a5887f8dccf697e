"""Clients that vanish, at any moment and in any way: what they asked for is cancelled, and no log tells of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
from collections.abc import Iterator

import pytest

from novainfer.server.http.http1 import AHEAD_BYTES_MAX
from novainfer.server.serve import Server
from tests.leftovers import other_tasks
from tests.server.conftest import TIMEOUT_S, Serve, eventually
from tests.server.fakes import FakeEngine
from tests.server.rawh2 import RawH2

ENHANCE_YOUR_CALM = 11
PATH = "/v1/completions"
both_kinds = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def body(stream: bool) -> bytes:
    return json.dumps({"prompt": ["a", "b"], "stream": stream}).encode()


def post(stream: bool) -> bytes:
    """One request as HTTP/1.1 has it."""
    data = body(stream)
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (PATH.encode(), len(data)) + data


def reset_on_close(writer: asyncio.StreamWriter) -> None:
    """From now on the connection ends with a RST, not a FIN: what was sent and not yet read may be lost."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def end(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "half-closed":
        writer.write_eof()
        return
    if how == "reset":
        reset_on_close(writer)
    writer.close()


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No line of a log holds a traceback, whoever wrote it."""
    caplog.set_level(logging.INFO)
    yield
    found = [record.getMessage() for record in caplog.get_records("call") if record.exc_info]
    assert not found, found


async def nothing_left(server: Server, engine: FakeEngine, num_tasks: int) -> None:
    await eventually(lambda: not engine.active)
    await eventually(lambda: server.service.live.num_live == 0)
    await eventually(lambda: len(other_tasks()) <= num_tasks)


async def many_at_once(client: RawH2, number: int, stream: bool) -> list[int]:
    """`number` requests in as few packets as there can be."""
    head = [(":method", "POST"), (":path", PATH), (":scheme", "http"), (":authority", "test")]
    streams = []
    for _ in range(number):
        stream_id = client.connection.get_next_available_stream_id()
        client.connection.send_headers(stream_id, head)
        client.connection.send_data(stream_id, body(stream), end_stream=True)
        streams.append(stream_id)
    return streams


@both_kinds
@pytest.mark.parametrize("how", ["closed", "reset", "half-closed"])
@pytest.mark.parametrize("when", ["at once", "a turn later", "computed"])
async def test_an_http2_connection_that_ends_takes_its_requests_along(
    serve: Serve, stream: bool, how: str, when: str
) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    num_tasks = len(other_tasks())
    for _ in range(10):
        client = await RawH2.connect(server.port)
        await many_at_once(client, 10, stream)
        await client.flush()
        if when == "a turn later":
            await asyncio.sleep(0)
        elif when == "computed":
            await engine.wait_until(lambda: len(engine.active) == 20)
        end(client.writer, how)
        if when == "computed":
            await engine.wait_until(lambda: not engine.active)
    await nothing_left(server, engine, num_tasks)


@both_kinds
@pytest.mark.parametrize("how", ["closed", "reset", "half-closed"])
@pytest.mark.parametrize("number", [1, 5], ids=["one request", "pipelined"])
async def test_an_http1_connection_that_ends_takes_its_request_along(
    serve: Serve, stream: bool, how: str, number: int
) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    num_tasks = len(other_tasks())
    for _ in range(5):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(stream) * number)
        await engine.wait_until(lambda: len(engine.active) == 2)
        end(writer, how)
        await engine.wait_until(lambda: not engine.active)
        writer.close()
    for _ in range(10):  # and before the server has looked at it
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(stream) * number)
        end(writer, how)
        writer.close()
    await nothing_left(server, engine, num_tasks)


async def test_pipelined_requests_are_answered_in_order(serve: Serve) -> None:
    server = await serve(FakeEngine())
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    names = [b"one", b"two", b"three"]
    for name in names:
        writer.write(post(False).replace(b"host: x", b"host: x\r\nx-request-id: " + name))
    async with asyncio.timeout(TIMEOUT_S):
        for name in names:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"x-request-id: " + name in head
            (length,) = [int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(length)
    writer.close()


async def test_what_is_sent_ahead_of_an_answer_is_bounded(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    num_tasks = len(other_tasks())
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post(False))
    await engine.wait_until(lambda: len(engine.active) == 2)
    writer.write(b"x" * (2 * AHEAD_BYTES_MAX))
    await engine.wait_until(lambda: not engine.active)
    writer.transport.abort()  # there is more on its way, that nothing reads
    await nothing_left(server, engine, num_tasks)


async def test_streams_that_are_reset_as_soon_as_they_are_asked_for_leave_nothing(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    num_tasks = len(other_tasks())
    client = await RawH2.connect(server.port)
    for _ in range(10):
        for stream_id in await many_at_once(client, 50, stream=True):
            client.connection.reset_stream(stream_id)
        await client.flush()
    stream = await client.request("/health")  # the connection itself is well
    assert (await client.response(stream))[0] == 200
    await client.close()
    await nothing_left(server, engine, num_tasks)


async def test_a_request_that_is_reset_in_the_packet_that_brings_it_is_not_begun(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    client = await RawH2.connect(server.port)
    for stream_id in await many_at_once(client, 5, stream=True):
        client.connection.reset_stream(stream_id)
    await client.flush()
    assert (await client.response(await client.request("/health")))[0] == 200
    assert not engine.seen
    await client.close()


async def test_a_client_that_does_nothing_but_reset_is_told_to_calm_down(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, http2_max_concurrent_streams=100)
    num_tasks = len(other_tasks())
    client, other = await RawH2.connect(server.port), await RawH2.connect(server.port)
    num_reset = 0
    while not client.is_closed and num_reset < 5000:
        for stream_id in await many_at_once(client, 50, stream=True):
            client.connection.reset_stream(stream_id)
        num_reset += 50
        answered = await client.request("/health")
        await client.read_until(lambda stream_id=answered: stream_id in client.ended)  # type: ignore[misc]
    assert client.goaway == ENHANCE_YOUR_CALM
    assert num_reset < 1000
    assert (await other.response(await other.request("/health")))[0] == 200
    await other.close()
    await nothing_left(server, engine, num_tasks)


async def test_a_client_that_cancels_what_it_had_answers_of_may_go_on_for_ever(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, http2_max_concurrent_streams=10)
    client = await RawH2.connect(server.port)
    for _ in range(50):  # two answered, one reset
        streams = await many_at_once(client, 3, stream=True)
        await client.flush()
        await engine.wait_until(lambda: len(engine.active) == 6)
        await client.reset(streams[0])
        await engine.wait_until(lambda: len(engine.active) == 4)
        engine.release(5)
        for stream_id in streams[1:]:
            assert (await client.response(stream_id))[0] == 200
    await client.close()


FLOODS = {
    "PING": b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678",
    "SETTINGS": b"\x00\x00\x06\x04\x00\x00\x00\x00\x00" + b"\x00\x04\x00\x01\x00\x00",
    "WINDOW_UPDATE": b"\x00\x00\x04\x08\x00\x00\x00\x00\x00" + b"\x00\x00\x00\x01",
    "PRIORITY": b"\x00\x00\x05\x02\x00\x00\x00\x00\x05" + b"\x00\x00\x00\x00\x10",
    "an unknown frame": b"\x00\x00\x01\xee\x00\x00\x00\x00\x00" + b"x",
    "empty DATA": b"\x00\x00\x00\x00\x00\x00\x00\x00\x01",
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_of_frames_that_ask_for_nothing_ends_its_connection(serve: Serve, name: str) -> None:
    server = await serve(FakeEngine(is_paced=True))
    client = await RawH2.connect(server.port)
    if name == "empty DATA":
        await client.request(PATH, b"{", end=False)
    with contextlib.suppress(OSError):  # it may be cut while we write
        for _ in range(30):
            client.writer.write(FLOODS[name] * 1000)
            await client.flush()
        await client.read_until(lambda: False)
    assert client.goaway in (None, ENHANCE_YOUR_CALM)  # None: the RST was here before it
    other = await RawH2.connect(server.port)
    assert (await other.response(await other.request("/health")))[0] == 200
    await other.close()
