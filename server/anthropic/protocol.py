"""Anthropic's request bodies as msgspec Structs, and how each becomes a conversation and `SamplingParams`.

Types are strict, every optional field may be null, and what an object holds beside the fields here is let through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from novainfer import CallerError, Chat, InvalidParameter, SamplingParams, StructuredOutputsParams, UnsupportedParameter
from novainfer.fsm.parsing.formats import CLOSE_THINK, THINK, Formats
from novainfer.offer import (
    NO_TOOLS,
    FunctionDefinition,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    check_choice,
    tools_of_template,
)
from novainfer.server.openai.protocol import MESSAGES_MAX, NOTHING

# How OpenAI's shapes name what Anthropic's clients sent under another name.
_NAMES = {
    ".function.name": ".name",
    ".function.parameters": ".input_schema",
    ".function.strict": ".strict",
    "response_format": "output_config.format",
    "structured_outputs.json": "output_config.format.schema",
    "structured_outputs": "output_config.format",
    "tool_choice.function.name": "tool_choice.name",
}

_ROLES = {"tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant", "tool_result": "user"}


class Block(msgspec.Struct, kw_only=True):
    """A part of a message: `text`, `thinking`, `redacted_thinking`, `tool_use` or `tool_result`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation; what tools have said is a part of the user's."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class OfferedTool(msgspec.Struct, kw_only=True):
    """A tool that may be called; `input_schema` is the JSON schema of its input."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(msgspec.Struct, kw_only=True):
    """Whether a tool is called: as the model likes, `any`, the `tool` of this `name`, or `none`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks, and whether its thoughts are shown."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The JSON schema that an answer fits."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """What the answer is held to; `effort` is a hint that no model here takes."""

    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """Whom a request is for."""

    user_id: str | None = None


class ToolOffer(msgspec.Struct, kw_only=True, frozen=True):
    """The tools of a request, in OpenAI's words."""

    tools: list[Tool]
    tool_choice: ToolChoice | None = None
    has_one_call: bool = False


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[Block] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: ChosenTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def prompt(self, formats: Formats) -> Chat:
        """The conversation, checked, for a model of these `formats`; one that ends with the assistant is continued."""
        if not self.messages:
            raise InvalidParameter("messages must hold at least one message", param="messages")
        if (num_messages := len(self.messages)) > MESSAGES_MAX:
            message = f"messages takes at most {MESSAGES_MAX} messages, not {num_messages}"
            raise InvalidParameter(message, param="messages")
        offer = self.offer()
        if offer.tools and not formats.has_tools:
            raise UnsupportedParameter(f"tools {NO_TOOLS}", param="tools")
        check_choice(offer.tools, offer.tool_choice)
        turns = [{"role": "system", "content": _text_of(self.system, "system")}] if self.system else []
        for at, turn in enumerate(self.messages):
            turns += _turns_of(turn, f"messages[{at}]", has_tools=formats.has_tools)
        last = turns[-1]
        if "tool_calls" in last:
            path = f"messages[{len(self.messages) - 1}]"
            what = "ends with tool_use: a message of the user with its tool_result has to follow"
            raise InvalidParameter(f"{path} {what}", param=path)
        is_continued = last["role"] == "assistant"
        return Chat(
            messages=turns,
            tools=tools_of_template(offer.tools),
            add_generation_prompt=not is_continued,
            continue_final_message=is_continued,
            template_kwargs=self._template_kwargs(formats),
        )

    def offer(self) -> ToolOffer:
        """The tools, and which of them are to be called."""
        tools = [_tool_of(tool, f"tools[{at}]") for at, tool in enumerate(self.tools or [])]
        asked = self.tool_choice
        if asked is None:
            return ToolOffer(tools=tools)
        choice: ToolChoice | None = None
        if asked.type == "any":
            choice = "required"
        elif asked.type != "tool":
            choice = asked.type
        elif asked.name is None:
            raise InvalidParameter('tool_choice.name is required with type "tool"', param="tool_choice.name")
        else:
            choice = NamedTool(function=NamedFunction(name=asked.name))
        has_one_call = bool(asked.disable_parallel_tool_use) or isinstance(choice, NamedTool)
        return ToolOffer(tools=tools, tool_choice=choice, has_one_call=has_one_call)

    def _template_kwargs(self, formats: Formats) -> dict[str, Any]:
        if self.thinking is None or formats.reasoning != THINK:
            return {}
        return {"enable_thinking": self.thinking.type != "disabled"}

    def without_effect(self, formats: Formats) -> list[str]:
        """What was asked of thoughts and effort that this model does not take."""
        found = []
        if self.thinking is not None and self.thinking.type != "disabled":
            if formats.reasoning != THINK:
                found.append("thinking")
            elif self.thinking.budget_tokens is not None and CLOSE_THINK not in formats.marker_ids:
                found.append("thinking.budget_tokens")
        if self.output_config is not None and self.output_config.effort is not None:
            found.append("output_config.effort")
        return found


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    session_id: str | None = None

    def sampling_params(self, defaults: Mapping[str, Any] = NOTHING) -> SamplingParams:
        """How to sample, those of `defaults` where it says nothing; raises `InvalidParameter` naming the field."""
        thinking = self.thinking
        if thinking is not None and thinking.type == "enabled":
            self._check_budget(thinking.budget_tokens)
        given = dict(defaults)
        for name in ("temperature", "top_p", "top_k", "session_id"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        if self.stop_sequences:
            given["stop"] = self.stop_sequences
        if self.output_config is not None and self.output_config.format is not None:
            with in_anthropics_words():
                given["structured_outputs"] = StructuredOutputsParams(json=self.output_config.format.schema)
        try:
            return SamplingParams(max_tokens=self.max_tokens, **given)
        except InvalidParameter as error:
            if error.param != "stop":
                raise
            raise InvalidParameter(f"stop_sequences: {error.message}", param="stop_sequences") from None

    def bounded(self, params: SamplingParams, formats: Formats) -> SamplingParams:
        """`params` with the budget of thoughts, where the model's can be bounded: else `without_effect` names it."""
        thinking = self.thinking
        if thinking is None or thinking.type != "enabled" or CLOSE_THINK not in formats.marker_ids:
            return params
        return msgspec.structs.replace(params, thinking_token_budget=thinking.budget_tokens)

    def _check_budget(self, budget_tokens: int | None) -> None:
        field = "thinking.budget_tokens"
        if budget_tokens is None:
            raise InvalidParameter(f'{field} is required with type "enabled"', param=field)
        if not 1 <= budget_tokens < self.max_tokens:
            limits = f"at least 1 and less than max_tokens, which is {self.max_tokens}"
            raise InvalidParameter(f"{field} must be {limits}, not {budget_tokens}", param=field)


def _tool_of(tool: OfferedTool, path: str) -> Tool:
    if tool.type is not None and tool.type != "custom":
        what = "is not supported: this server runs no tools of its own, and offers only those of clients"
        raise UnsupportedParameter(f'{path}.type "{tool.type[:40]}" {what} ("custom")', param=f"{path}.type")
    if tool.input_schema is None:
        raise InvalidParameter(f"{path}.input_schema is required", param=f"{path}.input_schema")
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(function=function)


def _turns_of(message: InputMessage, path: str, *, has_tools: bool) -> list[dict[str, Any]]:
    """What a chat template takes: what tools have said are turns of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "system":
        return [{"role": "system", "content": _text_of(message.content, f"{path}.content")}]
    if not message.content and message.role == "user":
        raise InvalidParameter(f"{path}.content must hold at least one block", param=f"{path}.content")
    for at, block in enumerate(message.content):
        field = f"{path}.content[{at}].type"
        if (role := _ROLES.get(block.type, message.role)) != message.role:
            raise InvalidParameter(f'{field} "{block.type}" belongs to messages of role "{role}"', param=field)
        if block.type in ("tool_use", "tool_result") and not has_tools:
            raise UnsupportedParameter(f'{field} "{block.type}" {NO_TOOLS}', param=field)
    make = _turn_of_assistant if message.role == "assistant" else _turns_of_user
    return make(message.content, f"{path}.content")


def _turns_of_user(blocks: Sequence[Block], path: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    texts: list[str] = []
    for at, block in enumerate(blocks):
        here = f"{path}[{at}]"
        if block.type != "tool_result":
            texts.append(_text(block, here))
            continue
        if texts:
            turns.append({"role": "user", "content": "\n".join(texts)})
            texts = []
        said = "" if block.content is None else _text_of(block.content, f"{here}.content")
        turns.append({"role": "tool", "tool_call_id": _needed(block, "tool_use_id", here), "content": said})
    if texts:
        turns.append({"role": "user", "content": "\n".join(texts)})
    return turns


def _turn_of_assistant(blocks: Sequence[Block], path: str) -> list[dict[str, Any]]:
    texts, thoughts = [], []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        here = f"{path}[{at}]"
        if block.type == "thinking":
            thoughts.append(_needed(block, "thinking", here))
        elif block.type == "tool_use":
            called = {"name": _needed(block, "name", here), "arguments": _needed(block, "input", here)}
            calls.append({"id": _needed(block, "id", here), "type": "function", "function": called})
        elif block.type != "redacted_thinking":  # which none can read but the model that wrote it
            texts.append(_text(block, here))
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        turn["tool_calls"] = calls
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    return [turn]


def _text_of(content: str | Sequence[Block], path: str) -> str:
    """What may hold nothing but text."""
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, f"{path}[{at}]") for at, block in enumerate(content))


def _text(block: Block, path: str) -> str:
    if block.type != "text":
        what = f'content of type "{block.type[:40]}" is not supported here: this model reads only "text"'
        raise UnsupportedParameter(f"{path}.type: {what}", param=f"{path}.type")
    text: str = _needed(block, "text", path)
    return text


def _needed(block: Block, field: str, path: str) -> Any:
    if (value := getattr(block, field)) is None:
        raise InvalidParameter(f"{path}.{field} is required", param=f"{path}.{field}")
    return value


@contextmanager
def in_anthropics_words() -> Iterator[None]:
    """Errors name fields as Anthropic's clients have sent them."""
    try:
        yield
    except CallerError as error:
        raise renamed(error) from None


def renamed(error: CallerError) -> CallerError:
    """`error` with fields as Anthropic's clients have sent them."""
    message, param = error.message, error.param
    for theirs, ours in _NAMES.items():
        message = message.replace(theirs, ours)
        param = param and param.replace(theirs, ours)
    return error if message == error.message else type(error)(message, param=param)
