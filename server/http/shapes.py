"""In whose shape errors go out: OpenAI's, and Anthropic's below `/v1/messages`."""

from __future__ import annotations

import msgspec

from novainfer import NovaInferError
from novainfer.server.http.errors import INTERNAL_MESSAGE, error_body

MESSAGES = "/v1/messages"
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
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def body_of_error(error: Exception, path: str, request_id: str) -> bytes:
    """The JSON body of `error` for a request to `path`."""
    return anthropic_error_body(error, request_id) if is_of_messages(path) else error_body(error)


def anthropic_error_body(error: Exception, request_id: str) -> bytes:
    """As Anthropic's clients read it; the text of errors that are not ours stays in the log."""
    if not isinstance(error, NovaInferError):
        error = NovaInferError(INTERNAL_MESSAGE)
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    detail = AnthropicErrorDetail(kind, error.message, AnthropicErrorCode(error.code))
    return msgspec.json.encode(AnthropicErrorBody(detail, request_id))
