"""`POST /v1/chat/completions`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer.server.openai.chunks import ChatChunks, ChunkOptions
from novainfer.server.openai.generation import Generation, receive, wanted_id
from novainfer.server.openai.protocol import ChatCompletionRequest
from novainfer.server.openai.replies import ChatCompletion
from novainfer.server.openai.sse import EventStream
from novainfer.server.service import Service


async def create_chat_completion(service: Service, request: Request) -> Response | EventStream:
    """Answer a conversation, as one object or as a stream of chunks."""
    exchange, body, params = await receive(service, request, ChatCompletionRequest)
    prompt = body.prompt()
    name = wanted_id(body.request_id, exchange.request_id)
    generation = Generation(service, "chatcmpl", name, [prompt], params, exchange.viewer.owner, exchange.client)
    if body.stream:
        first = await generation.first()
        options = ChunkOptions.of(body)
        encoder = ChatChunks(
            generation.id, generation.created, generation.model, generation.tally, options, n=generation.n
        )
        return EventStream(generation, first, encoder, service.settings)

    choices = await generation.collect()
    reply = ChatCompletion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=[choice.of_chat(index, body) for index, choice in enumerate(choices)],
        usage=generation.tally.usage(),
        prompt_token_ids=choices[0].prompt_token_ids if body.return_token_ids else msgspec.UNSET,
    )
    return Response(msgspec.json.encode(reply), media_type="application/json")
