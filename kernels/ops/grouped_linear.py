"""Matrix products over weights in groups (grouped.py) by torch, and the oracles of kernels that compute them.

As with rows in INT8 (quantised.py), what a product makes of activations is its kernel's own choice, and said by
`rounds_activations`: they stay as they are, or each group of a row's features, as large as the weight's, is rounded to
INT8 as a row of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from novainfer.fsm.messages.mode import INT4
from novainfer.kernels.ops.grouped import GroupedForm, GroupedWeight, int4_form, rounded_to_int4
from novainfer.kernels.ops.quantised import TILE_ELEMENTS_MAX, put_in_parts, quantised

__all__ = [
    "GroupedLinear",
    "ReferenceGroupedActivationsLinear",
    "ReferenceGroupedLinear",
    "TorchGroupedLinear",
]


class GroupedLinear(ABC):
    """How any linear over weights in groups is filled: with rows to round or codes as they come, in parts or whole."""

    precision: ClassVar[str] = INT4
    out_features: int
    in_features: int

    @classmethod
    def own_form(cls, in_features: int) -> GroupedForm:
        """The form of a weight that is rounded here."""
        return int4_form(in_features)

    @classmethod
    @abstractmethod
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

    @abstractmethod
    def put_grouped(self, first: int, part: GroupedWeight) -> None:
        """Take some rows of a weight as rows `first` on; `first` is a multiple of `quantised.PART_ROWS`."""

    @classmethod
    def empty(
        cls, out_features: int, in_features: int, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Room for a weight [out_features, in_features] that `put` rounds."""
        return cls.empty_grouped(out_features, in_features, cls.own_form(in_features), bias, dtype, device)

    def put(self, first: int, rows: Tensor) -> None:
        """Round rows [n, K] as rows `first` on; `first` is a multiple of `quantised.PART_ROWS`."""
        self.put_grouped(first, rounded_to_int4(rows))

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Round weight [N, K]; bias [N] stays as it is. Neither is referred to afterwards."""
        packed = cls.empty(weight.shape[0], weight.shape[1], bias, weight.dtype, weight.device)
        put_in_parts(packed, lambda first, last: weight[first:last])
        return packed

    @classmethod
    def pack_grouped(cls, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Self:
        """Take a weight of a form that was not refused, and bias [N]; neither is referred to afterwards."""
        out_features, in_features = weight.codes.shape
        packed = cls.empty_grouped(out_features, in_features, weight.form, bias, dtype, device)
        packed.put_grouped(0, weight)
        return packed


class TorchGroupedLinear(GroupedLinear):
    """Widened by torch, a tile of rows at a time: any device, any dtype, any form."""

    name: ClassVar[str] = "torch-grouped"
    row_invariant: ClassVar[bool] = False
    gathers_rows: ClassVar[bool] = True
    rounds_activations: ClassVar[bool] = False

    def __init__(
        self, codes: Tensor, scale: Tensor, shift: Tensor | None, bias: Tensor | None, k: int, dtype: torch.dtype
    ) -> None:
        self.codes = codes  # int8 [N, K]; of 4 bits uint8 [N, ceil(K / 2)], the even features in the lower halves
        self.scale = scale  # fp32 [N, K / group_size]
        self.shift = shift  # the same, or None
        self.bias = bias  # fp32 [N], or None
        self.dtype = dtype
        self.out_features, self.in_features = len(codes), k
        self.weight_bytes = sum(tensor.nbytes for tensor in self.tensors)

    @classmethod
    def refuses(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """Takes everything."""
        return None

    @classmethod
    def refuses_form(cls, in_features: int, form: GroupedForm) -> str | None:
        """None when a weight of K features in this form can be packed; else the reason. Takes everything."""
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
        width, element = (-(-in_features // 2), torch.uint8) if form.bits == 4 else (in_features, torch.int8)
        codes = torch.zeros(out_features, width, dtype=element, device=device)
        scale = torch.zeros(out_features, in_features // form.group_size, dtype=torch.float32, device=device)
        shift = None if form.zero == 0 else torch.zeros_like(scale)
        bias = None if bias is None else bias.to(device, torch.float32, copy=True)
        return cls(codes, scale, shift, bias, in_features, dtype)

    @classmethod
    def shared_layout(cls) -> str:
        """The tensors as they are."""
        return cls.name

    @property
    def tensors(self) -> list[Tensor]:
        """Codes and scales, shifts if there are any (of two dimensions), and the bias (of one)."""
        return [tensor for tensor in (self.codes, self.scale, self.shift, self.bias) if tensor is not None]

    @classmethod
    def over(cls, out_features: int, in_features: int, dtype: torch.dtype, tensors: list[Tensor]) -> Self:
        """On another one's tensors."""
        codes, scale, *others = tensors
        shift = next((tensor for tensor in others if tensor.dim() == 2), None)
        bias = next((tensor for tensor in others if tensor.dim() == 1), None)
        return cls(codes, scale, shift, bias, in_features, dtype)

    def put_grouped(self, first: int, part: GroupedWeight) -> None:
        """Take some rows of a weight as rows `first` on; `first` is a multiple of `quantised.PART_ROWS`."""
        at = slice(first, first + len(part.codes))
        codes = part.codes
        if part.bits == 4:
            codes = F.pad(codes.view(torch.uint8), (0, self.in_features % 2))
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        self.codes[at] = codes.to(self.codes.device)
        self.scale[at] = part.scale.to(self.scale.device)
        if self.shift is not None and part.shift is not None:
            self.shift[at] = part.shift.to(self.shift.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]."""
        out = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        step = max(1, TILE_ELEMENTS_MAX // self.in_features)
        for first in range(0, self.out_features, step):
            part = slice(first, first + step)
            bias = None if self.bias is None else self.bias[part].to(x.dtype)
            out[:, part] = F.linear(x, self._widened(part, x.dtype), bias)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """int64 [n] -> [n, K], each element its code times the scale and with the shift, rounded to the dtype."""
        return self._widened(ids, self.dtype)

    def _widened(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight: [n, K]."""
        return self._taken(rows).widened(dtype)

    def _taken(self, rows: slice | Tensor) -> GroupedWeight:
        codes, bits = self.codes[rows], 8
        if codes.dtype == torch.uint8:
            pairs = torch.stack((codes & 15, codes >> 4), dim=2)
            codes, bits = pairs.view(len(codes), -1)[:, : self.in_features].view(torch.int8), 4
        scale = self.scale[rows]
        shift = None if self.shift is None else self.shift[rows]
        return GroupedWeight(bits, self.in_features // scale.shape[1], codes, scale, shift)


class ReferenceGroupedLinear(TorchGroupedLinear):
    """The oracle: widened whole, in fp32, rounded once at the end."""

    name: ClassVar[str] = "reference-grouped"

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]."""
        y = x.float() @ self._widened(slice(None), torch.float32).T
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class ReferenceGroupedActivationsLinear(ReferenceGroupedLinear):
    """The oracle of kernels that round activations, too, in groups as large as the weight's."""

    name: ClassVar[str] = "reference-grouped-activations"
    rounds_activations: ClassVar[bool] = True

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]."""
        groups = self.scale.shape[1]
        q, scale = quantised(x.reshape(len(x) * groups, -1))
        return super().__call__((q * scale[:, None]).view(x.shape)).to(x.dtype)
