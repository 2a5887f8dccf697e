"""The forward operation: all layers of a pre-norm decoder, from embeddings to normed hidden states.

`OpByOpForward` calls one kernel after the other: it runs on any device, and is what others are proved against. One
function serves prefill, chunks and decode: they differ only in the arrays of `StepTensors`.

A forward is chosen before the KV cache exists, from the kernels that the model's parts were given (`DecoderKind`), and
made of the parts when they are there (`over`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from novainfer.kernels.ops.registry import AttentionBackend, AttentionShape, Linear, RowOps
from novainfer.kernels.step import StepTensors

__all__ = [
    "EXPERT_PRODUCTS",
    "NORMS",
    "PRODUCTS",
    "SHAPES",
    "DecoderKind",
    "DecoderParts",
    "Forward",
    "GraphedForward",
    "Layer",
    "LayerKind",
    "OpByOpForward",
]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a forward must know of a layer before there is one; a decoder has a few kinds at most."""

    products: tuple[tuple[str, type[Linear]], ...]  # in the order of `PRODUCTS`; a part of experts may have several
    biased: frozenset[str] = frozenset()  # the products that have a bias
    norms: frozenset[str] = frozenset()  # those of `NORMS` that it has
    is_sliding: bool = False  # its rows see a window
    num_active_experts: int = 0
    normalises_experts: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether its MLP is a mixture of experts."""
        return self.num_active_experts > 0


@dataclass(frozen=True, slots=True)
class DecoderKind:
    """By which a forward says whether it can compute a decoder, and by which it is tested."""

    layers: frozenset[LayerKind]
    ops: type[RowOps]
    attention: type[AttentionBackend]
    attention_shape: AttentionShape


def _shape(*sizes: str) -> dict[str, tuple[str, ...]]:
    return {"shape": sizes}


@dataclass(slots=True)
class Layer:
    """One layer's weights; q, k and v are one product, and so are gate and up. A switch of mode replaces products.

    Each has its shape beside it, in sizes by their names: self-tests make their layers by that. A layer has an MLP
    (`gate_up`, `down`) or a mixture of experts: `router`, `experts_…`, and `shared_…` where all rows are given to one.
    """

    input_norm: Tensor = field(metadata=_shape("hidden_size"))
    qkv: Linear = field(metadata=_shape("qkv_size", "hidden_size"))
    o: Linear = field(metadata=_shape("hidden_size", "q_size"))
    post_norm: Tensor = field(metadata=_shape("hidden_size"))
    gate_up: Linear | None = field(default=None, metadata=_shape("gate_up_size", "hidden_size"))
    down: Linear | None = field(default=None, metadata=_shape("hidden_size", "intermediate_size"))
    # Of each query head, and of each key head, before its rotation; there together or not at all.
    q_norm: Tensor | None = field(default=None, metadata=_shape("head_dim"))
    k_norm: Tensor | None = field(default=None, metadata=_shape("head_dim"))
    sliding_window: int | None = None  # tokens that a row sees, itself among them; None: its whole context
    router: Linear | None = field(default=None, metadata=_shape("num_experts", "hidden_size"))
    experts_gate_up: list[Linear] | None = field(default=None, metadata=_shape("moe_gate_up_size", "hidden_size"))
    experts_down: list[Linear] | None = field(default=None, metadata=_shape("hidden_size", "moe_intermediate_size"))
    shared_gate_up: Linear | None = field(default=None, metadata=_shape("shared_gate_up_size", "hidden_size"))
    shared_down: Linear | None = field(default=None, metadata=_shape("hidden_size", "shared_expert_intermediate_size"))
    shared_gate: Linear | None = field(default=None, metadata=_shape("1", "hidden_size"))
    num_active_experts: int = 0  # that a row is given to
    normalises_experts: bool = False  # whether their weights sum to 1

    def product(self, part: str, expert: int | None = None) -> Linear:
        """One of its products, by its part and, of a part that each expert has, the expert."""
        found = getattr(self, part)
        product: Linear = found if expert is None else found[expert]
        return product

    def replace(self, part: str, expert: int | None, product: Linear) -> None:
        """Put another product in the place of one."""
        if expert is None:
            setattr(self, part, product)
        else:
            getattr(self, part)[expert] = product

    @property
    def kind(self) -> LayerKind:
        """What it is now."""
        parts = {name: getattr(self, name) for name in PRODUCTS}
        products = [
            (name, linear)
            for name, part in parts.items()
            if part is not None
            for linear in (part if isinstance(part, list) else [part])
        ]
        return LayerKind(
            tuple(dict.fromkeys((name, type(linear)) for name, linear in products)),
            frozenset(name for name, linear in products if linear.bias is not None),
            frozenset(name for name in NORMS if getattr(self, name) is not None),
            self.sliding_window is not None,
            self.num_active_experts,
            self.normalises_experts,
        )


SHAPES: dict[str, tuple[str, ...]] = {part.name: part.metadata["shape"] for part in fields(Layer) if part.metadata}
EXPERT_PRODUCTS = ("experts_gate_up", "experts_down")  # each expert has one
PRODUCTS = tuple(name for name, shape in SHAPES.items() if len(shape) == 2)
NORMS = tuple(name for name, shape in SHAPES.items() if len(shape) == 1)


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """What a forward computes with; it keeps them alive."""

    layers: Sequence[Layer]
    final_norm: Tensor  # [hidden_size]
    cos_sin: Tensor  # fp32 [max_model_len, head_dim]
    ops: type[RowOps]
    attention: AttentionBackend
    rms_norm_eps: float

    @property
    def kind(self) -> DecoderKind:
        """What they are now."""
        return DecoderKind(
            frozenset(layer.kind for layer in self.layers), self.ops, type(self.attention), self.attention.shape
        )


class Forward(Protocol):
    """One step through all layers, over parts that stay what they are: after a switch it is made anew."""

    name: ClassVar[str]
    row_invariant: ClassVar[bool]  # promises the bits that its parts give one by one, and so what they promise of rows

    @classmethod
    def refuses(cls, kind: DecoderKind) -> str | None:
        """None when a decoder of this kind can be computed; else the reason."""

    @classmethod
    def over(cls, parts: DecoderParts) -> Self:
        """Over parts of a kind that was not refused."""

    def __call__(self, hidden: Tensor, step: StepTensors) -> Tensor | None:
        """Compute one step and fill its part of the KV cache.

        Embeddings [num_tokens, hidden_size] (contiguous; overwritten) -> normed hidden states [num_samples,
        hidden_size] of the rows that are sampled from, or None when there are none: then nothing behind the last
        layer's keys and values is computed.
        """


@runtime_checkable
class GraphedForward(Forward, Protocol):
    """A forward that replays decode steps which are padded to some sizes, when it has captured them."""

    def capture(self, max_num_rows: int, blank: Callable[[int], StepTensors]) -> None:
        """Capture steps of up to `max_num_rows` rows; `blank(bucket)` gives one of padding alone (`StepBuffers`).

        Raises what the allocator raises, and `LoadError` where they cannot be captured or give something else; then
        nothing is captured. What was before is let go.
        """

    def bucket(self, num_rows: int) -> int:
        """The rows that a step of `num_rows` rows is to be padded to; 0: it is not to be padded."""


def mlp(layer: Layer, x: Tensor, ops: type[RowOps]) -> Tensor:
    """The MLP of a layer, or its mixture of experts: [M, hidden_size] -> [M, hidden_size]."""
    if layer.gate_up is not None and layer.down is not None:
        return layer.down(ops.silu_mul(layer.gate_up(x)))
    assert layer.router is not None
    assert layer.experts_gate_up is not None
    assert layer.experts_down is not None
    num_active = layer.num_active_experts
    chosen, weights = ops.choose_experts(layer.router(x), num_active, normalises=layer.normalises_experts)
    order = chosen.flatten().argsort(stable=True)  # rows by expert, each as often as it was given to one
    rows = x.index_select(0, order // num_active)
    counts = chosen.flatten().bincount(minlength=len(layer.experts_down)).tolist()  # waits for the device
    outputs = [
        down(ops.silu_mul(gate_up(rows_of)))
        for gate_up, down, rows_of in zip(
            layer.experts_gate_up, layer.experts_down, torch.split(rows, counts), strict=True
        )
        if len(rows_of)
    ]
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    shared = gate = None
    if layer.shared_gate_up is not None and layer.shared_down is not None and layer.shared_gate is not None:
        shared = layer.shared_down(ops.silu_mul(layer.shared_gate_up(x)))
        gate = layer.shared_gate(x)
    return ops.mix_experts(torch.cat(outputs), places.view(chosen.shape), weights, shared, gate)


class OpByOpForward:
    """One kernel after the other: any device, any parts."""

    name: ClassVar[str] = "op-by-op"
    row_invariant: ClassVar[bool] = True

    def __init__(self, parts: DecoderParts) -> None:
        self._parts = parts

    @classmethod
    def refuses(cls, kind: DecoderKind) -> str | None:
        """Takes everything."""
        return None

    @classmethod
    def over(cls, parts: DecoderParts) -> Self:
        """Over these parts."""
        return cls(parts)

    def _place(self, index: int, layer: Layer, x: Tensor, step: StepTensors) -> Tensor:
        """Normed rows x [T, hidden_size] -> queries [T, num_heads, head_dim]; keys and values are in the cache then."""
        parts, attention = self._parts, self._parts.attention
        shape = attention.shape
        num_heads, dim = shape.num_heads, shape.head_dim
        num_rotated = num_heads + shape.num_kv_heads
        qkv = layer.qkv(x)
        if layer.q_norm is not None and layer.k_norm is not None:
            parts.ops.qk_norm(qkv, layer.q_norm, layer.k_norm, num_heads, shape.num_kv_heads, parts.rms_norm_eps)
        parts.ops.rope(qkv, parts.cos_sin, step.positions, num_rotated, dim)
        heads = qkv.view(len(qkv), -1, dim)
        attention.write(index, heads[:, num_heads:num_rotated], heads[:, num_rotated:], step.slot_mapping)
        return heads[:, :num_heads]

    def __call__(self, hidden: Tensor, step: StepTensors) -> Tensor | None:
        """[num_tokens, hidden_size] (overwritten) -> [num_samples, hidden_size], or None without samples."""
        parts = self._parts
        layers, ops, attention, eps = parts.layers, parts.ops, parts.attention, parts.rms_norm_eps
        scale = attention.shape.head_dim**-0.5
        last = len(layers) - 1

        residual = hidden
        x = ops.rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            query = self._place(index, layer, x, step)
            if index == last and step.num_samples == 0:
                return None
            x = attention.attend(index, query, step, scale, layer.sliding_window)
            if index == last and step.logit_rows is not None:
                x = x.index_select(0, step.logit_rows)
                residual = residual.index_select(0, step.logit_rows)
            x = ops.add_rms_norm(layer.o(x), residual, layer.post_norm, eps)
            x = mlp(layer, x, ops)
            norm = parts.final_norm if index == last else layers[index + 1].input_norm
            x = ops.add_rms_norm(x, residual, norm, eps)
        return x
