"""Weights in eight bits by row with one fp32 scale each: half or a quarter of the memory.

One definition holds on every device (`quantised`): a row's scale is its largest element over the largest number of the
element type, and each element the nearest of its row's steps. In int8 an element is off by at most half a step, a 254th
of its row's largest; in fp8 (e4m3) by at most a 16th of itself.

What a product makes of activations is its kernel's own choice, and said by `rounds_activations`: they stay as they are,
or each row is rounded by the same definition, so that the tensor cores multiply eight bits by eight bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from novainfer.fsm.messages.mode import FP8, INT8

__all__ = [
    "PART_ROWS",
    "TILE_ELEMENTS_MAX",
    "ReferenceFp8ActivationsLinear",
    "ReferenceFp8Linear",
    "ReferenceInt8ActivationsLinear",
    "ReferenceInt8Linear",
    "TorchFp8Linear",
    "TorchInt8Linear",
    "part_rows",
    "put_in_parts",
    "quantised",
]

PART_ROWS = 64  # parts begin at multiples of this: a multiple of every kernel's panel
PART_BYTES_MAX = 1 << 20  # of the fp32 rows that are quantised at once: bounds the scratch of a switch
TILE_ELEMENTS_MAX = 4 << 20  # weights widened at once by torch: bounds the scratch of a product
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantised(rows: Tensor, element: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Rows [n, K] as [n, K] of the element type and fp32 scales [n]: `rows` is about `q * scale`, row by row."""
    wide = rows.float()
    largest = wide.abs().amax(1)
    # A tensor, because torch on CUDA multiplies by a number's reciprocal: scales would be others than on the CPU.
    scale = largest / torch.full_like(largest, LARGEST[element])
    steps = wide / torch.where(scale > 0, scale, 1.0)[:, None]
    return (torch.round(steps) if element == torch.int8 else steps).to(element), scale


class _Filled(Protocol):
    """A linear that is filled part by part."""

    out_features: int
    in_features: int

    def put(self, first: int, rows: Tensor) -> None: ...


def part_rows(in_features: int) -> int:
    """Rows that are quantised at once."""
    return max(1, PART_BYTES_MAX // (4 * in_features * PART_ROWS)) * PART_ROWS


def put_in_parts(linear: _Filled, rows: Callable[[int, int], Tensor]) -> None:
    """Fill it with `rows(first, last)` -> [last - first, K], a few MiB at a time."""
    count = part_rows(linear.in_features)
    for first in range(0, linear.out_features, count):
        linear.put(first, rows(first, min(first + count, linear.out_features)))


class TorchInt8Linear:
    """Widened by torch, a tile of rows at a time: any device, any dtype. Sums are in fp32, whole numbers up to 2^24."""

    name: ClassVar[str] = "torch-int8"
    precision: ClassVar[str] = INT8
    element: ClassVar[torch.dtype] = torch.int8
    row_invariant: ClassVar[bool] = False
    gathers_rows: ClassVar[bool] = True
    rounds_activations: ClassVar[bool] = True

    def __init__(self, q: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.q = q  # int8 [N, K]: the elements, or their bits, which are what every operation of torch can move
        self.scale = scale  # fp32 [N]
        self.bias = bias
        self.dtype = dtype
        self.out_features, self.in_features = q.shape
        self.weight_bytes = q.nbytes + scale.nbytes + (0 if bias is None else bias.nbytes)

    @property
    def elements(self) -> Tensor:
        """The weight [N, K] in its element type, without its scales."""
        return self.q.view(self.element)

    @classmethod
    def refuses(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """Takes everything."""
        return None

    @classmethod
    def empty(
        cls, out_features: int, in_features: int, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Room for a weight [out_features, in_features]; `put` fills it."""
        q = torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
        scale = torch.zeros(out_features, dtype=torch.float32, device=device)
        return cls(q, scale, None if bias is None else bias.to(torch.float32, copy=True), dtype)

    @classmethod
    def shared_layout(cls) -> str:
        """The tensors as they are."""
        return cls.name

    @property
    def tensors(self) -> list[Tensor]:
        """Weight, scale and bias."""
        return [self.q, self.scale] if self.bias is None else [self.q, self.scale, self.bias]

    @classmethod
    def over(cls, out_features: int, in_features: int, dtype: torch.dtype, tensors: list[Tensor]) -> Self:
        """On another one's tensors."""
        return cls(tensors[0], tensors[1], tensors[2] if len(tensors) == 3 else None, dtype)

    def put(self, first: int, rows: Tensor) -> None:
        """Quantise rows [n, K] as rows `first` on."""
        last = first + len(rows)
        elements, self.scale[first:last] = quantised(rows, self.element)
        self.q[first:last] = elements.view(torch.int8)

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Quantise weight [N, K]; bias [N] stays as it is."""
        packed = cls.empty(weight.shape[0], weight.shape[1], bias, weight.dtype, weight.device)
        put_in_parts(packed, lambda first, last: weight[first:last])
        return packed

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]."""
        out = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        rows, scale = x, None
        if self.rounds_activations:
            rows, scale = quantised(x, self.element)
            rows, scale = rows.float(), scale[:, None]
        step = max(1, TILE_ELEMENTS_MAX // self.in_features)
        for first in range(0, self.out_features, step):
            part = slice(first, first + step)
            y = F.linear(rows, self.elements[part].to(rows.dtype))
            y = (y if scale is None else y * scale) * self.scale[part]
            out[:, part] = y if self.bias is None else y + self.bias[part]
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """int64 [n] -> [n, K], each element times its row's scale, rounded to the dtype."""
        return (self.q[ids].view(self.element).float() * self.scale[ids, None]).to(self.dtype)


class TorchFp8Linear(TorchInt8Linear):
    """The same with weights in fp8 (e4m3), and activations as they are."""

    name: ClassVar[str] = "torch-fp8"
    precision: ClassVar[str] = FP8
    element: ClassVar[torch.dtype] = torch.float8_e4m3fn
    rounds_activations: ClassVar[bool] = False


class ReferenceInt8Linear(TorchInt8Linear):
    """The oracle: widened whole, in fp32, rounded once at the end."""

    name: ClassVar[str] = "reference-int8"
    rounds_activations: ClassVar[bool] = False

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]."""
        y = x.float() @ (self.elements.float() * self.scale[:, None]).T
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class ReferenceFp8Linear(ReferenceInt8Linear):
    """The oracle of weights in fp8."""

    name: ClassVar[str] = "reference-fp8"
    precision: ClassVar[str] = FP8
    element: ClassVar[torch.dtype] = torch.float8_e4m3fn


class ReferenceInt8ActivationsLinear(ReferenceInt8Linear):
    """The oracle of kernels that round activations, too: products and sums of the elements are exact."""

    name: ClassVar[str] = "reference-int8-activations"
    rounds_activations: ClassVar[bool] = True

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]."""
        q, scale = quantised(x, self.element)
        y = (q.double() @ self.elements.double().T).float() * scale[:, None] * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class ReferenceFp8ActivationsLinear(ReferenceInt8ActivationsLinear):
    """The same with weights and activations in fp8."""

    name: ClassVar[str] = "reference-fp8-activations"
    precision: ClassVar[str] = FP8
    element: ClassVar[torch.dtype] = torch.float8_e4m3fn
