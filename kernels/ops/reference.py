"""The obvious implementations: the oracle that every other kernel is proved against. Slow on purpose.

They compute in fp32 (float64 for float64 input) and round once at the end, on any device. What they keep lies as
torch's own implementations have it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from novainfer.kernels.ops import kv_cache
from novainfer.kernels.ops.attention import TorchAttention
from novainfer.kernels.ops.linear import TorchLinear
from novainfer.kernels.ops.registry import AttentionShape
from novainfer.kernels.step import StepTensors

__all__ = ["ReferenceAttention", "ReferenceLinear", "ReferenceRowOps"]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class ReferenceLinear(TorchLinear):
    """`x @ weight.T + bias` in fp32."""

    name: ClassVar[str] = "reference"

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]."""
        y = _wide(x) @ _wide(self.weight).T
        if self.bias is not None:
            y += _wide(self.bias)
        return y.to(x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """int64 [n] -> [n, K]."""
        return self.weight[ids]


class ReferenceRowOps:
    """The row operations, written as their definitions."""

    name: ClassVar[str] = "reference"
    row_invariant: ClassVar[bool] = False

    @classmethod
    def refuses(cls, dtype: torch.dtype, device: torch.device) -> str | None:
        """Takes everything."""
        return None

    @staticmethod
    def embed(weight: Tensor, ids: Tensor, token_pool: Tensor | None) -> Tensor:
        """Token by token -> [T, K]."""
        tokens = [token if token >= 0 or token_pool is None else max(int(token_pool[-1 - token]), 0) for token in ids]
        return torch.stack([weight[int(token)] for token in tokens])

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[M, K], [K] -> [M, K]."""
        wide = _wide(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (normed * _wide(weight)).to(x.dtype)

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x`, then the norm of it."""
        residual += x
        return ReferenceRowOps.rms_norm(residual, weight, eps)

    @staticmethod
    def qk_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, num_heads: int, num_kv_heads: int, eps: float) -> None:
        """Norm each query and key head of each row in place."""
        dim = q_norm.shape[0]
        for head in range(num_heads + num_kv_heads):
            columns = slice(head * dim, (head + 1) * dim)
            weight = q_norm if head < num_heads else k_norm
            qkv[:, columns] = ReferenceRowOps.rms_norm(qkv[:, columns], weight, eps)

    @staticmethod
    def rope(qkv: Tensor, cos_sin: Tensor, positions: Tensor, num_rotated: int, head_dim: int) -> None:
        """Rotate the first `num_rotated` heads of each row in place."""
        half = head_dim // 2
        angles = cos_sin[positions].unsqueeze(1)  # [T, 1, head_dim]
        cos, sin = angles[..., :half], angles[..., half:]
        heads = qkv[:, : num_rotated * head_dim].view(-1, num_rotated, head_dim)
        low, high = _wide(heads[..., :half]), _wide(heads[..., half:])
        rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        heads.copy_(rotated)

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor:
        """[M, 2 * I] -> [M, I]."""
        gate, up = _wide(gate_up).chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)

    @staticmethod
    def choose_experts(logits: Tensor, num_active: int, *, normalises: bool) -> tuple[Tensor, Tensor]:
        """Row by row, the likeliest expert that is left."""
        likely = torch.softmax(_wide(logits), dim=-1)
        experts = [
            sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:num_active] for row in likely.tolist()
        ]
        chosen = torch.tensor(experts, dtype=torch.int64, device=logits.device).view(-1, num_active)
        weights = likely.gather(1, chosen)
        if normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights.to(logits.dtype)

    @staticmethod
    def mix_experts(
        outputs: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """One weighted sum for each row."""
        mixed = torch.einsum("mak,ma->mk", _wide(outputs)[places], _wide(weights))
        if shared is not None and gate is not None:
            mixed += torch.sigmoid(_wide(gate)) * _wide(shared)
        return mixed.to(outputs.dtype)


class ReferenceAttention(TorchAttention):
    """One query row at a time: gather its keys, softmax, weigh its values."""

    name: ClassVar[str] = "reference"

    def __init__(self, shape: AttentionShape, parts: tuple[Tensor, ...]) -> None:
        super().__init__(shape, parts)
        self.cells = [part.flatten(1, 2) for part in parts]  # views by slot

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store rows at their slots."""
        for cells, rows in zip(self.cells, kv_cache.rows_of(self.shape, key, value), strict=True):
            cells[layer, slot_mapping] = rows

    def attend(self, layer: int, query: Tensor, step: StepTensors, scale: float, window: int | None = None) -> Tensor:
        """Row by row over the context of each -> [T, num_heads * head_dim]."""
        size = self.shape.block_size
        group = self.shape.num_heads // self.shape.num_kv_heads
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts, contexts = step.query_start.tolist(), step.context_lens.tolist()
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        for seq, context_len in enumerate(contexts):
            tokens = torch.arange(context_len, device=query.device)
            slots = step.block_tables[seq].long()[tokens // size] * size + tokens % size
            found = kv_cache.read(self.shape, [cells[layer, slots] for cells in self.cells], wide)
            keys, values = (x.repeat_interleave(group, dim=1) for x in found)  # [context, heads, head_dim]
            first, last = starts[seq], starts[seq + 1]
            for row in range(first, last):
                visible = context_len - (last - first) + (row - first) + 1
                seen = slice(0 if window is None else max(0, visible - window), visible)
                scores = torch.einsum("hd,thd->ht", _wide(query[row]), keys[seen]) * scale
                weights = torch.softmax(scores, dim=-1)
                out[row] = torch.einsum("ht,thd->hd", weights, values[seen]).to(out.dtype)
        return out.flatten(1)
