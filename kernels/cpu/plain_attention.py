"""Attention by torch alone over the native kernels' KV cache, so that the cache stays when they are given up."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from novainfer.fsm.messages.mode import AUTO
from novainfer.kernels.cpu.attention import NativeAttention
from novainfer.kernels.ops import kv_cache
from novainfer.kernels.ops.attention import TorchAttention
from novainfer.kernels.ops.registry import AttentionShape

__all__ = ["NativeLayoutAttention"]

GROUP = 16  # tokens that lie side by side: GROUP in kv_cache.h
SCALE_BYTES = GROUP * torch.float32.itemsize


class NativeLayoutAttention(TorchAttention):
    """`TorchAttention` that unpacks the blocks it gathers. The layout is that of kv_cache.h.

    Of each kv head: keys [groups][units of head_dim][16 tokens][elements of a unit], then values
    [groups][units of 16 tokens][columns][elements of a unit], a unit being 32 bits, or two cells in INT8, where scales
    [16 tokens] precede each group.
    """

    name: ClassVar[str] = "torch-native-layout"
    layout: ClassVar[str] = NativeAttention.layout

    def __init__(self, shape: AttentionShape, parts: tuple[Tensor, ...]) -> None:
        super().__init__(shape, parts)
        (data,) = parts  # [num_layers, num_blocks, elements]
        groups = -(-shape.block_size // GROUP)
        is_quantised = shape.kv_dtype != AUTO
        per_unit = 2 if is_quantised else 4 // data.itemsize
        units = -(-shape.head_dim // per_unit)
        width = -(-shape.head_dim // GROUP) * GROUP
        by_head = data.view(*data.shape[:2], shape.num_kv_heads, -1)
        key_elements = units * GROUP * per_unit
        scales = SCALE_BYTES if is_quantised else 0  # and a cell is one byte
        num_key_elements = groups * (scales + key_elements)
        sizes = (*by_head.shape[:3], groups)
        keys, values = (x.view(*sizes, -1) for x in (by_head[..., :num_key_elements], by_head[..., num_key_elements:]))
        self._keys = keys[..., scales:].view(*sizes, units, GROUP, per_unit)
        self._values = values[..., scales:].view(*sizes, GROUP // per_unit, width, per_unit)
        # [num_layers, num_blocks, heads, groups, 16 tokens], of keys and of values
        self._scales = [part[..., :scales].view(torch.float32) for part in (keys, values)] if is_quantised else []
        self._per_unit = per_unit
        self._padding = units * per_unit - shape.head_dim

    @classmethod
    def refuses(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """What the native kernels can have laid out."""
        return NativeAttention.refuses(shape, dtype, device)

    @classmethod
    def bytes_per_block(cls, shape: AttentionShape, dtype: torch.dtype) -> int:
        """As many as the native kernels take."""
        return NativeAttention.bytes_per_block(shape, dtype)

    @classmethod
    def allocate(cls, shape: AttentionShape, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A cache as the native kernels allocate it."""
        return cls(shape, NativeAttention.allocate(shape, num_blocks, dtype, device).parts)

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store rows [T, num_kv_heads, head_dim] at their slots."""
        block, offset = slot_mapping // self.shape.block_size, slot_mapping % self.shape.block_size
        group, lane = offset // GROUP, offset % GROUP
        key, value, *scales = kv_cache.rows_of(self.shape, key, value)
        if self._padding:
            key = torch.nn.functional.pad(key, (0, self._padding))
        self._keys[layer][block, :, group, :, lane] = key.reshape(*key.shape[:2], -1, self._per_unit)
        unit, element = lane // self._per_unit, lane % self._per_unit
        self._values[layer][block, :, group, unit, : self.shape.head_dim, element] = value
        for part, rows in zip(self._scales, scales, strict=True):
            part[layer][block, :, group, lane] = rows

    def gather(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks (int64 [n]), in that order -> [n * block_size, num_kv_heads, head_dim]."""
        # [n, heads, groups, units, tokens, elements] and [n, heads, groups, units, columns, elements]
        keys = self._keys[layer].index_select(0, blocks).permute(0, 2, 4, 1, 3, 5).flatten(4)
        values = self._values[layer].index_select(0, blocks).permute(0, 2, 3, 5, 1, 4).flatten(2, 3)
        scales = [part[layer].index_select(0, blocks).permute(0, 2, 3, 1) for part in self._scales]
        # [n, groups, 16 tokens, heads, ...] -> [n * block_size, heads, ...], without what pads blocks and heads
        size, dim = self.shape.block_size, self.shape.head_dim
        rows = [x.flatten(1, 2)[:, :size].flatten(0, 1) for x in (keys[..., :dim], values[..., :dim], *scales)]
        return kv_cache.read(self.shape, rows, dtype)
