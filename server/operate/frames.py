"""`GET /v1/inspector`: all that the page of the inspector shows, as server-sent events: a snapshot, then what changes.

Each event is one `data:` line with a JSON object (webui/src/inspector/wire.ts). A slow client gets fewer of them, with
the same states and counts and fewer details; the engine never waits for it. The end of the stream is the engine's end,
or that of the key.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from novainfer import EngineClosed
from novainfer.inspection import Frame, RequestNow, Snapshot, Watcher
from novainfer.server.directory import shown_id
from novainfer.server.engine import ServedEngine
from novainfer.server.http.errors import TooManyListeners
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.http.writer import HEADERS, KEEP_ALIVE
from novainfer.server.operate.asked import asked_model
from novainfer.server.operate.events import LISTENERS_MAX
from novainfer.server.operate.inspection import shown_incident
from novainfer.server.service import Service

log = logging.getLogger("novainfer.server")


async def stream_frames(service: Service, request: Request) -> FrameFeed:
    """A snapshot of machines, actors, requests, KV blocks, steps and incidents, and then frames of what has changed."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    engine = service.any_engine(asked_model(service, request))
    if engine is None or service.feeds is None:
        raise EngineClosed("There is no engine to watch")
    if len(service.feeds) >= LISTENERS_MAX:
        raise TooManyListeners(f"{LISTENERS_MAX} clients listen or watch already, which is the limit")
    return FrameFeed(service, engine, exchange)


class FrameFeed:
    """ASGI response: what is there to see, until the engine ends, or the client goes or stops reading."""

    def __init__(self, service: Service, engine: ServedEngine, exchange: Exchange) -> None:
        self._service = service
        self._engine = engine
        self._can_inject = service.keys.has_admin and exchange.viewer.is_admin
        self._viewer = exchange.viewer
        self._names: dict[str, str] = {}  # of keys, by owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings, feeds = self._service.settings, self._service.feeds
        if feeds is None:
            raise EngineClosed("There is no engine to watch")
        with self._engine.watch(self._viewer.sees) as watcher:
            feeds.add(watcher)
            try:
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                while data := await self._next(watcher, settings.sse_keep_alive_interval_s):
                    if not await self._service.keys.is_as_it_was(self._viewer):
                        break
                    async with asyncio.timeout(settings.stall_timeout_s):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            except TimeoutError:
                log.warning("a watcher took nothing for %g s, and is told no more", settings.stall_timeout_s)
            finally:
                feeds.discard(watcher)

    async def _next(self, watcher: Watcher, keep_alive_s: float) -> bytes:
        """The next event, or a comment when there is none for a while; empty at the end."""
        try:
            async with asyncio.timeout(keep_alive_s or None):
                async for one in watcher:
                    began_s = time.thread_time()
                    data = b"data: " + msgspec.json.encode(self._shown(one)) + b"\n\n"
                    watcher.spent(time.thread_time() - began_s)
                    return data
        except TimeoutError:
            return KEEP_ALIVE
        return b""

    def _shown(self, one: Snapshot | Frame) -> Snapshot | Frame:
        """With names as clients know them."""
        requests = [self._request(now) for now in one.requests]
        incidents = [shown_incident(record) for record in one.incidents]
        if isinstance(one, Frame):
            return msgspec.structs.replace(one, requests=requests, incidents=incidents)
        engine = self._engine
        model = engine.model_info.name if engine.is_ready else ""
        can_inject = self._can_inject
        return msgspec.structs.replace(one, requests=requests, incidents=incidents, model=model, can_inject=can_inject)

    def _request(self, now: RequestNow) -> RequestNow:
        name = self._names.get(now.owner)
        if name is None:
            record = self._service.keys.record(now.owner)
            name = self._names[now.owner] = record.name if record is not None else ""
        return msgspec.structs.replace(now, id=shown_id(now.id), owner=name)
