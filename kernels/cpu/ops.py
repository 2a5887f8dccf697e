"""The small operations between matrix products, one call each (ops.cpp)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from novainfer.kernels.cpu.native import DTYPE_CODES, library, num_threads, refuses
from novainfer.kernels.ops.row_ops import TorchRowOps

__all__ = ["NativeRowOps"]

# Elements below which one thread ends before a second one would have woken up.
SERIAL_ELEMENTS_MAX = 128 << 10


def _threads(elements: int) -> int:
    return 1 if elements < SERIAL_ELEMENTS_MAX else num_threads()


class NativeRowOps:
    """Row operations in bf16 and fp32; computed in fp32 and rounded once."""

    name: ClassVar[str] = "native"
    row_invariant: ClassVar[bool] = True

    @classmethod
    def refuses(cls, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when rows of this dtype can be computed on this device; else the reason."""
        return refuses(dtype, device)

    @staticmethod
    def embed(weight: Tensor, ids: Tensor, token_pool: Tensor | None) -> Tensor:
        """Rows of weight [V, K] by int64 [T] -> new [T, K], by torch."""
        return TorchRowOps.embed(weight, ids, token_pool)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[M, K], [K] -> new [M, K]."""
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=x.dtype)
        library().nova_rms_norm(
            DTYPE_CODES[x.dtype], x.data_ptr(), x.stride(0), weight.data_ptr(), eps, out.data_ptr(), rows, width,
            _threads(rows * width),
        )  # fmt: skip
        return out

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place (both contiguous), then `rms_norm(residual)` -> new [M, K]."""
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=x.dtype)
        library().nova_add_rms_norm(
            DTYPE_CODES[x.dtype], x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), rows,
            width, _threads(rows * width),
        )  # fmt: skip
        return out

    @staticmethod
    def qk_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, num_heads: int, num_kv_heads: int, eps: float) -> None:
        """Norm each query and key head of each row of qkv [T, heads * head_dim] in place."""
        rows, head_dim = qkv.shape[0], q_norm.shape[0]
        library().nova_qk_norm(
            DTYPE_CODES[qkv.dtype], qkv.data_ptr(), qkv.stride(0), q_norm.data_ptr(), k_norm.data_ptr(), num_heads,
            num_kv_heads, head_dim, eps, rows, _threads(rows * (num_heads + num_kv_heads) * head_dim),
        )  # fmt: skip

    @staticmethod
    def rope(qkv: Tensor, cos_sin: Tensor, positions: Tensor, num_rotated: int, head_dim: int) -> None:
        """Rotate the first `num_rotated` heads of each row of qkv [T, heads * head_dim] in place."""
        rows = qkv.shape[0]
        library().nova_rope(
            DTYPE_CODES[qkv.dtype], qkv.data_ptr(), qkv.stride(0), cos_sin.data_ptr(), positions.data_ptr(),
            num_rotated, head_dim, rows, _threads(rows * num_rotated * head_dim),
        )  # fmt: skip

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor:
        """Contiguous [M, 2 * I] (gate, then up) -> new [M, I]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        library().nova_silu_mul(
            DTYPE_CODES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), rows, width, _threads(rows * width)
        )
        return out

    @staticmethod
    def choose_experts(logits: Tensor, num_active: int, *, normalises: bool) -> tuple[Tensor, Tensor]:
        """Contiguous [M, E] -> int64 [M, num_active], [M, num_active]."""
        rows, num_experts = logits.shape
        chosen = torch.empty((rows, num_active), dtype=torch.int64)
        weights = torch.empty((rows, num_active), dtype=logits.dtype)
        library().nova_choose_experts(
            DTYPE_CODES[logits.dtype], logits.data_ptr(), rows, num_experts, num_active, normalises, chosen.data_ptr(),
            weights.data_ptr(), _threads(rows * num_experts * num_active),
        )  # fmt: skip
        return chosen, weights

    @staticmethod
    def mix_experts(
        outputs: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """[M * A, K] by int64 [M, A] and [M, A], all contiguous -> new [M, K]."""
        (rows, num_active), width = places.shape, outputs.shape[1]
        out = torch.empty((rows, width), dtype=outputs.dtype)
        library().nova_mix_experts(
            DTYPE_CODES[outputs.dtype], outputs.data_ptr(), places.data_ptr(), weights.data_ptr(),
            None if shared is None else shared.data_ptr(), None if gate is None else gate.data_ptr(), out.data_ptr(),
            rows, num_active, width, _threads(rows * num_active * width),
        )  # fmt: skip
        return out
