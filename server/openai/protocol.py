"""OpenAI's request bodies as msgspec Structs, and how each becomes a prompt and `SamplingParams`.

Types are strict ("9" is not a number). Every optional field may be null, as OpenAI's own may. Ranges are checked by
`SamplingParams`; here stands only what depends on several fields. What is known and not built is in `unsupported.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from novainfer import Chat, InvalidParameter, SamplingParams, StructuredOutputsParams, UnsupportedParameter
from novainfer.fsm.messages.params import DURATION_S_MAX, NUM_CHOICES_MAX, shown
from novainfer.offer import NO_TOOLS, NamedTool, Tool, ToolCall, ToolChoice, check_choice, tools_of_template
from novainfer.server.openai.structured import ResponseFormat, grammar_of

NOTHING: Mapping[str, Any] = MappingProxyType({})
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; chat fills the context
MESSAGES_MAX = 10_000  # rendering takes some 5 us each
PROMPTS_MAX = 2048  # OpenAI's limit for a list of inputs

Prompt = str | dict[str, list[int]]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # how much a model is to think


class StreamOptions(msgspec.Struct, kw_only=True):
    """`include_usage` adds a chunk with the totals; `continuous_usage_stats` (vLLM) puts running ones in each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message; `text` is served, and what an assistant refused before, `refusal`."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    def as_template_input(self, path: str, *, has_tools: bool) -> dict[str, Any]:
        """What a chat template takes; `path` is this message's own, for errors. `has_tools`: it knows of tools."""
        if self.role == "function":
            raise UnsupportedParameter(
                f'{path}.role "function" is not supported: what a tool has said is a message of role "tool"',
                param=f"{path}.role",
            )
        if not has_tools and (self.role == "tool" or self.tool_calls):
            field = f"{path}.role" if self.role == "tool" else f"{path}.tool_calls"
            raise UnsupportedParameter(f"{field} {NO_TOOLS}", param=field)
        if self.tool_calls and self.role != "assistant":
            field = f"{path}.tool_calls"
            raise InvalidParameter(f'{field} belong to messages of role "assistant"', param=field)
        # The models served know no "developer"; OpenAI's own older ones are given it as "system" too.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self._text(f"{path}.content")}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if thoughts is not None and role == "assistant":
            message["reasoning_content"] = thoughts
        return message

    def _text(self, path: str) -> str:
        if self.content is None:
            if self.role == "assistant":  # OpenAI's own answers have null where they refused, or said nothing
                return self.refusal or ""
            raise InvalidParameter(f"{path} must be a string or a list of text parts, not null", param=path)
        if isinstance(self.content, str):
            return self.content
        texts: list[str] = []
        for i, part in enumerate(self.content):
            kind = "refusal" if part.type == "refusal" and self.role == "assistant" else "text"
            if part.type != kind:
                raise UnsupportedParameter(
                    f'content of type "{part.type}" is not supported: this model reads only "text"',
                    param=f"{path}[{i}].type",
                )
            text = part.refusal if kind == "refusal" else part.text
            if text is None:
                raise InvalidParameter(f"{path}[{i}].{kind} is missing", param=f"{path}[{i}].{kind}")
            texts.append(text)
        return "\n".join(texts)  # as vLLM joins parts for templates that take strings


# Fields of SamplingParams that a body has in OpenAI's way, or not at all; all others it has as they are, or null.
_ASKED_OTHERWISE = (
    *("max_tokens", "logprobs", "timeout_s", "max_queue_s"),
    *("banned_token_ids", "banned_sequences", "mark_token_ids"),
    *("pooling", "thoughts"),
)
_FIELDS = [field for field in msgspec.structs.fields(SamplingParams) if field.name not in _ASKED_OTHERWISE]
_PASSED_ON = tuple(field.name for field in _FIELDS)

if TYPE_CHECKING:

    class Sampling(msgspec.Struct, kw_only=True):
        """How to sample: each field of `SamplingParams`, or null."""

        n: int | None = None
        prompt_logprobs: int | None = None
        truncate_prompt_tokens: int | None = None
        structured_outputs: StructuredOutputsParams | None = None

else:
    Sampling = msgspec.defstruct("Sampling", [(f.name, f.type | None, None) for f in _FIELDS], kw_only=True)


class CommonRequest(Sampling, kw_only=True):
    """What chat and completions share: how to sample (`SamplingParams`), and more of OpenAI's and vLLM's fields."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    on_disconnect: Literal["cancel", "continue"] | None = None
    user: str | None = None

    request_id: str | None = None
    return_token_ids: bool | None = None
    timeout: float | None = None
    max_queue_ms: float | None = None

    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def _sampling_params(
        self, defaults: Mapping[str, Any], *, max_tokens: int | None, max_tokens_field: str, **more: Any
    ) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options needs stream: true", param="stream_options")
        if self.stream_interval is not None and self.stream_interval < 1:
            message = f"stream_interval must be at least 1 token, not {shown(self.stream_interval)}"
            raise InvalidParameter(message, param="stream_interval")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs are not given in a stream: leave stream out, or use echo with logprobs"
            raise InvalidParameter(message, param="prompt_logprobs")
        given = dict(defaults)
        given |= {name: value for name in _PASSED_ON if (value := getattr(self, name)) is not None}
        given |= more
        if (grammar := grammar_of(self)) is not None:
            given["structured_outputs"] = grammar
        if self.timeout is not None:
            given["timeout_s"] = self.timeout
        if self.max_queue_ms is not None:
            if not 0 < self.max_queue_ms <= DURATION_S_MAX * 1000:
                limits = f"more than 0 and at most {DURATION_S_MAX * 1000:.0f} milliseconds"
                message = f"max_queue_ms must be {limits}, not {self.max_queue_ms:g}"
                raise InvalidParameter(message, param="max_queue_ms")
            given["max_queue_s"] = self.max_queue_ms / 1000
        try:
            return SamplingParams(max_tokens=max_tokens, **given)
        except InvalidParameter as error:
            names = {"max_tokens": max_tokens_field, "timeout_s": "timeout", "logprobs": self._logprobs_field()}
            if error.param in names:
                field = names[error.param]
                raise InvalidParameter(error.message.replace(error.param, field, 1), param=field) from None
            raise

    def _logprobs_field(self) -> str:
        return "logprobs"


class ChatCompletionRequest(CommonRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None

    @property
    def has_one_call(self) -> bool:
        """Whether an answer is over when its first call is."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)

    def prompt(self, *, has_tools: bool) -> Chat:
        """The conversation, checked; `has_tools`: the model's template knows of them."""
        if not self.messages:
            raise InvalidParameter("messages must hold at least one message", param="messages")
        if (num_messages := len(self.messages)) > MESSAGES_MAX:
            message = f"messages takes at most {MESSAGES_MAX} messages, not {num_messages}"
            raise InvalidParameter(message, param="messages")
        continued = bool(self.continue_final_message)
        if continued and self.add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if self.tools and not has_tools:
            raise UnsupportedParameter(f"tools {NO_TOOLS}", param="tools")
        check_choice(self.tools or [], self.tool_choice)
        generation_prompt = not continued if self.add_generation_prompt is None else self.add_generation_prompt
        return Chat(
            messages=[
                message.as_template_input(f"messages[{i}]", has_tools=has_tools)
                for i, message in enumerate(self.messages)
            ],
            tools=tools_of_template(self.tools or []),
            add_generation_prompt=generation_prompt,
            continue_final_message=continued,
            template_kwargs=self._effort() | (self.chat_template_kwargs or {}),
        )

    def _effort(self) -> dict[str, Any]:
        """What templates are told of `reasoning_effort`: it is for them to know the word."""
        match self.reasoning_effort:
            case None:
                return {}
            case "none":
                return {"enable_thinking": False}
            case effort:
                return {"reasoning_effort": effort}

    def sampling_params(self, defaults: Mapping[str, Any] = NOTHING) -> SamplingParams:
        """The sampling fields, those of `defaults` where it sets none; raises `InvalidParameter` naming the field."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameter("top_logprobs needs logprobs: true", param="top_logprobs")
        newer = self.max_completion_tokens is not None
        return self._sampling_params(
            defaults,
            max_tokens=self.max_completion_tokens if newer else self.max_tokens,
            max_tokens_field="max_completion_tokens" if newer else "max_tokens",
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def _logprobs_field(self) -> str:
        return "top_logprobs"


class CompletionRequest(CommonRequest, kw_only=True):
    """`POST /v1/completions`; `prompt` is a string, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[Prompt]:
        """The prompts as the engine takes them: strings, or token ids by name."""
        return prompts_of(self.prompt, "prompt")

    def sampling_params(self, defaults: Mapping[str, Any] = NOTHING) -> SamplingParams:
        """The sampling fields, those of `defaults` where it sets none; raises `InvalidParameter` naming the field."""
        self._check_best_of()
        if self.echo and self.truncate_prompt_tokens is not None:
            message = "echo gives the prompt back, which truncate_prompt_tokens would cut: leave one of them out"
            raise InvalidParameter(message, param="echo")
        if self.is_prompt_alone and self.stream:
            message = "max_tokens must be at least 1 in a stream: a prompt alone is given back as a whole"
            raise InvalidParameter(message, param="max_tokens")
        max_tokens = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self._sampling_params(
            defaults,
            max_tokens=1 if self.is_prompt_alone else max_tokens,
            max_tokens_field="max_tokens",
            **self._choices(),
            **self._scored(),
        )

    @property
    def is_prompt_alone(self) -> bool:
        """Whether the prompt is all that is wanted, with its log probabilities: a token is drawn, and not given."""
        return self.max_tokens == 0 and bool(self.echo)

    def _scored(self) -> dict[str, int | None]:
        """Of which tokens of the prompt log probabilities are told: an echoed prompt has those of its answer."""
        if not self.echo or self.logprobs is None:
            return {}
        return {"prompt_logprobs": max(self.logprobs, self.prompt_logprobs or 0)}

    def _choices(self) -> dict[str, int | None]:
        """How many choices are made, and with which log probabilities: the best are told by theirs."""
        if self.best_of is None or not 1 <= self.num_wanted < self.best_of:
            return {"n": self.num_wanted, "logprobs": self.logprobs}
        return {"n": self.best_of, "logprobs": self.logprobs or 0}

    @property
    def num_wanted(self) -> int:
        """How many choices of a prompt are given back; where `best_of` is more, as many as that are made."""
        return 1 if self.n is None else self.n

    def _check_best_of(self) -> None:
        if self.best_of is None or self.best_of == self.num_wanted or self.num_wanted < 1:
            return
        if not self.num_wanted < self.best_of <= NUM_CHOICES_MAX:
            limits = f"between n, which is {self.num_wanted}, and {NUM_CHOICES_MAX}"
            raise InvalidParameter(f"best_of must be {limits}, not {shown(self.best_of)}", param="best_of")
        if self.stream:
            raise InvalidParameter(
                "best_of cannot be streamed: which choices are best is known at their end", param="best_of"
            )


def prompts_of(given: str | list[str | int | list[int]], field: str) -> list[Prompt]:
    """What a field holds in one of OpenAI's four ways, as the engine takes it: strings, or token ids by name."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidParameter(f"{field} must hold at least one string or token id", param=field)
    if isinstance(given[0], int):
        return [_token_prompt(given, field)]
    if len(given) > PROMPTS_MAX:
        raise InvalidParameter(f"{field} takes at most {PROMPTS_MAX} {field}s, not {len(given)}", param=field)
    kind = type(given[0])
    prompts: list[Prompt] = []
    for i, item in enumerate(given):
        path = f"{field}[{i}]"
        if type(item) is not kind:
            raise InvalidParameter(f"{field} must not mix strings, token ids and lists of them", param=path)
        if item == "":
            raise InvalidParameter(f"{path} must not be empty", param=path)
        prompts.append(item if isinstance(item, str) else _token_prompt(item, path))
    return prompts


def _token_prompt(items: Any, path: str) -> dict[str, list[int]]:
    if not items:
        raise InvalidParameter(f"{path} must hold at least one token id", param=path)
    for i, item in enumerate(items):
        if not isinstance(item, int):
            raise InvalidParameter(f"{path}[{i}] must be a token id, as its neighbours are", param=f"{path}[{i}]")
    return {"prompt_token_ids": items}
