"""The obvious implementations: the oracle that every other kernel is proved against. Slow on purpose.

They compute in fp32 (float64 for float64 input) and round once at the end, on any device.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from novainfer.fsm.messages.mode import CHECKPOINT
from novainfer.kernels.ops.registry import AttentionShape

__all__ = ["ReferenceAttention", "ReferenceLinear", "ReferenceRowOps"]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class ReferenceLinear:
    """`x @ weight.T + bias` in fp32."""

    name: ClassVar[str] = "reference"
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


class ReferenceAttention:
    """One query row at a time: gather its keys, softmax, weigh its values."""

    name: ClassVar[str] = "reference"
    row_invariant: ClassVar[bool] = False
    layout: ClassVar[str] = "tokens"

    def __init__(self, shape: AttentionShape, parts: tuple[Tensor, ...]) -> None:
        self.shape = shape
        self.parts = parts  # [num_layers, num_blocks, block_size, num_kv_heads, head_dim]
        self.keys, self.values = (part.flatten(1, 2) for part in parts)  # views by slot

    @classmethod
    def refuses(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Takes everything."""
        return None

    @classmethod
    def bytes_per_block(cls, shape: AttentionShape, dtype: torch.dtype) -> int:
        """Keys and values of one block in all layers."""
        per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        return per_token * shape.block_size * dtype.itemsize

    @classmethod
    def allocate(cls, shape: AttentionShape, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A cache of zeros."""
        size = (shape.num_layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        keys, values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        return cls(shape, (keys, values))

    @classmethod
    def over(cls, shape: AttentionShape, parts: tuple[Tensor, ...]) -> Self:
        """On another backend's cache."""
        return cls(shape, parts)

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store rows at their slots."""
        self.keys[layer, slot_mapping] = key
        self.values[layer, slot_mapping] = value

    def attend(
        self,
        layer: int,
        query: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        scale: float,
        max_query_len: int,
        max_context_len: int,
        window: int | None = None,
    ) -> Tensor:
        """Row by row over the context of each -> [T, num_heads * head_dim]."""
        size = self.shape.block_size
        group = self.shape.num_heads // self.shape.num_kv_heads
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts, contexts = query_start.tolist(), context_lens.tolist()
        for seq, context_len in enumerate(contexts):
            tokens = torch.arange(context_len, device=query.device)
            slots = block_tables[seq].long()[tokens // size] * size + tokens % size
            keys = _wide(self.keys[layer, slots]).repeat_interleave(group, dim=1)  # [context, heads, head_dim]
            values = _wide(self.values[layer, slots]).repeat_interleave(group, dim=1)
            first, last = starts[seq], starts[seq + 1]
            for row in range(first, last):
                visible = context_len - (last - first) + (row - first) + 1
                seen = slice(0 if window is None else max(0, visible - window), visible)
                scores = torch.einsum("hd,thd->ht", _wide(query[row]), keys[seen]) * scale
                weights = torch.softmax(scores, dim=-1)
                out[row] = torch.einsum("ht,thd->hd", weights, values[seen]).to(out.dtype)
        return out.flatten(1)
