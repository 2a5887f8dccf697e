"""The queue, the running requests and what they own; who has to go when memory or slots are short.

`StepBuilder` puts the next step together; here it is made room for, committed, or taken back when it fails.

What is preempted leaves its KV on the host, if there is room: the next step copies it out before anything is computed,
and the one that takes it in again copies it back. Paused requests are preempted first, also for want of slots.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection
from typing import Literal

import msgspec

from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.kv.cache import KVCache
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import StepPlan
from novainfer.fsm.schedule.batching import Flight, StepBuilder, runnable
from novainfer.fsm.schedule.costs import Chunks
from novainfer.fsm.schedule.order import Order, arrival
from novainfer.fsm.schedule.request import (
    AWAITED,
    FETCHED,
    LOSE,
    PREEMPT,
    RECOVER,
    UNADMIT,
    VACATE,
    Preempt,
    Request,
    RequestState,
    Vacate,
)
from novainfer.fsm.schedule.speculation import Speculation


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one step may hold, in requests and tokens."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefill_chunk_tokens: int = 512
    block_size: int = 16
    inter_token_target_ms: float | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    priority_wait_s: float = 10.0
    share_prefix_cache: bool = False
    tells_routers: bool = False  # which prefixes can be found
    session_ttl_s: float = 0.0
    session_share: float = 0.5
    max_sessions: int = 1000


class Planner:
    """The queue, the running requests and the pool; plans steps and takes them back."""

    def __init__(
        self, limits: Limits, num_blocks: int, num_host_blocks: int = 0, speculation: Speculation | None = None
    ) -> None:
        self.limits = limits
        self.cache: KVCache = BlockCache(
            num_blocks,
            limits.block_size,
            num_host_blocks,
            enable_prefix_caching=limits.enable_prefix_caching,
            tells_changes=limits.tells_routers,
            kept_share=limits.session_share,
        )
        self.waiting: list[Request] = []  # WAITING, PREEMPTED and RECOVERING, in order of arrival
        self.order = Order(by_priority=limits.scheduling_policy == "priority")
        self.running: dict[int, Request] = {}  # those that have a slot and blocks, in order of admission
        self.parked: dict[int, Request] = {}  # PAUSED without a slot or blocks
        self.num_constrained = 0  # requests whose tokens need masks, wherever they are
        self.awaited: dict[int, Request] = {}  # of those, the ones whose next mask has not come
        self.advanced: dict[int, list[int]] = {}  # the tokens that they have got in this turn: grammars are told yet
        self.overstayed: set[int] = set()  # PAUSED for too long: they are parked before the next step
        self.max_running = limits.max_num_seqs  # requests in one step; less while memory or time is short
        self.mode = Mode()  # what the last step was planned in
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.looked_at = -1  # the id of the waiting request that was looked at last in turn
        self.num_preemptions = 0
        self.speculation = speculation
        self.chunks = Chunks(limits.prefill_chunk_tokens, limits.block_size, limits.inter_token_target_ms)

    # ---- queue ---------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Put `request` into the queue, at its place by arrival."""
        request.work = 0 if request.kv.num_swapped else len(request.token_ids)
        insort(self.waiting, request, key=arrival)
        self.order.enqueue(request)

    def dequeue(self, request: Request) -> None:
        """Take `request` out of the queue, where it must be."""
        at = bisect_left(self.waiting, request.request_id, key=arrival)
        assert self.waiting[at] is request, f"request {request.request_id} is not in the queue"
        del self.waiting[at]
        self.order.dequeue(request)

    def is_queued(self, request: Request) -> bool:
        """Whether `request` is in the queue."""
        at = bisect_left(self.waiting, request.request_id, key=arrival)
        return at < len(self.waiting) and self.waiting[at] is request

    def remove(self, request: Request) -> None:
        """Take `request` out of the queue or the batch, and give back what it owns."""
        if request.request_id in self.running:
            del self.running[request.request_id]
            self.release(request)
        elif self.parked.pop(request.request_id, None) is None and self.is_queued(request):
            self.dequeue(request)
        self.cache.drop_copy(request)

    def release(self, request: Request) -> None:
        """Give back the slot of `request`, and all that it has on the device."""
        self.cache.release(request)
        if request.slot >= 0:
            self.free_slots.append(request.slot)
            request.slot = -1

    def unpark(self, request: Request) -> None:
        """Its reader is back: queue it again."""
        del self.parked[request.request_id]
        self.enqueue(request)

    def lose(self) -> None:
        """The worker is gone, and with it every block; nothing is in flight. Copies on the host go with `refit`."""
        for request in list(self.running.values()):
            del self.running[request.request_id]
            self.release(request)
            request.handle(LOSE)
            if request.state is RequestState.RECOVERING:
                self.enqueue(request)
            else:
                self.parked[request.request_id] = request
        self.overstayed.clear()
        self.cache.forget()

    def stay_behind(self) -> None:
        """What was preempted, and not copied out since, will not be: all that it has is its tokens."""
        for request in (*self.waiting, *self.parked.values()):
            self.cache.keep_back(request)

    def refit(self, num_blocks: int, num_host_blocks: int, *, keeps_host: bool) -> None:
        """The device has another KV cache, and what was on the host is there yet, or not; nothing is running."""
        if not keeps_host:
            self.cache.forget_copies()
            for request in (*self.waiting, *self.parked.values()):
                self.cache.drop_copy(request)
        self.cache.refit(num_blocks, num_host_blocks)

    def recover(self) -> None:
        """There is a worker again."""
        for request in self.waiting:
            if request.state is RequestState.RECOVERING:
                request.handle(RECOVER)

    def change_mode(self, mode: Mode) -> None:
        """Steps compute in `mode` from now on: what was computed otherwise is not shared with any other request."""
        before, self.mode = self.mode, mode
        if mode.computes_as(before):
            return
        self.cache.distrust_all(self.running.values(), (*self.waiting, *self.parked.values()))

    # ---- planning ------------------------------------------------------------------------------------------------

    def plan(
        self, step_id: int, epoch: int, chunk: int, only: Collection[int] | None
    ) -> tuple[StepPlan, Flight] | None:
        """The next step, or None if nothing can run; `only` restricts it to some request ids (a bisection).

        `chunk` is the number of prompt tokens it may hold, and `chunks` says how many beside decodes. Requests are
        preempted when memory is short: that is a decision of its own, which stays when the step is rolled back.
        """
        while True:
            self._park_overstayed()
            if only is None:
                self._make_slots()
            self._make_room(only)
            builder = StepBuilder(self, step_id, epoch, chunk, only)
            builder.add_decodes()
            builder.add_prefills()
            if self.speculation is not None and only is None:
                if self.speculation.begin_step(builder.num_decodes):
                    builder.add_drafts(self.speculation)
                    builder.plan.num_drafts_wanted = self.speculation.wanted(builder.flight.samples)
                    builder.flight.num_passes = max(builder.plan.num_drafts_wanted, default=0)
                builder.flight.is_noted = self.speculation.is_noted
            builder.close()
            if builder.flight.rows or builder.flight.fetched:
                return builder.plan, builder.flight
            if builder.is_cut:  # nothing else is to be done than to look on
                continue
            # Nothing fits. If a request could run, take the blocks of one whose turn is later, and try again.
            able = (*self.running.values(), *self.waiting)
            wants_to_run = [r for r in able if runnable(r, only) and (r.mask >= 0 or r.slot >= 0)]
            if self.has_awaited:
                return None
            if not wants_to_run or not self._preempt_one(keep=min(wants_to_run, key=self.order.turn)):
                return None

    def plan_ahead(self, step_id: int, epoch: int, chunk: int) -> tuple[StepPlan, Flight] | None:
        """A step behind those in flight, or None if nothing can run, or if room has to be made first.

        No request is preempted for it: the steps in flight use what it has.
        """
        self._park_overstayed()
        if self.overstayed or self._is_crowded or self._short_of_room(None) is not None:
            return None
        builder = StepBuilder(self, step_id, epoch, chunk, None, is_ahead=True)
        builder.add_decodes()
        builder.add_prefills()
        builder.close()
        return (builder.plan, builder.flight) if builder.flight.rows or builder.flight.fetched else None

    def plan_canary(self, step_id: int, epoch: int, num_tokens: int) -> tuple[StepPlan, Flight] | None:
        """A step over `num_tokens` tokens of no request, in a free slot and free blocks; None if there are none.

        It takes nothing: its blocks are free again when its flight is taken back or `dismissed`.
        """
        self._park_overstayed()
        num_tokens = min(num_tokens, self.cache.num_tokens_free)
        if not self.free_slots or not num_tokens:
            return None
        builder = StepBuilder(self, step_id, epoch, num_tokens, None)
        builder.add_canary(self.free_slots[-1], num_tokens)
        builder.close()
        return builder.plan, builder.flight

    def vacate(self, step_id: int, epoch: int) -> tuple[StepPlan, Flight] | None:
        """Have all requests leave the KV cache: a step that copies out what the host has room for, if there is any.

        Those whose turn is first come first. Nothing is in flight.
        """
        for request in sorted(self.running.values(), key=self.order.turn):
            self._put_out(request, VACATE)
        builder = StepBuilder(self, step_id, epoch, 0, None)
        builder.flight.is_vacating = True
        self.cache.save_kept()
        builder.close()
        return (builder.plan, builder.flight) if builder.plan.swap_out_blocks else None

    def dismiss(self, canary: Flight) -> None:
        """A canary went well: its blocks are free again."""
        self.cache.take_back(canary.journal)
        self.settle(canary)

    def commit(self, flight: Flight) -> None:
        """The step ran to its end: what it has computed and copied stays."""
        cache = self.cache
        cache.commit(flight.journal)
        self.order.charge(flight)
        for request in flight.fetched:
            request.num_computed = request.num_planned
            cache.commit_row(request, request.num_computed)
            if not request.ended:
                request.handle(FETCHED)
                cache.drop_copy(request)
        rows, drafts = flight.rows, flight.drafts
        if drafts:  # they are committed one by one, as far as they are right
            rows = [(request, count - drafts.get(request.request_id, 0), start) for request, count, start in rows]
        if flight.late:
            rows = [row for row in rows if row[0].request_id not in flight.late]
        for request, count, start in rows:
            request.num_computed = end = start + count
            if end >= request.kv.commits_at:
                cache.commit_row(request, end)

    def commit_draft(self, request: Request) -> None:
        """The draft behind what is committed of `request` is the token that was sampled there."""
        request.num_computed += 1
        if request.num_computed >= request.kv.commits_at:
            self.cache.commit_row(request, request.num_computed)

    def set_back(self, request: Request) -> None:
        """What its step has computed beyond what is committed is of no use."""
        request.num_planned = request.num_computed
        self.cache.truncate(request, request.num_computed)

    def rollback(self, flight: Flight, *, launched: bool) -> None:
        """Take back everything `flight` planned; exactly, if it was never launched."""
        for request, _, start in flight.rows:
            request.num_planned = start
        self.cache.undo(flight.journal, launched=launched)
        for request in reversed(flight.admitted):
            request.num_planned = 0
            self.free_slots.append(request.slot)
            request.slot = -1
            request.handle(UNADMIT)
            if not request.ended:
                del self.running[request.request_id]
                self.enqueue(request)
        self.settle(flight)

    def settle(self, flight: Flight) -> None:
        """What ended while `flight` was on the device gives back what it owns."""
        for request in flight.departed:
            self.release(request)
            self.cache.drop_copy(request)

    def _park_overstayed(self) -> None:
        """Requests whose reader was away for too long while a step held them give up what they keep, once none does."""
        for request_id in sorted(self.overstayed) if self.overstayed else ():
            request = self.running.get(request_id)
            if request is not None and request.state is RequestState.PAUSED:
                if request.is_in_flight:
                    continue
                self.preempt(request)
            self.overstayed.remove(request_id)

    @property
    def has_awaited(self) -> bool:
        """Whether a request that has slot and blocks goes on when its mask comes: none is preempted meanwhile."""
        paused = RequestState.PAUSED
        return any(r.mask == AWAITED and r.slot >= 0 and r.state is not paused for r in self.awaited.values())

    @property
    def _is_crowded(self) -> bool:
        """Whether requests have to leave their slots for others."""
        if self.max_running < len(self.running):
            return True
        if not self.waiting:
            return False
        if self.free_slots and len(self.running) < self.max_running:
            return bool(self._beyond_share())
        return any(r.state is RequestState.PAUSED for r in self.running.values()) or bool(self._beyond_share())

    def _make_slots(self) -> None:
        """Park as many paused requests as there are others in want of a slot."""
        while self.waiting and not (self.free_slots and len(self.running) < self.max_running):
            paused = next((r for r in self.running.values() if r.state is RequestState.PAUSED), None)
            if paused is None:
                break
            self.preempt(paused)
        while self.max_running < len(self.running):  # looked at closely only while memory is short
            active = [r for r in self.running.values() if r.state is not RequestState.PAUSED]
            if len(active) <= self.max_running or not self._preempt_one(keep=min(active, key=self.order.turn)):
                break
        self._make_share()

    def _make_room(self, only: Collection[int] | None) -> None:
        """Preempt until every decoding request, and the first in turn, can have the block that it needs next."""
        while (first := self._short_of_room(only)) is not None and self._preempt_one(keep=first):
            pass

    def _make_share(self) -> None:
        """Have a tenant of which nothing runs wait for no slot and no blocks that one with several requests has."""
        while victims := self._beyond_share():
            self.preempt(self._first_to_go(victims))

    def _beyond_share(self) -> list[Request]:
        """The requests one of which has to go, because the first in turn is of a tenant of which nothing runs."""
        order, cache = self.order, self.cache
        if order.is_by_age or (first := order.first) is None or first.mask < 0:
            return []
        running = Counter(r.tenant.id for r in self.running.values())
        if first.tenant.id in running:
            return []
        promised = [r for r in self.running.values() if r.state is not RequestState.DECODE]
        reserved = sum(cache.room_for(r, len(r.token_ids)) for r in promised)
        needed = cache.room_for(first, len(first.token_ids)) + 1 + self.headroom(first) + reserved
        is_crowded = not self.free_slots or len(self.running) >= self.max_running
        if needed <= cache.room and not is_crowded:
            return []
        rank, paused = order.rank(first), RequestState.PAUSED
        victims = [
            r
            for r in self.running.values()
            if r.state is paused or (running[r.tenant.id] > 1 and order.rank(r) >= rank)
        ]
        return victims if needed <= cache.room + sum(len(cache.table_of(r)) for r in victims) else []

    def headroom(self, request: Request) -> int:
        """Room that the admission of `request` leaves free, so that it is not preempted again in the next steps."""
        return (len(self.running) // 2 + 2) << min(request.num_preemptions, 2)

    def _short_of_room(self, only: Collection[int] | None) -> Request | None:
        """The first in turn of those that can run, if not all of them can have the block that they need next."""
        cache = self.cache
        if cache.room >= len(self.running):
            return None
        able = [r for r in self.running.values() if runnable(r, only)]
        if not able:
            return None
        first = min(able, key=self.order.turn)
        needed = sum(
            cache.room_for(r, r.num_planned + 1)
            for r in able
            if r is first or r.state is RequestState.DECODE or r.is_prefill_planned
        )
        return None if needed <= cache.room else first

    def _preempt_one(self, keep: Request) -> bool:
        """Take the blocks of the request that loses least; paused ones first, the first in turn (`keep`) never.

        Of several priorities or tenants it is one of the last: of the tenant that was given most.
        """
        victims = [r for r in self.running.values() if r is not keep and r.kv.capacity]
        if not victims:
            return False
        self.preempt(self._first_to_go(victims))
        return True

    def _first_to_go(self, victims: list[Request]) -> Request:
        paused, loss = RequestState.PAUSED, self.order.loss
        return min(victims, key=lambda r: (r.state is not paused, loss(r), r.num_computed, -r.request_id))

    def preempt(self, victim: Request) -> None:
        """Take slot and blocks of `victim`, leaving a copy on the host if there is room; it is in no step now."""
        self.num_preemptions += 1
        self._put_out(victim, PREEMPT)

    def _put_out(self, request: Request, why: Preempt | Vacate) -> None:
        self.cache.swap_out(request)
        self.release(request)
        request.handle(why)
        del self.running[request.request_id]
        if request.state is RequestState.PREEMPTED:
            self.enqueue(request)
        else:
            self.parked[request.request_id] = request
