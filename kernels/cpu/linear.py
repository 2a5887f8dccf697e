"""Matrix products over weights packed for this CPU's vectors (linear.cpp)."""

from __future__ import annotations

import ctypes
from typing import ClassVar, Self

import torch
from torch import Tensor

from novainfer.fsm.messages.mode import CHECKPOINT
from novainfer.kernels.cpu.memory import huge_zeros
from novainfer.kernels.cpu.native import DTYPE_CODES, FORMAT_CODES, LinearDesc, library, num_threads, refuses

__all__ = ["NativeLinear", "PackedLinear", "described", "padded", "threads_for"]

# Below this much work one thread ends before a second one would have woken up (about 15 us).
SERIAL_BYTES_MAX = 512 << 10
SERIAL_FLOPS_MAX = 4 << 20
PARALLEL_ROWS_MIN = 16  # a gathered row of 896 takes about 3 us


def threads_for(rows: int, weight_bytes: int, flops: int) -> int:
    """How many threads a product is worth: 1 or torch's number."""
    if rows * weight_bytes == 0 or (weight_bytes < SERIAL_BYTES_MAX and flops < SERIAL_FLOPS_MAX):
        return 1
    return num_threads()


class PackedLinear:
    """Packed weights and their bias, in memory that `desc` describes to the library, and what is computed on them.

    `weight` uint8 [bytes], filled by its subclass; `bias` fp32 [panels * PANEL]: whole panels, as what is computed
    behind the last row is not stored, but it is read. Codes have a `scale` fp32 [panels, groups, PANEL], too, and some
    a `shift`.
    """

    name: ClassVar[str]
    precision: ClassVar[str]
    row_invariant: ClassVar[bool] = True
    gathers_rows: ClassVar[bool] = True

    def __init__(
        self,
        desc: LinearDesc,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> None:
        self.out_features, self.in_features = desc.n, desc.k
        self.dtype = dtype
        self.weight = weight
        self.bias = None if bias is None else bias[: desc.n]
        self.scale = scale
        self.shift = shift
        self.desc = desc
        self._desc = ctypes.byref(desc)
        self._padded_bias = bias
        desc.weight = weight.data_ptr()
        desc.bias = None if bias is None else bias.data_ptr()
        desc.scale = None if scale is None else scale.data_ptr()
        desc.shift = None if shift is None else shift.data_ptr()
        self.weight_bytes = sum(tensor.nbytes for tensor in self.tensors)
        lib = library()
        self._flops_per_row = 2 * self.out_features * self.in_features
        self._linear = lib.nova_linear
        self._rows = lib.nova_linear_rows

    @classmethod
    def refuses(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when a weight [out_features, in_features] can be packed; else the reason."""
        if out_features < 1 or in_features < 1:
            return "the weight is empty"
        return refuses(dtype, device)

    @classmethod
    def shared_layout(cls) -> str:
        """Of this very library: the sources and the instruction sets it was compiled from."""
        return f"{cls.name} {library()._name}"

    @property
    def tensors(self) -> list[Tensor]:
        """The packed weight, scales and shifts of codes (of three dimensions), and the padded bias (of one)."""
        found = (self.weight, self.scale, self.shift, self._padded_bias)
        return [tensor for tensor in found if tensor is not None]

    @staticmethod
    def check_packed(desc: LinearDesc, weight: Tensor) -> None:
        """Raise ValueError for memory that does not hold what `desc` says."""
        if weight.nbytes != library().nova_linear_bytes(ctypes.byref(desc)):
            raise ValueError(f"this memory is not a packed weight [{desc.n}, {desc.k}]")

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N], same dtype. Rows of `x` may lie apart, elements of a row may not."""
        rows, columns = x.shape
        if columns != self.in_features or x.dtype != self.dtype or (x.stride(1) != 1 and columns != 1):
            raise ValueError(f"rows must be {self.in_features} contiguous {self.dtype}, not {columns} {x.dtype}")
        out = torch.empty((rows, self.out_features), dtype=self.dtype)
        threads = threads_for(rows, self.weight_bytes, rows * self._flops_per_row)
        self._linear(self._desc, x.data_ptr(), x.stride(0), rows, out.data_ptr(), threads)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight: int64 [n] -> [n, K]; raises IndexError when there is no such row."""
        if ids.dtype != torch.int64:
            raise TypeError(f"row numbers must be int64, not {ids.dtype}")
        ids = ids.contiguous()
        out = torch.empty((ids.numel(), self.in_features), dtype=self.dtype)
        threads = num_threads() if ids.numel() >= PARALLEL_ROWS_MIN else 1
        self._rows(self._desc, ids.data_ptr(), ids.numel(), out.data_ptr(), threads)
        return out


class NativeLinear(PackedLinear):
    """`y = x @ weight.T + bias`, bf16 or fp32, accumulated in fp32 in one fixed order along K.

    `rows` gives the weight's rows bit for bit.
    """

    name: ClassVar[str] = "native"
    precision: ClassVar[str] = CHECKPOINT

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Take weight [N, K] and bias [N] into the packed layout; neither is referred to afterwards."""
        lib = library()
        desc = described(weight.shape[0], weight.shape[1], weight.dtype)
        packed = huge_zeros(lib.nova_linear_bytes(ctypes.byref(desc)))
        lib.nova_linear_pack(ctypes.byref(desc), weight.contiguous().data_ptr(), packed.data_ptr(), num_threads())
        return cls(desc, packed, padded(desc, bias), weight.dtype)

    @classmethod
    def over(cls, out_features: int, in_features: int, dtype: torch.dtype, tensors: list[Tensor]) -> Self:
        """On what another one has packed."""
        desc = described(out_features, in_features, dtype)
        weight, *bias = tensors or [torch.empty(0)]
        cls.check_packed(desc, weight)
        return cls(desc, weight, bias[0] if bias else None, dtype)


def described(
    out_features: int, in_features: int, dtype: torch.dtype, precision: str = CHECKPOINT, group_size: int | None = None
) -> LinearDesc:
    """A weight [out_features, in_features] without its memory; a group is all of a row unless it is said."""
    codes = DTYPE_CODES[dtype], FORMAT_CODES[precision]
    return LinearDesc(None, None, out_features, in_features, *codes, None, None, group_size or in_features)


def padded(desc: LinearDesc, x: Tensor | None) -> Tensor | None:
    """A vector of one number for each row, in fp32, as long as the kernels read; a copy."""
    if x is None:
        return None
    out = torch.zeros(library().nova_linear_columns(ctypes.byref(desc)), dtype=torch.float32)
    out[: len(x)] = x
    return out
