"""A generation as server-sent events, with exactly one ending.

    ok      … chunks …   [usage chunk]   data: [DONE]      end of stream
    error   … chunks …   data: {"error": {…}}              end of stream, no [DONE]: strict clients take it as success
    client gone: the generation is cancelled, nothing more is sent

While its client keeps up, an event of a stream with one choice is written in the engine's own turn
(`Generation.forward`), and the stream's task sleeps; what has no room, and all that is out of the ordinary, wakes it.
A client that stops reading closes its window, so that `send` waits, the engine's stream fills, and its request pauses.
If it comes back within `stall_timeout_s` it goes on where it was; if later, it finds what there was and one error
event. If it has not come back `stall_grace_s` after that, its stream is reset.

Between events, a sign of life (a comment line) goes out after each silent interval (`server/http/writer.py`), and one
at the beginning if the request has to wait for room in the queue.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.types import Receive, Scope, Send

from novainfer import Delta
from novainfer.server.http.errors import log_if_ours
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.http.writer import HEADERS, Writer
from novainfer.server.openai.chunks import StreamEncoder
from novainfer.server.openai.coarse import coarse
from novainfer.server.openai.generation import Generation
from novainfer.server.settings import ServerSettings

log = logging.getLogger("novainfer.server")

# A request with n=128 has 128 deltas after each step. None of them waits for the loop, and with 20 log probabilities
# each they are 0.1 MB of text in one turn.
TURN_BYTES = 4096

IN_OVERFLOW = (b"x-novainfer-queue", b"overflow")
IN_OVERFLOW_COMMENT = b": waiting for room in the queue\n\n"


class _Forwarding:
    """What reads a stream in the place of its task; one object, for at each step those of all streams are looked at."""

    __slots__ = ("_encoder", "_generation", "_writer", "unsent")

    def __init__(self, generation: Generation, encoder: StreamEncoder, writer: Writer) -> None:
        self._generation = generation
        self._encoder = encoder
        self._writer = writer
        self.unsent: bytes | None = None  # what had no room at once, or is the last

    def take(self, delta: Delta) -> bool:
        """Write what a step has brought, while the client keeps up; False: the task goes on with `unsent`."""
        self._generation.note(delta)
        encoder = self._encoder
        data = encoder.delta(delta)
        if encoder.is_over or not self._writer.write_now(data):
            self.unsent = data
            return False
        return True


class EventStream:
    """ASGI response: the chunks of `generation`, whose first delta is (or will be) in `first`.

    Between two of a choice are `interval` tokens, or as many as the operator says.
    """

    def __init__(
        self,
        generation: Generation,
        first: asyncio.Task[Delta],
        encoder: StreamEncoder,
        settings: ServerSettings,
        interval: int | None = None,
    ) -> None:
        self._generation = generation
        self._first = first
        self._encoder = coarse(encoder, interval or settings.stream_interval)
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, encoder = self._generation, self._encoder
        exchange: Exchange = scope[SCOPE_KEY]
        writer = Writer(send, self._settings.sse_keep_alive_interval_s, lambda: encoder.keep_alive, exchange)
        ended_by: BaseException | None = None
        try:
            headers = [*HEADERS, IN_OVERFLOW] if generation.is_overflowed else HEADERS
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if self._first.done() and not self._first.cancelled() and self._first.exception() is None:
                generation.tally.expect(self._first.result())  # what a first chunk says of usage
            begin = (IN_OVERFLOW_COMMENT if generation.is_overflowed else b"") + encoder.begin()
            if not self._first.done():
                await writer.write(begin or encoder.keep_alive)
                begin = b""
            delta = await self._first
            generation.note(delta)
            await writer.write(begin + encoder.delta(delta))
            unturned_bytes = 0
            forwarding = _Forwarding(generation, encoder, writer)
            while not encoder.is_over:
                await generation.forward(delta, forwarding.take)
                if forwarding.unsent is not None:
                    data, forwarding.unsent = forwarding.unsent, None
                    await writer.write(data)
                    continue
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
