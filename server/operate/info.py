"""The small endpoints: models, health, version, cancel, metrics, and the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import InvalidParameter, ModelInfo, RequestNotFound
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.models.model import ModelState
from novainfer.models import ModelRecord
from novainfer.server.engine import ServedEngine, weights_in
from novainfer.server.http.errors import NotMoving
from novainfer.server.http.exchange import SCOPE_KEY, Exchange, Viewer
from novainfer.server.openai.decode import decode_own
from novainfer.server.openai.generation import ADMISSION_TURNS
from novainfer.server.operate.asked import asked_model
from novainfer.server.operate.exposition import CONTENT_TYPE
from novainfer.server.operate.scrape import scrape
from novainfer.server.service import Service

SHOWN_SETTINGS = (
    *("strict_fields", "max_client_reqs", "max_client_unread", "max_client_tokens", "http2_max_concurrent_streams"),
    *("body_timeout_s", "keep_alive_timeout_s", "sse_keep_alive_interval_s", "stall_timeout_s", "shutdown_timeout_s"),
)


ABORTED_MAX = 10_000  # ids of one call
FAILED = "it could not be loaded, or its engine died; the log says why"  # to all but the operator


class ModelStatus(msgspec.Struct, kw_only=True):
    """Whether a model is loaded, in llama.cpp's words; `state` is the router's own.

    `failed` and `error` tell of its last load, or of what its engine died of. Where a server has one model, it is
    loaded.
    """

    value: Literal["unloaded", "loading", "loaded", "unloading"] = "loaded"
    state: str | msgspec.UnsetType = msgspec.UNSET
    failed: bool = False
    error: str | msgspec.UnsetType = msgspec.UNSET


class Model(msgspec.Struct, kw_only=True):
    """A served model; `max_model_len` is its context in tokens, and the parsers are those that read its answers.

    Of one that is not loaded they are null, and `created` is when the server began. `type`, `display_name`,
    `created_at` and `lifecycle` are what Anthropic's clients read.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "novainfer"
    root: str
    parent: str | None = None
    max_model_len: int | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    status: ModelStatus
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
    `failed_kernels` and `step_costs` are those of `ModelInfo`, where they are not empty. Of several models, `models`
    tells all that, of each that is loaded, and has `memory_share` then; here it is left out.
    """

    status: str = "ok"
    model: str | msgspec.UnsetType = msgspec.UNSET
    state: str | msgspec.UnsetType = msgspec.UNSET
    rung: str | msgspec.UnsetType = msgspec.UNSET
    mode: Mode | msgspec.UnsetType = msgspec.UNSET
    weights: str | msgspec.UnsetType = msgspec.UNSET
    memory: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    failed_kernels: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    step_costs: list[tuple[int, float]] | msgspec.UnsetType = msgspec.UNSET
    max_loaded_models: int | msgspec.UnsetType = msgspec.UNSET
    memory_share: float | msgspec.UnsetType = msgspec.UNSET
    models: list[ModelHealth] | msgspec.UnsetType = msgspec.UNSET


class ModelHealth(msgspec.Struct, kw_only=True):
    """One of several models: `state` is the router's, and what `Health` tells of an engine, where it has one."""

    id: str
    state: ModelState
    num_live: int
    num_waiting: int
    error: str | msgspec.UnsetType = msgspec.UNSET
    engine: Health | msgspec.UnsetType = msgspec.UNSET


class Alive(msgspec.Struct, kw_only=True):
    """The answer of `GET /livez`."""

    status: str = "ok"


class Cancelled(msgspec.Struct, kw_only=True):
    """The answer of a cancel: `cancelled`, or `finished` when there was nothing left to cancel."""

    id: str
    object: str = "request.cancel"
    status: str


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which requests are to end: vLLM's `request_ids`, SGLang's `rid`, or all there are."""

    request_ids: list[str] | None = None
    rid: str | None = None
    abort_all: bool = False


class Aborted(msgspec.Struct, kw_only=True):
    """The answer to that: those of the ids that stood for a request which was ended by it."""

    object: str = "request.abort"
    cancelled: list[str]


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


STATUS: dict[ModelState, Literal["unloaded", "loading", "loaded", "unloading"]] = {
    ModelState.CHECKING: "loading",
    ModelState.WAITING: "loading",
    ModelState.LOADING: "loading",
    ModelState.IDLE: "loaded",
    ModelState.READY: "loaded",
    ModelState.YIELDING: "unloading",
    ModelState.DRAINING: "unloading",
    ModelState.STOPPING: "unloading",
}


def _loaded_model(service: Service, engine: ServedEngine, status: ModelStatus) -> Model:
    info, formats = engine.model_info, service.formats_of(engine)
    return Model(
        id=info.name,
        root=info.name,
        created=info.created,
        display_name=info.name,
        created_at=datetime.fromtimestamp(info.created, UTC),
        max_model_len=info.max_model_len,
        tool_call_parser=formats.tool_calls,
        reasoning_parser=formats.reasoning,
        status=status,
    )


def _models(service: Service, viewer: Viewer) -> list[Model]:
    """All that are served, in their order."""
    if service.models is None:
        return [_loaded_model(service, service.ready_engine(), ModelStatus())]
    engines = service.engines()
    found = []
    for record in service.models.models():
        status = ModelStatus(value=STATUS.get(record.state, "unloaded"), state=record.state)
        if record.failure:
            status.failed, status.error = True, _failure(record, viewer)
        if record.name in engines:
            found.append(_loaded_model(service, engines[record.name], status))
        else:
            found.append(_absent_model(service, record.name, status))
    return found


def _absent_model(service: Service, name: str, status: ModelStatus) -> Model:
    return Model(
        id=name,
        root=name,
        created=int(service.began_at.timestamp()),
        display_name=name,
        created_at=service.began_at,
        max_model_len=None,
        tool_call_parser=None,
        reasoning_parser=None,
        status=status,
    )


def _failure(record: ModelRecord, viewer: Viewer) -> str:
    """What its load, or its engine, died of: the sentence may name files, which are the operator's."""
    return record.failure if viewer.is_admin or not record.failure else FAILED


def model_of(service: Service, name: str, viewer: Viewer) -> Model:
    """The served model of this name."""
    return next(one for one in _models(service, viewer) if one.id == name)


def _viewer(request: Request) -> Viewer:
    exchange: Exchange = request.scope[SCOPE_KEY]
    return exchange.viewer


async def list_models(service: Service, request: Request) -> Response:
    """The models that are served, loaded or not; of those, what this key may use."""
    viewer = _viewer(request)
    return json_response(ModelList(data=[one for one in _models(service, viewer) if service.may_use(viewer, one.id)]))


async def get_model(service: Service, request: Request) -> Response:
    """The model of this name, or 404, or 403 where this key may not use it."""
    viewer, name = _viewer(request), request.path_params["model"]
    service.check_model(name, viewer)
    return json_response(model_of(service, name, viewer))


async def health(service: Service, request: Request) -> Response:
    """200 when a request sent now would be taken and everything moves; else 503 with the reason."""
    if service.models is None:
        return json_response(_health(service.ready_engine()))
    service.check_open()
    viewer, engines, records = _viewer(request), service.engines(), service.models.models()
    if all(record.state is ModelState.FAILED for record in records):
        raise NotMoving(f"No model can be loaded: {_failure(records[0], viewer)}")
    found = [
        ModelHealth(
            id=record.name,
            state=record.state,
            num_live=record.num_live,
            num_waiting=record.num_waiting,
            error=_failure(record, viewer) or msgspec.UNSET,
            engine=_health_or_nothing(engines.get(record.name)),
        )
        for record in records
    ]
    most = service.models.max_loaded
    return json_response(Health(max_loaded_models=most, memory_share=1 / most, models=found))


def _health_or_nothing(engine: ServedEngine | None) -> Health | msgspec.UnsetType:
    """Nothing of an engine that is not there, or has just died: the other models are well."""
    if engine is None:
        return msgspec.UNSET
    try:
        return _health(engine)
    except NotMoving:
        return msgspec.UNSET


def _health(engine: ServedEngine) -> Health:
    """Raises `NotMoving` with the reason, where it stands still."""
    found = engine.health()
    if not found.is_ready:
        raise NotMoving(f"The engine stands still: {found.reason}")
    stats = engine.statistics()
    info = engine.model_info
    return Health(
        model=info.name,
        state=found.state,
        rung=stats.rung,
        mode=stats.mode,
        weights=weights_in(info, stats.mode),
        memory=info.memory or msgspec.UNSET,
        failed_kernels=info.failed_kernels or msgspec.UNSET,
        step_costs=info.step_costs or msgspec.UNSET,
    )


async def live(service: Service, request: Request) -> Response:
    """200 as long as the loop turns and every actor moves: restart the process only when this one fails."""
    for engine in service.engines().values():
        found = engine.health()
        if not found.is_live:
            raise NotMoving(f"The engine stands still: {found.reason}")
    return json_response(Alive())


async def version(service: Service, request: Request) -> Response:
    """The version of NovaInfer."""
    return json_response(Version(version=service.version))


async def load(service: Service, request: Request) -> Response:
    """How many requests are here: what a router wants to know several times a second."""
    service.check_open()
    found = [(engine, engine.statistics()) for engine in service.engines().values()]
    total = sum(stats.kv_blocks_total for _, stats in found)
    return json_response(
        Load(
            server_load=service.live.num_live,
            num_running=sum(stats.num_running for _, stats in found),
            num_waiting=sum(stats.num_waiting for _, stats in found),
            max_num_seqs=sum(engine.model_info.max_num_seqs for engine, _ in found),
            kv_cache_usage=sum(stats.kv_blocks_owned for _, stats in found) / total if total else 0.0,
        )
    )


async def server_info(service: Service, request: Request) -> Response:
    """The model as it is computed here, and what the HTTP side was told of time and room."""
    settings = {name: getattr(service.settings, name) for name in SHOWN_SETTINGS}
    engine = service.ready_engine(asked_model(service, request))
    return json_response(ServerInfo(version=service.version, model=engine.model_info, settings=settings))


async def kv_event_sources(service: Service, request: Request) -> Response:
    """Where routers are told which prefixes can be found here, by rank, as vLLM has it: empty where they are not.

    Of several models each has a rank, loaded or not.
    """
    service.check_open()
    found = {} if service.models is None else service.models.kv_event_sources()
    found |= {rank: at for engine in service.engines().values() for rank, at in engine.kv_event_sources().items()}
    return Response(msgspec.json.encode(found), media_type="application/json")


async def cancel_request(service: Service, request: Request) -> Response:
    """Cancel by the answer's id, the client's x-request-id, or the id of one of several prompts, which ends them all.

    Again is fine, unknown is 404.
    """
    request_id: str = request.path_params["request_id"]
    exchange: Exchange = request.scope[SCOPE_KEY]
    found = service.live.engine_ids(request_id, exchange.viewer.sees)
    if not found:
        raise RequestNotFound(f"There is no request {request_id[:200]!r}: it never was, or is long gone")
    if not service.is_draining:
        service.check_open()
    await _turns_of_admission()
    was_live = _cancel(service, found)
    return json_response(Cancelled(id=request_id, status="cancelled" if was_live else "finished"))


async def abort_requests(service: Service, request: Request) -> Response:
    """Cancel several requests by their ids, or, with the admin key, all there are; what is unknown or over is left out.

    As vLLM's `/abort_requests` and SGLang's `/abort_request`.
    """
    exchange: Exchange = request.scope[SCOPE_KEY]
    await service.turns.wait(exchange.client, len(exchange.body))
    wanted = decode_own(AbortRequest, exchange.take_body())
    names = wanted.request_ids or []
    if wanted.rid is not None:
        names = [*names, wanted.rid]
    if wanted.abort_all:
        service.keys.check_admin(exchange.viewer)
        names = service.live.ids()
    elif not names:
        raise InvalidParameter("request_ids must name at least one request", param="request_ids")
    if len(names) > ABORTED_MAX:
        message = f"request_ids takes at most {ABORTED_MAX} ids, not {len(names)}"
        raise InvalidParameter(message, param="request_ids")
    await _turns_of_admission()
    sees = exchange.viewer.sees
    return json_response(
        Aborted(cancelled=[one for one in names if _cancel(service, service.live.engine_ids(one, sees))])
    )


async def _turns_of_admission() -> None:
    """For a cancel that came with its request: the engine has not heard of that yet."""
    for _ in range(ADMISSION_TURNS):
        await asyncio.sleep(0)


def _cancel(service: Service, engine_ids: Iterable[str]) -> bool:
    """Cancel these of an engine's requests, wherever they are; whether one of them had not ended."""
    cancels = [service.waits.cancel, *(engine.cancel for engine in service.engines().values())]
    cancelled = [cancel(engine_id) for engine_id in sorted(engine_ids) for cancel in cancels]
    return any(cancelled)


async def metrics(service: Service, request: Request) -> Response:
    """Prometheus's text format."""
    return Response(scrape(service), headers={"content-type": CONTENT_TYPE})
