"""Everything an engine can be told, in one immutable record. Names are vLLM's where vLLM has one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from novainfer.actors.location import DEMO_MODEL
from novainfer.fsm.errors import InvalidParameter
from novainfer.fsm.params import check_types


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine is built; without arguments it serves the demo model on the CPU.

    `model` is a Hugging Face directory, a hub id, or "demo". `max_model_len` (tokens) defaults to the model's own.
    A step computes at most `max_num_batched_tokens` tokens of at most `max_num_seqs` requests; a prompt is
    prefilled in chunks of `prefill_chunk_tokens`. The KV cache holds `num_kv_blocks` blocks of `block_size` tokens
    when `kv_cache_capacity_mode` is "fixed"; "auto" takes what `max_num_seqs` requests can use, within
    `kv_cache_memory_utilization` of the free memory. Admission: at most `max_num_queued_reqs` requests of
    `max_num_queued_tokens` tokens wait.
    """

    model: str | Path = DEMO_MODEL
    tokenizer: str | Path | None = None
    served_model_name: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefill_chunk_tokens: int = 512
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_capacity_mode: Literal["auto", "fixed"] = "auto"
    kv_cache_memory_utilization: float = 0.6
    num_kv_blocks: int | None = None
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = 1_048_576
    num_threads: int | None = None
    native: Literal["0", "1", "require"] | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("model", "tokenizer"):
            value = getattr(self, name)
            if not (isinstance(value, str | Path) and value != "") and not (name == "tokenizer" and value is None):
                raise InvalidParameter(f"{name} must be a folder or a hub id, not {value!r}", param=name)
        positive = ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_tokens", "block_size", "num_threads")
        for name in (*positive, "max_model_len", "num_kv_blocks", "max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameter(f"{name} must be at least 1, not {value}", param=name)
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
