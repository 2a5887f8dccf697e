"""From the way a request ended badly to the exception that its caller gets."""

from __future__ import annotations

from novainfer.fsm.messages.errors import (
    ContextLengthExceeded,
    EngineDead,
    EngineDraining,
    EngineOverloaded,
    GrammarLimit,
    InvalidParameter,
    NoTokenAllowed,
    NovaInferError,
    ReaderStalled,
    RequestCancelled,
    RequestTimeout,
    StepFailedError,
)
from novainfer.fsm.messages.events import Cause, End


def error_of(end: End, retry_after_s: float) -> NovaInferError:
    """The exception for a bad end; after too long a wait it says to come back in `retry_after_s`."""
    if end.cause is Cause.QUEUE:
        message = "no first token came within the time that the request was willing to wait"
        return EngineOverloaded(f"{message}: try again in {retry_after_s:.1f} s", retry_after_s=retry_after_s)
    if end.cause is Cause.TIMEOUT:
        return RequestTimeout("the request's deadline passed before it finished", param="timeout_s")
    if end.cause is Cause.DRAIN:
        return EngineDraining("the engine shut down before the request finished")
    if end.cause is not None:
        return RequestCancelled("the request was cancelled")
    message = end.error or "the request failed"
    if end.code == EngineOverloaded.code:
        return EngineOverloaded(message, retry_after_s=retry_after_s)
    kinds: dict[str, type[NovaInferError]] = {
        "context_length_exceeded": ContextLengthExceeded,
        "invalid_value": InvalidParameter,
        "grammar_limit": GrammarLimit,
        "no_token_allowed": NoTokenAllowed,
        "draining": EngineDraining,
        "engine_dead": EngineDead,
        "stalled": ReaderStalled,
    }
    return kinds.get(end.code, StepFailedError)(message, param=end.param)
