"""Drawing tokens from rows of scaled logits, a batch at a time, with plain torch on any device.

For each row: tokens less likely than `min_p` times the most likely one go; of the rest, the `top_k` most
likely stay (and those tied with the last of them, as in transformers and vLLM); of these, the smallest most
likely set whose mass reaches `top_p` (of tokens tied there, the lower ids). Then the inverse of the
cumulative distribution in token id order at the row's uniform number: the token depends on that row and
that number alone.

kernels/sampling/draw_row.py does the same for one row on the CPU, faster; this is what it is tested against.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw"]


def draw(x: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """One token a row -> int64 [n].

    x fp32 [n, vocab_size]: logits over temperature; top_k int64 [n], vocab_size where it is off; top_p
    float64 [n], 1 where it is off; min_p fp32 [n], 0 where it is off; u float64 [n] in [0, 1).
    """
    e = (x - x.amax(1, keepdim=True)).exp()
    e *= e >= min_p[:, None]
    weights, ids = e.double().sort(dim=1, descending=True, stable=True)
    weights *= weights >= weights.gather(1, top_k[:, None] - 1)
    sums = weights.cumsum(1)
    weights *= ((sums - weights) < top_p[:, None] * sums[:, -1:]) | (top_p >= 1.0)[:, None]
    in_id_order = torch.zeros_like(weights).scatter_(1, ids, weights)
    sums = in_id_order.cumsum(1)
    total = sums[:, -1]
    targets = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, targets[:, None], right=True)[:, 0]
