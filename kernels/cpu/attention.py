"""Paged attention over a cache laid out for this CPU's vectors (attention.cpp)."""

from __future__ import annotations

import ctypes
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from novainfer.fsm.messages.mode import AUTO
from novainfer.kernels.cpu.memory import huge_zeros
from novainfer.kernels.cpu.native import CACHE_FORMATS, DTYPE_CODES, CacheDesc, library, num_threads, refuses
from novainfer.kernels.ops.registry import AttentionShape
from novainfer.kernels.step import StepTensors

__all__ = ["AttentionPlan", "NativeAttention"]

# Below this much work one thread ends before a second one would have woken up.
SERIAL_FLOPS_MAX = 2 << 20
SERIAL_WRITE_BYTES_MAX = 64 << 10
INT8_HEAD_DIM_MAX = 512  # HEAD_DIM_MAX in attention_int8.h


def _describe(shape: AttentionShape, num_blocks: int, dtype: torch.dtype, data: int | None = None) -> CacheDesc:
    return CacheDesc(
        data=data,
        num_blocks=num_blocks,
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=DTYPE_CODES[dtype],
        format=CACHE_FORMATS[shape.kv_dtype],
    )


class AttentionPlan(NamedTuple):
    """How a step's attention is divided, in numbers."""

    tiles_read: int  # KV tiles of 256 tokens, for each kv head; those that sequences share count once a reading
    partials_bytes: int  # of working memory, for what parts of a context give


class NativeAttention:
    """The KV cache of all layers in blocks, as it was computed or in INT8, and causal attention over block tables.

    A row's context is cut at fixed positions and put together in ascending order, so its result depends on
    its position and its context alone.
    """

    name: ClassVar[str] = "native"
    row_invariant: ClassVar[bool] = True
    layout: ClassVar[str] = "native"

    def __init__(self, shape: AttentionShape, parts: tuple[Tensor, ...]) -> None:
        (data,) = parts
        self.shape = shape
        self.parts = parts  # one, [num_layers, num_blocks, elements]: kv_cache.h says how a block is laid out
        lib = library()
        # A quantised cache does not say in what its tokens were computed : in whatever comes.
        dtypes = [data.dtype] if shape.kv_dtype == AUTO else list(DTYPE_CODES)
        self.descs = {dtype: _describe(shape, data.shape[1], dtype, data.data_ptr()) for dtype in dtypes}
        per_block = lib.nova_cache_block_bytes(ctypes.byref(self.descs[dtypes[0]]))
        if not data.is_contiguous() or data.nbytes != per_block * data.shape[1]:
            raise ValueError("this memory is not a KV cache of that shape")
        self._write = lib.nova_cache_write
        self._attend = lib.nova_attend
        self._flops_per_pair = 4 * shape.num_heads * shape.head_dim

    @classmethod
    def refuses(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when this geometry can be served; else the reason."""
        if shape.num_heads % shape.num_kv_heads:
            return f"{shape.num_heads} heads cannot share {shape.num_kv_heads} key heads evenly"
        if shape.kv_dtype not in CACHE_FORMATS:
            return f"keeps keys and values as they were computed or in int8, not in {shape.kv_dtype}"
        if shape.kv_dtype != AUTO and shape.head_dim > INT8_HEAD_DIM_MAX:
            return f"sums products of at most {INT8_HEAD_DIM_MAX} cells, not of {shape.head_dim}"
        return refuses(dtype, device)

    @classmethod
    def bytes_per_block(cls, shape: AttentionShape, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, keys and values, padding included."""
        desc = _describe(shape, 1, dtype)
        return int(library().nova_cache_block_bytes(ctypes.byref(desc)))

    @classmethod
    def allocate(cls, shape: AttentionShape, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Reserve the cache once; pages are taken from the system when they are first written."""
        # Zeroed : a product with what was never written must be zero, not NaN.
        data = huge_zeros(cls.bytes_per_block(shape, dtype) * num_blocks)
        kept = dtype if shape.kv_dtype == AUTO else torch.int8
        return cls(shape, (data.view(kept).view(shape.num_layers, num_blocks, -1),))

    @classmethod
    def over(cls, shape: AttentionShape, parts: tuple[Tensor, ...]) -> Self:
        """On another backend's cache."""
        return cls(shape, parts)

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store key and value [T, num_kv_heads, head_dim] at slot_mapping (int64 [T]); slots below 0 are skipped."""
        desc = self.descs.get(key.dtype)
        if desc is None or value.dtype != key.dtype or slot_mapping.dtype != torch.int64:
            raise TypeError(f"keys and values must be {self._dtypes()} and slots int64")
        count = slot_mapping.shape[0]
        threads = 1 if key.numel() * key.itemsize < SERIAL_WRITE_BYTES_MAX else num_threads()
        self._write(
            ctypes.byref(desc), layer, key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
            slot_mapping.data_ptr(), count, threads,
        )  # fmt: skip

    def attend(self, layer: int, query: Tensor, step: StepTensors, scale: float, window: int | None = None) -> Tensor:
        """Causal attention of each sequence's last tokens over its context -> [T, num_heads * head_dim]."""
        tables, starts, lens = step.block_tables, step.query_start, step.context_lens
        desc = self.descs.get(query.dtype)
        if desc is None or not tables.dtype == starts.dtype == lens.dtype == torch.int32:
            raise TypeError(f"queries must be {self._dtypes()}; tables, starts and lengths int32")
        tokens = query.shape[0]
        out = torch.empty((tokens, self.shape.num_heads * self.shape.head_dim), dtype=query.dtype)
        flops = self._flops_per_pair * tokens * step.max_context_len
        threads = 1 if flops < SERIAL_FLOPS_MAX else num_threads()
        self._attend(
            ctypes.byref(desc), layer, query.data_ptr(), query.stride(0), tables.data_ptr(), tables.stride(0),
            starts.data_ptr(), lens.data_ptr(), lens.shape[0], scale, window or 0, out.data_ptr(), threads,
        )  # fmt: skip
        return out

    def plan(self, step: StepTensors, threads: int, window: int | None = None) -> AttentionPlan:
        """What a layer's attention of this step would read and take on so many threads."""
        tables, starts, lens = step.block_tables, step.query_start, step.context_lens
        desc = next(iter(self.descs.values()))
        tiles, partials_bytes = ctypes.c_int64(), ctypes.c_int64()
        library().nova_attend_plan(
            ctypes.byref(desc), tables.data_ptr(), tables.stride(0), starts.data_ptr(), lens.data_ptr(),
            lens.shape[0], window or 0, threads, ctypes.byref(tiles), ctypes.byref(partials_bytes),
        )  # fmt: skip
        return AttentionPlan(tiles.value, partials_bytes.value)

    def _dtypes(self) -> str:
        return " or ".join(map(str, self.descs))
