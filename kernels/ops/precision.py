"""The precisions that weights can be kept in: what registry, loader, modes and self-tests must know of each.

A precision more is an entry here, its name in fsm/messages/mode.py, and linears that keep weights so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from novainfer.fsm.messages.mode import CHECKPOINT, FP8, INT4, INT8, PRECISIONS, QUANTIZATIONS, UNQUANTIZED
from novainfer.kernels.errors import LoadError
from novainfer.kernels.ops.grouped import int4_form
from novainfer.kernels.ops.grouped_linear import ReferenceGroupedLinear, TorchGroupedLinear
from novainfer.kernels.ops.linear import MkldnnLinear, TorchLinear
from novainfer.kernels.ops.quantised import ReferenceFp8Linear, ReferenceInt8Linear, TorchFp8Linear, TorchInt8Linear
from novainfer.kernels.ops.reference import ReferenceLinear
from novainfer.kernels.ops.selftest.linears import check_grouped_linear, check_linear, check_quantised_linear

__all__ = ["ALL_PRECISIONS", "Precision", "precision_of", "quantization_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Precision:
    """How the weights of matrix products are kept."""

    name: str  # as `Mode.precision` and a linear's `precision` say it
    linears: tuple[type[Any], ...]  # of any device, fastest first; those of one device register themselves
    check: Callable[[Any, torch.dtype, torch.device], str | None]  # the self-test of a linear
    bits: int | None = None  # of one element; None: as many as the dtype has
    in_groups: bool = False  # whether each group of features has a scale (fp32), and not each row
    head: str | None = None  # the precision of the output head, where it is another one

    @property
    def is_quantised(self) -> bool:
        """Whether weights are less than the checkpoint has: linears are then `QuantisedLinear`s."""
        return self.bits is not None

    def of(self, *, is_head: bool = False, is_exact: bool = False) -> Precision:
        """That of the output head, of what is not rounded whatever else is, or of all other products."""
        if is_exact:
            return _PRECISIONS[CHECKPOINT]
        return _PRECISIONS[self.head] if is_head and self.head is not None else self

    def weight_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        """About what a weight [out_features, in_features] takes."""
        if self.bits is None:
            return out_features * in_features * dtype.itemsize
        groups = in_features // int4_form(in_features).group_size if self.in_groups else 1
        return out_features * (-(-in_features * self.bits // 8) + groups * torch.float32.itemsize)


_PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(CHECKPOINT, (MkldnnLinear, TorchLinear, ReferenceLinear), check_linear),
        Precision(INT8, (TorchInt8Linear, ReferenceInt8Linear), check_quantised_linear, bits=8),
        Precision(
            INT4,
            (TorchGroupedLinear, ReferenceGroupedLinear),
            check_grouped_linear,
            bits=4,
            in_groups=True,
            head=INT8,  # it is what candidates are told apart by, and as embeddings it is not multiplied at all
        ),
        Precision(FP8, (TorchFp8Linear, ReferenceFp8Linear), check_quantised_linear, bits=8),
    )
}
assert set(_PRECISIONS) == {*PRECISIONS, *QUANTIZATIONS}
ALL_PRECISIONS = tuple(_PRECISIONS)


def precision_of(name: str) -> Precision:
    """The precision of this name."""
    return _PRECISIONS[name]


def quantization_of(name: str | None) -> Precision:
    """The precision that a setting `quantization` asks for; raises `LoadError` for one that is not there."""
    if name in (None, UNQUANTIZED):
        return _PRECISIONS[CHECKPOINT]
    if name not in QUANTIZATIONS:
        offered = ", ".join(map(repr, (*QUANTIZATIONS, UNQUANTIZED)))
        raise LoadError(f"quantization must be one of {offered}, not {name!r}")
    return _PRECISIONS[name]
