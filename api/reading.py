"""How a conversation's answer is asked for, and what it is read for: thoughts, content, and calls of tools on offer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec

from novainfer.fsm.messages.errors import CallerError, InvalidParameter, UnsupportedParameter
from novainfer.fsm.messages.outputs import Delta, FinishReason
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.structured import StructuredOutputsParams
from novainfer.fsm.parsing.formats import OPEN_CALL, THINK, Formats
from novainfer.fsm.parsing.pieces import Piece
from novainfer.fsm.parsing.qwen_xml import types_of_tools
from novainfer.fsm.parsing.reader import AnswerReader, Wanted, opens_thoughts
from novainfer.fsm.text import Vocabulary
from novainfer.offer import Offer, grammar_for, tools_of_template

HELD = "structured_outputs"  # how errors name a grammar
ReadDelta = tuple[Delta, list[Piece]]  # what it brings


class Tally(Protocol):
    """Where tokens of thoughts are counted; None where a model has none."""

    reasoning_tokens: int | None


class Asked(NamedTuple):
    """What an engine is asked, and what its answer is read for: None where all that it can hold is content."""

    params: SamplingParams
    wanted: Wanted | None = None
    is_held_by_tools: bool = False


def asked_for(params: SamplingParams, offer: Offer, formats: Formats) -> Asked:
    """`params`, as an answer needs them that may call the tools on `offer`, or must.

    Raises `CallerError` for what cannot be asked of a model with these formats, naming OpenAI's fields.
    """
    wanted = wanted_by(params, offer, formats)
    asked = params_for(params, offer, wanted, formats)
    held = _held_by_tools(asked, offer, formats)
    return Asked(held, wanted, held is not asked)


def wanted_by(params: SamplingParams, offer: Offer, formats: Formats) -> Wanted | None:
    """What answers are read for; None where all that they can hold is content."""
    calls_tools = bool(offer.tools) and offer.tool_choice != "none" and formats.has_tools
    is_held = is_whole(params.structured_outputs, calls_tools=calls_tools)
    return None if is_held and formats.reasoning != THINK else wanted_of(offer, formats)


def is_whole(grammar: StructuredOutputsParams | None, *, calls_tools: bool) -> bool:
    """Whether all of an answer is held to `grammar`, so that it has neither thoughts nor calls to be found.

    Raises `UnsupportedParameter` where it is to hold calls all the same.
    """
    if grammar is None or grammar.structural_tag is not None:
        return False
    if calls_tools:
        what = "response_format and its like hold a whole answer, which leaves no place for tool calls"
        raise UnsupportedParameter(f'tools: {what}: leave one of them out, or set tool_choice to "none"', param="tools")
    return True


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


def _held_by_tools(params: SamplingParams, offer: Offer, formats: Formats) -> SamplingParams:
    """`params`, held to the grammar of calls where one must come or must fit its schema."""
    grammar = grammar_for(offer.tools or [], offer.tool_choice, formats, has_one_call=offer.has_one_call)
    if grammar is None:
        return params
    if params.structured_outputs is not None:
        message = "structured_outputs cannot be combined with calls that must come, or with strict tools"
        raise InvalidParameter(message, param="structured_outputs")
    return msgspec.structs.replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))


@contextmanager
def naming_tools(*, is_held_by_tools: bool) -> Iterator[None]:
    """Where the grammar of an answer was made of tools, what is wrong with it is a fault of theirs."""
    try:
        yield
    except CallerError as error:
        if is_held_by_tools and (error.param or "").startswith(HELD):
            what = error.message.replace(f"{HELD}.grammar", "what is made of their schemas")
            raise type(error)(f"tools cannot be held to: {what}", param="tools") from None
        raise


class Reading:
    """Reads the `n` choices of one request; counts what they think into `tally`, if that is given."""

    def __init__(self, wanted: Wanted, vocabulary: Vocabulary, n: int, tally: Tally | None = None) -> None:
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

        A choice whose calls are there ends with `tool_calls`, at once where one call is all that is wanted. One
        that has stopped within a call's arguments, at a stop string or by the model's doing, ends with what stopped it.
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
            delta = _ended_by_calls(delta)
        elif delta.finish_reason is not None:
            pieces += reader.finish(num_tokens)
            has_calls = reader.answer.num_calls and not reader.answer.is_cut
            if has_calls and delta.finish_reason is FinishReason.STOP:
                delta = _ended_by_calls(delta)
        self._ended[delta.index] = reader.is_over
        if self._wanted.reasoning and self._tally is not None:
            self._thought[delta.index] = reader.answer.num_thought(num_tokens)
            self._tally.reasoning_tokens = sum(self._thought)
        return delta, pieces


def _ended_by_calls(delta: Delta) -> Delta:
    """A delta of its own: others may read `delta`, too."""
    return msgspec.structs.replace(delta, finish_reason=FinishReason.TOOL_CALLS)
