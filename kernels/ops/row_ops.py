"""The row operations in as few torch calls as torch has for them: any device, any dtype."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

__all__ = ["TorchRowOps", "resolved"]


def resolved(ids: Tensor, token_pool: Tensor | None) -> Tensor:
    """Tokens int64 [T]: each `-1 - slot` among ids is what the pool int64 [max_num_seqs] holds, 0 for `NO_TOKEN`."""
    if token_pool is None:
        return ids
    last = token_pool.index_select(0, (-1 - ids).clamp_min_(0)).clamp_min_(0)
    return torch.where(ids < 0, last, ids)


class TorchRowOps:
    """`F.rms_norm`, `F.silu` and rotation in the rows' own memory."""

    name: ClassVar[str] = "torch"
    row_invariant: ClassVar[bool] = False  # torch promises nothing about its vectorised tails

    @classmethod
    def refuses(cls, dtype: torch.dtype, device: torch.device) -> str | None:
        """Takes everything."""
        return None

    @staticmethod
    def embed(weight: Tensor, ids: Tensor, token_pool: Tensor | None) -> Tensor:
        """Rows of weight [V, K] by int64 [T] -> new [T, K]."""
        return weight.index_select(0, resolved(ids, token_pool))

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[M, K], [K] -> [M, K]."""
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x`, then the norm of it."""
        residual += x
        return F.rms_norm(residual, weight.shape, weight, eps)

    @staticmethod
    def qk_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, num_heads: int, num_kv_heads: int, eps: float) -> None:
        """Norm each query and key head of each row in place."""
        heads = qkv.view(len(qkv), -1, q_norm.shape[0])
        for weight, part in ((q_norm, heads[:, :num_heads]), (k_norm, heads[:, num_heads : num_heads + num_kv_heads])):
            part.copy_(F.rms_norm(part, weight.shape, weight, eps))

    @staticmethod
    def rope(qkv: Tensor, cos_sin: Tensor, positions: Tensor, num_rotated: int, head_dim: int) -> None:
        """Rotate the first `num_rotated` heads of each row in place; products in fp32, rounded once."""
        half = head_dim // 2
        angles = cos_sin.index_select(0, positions).unsqueeze(1)  # [T, 1, head_dim]
        cos, sin = angles[..., :half], angles[..., half:]
        heads = qkv[:, : num_rotated * head_dim].view(-1, num_rotated, head_dim)
        low, high = heads[..., :half], heads[..., half:]
        rotated_low = low * cos - high * sin  # type promotion makes these fp32
        high.copy_(high * cos + low * sin)
        low.copy_(rotated_low)

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor:
        """[M, 2 * I] -> [M, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def choose_experts(logits: Tensor, num_active: int, *, normalises: bool) -> tuple[Tensor, Tensor]:
        """[M, E] -> int64 [M, num_active], [M, num_active]."""
        likely, experts = logits.softmax(-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
        weights = likely[:, :num_active]
        if normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts[:, :num_active].contiguous(), weights.to(logits.dtype)

    @staticmethod
    def mix_experts(
        outputs: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """[M * A, K] by int64 [M, A] and [M, A] -> new [M, K]; one after the other: a row's own order."""
        total = torch.zeros(len(places), outputs.shape[1], dtype=torch.float32, device=outputs.device)
        for place, weight in zip(places.unbind(1), torch.split(weights.float(), 1, dim=1), strict=True):
            total += outputs.index_select(0, place) * weight
        if shared is not None and gate is not None:
            total += shared * gate.float().sigmoid()
        return total.to(outputs.dtype)
