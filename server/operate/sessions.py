"""`/v1/sessions`: the conversations of a key that are kept, and the end of one."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import Tenant
from novainfer.fsm.client.budget import Purse
from novainfer.inspection import SessionRecord
from novainfer.server.engine import ServedEngine
from novainfer.server.http.errors import SessionNotFound
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.http.query import whole_number
from novainfer.server.keys.quotas import NANOSECONDS
from novainfer.server.keys.spending import Spending
from novainfer.server.operate.asked import named_model
from novainfer.server.service import Service

PAGE, PAGE_MAX = 100, 1000  # conversations, unless the client says


class SessionState(msgspec.Struct, kw_only=True):
    """One conversation; `tokens_kept` of its last request would be found by the next one, device or host.

    `where` they are: device, host, both, or nowhere. `age_s` counts from its first request, `ttl_left_s` is None while
    a request of it is here, or where nothing of it is kept any more. `tokens_used` are prompts and answers.
    It is `forgotten` when only its budget is left, and `lost` with a model that kept some of it and was unloaded.

    Of several models each keeps what it has of a conversation, and `model` says which one; what is used and may be used
    of a conversation is of all of them.
    """

    id: str
    model: str | msgspec.UnsetType = msgspec.UNSET
    object: Literal["session"] = "session"
    state: Literal["busy", "kept", "forgotten", "lost"]
    tokens_kept: int = 0
    where: Literal["device", "host", "both", "nowhere"] = "nowhere"
    age_s: float | None = None
    ttl_left_s: float | None = None
    tokens_used: int = 0
    token_budget: int | None = None


class SessionList(msgspec.Struct, kw_only=True):
    """The answer of `GET /v1/sessions`: a page, in the order of ids."""

    object: Literal["list"] = "list"
    data: list[SessionState]
    first_id: str | None
    last_id: str | None
    has_more: bool


class EndedSession(msgspec.Struct, kw_only=True):
    """The answer of `DELETE /v1/sessions/{session_id}`."""

    id: str
    object: Literal["session"] = "session"
    deleted: bool = True


async def list_sessions(service: Service, request: Request) -> Response:
    """The conversations of this key: those that are kept, and those of which a budget is counted.

    A page ends with a whole conversation, however many models have some of it.
    """
    exchange: Exchange = request.scope[SCOPE_KEY]
    query = request.query_params
    limit, after = whole_number(query.get("limit", str(PAGE)), "limit", 1, PAGE_MAX), query.get("after", "")
    engines = _engines(service, request)
    owner, spending = exchange.viewer.owner, service.spending
    now_ns = spending.clock()
    purses = {key[1]: purse for key, purse in _purses(spending, now_ns) if key[0] == owner}
    found = [_state_of(record, model) for model, engine in engines.items() for record in engine.sessions(Tenant(owner))]
    lost = service.lost.of(owner, [(state.id, model) for state in found if (model := state.model) is not msgspec.UNSET])
    found += [
        SessionState(id=name, model=model, state="lost")
        for name, model in lost
        if named_model(service, request) in (None, model)
    ]
    known = {state.id for state in found}
    for name, purse in purses.items():
        if name not in known:
            found.append(SessionState(id=name, state="busy" if purse.num_live else "forgotten"))
    ids = sorted({state.id for state in found if state.id > after})
    page = set(ids[:limit])
    found = sorted((state for state in found if state.id in page), key=lambda state: state.id)
    for state in found:
        if (counted := purses.get(state.id)) is not None:
            state.age_s = (now_ns - counted.began_ns) / NANOSECONDS
            state.tokens_used, state.token_budget = counted.used, spending.sessions.most
    reply = SessionList(
        data=found,
        first_id=found[0].id if found else None,
        last_id=found[-1].id if found else None,
        has_more=len(ids) > limit,
    )
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _engines(service: Service, request: Request) -> dict[str, ServedEngine]:
    """Those that may keep some of a conversation: all, or that of the model that is asked about."""
    if (name := named_model(service, request)) is not None:
        engine = service.ready_engine(name)
        return {"" if service.models is None else name: engine}
    service.check_open()
    return {model: engine for model, engine in service.engines().items() if engine.is_ready}


def _state_of(record: SessionRecord, model: str) -> SessionState:
    places = [name for name, num in (("device", record.num_on_device), ("host", record.num_on_host)) if num]
    return SessionState(
        id=record.session_id,
        model=model or msgspec.UNSET,
        state=record.state.lower(),  # type: ignore[arg-type]
        tokens_kept=record.num_tokens,
        where="both" if len(places) == 2 else places[0] if places else "nowhere",  # type: ignore[arg-type]
        ttl_left_s=record.ttl_left_s,
    )


async def end_session(service: Service, request: Request) -> Response:
    """Keep nothing more of a conversation of this key; one that is answered now goes on to its end."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    owner, session_id = exchange.viewer.owner, request.path_params["session_id"]
    engines = _engines(service, request).values()
    were_kept = [engine.end_session(session_id, Tenant(owner)) for engine in engines]
    were_kept.append(service.lost.end(owner, session_id))
    if not service.spending.end_session(owner, session_id) and not any(were_kept):
        raise SessionNotFound(f"There is no session {session_id[:128]!r}; it may have ended")
    return Response(msgspec.json.encode(EndedSession(id=session_id)), media_type="application/json")


def _purses(spending: Spending, now_ns: int) -> list[tuple[tuple[str, str], Purse]]:
    return [(key, purse) for key, purse in spending.sessions.items(now_ns).items() if isinstance(key, tuple)]
