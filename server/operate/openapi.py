"""The OpenAPI 3.1 document, made from the routes and the very Structs that decode and encode the bodies."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from novainfer.server.http.errors import ErrorBody
from novainfer.server.service import Service

Handler = Callable[[Service, Request], Awaitable[ASGIApp]]

ERRORS = {
    400: "a field is wrong, unsupported, or too long for the context",
    401: "the API key is missing or wrong",
    403: "this key may not do it: a model that is not for it, or what needs an admin key",
    404: "no such model, request, response or path",
    408: "the body, or the request's own deadline, took too long",
    409: "not now, or not so: all is as before",
    413: "the body is over the limit",
    415: "the body is not declared as JSON",
    429: "this client has its share already, or its key what it may use; see Retry-After",
    499: "the request was cancelled by another",
    500: "the server failed on this request",
    503: "full, loading, shutting down or stuck; see Retry-After",
}

# Of a stream: each of its events by its fields, as tools that check streams read them.
EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}


class Endpoint(msgspec.Struct, frozen=True):
    """One route: its handler, and what the document says of it.

    `answer` is what a 200 holds, a string where that is None; `media_types` are those that it may come in.
    """

    method: str
    path: str  # Starlette's: a parameter may be `{name:path}`
    handler: Handler
    summary: str
    answer: type | None
    body: type | None = None
    errors: tuple[int, ...] = (401, 503)
    media_types: tuple[str, ...] = ("application/json",)
    query: dict[str, str] = {}
    is_public: bool = False  # needs no key
    error: type = ErrorBody

    @property
    def name(self) -> str:
        """The path as the document and the metrics have it."""
        return self.path.replace(":path", "")


def build_openapi(version: str, endpoints: Iterable[Endpoint], root_path: str | None = None) -> dict[str, Any]:
    """The document as a dict; `root_path` is where a proxy has the paths."""
    endpoints = list(endpoints)
    used = [(endpoint.error, endpoint.answer, endpoint.body) for endpoint in endpoints]
    types = list(dict.fromkeys(one for of_one in used for one in of_one if one is not None))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type: dict[type | None, dict[str, Any]] = {None: {"type": "string"}, **dict(zip(types, schemas, strict=True))}
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.name, {})[endpoint.method.lower()] = _operation(endpoint, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "NovaInfer", "version": version, "description": "OpenAI-compatible inference over HTTP/2"},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "apiKey": {"type": "http", "scheme": "bearer"},
                "anthropicKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"apiKey": []}, {"anthropicKey": []}],
    }


def _operation(endpoint: Endpoint, by_type: dict[type | None, dict[str, Any]]) -> dict[str, Any]:
    first, *others = endpoint.media_types
    content = _content(by_type[endpoint.answer], first)
    for media_type in others:  # of a stream, whose events are no JSON document
        content |= _content(by_type[None], media_type)
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    for status in endpoint.errors:
        responses[str(status)] = {"description": ERRORS[status], "content": _content(by_type[endpoint.error])}
    entry: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.body is not None:
        entry["requestBody"] = {"required": True, "content": _content(by_type[endpoint.body])}
    string = {"type": "string"}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": string}
        for name in re.findall(r"{(\w+)}", endpoint.name)
    ] + [{"name": name, "in": "query", "description": text, "schema": string} for name, text in endpoint.query.items()]
    if parameters:
        entry["parameters"] = parameters
    if endpoint.is_public:
        entry["security"] = []
    return entry


def _content(schema: dict[str, Any], media_type: str = "application/json") -> dict[str, Any]:
    return {media_type: {"schema": EVENT if media_type == "text/event-stream" else schema}}
