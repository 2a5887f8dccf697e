"""From an exception to what a client reads: status, OpenAI's error body, and the headers that say when to try again.

Errors that only HTTP can have extend the one tree of `novainfer` here:

    CallerError
    ├── MalformedRequest      400  what came is not HTTP, or may be read in two ways
    ├── MalformedBody         400  the body is not JSON
    ├── AuthenticationError   401  no API key, or a wrong one
    ├── PermissionDenied      403  a known key that may not do this, or what is switched off
    ├── PathNotFound          404  nothing is served at this path
    ├── ResponseNotFound      404  no response of this id is kept
    ├── AnswerNotFound        404  no answer of this id can be streamed again
    ├── SessionNotFound       404  this key has no conversation of this id
    ├── MethodNotAllowed      405  not with this method
    ├── BodyTimeout           408  the body did not arrive in time
    ├── PayloadTooLarge       413  the body is over the limit
    ├── UnsupportedMediaType  415  the body is not declared as JSON
    ├── HeadersTooLarge       431  the headers are over the limit
    ├── NotImplementedHere    501  a method or a coding that no server of an API needs
    └── VersionNotSupported   505  not HTTP/1.1, where that is spoken
    ServerError
    ├── TooManyRequests       429  of this client; others are let in
    │   └── RateLimited       429  of this key; after `retry_after_s` there is room
    ├── QuotaSpent            429  the key has no tokens left for today
    ├── BudgetSpent           429  the conversation, or the user, has no tokens left
    ├── ModelLoading          503  the model is not loaded yet
    ├── NotMoving             503  an actor is stuck
    ├── StoreFull             503  no more responses can be kept now
    ├── TooManyConnections    503  all that there is room for are busy
    └── TooManyListeners      503  of the event feed
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import msgspec

from novainfer import (
    CallerError,
    EngineOverloaded,
    ModelUnavailable,
    NovaInferError,
    ReaderStalled,
    ReconfigureFailed,
    RequestTimeout,
    ServerError,
    StepFailedError,
)

log = logging.getLogger("novainfer.server")

Headers = list[tuple[bytes, bytes]]

RETRY_AFTER_S = 2.0  # for a server that starts or stops; openai-python ignores anything over 120 s
INTERNAL_MESSAGE = "The server failed on this request; its log says why. Other requests go on."


# OpenAI's clients send a 408, a 409 or a 500 again, up to three times, unless they are told not to. The first two are
# the client's own deadline and its own slowness; a step that failed with this request alone in it would fail again, and
# so would a reconfiguration.
NEVER_RETRIED = (RequestTimeout, ReaderStalled, StepFailedError, ReconfigureFailed)


class MalformedRequest(CallerError):
    """What came is not HTTP, or two readers could take it for different requests."""

    code = "malformed_request"


class MalformedBody(CallerError):
    """The body is not the JSON object it should be."""

    code = "invalid_json"


class AuthenticationError(CallerError):
    """The request has no API key, or one that this server does not know."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDenied(CallerError):
    """The key is known, and may not do this; or it is switched off."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class PathNotFound(CallerError):
    """Nothing is served at this path."""

    status = 404
    type = "not_found_error"
    code = "path_not_found"


class ResponseNotFound(CallerError):
    """No response of this id is kept."""

    status = 404
    code = "response_not_found"


class SessionNotFound(CallerError):
    """This key has no conversation of this id."""

    status = 404
    type = "not_found_error"
    code = "session_not_found"


class AnswerNotFound(CallerError):
    """No answer of this id can be streamed again."""

    status = 404
    type = "not_found_error"
    code = "answer_not_found"


class MethodNotAllowed(CallerError):
    """The path exists, but not for this method; `allow` lists those it has."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class BodyTimeout(CallerError):
    """The body did not arrive in time."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


class PayloadTooLarge(CallerError):
    """The body is over the limit."""

    status = 413
    code = "payload_too_large"


class UnsupportedMediaType(CallerError):
    """The body is not declared as JSON."""

    status = 415
    code = "unsupported_media_type"


class HeadersTooLarge(CallerError):
    """The headers are over the limit."""

    status = 431
    code = "headers_too_large"


class NotImplementedHere(CallerError):
    """A method or a transfer coding that this server does not have, and that no client of an API needs."""

    status = 501
    code = "not_implemented"


class VersionNotSupported(CallerError):
    """A version of HTTP that is not spoken on this connection."""

    status = 505
    code = "http_version_not_supported"


class TooManyRequests(ServerError):
    """This client has as much of something as one may have: live requests, unread answers, large bodies that wait."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_requests"


class RateLimited(TooManyRequests):
    """This key has used what it may in a minute, or has as many live choices as it may."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaSpent(ServerError):
    """This key has no tokens left for today; a client that tries again within minutes does so in vain."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BudgetSpent(ServerError):
    """This conversation or user has no tokens left: for ever, or until a new day, which is `retry_after_s` away."""

    status = 429
    type = "rate_limit_error"
    code = "tokens"

    def __init__(self, message: str, *, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelLoading(ServerError):
    """The model is not loaded and warm yet."""

    code = "model_loading"


class NotMoving(ServerError):
    """An actor has been beyond its deadline; and none knows when it will go on."""

    code = "engine_stuck"


class StoreFull(ServerError):
    """As many responses are being made as can be kept."""

    code = "store_full"


class TooManyConnections(ServerError):
    """There is no room for another connection, and all that there are have a request."""

    code = "too_many_connections"


class TooManyListeners(ServerError):
    """As many clients listen to the event feed as may."""


KNOW_WHEN = (EngineOverloaded, ModelUnavailable, RateLimited, QuotaSpent, BudgetSpent)  # to try again


class ErrorDetail(msgspec.Struct):
    """The inside of OpenAI's error object; all of it is for programs but `message`, which is for people."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """OpenAI's error object, as a body and as the data of an SSE error event."""

    error: ErrorDetail


def detail_of(error: NovaInferError) -> ErrorDetail:
    """The error object's inside, with the field's name as it is in a body."""
    param = "timeout" if error.param == "timeout_s" else error.param
    return ErrorDetail(error.message, error.type, param, error.code)


def error_body(error: Exception) -> bytes:
    """The JSON body of `error`; the text of errors that are not ours stays in the log."""
    if isinstance(error, NovaInferError):
        detail = detail_of(error)
    else:
        detail = ErrorDetail(INTERNAL_MESSAGE, NovaInferError.type, None, NovaInferError.code)
    return msgspec.json.encode(ErrorBody(detail))


def error_status(error: Exception) -> int:
    """The HTTP status of `error`."""
    return error.status if isinstance(error, NovaInferError) else 500


def error_headers(error: Exception) -> Headers:
    """The headers that go with `error`: when to try again, which methods there are, which authentication."""
    headers: Headers = [(b"content-type", b"application/json")]
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode("ascii")))
    elif isinstance(error, AuthenticationError):
        headers.append((b"www-authenticate", b"Bearer"))
    elif isinstance(error, BudgetSpent) and error.retry_after_s is None:  # never
        headers.append((b"x-should-retry", b"false"))
    elif isinstance(error, ServerError) and error.status in (429, 503):
        wait_s = (error.retry_after_s if isinstance(error, KNOW_WHEN) else None) or RETRY_AFTER_S
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(wait_s))))
        headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(wait_s * 1000))))
        if isinstance(error, QuotaSpent | BudgetSpent):
            headers.append((b"x-should-retry", b"false"))
    elif isinstance(error, NEVER_RETRIED):
        headers.append((b"x-should-retry", b"false"))
    return headers


def log_if_ours(error: Exception, request_id: str) -> None:
    """Log a failure that the caller did not cause; unknown exceptions with their traceback."""
    if not isinstance(error, NovaInferError):
        log.error("request %s failed", request_id, exc_info=error)
    elif error.status == 500:
        log.error("request %s failed: %s", request_id, error.message)


def one_of(names: Iterable[str]) -> str:
    """`a, b or c`: for sentences that say what would be right."""
    *head, last = list(names)
    return f"{', '.join(head)} or {last}" if head else last
