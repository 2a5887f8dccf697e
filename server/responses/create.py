"""`POST /v1/responses`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from novainfer import InvalidParameter, SamplingParams
from novainfer.server.http.errors import ResponseNotFound
from novainfer.server.http.exchange import Exchange, Viewer
from novainfer.server.openai.answering import begin_answer
from novainfer.server.openai.generation import receive
from novainfer.server.openai.journaled import KEY_HEADER, keyed_id, one_by_one, origin_of, written_down
from novainfer.server.openai.kept import Kept
from novainfer.server.openai.protocol import Message
from novainfer.server.openai.sse import EventStream
from novainfer.server.openai.structured import naming_grammar
from novainfer.server.responses.again import KIND, begin_kept
from novainfer.server.responses.background import make, make_alone
from novainfer.server.responses.following import Following
from novainfer.server.responses.given import items_of
from novainfer.server.responses.items import Item, decoded, encoded, messages_of
from novainfer.server.responses.protocol import ResponseRequest, own_names
from novainfer.server.responses.reply import Response
from novainfer.server.responses.run import Run
from novainfer.server.responses.truncation import fitted
from novainfer.server.service import Service
from novainfer.server.store import Record


class PreviousNotFound(InvalidParameter):
    """The response that this one is to follow is not kept."""

    code = "previous_response_not_found"


async def create_response(service: Service, request: Request) -> ASGIApp:
    """Answer a conversation: as one object, as a stream of events, or at once, to be asked for later."""
    keyed = keyed_id(service, request, KIND)
    exchange, body, params = await receive(service, request, ResponseRequest, KIND)
    with own_names(), naming_grammar(body.chat([])):
        if keyed is not None and not _stores(service, body):
            exchange.ignore(
                KEY_HEADER, "keeps no response that is not stored", is_strict=service.settings.strict_fields
            )
            keyed = None
        async with one_by_one(service, request, keyed):
            return await _create(service, exchange, body, params, keyed)


async def _create(
    service: Service, exchange: Exchange, body: ResponseRequest, params: SamplingParams, keyed: str | None
) -> ASGIApp:
    viewer = exchange.viewer
    stores = _stores(service, body)
    if keyed is not None and (again := _made_before(service, viewer, keyed)) is not None:
        service.has_begun((keyed, viewer.owner))
        return await _told_again(service, again, body)
    previous = _previous(service, body, viewer)
    has_tools = exchange.model.formats.has_tools
    given = items_of(body.input, lambda *what: _item(service, viewer, *what), has_tools=has_tools)
    chat = body.chat(_messages(body, previous, given))
    if body.truncation == "auto":
        chat = await fitted(service, exchange, chat, params)
    prompt = chat.prompt(has_tools=has_tools)

    model = exchange.model
    origin = origin_of(service, model, params, 1, is_wanted=stores)
    created = int(time.time()) if origin is None else origin.created
    response_id = f"resp_{secrets.token_hex(24)}" if keyed is None else keyed
    response = body.response(response_id, created_at=created, model=model.name, store=stores, params=params)
    data = _checked(response, given)
    record, has_events = None, bool(body.stream or body.background or keyed)
    if stores:
        before = None if previous is None else previous.turn
        record = service.store.open(response_id, viewer.owner, before=before, given=data, has_events=has_events)
    try:
        answer = await begin_answer(
            *(service, exchange, prompt, params, chat),
            prefix=KIND, name=exchange.request_id, request_id=response_id, origin=origin,
        )  # fmt: skip
        if origin is not None and record is not None:
            conversation = encoded([*_before(previous), *given])
            generation, held = answer.generation, answer.params
            written = written_down(
                *(service, exchange, KIND, generation, origin, held, [prompt]),
                is_stream=bool(body.stream or body.background), is_sought=has_events, more=conversation,
            )  # fmt: skip
            kept, run = await begin_kept(service, model, written, answer, record)
            if body.stream or body.background:
                return _told_now(service, record, body)
            return await _whole(kept, run, record)
        run = Run(response, answer, record, has_logprobs=body.has_logprobs)
        if body.background:
            assert record is not None, "what is made in the background is kept"
            first = await answer.first(0.0)
            record.is_in_background = True
            record.task = make_alone(service, answer, run, first)
            return _told_now(service, record, body)
        first = await answer.first()
        if body.stream:
            return ResponseStream(EventStream(answer.generation, first, run, service.settings, 1), run)
        await make(answer, run, first)
    except BaseException as error:
        is_made = record is not None and (record.task is not None or record.is_over)
        if record is not None and not (is_made and has_events and not isinstance(error, Exception)):
            record.drop()  # where a client has left that could ask for it again, it goes on for a while
        raise
    return _json(msgspec.json.encode(run.response))


def _told_now(service: Service, record: Record, body: ResponseRequest) -> ASGIApp:
    """A response that makes itself, to a client that need not wait for its end."""
    return Following(service, record) if body.stream else _json(record.as_it_is())


def _made_before(service: Service, viewer: Viewer, keyed: str) -> Record | None:
    """What this request has made, or makes still, when it was sent before; what ended badly is made anew."""
    try:
        record = service.store.find(keyed, viewer.owner)
    except ResponseNotFound:
        return None
    if record.answer is None or msgspec.json.decode(record.answer, type=_Ended).status in ("completed", "incomplete"):
        return record
    record.drop()
    return None


class _Ended(msgspec.Struct):
    status: str


async def _told_again(service: Service, record: Record, body: ResponseRequest) -> ASGIApp:
    if not body.stream and not body.background:
        await service.has_returned((record.id, record.owner))
        kept = service.kept.get((record.id, record.owner))
        with contextlib.nullcontext() if kept is None else kept.reader():
            while not record.is_over and not record.is_dropped:
                await record.changed()
        if kept is not None and kept.error is not None:
            raise kept.error
        if record.is_dropped:
            raise ResponseNotFound(f"Response with id '{record.id}' is kept no longer")
    return _told_now(service, record, body)


async def _whole(kept: Kept, run: Run, record: Record) -> ASGIApp:
    """All of a response, once it is there; raises what it ended with."""
    assert record.task is not None, "it makes itself"
    with kept.reader():
        await asyncio.wait({record.task})
    if kept.error is not None:
        await kept.made()
        raise kept.error
    return _json(msgspec.json.encode(run.response))


class ResponseStream:
    """ASGI response: the events of a response that ends with its client."""

    def __init__(self, stream: EventStream, run: Run) -> None:
        self._stream = stream
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._stream(scope, receive, send)
        finally:
            self._run.cancel()  # nothing, where it has ended


def _stores(service: Service, body: ResponseRequest) -> bool:
    """Whether the response is kept: as OpenAI's are, unless it is not to be, or the server keeps none."""
    if service.store.max_responses:
        return body.store is not False
    if field := "background" if body.background else "store" if body.store else None:
        raise InvalidParameter(f"{field} cannot be true: this server keeps no responses", param=field)
    return False


def _previous(service: Service, body: ResponseRequest, viewer: Viewer) -> Record | None:
    if body.previous_response_id is None:
        return None
    field = "previous_response_id"
    try:
        record = service.store.find(body.previous_response_id, viewer.sees)
    except ResponseNotFound as error:
        raise PreviousNotFound(f"Previous {error.message[:1].lower()}{error.message[1:]}", param=field) from None
    if not record.is_over:
        message = f"{field} {record.id!r} is still being made: wait until it has ended, or cancel it"
        raise InvalidParameter(message, param=field)
    return record


def _item(service: Service, viewer: Viewer, item_id: str, path: str) -> Item:
    """The item of this id, of a response that is kept."""
    try:
        record = service.store.find_maker(item_id, viewer.sees)
    except ResponseNotFound as error:
        raise InvalidParameter(error.message, param=path) from None
    return next(item for item in decoded(record.turn.made) if item.id == item_id)


def _before(previous: Record | None) -> list[Item]:
    """All items of the conversation that a response follows."""
    before: list[Item] = []
    for turn in previous.turn if previous is not None else ():
        before += [*decoded(turn.given), *decoded(turn.made)]
    return before


def _messages(body: ResponseRequest, previous: Record | None, given: list[Item]) -> list[Message]:
    """Instructions are those of this response, and none of an earlier one."""
    instructions = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    return instructions + messages_of([*_before(previous), *given])


def _checked(response: Response, given: list[Item]) -> bytes:
    """The items as they are kept; raises `InvalidParameter` where they, or what the response repeats, are no text."""
    try:
        msgspec.json.encode(response)
        return encoded(given)
    except UnicodeEncodeError:
        message = "The body is not valid Unicode: it holds half of a surrogate pair"
        raise InvalidParameter(message, param="input") from None


def _json(data: bytes) -> HttpResponse:
    return HttpResponse(data, media_type="application/json")
