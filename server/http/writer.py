"""How the events of a stream go out: one after the other, with signs of life between them, and watched.

A sign of life (a comment line) goes out after each silent interval. One timer a stream does that and looks for stalled
writes: it is not re-armed per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Send

from novainfer.server.http.clients import UNREAD_AFTER_S
from novainfer.server.http.exchange import Exchange

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
]
KEEP_ALIVE = b": keep-alive\n\n"


class Writer:
    """Sends events, and what `keep_alive` gives when there are none; cancels its task when a send makes no progress."""

    def __init__(self, send: Send, keep_alive_s: float, keep_alive: Callable[[], bytes], exchange: Exchange) -> None:
        self._send = send
        self._exchange = exchange
        self._write_now = exchange.stream()
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._unread = unread = exchange.unread()
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._ping: asyncio.Task[None] | None = None
        self._last = self._loop.time()  # when the last send began or ended
        self._is_sending = False
        self._period_s = min(self._keep_alive_s or UNREAD_AFTER_S, UNREAD_AFTER_S, unread.timeout_s)
        self._timer = self._loop.call_later(self._period_s, self._beat)

    def write_now(self, data: bytes) -> bool:
        """Write more without waiting; False where it has to be written by `write`."""
        if data:
            if not self._write_now(data):
                return False
            self._exchange.num_bytes += len(data)
            self._last = self._loop.time()
        return True

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        if not is_last and self.write_now(data):
            return
        self._is_sending = True
        self._last = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._is_sending = False
        self._last = self._loop.time()
        self._unread.goes_on()

    @property
    def has_stalled(self) -> bool:
        """True when the task was cancelled because its client took nothing."""
        return self._unread.has_stalled

    def _beat(self) -> None:
        silent_s = self._loop.time() - self._last
        if self._is_sending or (self._ping is not None and not self._ping.done()):
            self._unread.waits(self._task, silent_s)
            if self.has_stalled:
                return
        elif self._keep_alive_s and silent_s >= self._keep_alive_s:
            self._ping = self._loop.create_task(self._send_ping())
            silent_s = 0.0
        wait_s = self._period_s - silent_s if silent_s < self._period_s else self._period_s
        self._timer = self._loop.call_later(max(wait_s, 0.001), self._beat)

    async def _send_ping(self) -> None:
        await self._send({"type": "http.response.body", "body": self._keep_alive(), "more_body": True})
        self._last = self._loop.time()
        self._unread.goes_on()

    async def hand_over(self) -> None:
        """Close it for another one, behind the sign of life that is on its way: cut off, it would spoil an event."""
        if self._ping is not None:
            await asyncio.wait({self._ping})
        self.close()

    def close(self) -> None:
        self._timer.cancel()
        self._unread.goes_on()
        if self._ping is not None:
            self._ping.cancel()
