"""A loaded pre-norm decoder with rotary grouped-query attention and a gated MLP: its weights, and what computes them.

The families whose tables (models/family.py) name these parts are this: Qwen2, Qwen3, Llama and Mistral.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from novainfer.fsm.messages.mode import AUTO
from novainfer.kernels.models.config import ModelConfig
from novainfer.kernels.ops.forward import DecoderParts, Forward, Layer
from novainfer.kernels.ops.linear import TorchLinear
from novainfer.kernels.ops.registry import AttentionBackend, AttentionShape, Linear, RowOps
from novainfer.kernels.ops.row_ops import resolved
from novainfer.kernels.step import StepTensors

__all__ = ["Decoder", "Embedding"]


class Embedding:
    """Token embeddings [vocab_size, hidden_size]: a tensor of their own, or the rows of a product's weight.

    That is the output head they are tied to, or what holds them in codes, and is never multiplied by.
    """

    def __init__(self, weight: Tensor | None, head: Linear) -> None:
        self.weight = weight
        self.head = head

    def __call__(self, ids: Tensor, token_pool: Tensor | None, ops: type[RowOps]) -> Tensor:
        """int64 [T] -> [T, hidden_size], a tensor of its own; `ids` and `token_pool` as in `RowOps.embed`."""
        weight = self.weight
        if weight is None and isinstance(self.head, TorchLinear):
            weight = self.head.weight
        if weight is None:  # packed, or rounded: the head knows how
            return self.head.rows(resolved(ids, token_pool))
        return ops.embed(weight, ids, token_pool)


@dataclass(slots=True)
class Decoder:
    """A loaded model; `attach` gives it the KV cache when that has been fitted."""

    config: ModelConfig
    embedding: Embedding
    layers: list[Layer]
    final_norm: Tensor  # [hidden_size]
    head: Linear
    ops: type[RowOps]
    cos_sin: Tensor  # fp32 [max_model_len, head_dim]
    kv_dtype: str = AUTO  # how keys and values are kept: `AttentionShape.kv_dtype`
    attention: AttentionBackend | None = None
    compute: Forward | None = None  # all layers, over these parts and this cache

    def parts(self, attention: AttentionBackend) -> DecoderParts:
        """What a forward over a KV cache is made of, as it is now."""
        return DecoderParts(self.layers, self.final_norm, self.cos_sin, self.ops, attention, self.config.rms_norm_eps)

    def attach(self, attention: AttentionBackend, forward: type[Forward]) -> None:
        """Take the KV cache into use, and all other parts as they are now."""
        self.attention, self.compute = attention, None
        self.compute = forward.over(self.parts(attention))

    def detach(self) -> None:
        """Let the KV cache go."""
        self.attention = self.compute = None

    def attention_shape(self, block_size: int) -> AttentionShape:
        """The geometry its KV cache must have."""
        config = self.config
        return AttentionShape(
            config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, block_size, self.kv_dtype
        )

    def forward(self, step: StepTensors) -> Tensor | None:
        """Compute one step and fill its part of the KV cache.

        Gives the normed hidden states [num_samples, hidden_size] of the rows that are sampled from, or None
        when there are none.
        """
        if self.compute is None:
            raise RuntimeError("the KV cache is not fitted")
        return self.compute(self.embedding(step.input_ids, step.token_pool, self.ops), step)
