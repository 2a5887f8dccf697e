"""Every error a user of NovaInfer can meet, in one tree.

    NovaInferError
    ├── CallerError                 the request is wrong; sending it again will not help
    │   ├── InvalidParameter        400  a field holds a value that cannot be used
    │   ├── UnsupportedParameter    400  a known field whose feature is not built
    │   ├── GrammarLimit            400  a grammar takes more than it may
    │   ├── NoTokenAllowed          400  grammar, allowed and banned tokens leave nothing to be drawn
    │   ├── ContextLengthExceeded   400  prompt plus max_tokens do not fit the context
    │   ├── ModelNotFound           404  the server does not serve this model
    │   ├── RequestNotFound         404  no request of this id
    │   └── WrongLoop               400  an engine is used on another event loop than its own
    ├── ServerError                 the server cannot do it now
    │   ├── EngineOverloaded        503  the admission queue is full: try again after `retry_after_s`
    │   ├── ModelUnavailable        503  the model cannot be had now: try again after `retry_after_s`
    │   ├── EngineDraining          503  the engine is shutting down
    │   ├── EngineClosed            503  the engine was not started, or is closed
    │   ├── RecorderUnavailable     503  the flight recorder is off, or has nowhere to write
    │   ├── ReconfigureInProgress   409  another reconfiguration is under way
    │   ├── ReconfigureFailed       409  the engine cannot be reconfigured so, and goes on as before
    │   ├── RequestTimeout          408  the request's own deadline passed
    │   ├── ReaderStalled           408  its reader took nothing for too long
    │   └── RequestCancelled        499  someone cancelled the request
    └── DeviceError                 the device or the model failed
        ├── StepFailedError         500  the step that computed this request failed
        ├── EngineDead              500  an actor of the engine died
        └── ModelLoadError          500  the model could not be loaded (exit code 2 on the command line)

Each carries what OpenAI's error body needs: `status`, `type`, `code` and `param` (the field's name, or None).
"""

from __future__ import annotations

from typing import ClassVar


class NovaInferError(Exception):
    """Base of all errors; `status` is the HTTP status, `param` names the field at fault where there is one."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class CallerError(NovaInferError):
    """The request is wrong; sending it again will not help."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class InvalidParameter(CallerError, ValueError):
    """A field holds a value that cannot be used; the message says which would be right."""

    code = "invalid_value"


class UnsupportedParameter(CallerError):
    """A field that is known, would change the answer, and is not built."""

    code = "unsupported_parameter"


class ContextLengthExceeded(CallerError):
    """Prompt and max_tokens together exceed the maximum context length."""

    code = "context_length_exceeded"


class GrammarLimit(CallerError):
    """A grammar takes more memory or time than it may, at its beginning or later; the message names the limit."""

    code = "grammar_limit"


class NoTokenAllowed(CallerError):
    """What a grammar allows, and what the request's other fields do, have no token in common."""

    code = "no_token_allowed"


class ModelNotFound(CallerError):
    """The server does not serve a model of this name."""

    status = 404
    type = "not_found_error"
    code = "model_not_found"


class RequestNotFound(CallerError):
    """There is no request of this id."""

    status = 404
    type = "not_found_error"
    code = "request_not_found"


class WrongLoop(CallerError, RuntimeError):
    """An engine is used on another event loop than its own, or on none."""

    code = "wrong_loop"


class ServerError(NovaInferError):
    """The server cannot do it now; the same request may succeed later."""

    status = 503
    type = "service_unavailable_error"
    code = "server_is_overloaded"


class EngineOverloaded(ServerError):
    """The admission queue is full; `retry_after_s` is computed from the rate at which it drains."""

    def __init__(self, message: str, *, retry_after_s: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class ModelUnavailable(ServerError):
    """The model cannot be had now, and the message says why; after `retry_after_s` it may be.

    A message may name the operator's files; `told` is what may be said to anybody.
    """

    code = "model_unavailable"

    def __init__(
        self, message: str, *, retry_after_s: float, param: str | None = "model", told: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s
        self.told = message if told is None else told


class EngineDraining(ServerError):
    """The engine is shutting down and takes no new requests."""

    code = "draining"


class EngineClosed(ServerError):
    """The engine was not started, or is closed."""

    code = "engine_closed"


class RecorderUnavailable(ServerError):
    """The flight recorder is off, or has nowhere to write its file."""

    code = "recorder_unavailable"


class ReconfigureInProgress(ServerError):
    """Another reconfiguration is under way: one at a time."""

    status = 409
    type = "conflict_error"
    code = "reconfigure_in_progress"


class ReconfigureFailed(ServerError):
    """The engine could not be reconfigured, and goes on as it was; the message says why."""

    status = 409
    type = "conflict_error"
    code = "reconfigure_failed"


class RequestTimeout(ServerError):
    """The request's own deadline passed before it finished."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


class ReaderStalled(ServerError):
    """The request's reader took nothing for too long."""

    status = 408
    type = "timeout_error"
    code = "stalled"


class RequestCancelled(ServerError):
    """The request was cancelled through the API, or its client went away."""

    status = 499
    type = "cancelled_error"
    code = "request_cancelled"


class DeviceError(NovaInferError):
    """The device or the model failed."""


class StepFailedError(DeviceError):
    """The step that computed this request failed; other requests go on."""

    code = "step_failed"


class EngineDead(DeviceError):
    """An actor of the engine died; every request ended with this error."""

    code = "engine_dead"


class ModelLoadError(DeviceError):
    """The model could not be loaded; the message says what was wrong with which file."""

    code = "model_load_failed"
