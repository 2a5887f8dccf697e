"""Drawing tokens from rows of logits, a batch at a time, with plain torch on any device.

For each row, over its temperature: tokens less likely than `min_p` times the most likely one go; of the rest, the
`top_k` most likely stay (and those tied with the last of them, as in transformers and vLLM); of these, the smallest
most likely set whose mass reaches `top_p` (of tokens tied there, the lower ids). Then the inverse of the cumulative
distribution in token id order at the row's uniform number: the token depends on that row and that number alone.

kernels/sampling/draw_row.py does the same for one row on the CPU, faster; this is what it is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from novainfer.fsm.messages.step import NO_TOKEN, SeqParams

__all__ = ["draw"]


def draw(x: Tensor, rows: Sequence[SeqParams], u: Tensor) -> Tensor:
    """One token a row, or `NO_TOKEN` -> int64 [n].

    x fp32 [n, vocab_size]: logits, which are overwritten; `rows` [n]: how each is sampled, none of them greedy;
    u float64 [n] in [0, 1).
    """
    device, vocab_size = x.device, x.shape[1]
    top_k = torch.tensor([row.top_k if 0 < row.top_k < vocab_size else vocab_size for row in rows], device=device)
    top_p = torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=device)
    min_p = torch.tensor([row.min_p for row in rows], dtype=torch.float32, device=device)
    x /= torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device)[:, None]
    largest = x.amax(1, keepdim=True)
    e = (x - largest).exp()
    e *= e >= min_p[:, None]
    weights, ids = e.double().sort(dim=1, descending=True, stable=True)
    weights *= weights >= weights.gather(1, top_k[:, None] - 1)
    sums = weights.cumsum(1)
    weights *= ((sums - weights) < top_p[:, None] * sums[:, -1:]) | (top_p >= 1.0)[:, None]
    in_id_order = torch.zeros_like(weights).scatter_(1, ids, weights)
    sums = in_id_order.cumsum(1)
    total = sums[:, -1]
    targets = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(sums, targets[:, None], right=True)[:, 0]
    return found.masked_fill_(~largest[:, 0].isfinite(), NO_TOKEN)
