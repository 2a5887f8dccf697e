"""Items of a conversation, as the Responses API shows and keeps them, and the messages that a template renders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from novainfer.offer import CalledFunction, ToolCall
from novainfer.server.openai.ids import BY_CHANCE, Ids
from novainfer.server.openai.protocol import ContentPart, Message
from novainfer.server.openai.replies import ChatLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """What is said to the model."""

    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """What the model says; log probabilities where they were asked for."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    """What a model has said in place of an answer; those served here have no form of their own for it."""

    refusal: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """What the model thinks."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A summary of what a model thought: some clients send them back; none is made here."""

    text: str


MessagePart = InputText | OutputText | Refusal


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """A message of the conversation."""

    id: str
    role: Literal["user", "assistant", "system", "developer"]
    content: list[MessagePart]
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        """All of an assistant's message."""
        return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in self.content)


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """The model calls a function; what that says comes back under `call_id`."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"


class FunctionCallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output", kw_only=True):
    """What a function has said."""

    id: str
    call_id: str
    output: str | list[InputText]
    status: ItemStatus = "completed"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """What the model thinks before it says anything, or calls a function."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    status: ItemStatus = "completed"


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
OutputItem = MessageItem | FunctionCallItem | ReasoningItem

PREFIXES: dict[type[Item], str] = {
    MessageItem: "msg",
    FunctionCallItem: "fc",
    FunctionCallOutputItem: "fco",
    ReasoningItem: "rs",
}
_items = msgspec.json.Decoder(list[Item])


def new_id(kind: type[Item], ids: Ids = BY_CHANCE, index: int = 0) -> str:
    """An id that no other item has; of the answer's `index`-th one, where `ids` are its own."""
    return f"{PREFIXES[kind]}_{ids.hex(24, PREFIXES[kind], index)}"


def encoded(items: Iterable[Item]) -> bytes:
    """Items as a store keeps them: a JSON list."""
    return msgspec.json.encode(list(items))


def decoded(data: bytes) -> list[Item]:
    """What `encoded` has made of them."""
    return _items.decode(data)


def messages_of(items: Iterable[Item]) -> list[Message]:
    """The messages of a conversation. What an assistant thinks, says and calls in one go is one message.

    A message of its own begins where it has spoken already: behind content neither content nor thoughts can come.
    """
    messages: list[Message] = []
    turn: Message | None = None  # of the assistant, while it may go on
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            parts = [ContentPart(type="text", text=part.text) for part in item.content if isinstance(part, InputText)]
            messages.append(Message(role=item.role, content=parts))
            turn = None
            continue
        if isinstance(item, FunctionCallOutputItem):
            said = item.output if isinstance(item.output, str) else "\n".join(part.text for part in item.output)
            messages.append(Message(role="tool", content=said, tool_call_id=item.call_id))
            turn = None
            continue
        if turn is None or _is_over(turn, item):
            turn = Message(role="assistant")
            messages.append(turn)
        _add(turn, item)
    return messages


def _is_over(turn: Message, item: OutputItem) -> bool:
    if turn.content is None or isinstance(item, FunctionCallItem):
        return False
    return isinstance(item, ReasoningItem) or not turn.tool_calls


def _add(turn: Message, item: OutputItem) -> None:
    match item:
        case MessageItem():
            assert turn.content is None or isinstance(turn.content, str)
            turn.content = (turn.content or "") + item.text
        case FunctionCallItem():
            called = CalledFunction(name=item.name, arguments=item.arguments)
            turn.tool_calls = [*(turn.tool_calls or []), ToolCall(id=item.call_id, function=called)]
        case ReasoningItem():
            thoughts = [part.text for part in item.content]
            if thoughts:
                before = [] if turn.reasoning_content is None else [turn.reasoning_content]
                turn.reasoning_content = "\n".join(before + thoughts)
