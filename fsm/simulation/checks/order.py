"""How a step's prompt tokens are shared out, by rules 2, 3, 5 and 6 of docs/fairness.md and by what is in the cache.

Looked at is each request that has still to compute a part of its prompt after a step, and could have computed more of
it. Tokens that others got before their turn, and tokens that nothing got, are no more than the rules allow (where
`places` tells requests apart by more than their age, who is younger is who comes later there):

    to requests that are younger and have more work    none, but what is cut off at blocks' ends
    to those with more work, of any age                half of the tokens, and what is cut off
    to younger ones                                    the other half, and what is cut off

A request may be passed over where it waits for a prefix: where another one that is the oldest in prefill, or has at
most twice its work, computes what comes next in it. There it has to wait. Where the cache holds what it begins with, it
has to use that. With more than 96 that wait, all this is demanded after so many steps that each was looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from novainfer.fsm.schedule.request import Request, RequestState
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.checks.places import Places
from novainfer.fsm.simulation.checks.prefixes import COMPUTING, Prefixes
from novainfer.fsm.simulation.checks.turns import is_decode

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.simulation.world.world import World

QUEUED = (RequestState.WAITING, RequestState.PREEMPTED)
JUDGED_EXACTLY = 96  # waiting requests; with more, each is looked at within `waiting / 32` steps,
LOOKS = 32  # and with the least work by its last look in every step
ADMISSIONS_MAX, ENTRIES_MAX = 64, 1024  # of one step; after that it admits no more
NAMES_MAX = 8192 // 9  # blocks of waiting requests that a step can look up, and name, for certain


class Work(msgspec.Struct):
    """What a request has to compute before its next token: by what the cache held before the step, and after it."""

    most: int
    least: int


class Wait(msgspec.Struct):
    """A waiting request: its work, since which step it has been so much, and the least it ever was."""

    work: int
    since: int
    least: int


class Order:
    """The account of one world."""

    def __init__(
        self,
        world: World,
        has_room: Callable[[list[Request]], bool],
        tokens_beside: Callable[[int], int],
        places: Places,
    ) -> None:
        self._world = world
        self._has_room = has_room  # whether blocks are free for all of these
        self._tokens_beside = tokens_beside  # of prompts, by how many decode
        self._places = places
        self._prefixes = Prefixes(world)
        self._works: dict[int, Work] = {}  # of requests in prefill, as they were admitted
        self._waits: dict[int, Wait] = {}
        self._num_steps = 0  # in which each waiting request could be looked at
        self._num_waiting = 0  # the most in those

    def before(self, event: Any) -> None:
        """The scheduler is about to handle `event`."""
        if not self._world.is_large and self._world.shape.enable_prefix_caching:
            self._prefixes.before(event)

    def after(self, event: Any, *, is_restricted: bool) -> None:
        """The scheduler has handled it."""
        world, prefixes = self._world, self._prefixes
        if world.is_large:
            return
        flight = world.planned
        has_cache = world.shape.enable_prefix_caching
        if has_cache:
            prefixes.returned(event)
        if flight is None:
            return
        admitted = {request.request_id for request in flight.admitted}
        waited = [r for r in (*world.scheduler.planner.waiting, *flight.admitted) if not r.kv.host_blocks]
        held = {r.request_id: self._num_held(r) for r in waited}
        starts = {r.request_id: start for r, _, start in flight.rows}
        if has_cache:
            prefixes.planned(flight)
        if flight.is_vacating:
            return
        works = self._judge(flight, waited, held)
        if not flight.canary and not is_restricted and not prefixes.is_doubtful:
            if has_cache:
                self._check_admitted(flight, held, starts)
            if self._is_calm(flight, waited, held):
                self._check_shares(flight, admitted, works, held, starts)
        else:
            self._waits.clear()

    # ---- who has how much to do ----------------------------------------------------------------------------------

    def _judge(self, flight: Flight, waited: list[Request], held: dict[int, int]) -> dict[int, Work]:
        """The work of all that waited before the step, or are in prefill."""
        size = self._world.shape.block_size
        works: dict[int, Work] = {}
        for request in waited:
            num_held = max(self._num_held(request), held[request.request_id])
            num_tokens = len(request.token_ids)
            most = num_tokens - held[request.request_id] * size
            works[request.request_id] = Work(most, num_tokens - num_held * size)
        for request, _, start in flight.rows:
            if request in flight.admitted:
                work, num_left = works[request.request_id], len(request.token_ids) - start
                work.most = max(work.most, num_left)  # the step may have taken what the cache held before it
                if start % size:  # a prompt that others have as well may be shared beyond its full blocks
                    work.least = min(work.least, num_left)
        for request in flight.fetched:
            works[request.request_id] = Work(request.num_remaining, request.num_remaining)
        for request in flight.admitted:
            self._works[request.request_id] = works[request.request_id]
        for request_id, request in self._world.scheduler.planner.running.items():
            if request.state in COMPUTING:
                works[request_id] = self._works[request_id]
        return works

    def _num_held(self, request: Request) -> int:
        """How many blocks it can take from the cache."""
        return self._prefixes.num_held(request) if self._takes_prefixes(request) else 0

    def _takes_prefixes(self, request: Request) -> bool:
        """Whether it may leave out what is cached: the mean of a prompt wants each of its tokens."""
        pooling = request.params.pooling
        return self._world.shape.enable_prefix_caching and (pooling is None or pooling.kind != "mean")

    def _is_calm(self, flight: Flight, waited: list[Request], held: dict[int, int]) -> bool:
        """Whether slots, blocks and looks are there for all; if not, what was seen so far counts no more."""
        scheduler = self._world.scheduler
        planner = scheduler.planner
        queue = [r for r in scheduler.requests.values() if r.state in QUEUED or r.state in COMPUTING]
        has_slots = min(len(planner.free_slots), planner.max_running - len(planner.running)) >= 2
        names = sorted((held[r.request_id] + 1 for r in waited), reverse=True)
        num_names = sum(names if len(waited) <= JUDGED_EXACTLY else names[: 2 * LOOKS])
        num_entries = sum(len(request.kv.blocks) for request in flight.admitted)
        is_calm = has_slots and num_names <= NAMES_MAX and len(flight.admitted) < ADMISSIONS_MAX
        is_calm = is_calm and num_entries < ENTRIES_MAX // 2 and self._has_room(queue)
        if not is_calm:
            self._waits.clear()
        return is_calm

    def _note_waits(self, waiting: list[Request], works: dict[int, Work], num: int) -> Callable[[Request], bool]:
        """One more step that looks at `num` requests; returns whether one was judged by what it has to do now."""
        self._num_steps += 1
        self._num_waiting = max(self._num_waiting, num) if self._waits else num
        before, self._waits = self._waits, {}
        for request in waiting:
            work = works[request.request_id].most
            known = before.get(request.request_id) or Wait(work, self._num_steps, work)
            since = known.since if known.work == work else self._num_steps
            self._waits[request.request_id] = Wait(work, since, min(known.least, work))
        if num <= JUDGED_EXACTLY:
            return lambda _: True
        num_steps = -(-self._num_waiting // LOOKS)
        last = sorted((wait.least, request_id) for request_id, wait in self._waits.items())[:LOOKS][-1]

        def was_judged(request: Request) -> bool:
            wait = self._waits[request.request_id]
            self._world.counts["looks awaited"] += 1
            return self._num_steps - wait.since >= num_steps - 1 and (wait.work, request.request_id) <= last

        return was_judged

    # ---- who gets what -------------------------------------------------------------------------------------------

    def _check_shares(
        self,
        flight: Flight,
        admitted: set[int],
        works: dict[int, Work],
        held: dict[int, int],
        starts: dict[int, int],
    ) -> None:
        scheduler, size = self._world.scheduler, self._world.shape.block_size
        waiting = [r for r in scheduler.planner.waiting if r.request_id in held]
        was_judged = self._note_waits(waiting, works, len(scheduler.planner.waiting) + len(admitted))
        num_decodes = sum(is_decode(request, start) for request, _, start in flight.rows)
        rows = [
            (r, count, works[r.request_id].least)
            for r, count, start in flight.rows
            if r.request_id in works and not is_decode(r, start)
        ]
        limits = scheduler.recovery.limits
        tokens = min(scheduler.recovery.chunk, limits.max_num_batched_tokens - num_decodes)
        tokens = min(tokens, self._tokens_beside(num_decodes))
        unused = tokens - sum(count for _, count, _ in rows)
        # What this step has planned may be shared within it: a request that was looked at before has asked for more.
        spared = sum(works[i].most - works[i].least for i in admitted)
        by_age = -(-tokens // 2)
        running = [r for r in scheduler.planner.running.values() if r.state is RequestState.PREFILL]
        places, by_work = self._places.of_all(flight), self._by_work
        for request in (*running, *waiting):
            request_id = request.request_id
            work = works[request_id]
            if request.num_remaining <= 0 or tokens <= 0 or (request_id in held and work.most > work.least):
                continue
            if request.mask < 0:
                continue
            if request.slot < 0 and (not was_judged(request) or self._may_wait(request, works, held, starts)):
                continue
            if request_id in admitted and self._has_lost_prefix(request, starts):
                continue  # it had less to compute when its part was measured
            turn, place = by_work(request, work.most), places[request_id]
            later = [
                (places[other.request_id] > place, count, by_work(other, least) > turn)
                for other, count, least in rows
                if other is not request
            ]
            behind = unused + sum(count for is_later, count, is_more in later if is_more and is_later)
            more = unused + sum(count for _, count, is_more in later if is_more)
            younger = unused + sum(count for is_later, count, _ in later if is_later)
            cut = size - 1 + spared
            is_right = behind <= 2 * cut and more <= by_age + cut and younger <= tokens - by_age + cut
            if not is_right and request_id in starts:
                # It has had its part when an older one came to wait for what it computes: that one's half is left over.
                waits = any(self._may_wait(r, works, held, starts) for r in waiting if places[r.request_id] < place)
                is_right = waits and unused + behind <= 2 * (by_age + cut)
            if not is_right:
                raise Violation(
                    f"request {request_id} has {request.num_remaining} tokens to compute, and of the {tokens} of step "
                    f"{flight.step_id} {behind} went to younger ones with more work, {more} to others with more work, "
                    f"{younger} to younger ones, {unused} of each to none"
                )
            self._world.counts["shares checked"] += 1

    def _by_work(self, request: Request, work: int) -> tuple[int, float, int, int]:
        """What comes first in the half of a step that goes by work, if one of two is to be first."""
        return self._places.rank(request), self._places.given(request), work, request.request_id

    def _first(self, requests: Iterable[Request]) -> int:
        """The one whose turn is first."""
        first = min(requests, key=self._places.key, default=None)
        return -1 if first is None else first.request_id

    def _has_lost_prefix(self, request: Request, starts: dict[int, int]) -> bool:
        """Whether what it goes on with was in the cache, and the step has taken that for something else."""
        if not self._world.shape.enable_prefix_caching:
            return False
        at, mine = starts[request.request_id] // self._world.shape.block_size, self._prefixes.of(request)
        return at < len(mine) and self._prefixes.is_evicted(mine[at])

    def _may_wait(self, request: Request, works: dict[int, Work], held: dict[int, int], starts: dict[int, int]) -> bool:
        """Whether another one computes what comes next in it, and will not be much later with that."""
        if not self._takes_prefixes(request):
            return False
        prefixes, size = self._prefixes, self._world.shape.block_size
        mine, work = prefixes.of(request), works[request.request_id].most
        first = held[request.request_id]
        last = max(first, prefixes.num_held(request))  # the step may have taken what it would have gone on from
        running = [r for r in self._world.scheduler.planner.running.values() if r.state in COMPUTING]
        oldest = {self._first(r for r in running if r.request_id in some) for some in (starts, works)}
        for other in running:
            its, start = prefixes.of(other), starts.get(other.request_id, other.num_planned)
            is_soon = other.request_id in oldest or works[other.request_id].least <= 2 * work
            if is_soon and not prefixes.is_mixed(other):
                for at in range(max(first, start // size), min(last + 1, len(mine), len(its))):
                    if mine[at] == its[at]:
                        return True
        return False

    # ---- what is in the cache ------------------------------------------------------------------------------------

    def _check_admitted(self, flight: Flight, held: dict[int, int], starts: dict[int, int]) -> None:
        """Each has what the cache holds of it, and does not compute what another one is at and will have soon."""
        prefixes, size = self._prefixes, self._world.shape.block_size
        running = [r for r in self._world.scheduler.planner.running.values() if r.state in COMPUTING]
        waiting = self._world.scheduler.planner.waiting  # the first half goes to one of these, if it is the oldest
        oldest = self._first((*running, *waiting))
        for request in flight.admitted:
            if request in flight.fetched:
                continue
            if not self._takes_prefixes(request):
                if starts[request.request_id]:
                    raise Violation(f"request {request.request_id} wants each of its tokens, and leaves some out")
                continue
            at, mine = starts[request.request_id] // size, prefixes.of(request)
            if at < held[request.request_id] and not prefixes.is_evicted(mine[at]):
                raise Violation(
                    f"request {request.request_id} computes its block {at}, and the cache holds "
                    f"{held[request.request_id]} of its blocks"
                )
            other = prefixes.promiser(mine[at]) if at < len(mine) else None
            if other is None or other is request or other in flight.admitted:
                continue
            is_soon = other.request_id == oldest
            is_soon = is_soon or self._works[other.request_id].most <= 2 * (len(request.token_ids) - at * size)
            if is_soon and starts.get(other.request_id, other.num_planned) <= at * size:
                raise Violation(
                    f"request {request.request_id} computes its block {at} itself, and request "
                    f"{other.request_id} is about to"
                )
