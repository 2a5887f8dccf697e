"""The OpenAPI 3.1 document, made from the very Structs that decode and encode the bodies."""

from __future__ import annotations

from typing import Any

import msgspec

from novainfer.server.errors import ErrorBody, one_of
from novainfer.server.info import Alive, Cancelled, Health, Model, ModelList, Version
from novainfer.server.inspection import (
    REQUEST_STATES,
    ActorList,
    ErrorList,
    Fault,
    Injected,
    Kv,
    MachineList,
    RequestDetail,
    RequestList,
    StepList,
)
from novainfer.server.protocol import ChatCompletionRequest, CompletionRequest
from novainfer.server.recorder import Dumped
from novainfer.server.replies import ChatCompletion, Completion

READY_PROBES = ("/health", "/healthz", "/readyz")
ERRORS = {
    400: "a field is wrong, unsupported, or too long for the context",
    401: "the API key is missing or wrong",
    403: "the admin key is needed, or there is none",
    404: "no such model, request or path",
    408: "the body, or the request's own deadline, took too long",
    413: "the body is over the limit",
    415: "the body is not declared as JSON",
    429: "this client has its share already; see Retry-After",
    500: "the server failed on this request",
    503: "full, loading, shutting down or stuck; see Retry-After",
}


def _content(schema: dict[str, Any], media_type: str = "application/json") -> dict[str, Any]:
    return {media_type: {"schema": schema}}


def build_openapi(version: str) -> dict[str, Any]:
    """The document as a dict."""
    types = (
        *(ChatCompletionRequest, CompletionRequest, ChatCompletion, Completion),
        *(ModelList, Model, Health, Alive, Cancelled, Version, ErrorBody),
        *(RequestList, RequestDetail, ActorList, Kv, MachineList, StepList, ErrorList, Fault, Injected),
        Dumped,
    )
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type: dict[type, dict[str, Any]] = dict(zip(types, schemas, strict=True))

    def operation(
        summary: str,
        answer: type | None,
        *,
        body: type | None = None,
        errors: tuple[int, ...] = (401, 503),
        streams: bool = False,
        media_type: str = "application/json",
        parameter: str | None = None,
        public: bool = False,
        query: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        content = _content(by_type[answer] if answer is not None else {"type": "string"}, media_type)
        if streams:
            content |= _content({"type": "string"}, "text/event-stream")
        responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
        for status in errors:
            responses[str(status)] = {"description": ERRORS[status], "content": _content(by_type[ErrorBody])}
        entry: dict[str, Any] = {"summary": summary, "responses": responses}
        if body is not None:
            entry["requestBody"] = {"required": True, "content": _content(by_type[body])}
        if parameter is not None:
            entry["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}]
        if query:
            entry["parameters"] = [
                {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
                for name, text in query.items()
            ]
        if public:
            entry["security"] = []
        return entry

    generates: dict[str, Any] = {"errors": (400, 401, 404, 408, 413, 415, 429, 500, 503), "streams": True}
    probe: dict[str, Any] = {"public": True, "errors": (503,)}
    paths: dict[str, Any] = {
        "/v1/chat/completions": {
            "post": operation("Answer a conversation", ChatCompletion, body=ChatCompletionRequest, **generates)
        },
        "/v1/completions": {
            "post": operation("Continue one prompt or several", Completion, body=CompletionRequest, **generates)
        },
        "/v1/models": {"get": operation("List the models", ModelList)},
        "/v1/models/{model}": {
            "get": operation("One model", Model, errors=(401, 404, 503), parameter="model"),
        },
        "/v1/requests/{request_id}/cancel": {
            "post": operation("Cancel a request", Cancelled, errors=(401, 404, 503), parameter="request_id")
        },
        "/v1/requests": {
            "get": operation(
                "Where each request is, and why it waits",
                RequestList,
                errors=(400, 401, 503),
                query={"state": f"only those in this state: {one_of(REQUEST_STATES)}", "limit": "at most so many"},
            )
        },
        "/v1/requests/{request_id}": {
            "get": operation("One request", RequestDetail, errors=(401, 404, 503), parameter="request_id")
        },
        "/v1/actors": {"get": operation("What each actor does", ActorList)},
        "/v1/kv": {"get": operation("KV blocks by the state of their owner", Kv)},
        "/v1/machines": {"get": operation("The tables that decide", MachineList, errors=(401,))},
        "/v1/steps": {
            "get": operation(
                "The last steps by phase", StepList, errors=(400, 401, 503), query={"last": "how many, at most 1024"}
            )
        },
        "/v1/errors": {"get": operation("What went wrong, and what was done about it", ErrorList)},
        "/v1/events": {
            "get": operation(
                "Transitions and incidents as they happen",
                None,
                media_type="text/event-stream",
                errors=(400, 401, 503),
                query={"types": "some of actor,request,incident"},
            )
        },
        "/v1/faults": {
            "post": operation("Let something fail, for a drill", Injected, body=Fault, errors=(400, 401, 403, 503))
        },
        "/v1/recorder/dump": {"post": operation("Write the flight recorder's file", Dumped, errors=(401, 403, 503))},
        **{path: {"get": operation("Ready for requests?", Health, **probe)} for path in READY_PROBES},
        "/ping": dict.fromkeys(("get", "post"), operation("Ready for requests?", Health, **probe)),
        "/livez": {"get": operation("Does everything move?", Alive, **probe)},
        "/version": {"get": operation("Version", Version)},
        "/metrics": {"get": operation("Prometheus metrics", None, media_type="text/plain", errors=(401,))},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "NovaInfer", "version": version, "description": "OpenAI-compatible inference over HTTP/2"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"apiKey": []}],
    }
