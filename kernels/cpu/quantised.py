"""Matrix products over codes of 8 and 4 bits packed for this CPU's vectors, by activations in INT8 (quantised.cpp)."""

from __future__ import annotations

import ctypes
import math
from typing import ClassVar, Self

import torch
from torch import Tensor

from novainfer.fsm.messages.mode import INT4, INT8
from novainfer.kernels.cpu.linear import PackedLinear, described, padded
from novainfer.kernels.cpu.memory import huge_zeros
from novainfer.kernels.cpu.native import LinearDesc, library, num_threads
from novainfer.kernels.ops.grouped import GroupedForm, GroupedWeight
from novainfer.kernels.ops.grouped_linear import GroupedLinear
from novainfer.kernels.ops.quantised import PART_ROWS

__all__ = ["NativeGroupedLinear", "NativeInt8Linear"]

STEP = 8  # features that are unpacked together (codes.h)
SUM_MAX = 2**31 - 1
PRODUCT_MAX = 128 * 127  # of a code and an activation


class NativeGroupedLinear(GroupedLinear, PackedLinear):
    """Codes of 4 or 8 bits with a scale, and maybe a shift, for each group of a row's features.

    Activations are rounded to INT8 in groups as large, once for each product; what is summed within a group is exact.
    """

    name: ClassVar[str] = "native-grouped"
    rounds_activations: ClassVar[bool] = True

    @classmethod
    def refuses(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when a weight [out_features, in_features] can be packed; else the reason."""
        reason = super().refuses(out_features, in_features, dtype, device)
        return reason or cls.refuses_form(in_features, cls.own_form(in_features))

    @classmethod
    def refuses_form(cls, in_features: int, form: GroupedForm) -> str | None:
        """None when a weight of K features in this form can be packed; else the reason."""
        if form.group_size < in_features and form.group_size % STEP:
            return f"groups of {form.group_size} features are no multiple of {STEP}"
        if form.group_size * PRODUCT_MAX > SUM_MAX:
            return f"sums of {form.group_size} products are too large for int32"
        return None

    @classmethod
    def empty_grouped(
        cls,
        out_features: int,
        in_features: int,
        form: GroupedForm,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Room for a weight [out_features, in_features] of a form that was not refused; `put_grouped` fills it."""
        desc = _described(out_features, in_features, dtype, form.bits, form.group_size)
        weight = huge_zeros(library().nova_linear_bytes(ctypes.byref(desc)))
        panel = _panel()
        numbers = (-(-out_features // panel), in_features // form.group_size, panel)
        scale = _numbers(numbers)
        shift = None if form.is_symmetric else _numbers(numbers)
        return cls(desc, weight, padded(desc, bias), dtype, scale, shift)

    @classmethod
    def over(cls, out_features: int, in_features: int, dtype: torch.dtype, tensors: list[Tensor]) -> Self:
        """On what another one has packed."""
        if len(tensors) < 2:
            raise ValueError(f"this memory is not a packed weight [{out_features}, {in_features}]")
        weight, scale, *others = tensors
        shift = next((tensor for tensor in others if tensor.dim() == 3), None)
        bias = next((tensor for tensor in others if tensor.dim() == 1), None)
        eight, four = (
            _described(out_features, in_features, dtype, bits, in_features // scale.shape[1]) for bits in (8, 4)
        )
        desc = four if weight.nbytes == library().nova_linear_bytes(ctypes.byref(four)) else eight
        cls.check_packed(desc, weight)
        return cls(desc, weight, bias, dtype, scale, shift)

    def put(self, first: int, rows: Tensor) -> None:
        """Round rows [n, K] and pack them as rows `first` on; `first` is a multiple of `PART_ROWS`."""
        self._check_rows(first, rows)
        super().put(first, rows)

    def put_grouped(self, first: int, part: GroupedWeight) -> None:
        """Pack some rows of a weight as rows `first` on; `first` is a multiple of `PART_ROWS`."""
        self._check_place(first, len(part.codes))
        part_desc, at = self._part(first, len(part.codes))
        library().nova_linear_pack_codes(ctypes.byref(part_desc), part.codes.contiguous().data_ptr(), at, num_threads())
        self._put_numbers(self.scale, first, part.scale)
        if self.shift is not None and part.shift is not None:
            self._put_numbers(self.shift, first, part.shift)

    def _part(self, first: int, count: int) -> tuple[LinearDesc, int]:
        """Rows `first` on as a weight of their own, and where they lie."""
        whole = self.desc
        before, part = LinearDesc.from_buffer_copy(whole), LinearDesc.from_buffer_copy(whole)
        before.n, part.n = first, count
        return part, self.weight.data_ptr() + library().nova_linear_bytes(ctypes.byref(before))

    @staticmethod
    def _put_numbers(to: Tensor | None, first: int, numbers: Tensor) -> None:
        """One number for each group of each row, [n, groups], into [panels, groups, PANEL]."""
        assert to is not None
        panel = to.shape[2]
        for begin in range(0, len(numbers), panel):
            part = numbers[begin : begin + panel]
            to[(first + begin) // panel, :, : len(part)] = part.T

    def _check_rows(self, first: int, rows: Tensor) -> None:
        self._check_place(first, len(rows))
        if rows.dtype != self.dtype or rows.shape[1] != self.in_features:
            raise ValueError(f"rows must be {self.in_features} {self.dtype}, not {rows.shape[1]} {rows.dtype}")

    def _check_place(self, first: int, count: int) -> None:
        if first % PART_ROWS or not 0 <= first <= first + count <= self.out_features:
            raise IndexError(f"rows {first} to {first + count - 1} are no part of {self.out_features} rows")


class NativeInt8Linear(NativeGroupedLinear):
    """Rows of INT8, each with one scale, and activations by row, too: W8A8, per channel and per token."""

    name: ClassVar[str] = "native-int8"
    precision: ClassVar[str] = INT8

    @classmethod
    def own_form(cls, in_features: int) -> GroupedForm:
        """One group."""
        return GroupedForm(8, in_features, 0)

    def put(self, first: int, rows: Tensor) -> None:
        """Round rows [n, K] and pack them as rows `first` on; `first` is a multiple of `PART_ROWS`."""
        self._check_rows(first, rows)
        part, at = self._part(first, len(rows))
        scale = torch.empty(len(rows), 1, dtype=torch.float32)
        library().nova_linear_round(
            ctypes.byref(part), rows.contiguous().data_ptr(), at, scale.data_ptr(), num_threads()
        )
        self._put_numbers(self.scale, first, scale)


def _described(out_features: int, in_features: int, dtype: torch.dtype, bits: int, group_size: int) -> LinearDesc:
    return described(out_features, in_features, dtype, INT4 if bits == 4 else INT8, group_size)


def _numbers(shape: tuple[int, int, int]) -> Tensor:
    """Zeros in float32, outside the heap: there they would lie between what loading frees, and hold its pages."""
    return huge_zeros(math.prod(shape) * torch.float32.itemsize).view(torch.float32).view(shape)


def _panel() -> int:
    """Rows of a weight that lie side by side."""
    count: int = library().nova_linear_columns(ctypes.byref(described(1, 1, torch.float32)))
    return count
