"""The peers that are known: how each one is found, what files it reads, and how it is started at its best.

A peer runs in an environment of its own: `--peer name=/path/to/python` (of llama.cpp: its server), or what is installed
beside NovaInfer. Its program is a file of this folder, which needs nothing of NovaInfer.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from novainfer.bench.peers.child import Task
from novainfer.bench.peers.files import make_gguf, make_w4a16, make_w8a8

__all__ = [
    "OURS",
    "PEERS",
    "PRECISIONS",
    "WARM_UPS",
    "Kind",
    "Place",
    "SystemSpec",
    "find_peers",
    "peer_systems",
    "programs",
]

OURS = "novainfer"
PRECISIONS = ("bf16", "int8", "int4")
PACKAGE = "novainfer_peers"  # by which a peer's environment knows this folder
CACHE_GIB = 2  # of keys and values: 40,000 tokens of the largest shape that is compared
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 2048
# What each system answers before anything is timed, as a library and as a server.
WARM_UPS = (
    Task(prompts=[[1] * 16], max_tokens=4),
    Task(prompts=[[2 + number] * 128 for number in range(8)], max_tokens=8),
)
APART_TOKENS_MAX = 131_072  # 1.6 GB of the reference shape's keys and values


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """One system in one precision: what starts it, as a library and as a server, and in which environment."""

    name: str  # as the tables have it
    precision: str
    command: tuple[str, ...]
    environment: Mapping[str, str | None] = field(default_factory=dict)  # None: unset
    server: tuple[str, ...] | None = None  # "{port}" is where it listens


@dataclass(frozen=True, slots=True)
class Place:
    """What is at hand for a run: the model, where forms of it are kept, and how much is asked at once."""

    model_dir: Path
    forms: Path
    max_model_len: int
    max_num_tokens: int  # of all requests at once
    max_requests: int  # at once

    @property
    def options(self) -> dict[str, Any]:
        """What every peer's program is told."""
        return {
            "cache_gib": CACHE_GIB,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "max_model_len": self.max_model_len,
            "max_num_tokens": self.max_num_tokens,
        }

    def gguf(self, kind: str, server: str) -> str:
        """The model as GGUF; llama-quantize lies beside the server."""
        quantize = Path(server).with_name("llama-quantize")
        return str(
            make_gguf(self.model_dir, self.forms / f"{kind}.gguf", kind, quantize if quantize.exists() else None)
        )


@dataclass(frozen=True, slots=True)
class Kind:
    """One peer: its program here, what it is found by, and the form of the model for each precision it has."""

    program: str  # a module of this folder
    module: str | None  # that its Python must have; None: it is a program of its own
    binary: str | None  # its name on the path
    forms: Mapping[str, tuple[str, Callable[[Place, str], str]]]  # precision -> what it is called, how it is made
    server: Callable[[str, str, Place], tuple[str, ...]] | None = None  # (where it is, the model, ...)
    environment: Callable[[str], Mapping[str, str | None]] = lambda _: SPINNING  # (where it is)


# How OpenMP waits: NovaInfer's `passive` halves llama.cpp's rate, and transformers loses most without it.
SPINNING: Mapping[str, str | None] = {"OMP_WAIT_POLICY": None}
PASSIVE: Mapping[str, str | None] = {"OMP_WAIT_POLICY": "passive"}


def _as_it_is(place: Place, _: str) -> str:
    return str(place.model_dir)


def _w8a8(place: Place, _: str) -> str:
    return str(make_w8a8(place.model_dir, place.forms / "w8a8"))


def _w4a16(place: Place, _: str) -> str:
    return str(make_w4a16(place.model_dir, place.forms / "w4a16"))


def _gguf(kind: str) -> Callable[[Place, str], str]:
    return lambda place, where: place.gguf(kind, where)


def cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def _vllm_environment(where: str) -> Mapping[str, str | None]:
    """A thread on each core, where its own choice leaves one core to its scheduler: of two, that is half the machine.

    Its manual asks for tcmalloc and for Intel's OpenMP, which is installed with it: without, its threads wait badly.
    """
    openmp = Path(where).parent.parent / "lib" / "libiomp5.so"
    malloc = ctypes.util.find_library("tcmalloc_minimal")
    preload = [os.environ.get("LD_PRELOAD"), malloc, str(openmp) if openmp.exists() else None]
    return {
        **SPINNING,
        "LD_PRELOAD": ":".join(filter(None, preload)) or None,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores())),
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def _vllm_server(where: str, model: str, place: Place) -> tuple[str, ...]:
    command = (where, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", "{port}")
    sizes = {"--max-model-len": place.max_model_len, "--max-num-seqs": MAX_NUM_SEQS}
    sizes["--max-num-batched-tokens"] = MAX_NUM_BATCHED_TOKENS
    quiet = ("--host", "127.0.0.1", "--uvicorn-log-level", "warning")
    return (*command, *quiet, *(str(word) for item in sizes.items() for word in item))


def _llama_server(where: str, model: str, place: Place) -> tuple[str, ...]:
    threads = str(len(cores()))
    command = (where, "--model", model, "--host", "127.0.0.1", "--port", "{port}", "--no-webui")
    # Each slot with a cache of its own is 5 % faster in a batch, where there is room for as many of the longest.
    apart = place.max_requests * place.max_model_len
    cache = (str(apart),) if apart <= APART_TOKENS_MAX else (str(place.max_num_tokens), "--kv-unified")
    sizes = ("--parallel", str(place.max_requests), "--ctx-size", *cache)
    return (*command, "--threads", threads, "--threads-batch", threads, "--flash-attn", "on", *sizes)


PEERS: Mapping[str, Kind] = {
    "vllm": Kind(
        "run_vllm",
        "vllm",
        None,
        {"bf16": ("bf16", _as_it_is), "int8": ("W8A8", _w8a8), "int4": ("W4A16", _w4a16)},
        _vllm_server,
        _vllm_environment,
    ),
    "openvino": Kind(
        "run_openvino",
        "openvino_genai",
        None,
        # of llama.cpp's mixtures it reads few
        {"bf16": ("F16", _gguf("F16")), "int8": ("Q8_0", _gguf("Q8_0")), "int4": ("Q4_0", _gguf("Q4_0"))},
    ),
    "llama.cpp": Kind(
        "run_llama_cpp",
        None,
        "llama-server",
        {"bf16": ("BF16", _gguf("BF16")), "int8": ("Q8_0", _gguf("Q8_0")), "int4": ("Q4_K_M", _gguf("Q4_K_M"))},
        _llama_server,
    ),
    "transformers": Kind(
        "run_transformers", "transformers", None, {"bf16": ("bf16", _as_it_is)}, environment=lambda _: PASSIVE
    ),
}


def find_peers(given: Mapping[str, str], left_out: Collection[str] = ()) -> dict[str, str]:
    """Where each peer is, but those that are left out: the Python or the program that was given, or what is installed.

    Raises ValueError for a peer that is not known, for one both given and left out, or a path without a program.
    """
    found: dict[str, str] = {}
    if unknown := [name for name in (*given, *left_out) if name not in PEERS]:
        raise ValueError(f"there is no peer {unknown[0]!r}, only {', '.join(PEERS)}")
    if both := [name for name in given if name in left_out]:
        raise ValueError(f"{both[0]} is given by --peer and left out by --no-peer: only one of them can be meant")
    for name, where in given.items():
        if not os.access(where, os.X_OK) or Path(where).is_dir():
            raise ValueError(f"{name}={where}: there is no program at this path")
    for name, kind in PEERS.items():
        if name in left_out:
            continue
        if name in given:
            found[name] = str(Path(given[name]).absolute())  # not resolved: a venv's Python is a link
        elif kind.module is not None and importlib.util.find_spec(kind.module) is not None:
            found[name] = sys.executable
        elif kind.binary is not None and (binary := shutil.which(kind.binary)) is not None:
            found[name] = binary
    return found


def peer_systems(name: str, where: str, precision: str, place: Place, folder: str) -> SystemSpec | None:
    """A peer in one precision, its model made where that must be; None where it has no such precision.

    `folder` is that of `programs`. Raises `FileError` where the model cannot be made as it reads it.
    """
    kind = PEERS[name]
    if precision not in kind.forms:
        return None
    title, make = kind.forms[precision]
    model = make(place, where)
    server = None if kind.server is None else kind.server(where, model, place)
    python = where if kind.module is not None else sys.executable
    options = place.options if kind.module is not None else {"server": server}  # which its program asks
    return SystemSpec(
        name=f"{name} {title}",
        precision=precision,
        command=(python, "-m", f"{PACKAGE}.{kind.program}", model, json.dumps(options)),
        environment={"PYTHONPATH": folder, **kind.environment(where)},
        server=server,
    )


@contextlib.contextmanager
def programs() -> Iterator[str]:
    """A folder that holds this one alone, as a package of its own name: all of NovaInfer that a peer's Python sees."""
    with tempfile.TemporaryDirectory(prefix="novainfer-peers-") as folder:
        # By a file that is there in an installation that links single files, too
        (Path(folder) / PACKAGE).symlink_to(Path(__file__).parent, target_is_directory=True)
        yield folder
