"""Responses that are kept: looked at, followed, cancelled and deleted, and the items that they were given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from novainfer import InvalidParameter
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.http.query import whole_number
from novainfer.server.responses.background import stop
from novainfer.server.responses.following import Following
from novainfer.server.responses.items import Item, decoded
from novainfer.server.responses.protocol import INCLUDABLE
from novainfer.server.service import Service
from novainfer.server.store import Record

ITEMS_MAX = 100  # of one page, and as many as are given unless the client says: OpenAI's
ITEMS = 20
BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


class ItemList(msgspec.Struct, kw_only=True):
    """The answer of `GET /v1/responses/{response_id}/input_items`."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(msgspec.Struct, kw_only=True):
    """The answer of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


async def get_response(service: Service, request: Request) -> HttpResponse | Following:
    """The response as it is now; with `stream=true` its events, those behind `starting_after` if that is given."""
    record = _find(service, request)
    query = request.query_params
    _check_include(query.getlist("include") + query.getlist("include[]"))
    starting_after = query.get("starting_after")
    if not _is_true(request, "stream"):
        if starting_after is not None:
            raise InvalidParameter("starting_after needs stream=true", param="starting_after")
        return _json(record.as_it_is())
    if record.events is None:
        message = "stream cannot be true: events are kept of responses that were created with stream or background"
        raise InvalidParameter(message, param="stream")
    first = 0 if starting_after is None else whole_number(starting_after, "starting_after", 0, 10**15) + 1
    if record.is_over and first > (num_events := len(record.events)):
        message = f"starting_after must be the number of an event of this response, at most {num_events - 1}"
        raise InvalidParameter(f"{message}, not {first - 1}", param="starting_after")
    return Following(service, record, first)


async def cancel_response(service: Service, request: Request) -> HttpResponse:
    """End a response that is made in the background; once more, or when it has ended, is fine."""
    record = _find(service, request)
    if not record.is_in_background:
        raise InvalidParameter(
            "Only responses that were created with background: true can be cancelled: of others, close the connection"
        )
    await stop(service, record)
    return _json(record.as_it_is())


async def delete_response(service: Service, request: Request) -> HttpResponse:
    """Keep a response no longer; one that is made in the background is cancelled."""
    record = _find(service, request)
    await stop(service, record)
    record.drop()
    if service.journal is not None:
        service.journal.forget(record.id, record.owner)
    return _json(msgspec.json.encode(Deleted(id=record.id)))


async def list_input_items(service: Service, request: Request) -> HttpResponse:
    """The items that a response was given, those of the responses before it among them, the latest first."""
    record = _find(service, request)
    query = request.query_params
    _check_include(query.getlist("include") + query.getlist("include[]"))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidParameter(f"order must be asc or desc, not {order[:40]!r}", param="order")
    limit = whole_number(query.get("limit", str(ITEMS)), "limit", 1, ITEMS_MAX)
    items = list(_given(record))
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        places = [at for at, item in enumerate(items) if item.id == after]
        if not places:
            raise InvalidParameter(
                f"after must be the id of an item of this response, not {after[:80]!r}", param="after"
            )
        items = items[places[0] + 1 :]
    page = items[:limit]
    reply = ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(items) > limit,
    )
    return _json(msgspec.json.encode(reply))


def _given(record: Record) -> Iterable[Item]:
    for turn in record.turn:
        yield from decoded(turn.given)
        if turn is not record.turn:
            yield from decoded(turn.made)


def _find(service: Service, request: Request) -> Record:
    exchange: Exchange = request.scope[SCOPE_KEY]
    response_id: str = request.path_params["response_id"]
    if service.is_resuming:  # what the journal holds is not there yet
        service.check_open()
    return service.store.find(response_id, exchange.viewer.sees)


def _is_true(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false")
    if (found := BOOLEANS.get(given.lower())) is None:
        raise InvalidParameter(f"{name} must be true or false, not {given[:40]!r}", param=name)
    return found


def _check_include(names: list[str]) -> None:
    for name in names:
        if name not in INCLUDABLE:
            message = f"include must be some of {', '.join(INCLUDABLE)}, not {name[:60]!r}"
            raise InvalidParameter(message, param="include")


def _json(data: bytes) -> HttpResponse:
    return HttpResponse(data, media_type="application/json")
