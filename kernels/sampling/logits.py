"""What a request changes in its logits before a token is drawn: allowed and banned ids, bias, penalties."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from novainfer.fsm.messages.step import SeqParams

__all__ = ["apply_masks", "apply_penalties", "changes_until"]


def changes_until(row: SeqParams) -> float:
    """The position from which on the two below change nothing: inf where they always may."""
    if row.allowed_token_ids is not None or row.banned_token_ids or row.logit_bias or row.needs_history:
        return math.inf
    return row.min_position if row.stop_token_ids else 0


def apply_masks(logits: Tensor, row: SeqParams, position: int, *, is_masked: bool = False) -> None:
    """Allowed ids, banned ids, stop ids while too early, bias; fp32 [vocab_size], in place.

    Where the stop ids would leave nothing (they are all that is allowed, or not banned), they stay: some token must be
    drawn. `is_masked`: so it is where they are all that a step's mask has left of `logits`.
    """
    if row.allowed_token_ids is not None:
        allowed = torch.tensor(row.allowed_token_ids, device=logits.device)
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept
    if row.banned_token_ids:
        logits[torch.tensor(row.banned_token_ids, device=logits.device)] = -torch.inf
    if row.stop_token_ids and position < row.min_position:
        stops = torch.tensor(row.stop_token_ids, device=logits.device)
        kept = logits[stops]
        logits[stops] = -torch.inf
        is_restricted = is_masked or row.allowed_token_ids is not None or row.banned_token_ids
        if is_restricted and not bool(torch.isfinite(logits.amax())):
            logits[stops] = kept
    if row.logit_bias:
        biased = torch.tensor(list(row.logit_bias), device=logits.device)
        logits[biased] += torch.tensor(list(row.logit_bias.values()), device=logits.device)


def apply_penalties(logits: Tensor, row: SeqParams, tokens: Tensor) -> None:
    """Repetition over prompt and output, presence and frequency over the output; fp32 [vocab_size], in place."""
    if row.repetition_penalty != 1.0:
        seen = tokens.long()
        values = logits[seen]
        # Duplicates write the same value twice.
        logits[seen] = torch.where(values > 0, values / row.repetition_penalty, values * row.repetition_penalty)
    output = tokens[row.num_prompt_tokens :]
    if len(output) and (row.presence_penalty or row.frequency_penalty):
        ids, counts = torch.unique(output.long(), return_counts=True)
        logits[ids] -= row.frequency_penalty * counts + row.presence_penalty
