"""`POST /v1/responses`."""

from __future__ import annotations

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
from novainfer.server.openai.protocol import Message
from novainfer.server.openai.sse import EventStream
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
    exchange, body, params = await receive(service, request, ResponseRequest)
    with own_names():
        return await _create(service, exchange, body, params)


async def _create(service: Service, exchange: Exchange, body: ResponseRequest, params: SamplingParams) -> ASGIApp:
    viewer = exchange.viewer
    stores = _stores(service, body)
    previous = _previous(service, body, viewer)
    given = items_of(body.input, lambda *what: _item(service, viewer, *what), has_tools=service.formats.has_tools)
    chat = body.chat(_messages(body, previous, given))
    if body.truncation == "auto":
        chat = await fitted(service, exchange, chat, params)
    prompt = chat.prompt(has_tools=service.formats.has_tools)

    model = service.ready_engine().model_info.name
    response_id = f"resp_{secrets.token_hex(24)}"
    response = body.response(response_id, created_at=int(time.time()), model=model, store=stores, params=params)
    data = _checked(response, given)
    record = None
    if stores:
        before = None if previous is None else previous.turn
        has_events = bool(body.stream or body.background)
        record = service.store.open(response_id, viewer.owner, before=before, given=data, has_events=has_events)
    try:
        answer = await begin_answer(
            service, exchange, prompt, params, chat, prefix="resp", name=exchange.request_id, request_id=response_id
        )
        run = Run(response, answer, record, has_logprobs=body.has_logprobs)
        if body.background:
            assert record is not None, "what is made in the background is kept"
            first = await answer.first(0.0)
            record.is_in_background = True
            record.task = make_alone(service, answer, run, first)
            return Following(record, 0, service.settings) if body.stream else _json(record.as_it_is())
        first = await answer.first()
        if body.stream:
            return ResponseStream(EventStream(answer.generation, first, run, service.settings), run)
        await make(answer, run, first)
    except BaseException:
        if record is not None:
            record.drop()
        raise
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


def _messages(body: ResponseRequest, previous: Record | None, given: list[Item]) -> list[Message]:
    """Instructions are those of this response, and none of an earlier one."""
    before: list[Item] = []
    for turn in previous.turn if previous is not None else ():
        before += [*decoded(turn.given), *decoded(turn.made)]
    instructions = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    return instructions + messages_of([*before, *given])


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
