"""Verifying drafts: which positions of a step are sampled, and which of the tokens drawn there count.

Every position of a row is drawn from as if the drafts before it were the sequence's tokens, so all can be drawn from at
once: what was drawn behind a draft that is wrong is left out, and what is left are the tokens of as many steps without
drafts (Leviathan et al., ICML 2023, where a draft is accepted while it is what the target draws: a draft of a
deterministic proposer is accepted as often as their rejection sampling would, and the tokens do not depend on it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from novainfer.fsm.messages.step import NO_TOKEN, Logprobs, StepPlan
from novainfer.kernels.masks import Masks, masks_of

__all__ = ["Positions", "Sampled", "accept", "logprobs_of", "sampled_positions"]


class Positions(NamedTuple):
    """The sampled positions of a step, [num_positions] each, those of a row one after the other."""

    slots: Sequence[int]  # whose they are
    positions: Sequence[int]  # absolute: where the sampled token will stand
    drafts: Sequence[int] = ()  # the draft that stands there, NO_TOKEN behind the last one of a row; empty: no drafts
    masks: Masks | None = None  # of the tokens that may be drawn

    def parts(self, size: int) -> Iterator[tuple[slice, Positions]]:
        """At most `size` of them at a time, and which those are."""
        for begin in range(0, len(self.slots), size):
            part = slice(begin, begin + size)
            masks = self.masks and self.masks.part(begin, begin + size)
            yield part, Positions(self.slots[part], self.positions[part], self.drafts[part], masks)


class Sampled(NamedTuple):
    """One token (or `NO_TOKEN`, or `NONE_ALLOWED`) a position; `logprobs` is empty when no row asked for them."""

    token_ids: list[int]
    logprobs: list[Logprobs | None]


def sampled_positions(plan: StepPlan) -> Positions:
    """All positions that `plan` samples."""
    masks = masks_of(plan)
    if not plan.num_drafts:
        slots = [plan.slots[seq] for seq in plan.sample_seqs]
        return Positions(slots, [plan.context_lens[seq] for seq in plan.sample_seqs], masks=masks)
    slots, positions, drafts = list[int](), list[int](), list[int]()
    ends, end = [], 0
    for query_len in plan.query_lens:
        end += query_len
        ends.append(end)
    for seq, num_drafts in zip(plan.sample_seqs, plan.num_drafts, strict=True):
        context_len = plan.context_lens[seq]
        slots += [plan.slots[seq]] * (num_drafts + 1)
        positions += range(context_len - num_drafts, context_len + 1)
        drafts += plan.input_ids[ends[seq] - num_drafts : ends[seq]]
        drafts.append(NO_TOKEN)
    return Positions(slots, positions, drafts, masks)


def accept(sampled: Sampled, drafts: Sequence[int], num_drafts: Sequence[int]) -> tuple[Sampled, list[int]]:
    """What counts of `sampled`, which holds one token for each position; and how many tokens each row got."""
    token_ids, logprobs = sampled
    kept, counts = Sampled([], []), []
    begin = 0
    for num in num_drafts:
        at = begin
        while token_ids[at] == drafts[at] >= 0:
            at += 1
        kept.token_ids.extend(token_ids[begin : at + 1])
        kept.logprobs.extend(logprobs[begin : at + 1])
        counts.append(at + 1 - begin)
        begin += num + 1
    return kept, counts


def logprobs_of(logprob: float, token_ids: list[int], logprobs: list[float]) -> Logprobs:
    """What is told of a token: of the most likely ones, likeliest first, those that can be drawn at all."""
    num = len(logprobs)
    while num and logprobs[num - 1] == -math.inf:
        num -= 1
    return logprob, token_ids[:num], logprobs[:num]
