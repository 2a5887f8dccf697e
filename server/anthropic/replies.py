"""What goes back: Anthropic's message, its blocks, its usage, and why it stopped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from novainfer import Delta, FinishReason
from novainfer.fsm.parsing.pieces import CallArguments, CallBegun, Content, Piece, Reasoning
from novainfer.server.openai.ids import BY_CHANCE, Ids
from novainfer.server.openai.replies import Tally

Shown = Literal["shown", "omitted", "none"]  # of thoughts; where they are omitted, their signature is told
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
SIGNATURE_BYTES = 16
INVALID_JSON = "INVALID_JSON"  # where Anthropic puts what a model wrote as a tool's input and is no JSON object


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """What the model says; it cites nothing."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What it thinks; `signature` is a digest of it, which is not looked at when it comes back."""

    thinking: str
    signature: str


class DirectCaller(msgspec.Struct, tag_field="type", tag="direct", frozen=True):
    """A tool is called by the model, and not by code that it has written."""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool; what the tool says comes back under its `id`."""

    id: str
    name: str
    input: msgspec.Raw
    caller: DirectCaller = DirectCaller()


AnsweredBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct):
    """How many of the answer's tokens are thoughts, markers included."""

    thinking_tokens: int


class DeltaUsage(msgspec.Struct, kw_only=True):
    """Tokens so far: the prompt's are those that were computed and those that the prefix cache had.

    What is null counts services of Anthropic's own.
    """

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: None = None
    cache_read_input_tokens: int
    output_tokens_details: OutputTokensDetails | None = None
    server_tool_use: None = None


class MessageUsage(DeltaUsage, kw_only=True):
    """Tokens of a message."""

    cache_creation: None = None
    inference_geo: None = None
    service_tier: Literal["standard"] = "standard"
    speed: Literal["standard"] = "standard"


class AnsweredMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The answer of `POST /v1/messages` without `stream`."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnsweredBlock]
    container: None = None
    diagnostics: None = None
    stop_details: None = None
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """The answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


def usage_of(tally: Tally) -> MessageUsage:
    """As it is by now."""
    return MessageUsage(**_counts_of(tally))


def delta_usage_of(tally: Tally) -> DeltaUsage:
    """As it is by now, for an event that tells the rest."""
    return DeltaUsage(**_counts_of(tally))


def _counts_of(tally: Tally) -> dict[str, Any]:
    usage = tally.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    details = None if tally.reasoning_tokens is None else OutputTokensDetails(tally.reasoning_tokens)
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": cached,
        "output_tokens_details": details,
    }


def ending_of(last: Delta, *, is_context_full: bool) -> tuple[StopReason, str | None]:
    """Why an answer stopped after `last`, and the stop sequence that it met.

    `is_context_full`: what limits its length is not what the client has asked for.
    """
    match last.finish_reason:
        case FinishReason.TOOL_CALLS:
            return "tool_use", None
        case FinishReason.LENGTH:
            return "model_context_window_exceeded" if is_context_full else "max_tokens", None
        case _ if isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
    return "end_turn", None


def blocks_of(pieces: Sequence[Piece], *, thoughts: Shown, ids: Ids = BY_CHANCE) -> list[AnsweredBlock]:
    """An answer as blocks, in their order."""
    blocks: list[AnsweredBlock] = []
    inputs: dict[int, list[str]] = {}  # by the call's index
    uses: list[ToolUseBlock] = []
    for piece in pieces:
        last = blocks[-1] if blocks else None
        match piece:
            case Content(text) if isinstance(last, TextBlock):
                last.text += text
            case Content(text):
                blocks.append(TextBlock(text))
            case Reasoning(text) if thoughts != "none":
                if isinstance(last, ThinkingBlock):
                    last.thinking += text
                else:
                    blocks.append(ThinkingBlock(text, ""))
            case CallBegun(index, name):
                uses.append(ToolUseBlock(use_id(ids, index), name, msgspec.Raw(b"{}")))
                blocks.append(uses[-1])
                inputs[index] = []
            case CallArguments(index, text):
                inputs[index].append(text)
    for index, use in enumerate(uses):
        use.input = input_of("".join(inputs[index]))
    for block in blocks:
        if isinstance(block, ThinkingBlock):
            block.signature = signature_of(hashlib.sha256(block.thinking.encode()).digest())
            if thoughts == "omitted":
                block.thinking = ""
    return blocks


def input_of(arguments: str) -> msgspec.Raw:
    """A call's arguments, as they were written where they are a JSON object."""
    if not arguments:
        return msgspec.Raw(b"{}")
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode({INVALID_JSON: arguments}))
    return msgspec.Raw(arguments.encode())


def signature_of(digest: bytes) -> str:
    """The signature of thoughts, by the SHA-256 of their text."""
    return base64.b64encode(digest[:SIGNATURE_BYTES]).decode()


def use_id(ids: Ids, index: int) -> str:
    """Of the call of this index: an id that no other call has."""
    return f"toolu_{ids.hex(12, 'call', index)}"
