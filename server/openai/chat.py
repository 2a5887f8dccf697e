"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import CallerError, Chat, InvalidParameter, SamplingParams, StructuredOutputsParams
from novainfer.fsm.parsing.formats import THINK
from novainfer.fsm.parsing.reader import opens_thoughts
from novainfer.server.openai.chunks import ChatChunks, ChunkOptions, ReadChatChunks
from novainfer.server.openai.generation import Generation, receive, wanted_id
from novainfer.server.openai.protocol import ChatCompletionRequest
from novainfer.server.openai.reading import Reading, message_of, params_for, wanted_of
from novainfer.server.openai.replies import ChatCompletion, prompt_logprobs
from novainfer.server.openai.sse import EventStream
from novainfer.server.openai.structured import is_whole
from novainfer.server.openai.tools import grammar_for
from novainfer.server.service import Service

HELD = "structured_outputs"  # how errors name a grammar


async def create_chat_completion(service: Service, request: Request) -> Response | EventStream:
    """Answer a conversation, as one object or as a stream of chunks."""
    exchange, body, params = await receive(service, request, ChatCompletionRequest)
    formats = service.formats
    prompt = body.prompt(has_tools=formats.has_tools)
    calls_tools = bool(body.tools) and body.tool_choice != "none" and formats.has_tools
    is_held = is_whole(params.structured_outputs, calls_tools=calls_tools)
    wanted = None if is_held else wanted_of(body, formats)
    asked = params_for(params, body, wanted, formats)
    params = await _with_grammar(service, prompt, asked, body)
    is_of_tools = params is not asked
    name = wanted_id(body.request_id, exchange.request_id)
    generation = Generation(service, "chatcmpl", name, [prompt], params, exchange.viewer.owner, exchange.client)
    reading = None
    if wanted is not None:
        reading = Reading(wanted, service.ready_engine().vocabulary, params.n, generation.tally)
    if body.stream:
        with _named(is_of_tools=is_of_tools):
            first = await generation.first()
        return EventStream(generation, first, _encoder(generation, body, reading), service.settings)

    with _named(is_of_tools=is_of_tools):
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


async def _with_grammar(
    service: Service, prompt: Chat, params: SamplingParams, body: ChatCompletionRequest
) -> SamplingParams:
    """`params`, held to the grammar of calls where one must come or must fit its schema."""
    formats, tools = service.formats, body.tools or []
    ask = partial(grammar_for, tools, body.tool_choice, formats, has_one_call=body.has_one_call)
    if (grammar := ask(is_thinking=False)) is None:
        return params
    if params.structured_outputs is not None:
        message = "structured_outputs cannot be combined with calls that must come, or with strict tools"
        raise InvalidParameter(message, param="structured_outputs")
    if formats.reasoning == THINK:  # what must come first depends on what the template has opened
        engine = service.ready_engine()
        ids = await engine.tokenize(prompt)
        grammar = ask(is_thinking=opens_thoughts(ids, engine.vocabulary, formats.marker_ids))
    return msgspec.structs.replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))


@contextmanager
def _named(*, is_of_tools: bool) -> Iterator[None]:
    """Where the grammar `is_of_tools`, what is wrong with it is a fault of theirs."""
    try:
        yield
    except CallerError as error:
        if is_of_tools and (error.param or "").startswith(HELD):
            what = error.message.replace(f"{HELD}.grammar", "what is made of their schemas")
            raise type(error)(f"tools cannot be held to: {what}", param="tools") from None
        raise


def _encoder(generation: Generation, body: ChatCompletionRequest, reading: Reading | None) -> ChatChunks:
    envelope = (generation.id, generation.created, generation.model, generation.tally, ChunkOptions.of(body))
    if reading is None:
        return ChatChunks(*envelope, n=generation.n)
    has_reasoning = body.include_reasoning is not False
    return ReadChatChunks(*envelope, reading=reading, n=generation.n, has_reasoning=has_reasoning)
