"""NovaInfer: LLM inference for Qwen2, Qwen3, Llama and Mistral models, as an asyncio library.

    from novainfer import Engine, SamplingParams

    async with Engine() as engine:                         # no arguments: the demo model, on the CPU
        async for delta in engine.generate("Hello", SamplingParams(max_tokens=32)):
            print(delta.text, end="")

`LLM` is the same, blocking. `novainfer.server` puts it behind OpenAI's HTTP API; `novainfer --help` is the command
line. Names are loaded when they are first used: importing novainfer imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from novainfer.actors.routers.config import KvEventsConfig
    from novainfer.config import EngineConfig
    from novainfer.embedding import EmbeddingOutput, PoolingParams
    from novainfer.engine import Engine, EngineStatistics
    from novainfer.fsm.messages.errors import (
        CallerError,
        ContextLengthExceeded,
        DeviceError,
        EngineClosed,
        EngineDead,
        EngineDraining,
        EngineOverloaded,
        GrammarLimit,
        InvalidParameter,
        ModelLoadError,
        ModelNotFound,
        ModelUnavailable,
        NoTokenAllowed,
        NovaInferError,
        ReaderStalled,
        ReconfigureFailed,
        ReconfigureInProgress,
        RecorderUnavailable,
        RequestCancelled,
        RequestNotFound,
        RequestTimeout,
        ServerError,
        StepFailedError,
        UnsupportedParameter,
        WrongLoop,
    )
    from novainfer.fsm.messages.events import Chat, Committed
    from novainfer.fsm.messages.outputs import Delta, FinishReason, TokenLogprob
    from novainfer.fsm.messages.params import SamplingParams
    from novainfer.fsm.messages.structured import StructuredOutputsParams
    from novainfer.fsm.messages.tenant import Tenant
    from novainfer.fsm.text import TokenizerInfo
    from novainfer.llm import LLM
    from novainfer.model import ModelInfo
    from novainfer.output import CalledTool, CompletionOutput, RequestOutput

_HOMES = {
    "novainfer.actors.routers.config": ("KvEventsConfig",),
    "novainfer.config": ("EngineConfig",),
    "novainfer.embedding": ("EmbeddingOutput", "PoolingParams"),
    "novainfer.engine": ("Engine", "EngineStatistics"),
    "novainfer.fsm.messages.errors": (
        "CallerError",
        "ContextLengthExceeded",
        "DeviceError",
        "EngineClosed",
        "EngineDead",
        "EngineDraining",
        "EngineOverloaded",
        "GrammarLimit",
        "InvalidParameter",
        "ModelLoadError",
        "ModelNotFound",
        "ModelUnavailable",
        "NoTokenAllowed",
        "NovaInferError",
        "ReaderStalled",
        "ReconfigureFailed",
        "ReconfigureInProgress",
        "RecorderUnavailable",
        "RequestCancelled",
        "RequestNotFound",
        "RequestTimeout",
        "ServerError",
        "StepFailedError",
        "UnsupportedParameter",
        "WrongLoop",
    ),
    "novainfer.fsm.messages.events": ("Chat", "Committed"),
    "novainfer.fsm.messages.outputs": ("Delta", "FinishReason", "TokenLogprob"),
    "novainfer.fsm.messages.params": ("SamplingParams",),
    "novainfer.fsm.messages.structured": ("StructuredOutputsParams",),
    "novainfer.fsm.messages.tenant": ("Tenant",),
    "novainfer.fsm.text": ("TokenizerInfo",),
    "novainfer.llm": ("LLM",),
    "novainfer.model": ("ModelInfo",),
    "novainfer.output": ("CalledTool", "CompletionOutput", "RequestOutput"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "CalledTool",
    "CallerError",
    "Chat",
    "Committed",
    "CompletionOutput",
    "ContextLengthExceeded",
    "Delta",
    "DeviceError",
    "EmbeddingOutput",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineDraining",
    "EngineOverloaded",
    "EngineStatistics",
    "FinishReason",
    "GrammarLimit",
    "InvalidParameter",
    "KvEventsConfig",
    "ModelInfo",
    "ModelLoadError",
    "ModelNotFound",
    "ModelUnavailable",
    "NoTokenAllowed",
    "NovaInferError",
    "PoolingParams",
    "ReaderStalled",
    "ReconfigureFailed",
    "ReconfigureInProgress",
    "RecorderUnavailable",
    "RequestCancelled",
    "RequestNotFound",
    "RequestOutput",
    "RequestTimeout",
    "SamplingParams",
    "ServerError",
    "StepFailedError",
    "StructuredOutputsParams",
    "Tenant",
    "TokenLogprob",
    "TokenizerInfo",
    "UnsupportedParameter",
    "WrongLoop",
    "__version__",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
