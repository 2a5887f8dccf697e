"""Tools in OpenAI's shapes: those that are on offer, what a conversation has called, and the choice of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from novainfer.allowed import rule_of
from novainfer.fsm.messages.errors import InvalidParameter, UnsupportedParameter
from novainfer.fsm.parsing.call_grammar import grammar_of_calls
from novainfer.fsm.parsing.formats import Formats

NO_TOOLS = (
    "cannot be used: the chat template of this model knows of none (--tool-call-parser says in which format it calls "
    "them all the same)"
)
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")  # OpenAI's, and what MCP servers put between their parts


class FunctionDefinition(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that may be called."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, kw_only=True):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """The tool that is to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Offer(Protocol):
    """The tools that an answer may call, or must; `has_one_call`: it is over when its first call is."""

    @property
    def tools(self) -> Sequence[Tool] | None: ...
    @property
    def tool_choice(self) -> ToolChoice | None: ...
    @property
    def has_one_call(self) -> bool: ...


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """An offer, in the fields that OpenAI has for it."""

    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def has_one_call(self) -> bool:
        """Whether an answer is over when its first call is."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)


class CalledFunction(msgspec.Struct, kw_only=True):
    """A function that was called, with its arguments as JSON, or as what that says."""

    name: str
    arguments: str | dict[str, Any] | None = None

    def as_template_input(self) -> dict[str, Any]:
        """With arguments as an object where they are one: what a model had cut off stays the text that it was."""
        found: Any = self.arguments or {}
        return {"name": self.name, "arguments": _parsed(found) if isinstance(found, str) else found}


def _parsed(arguments: str) -> Any:
    """The object that they are, if a template's process can be given it; else the text."""
    try:
        value = json.loads(arguments)
        msgspec.msgpack.encode(value)  # has no half of a surrogate pair, and no integer of more than 64 bits
    except (ValueError, OverflowError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in a message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template_input(self) -> dict[str, Any]:
        """What a chat template takes."""
        call: dict[str, Any] = {"type": "function", "function": self.function.as_template_input()}
        return call if self.id is None else {"id": self.id, **call}


def tools_of_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """What a chat template takes, always in one order: prompts with the same tools begin alike."""
    found = []
    for at, tool in enumerate(tools):
        function = tool.function
        if not NAME.fullmatch(function.name):
            path = f"tools[{at}].function.name"
            allowed = "1 to 128 letters, digits and any of _ . : / -"
            raise InvalidParameter(f"{path} must be {allowed}, not {function.name[:40]!r}", param=path)
        _check_properties(function.parameters, f"tools[{at}].function.parameters.properties")
        described: dict[str, Any] = {"name": function.name}
        described |= {"description": function.description} if function.description is not None else {}
        described |= {"parameters": function.parameters} if function.parameters is not None else {}
        found.append({"type": "function", "function": described})
    return found


def _check_properties(parameters: dict[str, Any] | None, path: str) -> None:
    """Templates write them out one by one, and the errors of templates name `messages`."""
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, dict | None):
        told = type(properties).__name__
        raise InvalidParameter(f"{path} must be an object, with a schema for each argument, not {told}", param=path)


def check_choice(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise `InvalidParameter` where there is nothing to choose from, or not what is chosen."""
    if choice in (None, "auto", "none"):
        return
    if not tools:
        raise InvalidParameter("tool_choice needs tools to choose from", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in [tool.function.name for tool in tools]:
        message = f"tool_choice names {choice.function.name[:40]!r}, which is none of tools"
        raise InvalidParameter(message, param="tool_choice")


def grammar_for(
    tools: Sequence[Tool],
    choice: ToolChoice | None,
    formats: Formats,
    *,
    has_one_call: bool,
) -> str | None:
    """What an answer is held to where a call must come, or where tools are `strict`; None where it is free."""
    must_call = choice == "required" or isinstance(choice, NamedTool)
    if choice == "none" or not (must_call or any(tool.function.strict for tool in tools)):
        return None
    offered = list(tools)
    if isinstance(choice, NamedTool):
        offered = [tool for tool in tools if tool.function.name == choice.function.name][:1]
    described = [
        {"function": {**one["function"], "strict": tool.function.strict}}
        for one, tool in zip(tools_of_template(offered), offered, strict=True)
    ]
    is_single = has_one_call or isinstance(choice, NamedTool)
    return grammar_of_calls(described, formats, must_call=must_call, has_one_call=is_single)


def offered(tools: Any, tool_choice: Any, parallel_tool_calls: Any, formats: Formats) -> Offered:
    """An offer out of plain data, checked for a model with these formats; raises `CallerError` that names the field."""
    try:
        offer = msgspec.convert(
            {"tools": tools, "tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}, Offered
        )
    except (msgspec.ValidationError, TypeError) as error:
        raise _explained(error, Offered) from None
    if offer.tools and not formats.has_tools:
        raise UnsupportedParameter(f"tools {NO_TOOLS}", param="tools")
    check_choice(offer.tools or [], offer.tool_choice)
    return offer


def called_in(messages: Sequence[Any]) -> list[Any]:
    """`messages` of a conversation, with the arguments of the tools that it has called as templates take them."""
    found: list[Any] = []
    for at, message in enumerate(messages):
        if isinstance(message, dict) and message.get("tool_calls"):
            try:
                calls = msgspec.convert(message["tool_calls"], list[ToolCall])
            except (msgspec.ValidationError, TypeError) as error:
                raise _explained(error, list[ToolCall], f"messages[{at}].tool_calls") from None
            message = {**message, "tool_calls": [call.as_template_input() for call in calls]}
        found.append(message)
    return found


def _explained(error: Exception, kind: Any, root: str = "") -> InvalidParameter:
    """What msgspec says of data that is no `kind`, with the field first."""
    said, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`")
    field = (root + path).lstrip(".") or root or "tools"
    if rule := rule_of(kind, path.lstrip("."), said):
        return InvalidParameter(f"{field} {rule}", param=field)
    return InvalidParameter(f"{field} is not what it should be: {said[:1].lower()}{said[1:]}", param=field)
