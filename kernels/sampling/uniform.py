"""One number in [0, 1) for each (seed, position): the same bits on every machine and in every batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["uniforms"]

Words = npt.NDArray[np.uint64]

# SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the increment and the two multipliers of its finaliser.
GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX1 = np.uint64(0xBF58476D1CE4E5B9)
MIX2 = np.uint64(0x94D049BB133111EB)
S27, S30, S31, S11 = (np.uint64(bits) for bits in (27, 30, 31, 11))


def _mix(state: Words) -> Words:
    state = state + GAMMA
    state = (state ^ (state >> S30)) * MIX1
    state = (state ^ (state >> S27)) * MIX2
    mixed: Words = state ^ (state >> S31)
    return mixed


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """float64 [n] with 53 random bits: SplitMix64's finaliser over seed and position.

    A seed may be any integer; its lowest 64 bits count. It is mixed twice: the choices of a request have seeds that
    follow each other, and are drawn from at the same positions.
    """
    state = _mix(np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64))
    state = _mix(state)
    state = _mix(state ^ np.array(positions, dtype=np.uint64))
    return (state >> S11).astype(np.float64) * 2.0**-53
