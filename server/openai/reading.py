"""What was read of an answer, in OpenAI's shapes: the message of a choice, and the deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from novainfer.fsm.parsing.pieces import CallArguments, CallBegun, Content, Piece, Reasoning
from novainfer.server.openai.ids import BY_CHANCE, Ids
from novainfer.server.openai.replies import AssistantMessage, CalledFunctionReply, ToolCallReply

_json = msgspec.json.Encoder().encode


def message_of(
    pieces: Sequence[Piece], *, has_reasoning: bool, choice: int = 0, ids: Ids = BY_CHANCE
) -> AssistantMessage:
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
                calls.append(ToolCallReply(ids.of_call(choice, len(calls)), CalledFunctionReply(name, "")))
            case CallArguments(index, text):
                calls[index].function.arguments += text
    message = AssistantMessage("".join(content) if content or not calls else None, tool_calls=calls or msgspec.UNSET)
    if has_reasoning and reasoning:
        message.reasoning_content = message.reasoning = "".join(reasoning)
    return message


def delta_of(piece: Piece, choice: int, ids: Ids) -> bytes:
    """A piece of `choice` as the `delta` of a chunk, in JSON."""
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
            return b'{"tool_calls":[' + call % (index, _json(ids.of_call(choice, index)), _json(name)) + b"]}"
