"""Everything an engine can be told, in one immutable record. Names are vLLM's where vLLM has one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec

from novainfer.actors.location import DEMO_MODEL
from novainfer.fsm.errors import InvalidParameter
from novainfer.fsm.mode import QUANTIZATIONS
from novainfer.fsm.params import DURATION_S_MAX, check_types

DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}

# Above these a worker dies as it starts (100,000 threads end in SIGSEGV), memory is taken for what will never run, or a
# number does not fit where it is kept. No machine that is served today needs as much.
AT_MOST = {
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 20,
    "prefill_chunk_tokens": 1 << 20,
    "block_size": 1024,
    "num_threads": 1024,
    "max_model_len": 1 << 31,
    "num_kv_blocks": (1 << 31) - 1,
    "max_num_queued_reqs": 1 << 20,
    "max_num_queued_tokens": 1 << 40,
    "max_num_overflow_reqs": 1 << 20,
    "max_restarts": 1 << 20,
    "swap_space_gib": 1 << 20,
}
# Below these a healthy engine ends its own work, and the first look at a setting is a reader's or a worker's end.
AT_LEAST_S = {
    "step_timeout_s": (1.0, "steps of a healthy worker would count as hung"),
    "heartbeat_timeout_s": (1.0, "a process that waits for its turn on a busy machine would count as lost"),
    "restart_window_s": (1.0, "no losses would come within it, and no number of them would be too many"),
    "ladder_quiet_s": (0.1, "a mode would be left after a step or two"),
    "stall_timeout_s": (0.05, "a reader that falls behind once would end"),
}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine is built; without arguments it serves the demo model on the CPU.

    `model` is a Hugging Face directory, a hub id, or "demo". `max_model_len` (tokens) defaults to the model's own.
    With `generation_config` "auto" requests that say nothing else are sampled as the model's own folder wants it.
    A step computes at most `max_num_batched_tokens` tokens of at most `max_num_seqs` requests; a prompt is
    prefilled in chunks of `prefill_chunk_tokens`. The KV cache holds `num_kv_blocks` blocks of `block_size` tokens
    when `kv_cache_capacity_mode` is "fixed"; "auto" takes what `max_num_seqs` requests can use, within
    `kv_cache_memory_utilization` of the free memory (`gpu_memory_utilization` is another name for it). `dtype` may be
    "half", "float", "fp16", "bf16" or "fp32", too. `quantization` "int8" rounds weights while they are loaded.
    Admission: at most `max_num_queued_reqs` requests of `max_num_queued_tokens` tokens wait; beyond them,
    `max_num_overflow_reqs` that asked to wait may.

    `worker` "process" gives the device a process of its own, which is brought up again when it is lost; with
    `warm_spare` a second one stands by, loaded. It is lost when it has ended, when it was silent for
    `heartbeat_timeout_s` seconds, or when a step took more than `step_timeout_s`; after `max_restarts` losses within
    `restart_window_s` seconds without a step between them, the engine gives up. A thread is never restarted.
    A degraded mode is left after `ladder_quiet_s` seconds without trouble.

    KV blocks of paused and preempted requests are swapped to a pool of `swap_space_gib` GiB of host memory (0: none).
    A request whose reader is slow keeps its KV for `stall_keep_s` seconds and ends after `stall_timeout_s`. `recorder`
    keeps the last messages of every actor; when something goes wrong they are written to a file in `recorder_dir`, for
    `novainfer replay` (None: nothing is written unless `Engine.dump_recorder` asks for it).
    """

    model: str | Path = DEMO_MODEL
    tokenizer: str | Path | None = None
    served_model_name: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16", "half", "fp16", "bf16", "float", "fp32"] = "auto"
    quantization: str | None = None
    generation_config: Literal["auto", "none"] = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefill_chunk_tokens: int = 512
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_capacity_mode: Literal["auto", "fixed"] = "auto"
    kv_cache_memory_utilization: float = 0.6
    gpu_memory_utilization: float | None = None
    num_kv_blocks: int | None = None
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = 1_048_576
    num_threads: int | None = None
    native: Literal["0", "1", "require"] | None = None
    batch_invariant: bool = False
    worker: Literal["thread", "process"] = "thread"
    warm_spare: bool = False
    step_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 5.0
    max_restarts: int = 5
    restart_window_s: float = 60.0
    ladder_quiet_s: float = 60.0
    swap_space_gib: float = 0.0
    stall_keep_s: float = 10.0
    stall_timeout_s: float = 300.0
    max_num_overflow_reqs: int = 1024
    recorder: bool = True
    recorder_dir: str | Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            msgspec.structs.force_setattr(self, "dtype", DTYPES.get(self.dtype, self.dtype))
        check_types(self)
        if self.quantization not in (None, *QUANTIZATIONS):
            offered = ", ".join(map(repr, QUANTIZATIONS))
            raise InvalidParameter(
                f"quantization must be one of {offered}, or None for weights as the checkpoint has them, not "
                f"{self.quantization!r}",
                param="quantization",
            )
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidParameter(f"{name} must be a finite number, not {value}", param=name)
        if self.gpu_memory_utilization is not None:
            self._take_vllms_name(self.gpu_memory_utilization)
        for name in ("model", "tokenizer"):
            value = getattr(self, name)
            if not (is_path(value) and value != "") and not (name == "tokenizer" and value is None):
                raise InvalidParameter(f"{name} must be a folder or a hub id, not {value!r}", param=name)
        if self.recorder_dir is not None and not is_path(self.recorder_dir):
            raise InvalidParameter(f"recorder_dir must be a folder, not {self.recorder_dir!r}", param="recorder_dir")
        positive = ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_tokens", "block_size", "num_threads")
        for name in (*positive, "max_model_len", "num_kv_blocks", "max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameter(f"{name} must be at least 1, not {value}", param=name)
        for name in ("max_restarts", "max_num_overflow_reqs", "swap_space_gib", "stall_keep_s"):
            value = getattr(self, name)
            if value < 0:
                raise InvalidParameter(f"{name} must be at least 0, not {value}", param=name)
        for name, most in AT_MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise InvalidParameter(f"{name} must be at most {most}, not {value}", param=name)
        for name in AT_LEAST_S:
            value = getattr(self, name)
            least, why = AT_LEAST_S[name]
            if value < least:
                raise InvalidParameter(f"{name} must be at least {least:g} s, not {value}: {why}", param=name)
        for name in (*AT_LEAST_S, "stall_keep_s"):
            if (value := getattr(self, name)) > DURATION_S_MAX:
                raise InvalidParameter(f"{name} must be at most {DURATION_S_MAX:.0f} seconds, not {value}", param=name)
        if self.warm_spare and self.worker != "process":
            raise InvalidParameter('warm_spare needs worker "process"', param="warm_spare")
        if not 0 < self.kv_cache_memory_utilization <= 1:
            value = self.kv_cache_memory_utilization
            raise InvalidParameter(
                f"kv_cache_memory_utilization must be more than 0 and at most 1, not {value}",
                param="kv_cache_memory_utilization",
            )
        if self.kv_cache_capacity_mode == "fixed" and self.num_kv_blocks is None:
            raise InvalidParameter('kv_cache_capacity_mode "fixed" needs num_kv_blocks', param="num_kv_blocks")
        if self.kv_cache_capacity_mode == "auto" and self.num_kv_blocks is not None:
            raise InvalidParameter('num_kv_blocks needs kv_cache_capacity_mode "fixed"', param="num_kv_blocks")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise InvalidParameter(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request can decode in one step",
                param="max_num_batched_tokens",
            )

    def _take_vllms_name(self, share: float) -> None:
        """`gpu_memory_utilization` was given: it is read back under its own name."""
        default = type(self).__struct_defaults__[type(self).__struct_fields__.index("kv_cache_memory_utilization")]
        if self.kv_cache_memory_utilization not in (default, share):
            raise InvalidParameter(
                "gpu_memory_utilization is another name for kv_cache_memory_utilization: give one of them",
                param="gpu_memory_utilization",
            )
        msgspec.structs.force_setattr(self, "kv_cache_memory_utilization", share)
        msgspec.structs.force_setattr(self, "gpu_memory_utilization", None)


def is_path(value: object) -> bool:
    """True for what may name a file: no system takes a name that holds a NUL."""
    return isinstance(value, str | Path) and "\0" not in str(value)
