"""Tools in OpenAI's shapes: those that a request offers, what a conversation has called, and the choice of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from novainfer import InvalidParameter, UnsupportedParameter

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
        described: dict[str, Any] = {"name": function.name}
        described |= {"description": function.description} if function.description is not None else {}
        described |= {"parameters": function.parameters} if function.parameters is not None else {}
        found.append({"type": "function", "function": described})
    return found


def check_choice(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise for what calls cannot be held to: a call or a tool that must come, or arguments by their schema."""
    if choice not in (None, "auto", "none"):
        if not tools:
            raise InvalidParameter("tool_choice needs tools to choose from", param="tool_choice")
        raise UnsupportedParameter(
            'tool_choice must be "auto" or "none": this server cannot make a model call a tool yet', param="tool_choice"
        )
    for at, tool in enumerate(tools):
        if tool.function.strict:
            path = f"tools[{at}].function.strict"
            raise UnsupportedParameter(
                f"{path}: true is not supported: this server cannot hold arguments to their schema yet", param=path
            )
