"""Streams under every kind of window: all bytes of each, none past its windows, and no stream before the others."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from h2.windows import WindowManager
from starlette.types import Receive, Scope, Send

from novainfer.server.http import http2, http2_allowance
from novainfer.server.http.exchange import WRITE_NOW_KEY
from tests.server.conftest import eventually
from tests.server.rawh2 import RawH2
from tests.server.test_http2 import START, app_of, is_fine, is_fine_without_window, serving

FRAME_BYTES = 16_384
WINDOW_BYTES = 65_535


def body_of(path: str) -> bytes:
    """What the app answers to `path`: up to 120 kB."""
    source = random.Random(path)
    return source.randbytes(source.choice([0, 1, 300, 5_000, 120_000]))


async def events(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that writes `body_of` its path as events are written, a turn of the loop between some of them."""
    source, write_now, body = random.Random(scope["path"]), scope["extensions"][WRITE_NOW_KEY], body_of(scope["path"])
    await send(START)
    at = 0
    while at < len(body):
        size = source.choice([1, 60, 60, 60, 4_095, 4_096, 40_000])
        data = body[at : at + size]
        at += size
        if not write_now(data):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        if source.random() < 0.3:
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def protocols(monkeypatch: pytest.MonkeyPatch) -> list[http2.Http2]:
    """The server's end of all connections."""
    found = list[http2.Http2]()
    initiate = http2.Http2.initiate

    async def noted(self: http2.Http2, *args: Any) -> None:
        found.append(self)
        await initiate(self, *args)

    monkeypatch.setattr(http2.Http2, "initiate", noted)
    return found


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 9113, 6.9: an empty frame may end a stream whatever its window; below zero, h2 as a client refuses it."""
    consumed = WindowManager.window_consumed

    def of_data(self: WindowManager, size: int) -> None:
        if size:
            consumed(self, size)

    monkeypatch.setattr(WindowManager, "window_consumed", of_data)


class Fickle:
    """A client that changes its windows and its mind at random; `h2` raises where a frame is past what it allowed."""

    def __init__(self, client: RawH2, seed: int) -> None:
        self.client, self.connection, self.random = client, client.connection, random.Random(seed)
        self.streams: dict[int, str] = {}
        self.left: set[int] = set()  # that it has reset
        self.frame_bytes = 1 << 20  # that it has asked for last

    async def begin(self) -> None:
        """Allow large frames before anything is asked for."""
        self.connection.update_settings({SettingCodes.MAX_FRAME_SIZE: 1 << 20})
        await self.client.flush()
        await self.client.read_until(lambda: self.connection.local_settings.max_frame_size == 1 << 20)

    async def act(self) -> None:
        """One thing, at random."""
        among = self.random
        action = among.choice([self.ask, self.ask, self.open, self.open, self.open, self.set, self.reset, self.wait])
        await action()
        await self.client.flush()

    @property
    def open_streams(self) -> list[int]:
        """Those that have not ended."""
        return sorted(self.streams.keys() - self.client.ended - self.left)

    async def ask(self) -> None:
        if len(self.streams) < 40:
            path = f"/{self.random.randrange(1 << 30)}"
            self.streams[await self.client.request(path)] = path

    async def open(self) -> None:
        """Let more come: on the connection, or on one stream."""
        size = self.random.choice([1, 9, 100, 5_000, 30_000])
        streams = self.open_streams
        stream = self.random.choice(streams) if streams and self.random.random() < 0.5 else None
        self.connection.increment_flow_control_window(size, stream)

    async def set(self) -> None:
        """Other sizes from now on; what was sent may be more than a window holds now."""
        window = self.random.choice([0, 1, 500, WINDOW_BYTES, 200_000])
        # Never larger again: h2 judges what comes in one piece with the acknowledgement by the size before it.
        self.frame_bytes = min(self.frame_bytes, self.random.choice([FRAME_BYTES, 20_000, 1 << 20]))
        sizes = {SettingCodes.INITIAL_WINDOW_SIZE: window, SettingCodes.MAX_FRAME_SIZE: self.frame_bytes}
        self.connection.update_settings(sizes)

    async def reset(self) -> None:
        if (streams := self.open_streams) and self.random.random() < 0.5:
            stream = self.random.choice(streams)
            self.connection.reset_stream(stream, ErrorCodes.CANCEL)
            self.left.add(stream)

    async def wait(self) -> None:
        await asyncio.sleep(self.random.choice([0, 0, 0.001, 0.01]))

    async def take_all(self) -> None:
        """Open all windows as far as all answers need."""
        self.connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
        self.connection.increment_flow_control_window(1 << 24)
        await self.client.flush()


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("seed", range(8))
async def test_each_stream_has_all_its_bytes_whatever_its_windows_were(seed: int, protocols: list[http2.Http2]) -> None:
    async with serving(app_of(events)) as port:
        client = await RawH2.connect(port, takes_data=False)
        fickle = Fickle(client, seed)
        await fickle.begin()
        reading = asyncio.create_task(client.read_until(lambda: False))
        try:
            for _ in range(150):
                await fickle.act()
                if reading.done():
                    await reading  # what h2 has to say about a frame
            await fickle.take_all()
            async with asyncio.timeout(10):
                while fickle.open_streams and not reading.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading  # what h2 had to say
        assert client.goaway is None
        for stream, path in fickle.streams.items():
            if stream in client.ended:
                assert client.data[stream] == body_of(path)
            else:
                assert stream in fickle.left
                assert body_of(path).startswith(client.data[stream])
        assert {stream for stream, data in client.data.items() if data} <= client.headers.keys()
        await is_fine(client)
        (protocol,) = protocols
        assert (protocol._unsent_bytes, protocol._ready, protocol._open) == (0, {}, {})
        await client.close()


async def test_streams_share_a_connection_whose_window_is_small() -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"x" * FRAME_BYTES, "more_body": True})

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port, takes_data=False, initial_window=1 << 24)
        streams = [await client.request("/much") for _ in range(8)]
        await client.read_until(
            lambda: len(client.headers) == 8 and sum(map(len, client.data.values())) == WINDOW_BYTES
        )
        await is_fine_without_window(client)  # meanwhile they fill their buffers
        before = {stream: len(client.data[stream]) for stream in streams}
        for most in range(WINDOW_BYTES + FRAME_BYTES, WINDOW_BYTES + 17 * FRAME_BYTES, FRAME_BYTES):
            client.connection.increment_flow_control_window(FRAME_BYTES)
            await client.flush()
            await client.read_until(lambda most=most: sum(map(len, client.data.values())) == most)  # type: ignore[misc]
        assert min(len(client.data[stream]) - before[stream] for stream in streams) >= FRAME_BYTES
        await client.close()


async def test_what_is_taken_at_once_is_bounded_and_comes_in_its_order(protocols: list[http2.Http2]) -> None:
    taken = list[bool]()

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        write_now = scope["extensions"][WRITE_NOW_KEY]
        await send(START)
        number = 0
        while not taken or taken[-1]:
            taken.append(write_now(b"%07d\n" % number * 125))
            number += taken[-1]
        (protocol,) = protocols
        assert len(protocol.connection._data_to_send) < http2.WRITE_BYTES_MAX + 2_000
        for more in range(number, number + 4):
            data = b"%07d\n" % more * 125
            if not write_now(data):
                await send({"type": "http.response.body", "body": data, "more_body": True})
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port, initial_window=1 << 24)
        client.connection.increment_flow_control_window(1 << 24)
        status, body = await client.response(await client.request("/much"))
        assert status == 200
        assert taken.count(False) == 1
        assert [int(line) for line in body.split()[::125]] == [*range(len(taken) + 3)]
        assert http2.WRITE_BYTES_MAX < len(body) < http2.WRITE_BYTES_MAX + 10_000
        await is_fine(client)
        await client.close()


async def test_what_is_framed_while_a_socket_is_full_is_written_when_it_is_not(protocols: list[http2.Http2]) -> None:
    full, over = asyncio.Event(), asyncio.Event()

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        write_now = scope["extensions"][WRITE_NOW_KEY]
        await send(START)
        (protocol,) = protocols
        transport = protocol._connection.writer.transport
        while not transport.get_write_buffer_size():  # which is far from what the sender would wait for
            assert write_now(b"x" * 4_000)
            await asyncio.sleep(0)
        assert not protocol._is_flushing
        assert write_now(b"last")
        full.set()
        await over.wait()
        await send({"type": "http.response.body", "body": b""})

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port, takes_data=False, initial_window=1 << 30)
        client.connection.increment_flow_control_window(1 << 30)
        await is_fine(client)  # and from here on it says nothing more, which would wake the sender
        stream = await client.request("/much")
        async with asyncio.timeout(10):
            await full.wait()
        await client.read_until(lambda: client.data[stream].endswith(b"last"))
        assert client.data[stream].endswith(b"last")
        over.set()
        await client.response(stream)
        await client.close()


@pytest.mark.parametrize("sender_is_first", [False, True])
async def test_a_client_may_answer_each_event_that_is_written_at_once_with_windows(
    protocols: list[http2.Http2], monkeypatch: pytest.MonkeyPatch, sender_is_first: bool
) -> None:
    monkeypatch.setattr(http2_allowance, "OVERHEAD_BYTES_MAX", 20_000)  # less than a hundred updates cost
    monkeypatch.setattr(http2_allowance, "OVERHEAD_BYTES_PER_S", 0.0)
    asked = asyncio.Semaphore(0)
    num_events = 50

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for _ in range(num_events):
            await asked.acquire()
            if sender_is_first:
                protocols[0]._wake_sender.set()
            assert scope["extensions"][WRITE_NOW_KEY](b"x")
        await asked.acquire()
        await send({"type": "http.response.body", "body": b""})

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port, takes_data=False)
        stream = await client.request("/events")
        await client.read_until(lambda: client.headers)
        (protocol,) = protocols
        first = protocol.connection.outbound_flow_control_window + 1
        for window in range(first, first + num_events):  # an event takes one, and two are given back
            asked.release()
            num_bytes = len(client.data[stream])
            await client.read_until(lambda num=num_bytes: len(client.data[stream]) > num)  # type: ignore[misc]
            for _ in range(2):
                client.connection.increment_flow_control_window(1, stream)
                client.connection.increment_flow_control_window(1)
            await client.flush()
            await eventually(
                lambda now=window: protocol.closed or protocol.connection.outbound_flow_control_window == now
            )
        asked.release()
        status, body = await client.response(stream)
        assert (status, body) == (200, b"x" * num_events)
        await client.close()


async def test_a_client_that_says_goodbye_and_reads_nothing_more_is_taken_as_gone() -> None:
    told = asyncio.Event()

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        writes = asyncio.create_task(write(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        told.set()
        await writes

    num_sent = 0

    async def write(send: Send) -> None:
        nonlocal num_sent
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 50_000, "more_body": True})
            num_sent += 1

    async with serving(app_of(handler)) as port:
        client = await RawH2.connect(port, takes_data=False, initial_window=(1 << 31) - 1)
        client.connection.increment_flow_control_window((1 << 31) - 1 - WINDOW_BYTES)
        await client.request("/much")
        before = -1
        while num_sent > before:  # until nothing more has room anywhere
            before = num_sent
            await asyncio.sleep(0.2)
        assert 0 < num_sent < 1000
        client.connection.close_connection()
        client.writer.write(client.connection.data_to_send())
        async with asyncio.timeout(5):
            await told.wait()
        client.writer.transport.abort()
