"""The input of a response, as clients write it, to items: each fault is one sentence that names its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from novainfer import InvalidParameter, UnsupportedParameter
from novainfer.offer import NO_TOOLS
from novainfer.server.openai.protocol import MESSAGES_MAX
from novainfer.server.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    MessagePart,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    SummaryText,
    new_id,
)

KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


class GivenPart(msgspec.Struct, kw_only=True):
    """A part of an item: `input_text`, `output_text`, `refusal`, `reasoning_text` or `summary_text`."""

    type: str
    text: str | None = None
    refusal: str | None = None


class GivenItem(msgspec.Struct, kw_only=True):
    """An item of the input; without a type it is a message. Those that an earlier response has made fit as they are."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[GivenPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[GivenPart] | None = None
    summary: list[GivenPart] | None = None


FindItem = Callable[[str, str], Item]  # by its id, and the path of what refers to it


def items_of(given: str | list[GivenItem], find: FindItem, *, has_tools: bool) -> list[Item]:
    """The items of an input; `has_tools`: the model's template knows of tools.

    Raises `InvalidParameter` or `UnsupportedParameter`, naming the field.
    """
    if isinstance(given, str):
        if not given:
            raise InvalidParameter("input must not be empty", param="input")
        return [_message("user", [InputText(given)])]
    if len(given) > MESSAGES_MAX:
        raise InvalidParameter(f"input takes at most {MESSAGES_MAX} items, not {len(given)}", param="input")
    return [_item(item, f"input[{at}]", find, has_tools=has_tools) for at, item in enumerate(given)]


def _item(given: GivenItem, path: str, find: FindItem, *, has_tools: bool) -> Item:
    kind = "message" if given.type is None else given.type
    if kind.startswith("function_call") and not has_tools:
        raise UnsupportedParameter(f"{path}.type {NO_TOOLS}", param=f"{path}.type")
    match kind:
        case "message":
            return _message_of(given, path)
        case "function_call":
            return FunctionCallItem(
                id=given.id or new_id(FunctionCallItem),
                call_id=_required(given.call_id, f"{path}.call_id"),
                name=_required(given.name, f"{path}.name"),
                arguments=given.arguments or "",
            )
        case "function_call_output":
            return FunctionCallOutputItem(
                id=given.id or new_id(FunctionCallOutputItem),
                call_id=_required(given.call_id, f"{path}.call_id"),
                output=_output(given.output, f"{path}.output"),
            )
        case "reasoning":
            return ReasoningItem(
                id=given.id or new_id(ReasoningItem),
                summary=[SummaryText(text) for text in _texts(given.summary, "summary_text", f"{path}.summary")],
                content=[ReasoningText(text) for text in _texts(given.content, "reasoning_text", f"{path}.content")],
            )
        case "item_reference":
            return find(_required(given.id, f"{path}.id"), f"{path}.id")
    known = ", ".join(KINDS)
    raise UnsupportedParameter(f'{path}.type "{kind[:40]}" is not supported: it may be {known}', param=f"{path}.type")


def _message_of(given: GivenItem, path: str) -> MessageItem:
    if given.role is None:
        raise _missing(f"{path}.role")
    content = given.content
    if content is None:
        raise _missing(f"{path}.content")
    if isinstance(content, str):
        part: MessagePart = OutputText(content) if given.role == "assistant" else InputText(content)
        return _message(given.role, [part], given.id)
    parts = [_part(one, given.role, f"{path}.content[{at}]") for at, one in enumerate(content)]
    return _message(given.role, parts, given.id)


def _message(
    role: Literal["user", "assistant", "system", "developer"], content: list[MessagePart], item_id: str | None = None
) -> MessageItem:
    return MessageItem(id=item_id or new_id(MessageItem), role=role, content=content)


def _part(given: GivenPart, role: str, path: str) -> MessagePart:
    if role == "assistant":
        if given.type == "refusal":
            return Refusal(_required(given.refusal, f"{path}.refusal"))
        _check_type(given, ("output_text", "text"), path)
        return OutputText(_required(given.text, f"{path}.text"))
    _check_type(given, ("input_text", "text"), path)
    return InputText(_required(given.text, f"{path}.text"))


def _output(given: str | list[GivenPart] | None, path: str) -> str | list[InputText]:
    if given is None:
        raise _missing(path)
    if isinstance(given, str):
        return given
    return [InputText(text) for text in _texts(given, "input_text", path)]


def _texts(given: str | list[GivenPart] | None, kind: str, path: str) -> list[str]:
    if isinstance(given, str):
        raise InvalidParameter(f'{path} must be a list of parts of type "{kind}", not a string', param=path)
    texts: list[str] = []
    for at, part in enumerate(given or ()):
        _check_type(part, (kind,), f"{path}[{at}]")
        texts.append(_required(part.text, f"{path}[{at}].text"))
    return texts


def _check_type(given: GivenPart, kinds: tuple[str, ...], path: str) -> None:
    if given.type not in kinds:
        raise UnsupportedParameter(
            f'{path}.type "{given.type[:40]}" is not supported: this model reads only "{kinds[0]}" here',
            param=f"{path}.type",
        )


def _required(value: str | None, path: str) -> str:
    if value is None:
        raise _missing(path)
    return value


def _missing(path: str) -> InvalidParameter:
    return InvalidParameter(f"{path} is required", param=path)
