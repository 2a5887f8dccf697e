"""Weights in whole numbers with a scale, and where they need one a shift, for each group of features of a row.

What GPTQ, AWQ, compressed-tensors and GGUF keep comes down to this one form, whatever order their bits lie in; and a
weight that is rounded while it is loaded has it, too. `w[n, k] = codes[n, k] * scale[n, g] + shift[n, g]`, `g` being
`k // group_size`. A zero point z is the shift `-z * scale`, which fp32 holds exactly for scales of 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GroupedWeight"]


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """One weight [N, K] as codes and scales, on the CPU; a kernel packs it as it reads it."""

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

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the codes stand for: [N, K], computed in fp32 and rounded once."""
        rows = len(self.codes)
        wide = self.codes.view(rows, -1, self.group_size).float() * self.scale[..., None]
        if self.shift is not None:
            wide += self.shift[..., None]
        return wide.view(rows, -1).to(dtype)
