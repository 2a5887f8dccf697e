"""What an answer is read for: thoughts and calls of tools, choice by choice, as one object or as they come."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from novainfer import Delta, FinishReason, SamplingParams
from novainfer.fsm.parsing.formats import OPEN_CALL, THINK, Formats
from novainfer.fsm.parsing.pieces import CallArguments, CallBegun, Content, Piece, Reasoning
from novainfer.fsm.parsing.qwen_xml import types_of_tools
from novainfer.fsm.parsing.reader import AnswerReader, Wanted, opens_thoughts
from novainfer.fsm.text import Vocabulary
from novainfer.server.openai.replies import AssistantMessage, CalledFunctionReply, Tally, ToolCallReply
from novainfer.server.openai.tools import Offer, tools_of_template

_json = msgspec.json.Encoder().encode
ReadDelta = tuple[Delta, list[Piece]]  # what it brings


def wanted_of(offer: Offer, formats: Formats) -> Wanted | None:
    """What answers are read for beside an `offer` of tools; None where all they can hold is content."""
    has_calls = bool(offer.tools) and offer.tool_choice != "none" and formats.has_tools
    has_thoughts = formats.reasoning == THINK
    if not has_calls and not has_thoughts:
        return None
    return Wanted(
        tool_calls=formats.tool_calls if has_calls else None,
        reasoning=has_thoughts,
        has_one_call=offer.has_one_call,
        marker_ids=formats.marker_ids,
        schemas=types_of_tools(tools_of_template(offer.tools or [])),
    )


def params_for(params: SamplingParams, offer: Offer, wanted: Wanted | None, formats: Formats) -> SamplingParams:
    """`params` with the marks that are needed; the token that begins a call is banned where none is wanted."""
    if wanted is not None and wanted.mark_token_ids:
        params = msgspec.structs.replace(params, mark_token_ids=wanted.mark_token_ids)
    if offer.tools and offer.tool_choice == "none" and OPEN_CALL in formats.marker_ids:
        params = msgspec.structs.replace(params, banned_token_ids=[formats.marker_ids[OPEN_CALL]])
    return params


class Reading:
    """Reads the `n` choices of one request; counts what they think into `tally`."""

    def __init__(self, wanted: Wanted, vocabulary: Vocabulary, n: int, tally: Tally) -> None:
        self._wanted = wanted
        self._vocabulary = vocabulary
        self._n = n
        self._tally = tally
        self._readers: list[AnswerReader] = []  # once it is known whether they begin with thoughts
        self._early: list[Delta] = []  # that came before
        self._thought = [0] * n  # tokens
        self._ended = [False] * n
        self._is_early = False  # a choice has ended here, and goes on in the engine
        if not wanted.reasoning:
            self._begin(is_thinking=False)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted, though the engine may go on."""
        return self._is_early and all(self._ended)

    def read(self, delta: Delta) -> list[ReadDelta]:
        """What `delta` brings, behind those that had to wait for the prompt: with it comes the first choice's first.

        A choice whose calls are there ends with `tool_calls`, at once where one call is all that is wanted.
        """
        if not self._readers:
            if delta.prompt_token_ids is None:
                self._early.append(delta)
                return []
            ids, marker_ids = delta.prompt_token_ids, self._wanted.marker_ids
            self._begin(is_thinking=opens_thoughts(ids, self._vocabulary, marker_ids))
        deltas, self._early = [*self._early, delta], []
        return [self._read(one) for one in deltas if not self._ended[one.index]]

    def _begin(self, *, is_thinking: bool) -> None:
        self._readers = [AnswerReader(self._wanted, is_thinking=is_thinking) for _ in range(self._n)]

    def _read(self, delta: Delta) -> ReadDelta:
        reader, num_tokens = self._readers[delta.index], delta.num_generated_tokens
        pieces = reader.read(delta.text, delta.marks, num_tokens)
        if reader.is_over:  # the one call that is wanted is there
            self._is_early |= delta.finish_reason is None
            delta.finish_reason = FinishReason.TOOL_CALLS
        elif delta.finish_reason is not None:
            pieces += reader.finish(num_tokens)
            if reader.answer.num_calls and delta.finish_reason is FinishReason.STOP:
                delta.finish_reason = FinishReason.TOOL_CALLS
        self._ended[delta.index] = reader.is_over
        if self._wanted.reasoning:
            self._thought[delta.index] = reader.answer.num_thought(num_tokens)
            self._tally.reasoning_tokens = sum(self._thought)
        return delta, pieces


def message_of(pieces: Sequence[Piece], *, has_reasoning: bool) -> AssistantMessage:
    """One choice as chat completions give it; each call has an id of its own."""
    reasoning, content = [], []
    calls: list[ToolCallReply] = []
    for piece in pieces:
        match piece:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallBegun(_, name):
                calls.append(ToolCallReply(new_call_id(), CalledFunctionReply(name, "")))
            case CallArguments(index, text):
                calls[index].function.arguments += text
    message = AssistantMessage("".join(content) if content or not calls else None, tool_calls=calls or msgspec.UNSET)
    if has_reasoning and reasoning:
        message.reasoning_content = message.reasoning = "".join(reasoning)
    return message


def delta_of(piece: Piece) -> bytes:
    """A piece as the `delta` of a chunk, in JSON."""
    match piece:
        case Content(text):
            return b'{"content":' + _json(text) + b"}"
        case Reasoning(text):
            thought = _json(text)
            return b'{"reasoning_content":' + thought + b',"reasoning":' + thought + b"}"
        case CallArguments(index, text):
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, _json(text))
        case CallBegun(index, name):
            call = b'{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}'
            return b'{"tool_calls":[' + call % (index, _json(new_call_id()), _json(name)) + b"]}"


def new_call_id() -> str:
    """An id that no other call has: clients send it back with what the tool has said."""
    return f"call_{secrets.token_hex(12)}"
