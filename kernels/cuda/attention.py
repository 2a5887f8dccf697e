"""Paged attention on a GPU: decode with split contexts, causal prefill, and the KV cache that both read."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from novainfer.fsm.messages.mode import AUTO
from novainfer.kernels.cuda.jit import attention as jit
from novainfer.kernels.cuda.language import can_compute_on, element
from novainfer.kernels.cuda.variant import Config, Variant
from novainfer.kernels.ops import kv_cache
from novainfer.kernels.ops.attention import TorchAttention
from novainfer.kernels.ops.registry import AttentionShape
from novainfer.kernels.step import StepTensors

__all__ = ["TritonAttention", "TritonInvariantAttention", "variants"]

HEAD_DIM_MAX = 128  # the accumulators of a larger one do not fit the registers
GROUP_MAX = 64  # query heads of a key head: all of them are rows of one tile
PROCESSORS_INTERPRETED = 4  # programs come one after the other: contexts are split, but not for a whole GPU
SHARED_BYTES_MAX = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # of a block; what is not 9.x or 10.x has 99 KiB
# Contexts are split where programs would leave processors idle: this share of them is enough for the bandwidth. And
# where one may be so long that its program is still at it when all others have ended: it takes some 10 us for so many
# tokens, five times what a merge costs.
BUSY = 0.75
ALONE_TOKENS_MAX = 4096
PROGRAMS_PER_PROCESSOR = 3  # as many are there at once: more would wait for each other
SPLITS_MAX = 128
VERIFY_ROWS = 64  # of the tile that verifies drafts: query rows times the heads of a group
VERIFY_QUERIES_MAX = 16
INVARIANT_SPLIT = 256  # tokens
INVARIANT_SCRATCH_BYTES_MAX = 64 * 1024 * 1024  # of the parts of contexts; above it programs do not share a context


@functools.cache
def _generation(device: torch.device) -> int:
    """Which of the GPUs that constants are chosen for this one is like."""
    if device.type != "cuda":
        return 90
    major, _ = torch.cuda.get_device_capability(device)
    return {9: 90, 10: 100}.get(major, 80)


@functools.cache
def _num_processors(device: torch.device) -> int:
    """Streaming multiprocessors."""
    if device.type != "cuda":
        return PROCESSORS_INTERPRETED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the constants of a launch depend on."""

    generation: int
    dtype: torch.dtype  # of queries and output
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str = AUTO
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
            "QUANTISED": self.kv_dtype != AUTO,
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
    # Where sm_80 verifies, and where sm_100 keeps fp16's sums in units (see `_walk`), more would spill.
    is_in_units = kind.kv_dtype != AUTO and kind.dtype == torch.float16 and kind.padded_dim == 128
    if (verifies and kind.generation == 80) or (is_in_units and kind.generation == 100):
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
        # All registers of a processor are one program's; on sm_80 the accumulators leave room for 32 tokens, elsewhere
        # what is masked on both sides, or widened, for 64.
        is_plain = kind.kv_dtype == AUTO and not kind.is_windowed
        block_n, num_stages = (32, 5) if kind.generation == 80 else (128 if is_plain else 64, 3)
    elif kind.generation == 100:
        block_n, num_stages = 128 if kind.padded_dim == 64 and kind.kv_dtype == AUTO else 64, 3
    elif kind.padded_dim < 64 and kind.generation == 80:
        num_stages = 3
    constants = kind.constants | {"BLOCK_M": block_m, "BLOCK_N": block_n, "QUERIES_MAX": 1}
    return Config(constants, num_warps=8, num_stages=num_stages)


@functools.cache
def _invariant_config(kind: _Kind) -> Config:
    if kind.dtype == torch.float32:
        num_warps = 4 if kind.padded_dim == 64 else 8
        block_m, block_n, num_stages = max(32, _rows(kind.group, 1)), 16, 2
    else:
        # The least that each generation's own matrix instructions take, since most of it is empty in a decode.
        # Twice the accumulators want twice the threads where they are wide.
        block_m, block_n, num_warps, num_stages = 64, 64, 4, 3
        if kind.padded_dim == 128:
            num_warps = 8
        if kind.generation == 80:
            block_n = 32
    constants = kind.constants | {"BLOCK_M": block_m, "BLOCK_N": block_n, "SPLIT": INVARIANT_SPLIT}
    return Config(constants, num_warps=num_warps, num_stages=num_stages)


@functools.cache
def _invariant_merge_config(kind: _Kind) -> Config:
    config = _invariant_config(kind).constants
    constants = {name: config[name] for name in ("HEAD_DIM", "PADDED_DIM", "SPLIT", "WINDOWED")}
    return Config(constants | {"NUM_HEADS": kind.num_heads}, num_warps=1, num_stages=1)


def _num_splits(programs: int, processors: int, context_max: int) -> int:
    """Into how many parts each context is cut for so many programs, where none is longer than `context_max` tokens."""
    if programs > BUSY * processors and context_max <= ALONE_TOKENS_MAX:
        return 1
    return max(1, min(SPLITS_MAX, PROGRAMS_PER_PROCESSOR * processors // programs))


def _context_max(step: StepTensors, block_size: int, window: int) -> int:
    """No row of the step looks at more tokens; a captured step is launched again with other contexts."""
    bound = step.block_tables.shape[1] * block_size if step.bucket else step.max_context_len
    return min(bound, window + VERIFY_QUERIES_MAX) if window else bound


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
        if shape.kv_dtype == "fp8":
            parts = (*(part.view(torch.float8_e4m3fn) for part in parts[:2]), *parts[2:])
        nothing = [(None, None)] * shape.num_layers
        scales = list(zip(parts[2].unbind(0), parts[3].unbind(0), strict=True)) if parts[2:] else nothing
        self._layers = [
            {"keys": keys, "values": values, "key_scales": of_keys, "value_scales": of_values}
            for keys, values, (of_keys, of_values) in zip(parts[0].unbind(0), parts[1].unbind(0), scales, strict=True)
        ]
        self._generation = _generation(parts[0].device)
        self._num_processors = _num_processors(parts[0].device)
        self._kinds: dict[tuple[torch.dtype, bool], _Kind] = {}
        self._no_parts = _parts(parts[0].device, 0, shape.num_heads, 0, 0)

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
        if shape.kv_dtype == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            return "this GPU has no fp8"
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
        config = _write_config(shape.num_kv_heads, shape.head_dim, shape.kv_dtype)
        jit.write[len(key), shape.num_kv_heads](
            key, value, slot_mapping, key_stride=key.stride(0), value_stride=value.stride(0),
            **self._layers[layer], **config.arguments,
        )  # fmt: skip

    def attend(self, layer: int, query: Tensor, step: StepTensors, scale: float, window: int | None = None) -> Tensor:
        """Causal attention of each sequence's last tokens over its context -> [T, num_heads * head_dim]."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        arguments = {
            **self._layers[layer],
            "query": query,
            "block_tables": step.block_tables,
            "query_start": step.query_start,
            "context_lens": step.context_lens,
            "out": out,
            "query_stride": query.stride(0),
            "table_stride": step.block_tables.stride(0),
            "scale_log2e": scale * math.log2(math.e),
            "window": window or 0,
        }
        self._launch(self._kind(query.dtype, is_windowed=window is not None), step, arguments)
        return out.flatten(1)

    def _kind(self, dtype: torch.dtype, *, is_windowed: bool) -> _Kind:
        kind = self._kinds.get((dtype, is_windowed))
        if kind is None:
            shape = self.shape
            kind = self._kinds[dtype, is_windowed] = _Kind(
                self._generation, dtype, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size,
                shape.kv_dtype, is_windowed,
            )  # fmt: skip
        return kind

    def _launch(self, kind: _Kind, step: StepTensors, arguments: dict[str, Any]) -> None:
        num_seqs, verify_queries = len(step.context_lens), _verify_queries(kind)
        verifies = 1 < step.max_query_len <= verify_queries
        if verifies or step.min_query_len == 1:
            context_max = _context_max(step, kind.block_size, arguments["window"])
            num_splits = _num_splits(num_seqs * kind.num_kv_heads, self._num_processors, context_max)
            self._decode(kind, num_seqs, num_splits, arguments, verifies=verifies)
        if step.max_query_len > 1 and not verifies:
            config = _prefill_config(kind)
            grid = (_num_tiles(kind, config, arguments["query"], num_seqs),)
            jit.prefill[grid](**arguments, num_seqs=num_seqs, **config.arguments)

    def _room(self, kind: _Kind, out: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
        """For what programs that share contexts leave; there is none for 0 splits."""
        if not num_splits:
            return self._no_parts
        return _parts(out.device, len(out), kind.num_heads, num_splits, kind.padded_dim)

    def _decode(
        self, kind: _Kind, num_seqs: int, num_splits: int, arguments: dict[str, Any], *, verifies: bool
    ) -> None:
        config, out = _decode_config(kind, verifies=verifies), arguments["out"]
        sums, stats = self._room(kind, out, num_splits if num_splits > 1 else 0)
        jit.decode[kind.num_kv_heads, num_seqs, num_splits](
            **arguments, sums=sums, stats=stats, num_splits=num_splits, **config.arguments
        )
        if num_splits > 1:
            config = _merge_config(kind, verifies=verifies)
            jit.merge[kind.num_heads, num_seqs, config.constants["QUERIES_MAX"]](
                out, sums, stats, arguments["query_start"], arguments["context_lens"], num_splits, arguments["window"],
                **config.arguments,
            )  # fmt: skip


class TritonInvariantAttention(TritonAttention):
    """A row has the same bits in every step: one tile for rows of all sorts, contexts cut at fixed tokens.

    Whether one program walks over a whole context or each over a part of it changes nothing in the result, and is
    chosen by the number of programs alone.
    """

    name: ClassVar[str] = "triton-invariant"
    row_invariant: ClassVar[bool] = True

    def _launch(self, kind: _Kind, step: StepTensors, arguments: dict[str, Any]) -> None:
        config, out, num_seqs = _invariant_config(kind), arguments["out"], len(step.context_lens)
        num_tiles = _num_tiles(kind, config, out, num_seqs)
        num_splits = -(
            -_context_max(step, kind.block_size, 0) // INVARIANT_SPLIT
        )  # by where they begin: no window counts
        is_busy = num_tiles > BUSY * self._num_processors
        scratch_bytes = out.shape[0] * kind.num_heads * num_splits * (kind.padded_dim + 2) * 4
        if num_splits <= 1 or is_busy or scratch_bytes > INVARIANT_SCRATCH_BYTES_MAX:
            num_splits = 0
        sums, stats = self._room(kind, out, num_splits)
        jit.invariant[num_tiles, max(1, num_splits)](
            **arguments, sums=sums, stats=stats, num_seqs=num_seqs, num_splits=num_splits, **config.arguments
        )
        if num_splits:
            config = _invariant_merge_config(kind)
            jit.merge_invariant[kind.num_heads, num_seqs, step.max_query_len](
                out, sums, stats, arguments["query_start"], arguments["context_lens"], num_splits, arguments["window"],
                **config.arguments,
            )  # fmt: skip


def _num_tiles(kind: _Kind, config: Config, query: Tensor, num_seqs: int) -> int:
    """Programs of a grid of tiles of all sequences; see `_sequence` in jit/attention.py."""
    rows: int = config.constants["BLOCK_M"] // kind.group
    return (len(query) // rows + num_seqs) * kind.num_kv_heads


def _parts(
    device: torch.device, num_rows: int, num_heads: int, num_splits: int, padded_dim: int
) -> tuple[Tensor, Tensor]:
    """Room for what programs that share contexts leave: see `_put_part` in jit/attention.py.

    None of it for 0 rows, but of the same dtype: of another one Triton would compile the function again.
    """
    sums = torch.empty((num_rows, num_heads, num_splits, padded_dim), dtype=torch.float32, device=device)
    return sums, sums.new_empty((num_rows, num_heads, num_splits, 2))


@functools.cache
def _write_config(num_kv_heads: int, head_dim: int, kv_dtype: str) -> Config:
    constants = {
        "LARGEST": kv_cache.LARGEST.get(kv_dtype),
        "ROUNDS": kv_dtype == "int8",
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
        needs_own_mma=config.constants.get("BLOCK_M", 0) >= 64 and kind.dtype != torch.float32,
        shared_bytes_max=SHARED_BYTES_MAX[kind.generation],
    )


def variants(capability: int) -> Iterator[Variant]:
    """What is launched for the models and settings that people use."""

    def kind(model: int, dtype: torch.dtype = torch.bfloat16, block_size: int = 16, **more: Any) -> _Kind:
        heads, kv_heads, dim = MODELS[model]
        return _Kind(capability, dtype, heads, kv_heads, dim, block_size, **more)

    for model in range(len(MODELS)):
        yield from _variants_of(kind(model))
    for model in (0, 2):
        yield from _variants_of(kind(model, torch.float16))
        for block_size in (32, 128):
            yield from _variants_of(kind(model, block_size=block_size), verifies=(False,))
        yield from _variants_of(kind(model, is_windowed=True))
        for kv_dtype in ("int8", "fp8") if capability > 80 else ("int8",):
            yield from _variants_of(kind(model, kv_dtype=kv_dtype))
        yield from _variants_of(kind(model, torch.float16, kv_dtype="int8"))
    for model in (0, 2, 5):
        yield from _variants_of(kind(model, torch.float32), verifies=(False,))


def _variants_of(kind: _Kind, verifies: tuple[bool, ...] = (False, True)) -> Iterator[Variant]:
    name = element(kind.dtype)
    cell = {AUTO: name, "int8": "i8", "fp8": "fp8e4nv"}[kind.kv_dtype]
    pointers = {
        **dict.fromkeys(("query", "out", "key", "value"), f"*{name}"),
        **dict.fromkeys(("keys", "values"), f"*{cell}"),
        **dict.fromkeys(("block_tables", "query_start", "context_lens"), "*i32"),
        **dict.fromkeys(("sums", "stats"), "*fp32"),
        "slot_mapping": "*i64",
    }
    if kind.kv_dtype != AUTO:
        pointers |= {"key_scales": "*fp32", "value_scales": "*fp32"}
    label = f"{name} {kind.num_heads}/{kind.num_kv_heads} d{kind.head_dim} block {kind.block_size}"
    label += f" kv {kind.kv_dtype}" if kind.kv_dtype != AUTO else ""
    label += " windowed" if kind.is_windowed else ""
    for verify in verifies:
        what = "verify" if verify else "decode"
        yield _variant(f"attention {what} {label}", jit.decode, kind, _decode_config(kind, verifies=verify), pointers)
        config = _merge_config(kind, verifies=verify)
        yield _variant(f"attention {what} merge {label}", jit.merge, kind, config, pointers)
    yield _variant(f"attention prefill {label}", jit.prefill, kind, _prefill_config(kind), pointers)
    yield _variant(f"attention invariant {label}", jit.invariant, kind, _invariant_config(kind), pointers)
    config = _invariant_merge_config(kind)
    yield _variant(f"attention invariant merge {label}", jit.merge_invariant, kind, config, pointers)
    if not kind.is_windowed:
        config = _write_config(kind.num_kv_heads, kind.head_dim, kind.kv_dtype)
        yield _variant(f"attention write {label}", jit.write, kind, config, pointers)
