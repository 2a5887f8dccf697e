"""Drawing one token from a row of logits: counter-based uniforms, filters, inverse CDF in token id order.

A row's token depends on that row and its uniform number alone: every reduction runs along one row, in an
order that its neighbours do not change. The uniforms come from integer arithmetic, so they have the same
bits on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["draw_filtered", "draw_unfiltered", "uniforms"]

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

# SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the increment and the two multipliers of its finaliser.
GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX1 = np.uint64(0xBF58476D1CE4E5B9)
MIX2 = np.uint64(0x94D049BB133111EB)
S27, S30, S31, S11 = (np.uint64(bits) for bits in (27, 30, 31, 11))

SEGMENT = 512  # tokens summed at once when the row is searched: two short searches instead of one long scan
CANDIDATES_MIN = 64  # tokens looked at first when a filter keeps only the most likely ones
CANDIDATES_GROWTH = 16


def _mix(state: Words) -> Words:
    state = state + GAMMA
    state = (state ^ (state >> S30)) * MIX1
    state = (state ^ (state >> S27)) * MIX2
    mixed: Words = state ^ (state >> S31)
    return mixed


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> Floats:
    """One number in [0, 1) for each (seed, choice, position), float64: SplitMix64's finaliser over each in turn."""
    mask = 2**64 - 1
    state = _mix(np.array([seed & mask for seed in seeds], dtype=np.uint64))
    state = _mix(state ^ np.array(choices, dtype=np.uint64))
    state = _mix(state ^ np.array(positions, dtype=np.uint64))
    return (state >> S11).astype(np.float64) * 2.0**-53


def _search(weights: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose running sum exceeds the target, and the sum before it; float64 [n, m], [n] -> [n],
    [n].

    A target at or above the total (by rounding) finds the last index with a weight.
    """
    sums = weights.cumsum(1)
    below = torch.nextafter(sums[:, -1], sums.new_zeros(()))
    index = torch.searchsorted(sums, torch.minimum(targets, below)[:, None], right=True)
    before = (sums - weights).gather(1, index)
    return index[:, 0], before[:, 0]


def draw_unfiltered(x: Tensor, min_p: Tensor | None, u: Tensor) -> Tensor:
    """Draw from softmax(x) without the tokens less likely than min_p times the most likely one.

    x fp32 [n, vocab_size], may be overwritten; min_p fp32 [n] or None; u float64 [n] -> int64 [n].
    """
    n, vocab_size = x.shape
    e = x.sub_(x.amax(1, keepdim=True)).exp_()
    if min_p is not None:
        e.masked_fill_(e < min_p[:, None], 0.0)
    num_whole = vocab_size // SEGMENT
    sums = e[:, : num_whole * SEGMENT].view(n, num_whole, SEGMENT).sum(2, dtype=torch.float64)
    if num_whole * SEGMENT < vocab_size:
        rest = e[:, num_whole * SEGMENT :].sum(1, keepdim=True, dtype=torch.float64)
        sums = torch.cat((sums, rest), dim=1)
    targets = u * sums.cumsum(1)[:, -1]
    segment, before = _search(sums, targets)
    offsets = torch.arange(SEGMENT, device=x.device)
    ids = segment[:, None] * SEGMENT + offsets
    inside = e.gather(1, ids.clamp_max(vocab_size - 1)).double()
    inside.masked_fill_(ids >= vocab_size, 0.0)
    index, _ = _search(inside, targets - before)
    return segment * SEGMENT + index


def draw_filtered(x: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor) -> Tensor:
    """Draw from the top_k most likely tokens, of these the smallest most likely set whose mass reaches top_p.

    Tokens tied with the top_k-th stay (as in transformers and vLLM); of tokens tied where top_p is reached,
    the lower ids stay. The most likely tokens are looked at first, and more only when those do not settle a
    row: the vocabulary is sorted only by rows that keep most of it.

    x fp32 [n, vocab_size]; top_k int64 [n], vocab_size where it is off; top_p float64 [n], 1 where it is off;
    u float64 [n] -> int64 [n].
    """
    vocab_size = x.shape[1]
    limited = top_k < vocab_size
    count = CANDIDATES_MIN
    if bool(limited.any()):
        count = max(count, int(top_k[limited].max()) + 1)
    tokens = torch.empty(len(x), dtype=torch.int64, device=x.device)
    rows = torch.arange(len(x), device=x.device)
    # Mass of the whole row over that of its most likely token: what top_p is a share of when top_k is off.
    masses = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    whole = rows[~limited]
    if len(whole):
        unlimited = x[whole]
        masses[whole] = unlimited.sub_(unlimited.amax(1, keepdim=True)).exp_().sum(1, dtype=torch.float64)
    while len(rows):
        count = min(count, vocab_size)
        drawn, settled = _draw_from_candidates(x[rows], count, top_k[rows], top_p[rows], masses[rows], u[rows])
        tokens[rows[settled]] = drawn[settled]
        rows = rows[~settled]
        count *= CANDIDATES_GROWTH
    return tokens


def _draw_from_candidates(
    x: Tensor, count: int, top_k: Tensor, top_p: Tensor, masses: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw looking at the `count` most likely tokens only -> (tokens, whether that was enough), both [n]."""
    vocab_size = x.shape[1]
    values, ids = x.topk(count, dim=1)
    ids, by_id = ids.sort(dim=1)
    values, by_value = values.gather(1, by_id).sort(dim=1, descending=True, stable=True)  # ties by id
    weights = (values.double() - values[:, :1].double()).exp()
    kth = values.gather(1, (top_k.clamp_max(count) - 1)[:, None])
    keep = ((values >= kth) | (top_k > count)[:, None]) & (weights > 0.0)
    weights *= keep
    sums = weights.cumsum(1)
    mass = torch.where(top_k < vocab_size, sums[:, -1], masses)
    keep &= ((sums - weights) < (top_p * mass)[:, None]) | (top_p >= 1.0)[:, None]
    weights *= keep
    # Settled when a token that was looked at is left out for its value: all others are less likely still.
    settled = ~keep[:, -1] & (values[:, -1] < values.masked_fill(~keep, torch.inf).amin(1))
    if count == vocab_size:
        settled = torch.ones_like(settled)
    in_id_order = torch.zeros_like(weights).scatter_(1, by_value, weights)
    index, _ = _search(in_id_order, u * in_id_order.cumsum(1)[:, -1])
    return ids.gather(1, index[:, None])[:, 0], settled
