"""What `import novainfer` gives, and what it does not cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

import novainfer

SURFACE = [
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


def python(code: str) -> str:
    """What this program prints, run in an interpreter of its own with warnings as errors."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_these() -> None:
    assert novainfer.__all__ == SURFACE
    assert dir(novainfer) == sorted(SURFACE)


@pytest.mark.parametrize("name", SURFACE)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(novainfer, name) is not None


def test_a_name_that_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="module 'novainfer' has no attribute 'Engin'"):
        novainfer.Engin  # noqa: B018


def test_importing_the_names_loads_neither_torch_nor_transformers() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers', 'safetensors', 'huggingface_hub'}"
    code = f"import sys; from novainfer import *; print(sorted({heavy} & set(sys.modules)))"
    assert python(code) == "[]"


def test_importing_the_package_alone_loads_nothing_but_itself() -> None:
    code = "import sys; import novainfer; print(sorted(m for m in sys.modules if m.startswith('novainfer.')))"
    assert python(code) == "[]"


def test_importing_leaves_the_process_as_it_was() -> None:
    code = """
import asyncio, signal, threading
before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}, asyncio.get_event_loop_policy()
from novainfer import *
after = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}, asyncio.get_event_loop_policy()
print(before == after, threading.active_count())
"""
    assert python(code) == "True 1"


def test_each_error_knows_its_status_type_and_code() -> None:
    def tree(kind: type[novainfer.NovaInferError]) -> list[type[novainfer.NovaInferError]]:
        return [kind, *(leaf for child in kind.__subclasses__() for leaf in tree(child))]

    # The server has leaves of its own, which are there when its tests have run in this process.
    found = [kind for kind in tree(novainfer.NovaInferError) if kind.__module__ == "novainfer.fsm.messages.errors"]
    assert {kind.__name__ for kind in found} <= set(SURFACE)
    codes = [kind.code for kind in found if not set(kind.__subclasses__()) & set(found)]
    assert len(codes) == len(set(codes)), "two errors cannot be told apart"
    assert all(400 <= kind.status < 600 and kind.type for kind in found)
