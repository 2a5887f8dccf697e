"""Speculation: guessing a request's next tokens, and how many guesses a step should verify.

A guess (a *draft*) costs what one more token in the step costs, and brings a token when it is right. Right or wrong,
the answer is the same: a step keeps drafts only as far as they are what it samples anyway. So all that is decided here
is speed: of the drafts on offer those are verified that bring more tokens a second, by the cost of a step as it was
measured, and by how often drafts of this request were right lately.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, nlargest
from itertools import accumulate
from math import ceil
from typing import Protocol

import msgspec

from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.lookup import PromptLookup
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.speculative_config import SpeculativeConfig

FORGET = 0.97  # of what is known of drafts, what counts still after one more
TRIALS_BEFORE = 2.0  # what is known of all requests counts as so many drafts of one that is new
LOOK_EVERY = 32  # steps of about as many requests, one of which is tried the other way: with drafts, or without
WEIGHT = 0.25  # of the latest step in what steps of its kind bring
SLOW = 1.5  # of the average, as which a step counts that took longer
CORRECT = 0.1  # of the difference between what a step took and what it was thought to, by which that is corrected
OTHERS = 0.75  # of that for steps of other sizes
PLACES_PER_LOOK = 1024  # tokens that one look adds to the index of a text: a quarter of a millisecond of the loop
PROBE_EVERY = 32  # tokens after which one draft is verified though it seems not to pay: the text may repeat by now
PROBE_SHARE = 0.01  # of the time of steps, which such drafts may cost
ERRORS_MAX = 3  # of a worker's draft model, one after the other: then it is asked for nothing any more


class Proposer(Protocol):
    """Where drafts come from; what it must know of a request lies in `request.draft_state`."""

    def propose(self, request: Request, count: int) -> list[int]:
        """Up to `count` tokens that may follow those of `request`."""


class Lookup:
    """Drafts from the request's own text: what followed its last tokens when they stood in it before."""

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._min, self._max = prompt_lookup_min, prompt_lookup_max

    def propose(self, request: Request, count: int) -> list[int]:
        """`count` tokens, or none where nothing has stood there before."""
        index: PromptLookup | None = request.draft_state
        if index is None:
            index = request.draft_state = PromptLookup(self._min, self._max)
        request.num_indexed = min(request.num_indexed + PLACES_PER_LOOK, len(request.token_ids))
        return index.propose(request.token_ids, count, request.num_indexed)


class DraftModel:
    """Drafts by a second model on the device, which proposes them with a step's tokens, for the next step."""

    def propose(self, request: Request, count: int) -> list[int]:
        """What was proposed when the last token of `request` was sampled."""
        return request.drafts[:count]


class SpeculationStatistics(msgspec.Struct, frozen=True):
    """Counts that only grow: rows with drafts, tokens drafted, and tokens of those that were right."""

    num_drafts_total: int = 0
    num_draft_tokens_total: int = 0
    num_accepted_tokens_total: int = 0
    accepted_per_position: list[int] = []  # [num_speculative_tokens]


class Cost:
    """Milliseconds of a step by its tokens: straight lines through what was measured, corrected by what steps take."""

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        """`measured` are (tokens, milliseconds), by tokens; nothing of it: a step costs the same whatever it holds."""
        self._tokens = [tokens for tokens, _ in measured]
        self._ms = [ms for _, ms in measured]
        for place in reversed(range(len(measured) - 1)):  # fewer tokens never take more time: that was the machine
            self._ms[place] = min(self._ms[place], self._ms[place + 1])

    @property
    def is_measured(self) -> bool:
        """Whether it is of milliseconds at all."""
        return bool(self._tokens)

    def of(self, num_tokens: int) -> float:
        """What a step of so many tokens takes."""
        tokens, ms = self._tokens, self._ms
        if not tokens:
            return 1.0
        at = self._place(num_tokens)
        if at == 0:
            return ms[0]
        slope = (ms[at] - ms[at - 1]) / (tokens[at] - tokens[at - 1])
        return ms[at - 1] + slope * (num_tokens - tokens[at - 1])

    def took(self, num_tokens: int, ms: float) -> None:
        """A step of so many tokens took so long."""
        if not self._tokens or num_tokens > self._tokens[-1] or ms <= 0:
            return
        at = self._place(num_tokens)
        share = min(CORRECT * (ms / self.of(num_tokens) - 1), 1.0)
        near = {at, at if self._tokens[at] == num_tokens else max(at - 1, 0)}
        here, elsewhere = 1 + share, 1 + OTHERS * share  # the machine may be slower or faster than it was
        found = [now * (here if place in near else elsewhere) for place, now in enumerate(self._ms)]
        self._ms = list(accumulate(found, max))  # more tokens never take less time

    def _place(self, num_tokens: int) -> int:
        """Which of the measured sizes is the first that is no smaller; the last one for all beyond."""
        return min(bisect_left(self._tokens, num_tokens), len(self._tokens) - 1)


class Pace(msgspec.Struct):
    """Averages of one kind of steps, in which the latest count most: what they took, and how many tokens they gave."""

    ms: float = 0.0
    tokens: float = 0.0

    @property
    def ms_per_token(self) -> float:
        """0 while none was seen."""
        return self.ms / self.tokens if self.tokens else 0.0

    def took(self, ms: float, num_tokens: int) -> None:
        """A step took so long and gave so many."""
        self.tokens += (num_tokens - self.tokens) * (WEIGHT if self.tokens else 1)
        self.ms = _latest(self.ms, ms)


class Yield(msgspec.Struct):
    """What steps with about as many requests bring, plain ones and those with drafts.

    What a draft model takes counts for the step that verifies, though it is part of the step before. Steps are counted
    as they are planned, and nothing else is changed by asking: a draft model is asked in one step for the drafts of the
    next.
    """

    plain: Pace
    drafted: Pace
    num_steps: int = 0
    pass_ms: float = 0.0  # what one pass of the device's draft model takes

    @classmethod
    def none(cls) -> Yield:
        """No step was seen."""
        return cls(Pace(), Pace())

    def is_look(self, ahead: int) -> bool:
        """Whether the step so many `ahead` of the last is tried the other way."""
        return (self.num_steps + ahead) % LOOK_EVERY == 0

    def may_draft(self, ahead: int) -> bool:
        """Whether the step so many `ahead` of the last should have drafts: as what was faster, or to look."""
        plain, drafted = self.plain.ms_per_token, self.drafted.ms_per_token
        is_faster = drafted < plain if plain else not drafted
        return is_faster != self.is_look(ahead)

    def took_passes(self, ms: float) -> None:
        """A pass of the draft model took so long."""
        self.pass_ms = _latest(self.pass_ms, ms)


def _latest(before: float, found: float) -> float:
    """An average in which the latest counts most; but what took much longer (on a busy machine) as `SLOW` of it."""
    return before + (min(found, SLOW * before) - before) * WEIGHT if before else found


class Speculation:
    """Decides who gets how many drafts in a step, and counts what came of them."""

    def __init__(
        self, proposer: Proposer, num_speculative_tokens: int, costs: Sequence[tuple[int, float]] = ()
    ) -> None:
        self.proposer = proposer
        self.num_tokens_max = num_speculative_tokens
        self._cost = Cost(costs)
        self._yields: dict[int, Yield] = {}  # by the number of requests, to powers of two
        self._hits, self._trials = 1.0, 2.0  # of all requests, the latest count most
        self._drafting_ms = 0.0  # what the device's model took for the drafts that the next step verifies
        self._has_probes = False  # whether the step verifies drafts that seem not to pay: it says nothing of others
        self._errors = 0  # of the device's model, since it did well
        self._drafts = self._drafted = 0
        self._accepted = [0] * num_speculative_tokens

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Speculation:
        """What `config` asks for."""
        proposer: Proposer = DraftModel()
        if config.method == "ngram":
            assert config.prompt_lookup_min is not None, "the configuration sets both bounds of a lookup"
            assert config.prompt_lookup_max is not None
            proposer = Lookup(config.prompt_lookup_min, config.prompt_lookup_max)
        return cls(proposer, config.num_speculative_tokens)

    def measured(self, costs: Sequence[tuple[int, float]]) -> None:
        """A worker is warm, and has measured what its steps cost; nothing when it has not."""
        self._errors = 0
        if costs:
            self._cost = Cost(costs)

    def statistics(self) -> SpeculationStatistics:
        """An immutable record of the moment."""
        return SpeculationStatistics(self._drafts, self._drafted, sum(self._accepted), list(self._accepted))

    def drafts(self, rows: Sequence[Request], num_tokens: int, most: int) -> list[list[int]]:
        """The drafts to verify of each of `rows`, in a step of `num_tokens` tokens without them: `most` in all.

        The next one is verified where it is most likely to be right, as long as that brings more tokens a second.
        """
        found: list[list[int]] = [[] for _ in rows]
        known = self._yields.setdefault(len(rows).bit_length(), Yield.none())
        known.num_steps += 1
        self._has_probes = False
        may_pay = self._may_pay(known, num_tokens, len(rows), ahead=0)
        probes = self._probes(known, rows, ahead=0)
        if most <= 0 or not (may_pay or probes):
            return found
        cost, tokens = self._cost.of(num_tokens), float(len(rows))
        price = self._cost.of(num_tokens + 1) - cost
        offers: list[tuple[float, int, list[int]]] = []  # less the chance of the next draft, its row, what is proposed
        for at, request in enumerate(rows):
            chance = self._chance(request)
            pays = may_pay and chance * cost > price * tokens
            count = min(self.num_tokens_max, request.max_len - len(request.token_ids) - 1)
            if count <= 0 or not (pays or at in probes):
                continue
            proposed = self.proposer.propose(request, count if pays else 1)
            if proposed and pays:
                offers.append((-chance, at, proposed))
            elif proposed:
                self._has_probes = True
                found[at], num_tokens, most = proposed, num_tokens + 1, most - 1
        heapify(offers)
        while offers and most > 0:
            gain, at, proposed = heappop(offers)
            cost, more = self._cost.of(num_tokens), self._cost.of(num_tokens + 1)
            if -gain * cost <= (more - cost) * tokens:
                break
            found[at].append(proposed[len(found[at])])
            tokens, num_tokens, most = tokens - gain, num_tokens + 1, most - 1
            if len(found[at]) < len(proposed):
                heappush(offers, (gain * self._chance(rows[at]), at, proposed))
        return found

    @property
    def is_on_device(self) -> bool:
        """Whether the device proposes: then it must be told all tokens of a request, and what is wanted."""
        return isinstance(self.proposer, DraftModel)

    def wanted(self, rows: Sequence[Request]) -> list[int]:
        """How many drafts the device's model should propose for each of `rows` behind this step; empty: none.

        None where the next step is to be a plain one. Each further draft is one more pass of the draft model for all
        rows that want it: it must bring more tokens a second than that pass and verifying take.
        """
        if not self.is_on_device or not rows or self._errors >= ERRORS_MAX:
            return []
        known = self._yields.get(len(rows).bit_length()) or Yield.none()
        may_pay = self._may_pay(known, len(rows), len(rows), ahead=1)
        probes = self._probes(known, rows, ahead=1)
        if not (may_pay or probes):
            return []
        cost, tokens = self._cost.of(len(rows)), float(len(rows))
        price = self._cost.of(len(rows) + 1) - cost
        rooms = [min(self.num_tokens_max, r.max_len - len(r.token_ids) - 2) for r in rows]
        chances = [self._chance(request) for request in rows]
        pays = [at for at, chance in enumerate(chances) if may_pay and chance * cost > price * len(rows)]
        found = [0] * len(rows)
        for count in range(1, self.num_tokens_max + 1):
            pays = [at for at in pays if rooms[at] >= count and chances[at] ** count * cost > price * len(rows)]
            gain = sum(chances[at] ** count for at in pays)
            more = known.pass_ms + price * len(pays)
            if gain * cost <= more * tokens:
                break
            for at in pays:
                found[at] = count
            cost, tokens = cost + more, tokens + gain
        for at in probes:
            if not found[at] and rooms[at] > 0:
                found[at] = 1
        return found if any(found) else []

    def _probes(self, known: Yield, rows: Sequence[Request], ahead: int) -> set[int]:
        """Which of `rows` may try one draft in this step, or the next one, though it seems not to pay.

        Those without one for so many tokens, longest first: in one step of many, so that they share the draft model's
        pass, and as many, as seldom, as may cost `PROBE_SHARE` of the time.
        """
        turn, phase = divmod(known.num_steps + ahead, LOOK_EVERY)
        if phase != LOOK_EVERY // 2:
            return set()
        cost = self._cost.of(len(rows))
        price, budget = self._cost.of(len(rows) + 1) - cost, PROBE_SHARE * LOOK_EVERY * cost
        if turn % max(ceil((known.pass_ms + price) / budget), 1):
            return set()
        most = max(int((budget - known.pass_ms) / price), 1) if price > 0 else len(rows)
        ages = [(len(request.token_ids) + ahead - request.drafted_at, at) for at, request in enumerate(rows)]
        return {at for age, at in nlargest(most, ages) if age >= PROBE_EVERY}

    def _may_pay(self, known: Yield, num_tokens: int, num_rows: int, ahead: int) -> bool:
        """Whether a step may hold drafts: a draft model is asked for no others.

        Not one that is to be plain, nor one in which not even a draft that is right for sure pays; but what was
        measured may be wrong, so one in many may.
        """
        if not known.may_draft(ahead):
            return False
        cost = self._cost.of(num_tokens)
        return cost > (self._cost.of(num_tokens + 1) - cost) * num_rows or known.is_look(ahead)

    def proposed(self, rows: Sequence[Request], outcome: StepDone) -> None:
        """What the device's model has proposed behind a step of `rows`, or that it has failed."""
        if self.is_on_device:
            if outcome.draft_error is not None:
                self._errors += 1
            elif outcome.draft_token_ids:
                self._errors = 0
            for request, found in zip(rows, outcome.draft_token_ids or [[]] * len(rows), strict=True):
                request.drafts = found

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
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        self._trials = self._trials * keep + num_trials
        self._hits = self._hits * keep + num_accepted

    def took(self, outcome: StepDone, num_tokens: int, num_rows: int, num_passes: int = 0) -> None:
        """A step of so many rows without a prompt, and tokens, has ended well, and asked for passes of a draft model.

        What those took is known, and says nothing of what the target's tokens cost.
        """
        drafting_ms, self._drafting_ms = self._drafting_ms, 1e3 * outcome.draft_s
        if not outcome.took_s:
            return
        ms = 1e3 * (outcome.took_s - outcome.draft_s)
        self._cost.took(num_tokens, ms)
        found = self._yields.setdefault(num_rows.bit_length(), Yield.none())
        if num_passes and self._cost.is_measured:
            found.took_passes(1e3 * outcome.draft_s / num_passes)
        if not self._has_probes:
            has_drafts = num_tokens > num_rows or drafting_ms > 0
            (found.drafted if has_drafts else found.plain).took(ms + drafting_ms, len(outcome.token_ids))

    def _chance(self, request: Request) -> float:
        """How likely the next draft of `request` is right, as far as those before it tell, or those of all."""
        before = TRIALS_BEFORE * self._hits / self._trials
        return (request.draft_hits + before) / (request.draft_trials + TRIALS_BEFORE)
