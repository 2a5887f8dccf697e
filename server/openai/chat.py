"""`POST /v1/chat/completions`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.http.turns import after
from novainfer.server.openai.chunks import ChatChunks, ChunkOptions
from novainfer.server.openai.decode import decode
from novainfer.server.openai.generation import Generation, wanted_id, with_deadline
from novainfer.server.openai.protocol import ChatCompletionRequest
from novainfer.server.openai.replies import AssistantMessage, ChatChoice, ChatCompletion, chat_logprobs
from novainfer.server.openai.sse import EventStream
from novainfer.server.openai.unsupported import header_value
from novainfer.server.service import Service


async def create_chat_completion(service: Service, request: Request) -> Response | EventStream:
    """Answer a conversation, as one object or as a stream of chunks."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    waited_s = await service.turns.wait(exchange.client, len(exchange.body))
    body, ignored = decode(ChatCompletionRequest, exchange.take_body())
    exchange.ignored = header_value(ignored)
    service.check_model(body.model)
    params = with_deadline(body.sampling_params(service.ready_engine().model_info.sampling_defaults), request.headers)
    params = after(params, waited_s)
    prompt = body.prompt()
    name = wanted_id(body.request_id, exchange.request_id)
    generation = Generation(service, "chatcmpl", name, [prompt], params, exchange.viewer.owner, exchange.client)
    if body.stream:
        first = await generation.first()
        options = ChunkOptions(
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            token_ids=bool(body.return_token_ids),
        )
        encoder = ChatChunks(
            generation.id, generation.created, generation.model, generation.tally, options, n=generation.n
        )
        return EventStream(generation, first, encoder, service.settings)

    choices = await generation.collect()
    reply = ChatCompletion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=[
            ChatChoice(
                index=index,
                message=AssistantMessage(choice.text),
                logprobs=chat_logprobs(choice.logprobs) if body.logprobs else None,
                token_ids=choice.token_ids if body.return_token_ids else msgspec.UNSET,
                **choice.ending(),
            )
            for index, choice in enumerate(choices)
        ],
        usage=generation.tally.usage(),
    )
    if body.return_token_ids:
        reply.prompt_token_ids = choices[0].prompt_token_ids
    return Response(msgspec.json.encode(reply), media_type="application/json")
