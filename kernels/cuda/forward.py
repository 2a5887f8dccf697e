"""All layers of a decoder on a GPU: nine launches a layer, of which one is all between its first product and attention.

    qkv | bias, norms of heads, rotation, keys and values into the cache | attention | o | + residual, norm |
    gate_up | silu * up | down | + residual, norm

Products, attention and norms are those that the decoder was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from novainfer.fsm.messages.mode import AUTO
from novainfer.kernels.cuda.jit import forward
from novainfer.kernels.cuda.language import element
from novainfer.kernels.cuda.row_ops import TritonRowOps, head_config, heads_grid
from novainfer.kernels.cuda.variant import Config, Variant
from novainfer.kernels.ops.forward import DecoderKind, DecoderParts, Layer
from novainfer.kernels.ops.linear import TorchLinear
from novainfer.kernels.step import StepTensors

__all__ = ["TritonBiasForward", "TritonForward", "variants"]


class TritonForward:
    """From embeddings to normed hidden states, bit for bit what the single operations give."""

    name: ClassVar[str] = "triton"
    row_invariant: ClassVar[bool] = True

    def __init__(self, parts: DecoderParts) -> None:
        self._parts = parts
        self._caches = list(zip(*parts.attention.parts, strict=True))  # keys and values of each layer

    @classmethod
    def refuses(cls, kind: DecoderKind) -> str | None:
        """None when the row operations are Triton's, and keys and values lie token by token."""
        if kind.ops is not TritonRowOps:
            return f"its row operations are {kind.ops.name}"
        if kind.attention.layout != "tokens":
            return f"its keys and values lie as {kind.attention.layout!r}"
        if kind.attention_shape.kv_dtype != AUTO:
            return f"its keys and values lie in {kind.attention_shape.kv_dtype}"
        return None

    @classmethod
    def over(cls, parts: DecoderParts) -> Self:
        """Over these parts."""
        return cls(parts)

    def _heads(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The product [T, qkv_size], and the bias that is still to be added."""
        return layer.qkv(x), None

    def _place(self, index: int, layer: Layer, qkv: Tensor, bias: Tensor | None, step: StepTensors) -> Tensor:
        """Queries [T, num_heads, head_dim]; keys and values lie in the cache then."""
        parts, shape = self._parts, self._parts.attention.shape
        num_all = shape.num_heads + 2 * shape.num_kv_heads
        keys, values = self._caches[index]
        config = _config(shape.head_dim, has_bias=bias is not None, has_norm=layer.q_norm is not None)
        forward.place_heads[heads_grid(len(qkv), num_all)](
            qkv,
            qkv if bias is None else bias,
            qkv if layer.q_norm is None else layer.q_norm,
            qkv if layer.k_norm is None else layer.k_norm,
            parts.cos_sin,
            step.positions,
            step.slot_mapping,
            keys,
            values,
            shape.num_heads,
            shape.num_kv_heads,
            parts.rms_norm_eps,
            **config.arguments,
        )
        return qkv.view(-1, num_all, shape.head_dim)[:, : shape.num_heads]

    def __call__(self, hidden: Tensor, step: StepTensors) -> Tensor | None:
        """[num_tokens, hidden_size] (overwritten) -> [num_samples, hidden_size], or None without samples."""
        parts = self._parts
        layers, ops, attention, eps = parts.layers, parts.ops, parts.attention, parts.rms_norm_eps
        last = len(layers) - 1
        residual = hidden
        x = ops.rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            query = self._place(index, layer, *self._heads(layer, x), step)
            if index == last and step.num_samples == 0:
                return None
            x = attention.attend(index, query, step, attention.shape.head_dim**-0.5, layer.sliding_window)
            if index == last and step.logit_rows is not None:
                x = x.index_select(0, step.logit_rows)
                residual = residual.index_select(0, step.logit_rows)
            x = ops.add_rms_norm(layer.o(x), residual, layer.post_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            norm = parts.final_norm if index == last else layers[index + 1].input_norm
            x = ops.add_rms_norm(x, residual, norm, eps)
        return x


class TritonBiasForward(TritonForward):
    """The same, where the bias of queries, keys and values is added behind torch's product.

    cuBLAS has a product of one row without the bias: torch copies it into the result before, in a launch of its own.
    The product is rounded before the bias comes, so bits differ from those of the single operations.
    """

    name: ClassVar[str] = "triton-bias"
    row_invariant: ClassVar[bool] = False

    @classmethod
    def refuses(cls, kind: DecoderKind) -> str | None:
        """As above, and some product of torch's has a bias."""
        for layer in kind.layers:
            if dict(layer.products)["qkv"] is TorchLinear and "qkv" in layer.biased:
                return super().refuses(kind)
        return "no product of torch's has a bias to take"

    def _heads(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Torch's product without its bias."""
        if type(layer.qkv) is TorchLinear:
            return F.linear(x, layer.qkv.weight), layer.qkv.bias
        return super()._heads(layer, x)


def _config(head_dim: int, *, has_bias: bool, has_norm: bool) -> Config:
    config = head_config(head_dim)
    return Config({**config.constants, "HAS_BIAS": has_bias, "HAS_NORM": has_norm}, config.num_warps, config.num_stages)


def variants(capability: int) -> Iterator[Variant]:
    """With a bias (Qwen2.5), with norms of heads (Qwen3), and in another dtype."""
    for dtype, head_dim, has_bias in (
        (torch.bfloat16, 64, True),
        (torch.bfloat16, 128, True),
        (torch.bfloat16, 128, False),
        (torch.float16, 128, True),
        (torch.float32, 64, False),
    ):
        kind = element(dtype)
        yield Variant(
            f"place_heads {kind} d{head_dim} {'bias' if has_bias else 'norms'}",
            forward.place_heads,
            dict.fromkeys(("qkv", "bias", "q_norm", "k_norm", "keys", "values"), f"*{kind}")
            | {"cos_sin": "*fp32", "positions": "*i64", "slot_mapping": "*i64"}
            | {"num_heads": "i32", "num_kv_heads": "i32", "eps": "fp32"},
            _config(head_dim, has_bias=has_bias, has_norm=not has_bias),
        )
