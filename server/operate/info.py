"""The small endpoints: models, health, version, cancel, metrics, and the OpenAPI document."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import ModelInfo, RequestNotFound
from novainfer.fsm.messages.mode import Mode
from novainfer.server.engine import weights_in
from novainfer.server.http.errors import NotMoving
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.openai.generation import ADMISSION_TURNS
from novainfer.server.operate.exposition import CONTENT_TYPE
from novainfer.server.operate.scrape import scrape
from novainfer.server.service import Service

SHOWN_SETTINGS = (
    *("strict_fields", "max_client_reqs", "max_client_unread", "max_client_tokens", "http2_max_concurrent_streams"),
    *("body_timeout_s", "keep_alive_timeout_s", "sse_keep_alive_interval_s", "stall_timeout_s", "shutdown_timeout_s"),
)


class Model(msgspec.Struct, kw_only=True):
    """A served model; `max_model_len` is its context in tokens, and the parsers are those that read its answers.

    `type`, `display_name`, `created_at` and `lifecycle` are what Anthropic's clients read.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "novainfer"
    root: str
    parent: str | None = None
    max_model_len: int
    tool_call_parser: str
    reasoning_parser: str
    permission: list[Any] = []
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"


class ModelList(msgspec.Struct, kw_only=True):
    """The answer of `GET /v1/models`."""

    object: str = "list"
    data: list[Model]
    has_more: bool = False


class Health(msgspec.Struct, kw_only=True):
    """The answer of the health probes when all is well; `state` is what the engine does.

    `rung` is that of the ladder, and `mode` the kernels and the precision that steps are computed with there: of its
    precision `checkpoint` (what the model came up in, unless it was rounded) `weights` says what that is. `memory`,
    `failed_kernels` and `step_costs` are those of `ModelInfo`, where they are not empty.
    """

    status: str = "ok"
    model: str
    state: str
    rung: str
    mode: Mode
    weights: str
    memory: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    failed_kernels: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    step_costs: list[tuple[int, float]] | msgspec.UnsetType = msgspec.UNSET


class Alive(msgspec.Struct, kw_only=True):
    """The answer of `GET /livez`."""

    status: str = "ok"


class Cancelled(msgspec.Struct, kw_only=True):
    """The answer of a cancel: `cancelled`, or `finished` when there was nothing left to cancel."""

    id: str
    object: str = "request.cancel"
    status: str


class Version(msgspec.Struct, kw_only=True):
    """The answer of `GET /version`."""

    version: str


class Load(msgspec.Struct, kw_only=True):
    """The answer of `GET /load`: requests (choices) by what they do, and the share of the KV cache that they own."""

    server_load: int
    num_running: int
    num_waiting: int
    max_num_seqs: int
    kv_cache_usage: float


class ServerInfo(msgspec.Struct, kw_only=True):
    """The answer of `GET /server_info`: what is served and how; `settings` are some of the HTTP side's."""

    version: str
    model: ModelInfo
    settings: dict[str, Any]


def json_response(reply: msgspec.Struct) -> Response:
    """A 200 with `reply` as JSON."""
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _model(service: Service) -> Model:
    info = service.ready_engine().model_info
    formats = service.formats
    return Model(
        id=info.name,
        root=info.name,
        created=info.created,
        display_name=info.name,
        created_at=datetime.fromtimestamp(info.created, UTC),
        max_model_len=info.max_model_len,
        tool_call_parser=formats.tool_calls,
        reasoning_parser=formats.reasoning,
    )


async def list_models(service: Service, request: Request) -> Response:
    """The one model that is served, where this key may use it."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    model = _model(service)
    return json_response(ModelList(data=[model] if service.may_use(exchange.viewer, model.id) else []))


async def get_model(service: Service, request: Request) -> Response:
    """The model of this name, or 404, or 403 where this key may not use it."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    service.check_model(request.path_params["model"], exchange.viewer)
    return json_response(_model(service))


async def health(service: Service, request: Request) -> Response:
    """200 when a request sent now would be taken and everything moves; else 503 with the reason."""
    engine = service.ready_engine()
    found = engine.health()
    if not found.is_ready:
        raise NotMoving(f"The engine stands still: {found.reason}")
    stats = engine.statistics()
    info = engine.model_info
    return json_response(
        Health(
            model=info.name,
            state=found.state,
            rung=stats.rung,
            mode=stats.mode,
            weights=weights_in(info, stats.mode),
            memory=info.memory or msgspec.UNSET,
            failed_kernels=info.failed_kernels or msgspec.UNSET,
            step_costs=info.step_costs or msgspec.UNSET,
        )
    )


async def live(service: Service, request: Request) -> Response:
    """200 as long as the loop turns and every actor moves: restart the process only when this one fails."""
    found = service.engine.health() if service.engine is not None else None
    if found is not None and not found.is_live:
        raise NotMoving(f"The engine stands still: {found.reason}")
    return json_response(Alive())


async def version(service: Service, request: Request) -> Response:
    """The version of NovaInfer."""
    return json_response(Version(version=service.version))


async def load(service: Service, request: Request) -> Response:
    """How many requests are here: what a router wants to know several times a second."""
    engine = service.ready_engine()
    stats = engine.statistics()
    total = stats.kv_blocks_total
    return json_response(
        Load(
            server_load=service.live.num_live,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            max_num_seqs=engine.model_info.max_num_seqs,
            kv_cache_usage=stats.kv_blocks_owned / total if total else 0.0,
        )
    )


async def server_info(service: Service, request: Request) -> Response:
    """The model as it is computed here, and what the HTTP side was told of time and room."""
    settings = {name: getattr(service.settings, name) for name in SHOWN_SETTINGS}
    return json_response(
        ServerInfo(version=service.version, model=service.ready_engine().model_info, settings=settings)
    )


async def cancel_request(service: Service, request: Request) -> Response:
    """Cancel by the answer's id, the client's x-request-id, or the id of one of several prompts, which ends them all.

    Again is fine, unknown is 404.
    """
    request_id: str = request.path_params["request_id"]
    exchange: Exchange = request.scope[SCOPE_KEY]
    found = service.live.engine_ids(request_id, exchange.viewer.sees)
    if not found:
        raise RequestNotFound(f"There is no request {request_id[:200]!r}: it never was, or is long gone")
    engine = service.ready_engine() if not service.is_draining else service.engine
    assert engine is not None, "a request is live without an engine"
    for _ in range(ADMISSION_TURNS):
        await asyncio.sleep(0)  # a cancel that came with its request: the engine has not heard of that yet
    cancelled = [engine.cancel(engine_id) for engine_id in sorted(found)]
    return json_response(Cancelled(id=request_id, status="cancelled" if any(cancelled) else "finished"))


async def metrics(service: Service, request: Request) -> Response:
    """Prometheus's text format."""
    return Response(scrape(service), headers={"content-type": CONTENT_TYPE})
