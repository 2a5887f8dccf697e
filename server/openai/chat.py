"""`POST /v1/chat/completions`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer.server.openai.answering import Answer, begin_answer
from novainfer.server.openai.chunks import ChatChunks, ChunkOptions, ReadChatChunks
from novainfer.server.openai.generation import receive, wanted_id
from novainfer.server.openai.protocol import ChatCompletionRequest
from novainfer.server.openai.reading import message_of
from novainfer.server.openai.replies import ChatCompletion, prompt_logprobs
from novainfer.server.openai.sse import EventStream
from novainfer.server.service import Service


async def create_chat_completion(service: Service, request: Request) -> Response | EventStream:
    """Answer a conversation, as one object or as a stream of chunks."""
    exchange, body, params = await receive(service, request, ChatCompletionRequest)
    prompt = body.prompt(has_tools=service.formats.has_tools)
    name = wanted_id(body.request_id, exchange.request_id)
    answer = await begin_answer(service, exchange, prompt, params, body, prefix="chatcmpl", name=name)
    generation = answer.generation
    if body.stream:
        first = await answer.first()
        return EventStream(generation, first, _encoder(answer, body), service.settings)

    choices = await answer.collect()
    has_reasoning = body.include_reasoning is not False
    reply = ChatCompletion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=[
            choice.of_chat(index, body, message_of(choice.pieces, has_reasoning=has_reasoning))
            for index, choice in enumerate(choices)
        ],
        usage=generation.tally.usage(),
        prompt_token_ids=choices[0].prompt_token_ids if body.return_token_ids else msgspec.UNSET,
        prompt_logprobs=prompt_logprobs(choices[0].prompt_logprobs, body.prompt_logprobs),
    )
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _encoder(answer: Answer, body: ChatCompletionRequest) -> ChatChunks:
    generation = answer.generation
    envelope = (generation.id, generation.created, generation.model, generation.tally, ChunkOptions.of(body))
    if answer.reading is None:
        return ChatChunks(*envelope, n=generation.n)
    has_reasoning = body.include_reasoning is not False
    return ReadChatChunks(*envelope, reading=answer.reading, n=generation.n, has_reasoning=has_reasoning)
