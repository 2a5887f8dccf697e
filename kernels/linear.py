"""Matrix products by torch: `F.linear` everywhere, and weights prepacked by oneDNN on the CPU."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from novainfer.kernels.memory import use_huge_pages

__all__ = ["MkldnnLinear", "TorchLinear"]

# One packing serves every M; only large M cares about the hint, and 512 was best there (223 against 157 GF/s
# at M = 256 with bf16 weights [9728, 896] on one Zen 4 core; M <= 64 within noise for every hint).
PACK_ROWS_HINT = 512


class TorchLinear:
    """`torch.nn.functional.linear` on the weight as it came: any device, any dtype."""

    name: ClassVar[str] = "torch"
    row_invariant: ClassVar[bool] = False
    gathers_rows: ClassVar[bool] = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    @classmethod
    def refuses(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """Takes everything."""
        return None

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Keep weight [N, K] and bias [N] as they are."""
        return cls(weight, bias)

    @classmethod
    def shared_layout(cls) -> str:
        """The tensors as they are."""
        return cls.name

    @property
    def tensors(self) -> list[Tensor]:
        """Weight and bias."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @classmethod
    def over(cls, out_features: int, in_features: int, dtype: torch.dtype, tensors: list[Tensor]) -> Self:
        """On another one's tensors."""
        return cls(*tensors) if len(tensors) == 2 else cls(tensors[0], None)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]."""
        return F.linear(x, self.weight, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        """int64 [n] -> [n, K]."""
        return self.weight.index_select(0, ids)


class MkldnnLinear:
    """oneDNN's blocked weight layout, packed once: about half the time of `F.linear` at M <= 8 in bf16.

    The operators are torch's own but private (torch.compile's freezing uses them), so the self-test guards
    them. The packed tensor is opaque; `rows` reads it through its address. oneDNN's blocked layouts are
    separable: element (n, k) lies at `offset_n(n) + offset_k(k)`, and both are learned by packing a small
    probe.
    """

    name: ClassVar[str] = "mkldnn"
    row_invariant: ClassVar[bool] = False
    gathers_rows: ClassVar[bool] = True

    def __init__(self, packed: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> None:
        self.packed = packed
        self.bias = bias
        self.out_features, self.in_features = shape
        packed_bytes = int(torch.ops.mkldnn._nbytes(packed))
        self.weight_bytes = packed_bytes + (0 if bias is None else bias.nbytes)
        self._layout: _Layout | None = None

    @classmethod
    def refuses(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """CPU, fp32 or bf16, and a torch that has the private operators."""
        if device.type != "cpu":
            return "only on the CPU"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"no {dtype}"
        if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return "this torch has no oneDNN"
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "oneDNN has no bf16 on this CPU"
        return None

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Reorder weight [N, K] into oneDNN's layout; the original can be freed."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)
        use_huge_pages(int(torch.ops.mkldnn.data_ptr(packed)), int(torch.ops.mkldnn._nbytes(packed)))
        return cls(packed, bias, (weight.shape[0], weight.shape[1]))

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """int64 [n] -> [n, K]."""
        if self._layout is None:
            self._layout = _Layout(self.packed, self.out_features, self.in_features)
        return self._layout.rows(ids)


class _Layout:
    """Where oneDNN put element (n, k) of a packed weight: `row_base(n) + column_offset[k]`, in elements.

    Learned by packing a probe of the same width whose values name their row or column; rows repeat in groups.
    Raises RuntimeError when the layout is not of that form.
    """

    ROWS = 256  # whole numbers up to 256 are exact in bf16, so one probe names every row

    def __init__(self, packed: Tensor, out_features: int, in_features: int) -> None:
        num_rows = min(out_features, self.ROWS)
        self.flat = _elements(packed)  # borrows the memory of `packed`, whose owner also owns this object
        self.row_offsets = self._probe_rows(num_rows, in_features, packed.dtype)
        self.column_offsets = self._probe_columns(num_rows, in_features, packed.dtype)
        self.group, self.stride = self._find_groups(out_features)

    def rows(self, ids: Tensor) -> Tensor:
        """int64 [n] -> [n, in_features]."""
        base = ids // self.group * self.stride + self.row_offsets[ids % self.group]
        return self.flat[base[:, None] + self.column_offsets]

    @staticmethod
    def _places(probe: Tensor, count: int) -> Tensor:
        """The offsets of the values 1..count, in that order, in the packed probe."""
        packed = torch.ops.mkldnn._reorder_linear_weight(probe, PACK_ROWS_HINT)
        flat = _elements(packed)
        places = flat.nonzero().flatten()
        order = torch.argsort(flat[places], stable=True)
        if len(places) != count:
            raise RuntimeError("oneDNN packed a probe in a layout that cannot be read back")
        return places[order]

    def _probe_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        probe = torch.zeros(num_rows, width, dtype=dtype)
        probe[:, 0] = torch.arange(1, num_rows + 1)
        return self._places(probe, num_rows)

    def _probe_columns(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        probe = torch.zeros(num_rows, width, dtype=dtype)
        offsets = []
        for begin in range(0, width, self.ROWS):
            count = min(self.ROWS, width - begin)
            probe[0] = 0
            probe[0, begin : begin + count] = torch.arange(1, count + 1)
            offsets.append(self._places(probe, count))
        return torch.cat(offsets)

    def _find_groups(self, out_features: int) -> tuple[int, int]:
        learned = len(self.row_offsets)
        if learned == out_features:
            return out_features, 0
        ids = torch.arange(learned)
        for group in (16, 32, 48, 64, 80, 96, 128):
            stride = int(self.row_offsets[group])
            if torch.equal(self.row_offsets, ids // group * stride + self.row_offsets[ids % group]):
                return group, stride
        raise RuntimeError("oneDNN packed a weight in groups of rows that cannot be told")


def _elements(packed: Tensor) -> Tensor:
    """The memory of an opaque oneDNN tensor as a vector (to be used only while `packed` lives)."""
    count = int(torch.ops.mkldnn._nbytes(packed)) // packed.dtype.itemsize
    address = int(torch.ops.mkldnn.data_ptr(packed))
    buffer: Any = (ctypes.c_char * (count * packed.dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=packed.dtype, count=count)
