"""A generation as server-sent events, with exactly one ending.

    ok      … chunks …   [usage chunk]   data: [DONE]      end of stream
    error   … chunks …   data: {"error": {…}}              end of stream, no [DONE]: strict clients take it as success
    client gone: the generation is cancelled, nothing more is sent

A client that stops reading closes its window, so that `send` waits, the engine's stream fills, and its request pauses.
If it comes back within `stall_timeout_s` it goes on where it was; if later, it finds what there was and one error
event. If it has not come back `stall_grace_s` after that, its stream is reset.

Between events, a sign of life (a comment line) goes out after each silent interval, and one at the beginning if the
request has to wait for room in the queue. One timer per stream does that and looks for stalled writes: it is not
re-armed per token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from novainfer import Delta
from novainfer.server.http.clients import UNREAD_AFTER_S, Unread
from novainfer.server.http.errors import log_if_ours
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.openai.chunks import StreamEncoder
from novainfer.server.openai.generation import Generation
from novainfer.server.settings import ServerSettings

log = logging.getLogger("novainfer.server")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
]


# A request with n=128 has 128 deltas after each step. None of them waits for the loop, and with 20 log probabilities
# each they are 0.1 MB of text in one turn.
TURN_BYTES = 4096

IN_OVERFLOW = (b"x-novainfer-queue", b"overflow")
IN_OVERFLOW_COMMENT = b": waiting for room in the queue\n\n"


class EventStream:
    """ASGI response: the chunks of `generation`, whose first delta is (or will be) in `first`."""

    def __init__(
        self,
        generation: Generation,
        first: asyncio.Task[Delta],
        encoder: StreamEncoder,
        settings: ServerSettings,
    ) -> None:
        self._generation = generation
        self._first = first
        self._encoder = encoder
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, encoder = self._generation, self._encoder
        exchange: Exchange = scope[SCOPE_KEY]
        writer = Writer(send, self._settings.sse_keep_alive_interval_s, lambda: encoder.keep_alive, exchange.unread())
        ended_by: BaseException | None = None
        try:
            headers = [*HEADERS, IN_OVERFLOW] if generation.is_overflowed else HEADERS
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            begin = (IN_OVERFLOW_COMMENT if generation.is_overflowed else b"") + encoder.begin()
            if not self._first.done():
                await writer.write(begin or encoder.keep_alive)
                begin = b""
            delta = await self._first
            generation.note(delta)
            await writer.write(begin + encoder.delta(delta))
            unturned_bytes = 0
            while not encoder.is_over:
                following = await anext(generation.deltas, None)
                if following is None:
                    break
                delta = following
                generation.note(delta)
                if data := encoder.delta(delta):
                    await writer.write(data)
                    unturned_bytes += len(data)
                if unturned_bytes >= TURN_BYTES:
                    unturned_bytes = 0
                    await asyncio.sleep(0)
            await writer.write(encoder.end(), is_last=True)
        except Exception as error:
            ended_by = error
            log_if_ours(error, generation.id)
            await writer.write(encoder.error(error), is_last=True)
        except asyncio.CancelledError as error:
            ended_by = error
            if not writer.has_stalled:
                raise
            log.warning("request %s: the client took nothing for too long, its stream is reset", generation.id)
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        finally:
            writer.close()
            await generation.leave(self._first, ended_by)


class Writer:
    """Sends events, and what `keep_alive` gives when there are none; cancels its task when a send makes no progress."""

    def __init__(self, send: Send, keep_alive_s: float, keep_alive: Callable[[], bytes], unread: Unread) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._unread = unread
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._ping: asyncio.Task[None] | None = None
        self._last = self._loop.time()  # when the last send began or ended
        self._is_sending = False
        self._period_s = min(self._keep_alive_s or UNREAD_AFTER_S, UNREAD_AFTER_S, unread.timeout_s)
        self._timer = self._loop.call_later(self._period_s, self._beat)

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        if not data and not is_last:
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

    def close(self) -> None:
        self._timer.cancel()
        self._unread.goes_on()
        if self._ping is not None:
            self._ping.cancel()
