"""A stream whose events are all there already leaves the loop to others between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from novainfer import Delta
from novainfer.server.http.exchange import SCOPE_KEY
from novainfer.server.openai.sse import TURN_BYTES, EventStream
from novainfer.server.settings import ServerSettings

NUM_EVENTS = 40


class Encoder:
    """Makes an event of half of what a turn may hold of each delta."""

    is_over = False
    keep_alive = b": keep-alive\n\n"

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        return b"x" * (TURN_BYTES // 2)

    def end(self) -> bytes:
        return b"end"


async def test_the_loop_turns_between_the_events_of_a_stream_that_waits_for_nothing() -> None:
    sent: list[bytes] = []
    seen: list[int] = []  # how many had been sent, each time that another task had its turn

    async def deltas() -> AsyncIterator[Delta]:
        for _ in range(NUM_EVENTS):
            yield Delta(request_id="a", index=0, text="x")

    async def forward(last: Delta, take: Callable[[Delta], bool]) -> None:
        pass  # nothing comes but by `deltas`

    async def leave(first: asyncio.Task[Delta], ended_by: BaseException | None) -> None:
        assert ended_by is None

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    async def first() -> Delta:
        return Delta(request_id="a", index=0, text="x")

    async def neighbour() -> None:
        while b"end" not in sent:
            seen.append(len(sent))
            await asyncio.sleep(0)

    unread = SimpleNamespace(timeout_s=1000.0, has_stalled=False, goes_on=lambda: None)
    generation: Any = SimpleNamespace(
        id="a", is_overflowed=False, note=lambda delta: None, deltas=deltas(), forward=forward, leave=leave
    )
    stream = EventStream(generation, asyncio.create_task(first()), Encoder(), ServerSettings())
    beside = asyncio.create_task(neighbour())
    scope: Any = {SCOPE_KEY: SimpleNamespace(stream=lambda: lambda data: False, unread=lambda: unread)}
    receive: Any = None
    await stream(scope, receive, send)
    await beside
    seen.append(len(sent))
    assert max(later - earlier for earlier, later in pairwise([0, *seen])) <= 4
