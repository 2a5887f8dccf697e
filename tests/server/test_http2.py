"""Each fault of Hypercorn's own HTTP/2 (the table in server/http/http2.py), provoked by a raw client and a rude app."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import hypercorn.asyncio
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from novainfer.server.http import connection, http1, http2
from novainfer.server.http.listen import hypercorn_config
from novainfer.server.settings import ServerSettings
from tests.server.conftest import eventually
from tests.server.rawh2 import RawH2

NO_ERROR, INTERNAL_ERROR = 0, 2
SIZE = "http2_initial_connection_window_size"
START = {"type": "http.response.start", "status": 200, "headers": []}


@asynccontextmanager
async def serving(app: ASGIApp, **settings: Any) -> AsyncIterator[int]:
    """`app` itself behind our HTTP/2, without the guard that would keep it polite; yields the port."""
    sock = socket.create_server(("127.0.0.1", 0))
    port: int = sock.getsockname()[1]
    stop, listening = asyncio.Event(), asyncio.Event()
    connection.install()
    http1.install()
    http2.install()

    async def trigger() -> None:
        listening.set()
        await stop.wait()

    config = hypercorn_config(ServerSettings(**settings), sock, None)
    config.graceful_timeout = 0.1
    task = asyncio.create_task(hypercorn.asyncio.serve(app, config, shutdown_trigger=trigger))  # type: ignore[arg-type]
    await listening.wait()
    try:
        yield port
    finally:
        stop.set()
        await task


def app_of(handler: Callable[[Scope, Receive, Send], Awaitable[None]]) -> ASGIApp:
    """An app that runs `handler` for requests and leaves lifespan alone; `/ok` always answers."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/ok":
            while (await receive()).get("more_body"):
                pass
            await send(START)
            await send({"type": "http.response.body", "body": b"ok"})
        else:
            await handler(scope, receive, send)

    return app


async def is_fine(client: RawH2, body: bytes | None = None) -> None:
    """The connection still serves others."""
    assert await client.response(await client.request("/ok", body)) == (200, b"ok")


async def test_a_shut_window_blocks_send_until_it_opens() -> None:
    sent = 0
    done = asyncio.Event()

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send(START)
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
            sent += 10_000
        await send({"type": "http.response.body", "body": b""})
        done.set()

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port, takes_data=False)
        stream = await client.request("/rude")
        await client.read_until(lambda: len(client.data[stream]) == 65_535)  # all that the window allows
        await is_fine_without_window(client)
        assert sent <= 65_535 + http2.BUFFER_HIGH_BYTES + 10_000
        assert not done.is_set()
        client.takes_data = True
        client.connection.increment_flow_control_window(2_000_000)
        client.connection.increment_flow_control_window(2_000_000, stream)
        await client.flush()
        _, data = await client.response(stream)
        assert len(data) == 1_000_000
        assert done.is_set()
        await client.close()


async def is_fine_without_window(client: RawH2) -> None:
    """Headers need no window: the connection is alive although no data can pass."""
    stream = await client.request("/ok")
    await client.read_until(lambda: stream in client.headers)


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_blocked_send_ends_when_its_client_goes(how: str) -> None:
    ended, blocked = asyncio.Event(), asyncio.Event()

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(START)
            for i in range(30):
                if i > 10:
                    blocked.set()
                await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
        finally:
            ended.set()

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port, takes_data=False)
        stream = await client.request("/rude")
        await client.read_until(lambda: len(client.data[stream]) == 65_535)
        assert not ended.is_set()
        if how == "reset":
            await client.reset(stream)
        await client.close()
        async with asyncio.timeout(5):
            await ended.wait()


async def test_an_early_answer_leaves_the_connection_alone() -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await send({**START, "status": 413})
        await send({"type": "http.response.body", "body": b"too much"})

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port)
        stream = await client.request("/rude", b"x" * 1000, end=False)
        assert await client.response(stream) == (413, b"too much")
        await client.read_until(lambda: stream in client.resets)
        assert client.resets[stream] == NO_ERROR
        await is_fine(client, b"y" * 200_000)
        await client.close()


async def test_data_for_an_answered_stream_is_dropped() -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"early"})

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port)
        for _ in range(80):  # eighty times 20 000 bytes would use the connection's window up, were they not given back
            stream = client.connection.get_next_available_stream_id()
            head = [(":method", "POST"), (":path", "/rude"), (":scheme", "http"), (":authority", "test")]
            client.connection.send_headers(stream, head)
            client.connection.send_data(stream, b"x" * 10_000)
            client.connection.send_data(stream, b"x" * 10_000)
            await client.flush()
            await client.response(stream)
        await is_fine(client, b"y" * 100_000)
        await client.close()


async def test_an_unread_body_holds_up_nobody_else() -> None:
    go_on = asyncio.Event()
    length = 0

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal length
        await go_on.wait()
        is_more = True
        while is_more:
            message = await receive()
            length += len(message["body"])
            is_more = message["more_body"]
        await send(START)
        await send({"type": "http.response.body", "body": b"read"})

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port)
        await is_fine(client)  # so that the server's settings have come
        stream = await client.request("/rude", b"x" * http2.WINDOW_BYTES, end=False)
        assert client.connection.local_flow_control_window(stream) == 0  # all that it may hold
        await is_fine(client, b"y" * 3_000_000)
        assert client.connection.local_flow_control_window(stream) == 0
        go_on.set()
        await client.send_data(stream, b"x" * 100_000, end=True)
        assert await client.response(stream) == (200, b"read")
        assert length == http2.WINDOW_BYTES + 100_000
        await client.close()


@pytest.mark.parametrize("size", [65_535, 100_000, 1024 * 1024])
async def test_the_connections_first_window_is_what_the_operator_says(size: int) -> None:
    async with serving(app_of(lambda scope, receive, send: asyncio.sleep(0)), **{SIZE: size}) as port:
        client = await RawH2.connect(port)
        await is_fine(client)  # so that the server's settings have come
        assert client.connection.outbound_flow_control_window == size
        await is_fine(client, b"y" * 300_000)  # which is given back as it is used
        await client.close()


async def test_an_app_that_raises_mid_stream_resets_its_stream() -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("provoked by a test")

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port)
        stream = await client.request("/rude")
        await client.read_until(lambda: stream in client.resets)
        assert client.resets[stream] == INTERNAL_ERROR
        assert stream not in client.ended
        await is_fine(client)
        await client.close()


async def test_an_app_that_answers_nothing_is_a_500() -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        return

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port)
        assert (await client.response(await client.request("/rude")))[0] == 500
        await is_fine(client)
        await client.close()


@pytest.mark.parametrize("when", ["no request", "after a reset", "after an answer"])
async def test_an_idle_connection_times_out_with_a_goaway(when: str) -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serving(app_of(handler), keep_alive_timeout_s=0.05) as port:
        client = await RawH2.connect(port)
        if when == "after a reset":
            await client.reset(await client.request("/rude"))
        elif when == "after an answer":
            await is_fine(client)
        await client.read_until(lambda: client.is_closed)
        assert client.is_closed
        assert client.goaway == NO_ERROR
        await client.close()


async def test_a_connection_with_a_request_does_not_time_out() -> None:
    go_on = asyncio.Event()

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await send(START)
        await send({"type": "http.response.body", "body": b"late"})

    async with serving(app_of(handler), keep_alive_timeout_s=0.3) as port:
        busy = await RawH2.connect(port)
        stream = await busy.request("/rude")
        idle = await RawH2.connect(port)
        await idle.read_until(lambda: idle.is_closed)  # so the time has passed
        await is_fine(busy)  # an answer beside it must not start the clock either
        go_on.set()
        assert await busy.response(stream) == (200, b"late")
        await busy.close()
        await idle.close()


@pytest.mark.parametrize("version", ["1.1", "2"])
async def test_a_connection_that_the_client_closed_is_closed_at_once(version: str) -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("must not be reached")

    tasks = len(asyncio.all_tasks())
    async with serving(app_of(handler), keep_alive_timeout_s=1000.0) as port:
        serving_tasks = len(asyncio.all_tasks())
        if version == "2":
            client = await RawH2.connect(port)
            await is_fine(client)
            await client.close()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ok HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"0\r\n\r\n")
            assert len(asyncio.all_tasks()) > serving_tasks
            writer.close()
            await writer.wait_closed()
        await eventually(lambda: len(asyncio.all_tasks()) == serving_tasks)
    assert len(asyncio.all_tasks()) == tasks


async def test_strange_requests_get_an_answer_of_their_own() -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("must not be reached")

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port)
        client.connection.config.normalize_outbound_headers = False
        assert (await client.response(await client.request("/\xe9")))[0] == 400
        stream = client.connection.get_next_available_stream_id()
        client.connection.send_headers(stream, [(":method", "CONNECT"), (":authority", "test")], end_stream=True)
        await client.flush()
        assert (await client.response(stream))[0] == 501
        await is_fine(client)
        await client.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"\x00\x00\x04\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00",  # RST_STREAM of stream 0
        b"\x00\x00\x01\x00\x00\x00\x00\x00\x63x",  # DATA on a stream that is not open
        b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + b"x" * 20_000,  # the beginning of a frame of 16 MB
        b"\x00\x00\x05\x01\x05\x00\x00\x00\x01\xff\xff\xff\xff\xff",  # HEADERS that are no HPACK
    ],
    ids=["RST of stream 0", "DATA on no stream", "overlong", "no HPACK"],
)
async def test_a_broken_frame_ends_its_connection_and_no_other(frame: bytes) -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        return

    async with serving(app_of(handler)) as port:
        broken, other = await RawH2.connect(port), await RawH2.connect(port)
        broken.writer.write(frame)
        await broken.read_until(lambda: broken.is_closed)
        assert broken.goaway not in (None, NO_ERROR)
        await is_fine(other)
        await broken.close()
        await other.close()


async def test_256_streams_share_a_connection_in_turn() -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for i in range(50):
            await send({"type": "http.response.body", "body": b"%d," % i, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port)
        client.connection.increment_flow_control_window(10_000_000)
        streams = {await client.request(f"/{i}"): i for i in range(256)}
        await client.read_until(lambda: len(client.ended) == 256)
        numbers = b"".join(b"%d," % i for i in range(50))
        assert {stream: bytes(client.data[stream]) for stream in streams} == {
            stream: numbers + b"/%d" % i for stream, i in streams.items()
        }
        await client.close()


async def test_a_stopping_server_refuses_new_streams_and_says_goodbye() -> None:
    go_on, begun = asyncio.Event(), asyncio.Event()

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await go_on.wait()
        await send(START)
        await send({"type": "http.response.body", "body": b"done"})

    context = serving(app_of(handler))
    port = await context.__aenter__()
    client = await RawH2.connect(port)
    stream = await client.request("/rude")
    await begun.wait()
    stopping = asyncio.create_task(context.__aexit__(None, None, None))
    await asyncio.sleep(0)
    go_on.set()
    assert await client.response(stream) == (200, b"done")
    await client.read_until(lambda: client.is_closed)
    assert client.goaway == NO_ERROR
    await stopping
    await client.close()


async def test_requests_that_come_in_one_packet_begin_one_a_turn() -> None:
    """What else the loop has to do goes on between them, however many streams a connection has."""
    loop, turn = asyncio.get_running_loop(), 0
    began: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        began.append(turn)
        await send(START)
        await send({"type": "http.response.body", "body": b""})

    def count() -> None:
        nonlocal turn, handle
        turn += 1
        handle = loop.call_soon(count)

    async with serving(app) as port:
        client = await RawH2.connect(port)
        handle = loop.call_soon(count)
        for stream_id in range(1, 21, 2):
            head = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "test")]
            client.connection.send_headers(stream_id, head, end_stream=True)
        await client.flush()
        await client.read_until(lambda: len(client.ended) == 10)
        handle.cancel()
        assert len(began) == 10
        assert len(set(began)) == 10
        await client.close()
