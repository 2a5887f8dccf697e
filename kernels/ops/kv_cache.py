"""What lies in a KV block: keys and values as they were computed, or in a byte each with a scale per token and head.

Quantised, the largest element of a head's key (or value) is the largest number that a cell can hold, and the scale is
what cells are multiplied with: int8 has 255 even steps, fp8 (e4m3) three bits behind each leading one. Kernels agree on
this to the last bit, so that one can go on with what another has written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from novainfer.fsm.messages.mode import AUTO
from novainfer.kernels.memory import lazy_zeros
from novainfer.kernels.ops.registry import AttentionShape

__all__ = ["LARGEST", "allocate", "block_bytes", "quantise", "read", "rows_of"]

LARGEST = {"int8": 127.0, "fp8": 448.0}  # what a cell holds at most, by the `kv_dtype` of a quantised cache
# fp8's bits lie in the cache as bytes: torch copies no other kind of 8-bit number everywhere.
_STORED = {"int8": torch.int8, "fp8": torch.uint8}


def block_bytes(shape: AttentionShape, dtype: torch.dtype) -> int:
    """What one block takes over all layers, keys and values with their scales."""
    elements = 2 * shape.num_layers * shape.block_size * shape.num_kv_heads
    if shape.kv_dtype == AUTO:
        return elements * shape.head_dim * dtype.itemsize
    return elements * (shape.head_dim + torch.float32.itemsize)


def allocate(shape: AttentionShape, num_blocks: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Keys and values [num_layers, num_blocks, block_size, num_kv_heads, head_dim], and quantised their scales.

    Scales are fp32 [num_layers, num_blocks, block_size, num_kv_heads], of keys and of values. All are zeros, on the CPU
    resident only where they were written.
    """
    tokens = (shape.num_layers, num_blocks, shape.block_size, shape.num_kv_heads)
    size = (*tokens, shape.head_dim)
    stored = _STORED.get(shape.kv_dtype, dtype)
    parts = [lazy_zeros(size, stored, device), lazy_zeros(size, stored, device)]
    if shape.kv_dtype != AUTO:
        parts += [lazy_zeros(tokens, torch.float32, device), lazy_zeros(tokens, torch.float32, device)]
    return tuple(parts)


def quantise(x: Tensor, kv_dtype: str) -> tuple[Tensor, Tensor]:
    """[..., head_dim] -> (cells as they are stored, their scales fp32 [...]).

    The scale of what is not finite is not finite either, so that it is not read as a number again.
    """
    wide = x.float()
    largest = torch.tensor(LARGEST[kv_dtype], dtype=torch.float32, device=x.device)
    scales = wide.abs().amax(-1) / largest
    scales = torch.where(scales.isnan(), torch.inf, scales)
    cells = wide / torch.where(scales == 0, 1.0, scales)[..., None]
    cells = cells.nan_to_num(0.0).clamp(-largest, largest)
    if kv_dtype == "int8":
        return cells.round().to(torch.int8), scales
    return cells.to(torch.float8_e4m3fn).view(torch.uint8), scales


def rows_of(shape: AttentionShape, key: Tensor, value: Tensor) -> Sequence[Tensor]:
    """What of keys and values [T, num_kv_heads, head_dim] goes into each part of a cache."""
    if shape.kv_dtype == AUTO:
        return key, value
    keys, key_scales = quantise(key, shape.kv_dtype)
    values, value_scales = quantise(value, shape.kv_dtype)
    return keys, values, key_scales, value_scales


def read(shape: AttentionShape, rows: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The other way: rows of each part -> keys and values [..., num_kv_heads, head_dim] in `dtype`."""
    keys, values = rows[:2]
    if shape.kv_dtype == AUTO:
        return keys.to(dtype), values.to(dtype)
    if shape.kv_dtype == "fp8":
        keys, values = keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
    key_scales, value_scales = rows[2:]
    return (keys.float() * key_scales[..., None]).to(dtype), (values.float() * value_scales[..., None]).to(dtype)
