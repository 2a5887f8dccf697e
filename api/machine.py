"""What this machine has and can do, looked at without starting a server: `novainfer doctor` tells it.

Each function looks at one thing and raises nothing: what cannot be read is None. The exceptions are `needs_of` and
`try_kernels`, which say in one sentence why not.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from novainfer.actors.device.location import DEMO_MODEL, SHIPPED, ModelLocation
from novainfer.config import EngineConfig
from novainfer.fsm.messages.errors import ModelLoadError
from novainfer.fsm.messages.mode import UNQUANTIZED
from novainfer.fsm.messages.params import SamplingParams

PROGRAM_TIMEOUT_S = 20.0  # of a compiler's or a driver's program that says what it is; a cold disk is slow
TRIED_TOKENS = 32
TRIED_BLOCKS = 256  # of 16 tokens: the demo model's context twice
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
WEIGHT_BITS = {"int8": 8, "fp8": 8, "int4": 4.5}  # an element's: 4 bits and a scale of its group
SCALE_BYTES = 8  # of a token's keys and values in one head, where they are kept in a byte each


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU: `num_usable` is by affinity, `granted` by a container's quota, rounded up.

    `levels` are the instruction sets that native kernels can use here, best first, and `best_level` that of the CPU,
    whatever `NOVAINFER_ISA` allows.
    """

    model: str
    machine: str
    num_cpus: int
    num_usable: int
    granted: int | None
    levels: tuple[str, ...]
    best_level: str | None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The host's memory in bytes: what there is, what is free, and the limit of the container, if it has one."""

    total_bytes: int
    free_bytes: int
    limit_bytes: int | None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, as its driver tells of it; memory in MiB."""

    name: str
    memory_mib: int
    free_mib: int
    driver: str


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What a model needs, in bytes, worked out from the headers of its files."""

    name: str
    architecture: str
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """How the demo model ran, in a process of its own: which kernels passed their self-tests, and how fast it was."""

    dtype: str
    kernels: dict[str, str]
    failed_kernels: dict[str, str]
    num_threads: int
    start_s: float
    tokens_per_s: float


def cpu() -> Cpu:
    """The CPU and the instruction sets of the native kernels; raises `ModelLoadError` for a bad `NOVAINFER_ISA`."""
    from novainfer.kernels.cpu.levels import LEVELS, cpu_flags, levels
    from novainfer.kernels.errors import LoadError
    from novainfer.kernels.threads import granted_cpus

    flags = cpu_flags()
    try:
        usable = tuple(level.name for level in levels())
    except LoadError as error:
        raise ModelLoadError(str(error)) from None
    num_cpus = os.cpu_count() or 1
    return Cpu(
        model=_cpu_model(),
        machine=platform.machine(),
        num_cpus=num_cpus,
        num_usable=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_cpus,
        granted=granted_cpus(),
        levels=usable,
        best_level=next((level.name for level in LEVELS if level.features <= flags), None),
    )


def memory() -> Memory:
    """The host's memory."""
    import torch

    from novainfer.kernels.memory import free_bytes

    return Memory(
        total_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        free_bytes=free_bytes(torch.device("cpu")),
        limit_bytes=_limit_bytes(),
    )


def native_folders() -> tuple[list[str], Path]:
    """The libraries of native kernels that came with the wheel, and the folder for those that are compiled here."""
    from novainfer.kernels.cpu.build import cache_dir, prebuilt_dir

    return sorted(path.name for path in prebuilt_dir().glob("*.so")), cache_dir()


def compiler() -> tuple[str, str | None]:
    """The C++ compiler that would be used, and what it says of its version; None where it cannot be run."""
    name = os.environ.get("CXX") or "g++"
    return name, _first_line(name, "--version")


def node() -> str | None:
    """The version of Node; None where there is none."""
    return _first_line("node", "--version")


def torch_version() -> str | None:
    """The installed torch, as `2.13.0+cpu`; None where there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def gpus() -> list[Gpu]:
    """The GPUs that NVIDIA's driver knows of."""
    names = "name,memory.total,memory.free,driver_version"
    text = _output("nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader,nounits")
    found = []
    for line in (text or "").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[1].isdigit() and parts[2].isdigit():
            found.append(Gpu(name=parts[0], memory_mib=int(parts[1]), free_mib=int(parts[2]), driver=parts[3]))
    return found


def needs_of(config: EngineConfig) -> Needs:
    """What the configured model needs; raises `ModelLoadError`, also for a model of the hub that is not here yet."""
    from novainfer.kernels.errors import LoadError
    from novainfer.kernels.models.registry import read_config
    from novainfer.kernels.weights.header import check_weights, read_entries, tensor_shapes

    path = _folder(config.model)
    try:
        check_weights(path)
        model = read_config(path)
        dtype = config.dtype if config.dtype != "auto" else model.dtype or "float32"
        scheme = read_entries(path)[1]
    except LoadError as error:
        raise ModelLoadError(str(error), param="model") from None
    element_bytes = ELEMENT_BYTES[dtype]
    num_parameters = sum(_product(shape) for shape in tensor_shapes(model).values())
    if config.quantization not in (None, UNQUANTIZED):
        weight_bytes = int(num_parameters * WEIGHT_BITS[config.quantization] / 8)
    elif scheme is not None:  # it is kept in the codes that it was stored in
        weight_bytes = _weight_file_bytes(path)
    else:
        weight_bytes = num_parameters * element_bytes
    heads = model.num_layers * model.num_kv_heads
    cells_bytes = model.head_dim * (element_bytes if config.kv_cache_dtype == "auto" else 1) * 2
    scales_bytes = 0 if config.kv_cache_dtype == "auto" else SCALE_BYTES
    return Needs(
        name=str(config.model),
        architecture=model.architecture,
        dtype=dtype,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=heads * (cells_bytes + scales_bytes),
        max_model_len=config.max_model_len or model.max_position_embeddings,
    )


async def try_kernels(config: EngineConfig, dtype: str) -> Trial:
    """Run the demo model in `dtype` as `config` would run its own; raises `NovaInferError` when it does not run.

    In a process of its own: kernels that end their process end that one.
    """
    from novainfer.engine import Engine

    tried = msgspec.structs.replace(
        EngineConfig(),
        model=DEMO_MODEL,
        dtype=dtype,
        device=config.device,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        kv_cache_capacity_mode="fixed",
        num_kv_blocks=TRIED_BLOCKS,
        num_threads=config.num_threads,
        native=config.native,
        attention_backend=config.attention_backend,
        batch_invariant=config.batch_invariant,
        max_num_seqs=4,
        worker="process",
        recorder=False,
    )
    began_s = time.perf_counter()
    async with Engine(tried) as engine:
        start_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=TRIED_TOKENS, ignore_eos=True)
        async for _ in engine.generate("Once upon a time", params):
            pass
        info = engine.model_info
        return Trial(
            dtype=info.dtype,
            kernels=info.kernels,
            failed_kernels=info.failed_kernels,
            num_threads=info.num_threads,
            start_s=start_s,
            tokens_per_s=TRIED_TOKENS / (time.perf_counter() - began_s),
        )


def _folder(name: str | Path) -> Path:
    """Where a model lies on this disk; raises `ModelLoadError`. Nothing is fetched."""
    from novainfer.kernels.weights.hub import is_hub_id

    if not is_hub_id(name) or name in SHIPPED:
        return ModelLocation(name).path()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except LocalEntryNotFoundError:
        message = f"model {name} is not in the local cache of the hub: it is fetched at its first start"
        raise ModelLoadError(message, param="model") from None


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def _weight_file_bytes(path: Path) -> int:
    from novainfer.kernels.models.folder import weight_files

    return sum(file.stat().st_size for file in weight_files(path))


def _cpu_model() -> str:
    text = _read(Path("/proc/cpuinfo")) or ""
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _limit_bytes() -> int | None:
    text = (_read(Path("/sys/fs/cgroup/memory.max")) or "max").strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _first_line(*command: str) -> str | None:
    text = _output(*command)
    return text.strip().splitlines()[0] if text and text.strip() else None


def _output(*command: str) -> str | None:
    """What a program prints; None where it is not there, fails or hangs."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
