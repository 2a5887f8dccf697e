"""Paged attention on a GPU: decode with split contexts, causal prefill, and the KV cache that both read."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from novainfer.kernels.cuda.jit import attention as jit
from novainfer.kernels.cuda.language import can_compute_on, element
from novainfer.kernels.cuda.variant import Config, Variant
from novainfer.kernels.ops.attention import TorchAttention
from novainfer.kernels.ops.registry import AttentionShape
from novainfer.kernels.step import StepTensors

__all__ = ["TritonAttention", "variants"]

HEAD_DIM_MAX = 128  # the accumulators of a larger one do not fit the registers
GROUP_MAX = 64  # query heads of a key head: all of them are rows of one tile
PROCESSORS = {80: 108, 90: 132, 100: 148}  # streaming multiprocessors of an A100, an H100 or H200, a B200
SHARED_BYTES_MAX = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # of a block; what is not 9.x or 10.x has 99 KiB
# A sequence is split where programs would leave processors idle: this share of them is enough for the bandwidth.
BUSY = 0.75
SPLITS_MAX = 128
VERIFY_ROWS = 64  # of the tile that verifies drafts: query rows times the heads of a group
VERIFY_QUERIES_MAX = 16


@functools.cache
def _generation(device: torch.device) -> int:
    """Which of the GPUs that constants are chosen for this one is like."""
    if device.type != "cuda":
        return 90
    major, _ = torch.cuda.get_device_capability(device)
    return {9: 90, 10: 100}.get(major, 80)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the constants of a launch depend on."""

    generation: int
    dtype: torch.dtype  # of queries and output
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    is_quantised: bool = False
    is_windowed: bool = False

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """Columns of a tile: a power of two, and as many as a matrix instruction multiplies at least."""
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @property
    def constants(self) -> dict[str, Any]:
        """Those that all functions have."""
        return {
            "GROUP": self.group,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "PADDED_DIM": self.padded_dim,
            "BLOCK_SIZE": self.block_size,
            "WINDOWED": self.is_windowed,
            "QUANTISED": self.is_quantised,
        }


def _rows(group: int, queries: int) -> int:
    return max(16, 1 << (group * queries - 1).bit_length())


def _verify_queries(kind: _Kind) -> int:
    """Query rows of a sequence that the verifying tile holds; 1: there is none, they go as chunks do."""
    if kind.dtype == torch.float32:  # without tensor cores such a tile has no registers to lie in
        return 1
    return min(max(1, VERIFY_ROWS // kind.group), VERIFY_QUERIES_MAX)


@functools.cache
def _decode_config(kind: _Kind, *, verifies: bool) -> Config:
    queries = _verify_queries(kind) if verifies else 1
    wide = kind.dtype == torch.float32
    # 16 KiB of keys a tile. Loads depend on a load, of the block table: 5 stages keep two tiles of keys and values in
    # flight, 64 KiB, more than the 26 KiB that a processor's share of the bandwidth takes in one latency.
    block_n = min(128, (2048 if wide else 8192) // kind.padded_dim)
    if verifies and kind.generation == 80:
        block_n = min(32, block_n)
    constants = kind.constants | {
        "BLOCK_M": _rows(kind.group, queries),
        "BLOCK_N": block_n,
        "QUERIES_MAX": queries,
        "TILES_MIN": 1,
    }
    return Config(constants, num_warps=4, num_stages=3 if wide else 5)


@functools.cache
def _merge_config(kind: _Kind, *, verifies: bool) -> Config:
    decode = _decode_config(kind, verifies=verifies).constants
    names = ("HEAD_DIM", "PADDED_DIM", "BLOCK_N", "QUERIES_MAX", "TILES_MIN", "WINDOWED")
    constants = {name: decode[name] for name in names}
    return Config(constants | {"NUM_HEADS": kind.num_heads, "SPLITS_AT_ONCE": 16}, num_warps=4, num_stages=1)


@functools.cache
def _prefill_config(kind: _Kind) -> Config:
    block_m, block_n, num_stages = 128, 64, 5
    if kind.dtype == torch.float32:
        block_m, block_n, num_stages = max(32, _rows(kind.group, 1)), 16, 2
    elif kind.padded_dim == 128:
        # All registers of a processor are one program's; on sm_80 the accumulators leave room for 32 tokens.
        block_n, num_stages = (32, 5) if kind.generation == 80 else (128, 3)
    elif kind.padded_dim < 64 and kind.generation == 80:
        num_stages = 3
    constants = kind.constants | {"BLOCK_M": block_m, "BLOCK_N": block_n, "QUERIES_MAX": 1}
    return Config(constants, num_warps=8, num_stages=num_stages)


def _num_splits(kind: _Kind, num_seqs: int) -> int:
    programs, processors = num_seqs * kind.num_kv_heads, PROCESSORS[kind.generation]
    if programs > BUSY * processors:
        return 1
    return min(SPLITS_MAX, 2 * processors // programs)


class TritonAttention:
    """One launch for rows that decode, one for chunks: what a step has none of is not launched.

    Rows that decode, and drafts with the row before them, are one tile of query rows and heads; where there are few
    sequences, programs share a context, and a second launch puts their parts together. A tile of a chunk holds as many
    rows as fit with all heads of a group. Nothing is read from the device on the host, and all shapes follow from the
    step's: steps can be captured. A context of 0 tokens gives zeros, a slot below 0 is not written.
    """

    name: ClassVar[str] = "triton"
    row_invariant: ClassVar[bool] = False
    layout: ClassVar[str] = TorchAttention.layout

    def __init__(self, shape: AttentionShape, parts: tuple[Tensor, ...]) -> None:
        self.shape = shape
        self.parts = parts  # as `TorchAttention` has them
        self._layers = list(zip(*(part.unbind(0) for part in parts), strict=True))
        self._generation = _generation(parts[0].device)

    @classmethod
    def refuses(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when this geometry can be served; else the reason."""
        if shape.num_heads % shape.num_kv_heads:
            return f"{shape.num_heads} heads cannot share {shape.num_kv_heads} key heads evenly"
        if shape.head_dim > HEAD_DIM_MAX:
            return f"head_dim must be at most {HEAD_DIM_MAX}, not {shape.head_dim}"
        if shape.num_heads // shape.num_kv_heads > GROUP_MAX:
            return f"at most {GROUP_MAX} heads can share a key head, not {shape.num_heads // shape.num_kv_heads}"
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"computes in bfloat16, float16 and float32, not in {dtype}"
        return can_compute_on(device)

    @classmethod
    def bytes_per_block(cls, shape: AttentionShape, dtype: torch.dtype) -> int:
        """Keys and values of one block in all layers."""
        return TorchAttention.bytes_per_block(shape, dtype)

    @classmethod
    def allocate(cls, shape: AttentionShape, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A cache of zeros."""
        return cls(shape, TorchAttention.allocate(shape, num_blocks, dtype, device).parts)

    @classmethod
    def over(cls, shape: AttentionShape, parts: tuple[Tensor, ...]) -> Self:
        """On another backend's cache."""
        return cls(shape, parts)

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store rows [T, num_kv_heads, head_dim] at their slots; a slot below 0 is none."""
        shape = self.shape
        config = _write_config(shape.num_kv_heads, shape.head_dim)
        keys, values = self._layers[layer]
        jit.write[shape.num_kv_heads, len(key)](
            key, value, slot_mapping, keys, values, key.stride(0), value.stride(0), **config.arguments
        )

    def attend(self, layer: int, query: Tensor, step: StepTensors, scale: float, window: int | None = None) -> Tensor:
        """Causal attention of each sequence's last tokens over its context -> [T, num_heads * head_dim]."""
        shape = self.shape
        kind = _Kind(
            self._generation, query.dtype, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size,
            is_windowed=window is not None,
        )  # fmt: skip
        keys, values = self._layers[layer]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        arguments = {
            "query": query,
            "keys": keys,
            "values": values,
            "key_scales": None,
            "value_scales": None,
            "block_tables": step.block_tables,
            "query_start": step.query_start,
            "context_lens": step.context_lens,
            "out": out,
            "query_stride": query.stride(0),
            "table_stride": step.block_tables.stride(0),
            "scale_log2e": scale * math.log2(math.e),
            "window": window or 0,
        }
        num_seqs = len(step.context_lens)
        verifies = 1 < step.max_query_len <= _verify_queries(kind)
        if verifies or step.min_query_len == 1:
            self._decode(kind, num_seqs, arguments, verifies=verifies)
        if step.max_query_len > 1 and not verifies:
            config = _prefill_config(kind)
            num_tiles = len(query) // (config.constants["BLOCK_M"] // kind.group) + num_seqs
            jit.prefill[(num_tiles * kind.num_kv_heads,)](**arguments, num_seqs=num_seqs, **config.arguments)
        return out.flatten(1)

    @staticmethod
    def _decode(kind: _Kind, num_seqs: int, arguments: dict[str, Any], *, verifies: bool) -> None:
        config, out = _decode_config(kind, verifies=verifies), arguments["out"]
        num_splits = _num_splits(kind, num_seqs)
        sums = stats = out
        if num_splits > 1:
            sums = torch.empty(
                (len(out), kind.num_heads, num_splits, kind.padded_dim), dtype=torch.float32, device=out.device
            )
            stats = torch.empty((len(out), kind.num_heads, num_splits, 2), dtype=torch.float32, device=out.device)
        jit.decode[kind.num_kv_heads, num_seqs, num_splits](
            **arguments, sums=sums, stats=stats, num_splits=num_splits, **config.arguments
        )
        if num_splits > 1:
            config = _merge_config(kind, verifies=verifies)
            jit.merge[kind.num_heads, num_seqs, config.constants["QUERIES_MAX"]](
                out, sums, stats, arguments["query_start"], arguments["context_lens"], num_splits, arguments["window"],
                **config.arguments,
            )  # fmt: skip


@functools.cache
def _write_config(num_kv_heads: int, head_dim: int) -> Config:
    constants = {
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, 1 << (head_dim - 1).bit_length()),
    }
    return Config(constants, num_warps=1, num_stages=1)


# Heads, key heads, head_dim, and the block sizes and dtypes that are compiled: Qwen2.5-0.5B, -1.5B and -7B; Qwen3-0.6B
# and -1.7B, and -4B and -8B. And the demo model.
MODELS = ((14, 2, 64), (12, 2, 128), (28, 4, 128), (16, 8, 128), (32, 8, 128), (6, 2, 32))


def _variant(name: str, function: Any, kind: _Kind, config: Config, pointers: dict[str, str]) -> Variant:
    integers = {"query_stride", "table_stride", "num_seqs", "num_splits", "window", "key_stride", "value_stride"}
    signature = {
        argument: pointers.get(argument) or ("i32" if argument in integers else "fp32")
        for argument in function.arg_names
        if argument in pointers or argument in integers or argument == "scale_log2e"
    }
    missing = {name: None for name in ("key_scales", "value_scales") if name not in pointers}
    missing = {name: None for name in missing if name in function.arg_names}
    return Variant(
        name,
        function,
        signature,
        Config({**config.constants, **missing}, config.num_warps, config.num_stages),
        aligned=frozenset({"query_stride", "key_stride", "value_stride"} & set(function.arg_names)),
        needs_mma="BLOCK_M" in config.constants and kind.dtype != torch.float32,
        shared_bytes_max=SHARED_BYTES_MAX[kind.generation],
    )


def variants(capability: int) -> Iterator[Variant]:
    """What is launched for the models and settings that people use."""

    def kind(model: int, dtype: torch.dtype = torch.bfloat16, block_size: int = 16, **more: bool) -> _Kind:
        heads, kv_heads, dim = MODELS[model]
        return _Kind(capability, dtype, heads, kv_heads, dim, block_size, **more)

    for model in range(len(MODELS)):
        yield from _variants_of(kind(model))
    for model in (0, 2):
        yield from _variants_of(kind(model, torch.float16))
        for block_size in (32, 128):
            yield from _variants_of(kind(model, block_size=block_size), verifies=(False,))
        yield from _variants_of(kind(model, is_windowed=True))
    for model in (0, 2, 5):
        yield from _variants_of(kind(model, torch.float32), verifies=(False,))


def _variants_of(kind: _Kind, verifies: tuple[bool, ...] = (False, True)) -> Iterator[Variant]:
    name = element(kind.dtype)
    pointers = {
        **dict.fromkeys(("query", "keys", "values", "out", "key", "value"), f"*{name}"),
        **dict.fromkeys(("block_tables", "query_start", "context_lens"), "*i32"),
        **dict.fromkeys(("sums", "stats"), "*fp32"),
        "slot_mapping": "*i64",
    }
    label = f"{name} {kind.num_heads}/{kind.num_kv_heads} d{kind.head_dim} block {kind.block_size}"
    label += " windowed" if kind.is_windowed else ""
    for verify in verifies:
        what = "verify" if verify else "decode"
        yield _variant(f"attention {what} {label}", jit.decode, kind, _decode_config(kind, verifies=verify), pointers)
        config = _merge_config(kind, verifies=verify)
        yield _variant(f"attention {what} merge {label}", jit.merge, kind, config, pointers)
    yield _variant(f"attention prefill {label}", jit.prefill, kind, _prefill_config(kind), pointers)
    if not kind.is_windowed:
        config = _write_config(kind.num_kv_heads, kind.head_dim)
        yield _variant(f"attention write {label}", jit.write, kind, config, pointers)
