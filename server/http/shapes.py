"""In whose shape errors go out, as bodies and as events: OpenAI's, and Anthropic's below `/v1/messages`."""

from __future__ import annotations

import msgspec

from novainfer import NovaInferError
from novainfer.server.http.errors import INTERNAL_MESSAGE, error_body

MESSAGES = "/v1/messages"
COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
RESPONSES = "/v1/responses"
# Anthropic's own statuses; it says 529 where a server is full, which proxies do not know: 503 stays what it is.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorCode(msgspec.Struct):
    """Which error it is, for programs; the codes are this server's."""

    error_code: str


class AnthropicErrorDetail(msgspec.Struct):
    """The inside of Anthropic's error object; the message names the field that is wrong."""

    type: str
    message: str
    details: AnthropicErrorCode


class AnthropicErrorBody(msgspec.Struct, tag_field="type", tag="error"):
    """Anthropic's error object, as a body and as the data of an SSE error event."""

    error: AnthropicErrorDetail
    request_id: str


def is_of_messages(path: str) -> bool:
    """Whether Anthropic's clients ask for what is at `path`."""
    return _is_below(path, MESSAGES)


def body_of_error(error: Exception, path: str, request_id: str) -> bytes:
    """The JSON body of `error` for a request to `path`."""
    return anthropic_error_body(error, request_id) if is_of_messages(path) else error_body(error)


class StreamError(msgspec.Struct, tag_field="type", tag="error", kw_only=True):
    """The last event of a response that cannot be told to its end."""

    sequence_number: int
    code: str | None
    message: str
    param: str | None = None


def event_of_error(error: Exception, path: str, request_id: str, number: int = 0) -> bytes | None:
    """What ends a stream of `path` that cannot go on, behind `number` events; None where no event ends it.

    It has no id: who reads the answer again from its last id on is told the rest of it.
    """
    if is_of_messages(path):
        return b"event: error\ndata: " + anthropic_error_body(error, request_id) + b"\n\n"
    if any(_is_below(path, one) for one in COMPLETIONS):
        return b"data: " + error_body(error) + b"\n\n"
    if _is_below(path, RESPONSES):
        return response_error_event(error, number)
    return None


def response_error_event(error: Exception, number: int) -> bytes:
    """The end of a response's stream, behind so many events."""
    if not isinstance(error, NovaInferError):
        error = NovaInferError(INTERNAL_MESSAGE)
    told = StreamError(sequence_number=number, code=error.code, message=error.message, param=error.param)
    return b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def anthropic_error_body(error: Exception, request_id: str) -> bytes:
    """As Anthropic's clients read it; the text of errors that are not ours stays in the log."""
    if not isinstance(error, NovaInferError):
        error = NovaInferError(INTERNAL_MESSAGE)
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    detail = AnthropicErrorDetail(kind, error.message, AnthropicErrorCode(error.code))
    return msgspec.json.encode(AnthropicErrorBody(detail, request_id))
