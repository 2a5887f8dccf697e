"""A response that is kept, read as a stream: the events behind one of them, then those that come, to its last.

A reader holds nothing but its place: a slow one holds up neither the engine nor other readers, and a response that is
dropped meanwhile ends its stream with an `error` event.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.types import Receive, Scope, Send

from novainfer.server.http.errors import ResponseNotFound
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.http.shapes import response_error_event
from novainfer.server.http.writer import HEADERS, KEEP_ALIVE, Writer
from novainfer.server.openai.kept import Kept
from novainfer.server.openai.sse import TURN_BYTES
from novainfer.server.service import Service
from novainfer.server.store import Record

log = logging.getLogger("novainfer.server")


class Following:
    """ASGI response: the events of `record` from the `first`-th on."""

    def __init__(self, service: Service, record: Record, first: int = 0) -> None:
        self._service = service
        self._record = record
        self._at = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        settings, name = self._service.settings, (self._record.id, self._record.owner)
        writer = Writer(send, settings.sse_keep_alive_interval_s, lambda: KEEP_ALIVE, exchange)
        kept: Kept | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._service.has_returned(name)
            if (kept := self._service.kept.get(name)) is not None:
                kept.enter()
            while data := await self._next():
                await writer.write(data)
            await writer.write(self._end(), is_last=True)
        except asyncio.CancelledError:
            if not writer.has_stalled:
                raise
            log.warning("response %s: a reader took nothing for too long, its stream is reset", self._record.id)
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        finally:
            writer.close()
            if kept is not None:
                kept.leave()

    async def _next(self) -> bytes:
        """Some events, once there are any; none at the end."""
        record = self._record
        while not record.is_dropped:
            events = record.events
            assert events is not None, "only responses with events are followed"
            if self._at < len(events):
                record.use()
                return self._some(events)
            if record.is_over:
                return b""
            await record.changed()
        return b""

    def _some(self, events: list[bytes]) -> bytes:
        data = b""
        while self._at < len(events) and len(data) < TURN_BYTES:
            data += events[self._at]
            self._at += 1
        return data

    def _end(self) -> bytes:
        if not self._record.is_dropped:
            return b""
        gone = ResponseNotFound(f"Response with id '{self._record.id}' is kept no longer")
        return response_error_event(gone, self._at)
