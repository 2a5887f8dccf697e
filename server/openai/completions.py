"""`POST /v1/completions`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import InvalidParameter
from novainfer.server.openai.chunks import ChunkOptions, CompletionChunks
from novainfer.server.openai.generation import Generation, receive, wanted_id
from novainfer.server.openai.protocol import CompletionRequest, Prompt
from novainfer.server.openai.replies import Choice, Completion
from novainfer.server.openai.sse import EventStream
from novainfer.server.service import Service


async def create_completion(service: Service, request: Request) -> Response | EventStream:
    """Continue one prompt or several, as one object or as a stream of chunks; choices go prompt by prompt."""
    exchange, body, params = await receive(service, request, CompletionRequest)
    prompts = body.prompts()
    echoes = await _echoes(service, body, prompts)
    name = wanted_id(body.request_id, exchange.request_id)
    generation = Generation(
        service, "cmpl", name, prompts, params, exchange.viewer.owner, exchange.client, exchange.work
    )
    if body.stream:
        first = await generation.first()
        options = ChunkOptions.of(body)
        encoder = CompletionChunks(
            generation.id, generation.created, generation.model, generation.tally, options, echoes=echoes, n=params.n
        )
        return EventStream(generation, first, encoder, service.settings)

    choices = _best(await generation.collect(), params.n, body.num_wanted)
    reply = Completion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=[choice.of_completion(i, body, echoes[i // body.num_wanted]) for i, choice in enumerate(choices)],
        usage=generation.tally.usage(),
    )
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def _echoes(service: Service, body: CompletionRequest, prompts: list[Prompt]) -> list[str]:
    """The text to put before each prompt's completions: the prompt itself where `echo` is set."""
    if not body.echo:
        return [""] * len(prompts)
    engine, found = service.ready_engine(), list[str]()
    for prompt in prompts:
        if isinstance(prompt, dict):
            try:
                tokens = await engine.detokenize(prompt["prompt_token_ids"])
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
