"""What a blocking caller is given: the whole answer to a prompt, put together from its deltas; a chat's is read."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from novainfer.engine import Engine
from novainfer.fsm.messages.errors import NovaInferError
from novainfer.fsm.messages.events import Chat
from novainfer.fsm.messages.outputs import Delta, FinishReason, TokenLogprob
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.parsing.pieces import CallArguments, CallBegun, Content, Piece, Reasoning
from novainfer.offer import Offered
from novainfer.reading import Reading, asked_for, naming_tools


class CalledTool(msgspec.Struct, kw_only=True):
    """A call of a tool: its name, and its arguments, which are JSON unless the answer was cut."""

    name: str
    arguments: str = ""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice: its text, its token ids, and how it ended; with `seed` and n=1 it is had again alone.

    `text` is all that the model has written. Of the answer to a chat, `content` is what it says, `reasoning` what it
    has thought before, if the model thinks, and `tool_calls` what it calls of the tools that were offered.
    `cumulative_logprob` is the sum of the tokens' log probabilities; it and `logprobs` are None unless asked for.
    """

    index: int
    text: str = ""
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CalledTool] = []
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    seed: int | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """The answer to one prompt; `prompt` is None when token ids were given.

    A prompt of a list that could not be answered has its `error` here, and no `outputs`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    seed: int | None = None
    finished: bool = True
    error: NovaInferError | None = None


async def answer_to(engine: Engine, prompt: Any, params: SamplingParams, offer: Offered | None = None) -> RequestOutput:
    """The answer to `prompt`, or its error. Beside an offer of tools, `prompt` is a chat, and its answer is read."""
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, dict) else None
    choices = [CompletionOutput(index=index, token_ids=[]) for index in range(params.n)]
    output = RequestOutput(request_id="", prompt=text, prompt_token_ids=[], outputs=choices)
    try:
        if offer is None:
            await _write(engine.generate(prompt, params), output)
        else:
            await _read(engine, prompt, params, offer, output)
    except NovaInferError as error:
        output.error, output.outputs = error, []
    return output


async def _write(stream: AsyncGenerator[Delta, None], output: RequestOutput) -> None:
    async with aclosing(stream):
        async for delta in stream:
            _add(output, delta)


async def _read(engine: Engine, chat: Chat, params: SamplingParams, offer: Offered, output: RequestOutput) -> None:
    asked, wanted, is_held_by_tools = asked_for(params, offer, engine.model_info.formats)
    if wanted is None:
        await _write(engine.generate(chat, asked), output)
        for choice in output.outputs:
            choice.content = choice.text
        return
    reading = Reading(wanted, engine.vocabulary, asked.n)
    with naming_tools(is_held_by_tools=is_held_by_tools):
        async with aclosing(engine.generate(chat, asked)) as stream:
            async for delta in stream:
                for read, pieces in reading.read(delta):
                    _add(output, read)
                    for piece in pieces:
                        _add_piece(output.outputs[read.index], piece)
                if reading.is_over:
                    break


def _add(output: RequestOutput, delta: Delta) -> None:
    choice = output.outputs[delta.index]
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    if delta.logprobs is not None:
        choice.logprobs = [*(choice.logprobs or ()), *delta.logprobs]
        choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(x.logprob for x in delta.logprobs)
    choice.finish_reason = delta.finish_reason
    choice.stop_reason = delta.stop_reason
    choice.seed = delta.seed
    output.request_id, output.seed = delta.request_id, output.outputs[0].seed
    if delta.index == 0:  # what the others find in the prefix cache is the work of the first
        output.num_cached_tokens = delta.num_cached_tokens
    output.prompt_token_ids = delta.prompt_token_ids or output.prompt_token_ids


def _add_piece(choice: CompletionOutput, piece: Piece) -> None:
    match piece:
        case Reasoning(text):
            choice.reasoning = (choice.reasoning or "") + text
        case Content(text):
            choice.content = (choice.content or "") + text
        case CallBegun(_, name):
            choice.tool_calls = [*choice.tool_calls, CalledTool(name=name)]
        case CallArguments(index, text):
            choice.tool_calls[index].arguments += text
