"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import ContextLengthExceeded, InvalidParameter, SamplingParams
from novainfer.reading import Reading, wanted_by
from novainfer.server.anthropic.events import MessageEvents
from novainfer.server.anthropic.protocol import CountTokensRequest, MessagesRequest, in_anthropics_words
from novainfer.server.anthropic.replies import AnsweredMessage, Shown, TokenCount, blocks_of, ending_of, usage_of
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.journal.records import Asked
from novainfer.server.openai.answering import Answer, AnswerAgain, begin_answer, reading_of
from novainfer.server.openai.decode import decode
from novainfer.server.openai.generation import receive
from novainfer.server.openai.ids import BY_CHANCE, Ids
from novainfer.server.openai.journaled import kept_answer, keyed_id, one_by_one, origin_of, written_down
from novainfer.server.openai.kind import Kind, Telling
from novainfer.server.openai.replies import Choice, Tally
from novainfer.server.openai.rest import Rest, follow, rest_for
from novainfer.server.openai.sse import EventStream
from novainfer.server.openai.structured import naming_grammar_as
from novainfer.server.openai.tokens import receive_for_tokens, tokens_of
from novainfer.server.served import OfAnswers
from novainfer.server.service import Service

KIND = "msg"


async def create_message(service: Service, request: Request) -> Rest | EventStream:
    """Answer a conversation, as one message or as a stream of events."""
    with in_anthropics_words():
        keyed = keyed_id(service, request, KIND)
    async with one_by_one(service, request, keyed):
        with in_anthropics_words():
            rest = await rest_for(service, request, JOURNALED, keyed)
        return await _asked(service, request, keyed) if rest is None else rest


async def _asked(service: Service, request: Request, keyed: str | None) -> Rest | EventStream:
    exchange, body, params = await receive(service, request, MessagesRequest, KIND)
    _tell_ignored(service, exchange, body)
    try:
        return await _answered(service, exchange, body, params, keyed)
    except ContextLengthExceeded as error:
        if error.param != "max_tokens":
            raise
        # Anthropic's newer models take it as a bound: the answer ends where the context does.
        return await _answered(service, exchange, body, msgspec.structs.replace(params, max_tokens=None), keyed)


async def count_tokens(service: Service, request: Request) -> Response:
    """The tokens that a message would begin with."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    body = await receive_for_tokens(service, exchange, CountTokensRequest)
    async with service.tokens_for(exchange, body.model) as model:
        with in_anthropics_words():
            prompt = body.prompt(model.formats)
        [tokens] = await tokens_of(service, exchange, model.of, [prompt])
    return _json(TokenCount(len(tokens)))


async def follow_message(service: Service, request: Request) -> Rest:
    """`GET /v1/messages/{id}`: a message again; of a stream the rest, where its client has some of it."""
    with in_anthropics_words():
        return await follow(service, request, JOURNALED)


async def _answered(
    service: Service, exchange: Exchange, body: MessagesRequest, params: SamplingParams, keyed: str | None
) -> Rest | EventStream:
    with in_anthropics_words(), naming_grammar_as("output_config.format.schema"):
        prompt = body.prompt(exchange.model.formats)
        params = body.bounded(params, exchange.model.formats)
        is_stream = bool(body.stream)
        origin = origin_of(service, exchange.model, params, 1, is_wanted=is_stream or keyed is not None)
        answer = await begin_answer(
            *(service, exchange, prompt, params, body.offer()),
            prefix=KIND, name=exchange.request_id, request_id=keyed, origin=origin,
        )  # fmt: skip
        generation = answer.generation
        if origin is not None:
            written = written_down(
                *(service, exchange, KIND, generation, origin, answer.params, [prompt]), is_stream=is_stream
            )
            with answer.naming():
                return await kept_answer(service, exchange, written, answer, generation, answer.reading, JOURNALED)
        of = (generation.id, generation.model)
        if body.stream:
            first = await answer.first()
            events = _events(answer, of, exchange.request_id, body)
            return EventStream(generation, first, events, service.settings)
        choices = await answer.collect()
    return Response(_reply(of, body, choices, generation.tally), media_type="application/json")


def _reply(
    of: tuple[str, str], body: MessagesRequest, choices: list[Choice], tally: Tally, ids: Ids = BY_CHANCE
) -> bytes:
    [choice] = choices
    assert choice.last is not None, "an answer ended without a delta"
    reason, sequence = ending_of(choice.last, is_context_full=_is_context_full(tally, body))
    reply = AnsweredMessage(
        id=of[0],
        model=of[1],
        content=blocks_of(choice.pieces, thoughts=_shown_of(body), ids=ids),
        stop_reason=reason,
        stop_sequence=sequence,
        usage=usage_of(tally),
    )
    return msgspec.json.encode(reply)


def _events(
    answer: Answer | AnswerAgain, of: tuple[str, str], request_id: str, body: MessagesRequest, ids: Ids = BY_CHANCE
) -> MessageEvents:
    is_context_full = partial(_is_context_full, answer.tally, body)
    return MessageEvents(answer, of, request_id, thoughts=_shown_of(body), is_context_full=is_context_full, ids=ids)


def _is_context_full(tally: Tally, body: MessagesRequest) -> bool:
    return tally.completion_tokens < body.max_tokens


# ---- again, of what the journal holds ------------------------------------------------------------------------------


async def _telling(model: OfAnswers, asked: Asked, request_id: str) -> Telling:
    tally = Tally(1, 1)
    answer = AnswerAgain(_reading_again(model, asked, tally), tally)
    return Telling(_events(answer, (asked.id, asked.model), request_id, _body(asked), Ids(asked.salt)), tally)


async def _whole(model: OfAnswers, asked: Asked, choices: list[Choice], tally: Tally) -> bytes:
    return _reply((asked.id, asked.model), _body(asked), choices, tally, Ids(asked.salt))


def _reading_again(model: OfAnswers, asked: Asked, tally: Tally) -> Reading | None:
    body = _body(asked)
    params = body.bounded(body.sampling_params({}), model.formats)  # by the model's own defaults no answer is read
    return reading_of(model, wanted_by(params, body.offer(), model.formats), 1, tally)


def _body(asked: Asked) -> MessagesRequest:
    return decode(MessagesRequest, asked.body)[0]


JOURNALED = Kind(KIND, _telling, _whole, _reading_again)


# ---- fields --------------------------------------------------------------------------------------------------------


def _shown_of(body: MessagesRequest) -> Shown:
    """What an answer shows of its thoughts; a template that cannot switch them off has them all the same."""
    thinking = body.thinking
    if thinking is None:
        return "shown"
    if thinking.type == "disabled":
        return "none"
    return "omitted" if thinking.display == "omitted" else "shown"


def _tell_ignored(service: Service, exchange: Exchange, body: MessagesRequest) -> None:
    """Name what has no effect on this model beside the fields that none has; refuse it where the server is strict."""
    found = body.without_effect(exchange.model.formats)
    if found and service.settings.strict_fields:
        what = "has no effect on this model, and this server refuses such fields: leave it out"
        raise InvalidParameter(f"{found[0]} {what}", param=found[0])
    exchange.ignored = b", ".join(filter(None, [exchange.ignored, ", ".join(found).encode()]))


def _json(reply: TokenCount) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")
