"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import ContextLengthExceeded, InvalidParameter, SamplingParams
from novainfer.server.anthropic.events import MessageEvents
from novainfer.server.anthropic.protocol import CountTokensRequest, MessagesRequest, in_anthropics_words
from novainfer.server.anthropic.replies import AnsweredMessage, Shown, TokenCount, blocks_of, ending_of, usage_of
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.openai.answering import Answer, begin_answer
from novainfer.server.openai.generation import receive
from novainfer.server.openai.sse import EventStream
from novainfer.server.openai.tokens import receive_for_tokens, tokens_of
from novainfer.server.service import Service


async def create_message(service: Service, request: Request) -> Response | EventStream:
    """Answer a conversation, as one message or as a stream of events."""
    exchange, body, params = await receive(service, request, MessagesRequest)
    _tell_ignored(service, exchange, body)
    try:
        return await _answered(service, exchange, body, params)
    except ContextLengthExceeded as error:
        if error.param != "max_tokens":
            raise
        # Anthropic's newer models take it as a bound: the answer ends where the context does.
        return await _answered(service, exchange, body, msgspec.structs.replace(params, max_tokens=None))


async def count_tokens(service: Service, request: Request) -> Response:
    """The tokens that a message would begin with."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    body = await receive_for_tokens(service, exchange, CountTokensRequest)
    with in_anthropics_words():
        prompt = body.prompt(service.formats)
    [tokens] = await tokens_of(service, exchange, [prompt])
    return _json(TokenCount(len(tokens)))


async def _answered(
    service: Service, exchange: Exchange, body: MessagesRequest, params: SamplingParams
) -> Response | EventStream:
    with in_anthropics_words():
        prompt = body.prompt(service.formats)
        answer = await begin_answer(
            service, exchange, prompt, params, body.offer(), prefix="msg", name=exchange.request_id
        )
        thoughts = _shown_of(body)
        is_context_full = partial(_is_context_full, answer, body)
        if body.stream:
            first = await answer.first()
            events = MessageEvents(answer, exchange.request_id, thoughts=thoughts, is_context_full=is_context_full)
            return EventStream(answer.generation, first, events, service.settings)
        [choice] = await answer.collect()
    assert choice.last is not None, "an answer ended without a delta"
    reason, sequence = ending_of(choice.last, is_context_full=is_context_full())
    reply = AnsweredMessage(
        id=answer.generation.id,
        model=answer.generation.model,
        content=blocks_of(choice.pieces, thoughts=thoughts),
        stop_reason=reason,
        stop_sequence=sequence,
        usage=usage_of(answer.generation.tally),
    )
    return _json(reply)


def _is_context_full(answer: Answer, body: MessagesRequest) -> bool:
    return answer.generation.tally.completion_tokens < body.max_tokens


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
    found = body.without_effect(service.formats)
    if found and service.settings.strict_fields:
        what = "has no effect on this model, and this server refuses such fields: leave it out"
        raise InvalidParameter(f"{found[0]} {what}", param=found[0])
    exchange.ignored = b", ".join(filter(None, [exchange.ignored, ", ".join(found).encode()]))


def _json(reply: AnsweredMessage | TokenCount) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")
