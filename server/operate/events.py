"""`GET /v1/events`: transitions and incidents as server-sent events, from the moment the client listens.

Events go out in batches, twenty a second at most, each event as one `data:` line. What a slow client misses is counted
and told (`{"type": "lost", "count": …}`): the engine never waits for it. The end of the stream is the engine's end, or
that of the key.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from novainfer import EngineClosed, InvalidParameter
from novainfer.inspection import FeedEvent, IncidentEvent, RequestEvent, Subscription
from novainfer.server.directory import shown_id
from novainfer.server.http.errors import TooManyListeners
from novainfer.server.http.exchange import SCOPE_KEY, Exchange, Viewer
from novainfer.server.http.writer import HEADERS, KEEP_ALIVE
from novainfer.server.operate.asked import asked_model
from novainfer.server.operate.inspection import shown_incident
from novainfer.server.service import Service

log = logging.getLogger("novainfer.server")

LISTENERS_MAX = 32  # each costs the engine a microsecond or two for every transition
BATCH_INTERVAL_S = 0.05  # a person sees no difference, and the loop is woken twenty times a second, not a thousand
TYPES = ("actor", "request", "incident")


async def stream_events(service: Service, request: Request) -> EventFeed:
    """Transitions of actors and requests, and incidents; `?types=` picks some of these kinds."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    types = frozenset(request.query_params.get("types", ",".join(TYPES)).split(","))
    if not types <= set(TYPES):
        raise InvalidParameter(f"types must be some of {', '.join(TYPES)}, separated by commas", param="types")
    engine = service.any_engine(asked_model(service, request))
    if engine is None or service.feeds is None:
        raise EngineClosed("There is no engine to listen to")
    if len(service.feeds) >= LISTENERS_MAX:
        raise TooManyListeners(f"{LISTENERS_MAX} clients listen to the events already, which is the limit")
    return EventFeed(service, exchange.viewer, engine.events(exchange.viewer.sees), types)


class EventFeed:
    """ASGI response: what `subscription` brings, until it ends, or the client goes or stops reading."""

    def __init__(self, service: Service, viewer: Viewer, subscription: Subscription, types: frozenset[str]) -> None:
        self._service = service
        self._viewer = viewer
        self._subscription = subscription
        self._types = types | {"lost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._service.settings
        feeds = self._service.feeds
        assert feeds is not None
        feeds.add(self._subscription)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            data = b": listening\n\n"
            while data and await self._service.keys.is_as_it_was(self._viewer):
                async with asyncio.timeout(settings.stall_timeout_s):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await self._next(settings.sse_keep_alive_interval_s)
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            log.warning("a listener took nothing for %g s, and hears no more", settings.stall_timeout_s)
        finally:
            feeds.discard(self._subscription)
            self._subscription.close()

    async def _next(self, keep_alive_s: float) -> bytes:
        """The next events, or a comment when there are none for a while; empty at the end."""
        await asyncio.sleep(BATCH_INTERVAL_S)
        try:
            async with asyncio.timeout(keep_alive_s or None):
                async for batch in self._subscription:
                    if data := b"".join(map(_line, filter(self._is_wanted, batch))):
                        return data
        except TimeoutError:
            return KEEP_ALIVE
        return b""

    def _is_wanted(self, event: FeedEvent) -> bool:
        return event.__struct_config__.tag in self._types


def _line(event: FeedEvent) -> bytes:
    if isinstance(event, RequestEvent):
        event = msgspec.structs.replace(event, id=shown_id(event.id))
    elif isinstance(event, IncidentEvent):
        event = msgspec.structs.replace(event, incident=shown_incident(event.incident))
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
