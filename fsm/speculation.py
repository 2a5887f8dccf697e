"""Speculation: guessing a request's next tokens, and how many guesses a step should verify.

A guess (a *draft*) costs what one more token in the step costs, and brings a token when it is right. Right or wrong,
the answer is the same: a step keeps drafts only as far as they are what it samples anyway. So all that is decided here
is speed: of the drafts on offer those are verified that bring more tokens a second, by the cost of a step as it was
measured, and by how often drafts of this request were right lately.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

import msgspec

from novainfer.fsm.request import Request

FORGET = 0.9  # of what is known of a request's drafts, what counts still after one more
TRIALS_BEFORE = 2.0  # a request that is new is taken for one of whose drafts half were right: so many of them
PROBE_EVERY = 32  # tokens after which one draft is verified though it seems not to pay: the text may repeat by now


class Proposer(Protocol):
    """Where drafts come from; what it must know of a request lies in `request.draft_state`."""

    def propose(self, request: Request, count: int) -> list[int]:
        """Up to `count` tokens that may follow those of `request`."""


class SpeculationStatistics(msgspec.Struct, frozen=True):
    """Counts that only grow: rows with drafts, tokens drafted, and tokens of those that were right."""

    num_drafts_total: int = 0
    num_draft_tokens_total: int = 0
    num_accepted_tokens_total: int = 0
    accepted_per_position: list[int] = []  # [num_speculative_tokens]


class Cost:
    """Milliseconds of a step by its tokens: straight lines through what was measured, never falling."""

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        """`measured` are (tokens, milliseconds), by tokens; nothing of it: a step costs the same whatever it holds."""
        self._tokens = [tokens for tokens, _ in measured]
        self._ms: list[float] = []
        for _, ms in measured:
            self._ms.append(max(ms, self._ms[-1] if self._ms else 0.0))

    def of(self, num_tokens: int) -> float:
        """What a step of so many tokens takes."""
        tokens, ms = self._tokens, self._ms
        if not tokens:
            return 1.0
        if num_tokens <= tokens[0]:
            return ms[0]
        at = min(bisect_right(tokens, num_tokens), len(tokens) - 1)
        if at == 0:
            return ms[0] * num_tokens / tokens[0]
        slope = (ms[at] - ms[at - 1]) / (tokens[at] - tokens[at - 1])
        return ms[at - 1] + slope * (num_tokens - tokens[at - 1])


class Speculation:
    """Decides who gets how many drafts in a step, and counts what came of them."""

    def __init__(
        self, proposer: Proposer, num_speculative_tokens: int, costs: Sequence[tuple[int, float]] = ()
    ) -> None:
        self.proposer = proposer
        self.num_tokens_max = num_speculative_tokens
        self._cost = Cost(costs)
        self._drafts = self._drafted = 0
        self._accepted = [0] * num_speculative_tokens

    def statistics(self) -> SpeculationStatistics:
        """An immutable record of the moment."""
        return SpeculationStatistics(self._drafts, self._drafted, sum(self._accepted), list(self._accepted))

    def drafts(self, rows: Sequence[Request], num_tokens: int, most: int) -> list[list[int]]:
        """The drafts to verify of each of `rows`, in a step of `num_tokens` tokens without them: `most` in all.

        The next one is verified where it is most likely to be right, as long as that brings more tokens a second.
        """
        found: list[list[int]] = [[] for _ in rows]
        cost, tokens = self._cost.of(num_tokens), float(len(rows))
        more = self._cost.of(num_tokens + 1)
        if most <= 0 or cost <= (more - cost) * tokens:  # not even one that is right for sure would pay
            return found
        offers: list[tuple[float, int, list[int]]] = []  # less the chance of the next draft, its row, what is proposed
        for at, request in enumerate(rows):
            chance = acceptance(request)
            pays = chance * cost > (more - cost) * tokens
            is_probe = not pays and len(request.token_ids) - request.drafted_at >= PROBE_EVERY
            count = min(self.num_tokens_max, request.max_len - len(request.token_ids) - 1)
            if count <= 0 or not (pays or is_probe):
                continue
            proposed = self.proposer.propose(request, 1 if is_probe else count)
            if is_probe and proposed:
                found[at], num_tokens, most = proposed, num_tokens + 1, most - 1
            elif proposed:
                offers.append((-chance, at, proposed))
        heapify(offers)
        while offers and most > 0:
            gain, at, proposed = heappop(offers)
            cost, more = self._cost.of(num_tokens), self._cost.of(num_tokens + 1)
            if -gain * cost <= (more - cost) * tokens:
                break
            found[at].append(proposed[len(found[at])])
            tokens, num_tokens, most = tokens - gain, num_tokens + 1, most - 1
            if len(found[at]) < len(proposed):
                heappush(offers, (gain * acceptance(rows[at]), at, proposed))
        return found

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A step has verified `num_drafts` drafts of `request`; the first `num_accepted` were right."""
        self._drafts += 1
        self._drafted += num_drafts
        for at in range(num_accepted):
            self._accepted[at] += 1
        num_trials = min(num_accepted + 1, num_drafts)
        keep = FORGET**num_trials
        request.draft_trials = request.draft_trials * keep + num_trials
        request.draft_hits = request.draft_hits * keep + num_accepted
        request.drafted_at = len(request.token_ids)


def acceptance(request: Request) -> float:
    """How likely the next draft of `request` is right, as far as those before it tell."""
    return (request.draft_hits + TRIALS_BEFORE / 2) / (request.draft_trials + TRIALS_BEFORE)
