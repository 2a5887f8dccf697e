"""A response as clients are given it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from novainfer import NovaInferError
from novainfer.server.http.errors import INTERNAL_MESSAGE
from novainfer.server.openai.protocol import Effort
from novainfer.server.openai.replies import Usage
from novainfer.server.responses.items import OutputItem

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the text of an answer is held to: nothing, JSON, or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How the answer's text is to be; `verbosity` changes nothing here."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """How the model is to think: `effort` is told to its template, and "none" switches thoughts off.

    No summaries are made: thoughts are given as they are.
    """

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The `function` that must be called, by its name, or `allowed_tools`, of which some may be (`auto`) or must."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class ResponseError(msgspec.Struct, kw_only=True):
    """Why a response has failed: `type` is that of the same error in other endpoints."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    param: str | None = None
    type: str


class IncompleteDetails(msgspec.Struct):
    """Why a response broke off."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """Of the input, what the prefix cache had. Writing to it costs nothing, so no such token is counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """Of the output, what was thought."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/responses`, and of `GET /v1/responses/{response_id}` at any time."""

    id: str
    object: Literal["response"] = "response"
    access_programs: None = None  # of OpenAI's
    created_at: int
    status: ResponseStatus
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    frequency_penalty: float = 0.0
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    presence_penalty: float = 0.0
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: Literal["none", "auto", "required"] | ChosenTool
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None


def usage_of(usage: Usage) -> ResponseUsage:
    """Counts as the Responses API names them."""
    details = usage.completion_tokens_details
    thought = details.reasoning_tokens if details is not None else None
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(thought or 0),
        total_tokens=usage.total_tokens,
    )


def error_of(error: Exception) -> ResponseError:
    """`error` as a response names it; the text of errors that are not ours stays in the log."""
    if not isinstance(error, NovaInferError):
        return ResponseError(code="server_error", message=INTERNAL_MESSAGE, type=NovaInferError.type)
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = "server_error"
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.status == 400:
        code = "invalid_prompt"
    return ResponseError(code=code, message=error.message, param=error.param, type=error.type)
