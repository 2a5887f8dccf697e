"""The inspector's endpoints: requests, actors, KV blocks, steps, errors and tables, as they are at this moment.

With API keys, a key is told of its own requests only (`server/keys/ring.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import EngineClosed, InvalidParameter, RequestNotFound
from novainfer.fsm.core.machine import Machine, each_row
from novainfer.fsm.machines import MACHINES, states
from novainfer.fsm.schedule.request import RequestState
from novainfer.inspection import ActorRecord, IncidentRecord, RequestRecord, StepRecord, Taken
from novainfer.server.directory import shown_id
from novainfer.server.engine import ServedEngine
from novainfer.server.http.errors import one_of
from novainfer.server.http.exchange import SCOPE_KEY, Exchange, Viewer
from novainfer.server.openai.decode import decode_own
from novainfer.server.operate.asked import asked_model
from novainfer.server.service import Service

LAST_MAX = 1024  # steps that are kept
REQUEST_STATES = (*map(str, RequestState), "OVERFLOW")


class RequestList(msgspec.Struct, kw_only=True):
    """The answer of `GET /v1/requests`: those that live, by arrival, then those that ended, the newest first."""

    object: str = "list"
    data: list[RequestRecord]


class RequestDetail(RequestRecord, frozen=True, kw_only=True, gc=False):
    """The answer of `GET /v1/requests/{id}`: its first prompt, and in `data` all that were sent under that id."""

    object: str = "request"
    data: list[RequestRecord]


class ActorList(msgspec.Struct, kw_only=True):
    """The answer of `GET /v1/actors`."""

    object: str = "list"
    data: list[ActorRecord]


class StepList(msgspec.Struct, kw_only=True):
    """The answer of `GET /v1/steps`: the newest last."""

    object: str = "list"
    data: list[StepRecord]


class ErrorList(msgspec.Struct, kw_only=True):
    """The answer of `GET /v1/errors`: the newest last."""

    object: str = "list"
    data: list[IncidentRecord]


class KvState(msgspec.Struct, kw_only=True):
    """How many KV blocks are free, cached, or owned by requests in one state."""

    state: str
    blocks: int


class Kv(msgspec.Struct, kw_only=True):
    """The answer of `GET /v1/kv`; the blocks of `data` add up to `total`, and `blocks` says the same by name."""

    object: str = "kv"
    block_size: int
    total: int
    blocks: dict[str, int]
    host_total: int
    host_used: int
    data: list[KvState]


class MachineRow(msgspec.Struct, kw_only=True):
    """One row of a table: what `event` does in `state`. Without an action it is ignored, or (`never`) cannot come.

    Where a guard tells some of these events from others, `only` says which the row is for.
    """

    state: str
    event: str
    only: str | None
    action: str | None
    follows: list[str]
    never: bool
    why: str


class MachineState(msgspec.Struct, kw_only=True):
    """A state, how long it may last in seconds (None: any time; a step's own deadline comes on top), and why."""

    name: str
    deadline_s: float | None
    why: str


class MachineTable(msgspec.Struct, kw_only=True):
    """One machine: its states, the first one first, the events it takes, and its rows."""

    name: str
    states: list[MachineState]
    events: list[str]
    rows: list[MachineRow]


class MachineList(msgspec.Struct, kw_only=True):
    """The answer of `GET /v1/machines`."""

    object: str = "list"
    data: list[MachineTable]


class TakenList(msgspec.Struct, kw_only=True):
    """The answer of `GET /v1/machines/{name}/taken`: at most a hundred times, the newest last."""

    object: str = "list"
    data: list[Taken]


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/faults`: `kind`, and what that kind takes.

    oom, exception, stall, hang, kill, freeze, eat_memory: the device fails. `request` or `slot`: only steps that hold
    it; `num_steps`: so many; `seconds`: of a stall. freeze_actor, thaw_actor: `actor` takes no more turns, or does.
    """

    kind: str
    actor: str | None = None
    request: str | None = None
    slot: int | None = None
    num_steps: int | None = None
    seconds: float | None = None


class Injected(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/faults`: what was injected."""

    object: str = "fault"
    kind: str
    how: dict[str, Any]


def _engine(service: Service, request: Request) -> ServedEngine:
    """The engine, of the model `?model=` where there are several, whatever state it is in."""
    engine = service.any_engine(asked_model(service, request))
    if engine is None:
        raise EngineClosed("There is no engine yet")
    return engine


def _engines(service: Service) -> dict[str, ServedEngine]:
    """All that are there, whatever state they are in, by their models."""
    engines = service.engines()
    if not engines and service.models is None:
        raise EngineClosed("There is no engine yet")
    return engines


def _viewer(request: Request) -> Viewer:
    exchange: Exchange = request.scope[SCOPE_KEY]
    return exchange.viewer


def _json(reply: Any) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _shown(record: RequestRecord, model: str) -> RequestRecord:
    return msgspec.structs.replace(record, id=shown_id(record.id), model=model)


def _requests(service: Service, sees: str | None, ids: set[str] | None = None) -> list[RequestRecord]:
    """Those of all engines, as clients know them, behind those that wait for one."""
    engines = _engines(service).items()
    return [_shown(record, record.model) for record in service.waits.requests(sees, ids)] + [
        _shown(record, model or (engine.model_info.name if engine.is_ready else ""))
        for model, engine in engines
        for record in engine.requests(sees, ids)
    ]


def shown_incident(record: IncidentRecord) -> IncidentRecord:
    """An incident with its requests' ids as clients know them."""
    return msgspec.structs.replace(record, requests=[shown_id(one) for one in record.requests])


def _number(request: Request, name: str, default: int, most: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= most):
        raise InvalidParameter(f"{name} must be a whole number from 1 to {most}, not {given[:40]!r}", param=name)
    return int(given)


async def list_requests(service: Service, request: Request) -> Response:
    """Where each request is, since when, and why it waits; `?state=` and `?limit=` narrow it down."""
    state = request.query_params.get("state")
    if state is not None and state.upper() not in REQUEST_STATES:
        raise InvalidParameter(f"state must be {one_of(REQUEST_STATES)}, not {state[:40]!r}", param="state")
    found = _requests(service, _viewer(request).sees)
    if state is not None:
        found = [record for record in found if record.state == state.upper()]
    limit = _number(request, "limit", len(found) or 1, 1_000_000)
    return _json(RequestList(data=found[:limit]))


async def get_request(service: Service, request: Request) -> Response:
    """One request by the answer's id or the client's x-request-id; its prompts, if there are several, are in `data`."""
    name: str = request.path_params["request_id"]
    sees = _viewer(request).sees
    shown = _requests(service, sees, service.live.engine_ids(name, sees))
    if not shown:
        raise RequestNotFound(f"There is no request {name[:200]!r}: it never was, or is long gone")
    return _json(RequestDetail(data=shown, **msgspec.structs.asdict(shown[0])))


async def list_actors(service: Service, request: Request) -> Response:
    """What each actor does and since when, how many messages wait for it, and in which process it lives."""
    return _json(ActorList(data=_engine(service, request).actors()))


async def get_kv(service: Service, request: Request) -> Response:
    """KV blocks by the state of the request that owns them."""
    found = _engine(service, request).kv()
    if found is None:
        service.ready_engine(asked_model(service, request))  # raises: the model is loading, or the engine has stopped
        raise EngineClosed("There is no KV cache")
    data = [KvState(state=state, blocks=blocks) for state, blocks in found.blocks.items()]
    return _json(Kv(data=data, **msgspec.structs.asdict(found)))


async def list_steps(service: Service, request: Request) -> Response:
    """The last steps by phase; `?last=` says how many."""
    return _json(StepList(data=_engine(service, request).steps(_number(request, "last", 100, LAST_MAX))))


async def list_errors(service: Service, request: Request) -> Response:
    """What went wrong lately, and what was done about it."""
    sees = _viewer(request).sees
    found = [one for engine in _engines(service).values() for one in engine.errors(sees)]
    return _json(ErrorList(data=[shown_incident(one) for one in sorted(found, key=lambda one: one.time)]))


async def list_machines(service: Service, request: Request) -> Response:
    """The tables that decide everything."""
    return Response(_MACHINES, media_type="application/json")


async def list_taken(service: Service, request: Request) -> Response:
    """The last times that a row of a table was taken, since somebody began to look; of whom, as far as it may know."""
    named = {name: request.query_params.get(name) for name in ("state", "event", "to")}
    if missing := [name for name, value in named.items() if value is None]:
        raise InvalidParameter(f"{missing[0]} is required: the row is that of a state, an event and a state to go to")
    sees = _viewer(request).sees
    state, event, to = map(str, named.values())
    found = _engine(service, request).taken(request.path_params["name"], state, event, to, sees)
    return _json(TakenList(data=[msgspec.structs.replace(one, of=shown_id(one.of)) for one in found]))


async def inject_fault(service: Service, request: Request) -> Response:
    """Let something fail, for a drill; only with the admin key."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    service.keys.check_admin(exchange.viewer)
    await service.turns.wait(exchange.client, len(exchange.body))
    fault = decode_own(Fault, exchange.take_body())
    fields = msgspec.structs.asdict(fault)
    how = {name: value for name, value in fields.items() if value is not None and name != "kind"}
    named = dict(how)
    if fault.request is not None and (ids := service.live.engine_ids(fault.request)):
        named["request"] = min(ids)
    service.ready_engine(asked_model(service, request)).inject(fault.kind, **named)
    return _json(Injected(kind=fault.kind, how=how))


def _table(machine: type[Machine]) -> MachineTable:
    order = states(machine)
    return MachineTable(
        name=machine.__name__,
        states=[
            MachineState(name=str(state), deadline_s=machine.DWELLS[state].limit_s, why=machine.DWELLS[state].why)
            for state in order
        ],
        events=[event.__name__ for event in machine.TABLE],
        rows=[
            MachineRow(
                state=str(state),
                event=event.__name__,
                only=row.of or None,
                action=row.action or None,
                follows=sorted(map(str, row.follows)),
                never=row.impossible,
                why=row.why,
            )
            for state, event, row in each_row(machine.TABLE)
        ],
    )


_MACHINES = msgspec.json.encode(MachineList(data=[_table(machine) for machine in MACHINES]))
