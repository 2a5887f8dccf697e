"""What the model says of tokens that were not drawn: those of a prompt, each behind the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from novainfer.fsm.messages.step import Logprobs
from novainfer.kernels.sampling.draw_row import logprobs_of_row
from novainfer.kernels.sampling.verify import logprobs_of

__all__ = ["scores"]


def scores(logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[Logprobs]:
    """Of each row the log probability of its token, and its `tops[i]` most likely tokens -> [n]; waits for the device.

    logits [n, vocab_size]; `token_ids`, `tops` [n]. A row of the CPU depends on nothing but itself, and gives what the
    samplers would give of its token.
    """
    x = logits.float()
    if x.device.type == "cpu":
        return [
            logprobs_of_row(row, token_id, top) for row, token_id, top in zip(x.numpy(), token_ids, tops, strict=True)
        ]
    normalisers = x.logsumexp(-1, keepdim=True)
    ids = torch.tensor(token_ids, device=x.device)
    values, most_likely = x.topk(max(tops), dim=-1)
    found = (x.gather(-1, ids[:, None]) - normalisers)[:, 0].tolist()
    rows = zip(found, most_likely.tolist(), (values - normalisers).tolist(), tops, strict=True)
    return [logprobs_of(logprob, top_ids[:top], top_values[:top]) for logprob, top_ids, top_values, top in rows]
