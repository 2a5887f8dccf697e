"""One step being planned: who runs in it, and how many tokens of each; continuous batching under one token budget.

Every request that decodes takes one token. What is left of the budget, but no more than the chunk, goes to prompts,
first come first served. A prompt longer than what is left is cut at a block boundary and goes on in the next step;
while a short one stands behind it, a quarter of the chunk is kept for short ones, so that one long prompt starves
nobody. A waiting request is admitted when its whole prompt, and one block to go on, fit beside what the prompts before
it still need; it waits for nobody's blocks half-way.

A prefix that another request is computing is not computed twice: planned in the same step or cached, its blocks are
shared; if its turn comes in a later step, the newcomer waits for it by name, and becomes the producer itself when
the first one ends.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from novainfer.fsm.blocks import Journal
from novainfer.fsm.events import StepPlan
from novainfer.fsm.request import ADMIT, FETCH, Request, RequestState

if TYPE_CHECKING:
    from novainfer.fsm.planner import Planner

SHORT_SHARE = 4  # 1/4 of the chunk is kept for short prompts while a long one is ahead of them
SHORT_LOOKAHEAD = 32  # waiting requests looked at to see whether a short one is there: bounds the scan of a long queue


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


class Draft:
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
        prefilling = [r for r in planner.running.values() if r.state is RequestState.PREFILL and allowed(r, self.only)]
        prefilling.sort(key=arrival)
        waiting = [r for r in planner.waiting if allowed(r, self.only)] if self.only else planner.waiting
        candidates = [*prefilling, *(waiting[:SHORT_LOOKAHEAD] if planner.free_slots else ())]
        long_left = left
        if any(r.num_remaining > left for r in candidates) and any(r.num_remaining <= short for r in candidates):
            long_left = max(left - short, 1)  # the long one goes on, whoever else can or cannot use the rest
        reserved = sum(blocks_for(r, self.size) - len(r.blocks) for r in prefilling)
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
            needed = blocks_for(request, self.size) + 1 - len(hits) + revived
            if needed > planner.pool.num_available - reserved and planner.running:
                break  # first come, first served: nobody overtakes by being small
            if request.host_blocks:
                self._fetch(request)
                admitted.append(request)
                reserved += blocks_for(request, self.size) - len(request.blocks)
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
            reserved += blocks_for(request, self.size) - len(request.blocks)
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
        self.planner.produce(request)
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
        planner.produce(request)
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


def arrival(request: Request) -> int:
    """The key that requests are sorted by: first come, first served."""
    return request.request_id


def allowed(request: Request, only: Collection[int] | None) -> bool:
    """Whether the step may hold `request`; `only` are the ids of a bisection."""
    return only is None or request.request_id in only


def runnable(request: Request, only: Collection[int] | None) -> bool:
    """Whether `request` could use the step, if there is room for it."""
    return request.state is not RequestState.PAUSED and allowed(request, only)


def blocks_for(request: Request, size: int) -> int:
    """Blocks that hold all tokens `request` has so far."""
    return -(-len(request.token_ids) // size)
