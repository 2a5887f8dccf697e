"""Matrix products by torch: `F.linear` everywhere, and weights prepacked by oneDNN on the CPU."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from novainfer.fsm.messages.mode import CHECKPOINT
from novainfer.kernels.memory import use_huge_pages

__all__ = ["MkldnnLinear", "TorchLinear", "sum_in_fp32"]

# One packing serves every M; only large M cares about the hint, and 512 was best there (223 against 157 GF/s
# at M = 256 with bf16 weights [9728, 896] on one Zen 4 core; M <= 64 within noise for every hint).
PACK_ROWS_HINT = 512


def sum_in_fp32() -> None:
    """Let cuBLAS multiply fp32 as it is, not as TF32, and add parts of a sum of bf16 or fp16 in fp32; of a process."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        matmul.fp32_precision = "ieee"
    else:  # before torch 2.9
        matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


class TorchLinear:
    """`torch.nn.functional.linear` on the weight as it came: any device, any dtype."""

    name: ClassVar[str] = "torch"
    precision: ClassVar[str] = CHECKPOINT
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

    The operators are torch's own but private (torch.compile's freezing uses them), so the self-test guards them. The
    packed tensor is opaque, and how it lies depends on the CPU: only oneDNN can read it, and unpacks it whole. So
    an output head that is tied to the embeddings is not packed (kernels/weights/loader.py).
    """

    name: ClassVar[str] = "mkldnn"
    precision: ClassVar[str] = CHECKPOINT
    row_invariant: ClassVar[bool] = False
    gathers_rows: ClassVar[bool] = False

    def __init__(self, packed: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> None:
        self.packed = packed
        self.bias = bias
        self.out_features, self.in_features = shape
        packed_bytes = int(torch.ops.mkldnn._nbytes(packed))
        self.weight_bytes = packed_bytes + (0 if bias is None else bias.nbytes)

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
        """int64 [n] -> [n, K]; the whole weight is unpacked for it."""
        unpacked: Tensor = self.packed.to_dense()
        return unpacked.index_select(0, ids)
