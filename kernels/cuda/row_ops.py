"""The row operations on a GPU, each one launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from novainfer.kernels.cuda.jit import rows
from novainfer.kernels.cuda.language import element
from novainfer.kernels.cuda.variant import Config, Variant

__all__ = ["silu_mul", "variants"]


def silu_mul(gate_up: Tensor) -> Tensor:
    """[M, 2 * I] (gate, then up) -> new [M, I]: `silu(gate) * up`."""
    num_rows, intermediate_size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, intermediate_size)
    config = _silu_mul_config(intermediate_size)
    grid = (num_rows, -(-intermediate_size // config.constants["BLOCK"]))
    rows.silu_mul[grid](gate_up, out, intermediate_size, **config.arguments)
    return out


def _silu_mul_config(intermediate_size: int) -> Config:
    return Config({"BLOCK": 1024 if intermediate_size >= 1024 else 256}, num_warps=4, num_stages=1)


def variants(capability: int) -> Iterator[Variant]:
    """What is launched for the sizes of Qwen2.5-0.5B, 1.5B and 7B."""
    for dtype in (torch.bfloat16, torch.float16):
        kind = element(dtype)
        for intermediate_size in (4864, 8960, 18944):
            yield Variant(
                f"silu_mul {kind} {intermediate_size}",
                rows.silu_mul,
                {"gate_up": f"*{kind}", "out": f"*{kind}", "intermediate_size": "i32"},
                _silu_mul_config(intermediate_size),
                aligned=frozenset({"intermediate_size"}),
            )
