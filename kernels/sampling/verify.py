"""Verifying drafts: which positions of a step are sampled, and which of the tokens drawn there count.

Every position of a row is drawn from as if the drafts before it were the sequence's tokens, so all can be drawn from at
once: what was drawn behind a draft that is wrong is left out, and what is left are the tokens of as many steps without
drafts (Leviathan et al., ICML 2023, where a draft is accepted while it is what the target draws: a draft of a
deterministic proposer is accepted as often as their rejection sampling would, and the tokens do not depend on it).
"""

from __future__ import annotations

from typing import NamedTuple

from novainfer.fsm.messages.step import NO_TOKEN, StepPlan
from novainfer.kernels.sampling.sampler import Sampled

__all__ = ["Positions", "accept", "sampled_positions"]


class Positions(NamedTuple):
    """The sampled positions of a step, [num_positions] each, those of a row one after the other."""

    slots: list[int]  # whose they are
    positions: list[int]  # absolute: where the sampled token will stand
    drafts: list[int]  # the draft that stands there; NO_TOKEN behind the last one of a row


def sampled_positions(plan: StepPlan) -> Positions:
    """All positions that `plan` samples."""
    if not plan.num_drafts:
        slots = [plan.slots[seq] for seq in plan.sample_seqs]
        return Positions(slots, [plan.context_lens[seq] for seq in plan.sample_seqs], [])
    found = Positions([], [], [])
    ends, end = [], 0
    for query_len in plan.query_lens:
        end += query_len
        ends.append(end)
    for seq, num_drafts in zip(plan.sample_seqs, plan.num_drafts, strict=True):
        context_len = plan.context_lens[seq]
        found.slots.extend([plan.slots[seq]] * (num_drafts + 1))
        found.positions.extend(range(context_len - num_drafts, context_len + 1))
        found.drafts.extend(plan.input_ids[ends[seq] - num_drafts : ends[seq]])
        found.drafts.append(NO_TOKEN)
    return found


def accept(sampled: Sampled, drafts: list[int], num_drafts: list[int]) -> tuple[Sampled, list[int]]:
    """What counts of `sampled`, which holds one token for each position; and how many tokens each row got."""
    token_ids, logprobs = sampled
    kept, counts = Sampled([], []), []
    begin = 0
    for num in num_drafts:
        at = begin
        while token_ids[at] == drafts[at] != NO_TOKEN:
            at += 1
        kept.token_ids.extend(token_ids[begin : at + 1])
        kept.logprobs.extend(logprobs[begin : at + 1])
        counts.append(at + 1 - begin)
        begin += num + 1
    return kept, counts
