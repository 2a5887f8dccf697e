"""The ASGI application: which handler answers which path, inside the guard."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from novainfer import KvEventsConfig, TokenizerInfo
from novainfer.server.anthropic.messages import count_tokens, create_message, follow_message
from novainfer.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from novainfer.server.anthropic.replies import AnsweredMessage, TokenCount
from novainfer.server.guard import Guard
from novainfer.server.http.errors import one_of
from novainfer.server.http.shapes import AnthropicErrorBody
from novainfer.server.keys.ring import METRICS_PATH
from novainfer.server.openai import tokens
from novainfer.server.openai.chat import create_chat_completion, follow_chat
from novainfer.server.openai.completions import create_completion, follow_completion
from novainfer.server.openai.embeddings import EmbeddingList, EmbeddingRequest, create_embedding
from novainfer.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from novainfer.server.openai.replies import ChatCompletion, Completion
from novainfer.server.operate import info, inspection, models, profile, recorder
from novainfer.server.operate.asked import OF_MODEL
from novainfer.server.operate.docs_page import HEADERS as DOCS_HEADERS
from novainfer.server.operate.docs_page import docs_page
from novainfer.server.operate.events import stream_events
from novainfer.server.operate.frames import stream_frames
from novainfer.server.operate.inspection import REQUEST_STATES
from novainfer.server.operate.openapi import Endpoint, build_openapi
from novainfer.server.operate.reconfigure import Configuration, Reconfiguration, reconfigure
from novainfer.server.operate.sessions import EndedSession, SessionList, end_session, list_sessions
from novainfer.server.page.files import Page
from novainfer.server.responses.create import create_response
from novainfer.server.responses.kept import (
    Deleted,
    ItemList,
    cancel_response,
    delete_response,
    get_response,
    list_input_items,
)
from novainfer.server.responses.protocol import ResponseRequest
from novainfer.server.responses.reply import Response as ResponseReply
from novainfer.server.service import Service

GENERATION = (400, 401, 403, 404, 408, 413, 415, 429, 499, 500, 503)  # how a request for tokens may be refused
ANSWERS = ("application/json", "text/event-stream")  # whole, or streamed
LOOKS = (400, 401, 403, 404, 503)  # how a question about one model may be
AGAIN = (400, 401, 403, 404, 408, 499, 500, 503)  # how an answer that is asked for again may be
KEPT = (400, 401, 404, 503)  # how a question about a response that is kept may be
EVENTS = {
    "stream": "true: its events, as when it was created with stream",
    "starting_after": "with stream: only those behind the event of this number",
    "include": "as in the body of a response",
}
PAGE = {
    "limit": "at most so many, up to 100 (20)",
    "order": "asc or desc, which is the latest first (desc)",
    "after": "only those behind the item of this id",
    "include": "as in the body of a response",
}
SESSIONS = {
    "limit": "at most so many conversations, up to 1000 (100)",
    "after": "only those behind this id, in the order of ids: the last one of the page before",
}
ROW = {"state": "in which it was", "event": "that it took", "to": "the state that it went to"}
STATE = {"state": f"only those in this state: {one_of(REQUEST_STATES)}", "limit": "at most so many"}

_ready = partial(
    Endpoint,
    handler=info.health,
    summary="Ready for requests?",
    answer=info.Health,
    errors=(503,),
    is_public=True,
)

METRICS = Endpoint(
    *("GET", METRICS_PATH, info.metrics, "Prometheus metrics", None), errors=(401,), media_types=("text/plain",),
)  # fmt: skip

ROUTES: tuple[Endpoint, ...] = (
    Endpoint(
        *("POST", "/v1/chat/completions", create_chat_completion, "Answer a conversation", ChatCompletion),
        body=ChatCompletionRequest, errors=GENERATION, media_types=ANSWERS,
    ),
    Endpoint(
        *("POST", "/v1/completions", create_completion, "Continue one prompt or several", Completion),
        body=CompletionRequest, errors=GENERATION, media_types=ANSWERS,
    ),
    Endpoint(
        *("GET", "/v1/chat/completions/{answer_id}", follow_chat, "An answer again, behind its Last-Event-ID"),
        ChatCompletion, errors=AGAIN, media_types=ANSWERS,
    ),
    Endpoint(
        *("GET", "/v1/completions/{answer_id}", follow_completion, "An answer again, behind its Last-Event-ID"),
        Completion, errors=AGAIN, media_types=ANSWERS,
    ),
    Endpoint(
        *("GET", "/v1/messages/{answer_id}", follow_message, "A message again, behind its Last-Event-ID"),
        AnsweredMessage, errors=AGAIN, media_types=ANSWERS, error=AnthropicErrorBody,
    ),
    Endpoint(
        *("POST", "/v1/messages", create_message, "Answer a conversation, as Anthropic does", AnsweredMessage),
        body=MessagesRequest, errors=GENERATION, media_types=ANSWERS, error=AnthropicErrorBody,
    ),
    Endpoint(
        *("POST", "/v1/messages/count_tokens", count_tokens, "The number of tokens that a message would begin with"),
        TokenCount, body=CountTokensRequest, errors=GENERATION, error=AnthropicErrorBody,
    ),
    Endpoint(
        *("POST", "/v1/embeddings", create_embedding, "A vector for each input", EmbeddingList),
        body=EmbeddingRequest, errors=GENERATION,
    ),
    Endpoint(
        *("POST", "/v1/responses", create_response, "Answer a conversation of items", ResponseReply),
        body=ResponseRequest, errors=GENERATION, media_types=ANSWERS,
    ),
    Endpoint(
        *("GET", "/v1/responses/{response_id}", get_response, "A response as it is, or its events", ResponseReply),
        errors=KEPT, media_types=ANSWERS, query=EVENTS,
    ),
    Endpoint(
        *("DELETE", "/v1/responses/{response_id}", delete_response, "Keep a response no longer", Deleted),
        errors=KEPT,
    ),
    Endpoint(
        *("POST", "/v1/responses/{response_id}/cancel", cancel_response, "End a response in the background"),
        ResponseReply, errors=KEPT,
    ),
    Endpoint(
        *("GET", "/v1/responses/{response_id}/input_items", list_input_items, "The items that a response was given"),
        ItemList, errors=KEPT, query=PAGE,
    ),
    Endpoint(
        *("GET", "/v1/sessions", list_sessions, "The conversations that are kept", SessionList),
        errors=LOOKS, query=SESSIONS | OF_MODEL,
    ),
    Endpoint(
        *("DELETE", "/v1/sessions/{session_id:path}", end_session, "Keep a conversation no longer", EndedSession),
        errors=LOOKS, query=OF_MODEL,
    ),
    Endpoint(
        *("POST", "/v1/chat/completions/render", tokens.render_chat, "The tokens that a chat would begin with"),
        tokens.Rendered, body=ChatCompletionRequest, errors=GENERATION,
    ),
    Endpoint(
        *("POST", "/v1/completions/render", tokens.render_completion, "The tokens that prompts would begin with"),
        list[tokens.Rendered], body=CompletionRequest, errors=GENERATION,
    ),
    Endpoint(
        *("POST", "/tokenize", tokens.tokenize, "The tokens of a text or of messages", tokens.Tokenized),
        body=tokens.TokenizeRequest, errors=GENERATION,
    ),
    Endpoint(
        *("POST", "/detokenize", tokens.detokenize, "The text of tokens", tokens.Detokenized),
        body=tokens.DetokenizeRequest, errors=GENERATION,
    ),
    Endpoint(
        *("GET", "/tokenizer_info", tokens.tokenizer_info, "What the tokenizer is", TokenizerInfo),
        errors=(400, 401, 403, 404, 503), query=OF_MODEL,
    ),
    Endpoint("GET", "/v1/models", info.list_models, "List the models", info.ModelList),
    Endpoint("GET", "/v1/models/{model:path}", info.get_model, "One model", info.Model, errors=(401, 403, 404, 503)),
    Endpoint(
        *("POST", "/models/load", models.load_model, "Load one of several models", info.Model),
        body=models.ModelRequest, errors=(400, 401, 403, 404, 408, 503),
    ),
    Endpoint(
        *("POST", "/models/unload", models.unload_model, "Unload one of several models", info.Model),
        body=models.ModelRequest, errors=(400, 401, 403, 404, 503),
    ),
    Endpoint(
        *("POST", "/v1/requests/{request_id:path}/cancel", info.cancel_request, "Cancel a request", info.Cancelled),
        errors=(401, 404, 503),
    ),
    *(
        Endpoint(
            *("POST", path, info.abort_requests, "Cancel several requests, or all of them", info.Aborted),
            body=info.AbortRequest, errors=(400, 401, 403, 408, 413, 415, 429, 503),
        )
        for path in ("/abort_requests", "/abort_request")
    ),
    Endpoint(
        *("GET", "/v1/requests", inspection.list_requests, "Where each request is, and why it waits"),
        inspection.RequestList, errors=(400, 401, 503), query=STATE,
    ),
    Endpoint(
        *("GET", "/v1/requests/{request_id:path}", inspection.get_request, "One request", inspection.RequestDetail),
        errors=(401, 404, 503),
    ),
    Endpoint(
        *("GET", "/v1/actors", inspection.list_actors, "What each actor does", inspection.ActorList),
        errors=LOOKS, query=OF_MODEL,
    ),
    Endpoint(
        *("GET", "/v1/kv", inspection.get_kv, "KV blocks by the state of their owner", inspection.Kv),
        errors=LOOKS, query=OF_MODEL,
    ),
    Endpoint(
        *("GET", "/v1/machines", inspection.list_machines, "The tables that decide", inspection.MachineList),
        errors=(401,),
    ),
    Endpoint(
        *("GET", "/v1/machines/{name}/taken", inspection.list_taken, "When a row was taken lately"),
        inspection.TakenList, errors=LOOKS, query=ROW | OF_MODEL,
    ),
    Endpoint(
        *("GET", "/v1/inspector", stream_frames, "Everything as it is, and what changes", None),
        errors=LOOKS, media_types=("text/event-stream",), query=OF_MODEL,
    ),
    Endpoint(
        *("GET", "/v1/steps", inspection.list_steps, "The last steps by phase", inspection.StepList),
        errors=LOOKS, query={"last": "how many, at most 1024"} | OF_MODEL,
    ),
    Endpoint(
        *("GET", "/v1/errors", inspection.list_errors, "What went wrong, and what was done about it"),
        inspection.ErrorList,
    ),
    Endpoint(
        *("GET", "/v1/events", stream_events, "Transitions and incidents as they happen", None),
        errors=LOOKS, media_types=("text/event-stream",),
        query={"types": "some of actor,request,incident"} | OF_MODEL,
    ),
    Endpoint(
        *("POST", "/v1/faults", inspection.inject_fault, "Let something fail, for a drill", inspection.Injected),
        body=inspection.Fault, errors=(400, 401, 403, 404, 503), query=OF_MODEL,
    ),
    Endpoint(
        *("POST", "/v1/admin/reconfigure", reconfigure, "Another KV cache, or another precision", Configuration),
        body=Reconfiguration, errors=(400, 401, 403, 404, 409, 500, 503), query=OF_MODEL,
    ),
    Endpoint(
        *("POST", "/v1/recorder/dump", recorder.dump_recorder, "Write the flight recorder's file", recorder.Dumped),
        errors=(400, 401, 403, 404, 503), query=OF_MODEL,
    ),
    Endpoint(
        *("POST", "/start_profile", profile.start_profile, "Begin a profile", profile.Profiled),
        errors=(400, 401, 403, 404, 409, 503), query=OF_MODEL,
    ),
    Endpoint(
        *("POST", "/stop_profile", profile.stop_profile, "End the profile, and write its files", profile.Profiled),
        errors=(401, 403, 409, 503),
    ),
    *(_ready("GET", path) for path in ("/health", "/healthz", "/readyz", "/ready", "/ping")),
    _ready("POST", "/ping"),
    Endpoint("GET", "/livez", info.live, "Does everything move?", info.Alive, errors=(503,), is_public=True),
    METRICS,
    Endpoint("GET", "/load", info.load, "How many requests are here", info.Load),
    Endpoint(
        *("GET", "/server_info", info.server_info, "What is served, and how", info.ServerInfo),
        errors=LOOKS, query=OF_MODEL,
    ),
    Endpoint(
        *("GET", "/kv_event_sources", info.kv_event_sources, "Where routers are told of prefixes, by rank"),
        dict[str, KvEventsConfig],
    ),
    Endpoint("GET", "/version", info.version, "Version", info.Version),
)  # fmt: skip


def create_app(service: Service) -> ASGIApp:
    """The app that serves `service`; it neither starts nor stops the engine."""
    document = build_openapi(service.version, ROUTES, service.settings.root_path)
    encoded, page = msgspec.json.encode(document), docs_page(document)

    async def openapi(service: Service, request: Request) -> Response:
        return Response(encoded, media_type="application/json")

    async def docs(service: Service, request: Request) -> Response:
        return Response(page, headers=DOCS_HEADERS)

    about = (
        Endpoint("GET", "/openapi.json", openapi, "This document", None),
        Endpoint("GET", "/docs", docs, "The same as a page", None, is_public=True),
    )
    return Guard(*_routed(service, (*ROUTES, *about, *(_page_routes() if service.settings.webui else ()))))


def _page_routes() -> tuple[Endpoint, ...]:
    """The page's own, which are no part of the API: its document leaves them out."""
    built = Page()

    async def index(service: Service, request: Request) -> Response:
        return built.index(request)

    async def asset(service: Service, request: Request) -> Response:
        return built.asset(request)

    return (
        *(Endpoint("GET", path, index, "The page", None, is_public=True) for path in ("/", "/inspector")),
        Endpoint("GET", "/assets/{name}", asset, "A file of the page", None, is_public=True),
    )


def create_metrics_app(service: Service) -> ASGIApp:
    """The app of `--metrics-port`: `/metrics` of `service`, without a key, and nothing else."""
    return Guard(*_routed(service, (METRICS,)), needs_keys=False)


def _routed(service: Service, endpoints: Iterable[Endpoint]) -> tuple[Router, Service, dict[object, str]]:
    labels: dict[object, str] = {}
    routes = []
    for endpoint in endpoints:
        handler = partial(endpoint.handler, service)
        labels[handler] = endpoint.name
        routes.append(Route(endpoint.path, handler, methods=[endpoint.method], name=endpoint.path))
    return Router(routes, redirect_slashes=False), service, labels
