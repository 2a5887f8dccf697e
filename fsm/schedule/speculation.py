"""Speculation: guessing a request's next tokens, and how many guesses a step should verify.

A guess (a *draft*) costs what one more token in the step costs, and brings a token when it is right. Right or wrong,
the answer is the same: a step keeps drafts only as far as they are what it samples anyway. So all that is decided here
is speed: of the drafts on offer those are verified that bring more tokens a second, by the cost of a step as it was
measured, and by how often drafts of this request were right lately. What a grammar says must follow goes before what
is guessed, and is judged by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush, nlargest, nsmallest
from itertools import compress
from math import ceil, inf
from typing import Protocol

import msgspec

from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.costs import StepCosts
from novainfer.fsm.schedule.lookup import PromptLookup
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.speculative_config import SpeculativeConfig

FORGET = 0.97  # of what is known of drafts, what counts still after one more, or after one token without
TRIALS_LEAST = 0.5  # as which what is known of all requests counts at least, however old it is
TRIALS_BEFORE = 2.0  # what is known of all requests counts as so many drafts of one that is new
WEIGHT = 0.25  # of the latest step in what steps of its kind take
SLOW = 1.5  # of the average, as which a step counts that took longer
SLOW_PASSES = 4.0  # of what its passes take, as which a draft model's part in a step counts that took longer
PLACES_PER_LOOK = 1024  # tokens that one look adds to the index of a text: a quarter of a millisecond of the loop
PROBE_EVERY = 32  # tokens after which one draft is verified though it seems not to pay: the text may repeat by now
PROBE_SHARE = 0.01  # of the time of steps, which such drafts may cost
ERRORS_MAX = 3  # of a worker's draft model, one after the other: then it is asked for nothing any more

# Stretches of steps with guesses and without follow each other; one with guesses ends early when its credit is spent.
FIRST_STEPS = 4  # of the first stretch, with guesses
STRETCH_STEPS = 96  # of any other one with guesses
LOOK_STEPS = 4  # without, where guesses pay: what a plain step takes now
REST_STEPS = 32, 4096  # without, where they do not: at least and at most
MEASURED_STEPS = 3  # of a stretch without guesses, its last ones; nothing is noted of those before
TRY_STEPS = 8  # of a stretch after a rest, every other one of which tries drafts that seem not to pay, if the last did
TRY_ROWS = 8  # in such a step, at most: as many as a draft model catches up with in the time of one plain step
# What guesses may cost, in the time of plain steps: a share of the steps without them, and of what they have brought.
CREDIT_SHARE = 0.005
CREDIT_FIRST = 2.0
CREDIT_AGAIN = 1.0  # after a rest
CREDIT_MOST = 6.0  # however much they have brought: the text may have changed


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
        """What was proposed when the last token of `request` was sampled; of any before, nothing is of use."""
        return request.drafts[:count] if request.drafts_at == len(request.token_ids) else []


class SpeculationStatistics(msgspec.Struct, frozen=True):
    """Counts that only grow: rows with drafts, tokens drafted, and tokens of those that were right."""

    num_drafts_total: int = 0
    num_draft_tokens_total: int = 0
    num_accepted_tokens_total: int = 0
    accepted_per_position: list[int] = []  # [num_speculative_tokens]


class Stretches(msgspec.Struct):
    """Steps with about as many requests, in stretches with guesses and without, which are long for what is faster.

    What a step with guesses took more than plain ones for as many tokens is taken from the `credit`, and what it took
    less is added; when that is spent, steps are plain ones until a share of their time has made up for it. So whatever
    is wrong with what is known of costs and chances, guesses cost no more than that share. Times are those from the end
    of one step to the end of the next, so what the loop does for guesses counts as well. What a draft model takes
    counts for the step that verifies, though it is part of the step before.
    """

    plain_ms: float = 0.0  # what a step without guesses takes; 0: not measured
    guessed_ms: float = 0.0  # and one of a stretch with guesses, without the draft model
    has_guesses: bool = True  # the stretch
    num_steps: int = 0  # planned so far
    at: int = 0  # how many of them are of this stretch
    left: int = FIRST_STEPS
    credit: float = CREDIT_FIRST  # in the time of plain steps
    is_trying: bool = False  # the stretch followed a rest, and what it has tried was right
    rested: int = 0  # steps of the last stretch without guesses
    pass_ms: float = 0.0  # what one pass of the device's draft model takes

    def next_step(self) -> None:
        """One more step is planned."""
        if not self.left:
            if self.has_guesses:
                self._begin(has_guesses=False, num_steps=LOOK_STEPS)
            else:
                self.rested, self.is_trying = self.at, self.at > LOOK_STEPS
                self.credit = max(self.credit, CREDIT_AGAIN)
                self._begin(has_guesses=True, num_steps=STRETCH_STEPS)
        self.num_steps += 1
        self.at += 1
        self.left -= 1
        if self.at > TRY_STEPS:
            self.is_trying = False

    def goes_on_resting(self) -> bool:
        """One more step is planned in the midst of a rest, of which nothing is noted; else nothing is changed."""
        if self.has_guesses or self.at <= TRY_STEPS or self.left <= MEASURED_STEPS:
            return False
        self.num_steps += 1
        self.at += 1
        self.left -= 1
        return True

    def rest(self) -> None:
        """Guesses do not pay now: plain steps from the next one on, until what they have cost is a share of those."""
        num_steps = ceil((CREDIT_AGAIN - self.credit) / CREDIT_SHARE)
        least, most = REST_STEPS
        self._begin(has_guesses=False, num_steps=min(max(num_steps, least), most))

    def _begin(self, *, has_guesses: bool, num_steps: int) -> None:
        self.has_guesses, self.at, self.left = has_guesses, 0, num_steps

    @property
    def is_noted(self) -> bool:
        """Whether anything is to be noted of the step planned last: not in a rest, but for its beginning and end."""
        return self.has_guesses or self.at == 1 or self.left < MEASURED_STEPS

    def has_try(self, ahead: int) -> bool:
        """Whether the step so many `ahead` of the last tries drafts that seem not to pay."""
        at = self.at + ahead
        return self.is_trying and at <= TRY_STEPS and at % 2 == 0

    def took(self, ms: float, drafting_ms: float, num_tokens: int, num_rows: int) -> None:
        """The step planned last took so long, and its drafts in the one before, and gave so many tokens."""
        if not self.has_guesses:
            if self.at > 1:  # the first one comes after the commit of guesses
                self.plain_ms = _latest(self.plain_ms, ms)
            self._note_unverified(drafting_ms)
            return
        ms = min(ms, SLOW * self.guessed_ms) if self.guessed_ms else ms
        self.guessed_ms = _latest(self.guessed_ms, ms)
        if self.plain_ms:
            self._charge((ms + drafting_ms) / self.plain_ms - num_tokens / num_rows)

    def took_beside_prompt(self, ms: float, num_tokens: int, num_rows: int) -> None:
        """Guesses took so long in a step with a prompt, which took longer itself, and gave so many tokens more."""
        if not self.has_guesses:
            self._note_unverified(ms)
        elif self.plain_ms:
            self._charge(ms / self.plain_ms - num_tokens / num_rows)

    def _note_unverified(self, ms: float) -> None:
        """Drafts that a stretch without any has found have cost so much, and bring nothing."""
        if self.plain_ms:
            _, most = REST_STEPS
            self.left = min(self.left + int(ms / self.plain_ms / CREDIT_SHARE), most)

    def _charge(self, num_steps: float) -> None:
        self.credit = min(self.credit - num_steps, CREDIT_MOST)
        if self.credit <= 0:
            self.rest()

    def took_passes(self, ms: float) -> None:
        """A pass of the draft model took so long; that of the first step of a stretch is but reckoned."""
        self.pass_ms = min(self.pass_ms or ms, ms) if self.at == 1 else _latest(self.pass_ms, ms)


def _num_missed(request: Request) -> int:
    """Tokens of `request` that the device's model has to compute before it guesses, as far as can be told from here."""
    return max(len(request.token_ids) - (request.drafted_at if request.draft_trials else 0), 0) + 1


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
        self._cost = StepCosts(costs)
        self._stretches: dict[int, Stretches] = {}  # by the number of requests, to powers of two
        self.is_noted = True  # whether the outcome of the step planned last is to be told
        self._num_rows = 0  # in it that may have drafts
        self._hits, self._trials = 1.0, 2.0  # of all requests, the latest count most
        self._sure = 1.0  # how likely a draft is right that a grammar says must follow
        self._drafting_ms = 0.0  # what the device's model took for the drafts that the next step verifies
        self._num_wanting = self._num_missed = 0  # rows that want some of the step planned last, and what it missed
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

    def measured(self, costs: StepCosts) -> None:
        """A worker is warm, and this is what its steps cost; where that was not measured, what is known stays."""
        self._errors = 0
        if costs.is_measured:
            self._cost = costs

    def statistics(self) -> SpeculationStatistics:
        """An immutable record of the moment."""
        return SpeculationStatistics(self._drafts, self._drafted, sum(self._accepted), list(self._accepted))

    def begin_step(self, num_rows: int) -> bool:
        """A step is planned in which so many rows may have drafts; whether guesses are to be thought of at all.

        If not, it costs what it does without speculation, and nothing of it is noted but now and then.
        """
        self._num_rows = num_rows
        known = self._stretches.get(num_rows.bit_length())
        if self._errors >= ERRORS_MAX or (known is not None and known.goes_on_resting()):
            self.is_noted = False
            return False
        self.is_noted = True
        if not num_rows:
            return True
        known = self._stretches_of(num_rows)
        known.next_step()
        self.is_noted = known.is_noted
        if known.is_trying and known.at == 1:  # what was known of drafts is as old as the rest was long
            self._forget(known.rested)
        return known.has_guesses

    def drafts(
        self, rows: Sequence[Request], num_tokens: int, most: int, mute: Collection[int] = ()
    ) -> list[list[int]]:
        """The drafts to verify of each of `rows`, in a step of `num_tokens` tokens without them: `most` in all.

        The requests whose ids are in `mute` have none.

        The next one is verified where it is most likely to be right, as long as that brings more tokens a second.
        """
        found: list[list[int]] = [[] for _ in rows]
        if not rows:
            return found
        known = self._stretches_of(len(rows))
        between, tokens = self._between(known, len(rows)), float(len(rows))
        cost, more = self._cost.of(num_tokens) + between, self._cost.of(num_tokens + 1) + between
        forced = [request.next_forced() for request in rows]
        chances = [self._sure if must else self._chance(request) for request, must in zip(rows, forced, strict=True)]
        paying = [chance * cost > (more - cost) * tokens for chance in chances]
        probes = self._probes(known, rows, ahead=0)
        gain = sum(compress(chances, paying)) * cost  # of the first draft of each
        does_pay = gain > (known.pass_ms + (more - cost) * sum(paying)) * tokens
        if not (does_pay or probes or known.is_trying) and num_tokens == len(rows):  # beside a prompt it says nothing
            known.rest()
        if most <= 0 or not (any(paying) or probes):
            return found
        offers: list[tuple[float, int, list[int]]] = []  # less the chance of the next draft, its row, what is proposed
        for at, request in enumerate(rows):
            count = min(self.num_tokens_max, request.max_len - len(request.token_ids) - 1)
            if request.request_id in mute or most <= 0 or count <= 0 or not (paying[at] or at in probes):
                continue
            count = count if paying[at] else 1
            proposed = forced[at][:count] or self.proposer.propose(request, count)
            request.has_forced = bool(forced[at])
            if proposed and paying[at]:
                offers.append((-chances[at], at, proposed))
            elif proposed:
                found[at], num_tokens, most = proposed, num_tokens + 1, most - 1
        heapify(offers)
        while offers and most > 0:
            gain, at, proposed = heappop(offers)
            cost, more = self._cost.of(num_tokens) + between, self._cost.of(num_tokens + 1) + between
            if -gain * cost <= (more - cost) * tokens:
                break
            found[at].append(proposed[len(found[at])])
            tokens, num_tokens, most = tokens - gain, num_tokens + 1, most - 1
            if len(found[at]) < len(proposed):
                heappush(offers, (gain * chances[at], at, proposed))
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
        if not self.is_on_device or not rows:
            return []
        known = self._stretches.get(len(rows).bit_length()) or Stretches()
        if not known.has_guesses or not known.left:
            return []
        probes = self._probes(known, rows, ahead=1)
        cost, price, tokens = self._cost.of(len(rows)), self._price(len(rows)), float(len(rows))
        cost += self._between(known, len(rows))
        rooms = [min(self.num_tokens_max, r.max_len - len(r.token_ids) - 2) for r in rows]
        chances = [self._chance(request) for request in rows]
        pays = [at for at, chance in enumerate(chances) if chance * cost > price * len(rows)]
        if known.is_trying:
            pays = sorted(self._soonest(known, rows).intersection(pays))
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
        self._num_wanting = sum(map(bool, found))
        self._num_missed = sum(_num_missed(request) for request in compress(rows, found))
        return found if any(found) else []

    def _probes(self, known: Stretches, rows: Sequence[Request], ahead: int) -> set[int]:
        """Which of `rows` may try one draft in this step, or the next one, though it seems not to pay.

        Those without one for so many tokens, longest first: in one step of many, so that they share the draft model's
        pass, and as many, as seldom, as may cost `PROBE_SHARE` of the time. After a rest some are tried at once.
        """
        turn, phase = divmod(known.num_steps + ahead, PROBE_EVERY)
        if phase and not known.has_try(ahead):
            return set()
        if known.has_try(ahead) and self.is_on_device:
            if ahead:
                return self._soonest(known, rows)
            return {at for at, request in enumerate(rows) if self.proposer.propose(request, 1)}
        ages = [(len(request.token_ids) + ahead - request.drafted_at, at) for at, request in enumerate(rows)]
        if known.has_try(ahead):
            return {at for _, at in nlargest(TRY_ROWS, ages)}
        price = self._price(len(rows))
        budget = PROBE_SHARE * PROBE_EVERY * (self._cost.of(len(rows)) + self._between(known, len(rows)))
        if turn % max(ceil((known.pass_ms + price) / budget), 1):
            return set()
        most = max(int((budget - known.pass_ms) / price), 1) if price > 0 else len(rows)
        return {at for age, at in nlargest(most, ages) if age >= PROBE_EVERY}

    def _soonest(self, known: Stretches, rows: Sequence[Request]) -> set[int]:
        """Which of `rows` try a draft after a rest: those that the draft model catches up with first."""
        most = known.plain_ms * self._cost.of(len(rows)) / known.pass_ms if known.pass_ms else inf
        num_missed, found = 0, set[int]()
        for num_tokens, at in nsmallest(TRY_ROWS, ((_num_missed(request), at) for at, request in enumerate(rows))):
            num_missed += num_tokens
            if found and self._cost.of(num_missed) > most:
                break
            found.add(at)
        return found

    def _stretches_of(self, num_rows: int) -> Stretches:
        size = num_rows.bit_length()
        known = self._stretches.get(size)
        if known is None:
            known = self._stretches[size] = Stretches()
        return known

    def _between(self, known: Stretches, num_rows: int) -> float:
        """Milliseconds that pass between two steps, whatever they hold."""
        if not (known.plain_ms and self._cost.is_measured):
            return 0.0
        return max(known.plain_ms - self._cost.of(num_rows), 0.0)

    def _price(self, num_tokens: int) -> float:
        """What one token more takes."""
        return self._cost.of(num_tokens + 1) - self._cost.of(num_tokens)

    def proposed(self, rows: Sequence[Request], outcome: StepDone) -> None:
        """What the device's model has proposed behind a step of `rows`, or that it has failed."""
        if self.is_on_device:
            if outcome.draft_error is not None:
                self._errors += 1
            elif outcome.draft_token_ids:
                self._errors = 0
            for request, found in zip(rows, outcome.draft_token_ids or [[]] * len(rows), strict=True):
                request.drafts, request.drafts_at = found, len(request.token_ids)

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A step has verified `num_drafts` drafts of `request`; the first `num_accepted` were right."""
        self._drafts += 1
        self._drafted += num_drafts
        for at in range(num_accepted):
            self._accepted[at] += 1
        num_trials = min(num_accepted + 1, num_drafts)
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        keep = FORGET**num_trials
        if request.has_forced:
            self._sure += (1 - keep) * (num_accepted / num_trials - self._sure)
            return
        self._trials = self._trials * keep + num_trials
        self._hits = self._hits * keep + num_accepted
        keep *= FORGET ** max(len(request.token_ids) - request.drafted_at, 0)
        request.draft_trials = request.draft_trials * keep + num_trials
        request.draft_hits = request.draft_hits * keep + num_accepted
        request.drafted_at = len(request.token_ids) + num_accepted + 1

    def _forget(self, num_tokens: int) -> None:
        """What is known of all requests is so many tokens old: what is found now counts for more."""
        keep = max(FORGET**num_tokens, min(TRIALS_LEAST / self._trials, 1.0))
        self._hits, self._trials = self._hits * keep, self._trials * keep

    def took(self, outcome: StepDone, num_tokens: int, num_rows: int, num_passes: int = 0) -> None:
        """A step of so many rows without a prompt, and tokens, has ended well, and asked for passes of a draft model.

        What those took is known, and says nothing of what the target's tokens cost. Rows without a prompt had their
        last tokens from the step before, so all the time since that ended is this one's.
        """
        known, num_sampled = self._stretches_of(num_rows), len(outcome.token_ids)
        drafting_ms = self._drafted_beside(outcome, known, num_rows, num_passes)
        if num_tokens > num_rows and num_sampled == num_rows:
            known.is_trying = False
        if not outcome.took_s:
            return
        self._cost.took(num_tokens, 1e3 * (outcome.took_s - outcome.draft_s))
        known.took(1e3 * ((outcome.cycle_s or outcome.took_s) - outcome.draft_s), drafting_ms, num_sampled, num_rows)

    def took_beside_prompt(self, outcome: StepDone, num_drafts: int, num_more: int, num_passes: int) -> None:
        """The same of a step with a prompt, whose time says nothing: of the drafts in it, `num_more` were right."""
        if num_rows := self._num_rows:
            known = self._stretches_of(num_rows)
            drafting_ms = self._drafted_beside(outcome, known, num_rows, num_passes)
            known.took_beside_prompt(drafting_ms + num_drafts * self._price(num_rows), num_more, num_rows)
        else:
            self._drafting_ms += 1e3 * outcome.draft_s

    def _drafted_beside(self, outcome: StepDone, known: Stretches, num_rows: int, num_passes: int) -> float:
        """Note what the draft model took for the next step; gives what it took for this one, in milliseconds.

        It computes as the target does, in a share of the time: also the tokens that it has missed, in its first pass.
        """
        before_ms, found_ms = self._drafting_ms, 1e3 * outcome.draft_s
        if num_passes:
            pass_cost, first_cost = self._cost.of(num_rows), self._cost.of(self._num_missed)
            num_as_such = (first_cost + (num_passes - 1) * self._cost.of(self._num_wanting)) / pass_cost
            pass_ms, most_ms = found_ms / num_as_such, SLOW_PASSES * num_as_such * known.pass_ms
            found_ms = min(found_ms, most_ms) if known.pass_ms else found_ms
            if outcome.took_s and self._cost.is_measured:
                known.took_passes(pass_ms)
        self._drafting_ms = found_ms
        return before_ms

    def _chance(self, request: Request) -> float:
        """How likely the next draft of `request` is right, as far as those before it tell, or those of all."""
        before = TRIALS_BEFORE * self._hits / self._trials
        return (request.draft_hits + before) / (request.draft_trials + TRIALS_BEFORE)
