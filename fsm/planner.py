"""Which requests run in the next step, and how many tokens of each: continuous batching under one token budget.

Every request that decodes takes one token. What is left of the budget, but no more than `prefill_chunk_tokens`, goes
to prompts, first come first served. A prompt longer than what is left is cut at a block boundary and goes on in the
next step; while a short one stands behind it, a quarter of the chunk is kept for short ones, so that one long prompt
starves nobody. A waiting request is admitted when its whole prompt, and one block to go on, fit beside what the
prompts before it still need; it waits for nobody's blocks half-way.

A prefix that another request is computing is not computed twice: planned in the same step or cached, its blocks are
shared; if its turn comes in a later step, the newcomer waits for it by name, and becomes the producer itself when
the first one ends.

Who is preempted leaves its KV on the host, if there is room: the next step copies it out before anything is computed,
and the one that takes it in again copies it back. Paused requests are preempted first, also for want of slots.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection

import msgspec

from novainfer.fsm.blocks import BlockPool, HostPool, Journal
from novainfer.fsm.events import StepPlan
from novainfer.fsm.request import ADMIT, FETCH, LOSE, PREEMPT, RECOVER, UNADMIT, Request, RequestState

SHORT_SHARE = 4  # 1/4 of the chunk is kept for short prompts while a long one is ahead of them
SHORT_LOOKAHEAD = 32  # waiting requests looked at to see whether a short one is there: bounds the scan of a long queue


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one step may hold, in requests and tokens."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefill_chunk_tokens: int = 512
    block_size: int = 16
    enable_prefix_caching: bool = True


class Flight(msgspec.Struct, gc=False):
    """A planned step, and all that is needed to commit it or to take it back."""

    step_id: int
    rows: list[tuple[Request, int, int]]  # the request, its tokens in this step, its blocks before the step
    samples: list[Request]
    admitted: list[Request]
    journal: Journal
    departed: list[Request]  # ended while the step was on the device; they own their blocks until it returns
    fulfilled: list[tuple[bytes, Request]]  # promised names that this step computes, and who had promised them
    fetched: list[Request]  # of `admitted`, those whose KV this step copies back from the host
    swapped: dict[
        int, tuple[Request, list[int]]
    ]  # whose KV it copies to the host, by request id, and from which blocks
    mode: str = "full"  # what the device has to compute in
    before: object = None  # what `Planner.probe` gave before the step was planned


class Planner:
    """The queue, the running requests and the pool; plans steps and takes them back."""

    def __init__(self, limits: Limits, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.limits = limits
        self.pool = BlockPool(num_blocks, limits.block_size)
        self.host = HostPool(num_host_blocks)
        self.waiting: list[Request] = []  # WAITING, PREEMPTED and RECOVERING, in order of arrival
        self.running: dict[int, Request] = {}  # those that have a slot and blocks, in order of admission
        self.parked: dict[int, Request] = {}  # PAUSED without a slot or blocks
        self.overstayed: set[int] = set()  # PAUSED for too long: they are parked before the next step
        self.leaving: dict[int, tuple[Request, list[int]]] = {}  # whose KV the next step copies out, as Flight.swapped
        self.max_running = limits.max_num_seqs  # requests and
        self.max_tokens = limits.max_num_batched_tokens  # tokens in one step; less while memory is short
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.producers: dict[bytes, int] = {}  # block name -> the running request that will compute it
        self.num_preemptions = 0
        self.num_swapped_out = self.num_swapped_in = 0  # blocks
        self.probe: Callable[[], object] | None = None  # the simulator's: what a rollback has to give back

    # ---- queue ---------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Put `request` into the queue, at its place by arrival."""
        insort(self.waiting, request, key=_arrival)

    def remove(self, request: Request) -> None:
        """Take `request` out of the queue or the batch, and give back what it owns."""
        if request.request_id in self.running:
            del self.running[request.request_id]
            self.release(request)
        elif self.parked.pop(request.request_id, None) is None and request in self.waiting:
            self.waiting.remove(request)
        self.drop_host(request)

    def release(self, request: Request) -> None:
        """Give back the blocks, the slot and the promises of `request`."""
        self.pool.release(reversed(request.blocks))
        request.blocks.clear()
        if request.slot >= 0:
            self.free_slots.append(request.slot)
            request.slot = -1
        self._stop_producing(request)

    def drop_host(self, request: Request) -> None:
        """Give back what `request` has on the host: it is here again, has ended, or its copy cannot be trusted."""
        self.host.release(request.host_blocks)
        request.host_blocks = []
        request.num_swapped = 0
        self.leaving.pop(request.request_id, None)

    def park(self, request: Request) -> None:
        """Take slot and blocks of a paused request that is not in the step on the device."""
        self._preempt(request)

    def unpark(self, request: Request) -> None:
        """Its reader is back: queue it again."""
        del self.parked[request.request_id]
        self.enqueue(request)

    def lose(self) -> None:
        """The worker is gone, and with it every block, here and on the host; nothing is in flight."""
        for request in list(self.running.values()):
            del self.running[request.request_id]
            self.release(request)
            request.handle(LOSE)
            if request.state is RequestState.RECOVERING:
                self.enqueue(request)
            else:
                self.parked[request.request_id] = request
        for request in (*self.waiting, *self.parked.values()):
            self.drop_host(request)
        self.overstayed.clear()
        self.pool.forget()

    def recover(self) -> None:
        """There is a worker again, with as many blocks as before."""
        for request in self.waiting:
            if request.state is RequestState.RECOVERING:
                request.handle(RECOVER)

    # ---- planning ------------------------------------------------------------------------------------------------

    def plan(
        self, step_id: int, epoch: int, chunk: int, only: Collection[int] | None
    ) -> tuple[StepPlan, Flight] | None:
        """The next step, or None if nothing can run; `only` restricts it to some request ids (a bisection).

        `chunk` is the number of prompt tokens it may hold. Requests are preempted when memory is short: that is a
        decision of its own, which stays when the step is rolled back.
        """
        while True:
            if only is None:
                self._make_slots()
            self._make_room(only)
            draft = _Draft(self, step_id, epoch, chunk, only)
            draft.flight.before = self.probe() if self.probe else None
            self.pool.open(draft.flight.journal)
            draft.add_decodes()
            draft.add_prefills()
            self.pool.close()
            if draft.flight.rows or draft.flight.fetched:
                draft.add_swaps()
                return draft.plan, draft.flight
            # Nothing fits. If somebody wants to run, take the blocks of whoever loses least, and try again.
            wants_to_run = [r for r in (*self.running.values(), *self.waiting) if _runnable(r, only)]
            if not wants_to_run or not self._preempt_one(keep=min(wants_to_run, key=_arrival)):
                return None

    def rollback(self, flight: Flight, *, launched: bool) -> None:
        """Take back everything `flight` planned; exactly, if it was never launched."""
        for request, num_tokens, num_blocks in flight.rows:
            request.num_computed -= num_tokens
            del request.blocks[num_blocks:]
        self.pool.undo(flight.journal, launched=launched)
        for request in reversed(flight.admitted):
            # Its shared blocks went back with the journal; nothing else can have become its own.
            request.blocks.clear()
            request.num_computed = 0
            self._stop_producing(request)
            self.free_slots.append(request.slot)
            request.slot = -1
            request.handle(UNADMIT)
            if not request.ended:
                del self.running[request.request_id]
                insort(self.waiting, request, key=_arrival)
        for name, request in reversed(flight.fulfilled):
            if not request.ended and request.state is RequestState.PREFILL:
                self.producers[name] = request.request_id
                request.producing.add(name)
        for request_id, (request, blocks) in flight.swapped.items():
            if launched:  # what was copied may have been overwritten first
                self.drop_host(request)
            elif request.host_blocks:  # it has not ended meanwhile
                self.leaving[request_id] = request, blocks
        self.settle(flight)

    def settle(self, flight: Flight) -> None:
        """What ended while `flight` was on the device gives back what it owns."""
        for request in flight.departed:
            self.release(request)
            self.drop_host(request)

    def _make_slots(self) -> None:
        """Park who has overstayed, and as many paused requests as there are others in want of a slot."""
        for request_id in sorted(self.overstayed):
            request = self.running.get(request_id)
            if request is not None and request.state is RequestState.PAUSED:
                self._preempt(request)
        self.overstayed.clear()
        while self.waiting and not (self.free_slots and len(self.running) < self.max_running):
            paused = next((r for r in self.running.values() if r.state is RequestState.PAUSED), None)
            if paused is None:
                break
            self._preempt(paused)
        while self.max_running < len(self.running):  # looked at closely only while memory is short
            active = [r for r in self.running.values() if r.state is not RequestState.PAUSED]
            if len(active) <= self.max_running or not self._preempt_one(keep=min(active, key=_arrival)):
                break

    def _make_room(self, only: Collection[int] | None) -> None:
        """Preempt until every decoding request, and the oldest one, can have the block that it needs next."""
        pool = self.pool
        if pool.num_available >= len(self.running):
            return
        size = self.limits.block_size
        while True:
            runnable = [r for r in self.running.values() if _runnable(r, only)]
            if not runnable:
                return
            oldest = min(runnable, key=_arrival)
            needed = sum(
                r.num_computed == len(r.blocks) * size
                for r in runnable
                if r is oldest or r.state is RequestState.DECODE
            )
            if needed <= pool.num_available or not self._preempt_one(keep=oldest):
                return

    def _preempt_one(self, keep: Request) -> bool:
        """Take the blocks of the request that loses least; paused ones first, the oldest (`keep`) never."""
        victims = [r for r in self.running.values() if r is not keep and r.blocks]
        if not victims:
            return False
        self._preempt(min(victims, key=lambda r: (r.state is not RequestState.PAUSED, r.num_computed, -r.request_id)))
        return True

    def _preempt(self, victim: Request) -> None:
        """Take slot and blocks of `victim`, leaving a copy on the host if there is room."""
        self.num_preemptions += 1
        num_blocks = -(-victim.num_computed // self.limits.block_size)
        if 0 < num_blocks <= self.host.num_free:
            victim.host_blocks = self.host.allocate(num_blocks)
            victim.num_swapped = victim.num_computed
            self.leaving[victim.request_id] = victim, victim.blocks[:num_blocks]
        self.release(victim)
        victim.handle(PREEMPT)
        del self.running[victim.request_id]
        if victim.state is RequestState.PREEMPTED:
            self.enqueue(victim)
        else:
            self.parked[victim.request_id] = victim

    # ---- promises ------------------------------------------------------------------------------------------------

    def _produce(self, request: Request) -> None:
        """Promise the names of the full blocks that `request` has still to compute."""
        size = self.limits.block_size
        worth_sharing = (len(request.token_ids) - 1) // size  # as `_find_prefix` looks no further
        for name in request.names[request.num_computed // size : worth_sharing]:
            if name not in self.producers and self.pool.find(name) is None:
                self.producers[name] = request.request_id
                request.producing.add(name)

    def _stop_producing(self, request: Request) -> None:
        for name in sorted(request.producing):
            del self.producers[name]
        request.producing.clear()

    def fulfil(self, name: bytes, flight: Flight) -> None:
        """`name` is planned, by whomever: who waits for it can share the block."""
        request_id = self.producers.pop(name, None)
        if request_id is not None:
            request = self.running[request_id]
            request.producing.remove(name)
            flight.fulfilled.append((name, request))


class _Draft:
    """One step being planned."""

    def __init__(self, planner: Planner, step_id: int, epoch: int, chunk: int, only: Collection[int] | None) -> None:
        limits = planner.limits
        self.planner = planner
        self.size = limits.block_size
        self.only = only
        self.budget = planner.max_tokens
        self.chunk = chunk
        self.flight = Flight(step_id, [], [], [], Journal(), [], [], [], {})
        self.plan = StepPlan(
            step_id=step_id,
            epoch=epoch,
            slots=[],
            query_lens=[],
            context_lens=[],
            input_ids=[],
            table_slots=[],
            table_indexes=[],
            table_blocks=[],
            sample_seqs=[],
            admissions=[],
        )

    def add_decodes(self) -> None:
        """One token for every decoding request, in order of admission."""
        planner, plan, flight, size = self.planner, self.plan, self.flight, self.size
        pool, only, cached = planner.pool, self.only, planner.limits.enable_prefix_caching
        rows, samples = flight.rows, flight.samples
        slots, context_lens, input_ids = plan.slots, plan.context_lens, plan.input_ids
        decode = RequestState.DECODE
        for request in planner.running.values():
            if request.state is not decode or (only is not None and request.request_id not in only):
                continue
            at = request.num_computed
            num_blocks = len(request.blocks)
            if at == num_blocks * size:
                if not pool.num_available:
                    continue
                self._append_block(request, pool.allocate())
            rows.append((request, 1, num_blocks))
            samples.append(request)
            slots.append(request.slot)
            context_lens.append(at + 1)
            input_ids.append(request.token_ids[at])
            request.num_computed = at + 1
            if cached and (at + 1) % size == 0:
                self._name_blocks(request, at // size)
        plan.query_lens = [1] * len(rows)
        plan.sample_seqs = list(range(len(rows)))
        self.budget -= len(rows)

    def add_prefills(self) -> None:
        """Prompt tokens, first come first served, within the chunk and the budget."""
        planner = self.planner
        left = min(self.chunk, self.budget)
        short = self.chunk // SHORT_SHARE
        prefilling = [r for r in planner.running.values() if r.state is RequestState.PREFILL and _allowed(r, self.only)]
        prefilling.sort(key=_arrival)
        waiting = [r for r in planner.waiting if _allowed(r, self.only)] if self.only else planner.waiting
        candidates = [*prefilling, *(waiting[:SHORT_LOOKAHEAD] if planner.free_slots else ())]
        long_left = left
        if any(r.num_remaining > left for r in candidates) and any(r.num_remaining <= short for r in candidates):
            long_left = max(left - short, 1)  # the long one goes on, whoever else can or cannot use the rest
        reserved = sum(_blocks_for(r, self.size) - len(r.blocks) for r in prefilling)
        for request in prefilling:
            used = self._prefill(request, long_left if request.num_remaining > short else left)
            left -= used
            long_left = min(long_left - used if request.num_remaining > 0 else long_left, left)
            reserved -= len(request.blocks) - self.flight.rows[-1][2] if used else 0
        admitted: list[Request] = []
        for request in waiting:
            if left <= 0 or not planner.free_slots or len(planner.running) >= planner.max_running:
                break
            if self.only is None and request.waits_for in planner.producers:
                continue
            hits, request.waits_for = ([], None) if request.host_blocks else self._find_prefix(request)
            if request.waits_for is not None:
                continue
            revived = sum(planner.pool.is_cached(block) for block in hits)
            needed = _blocks_for(request, self.size) + 1 - len(hits) + revived
            if needed > planner.pool.num_available - reserved and planner.running:
                break  # first come, first served: nobody overtakes by being small
            if request.host_blocks:
                self._fetch(request)
                admitted.append(request)
                reserved += _blocks_for(request, self.size) - len(request.blocks)
                continue
            allowance = long_left if request.num_remaining - len(hits) * self.size > short else left
            if allowance <= 0:
                continue
            self._admit(request, hits)
            admitted.append(request)
            used = self._prefill(request, allowance, num_blocks=0)
            assert used, "what was admitted fits, or has the pool to itself"
            left -= used
            long_left = min(long_left - used if request.num_remaining > 0 else long_left, left)
            reserved += _blocks_for(request, self.size) - len(request.blocks)
        for request in admitted:
            planner.waiting.remove(request)

    def _find_prefix(self, request: Request) -> tuple[list[int], bytes | None]:
        """The blocks that already hold the beginning of `request`, or the name of one that is worth waiting for."""
        planner = self.planner
        if not planner.limits.enable_prefix_caching:
            return [], None
        # At least one token must be computed: its logits are the point.
        names = request.name_blocks((len(request.token_ids) - 1) // self.size, self.size)
        hits: list[int] = []
        for name in names:
            block = planner.pool.find(name)
            if block is None:
                producer = planner.producers.get(name)
                if producer is not None and (self.only is None or producer in self.only):
                    return [], name
                break
            hits.append(block)
        return hits, None

    def _admit(self, request: Request, hits: list[int]) -> None:
        request.handle(ADMIT)
        self._give_slot(request)
        for block in hits:
            self.planner.pool.share(block)
            self._append_block(request, block)
        request.num_computed = len(hits) * self.size
        if request.is_first_output:
            request.num_cached = request.num_computed
        self.planner._produce(request)
        self.plan.admissions.append(request.sampling_spec())

    def _fetch(self, request: Request) -> None:
        """Have this step copy back from the host what `request` had computed."""
        planner, plan = self.planner, self.plan
        request.handle(FETCH)
        self._give_slot(request)
        self.flight.fetched.append(request)
        for host_block in request.host_blocks:
            block = planner.pool.allocate()
            self._append_block(request, block)
            plan.swap_in_hosts.append(host_block)
            plan.swap_in_blocks.append(block)
        request.num_computed = request.num_swapped
        if planner.limits.enable_prefix_caching:
            self._name_blocks(request, 0)
        planner._produce(request)
        plan.admissions.append(request.sampling_spec())

    def _give_slot(self, request: Request) -> None:
        request.slot = self.planner.free_slots.pop()
        self.planner.running[request.request_id] = request
        self.flight.admitted.append(request)

    def add_swaps(self) -> None:
        """Copy out what was preempted since the last step."""
        planner, plan = self.planner, self.plan
        self.flight.swapped, planner.leaving = planner.leaving, {}
        for request, blocks in self.flight.swapped.values():
            plan.swap_out_blocks += blocks
            plan.swap_out_hosts += request.host_blocks
        planner.num_swapped_out += len(plan.swap_out_blocks)
        planner.num_swapped_in += len(plan.swap_in_blocks)

    def _prefill(self, request: Request, allowance: int, num_blocks: int | None = None) -> int:
        """Add up to `allowance` prompt tokens of `request`; returns how many."""
        planner, plan, size = self.planner, self.plan, self.size
        start = request.num_computed
        owned = len(request.blocks)
        total = len(request.token_ids)
        count = min(total - start, allowance, (owned + planner.pool.num_available) * size - start)
        if start + count < total and (start + count) % size and count > size:
            count -= (start + count) % size
        if count <= 0:
            return 0
        end = start + count
        for _ in range(owned, -(-end // size)):
            self._append_block(request, planner.pool.allocate())
        self.flight.rows.append((request, count, owned if num_blocks is None else num_blocks))
        if end == total:
            self.flight.samples.append(request)
            plan.sample_seqs.append(len(plan.slots))
        plan.slots.append(request.slot)
        plan.query_lens.append(count)
        plan.context_lens.append(end)
        plan.input_ids.extend(request.token_ids[start:end])
        request.num_computed = end
        if planner.limits.enable_prefix_caching:
            self._name_blocks(request, start // size)
        return count

    def _name_blocks(self, request: Request, first: int) -> None:
        """Name the blocks of `request` from `first` on that this step fills."""
        num_full = request.num_computed // self.size
        names = request.name_blocks(num_full, self.size)
        for at in range(first, num_full):
            self.planner.pool.name(request.blocks[at], names[at])
            self.planner.fulfil(names[at], self.flight)

    def _append_block(self, request: Request, block: int) -> None:
        plan = self.plan
        plan.table_slots.append(request.slot)
        plan.table_indexes.append(len(request.blocks))
        plan.table_blocks.append(block)
        request.blocks.append(block)


def _arrival(request: Request) -> int:
    return request.request_id


def _allowed(request: Request, only: Collection[int] | None) -> bool:
    return only is None or request.request_id in only


def _runnable(request: Request, only: Collection[int] | None) -> bool:
    return request.state is not RequestState.PAUSED and _allowed(request, only)


def _blocks_for(request: Request, size: int) -> int:
    """Blocks that hold all tokens `request` has so far."""
    return -(-len(request.token_ids) // size)
