"""Weights in whole numbers with a scale, and where they need one a shift, for each group of features of a row.

What GPTQ, AWQ, compressed-tensors and GGUF keep comes down to this one form, whatever order their bits lie in; and a
weight that is rounded while it is loaded has it, too. `w[n, k] = codes[n, k] * scale[n, g] + shift[n, g]`, `g` being
`k // group_size`. A zero point z is the shift `-z * scale`, which fp32 holds exactly for scales of 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["INT4_GROUP_SIZES", "GroupedForm", "GroupedWeight", "int4_form", "rounded_to_int4"]

# Features that share a scale when a weight is rounded while it is loaded: the first that divides K, or all of a row.
INT4_GROUP_SIZES: tuple[int, ...] = (64, 32, 16)
LARGEST_INT4 = 8  # a symmetric code is one of -8 to 7, kept as 0 to 15


class GroupedForm(NamedTuple):
    """What a kernel must know of a weight in groups before there is one."""

    bits: int
    group_size: int
    zero: int | None  # the code that stands for 0 in every group; None: a shift for each says it

    @property
    def is_symmetric(self) -> bool:
        """Whether 0 is in the middle of the codes in every group: then no shift need be kept."""
        return self.zero == (LARGEST_INT4 if self.bits == 4 else 0)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """One weight [N, K], or some of its rows, as codes and scales; a kernel packs it as it reads it."""

    bits: int  # of a code: 4 or 8
    group_size: int  # features that share a scale; it divides K
    codes: Tensor  # int8 [N, K], one each: 0 to 15 of 4 bits, -128 to 127 of 8
    scale: Tensor  # fp32 [N, K / group_size]
    shift: Tensor | None = None  # fp32 [N, K / group_size]; None: 0 everywhere

    def __post_init__(self) -> None:
        """Raises ValueError for parts that do not fit each other."""
        if self.bits not in (4, 8):
            raise ValueError(f"codes have 4 or 8 bits, not {self.bits}")
        rows, columns = self.codes.shape
        if self.group_size < 1 or columns % self.group_size:
            raise ValueError(f"groups of {self.group_size} features do not divide rows of {columns}")
        for name, part in (("scale", self.scale), ("shift", self.shift)):
            if part is not None and part.shape != (rows, columns // self.group_size):
                raise ValueError(f"{name} {list(part.shape)} is not one number for each group of {[rows, columns]}")

    @property
    def form(self) -> GroupedForm:
        """Its form: symmetric codes of 4 bits are known by their shift, -8 times the scale."""
        zero: int | None = 0
        if self.shift is not None:
            symmetric = self.bits == 4 and torch.equal(self.shift, -LARGEST_INT4 * self.scale)
            zero = LARGEST_INT4 if symmetric else None
        return GroupedForm(self.bits, self.group_size, zero)

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the codes stand for: [N, K], computed in fp32 and rounded once."""
        rows = len(self.codes)
        wide = self.codes.view(rows, -1, self.group_size).float() * self.scale[..., None]
        if self.shift is not None:
            wide += self.shift[..., None]
        return wide.view(rows, -1).to(dtype)


def int4_form(in_features: int) -> GroupedForm:
    """The form of a weight [N, in_features] that `rounded_to_int4` makes."""
    divisors = (size for size in INT4_GROUP_SIZES if in_features % size == 0)
    return GroupedForm(4, next(divisors, in_features), LARGEST_INT4)


def rounded_to_int4(rows: Tensor) -> GroupedWeight:
    """Rows [n, K] in symmetric codes of 4 bits, on their device: the one definition of `--quantization int4`.

    A group's scale is its element of the largest size over -8, sign and all, so that this element is kept exactly and
    all 16 codes are used; each element is the nearest step.
    """
    form = int4_form(rows.shape[1])
    wide = rows.float().view(len(rows), -1, form.group_size)
    largest = wide.gather(2, wide.abs().argmax(2, keepdim=True))
    scale = largest / torch.full_like(largest, -LARGEST_INT4)
    steps = torch.round(wide / torch.where(scale != 0, scale, 1.0)) + LARGEST_INT4
    codes = steps.clamp_(0, 15).to(torch.int8).view(rows.shape)
    scale = scale[..., 0]
    return GroupedWeight(4, form.group_size, codes, scale, -LARGEST_INT4 * scale)
