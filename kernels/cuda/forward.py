"""All layers of a decoder on a GPU: nine launches a layer, of which one is all between its first product and attention.

    qkv | bias, norms of heads, rotation, keys and values into the cache | attention | o | + residual, norm |
    gate_up | silu * up | down | + residual, norm

Products, attention and norms are those that the decoder was given.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from novainfer.fsm.messages.mode import AUTO
from novainfer.kernels.cuda.jit import forward
from novainfer.kernels.cuda.language import element
from novainfer.kernels.cuda.row_ops import TritonRowOps, head_config, heads_grid
from novainfer.kernels.cuda.variant import Config, Variant
from novainfer.kernels.ops import kv_cache
from novainfer.kernels.ops.forward import DecoderKind, DecoderParts, Layer, OpByOpForward
from novainfer.kernels.ops.linear import TorchLinear
from novainfer.kernels.step import StepTensors

__all__ = ["TritonBiasForward", "TritonForward", "variants"]


class TritonForward(OpByOpForward):
    """From embeddings to normed hidden states, bit for bit what the single operations give."""

    name: ClassVar[str] = "triton"
    row_invariant: ClassVar[bool] = True

    def __init__(self, parts: DecoderParts) -> None:
        super().__init__(parts)
        kv_parts = parts.attention.parts
        if parts.attention.shape.kv_dtype == "fp8":
            kv_parts = (*(part.view(torch.float8_e4m3fn) for part in kv_parts[:2]), *kv_parts[2:])
        # Keys and values of each layer, and their scales where they are quantised
        self._caches = [(*cache, None, None)[:4] for cache in zip(*kv_parts, strict=True)]

    @classmethod
    def refuses(cls, kind: DecoderKind) -> str | None:
        """None when the row operations are Triton's, and keys and values lie token by token."""
        if kind.ops is not TritonRowOps:
            return f"its row operations are {kind.ops.name}"
        if kind.attention.layout != "tokens":
            return f"its keys and values lie as {kind.attention.layout!r}"
        return None

    def _heads(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The product [T, qkv_size], and the bias that is still to be added."""
        return layer.qkv(x), None

    def _place(self, index: int, layer: Layer, x: Tensor, step: StepTensors) -> Tensor:
        """One launch behind the product."""
        qkv, bias = self._heads(layer, x)
        parts, shape = self._parts, self._parts.attention.shape
        num_all = shape.num_heads + 2 * shape.num_kv_heads
        has_bias, has_norm = bias is not None, layer.q_norm is not None
        config = _config(shape.head_dim, shape.kv_dtype, has_bias=has_bias, has_norm=has_norm)
        forward.place_heads[heads_grid(len(qkv), num_all)](
            qkv,
            qkv if bias is None else bias,
            qkv if layer.q_norm is None else layer.q_norm,
            qkv if layer.k_norm is None else layer.k_norm,
            parts.cos_sin,
            step.positions,
            step.slot_mapping,
            *self._caches[index],
            shape.num_heads,
            shape.num_kv_heads,
            parts.rms_norm_eps,
            **config.arguments,
        )
        return qkv.view(-1, num_all, shape.head_dim)[:, : shape.num_heads]


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


@functools.cache
def _config(head_dim: int, kv_dtype: str, *, has_bias: bool, has_norm: bool) -> Config:
    config = head_config(head_dim)
    constants = {
        **config.constants,
        "HAS_BIAS": has_bias,
        "HAS_NORM": has_norm,
        "LARGEST": kv_cache.LARGEST.get(kv_dtype),
        "ROUNDS": kv_dtype == "int8",
    }
    return Config(constants, config.num_warps, config.num_stages)


def variants(capability: int) -> Iterator[Variant]:
    """With a bias (Qwen2.5), with norms of heads (Qwen3), in another dtype, and with keys and values quantised."""
    for dtype, head_dim, has_bias, kv_dtype in (
        (torch.bfloat16, 64, True, AUTO),
        (torch.bfloat16, 128, True, AUTO),
        (torch.bfloat16, 128, False, AUTO),
        (torch.float16, 128, True, AUTO),
        (torch.float32, 64, False, AUTO),
        (torch.bfloat16, 128, True, "int8"),
        (torch.bfloat16, 128, False, "fp8"),
    ):
        if kv_dtype == "fp8" and capability == 80:
            continue
        kind, cell = element(dtype), {"int8": "i8", "fp8": "fp8e4nv"}.get(kv_dtype, element(dtype))
        config = _config(head_dim, kv_dtype, has_bias=has_bias, has_norm=not has_bias)
        scales = {} if kv_dtype == AUTO else dict.fromkeys(("key_scales", "value_scales"), "*fp32")
        if not scales:
            nothing = {"key_scales": None, "value_scales": None}
            config = Config({**config.constants, **nothing}, config.num_warps, config.num_stages)
        yield Variant(
            f"place_heads {kind} d{head_dim} {'bias' if has_bias else 'norms'}{f' kv {kv_dtype}' if scales else ''}",
            forward.place_heads,
            dict.fromkeys(("qkv", "bias", "q_norm", "k_norm"), f"*{kind}")
            | {"cos_sin": "*fp32", "positions": "*i64", "slot_mapping": "*i64"}
            | dict.fromkeys(("keys", "values"), f"*{cell}")
            | scales
            | {"num_heads": "i32", "num_kv_heads": "i32", "eps": "fp32"},
            config,
        )
