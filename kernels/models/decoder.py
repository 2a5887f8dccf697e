"""The forward pass of a pre-norm decoder with rotary grouped-query attention and a gated MLP.

Qwen2 and Qwen2.5 are this; Llama and Qwen3 differ in what their configs switch. One function serves
prefill, chunks and decode: they differ only in the arrays of `StepTensors`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from novainfer.kernels.config import ModelConfig
from novainfer.kernels.cpu.forward import NativeForward
from novainfer.kernels.cpu.ops import NativeRowOps
from novainfer.kernels.registry import AttentionBackend, AttentionShape, Linear, RowOps
from novainfer.kernels.step import StepTensors

__all__ = ["Decoder", "Embedding", "Layer", "rope_table"]


@dataclass(slots=True)
class Layer:
    """One layer's weights; q, k and v are one product, and so are gate and up. A switch of mode replaces products."""

    input_norm: Tensor  # [hidden_size]
    qkv: Linear
    o: Linear
    post_norm: Tensor  # [hidden_size]
    gate_up: Linear
    down: Linear


class Embedding:
    """Token embeddings [vocab_size, hidden_size]: a tensor of their own, or the rows of the tied output head."""

    def __init__(self, weight: Tensor | None, head: Linear) -> None:
        self.weight = weight
        self.head = head

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size], a tensor of its own."""
        return self.head.rows(ids) if self.weight is None else self.weight.index_select(0, ids)


def rope_table(config: ModelConfig, max_model_len: int, device: torch.device) -> Tensor:
    """fp32 [max_model_len, head_dim]: for each position the cosines of its angles, then the sines.

    The angles are computed in fp32 as transformers does it, so that both round alike.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse_frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inverse_frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)


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
    attention: AttentionBackend | None = None
    fused: NativeForward | None = None  # all layers in one call, where every part is native

    def attach(self, attention: AttentionBackend) -> None:
        """Take the KV cache into use, and all other parts as they are now; raises nothing."""
        self.attention, self.fused = attention, None
        if self.ops is NativeRowOps:
            eps, scale = self.config.rms_norm_eps, self.config.head_dim**-0.5
            self.fused = NativeForward.of(self.layers, self.final_norm, self.cos_sin, attention, eps, scale)

    def detach(self) -> None:
        """Let the KV cache go."""
        self.attention = self.fused = None

    def attention_shape(self, block_size: int) -> AttentionShape:
        """The geometry its KV cache must have."""
        config = self.config
        return AttentionShape(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, block_size)

    def forward(self, step: StepTensors) -> Tensor | None:
        """Compute one step and fill its part of the KV cache.

        Gives the normed hidden states [num_samples, hidden_size] of the rows that are sampled from, or None
        when there are none: then nothing behind the last layer's keys and values is computed.
        """
        attention, ops, config = self.attention, self.ops, self.config
        if attention is None:
            raise RuntimeError("the KV cache is not fitted")
        eps, dim = config.rms_norm_eps, config.head_dim
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        num_rotated, num_all = num_heads + num_kv_heads, num_heads + 2 * num_kv_heads
        scale = dim**-0.5
        last = len(self.layers) - 1

        residual = self.embedding(step.input_ids)  # [T, hidden_size]
        if self.fused is not None:
            return self.fused(residual, step)  # the same bits as what follows
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(x)
            ops.rope(qkv, self.cos_sin, step.positions, num_rotated, dim)
            heads = qkv.view(-1, num_all, dim)
            attention.write(index, heads[:, num_heads:num_rotated], heads[:, num_rotated:], step.slot_mapping)
            if index == last and step.num_samples == 0:
                return None
            x = attention.attend(
                index,
                heads[:, :num_heads],
                step.block_tables,
                step.query_start,
                step.context_lens,
                scale,
                step.max_query_len,
                step.max_context_len,
            )
            if index == last and step.logit_rows is not None:
                x = x.index_select(0, step.logit_rows)
                residual = residual.index_select(0, step.logit_rows)
            x = ops.add_rms_norm(layer.o(x), residual, layer.post_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            norm = self.final_norm if index == last else self.layers[index + 1].input_norm
            x = ops.add_rms_norm(x, residual, norm, eps)
        return x
