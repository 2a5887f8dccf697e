"""`POST /v1/chat/completions`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import SamplingParams
from novainfer.reading import Reading, wanted_by
from novainfer.server.http.exchange import Exchange
from novainfer.server.journal.records import Asked
from novainfer.server.openai.answering import Answer, begin_answer, reading_of
from novainfer.server.openai.chunks import ChatChunks, ChunkOptions, ReadChatChunks
from novainfer.server.openai.coming import wanted_id
from novainfer.server.openai.decode import decode
from novainfer.server.openai.generation import receive
from novainfer.server.openai.ids import BY_CHANCE, Ids
from novainfer.server.openai.journaled import (
    check_stays,
    kept_answer,
    keyed_id,
    one_by_one,
    origin_of,
    written_down,
)
from novainfer.server.openai.kind import Kind, Telling
from novainfer.server.openai.protocol import ChatCompletionRequest
from novainfer.server.openai.reading import message_of
from novainfer.server.openai.replies import ChatCompletion, Choice, Tally, prompt_logprobs
from novainfer.server.openai.rest import Rest, follow, rest_for
from novainfer.server.openai.sse import EventStream
from novainfer.server.openai.structured import naming_grammar
from novainfer.server.served import OfAnswers
from novainfer.server.service import Service

KIND = "chatcmpl"


async def create_chat_completion(service: Service, request: Request) -> Rest | EventStream:
    """Answer a conversation, as one object or as a stream of chunks."""
    keyed = keyed_id(service, request, KIND)
    async with one_by_one(service, request, keyed):
        rest = await rest_for(service, request, JOURNALED, keyed)
        return await _answered(service, request, keyed) if rest is None else rest


async def _answered(service: Service, request: Request, keyed: str | None) -> Rest | EventStream:
    exchange, body, params = await receive(service, request, ChatCompletionRequest, KIND)
    with naming_grammar(body):
        return await _made(service, exchange, body, params, keyed)


async def _made(
    service: Service, exchange: Exchange, body: ChatCompletionRequest, params: SamplingParams, keyed: str | None
) -> Rest | EventStream:
    prompt = body.prompt(has_tools=exchange.model.formats.has_tools)
    name = wanted_id(body.request_id, exchange.request_id)
    is_stream = bool(body.stream)
    origin = origin_of(service, exchange.model, params, 1, is_wanted=is_stream or keyed is not None)
    check_stays(body, origin)
    answer = await begin_answer(
        *(service, exchange, prompt, params, body), prefix=KIND, name=name, request_id=keyed, origin=origin
    )
    generation = answer.generation
    if origin is not None:
        written = written_down(
            *(service, exchange, KIND, generation, origin, answer.params, [prompt]),
            is_stream=is_stream, is_sought=body.on_disconnect != "cancel", stream_interval=body.stream_interval,
        )  # fmt: skip
        with answer.naming():
            return await kept_answer(service, exchange, written, answer, generation, answer.reading, JOURNALED)
    if body.stream:
        first = await answer.first()
        return EventStream(generation, first, _encoder(answer, body), service.settings, body.stream_interval)

    choices = await answer.collect()
    reply = _reply((generation.id, generation.created, generation.model), body, choices, generation.tally, BY_CHANCE)
    return Response(reply, media_type="application/json")


def _reply(
    envelope: tuple[str, int, str], body: ChatCompletionRequest, choices: list[Choice], tally: Tally, ids: Ids
) -> bytes:
    has_reasoning = body.include_reasoning is not False
    answer_id, created, model = envelope
    reply = ChatCompletion(
        id=answer_id,
        created=created,
        model=model,
        choices=[
            choice.of_chat(index, body, message_of(choice.pieces, has_reasoning=has_reasoning, choice=index, ids=ids))
            for index, choice in enumerate(choices)
        ],
        usage=tally.usage(),
        prompt_token_ids=choices[0].prompt_token_ids if body.return_token_ids else msgspec.UNSET,
        prompt_logprobs=prompt_logprobs(choices[0].prompt_logprobs, body.prompt_logprobs),
    )
    return msgspec.json.encode(reply)


def _encoder(answer: Answer, body: ChatCompletionRequest) -> ChatChunks:
    generation = answer.generation
    envelope = (generation.id, generation.created, generation.model)
    return _chunks(envelope, generation.tally, body, answer.reading, generation.n)


def _chunks(
    envelope: tuple[str, int, str],
    tally: Tally,
    body: ChatCompletionRequest,
    reading: Reading | None,
    n: int,
    ids: Ids = BY_CHANCE,
) -> ChatChunks:
    options = ChunkOptions.of(body)
    if reading is None:
        return ChatChunks(*envelope, tally, options, n=n)
    has_reasoning = body.include_reasoning is not False
    return ReadChatChunks(*envelope, tally, options, reading=reading, n=n, has_reasoning=has_reasoning, ids=ids)


async def follow_chat(service: Service, request: Request) -> Rest:
    """`GET /v1/chat/completions/{id}`: an answer again; of a stream the rest, where its client has some of it."""
    return await follow(service, request, JOURNALED)


async def _telling(model: OfAnswers, asked: Asked, _: str) -> Telling:
    """What tells the answer to a conversation that is in the journal."""
    tally = Tally(1, asked.params.n)
    reading = _reading_again(model, asked, tally)
    envelope = (asked.id, asked.created, asked.model)
    return Telling(_chunks(envelope, tally, _body(asked), reading, asked.params.n, Ids(asked.salt)), tally)


async def _whole(model: OfAnswers, asked: Asked, choices: list[Choice], tally: Tally) -> bytes:
    return _reply((asked.id, asked.created, asked.model), _body(asked), choices, tally, Ids(asked.salt))


def _reading_again(model: OfAnswers, asked: Asked, tally: Tally) -> Reading | None:
    """What reads the answer to a conversation that is in the journal."""
    body = _body(asked)
    params = body.sampling_params({})  # by the model's own defaults no answer is read
    return reading_of(model, wanted_by(params, body, model.formats), asked.params.n, tally)


def _body(asked: Asked) -> ChatCompletionRequest:
    return decode(ChatCompletionRequest, asked.body)[0]


JOURNALED = Kind(KIND, _telling, _whole, _reading_again)
