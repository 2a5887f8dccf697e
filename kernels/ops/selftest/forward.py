"""Proves what computes all layers of a decoder at once, against its kernels one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from novainfer.kernels.ops.forward import (
    EXPERT_PRODUCTS,
    SHAPES,
    DecoderKind,
    DecoderParts,
    Layer,
    LayerKind,
    OpByOpForward,
)
from novainfer.kernels.ops.selftest.numbers import EPS, differs, make_step, normal

__all__ = ["check_forward"]

LAYERS = 2  # of the decoder that a forward is proved on, at least: one error on the other
HIDDEN_SIZE = 64  # of the decoder that a forward is proved on
INTERMEDIATE_SIZES = (40, 64)  # halves of a product that share a panel, and halves that do not


def check_forward(forward: Any, kind: DecoderKind, dtype: torch.dtype, device: torch.device) -> str | None:
    """Steps of every sort through a small decoder of this kind, against its kernels one by one.

    Hidden states and what is written to the KV cache have the same bits where the forward promises it.
    """
    if forward is OpByOpForward:
        return None  # it is what the others are compared with, and its kernels are proved one by one
    for intermediate_size in INTERMEDIATE_SIZES:
        layers = _small_layers(kind, intermediate_size, dtype, device)
        expected, got = (_run_forward(operation, kind, layers, dtype, device) for operation in (OpByOpForward, forward))
        if got.keys() != expected.keys():
            return f"gives {', '.join(got)} where one kernel after the other gives {', '.join(expected)}"
        for name, tensor in expected.items():
            wrong = differs(name, got[name], tensor)
            if wrong is not None:
                return wrong
            if forward.row_invariant and not torch.equal(got[name], tensor):
                return f"{name} has other bits than one kernel after the other gives"
    return None


def _small_layers(kind: DecoderKind, intermediate_size: int, dtype: torch.dtype, device: torch.device) -> list[Layer]:
    """One layer of each kind, two at least."""
    kinds = sorted(kind.layers, key=repr)
    shape = kind.attention_shape
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {
        "head_dim": shape.head_dim,
        "hidden_size": HIDDEN_SIZE,
        "q_size": q_size,
        "qkv_size": q_size + 2 * kv_size,
        "intermediate_size": intermediate_size,
        "gate_up_size": 2 * intermediate_size,
        "moe_intermediate_size": intermediate_size,
        "moe_gate_up_size": 2 * intermediate_size,
        "shared_expert_intermediate_size": intermediate_size + 8,
        "shared_gate_up_size": 2 * (intermediate_size + 8),
        "1": 1,
    }

    def layer(kind: LayerKind, seed: int) -> Layer:
        parts: dict[str, Any] = {}
        num_experts = kind.num_active_experts + 3
        for number, (name, named) in enumerate(SHAPES.items(), seed):
            size = tuple(num_experts if of == "num_experts" else sizes[of] for of in named)
            kernels = [kernel for part, kernel in kind.products if part == name]
            if name in kind.norms:
                parts[name] = 1 + normal(size, number, dtype, device) / 8
            elif name in EXPERT_PRODUCTS and kernels:
                parts[name] = [
                    kernels[expert % len(kernels)].pack(
                        normal(size, 1000 * expert + number, dtype, device) / size[1] ** 0.5, None
                    )
                    for expert in range(num_experts)
                ]
            elif kernels:
                bias = normal(size[:1], number, dtype, device) if name in kind.biased else None
                parts[name] = kernels[0].pack(normal(size, number, dtype, device) / size[1] ** 0.5, bias)
        return Layer(
            **parts,
            sliding_window=shape.block_size + 3 if kind.is_sliding else None,
            num_active_experts=kind.num_active_experts,
            normalises_experts=kind.normalises_experts,
        )

    return [layer(kinds[index % len(kinds)], 100 * index) for index in range(max(LAYERS, len(kinds)))]


def _run_forward(
    operation: Any, kind: DecoderKind, layers: list[Layer], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """What the steps give and leave in the cache, by names for people."""
    size = kind.attention_shape.block_size
    num_positions = 3 * size + 7
    tables = torch.randperm(3 * -(-num_positions // size), generator=torch.Generator().manual_seed(50)).int()
    shape = dataclasses.replace(kind.attention_shape, num_layers=len(layers))
    attention = kind.attention.allocate(shape, len(tables), dtype, device)
    run = operation.over(
        DecoderParts(
            layers=layers,
            final_norm=1 + normal((HIDDEN_SIZE,), 51, dtype, device) / 8,
            cos_sin=normal((num_positions, shape.head_dim), 52, torch.float32, device),
            ops=kind.ops,
            attention=attention,
            rms_norm_eps=EPS,
        )
    )
    found: dict[str, Tensor] = {}
    contexts = [0, 0, 0]
    for name, query_lens, sampled in (
        ("a prefill", [size + 1, 2 * size, 3 * size], []),
        ("a mixed step", [1, 5, 1], [0, 5, 6]),
        ("a decode", [1, 1, 1], None),
        ("a step sampled in its middle", [2, 1, 3], [1, 0, 4]),
    ):
        contexts = [context + new for context, new in zip(contexts, query_lens, strict=True)]
        step = make_step(query_lens, contexts, tables.view(3, -1), size, sampled, device)
        hidden = run(normal((sum(query_lens), HIDDEN_SIZE), 53, dtype, device), step)
        if hidden is not None:
            found[f"{name} through a decoder"] = hidden
    return found | {f"part {i} of the KV cache": part for i, part in enumerate(attention.parts)}
