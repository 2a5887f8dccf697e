"""The ASGI application: which handler answers which path, inside the guard."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from novainfer.server import info, inspection, recorder
from novainfer.server.chat import create_chat_completion
from novainfer.server.completions import create_completion
from novainfer.server.events import stream_events
from novainfer.server.guard import Guard
from novainfer.server.openapi import build_openapi
from novainfer.server.service import Service

Handler = Callable[[Service, Request], Awaitable[ASGIApp]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", create_chat_completion),
    ("POST", "/v1/completions", create_completion),
    ("GET", "/v1/models", info.list_models),
    ("GET", "/v1/models/{model:path}", info.get_model),
    ("POST", "/v1/requests/{request_id:path}/cancel", info.cancel_request),
    ("GET", "/v1/requests", inspection.list_requests),
    ("GET", "/v1/requests/{request_id:path}", inspection.get_request),
    ("GET", "/v1/actors", inspection.list_actors),
    ("GET", "/v1/kv", inspection.get_kv),
    ("GET", "/v1/machines", inspection.list_machines),
    ("GET", "/v1/steps", inspection.list_steps),
    ("GET", "/v1/errors", inspection.list_errors),
    ("GET", "/v1/events", stream_events),
    ("POST", "/v1/faults", inspection.inject_fault),
    ("POST", "/v1/recorder/dump", recorder.dump_recorder),
    ("GET", "/health", info.health),
    ("GET", "/healthz", info.health),
    ("GET", "/readyz", info.health),
    ("GET", "/ping", info.health),
    ("POST", "/ping", info.health),
    ("GET", "/livez", info.live),
    ("GET", "/metrics", info.metrics),
    ("GET", "/version", info.version),
)


def create_app(service: Service) -> ASGIApp:
    """The app that serves `service`; it neither starts nor stops the engine."""
    document = msgspec.json.encode(build_openapi(service.version))

    async def openapi(service: Service, request: Request) -> Response:
        return Response(document, media_type="application/json")

    labels: dict[object, str] = {}
    routes = []
    for method, path, handler in (*ROUTES, ("GET", "/openapi.json", openapi)):
        endpoint = partial(handler, service)
        labels[endpoint] = path.replace(":path", "")
        routes.append(Route(path, endpoint, methods=[method], name=path))
    return Guard(Router(routes, redirect_slashes=False), service, labels)
