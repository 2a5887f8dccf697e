"""`POST /v1/completions`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.http.turns import after
from novainfer.server.openai.chunks import ChunkOptions, CompletionChunks
from novainfer.server.openai.decode import decode
from novainfer.server.openai.generation import Generation, wanted_id, with_deadline
from novainfer.server.openai.protocol import CompletionRequest
from novainfer.server.openai.replies import Choice, Completion, CompletionChoice, completion_logprobs
from novainfer.server.openai.sse import EventStream
from novainfer.server.openai.unsupported import header_value
from novainfer.server.service import Service


async def create_completion(service: Service, request: Request) -> Response | EventStream:
    """Continue one prompt or several, as one object or as a stream of chunks; choices go prompt by prompt."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    waited_s = await service.turns.wait(exchange.client, len(exchange.body))
    body, ignored = decode(CompletionRequest, exchange.take_body())
    exchange.ignored = header_value(ignored)
    service.check_model(body.model)
    params = with_deadline(body.sampling_params(service.ready_engine().model_info.sampling_defaults), request.headers)
    params = after(params, waited_s)
    prompts = body.prompts()
    echoes = body.echoes(prompts)
    name = wanted_id(body.request_id, exchange.request_id)
    generation = Generation(service, "cmpl", name, prompts, params, exchange.viewer.owner, exchange.client)
    if body.stream:
        first = await generation.first()
        options = ChunkOptions(
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            token_ids=bool(body.return_token_ids),
        )
        encoder = CompletionChunks(
            generation.id, generation.created, generation.model, generation.tally, options, echoes=echoes, n=params.n
        )
        return EventStream(generation, first, encoder, service.settings)

    def reply_choice(index: int, choice: Choice) -> CompletionChoice:
        echo = echoes[index // params.n]
        has_logprobs = body.logprobs is not None
        return CompletionChoice(
            index=index,
            text=echo + choice.text,
            logprobs=completion_logprobs(choice.logprobs, offset=len(echo)) if has_logprobs else None,
            token_ids=choice.token_ids if body.return_token_ids else msgspec.UNSET,
            prompt_token_ids=choice.prompt_token_ids if body.return_token_ids else msgspec.UNSET,
            **choice.ending(),
        )

    choices = await generation.collect()
    reply = Completion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=[reply_choice(index, choice) for index, choice in enumerate(choices)],
        usage=generation.tally.usage(),
    )
    return Response(msgspec.json.encode(reply), media_type="application/json")
