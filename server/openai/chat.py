"""`POST /v1/chat/completions`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer.server.openai.chunks import ChatChunks, ChunkOptions, ReadChatChunks
from novainfer.server.openai.generation import Generation, receive, wanted_id
from novainfer.server.openai.protocol import ChatCompletionRequest
from novainfer.server.openai.reading import Reading, message_of, params_for, wanted_of
from novainfer.server.openai.replies import ChatCompletion, prompt_logprobs
from novainfer.server.openai.sse import EventStream
from novainfer.server.openai.structured import is_whole
from novainfer.server.service import Service


async def create_chat_completion(service: Service, request: Request) -> Response | EventStream:
    """Answer a conversation, as one object or as a stream of chunks."""
    exchange, body, params = await receive(service, request, ChatCompletionRequest)
    formats = service.formats
    prompt, params = body.prompt(has_tools=formats.has_tools), params_for(params, body, formats)
    name = wanted_id(body.request_id, exchange.request_id)
    generation = Generation(service, "chatcmpl", name, [prompt], params, exchange.viewer.owner, exchange.client)
    reading = None
    calls_tools = bool(body.tools) and body.tool_choice != "none" and formats.has_tools
    if is_whole(params.structured_outputs, calls_tools=calls_tools):
        wanted = None
    else:
        wanted = wanted_of(body, formats)
    if wanted is not None:
        reading = Reading(wanted, service.ready_engine().vocabulary, params.n, generation.tally)
    if body.stream:
        first = await generation.first()
        return EventStream(generation, first, _encoder(generation, body, reading), service.settings)

    choices = await generation.collect(reading)
    has_reasoning = body.include_reasoning is not False
    messages = [
        None if reading is None else message_of(choice.pieces, has_reasoning=has_reasoning) for choice in choices
    ]
    reply = ChatCompletion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=[choice.of_chat(index, body, messages[index]) for index, choice in enumerate(choices)],
        usage=generation.tally.usage(),
        prompt_token_ids=choices[0].prompt_token_ids if body.return_token_ids else msgspec.UNSET,
        prompt_logprobs=prompt_logprobs(choices[0].prompt_logprobs, body.prompt_logprobs),
    )
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _encoder(generation: Generation, body: ChatCompletionRequest, reading: Reading | None) -> ChatChunks:
    envelope = (generation.id, generation.created, generation.model, generation.tally, ChunkOptions.of(body))
    if reading is None:
        return ChatChunks(*envelope, n=generation.n)
    has_reasoning = body.include_reasoning is not False
    return ReadChatChunks(*envelope, reading=reading, n=generation.n, has_reasoning=has_reasoning)
