"""The angles of rotary positions: one function for each way to scale them, as transformers computes them.

The arithmetic is fp32 in transformers' order (modeling_rope_utils.py), so that both round alike. Sources: YaRN, arXiv
2309.00071; linear scaling, arXiv 2306.15595; llama3, "The Llama 3 Herd of Models" (arXiv 2407.21783).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from novainfer.kernels.models.config import Rope

__all__ = ["FREQUENCIES", "rope_table"]


def rope_table(rope: Rope, head_dim: int, max_model_len: int, device: torch.device) -> Tensor:
    """fp32 [max_model_len, head_dim]: for each position the cosines of its angles, then the sines."""
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * FREQUENCIES[rope.rope_type](rope, head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(rope.attention_factor).to(device)


def _periods(rope: Rope, head_dim: int) -> Tensor:
    """fp32 [head_dim / 2]: the theta^(2i/d) of RoPE (arXiv 2104.09864), the inverses of the frequencies."""
    periods: Tensor = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return periods


def _unscaled(rope: Rope, head_dim: int) -> Tensor:
    return 1.0 / _periods(rope, head_dim)


def _linear(rope: Rope, head_dim: int) -> Tensor:
    """All frequencies lower, as if positions lay closer."""
    return _unscaled(rope, head_dim) / rope.factor


def _llama3(rope: Rope, head_dim: int) -> Tensor:
    """Low frequencies divided by the factor, high ones kept, those between a mixture."""
    frequencies = _unscaled(rope, head_dim)
    lengths = 2 * math.pi / frequencies
    longest, shortest = (
        rope.original_max_positions / rope.low_freq_factor,
        rope.original_max_positions / rope.high_freq_factor,
    )
    scaled = torch.where(lengths > longest, frequencies / rope.factor, frequencies)
    kept = (rope.original_max_positions / lengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - kept) * scaled / rope.factor + kept * scaled
    return torch.where((lengths >= shortest) & (lengths <= longest), mixed, scaled)


def _yarn(rope: Rope, head_dim: int) -> Tensor:
    """Dimensions that turn often in the original context kept, those that turn seldom scaled, a ramp between."""

    def dimension(num_rotations: float) -> float:
        turns = rope.original_max_positions / (num_rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no ramp is a step, not a division by 0
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    periods = _periods(rope, head_dim)
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


FREQUENCIES: dict[str, Callable[[Rope, int], Tensor]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
