"""The body of `POST /v1/responses`, and how it becomes a chat.

Types are strict, and every optional field may be null. Beside OpenAI's fields it has those of chat completions that
say how to sample. What is asked of the engine is checked as in a chat, and named as here (`own_names`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from novainfer import CallerError, InvalidParameter, SamplingParams, StructuredOutputsParams, UnsupportedParameter
from novainfer.fsm.messages.params import LOGPROBS_MAX, shown
from novainfer.offer import FunctionDefinition, NamedFunction, NamedTool, Tool, ToolChoice
from novainfer.server.openai.protocol import NOTHING, ChatCompletionRequest, Message, Sampling
from novainfer.server.openai.structured import JsonSchema, ResponseFormat
from novainfer.server.responses.given import GivenItem
from novainfer.server.responses.reply import ChosenTool, FunctionTool, Reasoning, Response, TextConfig, TextFormat

LOGPROBS = "message.output_text.logprobs"
# What may be included; all but the first tells of what is never there: tools of OpenAI's, images, hidden thoughts.
INCLUDABLE = (
    *(LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results"),
    *("web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs"),
    "computer_call_output.output.image_url",
)
PLAIN = TextFormat(type="text")
METADATA_MAX = 16  # pairs; and characters of a key and of a value: OpenAI's limits
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512

_ALWAYS_ONE = ("n", "prompt_logprobs", "truncate_prompt_tokens")  # a response has one answer, to all of its input
_FIELDS = [one for one in msgspec.structs.fields(Sampling) if one.name not in _ALWAYS_ONE]

if TYPE_CHECKING:

    class ResponseSampling(msgspec.Struct, kw_only=True):
        """How to sample: each field of `SamplingParams` that a response has, or null."""

        structured_outputs: StructuredOutputsParams | None = None

else:
    ResponseSampling = msgspec.defstruct(
        "ResponseSampling", [(one.name, one.type, None) for one in _FIELDS], kw_only=True
    )


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    """`include_obfuscation`: padding against who counts the bytes of a stream, which is not built."""

    include_obfuscation: bool | None = None


class ResponseRequest(ResponseSampling, kw_only=True):
    """`POST /v1/responses`."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "max_completion_tokens": "max_output_tokens",
            "response_format": "text.format",
            "reasoning_effort": "reasoning.effort",
            "logprobs": f'include: ["{LOGPROBS}"]',
            "conversation": "",
            "prompt": "",
            "moderation": "",
            "context_management": "",
        }
    )

    model: str | None = None
    input: str | list[GivenItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    reasoning: Reasoning | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    tools: list[FunctionTool] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    timeout: float | None = None
    max_queue_ms: float | None = None

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def sampling_params(self, defaults: Mapping[str, Any] = NOTHING) -> SamplingParams:
        """The sampling fields, those of `defaults` where it sets none; raises `InvalidParameter` naming the field."""
        self._check()
        with own_names():
            return self.chat([]).sampling_params(defaults)

    def chat(self, messages: list[Message]) -> ChatCompletionRequest:
        """The same as a chat of `messages`; raises `InvalidParameter` or `UnsupportedParameter`."""
        return ChatCompletionRequest(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs if self.has_logprobs else None,
            tools=self._tools(),
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._response_format(),
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            chat_template_kwargs=self.chat_template_kwargs,
            timeout=self.timeout,
            max_queue_ms=self.max_queue_ms,
            **{one.name: getattr(self, one.name) for one in _FIELDS},
        )

    def response(
        self, response_id: str, *, created_at: int, model: str, store: bool, params: SamplingParams
    ) -> Response:
        """What this asks for, at its beginning."""
        return Response(
            id=response_id,
            created_at=created_at,
            status="queued" if self.background else "in_progress",
            background=bool(self.background),
            frequency_penalty=params.frequency_penalty,
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            max_tool_calls=self.max_tool_calls,
            metadata=self.metadata or {},
            model=model,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            presence_penalty=params.presence_penalty,
            previous_response_id=self.previous_response_id,
            prompt_cache_key=self.prompt_cache_key,
            reasoning=self.reasoning or Reasoning(),
            safety_identifier=self.safety_identifier,
            store=store,
            temperature=params.temperature,
            text=self._text(),
            tool_choice=self.tool_choice or "auto",
            tools=self.tools or [],
            top_logprobs=self.top_logprobs or 0,
            top_p=params.top_p,
            truncation=self.truncation or "disabled",
            user=self.user,
        )

    def _check(self) -> None:
        """Raise for what is wrong whatever the model is."""
        if self.background and self.store is False:
            raise InvalidParameter("background needs store: true, since its answer is asked for later", param="store")
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidParameter("stream_options needs stream: true", param="stream_options")
            if self.stream_options.include_obfuscation:
                field = "stream_options.include_obfuscation"
                raise UnsupportedParameter(f"{field} is not supported by this server: leave it out", param=field)
        for at, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                message = f"include[{at}] must be one of {', '.join(INCLUDABLE)}, not {name[:60]!r}"
                raise InvalidParameter(message, param=f"include[{at}]")
        if not 0 <= (self.top_logprobs or 0) <= LOGPROBS_MAX:
            message = f"top_logprobs must be between 0 and {LOGPROBS_MAX}, not {shown(self.top_logprobs or 0)}"
            raise InvalidParameter(message, param="top_logprobs")
        self._check_metadata()

    def _check_metadata(self) -> None:
        metadata = self.metadata or {}
        if len(metadata) > METADATA_MAX:
            message = f"metadata must have at most {METADATA_MAX} pairs, not {len(metadata)}"
            raise InvalidParameter(message, param="metadata")
        for key, value in metadata.items():
            if len(key) > METADATA_KEY_CHARS_MAX or len(value) > METADATA_VALUE_CHARS_MAX:
                limits = f"keys of at most {METADATA_KEY_CHARS_MAX} and values of at most {METADATA_VALUE_CHARS_MAX}"
                message = f"metadata must have {limits} characters, and {key[:METADATA_KEY_CHARS_MAX]!r} has more"
                raise InvalidParameter(message, param="metadata")

    def _tools(self) -> list[Tool] | None:
        """Those that may be called."""
        if self.tools is None:
            return None
        found = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(self.tools)]
        if not isinstance(self.tool_choice, ChosenTool) or self.tool_choice.type != "allowed_tools":
            return found
        allowed = {_allowed_name(one, at) for at, one in enumerate(self.tool_choice.tools or ())}
        if unknown := sorted(allowed - {tool.function.name for tool in found}):
            message = f"tool_choice.tools names {unknown[0][:40]!r}, which is none of tools"
            raise InvalidParameter(message, param="tool_choice.tools")
        return [tool for tool in found if tool.function.name in allowed]

    def _tool_choice(self) -> ToolChoice | None:
        chosen = self.tool_choice
        if not isinstance(chosen, ChosenTool):
            return chosen
        if chosen.type == "function":
            if chosen.name is None:
                raise InvalidParameter("tool_choice.name is required", param="tool_choice.name")
            return NamedTool(function=NamedFunction(name=chosen.name))
        if chosen.type != "allowed_tools":
            kinds = '"function" or "allowed_tools"'
            message = f"tool_choice.type must be {kinds}, not {chosen.type[:40]!r}"
            raise UnsupportedParameter(message, param="tool_choice.type")
        if not chosen.tools:
            raise InvalidParameter("tool_choice.tools must name at least one tool", param="tool_choice.tools")
        return chosen.mode or "auto"

    def _text(self) -> TextConfig:
        found = self.text or TextConfig()
        return found if found.format is not None else msgspec.structs.replace(found, format=PLAIN)

    def _response_format(self) -> ResponseFormat | None:
        found = self._text().format
        if found is None or found.type == "text":
            return None
        if found.type == "json_object":
            return ResponseFormat(type="json_object")
        schema = JsonSchema(name=found.name, description=found.description, schema=found.schema, strict=found.strict)
        return ResponseFormat(type="json_schema", json_schema=schema)


def _tool(given: FunctionTool, path: str) -> Tool:
    if given.type != "function":
        message = f'{path}.type must be "function", not {given.type[:40]!r}: tools that a server runs are not built'
        raise UnsupportedParameter(message, param=f"{path}.type")
    if given.name is None:
        raise InvalidParameter(f"{path}.name is required", param=f"{path}.name")
    function = FunctionDefinition(
        name=given.name, description=given.description, parameters=given.parameters, strict=given.strict
    )
    return Tool(function=function)


def _allowed_name(given: dict[str, Any], at: int) -> str:
    name = given.get("name")
    if given.get("type") != "function" or not isinstance(name, str):
        path = f"tool_choice.tools[{at}]"
        raise UnsupportedParameter(f'{path} must have the type "function" and a name', param=path)
    return name


# How a chat names what is named otherwise here.
_OWN = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    (".function.", "."),
    ("messages", "input"),
)


@contextmanager
def own_names() -> Iterator[None]:
    """Errors that name fields of a chat name those of a response."""
    try:
        yield
    except CallerError as error:
        found = in_own_names(error)
        if found is error:
            raise
        raise found from None


def in_own_names(error: CallerError) -> CallerError:
    """`error`, with the fields of a response."""
    param, message = error.param, error.message
    if param is not None:
        for theirs, own in _OWN:
            param = param.replace(theirs, own)
        message = message.replace(error.param or param, param)
    message = message.replace("response_format", "text.format")
    if (param, message) == (error.param, error.message):
        return error
    return type(error)(message, param=param)
