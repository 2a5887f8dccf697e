"""A stream's signs of life, and its count of bytes, where events are written without its task."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from starlette.types import Message

from novainfer.server.http.exchange import WRITE_NOW_KEY, Exchange
from novainfer.server.http.writer import Writer

SCOPE: dict[str, Any] = {"method": "POST", "path": "/v1/completions", "http_version": "2", "headers": []}


class Stream:
    """A writer of one stream, its own clock, and a client that takes what there is while `has_room`."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.has_room = True
        self.written: list[bytes] = []
        unread: Any = SimpleNamespace(timeout_s=1_000.0, has_stalled=False, goes_on=lambda: None)
        scope = {**SCOPE, "extensions": {WRITE_NOW_KEY: self._take}}
        self.exchange = Exchange(scope, self._send, unread=lambda client: unread)
        self.writer = Writer(self.exchange.send, 5.0, lambda: b": sign\n\n", self.exchange)
        loop = asyncio.get_running_loop()
        fake: Any = SimpleNamespace(time=lambda: self.now_s, create_task=loop.create_task, call_later=loop.call_later)
        self.writer._loop, self.writer._last = fake, self.now_s

    def _take(self, data: bytes) -> bool:
        if self.has_room:
            self.written.append(data)
        return self.has_room

    async def _send(self, message: Message) -> None:
        self.written.append(message["body"])

    async def beat(self, after_s: float) -> None:
        """The writer's timer, when so much time has gone by."""
        self.now_s += after_s
        self.writer._timer.cancel()
        self.writer._beat()
        await asyncio.sleep(0)


async def test_a_stream_that_is_written_to_at_once_is_not_silent() -> None:
    stream = Stream()
    stream.now_s += 4.0
    assert stream.writer.write_now(b"a")
    await stream.beat(after_s=4.0)
    assert stream.written == [b"a"]
    await stream.beat(after_s=1.0)
    assert stream.written == [b"a", b": sign\n\n"]
    stream.writer.close()


async def test_what_holds_no_event_or_has_no_room_is_no_sign_of_life() -> None:
    stream = Stream()
    stream.now_s += 4.0
    assert stream.writer.write_now(b"")
    stream.has_room = False
    assert not stream.writer.write_now(b"a")
    await stream.beat(after_s=1.0)
    assert stream.written == [b": sign\n\n"]
    stream.writer.close()


async def test_bytes_count_once_whichever_way_they_go() -> None:
    stream = Stream()
    assert stream.writer.write_now(b"four")
    await stream.writer.write(b"five!")
    stream.has_room = False
    assert not stream.writer.write_now(b"sixsix")
    await stream.writer.write(b"sixsix")
    assert stream.written == [b"four", b"five!", b"sixsix"]
    assert stream.exchange.num_bytes == 15
    stream.writer.close()
