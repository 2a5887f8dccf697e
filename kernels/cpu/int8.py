"""Matrix products over int8 weights packed for this CPU's vectors (linear.cpp)."""

from __future__ import annotations

import ctypes
from typing import ClassVar, Self

import torch
from torch import Tensor

from novainfer.fsm.messages.mode import INT8
from novainfer.kernels.cpu.linear import PackedLinear, padded
from novainfer.kernels.cpu.memory import huge_zeros
from novainfer.kernels.cpu.native import library, num_threads
from novainfer.kernels.ops.quantised import PART_ROWS, put_in_parts

__all__ = ["NativeInt8Linear"]


class NativeInt8Linear(PackedLinear):
    """int8 rows times fp32 scales; activations as they are, bf16 or fp32, accumulated in fp32 in one fixed order."""

    name: ClassVar[str] = "native-int8"
    precision: ClassVar[str] = INT8
    rounds_activations: ClassVar[bool] = False

    @classmethod
    def empty(
        cls, out_features: int, in_features: int, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Room for a weight [out_features, in_features]; `put` fills it."""
        lib = library()
        desc = cls.describe(out_features, in_features, dtype)
        packed = huge_zeros(lib.nova_linear_bytes(ctypes.byref(desc)))
        scale = torch.zeros(lib.nova_linear_columns(ctypes.byref(desc)), dtype=torch.float32)
        return cls(desc, packed, padded(desc, bias), scale, dtype)

    def put(self, first: int, rows: Tensor) -> None:
        """Quantise rows [n, K] and pack them as rows `first` on; `first` is a multiple of `PART_ROWS`."""
        if self.scale is None or first % PART_ROWS or not 0 <= first <= first + len(rows) <= self.out_features:
            raise IndexError(f"rows {first} to {first + len(rows) - 1} are no part of {self.out_features} rows")
        if rows.dtype != self.dtype or rows.shape[1] != self.in_features:
            raise ValueError(f"rows must be {self.in_features} {self.dtype}, not {rows.shape[1]} {rows.dtype}")
        lib = library()
        before = self.describe(first, self.in_features, self.dtype)
        part = self.describe(len(rows), self.in_features, self.dtype)
        lib.nova_linear_quantise(
            ctypes.byref(part),
            rows.contiguous().data_ptr(),
            self.weight.data_ptr() + lib.nova_linear_bytes(ctypes.byref(before)),
            self.scale[first:].data_ptr(),
            num_threads(),
        )

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Quantise and pack weight [N, K]; bias [N] stays as it is."""
        packed = cls.empty(weight.shape[0], weight.shape[1], bias, weight.dtype, weight.device)
        put_in_parts(packed, lambda first, last: weight[first:last])
        return packed
