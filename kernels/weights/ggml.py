"""The blocks that GGUF files keep weights in, as codes, scales and shifts of groups.

Each function takes rows as they lie in the file, uint8 [n, bytes of a row], and gives codes int8 [n, K] and for each
group fp32 scales and shifts (None: 0, or what the middle of its codes says). The layouts are llama.cpp's
(ggml/src/ggml-common.h); a scale in 16 bits times one in 6 or 8 is exact in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BLOCKS"]

Parts = tuple[Tensor, Tensor, Tensor | None]
SUPER = 256  # features of a block of the K types


def _blocks(rows: Tensor, *sizes: int) -> list[Tensor]:
    """The fields of all blocks, of so many bytes each: [n, blocks, size]."""
    return list(torch.split(rows.reshape(len(rows), -1, sum(sizes)), list(sizes), dim=2))


def _folded(field: Tensor, *sizes: int) -> Tensor:
    """[n, blocks, m] -> [n, blocks, *sizes]."""
    return field.reshape(*field.shape[:2], *sizes)


def _half(field: Tensor) -> Tensor:
    """fp16 in two bytes [n, blocks, 2] -> fp32 [n, blocks]."""
    return field.contiguous().view(torch.float16)[..., 0].float()


def _nibbles(field: Tensor) -> Tensor:
    """[n, blocks, m] -> [n, blocks, 2 m]: all lower halves, then all upper ones."""
    return torch.cat((field & 15, field >> 4), dim=2)


def _bits(field: Tensor) -> Tensor:
    """[n, blocks, m] -> [n, blocks, 8 m], the lowest bit of a byte first."""
    return (field[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2)


def _codes(codes: Tensor, zero: int = 0) -> Tensor:
    """[n, ...] -> int8 [n, K], less the code that stands for 0."""
    flat = codes.flatten(1).view(torch.int8)
    return flat - zero if zero else flat


def _q8_0(rows: Tensor) -> Parts:
    scale, codes = _blocks(rows, 2, 32)
    return codes.contiguous().view(torch.int8).flatten(1), _half(scale), None


def _q4_0(rows: Tensor) -> Parts:
    scale, codes = _blocks(rows, 2, 16)
    return _codes(_nibbles(codes)), _half(scale), None


def _q4_1(rows: Tensor) -> Parts:
    scale, least, codes = _blocks(rows, 2, 2, 16)
    return _codes(_nibbles(codes)), _half(scale), _half(least)


def _q5_0(rows: Tensor) -> Parts:
    scale, high, low = _blocks(rows, 2, 4, 16)
    return _codes(_nibbles(low) | _bits(high) << 4, 16), _half(scale), None


def _q5_1(rows: Tensor) -> Parts:
    scale, least, high, low = _blocks(rows, 2, 2, 4, 16)
    return _codes(_nibbles(low) | _bits(high) << 4), _half(scale), _half(least)


def _q4_k(rows: Tensor) -> Parts:
    scale, least, packed, codes = _blocks(rows, 2, 2, 12, SUPER // 2)
    return _codes(_pairs(codes)), *_six_bits(scale, least, packed)


def _q5_k(rows: Tensor) -> Parts:
    scale, least, packed, high, low = _blocks(rows, 2, 2, 12, SUPER // 8, SUPER // 2)
    # Bit g of byte i belongs to feature i of group g.
    fifth = _folded(_bits(high), 32, 8).transpose(2, 3)
    return _codes(_pairs(low) | fifth << 4), *_six_bits(scale, least, packed)


def _q6_k(rows: Tensor) -> Parts:
    low, high, packed, scale = _blocks(rows, SUPER // 2, SUPER // 4, SUPER // 16, 2)
    # Halves of 128 features; in each, four runs of 32: lower and upper four bits of 64 bytes, and two bits of 32 bytes.
    four = _folded(low, 2, 64)
    four = _folded(torch.cat((four & 15, four >> 4), dim=3), 2, 4, 32)
    two = _folded(high, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    codes = (four | two << 4).flatten(2)
    scales = _half(scale)[..., None] * packed.contiguous().view(torch.int8)
    return _codes(codes, 32), scales.flatten(1), None


def _pairs(codes: Tensor) -> Tensor:
    """Runs of 32 bytes, each two groups of 32 codes: [n, blocks, 128] -> [n, blocks, 8, 32]."""
    runs = _folded(codes, 4, 1, 32)
    return torch.cat((runs & 15, runs >> 4), dim=3).flatten(2, 3)


def _six_bits(scale: Tensor, least: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and shifts of the eight groups of a block: six bits each, in twelve bytes, times one number in 16."""
    first, second, third = torch.split(packed, 4, dim=2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=2)
    leasts = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=2)
    return (_half(scale)[..., None] * scales).flatten(1), (-_half(least)[..., None] * leasts).flatten(1)


BLOCKS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
