"""`POST /v1/completions`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import InvalidParameter, SamplingParams
from novainfer.server.engine import OfTokens
from novainfer.server.http.exchange import Exchange
from novainfer.server.journal.records import Asked
from novainfer.server.openai.chunks import ChunkOptions, CompletionChunks
from novainfer.server.openai.coming import wanted_id
from novainfer.server.openai.decode import decode
from novainfer.server.openai.generation import Generation, receive
from novainfer.server.openai.journaled import (
    check_stays,
    kept_answer,
    keyed_id,
    one_by_one,
    origin_of,
    written_down,
)
from novainfer.server.openai.kind import Kind, Telling
from novainfer.server.openai.protocol import CompletionRequest, Prompt
from novainfer.server.openai.replies import Choice, Completion, Tally
from novainfer.server.openai.rest import Rest, follow, rest_for
from novainfer.server.openai.sse import EventStream
from novainfer.server.openai.structured import naming_grammar
from novainfer.server.openai.tokens import without_special_tokens
from novainfer.server.served import OfAnswers
from novainfer.server.service import Service

KIND = "cmpl"


async def create_completion(service: Service, request: Request) -> Rest | EventStream:
    """Continue one prompt or several, as one object or as a stream of chunks; choices go prompt by prompt."""
    keyed = keyed_id(service, request, KIND)
    async with one_by_one(service, request, keyed):
        rest = await rest_for(service, request, JOURNALED, keyed)
        return await _completed(service, request, keyed) if rest is None else rest


async def _completed(service: Service, request: Request, keyed: str | None) -> Rest | EventStream:
    exchange, body, params = await receive(service, request, CompletionRequest, KIND)
    with naming_grammar(body):
        return await _made(service, exchange, body, params, keyed)


async def _made(
    service: Service, exchange: Exchange, body: CompletionRequest, params: SamplingParams, keyed: str | None
) -> Rest | EventStream:
    prompts = body.prompts()
    echoes = await _echoes(exchange.model.engine, body, prompts)
    if body.add_special_tokens is False:
        prompts = await without_special_tokens(service, exchange, prompts)
    name = wanted_id(body.request_id, exchange.request_id)
    is_stream = bool(body.stream)
    origin = origin_of(service, exchange.model, params, len(prompts), is_wanted=is_stream or keyed is not None)
    check_stays(body, origin)
    generation = Generation(service, exchange, KIND, name, prompts, params, keyed, origin)
    if origin is not None:
        written = written_down(
            *(service, exchange, KIND, generation, origin, params, prompts),
            is_stream=is_stream, is_sought=body.on_disconnect != "cancel", stream_interval=body.stream_interval,
        )  # fmt: skip
        return await kept_answer(service, exchange, written, generation, generation, None, JOURNALED)
    if body.stream:
        first = await generation.first()
        options = ChunkOptions.of(body)
        encoder = CompletionChunks(
            generation.id, generation.created, generation.model, generation.tally, options, echoes=echoes, n=params.n
        )
        return EventStream(generation, first, encoder, service.settings, body.stream_interval)

    choices = await generation.collect()
    envelope = (generation.id, generation.created, generation.model)
    return Response(_reply(envelope, body, choices, generation.tally, echoes), media_type="application/json")


def _reply(
    envelope: tuple[str, int, str], body: CompletionRequest, made: list[Choice], tally: Tally, echoes: list[str]
) -> bytes:
    answer_id, created, model = envelope
    choices = _best(made, len(made) // len(echoes), body.num_wanted)
    if body.is_prompt_alone:
        tally.completion_tokens = 0
        for choice in choices:
            choice.drop_answer()
    reply = Completion(
        id=answer_id,
        created=created,
        model=model,
        choices=[choice.of_completion(i, body, echoes[i // body.num_wanted]) for i, choice in enumerate(choices)],
        usage=tally.usage(),
    )
    return msgspec.json.encode(reply)


async def follow_completion(service: Service, request: Request) -> Rest:
    """`GET /v1/completions/{id}`: an answer again; of a stream the rest, where its client has some of it."""
    return await follow(service, request, JOURNALED)


async def _telling(model: OfAnswers, asked: Asked, _: str) -> Telling:
    """What tells completions that are in the journal."""
    body, n = decode(CompletionRequest, asked.body)[0], asked.params.n
    tally, echoes = Tally(len(asked.prompts), n), await _echoes(model.of, body, body.prompts())
    envelope = (asked.id, asked.created, asked.model)
    return Telling(CompletionChunks(*envelope, tally, ChunkOptions.of(body), echoes=echoes, n=n), tally)


async def _whole(model: OfAnswers, asked: Asked, choices: list[Choice], tally: Tally) -> bytes:
    body = decode(CompletionRequest, asked.body)[0]
    echoes = await _echoes(model.of, body, body.prompts())
    return _reply((asked.id, asked.created, asked.model), body, choices, tally, echoes)


def _no_reading(model: OfAnswers, asked: Asked, tally: Tally) -> None:
    return None


JOURNALED = Kind(KIND, _telling, _whole, _no_reading)


async def _echoes(model: OfTokens, body: CompletionRequest, prompts: list[Prompt]) -> list[str]:
    """The text to put before each prompt's completions: the prompt itself where `echo` is set."""
    if not body.echo:
        return [""] * len(prompts)
    found = list[str]()
    for prompt in prompts:
        if isinstance(prompt, dict):
            try:
                tokens = await model.detokenize(prompt["prompt_token_ids"])
            except InvalidParameter as error:
                raise InvalidParameter(error.message.replace("token_ids", "prompt", 1), param="prompt") from None
            prompt = b"".join(tokens).decode("utf-8", "replace")
        found.append(prompt)
    return found


def _best(choices: list[Choice], num_made: int, num_wanted: int) -> list[Choice]:
    """Of each prompt's `num_made` choices the `num_wanted` likeliest a token, likeliest first (`best_of`)."""
    if num_made == num_wanted:
        return choices
    found: list[Choice] = []
    for first in range(0, len(choices), num_made):
        found += sorted(choices[first : first + num_made], key=lambda choice: choice.mean_logprob, reverse=True)[
            :num_wanted
        ]
    return found
