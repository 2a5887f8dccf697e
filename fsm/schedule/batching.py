"""One step being planned: who runs in it, and how many tokens of each; continuous batching under one token budget.

Every request that decodes takes one token. What is left of the budget, but no more than the chunk, goes to prompts;
beside requests that decode, which wait for the step's end, less (`costs.Chunks`). Half of it goes by age, and half by
work (the tokens that have to be computed), least first. A prompt longer than what is left is cut at a block boundary
and goes on in the next step. So with C tokens a step for prompts, p = C // 2 - block size (1 at least), and slots and
blocks free, a request of w tokens of work has its first token within

    ceil((min(A, S) + w) / p) + 2 steps

where A is the work of it and all older ones, and S that of all with at most twice its own: neither one long prompt, nor
many, hold up a short one, nor do many short ones hold up a long one. docs/fairness.md holds all rules of this kind.

A waiting request is admitted when its whole prompt, and one block to go on, fit beside what the prompts before it
still need and a headroom for those that run; half-way it waits for no blocks.

A prefix that another request is computing is not computed twice: planned in the same step or cached, its blocks are
shared; if its turn comes in a later step, the newcomer waits for it by name, unless it would be done first itself. It
becomes the producer itself when the first one ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import nsmallest
from itertools import chain, repeat
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from novainfer.fsm.kv.blocks import Journal
from novainfer.fsm.kv.cache import Prefix
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import SAMPLED, SeqParams, StepPlan
from novainfer.fsm.schedule.order import arrival
from novainfer.fsm.schedule.request import ADMIT, AWAITED, COMING, FETCH, Request, RequestState

if TYPE_CHECKING:
    from novainfer.fsm.schedule.planner import Planner
    from novainfer.fsm.schedule.speculation import Speculation

# What one planned step may cost, however many wait: a look is a microsecond, and so is each of its units eight times.
LOOKS = 32  # waiting requests looked at by age, in turn, and by work: so many of each
LOOK_UNITS = 8192  # names looked up in those by age and in turn, and again in those by work: 0.1 us each
ADMISSIONS = 64  # 25 us each
ADMITTED_BLOCKS = 1024  # table entries, after which nothing more is admitted: 1 us each
CANARY_TOKEN = 0  # every vocabulary has it


class Flight(msgspec.Struct, gc=False):
    """A planned step, and all that is needed to commit it or to take it back."""

    step_id: int
    journal: Journal
    rows: list[tuple[Request, int, int]] = []  # the request, its tokens in this step, and how many come before them
    samples: list[Request] = []
    admitted: list[Request] = []
    departed: list[Request] = []  # ended while the step was on the device; they own their blocks until it returns
    fetched: list[Request] = []  # of `admitted`, those whose KV this step copies back from the host
    mode: Mode = Mode()  # what the device has to compute in
    num_prompt_tokens: int = 0  # of all that the step computes
    drafts: dict[int, int] = {}  # guessed tokens that the step verifies, by the ids of their requests
    guesses: dict[int, list[int]] = {}  # the tokens themselves, of requests that are held to grammars
    scored: list[tuple[Request, int, int]] = []  # whose tokens are scored: from which place on, and how many
    pooled: list[tuple[Request, int, int]] = []  # whose hidden states are summed: those of which tokens, likewise
    num_passes: int = 0  # of the device's draft model, for the next step's
    late: set[int] = set()  # requests whose masks did not come in time: nothing of their rows counts
    is_vacating: bool = False  # nothing but what leaves the KV cache for the host: nothing is computed
    is_noted: bool = False  # whether speculation is to know how it has ended
    canary: list[int] = []  # the blocks that a canary is computed in: such a step computes nothing of any request

    def held(self) -> Iterator[Request]:
        """The requests of which the step computes something, or that it copies back."""
        return chain((request for request, _, _ in self.rows), self.fetched)

    def holds(self, request: Request) -> bool:
        """Whether `request` is among those."""
        return any(other is request for other in self.held())


class StepBuilder:
    """One step being planned; `is_ahead`: behind one in flight, whose tokens are not known yet."""

    def __init__(
        self,
        planner: Planner,
        step_id: int,
        epoch: int,
        chunk: int,
        only: Collection[int] | None,
        *,
        is_ahead: bool = False,
    ) -> None:
        limits = planner.limits
        self.is_ahead = is_ahead
        self.planner = planner
        self.cache = planner.cache
        self.only = only
        self.budget = limits.max_num_batched_tokens
        self.chunk = chunk
        self.left = 0  # prompt tokens that the step can still take
        self.reserved = 0  # room that those in prefill still need
        self.place: Callable[[Request], int] = arrival  # of requests in prefill, or that wait: whose turn is first
        self.barrier: float = inf  # the place of the first request that did not fit: nothing behind it is admitted
        self.oldest: Request | None = None  # the first in turn of those that the first half goes to
        self.kept_slots = 0
        self.others: list[Request] = []  # those that run, and do not decode in it
        self.had_running = is_ahead or bool(planner.running)  # else the oldest one has everything to itself
        self.served: set[int] = set()
        self.expecting: list[Request] = []  # they wait for a prefix
        self.units = 0  # what may still be spent on looking
        self.num_decodes = 0
        self.is_cut = False  # a look ended for want of them
        self.plan = StepPlan(step_id=step_id, epoch=epoch)
        self.flight = Flight(step_id, self.cache.begin(self.plan))

    def close(self) -> None:
        """Everything is planned; if that is anything, it takes what was preempted before to the host."""
        flight = self.flight
        if self.planner.num_constrained and flight.samples:
            self._add_masks()
        is_step = bool(flight.rows or flight.fetched or flight.canary or flight.is_vacating)
        self.cache.close(flight.journal, is_step=is_step)

    def add_decodes(self) -> None:
        """One token for every decoding request, in order of admission."""
        plan, flight, cache, only = self.plan, self.flight, self.cache, self.only
        rows, samples = flight.rows, flight.samples
        slots, context_lens, input_ids = plan.slots, plan.context_lens, plan.input_ids
        decode, is_ahead = RequestState.DECODE, self.is_ahead
        for request in self.planner.running.values():
            if request.state is not decode and not (is_ahead and request.is_prefill_planned):
                self.others.append(request)
                continue
            if only is not None and request.request_id not in only:
                continue
            if request.mask == AWAITED:
                continue
            at, kv = request.num_planned, request.kv
            token_ids, end = request.token_ids, at + 1
            is_known = at < len(token_ids)
            if not is_known and (end >= request.max_len or at > len(token_ids)):  # the step in flight gives it its last
                continue  # token, or none, since its mask came too late
            if at == kv.capacity and not cache.reserve(request, end):
                continue
            rows.append((request, 1, at))
            samples.append(request)
            slots.append(request.slot)
            context_lens.append(end)
            input_ids.append(token_ids[at] if is_known else SAMPLED)
            request.num_planned = end
            if end >= kv.commits_at and is_known and request.mask != COMING:  # else the row may come to nothing
                cache.expect(request, at, end)
        plan.query_lens = [1] * len(rows)
        plan.sample_seqs = list(range(len(rows)))
        self.num_decodes = len(rows)
        self.budget -= len(rows)

    def add_prefills(self) -> None:
        """Prompt tokens within the chunk and the budget: half of them in turn, half by work."""
        planner = self.planner
        if not self.others and not planner.waiting:
            return
        prefilling = [
            r for r in self.others if r.state is RequestState.PREFILL and r.num_remaining > 0 and allowed(r, self.only)
        ]
        if not prefilling and not planner.waiting:
            return
        self.left = min(self.chunk, planner.chunks.beside(self.num_decodes), self.budget)
        if self.left <= 0:
            return
        fetching = (r for r in self.others if r.state is RequestState.WAITING_FOR_REMOTE_KVS)
        self.reserved = sum(self.cache.room_for(r, len(r.token_ids)) for r in (*prefilling, *fetching))
        waiting = planner.waiting
        if not planner.order.is_by_age:
            in_turn = planner.order.in_turn(prefilling, waiting)
            self.place, waiting = planner.order.places(in_turn), [r for r in in_turn if r.slot < 0]
        self.oldest = min(prefilling, key=self.place, default=None)
        candidates = sorted([*prefilling, *self._admissible(waiting)], key=self.place)
        half = -(-self.left // 2)
        ranked = sorted(candidates, key=planner.order.by_work)
        turn = 0  # of those in `ranked`, whose half by work comes next
        for request in candidates:
            if half <= 0:
                break
            if self._to_compute(request) <= half:
                half -= self._serve(request, half)
                continue
            # It gets what is left of the first half, and its turn in the second; or neither, and the next in turn does.
            kept = self._keep(request)
            at = ranked.index(request)
            for other in ranked[turn:at]:
                self._serve(other, self.left - half)
            turn = max(turn, at)
            self._keep(None, kept)
            if self._serve(request, self.left):
                break
        for request in ranked:
            self._serve(request, self.left)
        for request in self.expecting:
            name = request.waits_for
            self._serve(request, self.left)  # what it waits for may just have been planned
            request.waits_for = request.waits_for or (name if request.slot < 0 else None)
        for request in self.flight.admitted:
            planner.dequeue(request)

    def _admissible(self, waiting: list[Request]) -> list[Request]:
        """Those of `waiting`, which are in turn, that could be admitted: up to the first one that does not fit."""
        planner, cache, only = self.planner, self.cache, self.only
        if only is not None or planner.awaited:
            waiting = [r for r in waiting if allowed(r, only) and r.mask >= 0]
        if not waiting or not self._has_slot():
            return []
        purse_of = self._whom_to_look_at(waiting)
        purses = [LOOK_UNITS, LOOK_UNITS]
        room = cache.room - self.reserved
        found: list[Request] = []
        for request in waiting:
            at = purse_of.get(request.request_id) if purse_of is not None else 0
            needed = cache.room_for(request, request.work or len(request.token_ids)) + 1
            if at is not None:
                if purses[at] <= 0:
                    continue
                self.units = purses[at]
                prefix = self._look(request)
                purses[at] = self.units
                if prefix is None:
                    continue
                request.work = 0 if request.kv.num_swapped else len(request.token_ids) - prefix.num_tokens
                if request.waits_for is not None:
                    self.expecting.append(request)
                    continue
                needed = self._needed(request, prefix)
            elif request.waits_for is not None:
                continue
            if needed + planner.headroom(request) > room and (self.had_running or found):
                break
            if at is not None:
                found.append(request)
                if self.oldest is None or self.place(request) < self.place(self.oldest):
                    self.oldest = request
        return found

    def _whom_to_look_at(self, waiting: list[Request]) -> dict[int, int] | None:
        """The ids to look at in this step, each with its purse; None: all, with the first one."""
        planner = self.planner
        if len(waiting) <= 3 * LOOKS:
            return None
        by_age = waiting if planner.order.is_by_age else sorted(waiting, key=arrival)
        after = bisect_right(by_age, planner.looked_at, key=arrival)
        in_turn = by_age[max(after, LOOKS) :][:LOOKS]
        planner.looked_at = in_turn[-1].request_id if len(in_turn) == LOOKS else -1
        purse_of = {r.request_id: 0 for r in (*waiting[:LOOKS], *in_turn)}
        for request in nsmallest(LOOKS, waiting, key=by_work):
            purse_of.setdefault(request.request_id, 1)
        return purse_of

    def _look(self, request: Request) -> Prefix | None:
        """What the cache holds of the beginning of `request`; what it waits for is noted. None: look on later."""
        request.waits_for = None
        if request.kv.num_swapped or request.needs_every_row:
            return Prefix([])
        prefix = self.cache.find_prefix(request, self.units)
        self.units -= prefix.num_units
        if prefix.is_cut:
            self.is_cut = True
            return None
        if prefix.awaited is not None:
            work = len(request.token_ids) - prefix.num_tokens
            if self._is_worth_waiting_for(prefix.producer_id, work):
                request.waits_for = prefix.awaited
        return prefix

    def _is_worth_waiting_for(self, producer_id: int, work: int) -> bool:
        """Whether the producer will have computed the prefix about as soon as a request of so much `work` would."""
        producer = self.planner.running[producer_id]
        if not allowed(producer, self.only):
            return False
        return producer is self.oldest or producer.work <= 2 * work

    def _needed(self, request: Request, prefix: Prefix) -> int:
        """Room that there must be for `request`, one unit to go on included."""
        return self.cache.room_for(request, len(request.token_ids), prefix) + 1

    def _keep(self, request: Request | None, kept: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Keep a slot and room for `request`, if it has none yet; None: give back what was `kept`."""
        self.reserved -= kept[0]
        self.kept_slots -= kept[1]
        if request is None or request.slot >= 0:
            return 0, 0
        self.units = LOOK_UNITS
        kept = self._needed(request, self._look(request) or Prefix([])), 1
        self.reserved += kept[0]
        self.kept_slots += 1
        return kept

    def _to_compute(self, request: Request) -> int:
        """Tokens of `request` that are to be computed, this step's hits included; none when they are fetched."""
        return request.num_remaining if request.slot >= 0 else request.work

    def _has_slot(self) -> bool:
        planner = self.planner
        return min(len(planner.free_slots), planner.max_running - len(planner.running)) > self.kept_slots

    def _serve(self, request: Request, allowance: int) -> int:
        """Compute up to `allowance` tokens of `request` in this step, admitting it first if it waits; how many."""
        if request.request_id in self.served:
            return 0
        if request.slot < 0:
            used = self._try_to_admit(request, allowance)
        elif allowance <= 0:
            return 0
        else:
            before = self._still_to_reserve(request)
            used = self._prefill(request, allowance)
            self.reserved -= before - self._still_to_reserve(request)
        if used:
            self.served.add(request.request_id)
        self.left -= used
        return used

    def _try_to_admit(self, request: Request, allowance: int) -> int:
        is_swapped = request.kv.num_swapped > 0
        is_enough = len(self.flight.admitted) >= ADMISSIONS or len(self.plan.table_blocks) >= ADMITTED_BLOCKS
        if self.place(request) > self.barrier or not self._has_slot() or (is_enough and self.flight.admitted):
            return 0
        if allowance <= 0 and not is_swapped:
            return 0
        self.units = LOOK_UNITS
        prefix = self._look(request)  # again: what was planned since can be shared, or is promised
        if prefix is None or request.waits_for is not None:
            return 0
        needed = self._needed(request, prefix) + self.planner.headroom(request)
        if needed > self.cache.room - self.reserved and (self.had_running or request is not self.oldest):
            self.barrier = self.place(request)  # none overtakes by being small
            return 0
        used = 0
        if is_swapped:
            self._fetch(request)
            self.served.add(request.request_id)
        else:
            self._admit(request, prefix)
            used = self._prefill(request, allowance)
            assert used, "what was admitted fits, or has the pool to itself"
        self.reserved += self._still_to_reserve(request)
        return used

    def _still_to_reserve(self, request: Request) -> int:
        """Room that a request with a slot will take before its prompt is computed."""
        return self.cache.room_for(request, len(request.token_ids))

    def _admit(self, request: Request, prefix: Prefix) -> None:
        request.handle(ADMIT)
        self._give_slot(request)
        self.cache.share(request, prefix)
        request.num_planned = prefix.num_tokens
        if request.is_first_output:
            request.num_cached = prefix.num_tokens
        self.plan.admissions.append(request.sampling_spec())

    def _fetch(self, request: Request) -> None:
        """Have this step copy back from the host what `request` had computed."""
        request.handle(FETCH)
        self._give_slot(request)
        self.flight.fetched.append(request)
        self.cache.fetch(request)
        request.num_planned = request.kv.num_swapped
        request.work = request.num_remaining
        self.plan.admissions.append(request.sampling_spec())

    def _give_slot(self, request: Request) -> None:
        request.slot = self.planner.free_slots.pop()
        self.planner.running[request.request_id] = request
        self.flight.admitted.append(request)

    def add_drafts(self, speculation: Speculation) -> None:
        """Let rows that decode verify guesses of their next tokens: as many as pay, in room that is not needed."""
        plan, flight, cache = self.plan, self.flight, self.cache
        decodes = [request for request, _, _ in flight.rows[: self.num_decodes]]
        num_tokens = len(plan.input_ids)
        most = self.planner.limits.max_num_batched_tokens - num_tokens
        if flight.num_prompt_tokens:
            most = self.planner.chunks.room_for_drafts(num_tokens, most)
        found = speculation.drafts(decodes, num_tokens, most, self._mute(decodes))
        if not any(found):
            return
        input_ids: list[int] = []
        plan.num_drafts = [0] * len(flight.samples)
        for at, (request, drafts) in enumerate(zip(decodes, found, strict=True)):
            end = plan.context_lens[at]
            if end + len(drafts) > request.kv.capacity:
                spare = cache.room - self.reserved - len(self.planner.running)
                if cache.room_for(request, end + len(drafts)) > spare or not cache.reserve(request, end + len(drafts)):
                    del drafts[request.kv.capacity - end :]
            input_ids.append(plan.input_ids[at])
            if drafts:
                input_ids += drafts
                flight.rows[at] = request, 1 + len(drafts), end - 1
                flight.drafts[request.request_id] = plan.num_drafts[at] = len(drafts)
                if request.mask:
                    flight.guesses[request.request_id] = drafts
                plan.query_lens[at] += len(drafts)
                plan.context_lens[at] += len(drafts)
                request.num_planned += len(drafts)
        plan.input_ids[: len(decodes)] = input_ids
        if plan.score_rows:  # they are behind the decodes
            num_more = len(input_ids) - len(decodes)
            plan.score_rows = [row + num_more for row in plan.score_rows]
        if not flight.drafts:
            plan.num_drafts = []

    def _mute(self, decodes: Sequence[Request]) -> Collection[int]:
        """Those of which the mask is there or asked for: then the ones behind drafts are not, and never will be."""
        if not self.planner.num_constrained:
            return ()
        advanced = self.planner.advanced
        return {r.request_id for r in decodes if r.mask and r.request_id not in advanced}

    def _add_masks(self) -> None:
        """Name the masks of the positions that are sampled, those behind drafts among them."""
        plan, samples, at = self.plan, self.flight.samples, 0
        rows = zip(samples, plan.sample_seqs, plan.num_drafts or repeat(0, len(samples)), strict=True)
        for request, seq, num_drafts in rows:
            if request.mask:
                num_tokens = plan.context_lens[seq] - num_drafts - request.num_prompt
                plan.mask_positions += range(at, at + 1 + num_drafts)
                plan.mask_ids += [(request.request_id, num_tokens, behind) for behind in range(1 + num_drafts)]
            at += 1 + num_drafts

    def add_canary(self, slot: int, num_tokens: int) -> None:
        """A prompt that no client has sent, in blocks that the journal gives back."""
        plan = self.plan
        self.flight.canary = self.cache.borrow(slot, num_tokens)
        plan.admissions.append(SeqParams(slot=slot, num_prompt_tokens=num_tokens))  # greedy
        plan.slots, plan.query_lens, plan.context_lens = [slot], [num_tokens], [num_tokens]
        plan.input_ids, plan.sample_seqs = [CANARY_TOKEN] * num_tokens, [0]

    def _prefill(self, request: Request, allowance: int) -> int:
        """Add up to `allowance` prompt tokens of `request`; returns how many."""
        plan, cache = self.plan, self.cache
        start, total = request.num_planned, len(request.token_ids)
        end = cache.end_of_chunk(request, start, min(total, start + allowance))
        if end <= start:
            return 0
        cache.reserve(request, end)
        self.flight.rows.append((request, end - start, start))
        self.flight.num_prompt_tokens += end - start
        if request.pooling is not None:
            self._pool(request, start, end)
        elif end == total:
            self.flight.samples.append(request)
            plan.sample_seqs.append(len(plan.slots))
        if request.is_unscored:
            self._score(request, start, end)
        plan.slots.append(request.slot)
        plan.query_lens.append(end - start)
        plan.context_lens.append(end)
        plan.input_ids.extend(request.token_ids[start:end])
        request.num_planned = end
        cache.expect(request, start, end)
        return end - start

    def _score(self, request: Request, start: int, end: int) -> None:
        """Have the step score the prompt's tokens behind those that it computes, from `start` to `end`."""
        assert request.scores is not None, "it has to be scored"
        first, last = max(start, len(request.scores)), min(end, request.num_prompt - 1)
        if first >= last:
            return
        plan = self.plan
        before = len(plan.input_ids) - start
        plan.score_rows.extend(range(before + first, before + last))
        plan.score_ids.extend(request.token_ids[first + 1 : last + 1])
        plan.score_tops.extend([request.params.prompt_logprobs or 0] * (last - first))
        self.flight.scored.append((request, first, last - first))

    def _pool(self, request: Request, start: int, end: int) -> None:
        """Have the step sum what the vector of `request` wants of its tokens from `start` to `end`."""
        first = request.first_to_pool(start)
        if first < end:
            self.plan.pool_seqs.append(len(self.plan.slots))
            self.plan.pool_lens.append(end - first)
            self.flight.pooled.append((request, first, end - first))


by_work = attrgetter("work")


def allowed(request: Request, only: Collection[int] | None) -> bool:
    """Whether the step may hold `request`; `only` are the ids of a bisection."""
    return only is None or request.request_id in only


def runnable(request: Request, only: Collection[int] | None) -> bool:
    """Whether `request` could use the step, if there is room for it."""
    return request.state is not RequestState.PAUSED and allowed(request, only)
