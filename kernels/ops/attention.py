"""Paged attention by torch's scaled_dot_product_attention: any device, any dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from novainfer.kernels.ops import kv_cache
from novainfer.kernels.ops.registry import AttentionShape
from novainfer.kernels.step import StepTensors

__all__ = ["CudnnAttention", "TorchAttention"]

# Elements of keys gathered at once for a group of decoding sequences: bounds the scratch memory (64 MB of bf16).
GATHERED_ELEMENTS_MAX = 32 * 1024 * 1024
# Elements of a chunk's mask (bytes; torch makes floats of them): rows of a long chunk are attended part by part.
MASK_ELEMENTS_MAX = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one query row each, padded to the longest context among them."""

    rows: Tensor  # int64 [n]: their query rows
    blocks: Tensor  # int64 [n * num_blocks]
    mask: Tensor  # bool [n, 1, group, num_blocks * block_size]
    hidden: Tensor  # int64: the tokens of all these blocks, in this order, that no row sees


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence with several query rows."""

    begin: int
    end: int
    blocks: Tensor  # int64 [num_blocks]
    context_len: int


class TorchAttention:
    """Gathers the blocks of each sequence, then one fused attention call.

    Sequences that decode are gathered together, and the heads that share a key head become query rows of that
    head (no copy of keys per query head: 7 to 10 times faster than `enable_gqa` on the CPU).
    """

    name: ClassVar[str] = "torch"
    row_invariant: ClassVar[bool] = False
    layout: ClassVar[str] = "tokens"

    def __init__(self, shape: AttentionShape, parts: tuple[Tensor, ...]) -> None:
        self.shape = shape
        self.parts = parts  # keys and values [num_layers, num_blocks, block_size, num_kv_heads, head_dim], scales
        self._plans: dict[int | None, tuple[list[_Decodes], list[_Chunk]]] = {}  # of a step, by window

    @classmethod
    def refuses(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Takes everything."""
        return None

    @classmethod
    def bytes_per_block(cls, shape: AttentionShape, dtype: torch.dtype) -> int:
        """Keys and values of one block in all layers."""
        return kv_cache.block_bytes(shape, dtype)

    @classmethod
    def allocate(cls, shape: AttentionShape, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A cache of zeros (resident on the CPU only where it was written)."""
        return cls(shape, kv_cache.allocate(shape, num_blocks, dtype, device))

    @classmethod
    def over(cls, shape: AttentionShape, parts: tuple[Tensor, ...]) -> Self:
        """On another backend's cache."""
        return cls(shape, parts)

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store rows [T, num_kv_heads, head_dim] at their slots."""
        for part, rows in zip(self.parts, kv_cache.rows_of(self.shape, key, value), strict=True):
            part[layer].flatten(0, 1).index_copy_(0, slot_mapping, rows)

    def gather(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks (int64 [n]), in that order -> [n * block_size, num_kv_heads, head_dim]."""
        rows = [part[layer].index_select(0, blocks).flatten(0, 1) for part in self.parts]
        return kv_cache.read(self.shape, rows, dtype)

    def attend(self, layer: int, query: Tensor, step: StepTensors, scale: float, window: int | None = None) -> Tensor:
        """Decoding sequences in groups, chunks one by one -> [T, num_heads * head_dim]."""
        if layer == 0:
            self._plans.clear()
        if window not in self._plans:
            self._plans[window] = self._plan(step, window)
        all_decodes, chunks = self._plans[window]
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for decodes in all_decodes:
            n = len(decodes.rows)
            k, v = self.gather(layer, decodes.blocks, query.dtype)
            for x in (k, v):  # a mask is not enough: what an earlier owner of a block left may be infinite or NaN
                x.index_fill_(0, decodes.hidden, 0)
            k, v = (x.reshape(n, -1, shape.num_kv_heads, shape.head_dim) for x in (k, v))
            q = query.index_select(0, decodes.rows).view(n, shape.num_kv_heads, group, shape.head_dim)
            o = scaled_dot_product_attention(
                q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=decodes.mask, scale=scale
            )
            out.index_copy_(0, decodes.rows, o.reshape(n, shape.num_heads, shape.head_dim))
        for chunk in chunks:
            k, v = (x[: chunk.context_len].transpose(0, 1) for x in self.gather(layer, chunk.blocks, query.dtype))
            if query.device.type == "cpu" and not math.isfinite(k.sum() + v.sum()):
                self._attend_rows(chunk, query, k, v, scale, window, out)
            else:
                self._attend_chunk(chunk, query, k, v, scale, window, out)
        return out.flatten(1)

    def _attend_rows(
        self, chunk: _Chunk, query: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, out: Tensor
    ) -> None:
        """The same, each row over what it sees: torch multiplies hidden values by zero, which a NaN survives."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        for row in range(chunk.begin, chunk.end):
            visible = chunk.context_len - chunk.end + row + 1
            seen = slice(0 if window is None else max(0, visible - window), visible)
            q = query[row].view(1, self.shape.num_kv_heads, group, -1)
            o = scaled_dot_product_attention(q, k[None, :, seen], v[None, :, seen], scale=scale)
            out[row] = o.view(self.shape.num_heads, -1)

    def _attend_chunk(
        self, chunk: _Chunk, query: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, out: Tensor
    ) -> None:
        """Rows `chunk.begin` to `chunk.end` of query over k and v [num_kv_heads, context_len, head_dim], into out."""
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        num_rows, context_len = chunk.end - chunk.begin, chunk.context_len
        if num_rows == context_len and (window is None or window >= context_len):
            q = query[chunk.begin : chunk.end].transpose(0, 1)  # [heads, rows, head_dim]
            k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
            o = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale)[0]
            out[chunk.begin : chunk.end] = o.transpose(0, 1)
            return
        step = max(1, MASK_ELEMENTS_MAX // (group * context_len))
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            visible = context_len - num_rows + last  # no row of this part sees further
            positions = torch.arange(visible - (last - first), visible, device=query.device)[:, None]
            begin = 0 if window is None else max(0, visible - (last - first) + 1 - window)
            keys = torch.arange(begin, visible, device=query.device)
            mask = keys <= positions
            if window is not None:
                mask &= keys > positions - window
            q = query[chunk.begin + first : chunk.begin + last].transpose(0, 1)
            q = q.reshape(shape.num_kv_heads, -1, shape.head_dim)
            o = scaled_dot_product_attention(
                q[None],
                k[None, :, begin:visible],
                v[None, :, begin:visible],
                attn_mask=mask.repeat(group, 1),
                scale=scale,
            )
            o = o.view(shape.num_heads, last - first, shape.head_dim)
            out[chunk.begin + first : chunk.begin + last] = o.transpose(0, 1)

    def _plan(self, step: StepTensors, window: int | None) -> tuple[list[_Decodes], list[_Chunk]]:
        """What depends on the step and the window alone, prepared at the first layer of that window."""
        block_tables, query_start, context_lens = step.block_tables, step.query_start, step.context_lens
        shape, device = self.shape, block_tables.device
        group = shape.num_heads // shape.num_kv_heads
        starts, contexts = query_start.tolist(), context_lens.tolist()
        num_blocks = [-(-context // shape.block_size) for context in contexts]
        chunks: list[_Chunk] = []
        decoding: list[int] = []
        for seq, context in enumerate(contexts):
            begin, end = starts[seq], starts[seq + 1]
            if end - begin == 1:
                decoding.append(seq)
                continue
            blocks = block_tables[seq, : num_blocks[seq]].long()
            chunks.append(_Chunk(begin, end, blocks, context))
        decoding.sort(key=contexts.__getitem__)  # equal lengths together: little padding
        all_decodes: list[_Decodes] = []
        per_block = shape.block_size * shape.num_kv_heads * shape.head_dim
        while decoding:
            longest = num_blocks[decoding[-1]]
            count = max(1, min(len(decoding), GATHERED_ELEMENTS_MAX // (longest * per_block)))
            members = decoding[-count:]
            del decoding[-count:]
            seqs = torch.tensor(members, device=device)
            lens = context_lens[seqs]
            rows = query_start[seqs].long()
            needed = (lens + shape.block_size - 1) // shape.block_size
            blocks = block_tables[seqs, :longest].long()
            blocks.masked_fill_(torch.arange(longest, device=device) >= needed[:, None], 0)
            positions = torch.arange(longest * shape.block_size, device=device)
            visible = positions < lens[:, None]
            if window is not None:
                visible &= positions >= lens[:, None] - window
            mask = visible[:, None, None, :].expand(-1, 1, group, -1)
            hidden = (~visible).flatten().nonzero().flatten()
            all_decodes.append(_Decodes(rows, blocks.flatten(), mask, hidden))
        return all_decodes, chunks


class CudnnAttention(TorchAttention):
    """The same, by cuDNN alone: a check on other kernels, and another one to go to."""

    name: ClassVar[str] = "cudnn"

    @classmethod
    def refuses(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when this geometry can be served; else the reason."""
        if device.type != "cuda":
            return f"cuDNN computes on CUDA devices, not on {device.type}"
        return None if dtype in (torch.bfloat16, torch.float16) else f"computes in bfloat16 and float16, not in {dtype}"

    def attend(self, layer: int, query: Tensor, step: StepTensors, scale: float, window: int | None = None) -> Tensor:
        """As `TorchAttention` does it -> [T, num_heads * head_dim]; raises RuntimeError for what cuDNN cannot do."""
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return super().attend(layer, query, step, scale, window)
