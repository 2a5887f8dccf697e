"""What goes first, by docs/fairness.md: tokens, slots and blocks, looked at after every planned step.

    whoever can be admitted is    the oldest that waits, with a slot, blocks and tokens left for it, is in the step
    a prefix is waited for        only while somebody is computing it
    a slot                        is taken from a paused request when somebody waits for it, or for its place while
                                  fewer may run
    blocks                        are taken from a paused request first, then from the one with least to lose; never
                                  from the oldest
    a first token                 comes within the steps that the work before it takes

While requests are tried apart (see `blame`) only that order counts, and none of this is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from novainfer.fsm.messages.events import Configure, MakeBatch, WorkerLost
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.request import Request, RequestState
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.checks.places import Places

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.simulation.world.world import World

HEADROOM = 2  # blocks, and one more for every
RUNNING_PER_BLOCK = 2  # running requests; twice and four times as many for what was preempted once, and more often
ADMISSIONS_MAX = 64  # a step admits no more
ENTRIES_MAX = 1024  # nor with more blocks in all
WAITING_MAX = 90  # with more, a step does not look at all of them
HUNGER_MAX = 2  # times the tokens of a context: all that run have ended by then, prompts computed one beside another
TO_COMPUTE = (RequestState.WAITING, RequestState.PREFILL, RequestState.PREEMPTED, RequestState.RECOVERING)
COMPUTING = (RequestState.PREFILL, RequestState.WAITING_FOR_REMOTE_KVS)


class Claim:
    """A request that waits for its first token, and what is allowed to be computed before it."""

    __slots__ = ("by_age", "by_work", "share", "steps", "work")

    def __init__(self, work: int, by_age: int, by_work: int) -> None:
        self.work = work
        self.by_age = by_age  # its work and that of all older ones
        self.by_work = by_work  # its work and that of all with at most twice as much
        self.share = work  # of each step, for those before it: at least so many tokens
        self.steps = 0


class Heads:
    """The first tokens of all requests that came: one that shares its first block may have less to do, or wait."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_with: Counter[tuple[int, ...]] = Counter()  # requests, by their first block, or all that they have
        self._counted: set[int] = set()

    def add(self, request: Request) -> None:
        """It is to be computed; what it will generate belongs to its first block too, where its prompt is shorter."""
        if request.request_id not in self._counted:
            self._counted.add(request.request_id)
            self._num_with[self._head(request)] += 1

    def is_shared(self, request: Request) -> bool:
        """Whether another one begins with the same block, or may."""
        head = self._head(request)
        if len(head) < self._size:
            return False  # none of its blocks is full
        return self._num_with[head] > 1 or any(head[:n] in self._num_with for n in range(1, self._size))

    def _head(self, request: Request) -> tuple[int, ...]:
        return tuple(request.token_ids[: min(request.num_prompt, self._size)])


class Turns:
    """The account of one world."""

    def __init__(self, world: World, tokens_beside: Callable[[int], int], places: Places) -> None:
        self._world = world
        self._places = places
        self._tokens_beside = tokens_beside  # of prompts, by how many decode
        self._running: set[int] = set()  # before the step was planned
        self._waiting: set[int] = set()
        self._claims: dict[int, Claim] = {}
        self._known: set[int] = set()  # requests that are counted in all claims
        shape = world.shape
        self._heads = Heads(shape.block_size if shape.enable_prefix_caching else 1 << 60)
        self._is_planning = False
        self._num_preempted = 0
        self._hungry, self._hunger = -1, 0  # the oldest request that can run, and steps without it
        self._victims: list[tuple[int, int]] = []  # who was preempted for this step, and with how many blocks
        self._first: Request | None = None  # in turn, of those that waited before the step was planned

    def before(self, event: Any) -> None:
        """The scheduler is about to handle `event`."""
        self._is_planning = isinstance(event, MakeBatch)
        if isinstance(event, MakeBatch):
            planner = self._world.scheduler.planner
            self._running = set(planner.running)
            self._waiting = {request.request_id for request in planner.waiting}
            self._first = min(planner.waiting, key=self._places.key, default=None)

    def after(self, event: Any, *, is_restricted: bool) -> None:
        """The scheduler has handled it."""
        flight = self._world.planned
        if isinstance(event, MakeBatch) and event.vacates:
            return
        if flight is None and isinstance(event, MakeBatch) and (self._world.scheduler.flights or self._world.is_held):
            self._victims.clear()  # nothing is planned behind a step that is in flight: there will be another question
            return
        is_good = isinstance(event, MakeBatch) and (event.outcome is None or isinstance(event.outcome, StepDone))
        if isinstance(event, MakeBatch) and flight is not None and not is_restricted:
            self._check_idle_hands(flight)
            self._check_slots(flight)
            self._check_share(flight)
            self._check_headroom(flight)
            self._check_guesses(flight)
            self._check_need(flight)
        if isinstance(event, MakeBatch) and flight is not None and is_restricted and flight.drafts:
            raise Violation(f"step {flight.step_id} tries requests apart, and verifies guesses")
        self._check_hunger(flight if is_good and not is_restricted else None, is_step=isinstance(event, MakeBatch))
        self._victims.clear()
        if not self._world.is_large:
            self._count(event, flight if is_good and not is_restricted else None)

    # ---- tokens and slots ----------------------------------------------------------------------------------------

    def _check_idle_hands(self, flight: Flight) -> None:
        """The oldest request that waits could not have been in this step."""
        scheduler, size = self._world.scheduler, self._world.shape.block_size
        planner = scheduler.planner
        num_running = len(planner.running)
        if not planner.free_slots or num_running >= planner.max_running:
            return
        num_admitted = len(flight.admitted)
        if num_admitted >= ADMISSIONS_MAX or num_admitted + len(planner.waiting) > WAITING_MAX:
            return
        if sum(len(request.kv.blocks) for request in flight.admitted) >= ENTRIES_MAX:
            return
        num_decodes = sum(is_decode(request, start) for request, _, start in flight.rows)
        num_prompt = sum(count for request, count, start in flight.rows if not is_decode(request, start))
        tokens = min(scheduler.recovery.chunk, scheduler.recovery.limits.max_num_batched_tokens - num_decodes)
        if min(tokens, self._tokens_beside(num_decodes)) - num_prompt <= 2 * size:
            return
        computing = [request for request in planner.running.values() if request.state in COMPUTING]
        room = self._world.cache.pool.num_available - self._promised()
        headroom = HEADROOM + num_running // RUNNING_PER_BLOCK + 1
        places = self._places.of_all(flight)
        for request in sorted(planner.waiting, key=lambda r: places[r.request_id]):
            if request.mask < 0:
                continue
            first = min(computing, key=self._places.key, default=None)
            oldest = -1 if first is None else first.request_id
            if request.waits_for is not None and any(_is_worth_it(other, request, size, oldest) for other in computing):
                continue
            if _blocks(request, size) + 1 + headroom * 2 ** min(request.num_preemptions, 2) <= room:
                raise Violation(
                    f"request {request.request_id} could be admitted, and step {flight.step_id} leaves it out"
                )
            return

    def _check_headroom(self, flight: Flight) -> None:
        """Who was admitted last has left its headroom free, and a block to go on; decodes had theirs before it."""
        if not flight.admitted:
            return
        planner = self._world.scheduler.planner
        last = flight.admitted[-1]
        num_before = len(planner.running) - 1
        had_running = len(planner.running) > len(flight.admitted)
        if not had_running and last is min(flight.admitted, key=self._places.key):
            return  # the oldest one needs none, when none runs
        headroom = (HEADROOM + num_before // RUNNING_PER_BLOCK) * 2 ** min(last.num_preemptions, 2)
        left = self._world.cache.pool.num_available - self._promised() + self._guessed(flight)
        if left < headroom + 1:
            raise Violation(f"request {last.request_id} was admitted, and {left} blocks are left of {headroom + 1}")

    def _check_guesses(self, flight: Flight) -> None:
        """Guesses have blocks that neither prompts were promised nor the next step may need."""
        if self._guessed(flight):
            left = self._world.cache.pool.num_available
            needed = self._promised() + len(self._world.scheduler.planner.running)
            if left < needed:
                raise Violation(f"step {flight.step_id} gives guesses blocks, and leaves {left} of {needed} to others")

    def _check_hunger(self, flight: Flight | None, *, is_step: bool) -> None:
        """The oldest request that can run is in a step as soon as those that run could have ended, one by one."""
        if not is_step or not self._places.is_by_age:
            return
        scheduler = self._world.scheduler
        able = [i for i, r in scheduler.requests.items() if r.state is not RequestState.PAUSED and r.mask >= 0]
        oldest = min(able, default=-1)
        served = {r.request_id for r in (*(row[0] for row in flight.rows), *flight.fetched)} if flight else {oldest}
        self._hunger = 0 if oldest in served or oldest != self._hungry else self._hunger + 1
        self._hungry = oldest
        if self._hunger > HUNGER_MAX * self._world.shape.context_len:
            raise Violation(f"request {oldest} is the oldest, and was in none of {self._hunger} steps")

    def _guessed(self, flight: Flight) -> int:
        """Blocks that hold nothing but guesses: they come back with the step."""
        size = self._world.shape.block_size
        rows = [(start, count) for request, count, start in flight.rows if request.request_id in flight.drafts]
        return sum(-(-(start + count) // size) - start // size - 1 for start, count in rows)

    def _promised(self) -> int:
        """Blocks that those in prefill will still need."""
        requests, size = self._world.scheduler.planner.running.values(), self._world.shape.block_size
        return sum(
            max(_blocks(request, size) - len(request.kv.blocks), 0)
            for request in requests
            if request.state in COMPUTING
        )

    def _check_slots(self, flight: Flight) -> None:
        """When somebody waited for a slot, and none came free, a paused request has given up its own."""
        planner = self._world.scheduler.planner
        has_place = planner.free_slots and len(planner.running) < planner.max_running
        if not self._waiting or has_place or not self._running <= planner.running.keys():
            return
        if not self._waiting <= {request.request_id for request in planner.waiting}:
            return
        if any(request.request_id in self._running for request in flight.admitted):
            return  # the step before was taken back with what it admitted, so that a slot was free
        for request in planner.running.values():
            if request.state is RequestState.PAUSED:
                raise Violation(f"request {request.request_id} is paused, and keeps the place that others wait for")

    def _check_share(self, flight: Flight) -> None:
        """What is first in turn, of a tenant of which nothing runs, waits for no slot that another has beyond one."""
        planner, first, places = self._world.scheduler.planner, self._first, self._places
        has_place = planner.free_slots and len(planner.running) < planner.max_running
        if first is None or has_place or len(self._world.scheduler.flights) > 1 or places.is_by_age:
            return
        if flight.admitted:  # the last place went to one with less to compute, or that waited for no prefix
            return
        running = Counter(r.tenant.id for r in planner.running.values())
        if first not in planner.waiting or first.tenant.id in running or first.mask < 0:
            return
        if first is not min(planner.waiting, key=places.key) or not self.has_blocks_for_all([first]):
            return
        for request in planner.running.values():
            is_beyond = running[request.tenant.id] > 1
            if is_beyond and places.rank(request) >= places.rank(first):
                raise Violation(f"request {first.request_id} is all of its tenant, and waits for {request.request_id}")
        self._world.counts["shares of slots checked"] += 1

    # ---- blocks --------------------------------------------------------------------------------------------------

    def preempted(self, victim: Request, *, is_restricted: bool) -> None:
        """`victim` is about to lose its blocks."""
        self._num_preempted += 1
        if victim.state is RequestState.PAUSED and not is_restricted:
            self._check_paused_victim(victim)
        if victim.state is RequestState.PAUSED:
            return
        planner = self._world.scheduler.planner
        everybody = [*planner.running.values(), *planner.waiting]
        has_slots = planner.free_slots and planner.max_running >= self._world.shape.max_num_seqs
        is_needless = has_slots and not self._world.is_large and self.has_blocks_for_all(everybody)
        if is_needless and not self._is_for_share(victim):
            raise Violation(f"request {victim.request_id} is preempted, and there are blocks and slots for all")
        if is_restricted:
            return
        self._victims.append((victim.request_id, -(-victim.num_computed // self._world.shape.block_size)))
        running = [r for r in planner.running.values() if r is victim or r.kv.blocks]
        if paused := [r.request_id for r in running if r.state is RequestState.PAUSED]:
            raise Violation(f"request {victim.request_id} is preempted, and {paused} are paused and keep their blocks")
        able = [r for r in (*planner.running.values(), *planner.waiting) if r.state is not RequestState.PAUSED]
        if victim is min(able, key=self._places.key) and not self._is_for_share(victim):
            raise Violation(f"request {victim.request_id} is the first in turn, and is preempted")
        oldest = min(planner.running.values(), key=self._places.key)
        others = [r for r in running if r is not oldest or r is victim]
        first = min(others, key=self._has_to_go)
        if first is not victim and not self._is_for_share(victim):
            raise Violation(
                f"request {victim.request_id} is preempted with {victim.num_computed} tokens computed, "
                f"and request {first.request_id} has {first.num_computed}"
            )

    def _has_to_go(self, request: Request) -> tuple[int, float, int, int]:
        """What has to go first, if one of two has to: by whose turn is later, and by what it loses."""
        rank, given, age = self._places.key(request)
        return -rank, -given, request.num_computed, -age

    def _is_for_share(self, victim: Request) -> bool:
        """Whether it goes for a tenant of which nothing runs; its own has something more that does."""
        planner = self._world.scheduler.planner
        running = Counter(r.tenant.id for r in planner.running.values())
        return running[victim.tenant.id] > 1 and any(r.tenant.id not in running for r in planner.waiting)

    def _check_paused_victim(self, victim: Request) -> None:
        """It was admitted first (for a slot), has least to lose (for blocks), or has kept what it has for too long."""
        planner = self._world.scheduler.planner
        paused = [r for r in planner.running.values() if r.state is RequestState.PAUSED]
        least = min(paused, key=self._has_to_go)
        if self._is_planning and victim not in (paused[0], least) and victim.request_id not in planner.overstayed:
            raise Violation(f"paused request {victim.request_id} is parked, and {paused[0].request_id} came first")

    def _check_need(self, flight: Flight) -> None:
        """Nobody loses blocks that nobody needs."""
        planner, shape = self._world.scheduler.planner, self._world.shape
        if not self._victims or planner.max_running < shape.max_num_seqs or not self._places.is_by_age:
            return
        for request_id, num_blocks in self._victims[-1:]:  # the others were not enough
            if self._world.cache.pool.num_available > num_blocks + self._promised() + len(planner.running) + 1:
                raise Violation(
                    f"request {request_id} was preempted for step {flight.step_id}, which did not need that"
                )

    # ---- the first token -----------------------------------------------------------------------------------------

    def _count(self, event: Any, flight: Flight | None) -> None:
        """One more step, or something that the bound does not speak of."""
        scheduler, shape = self._world.scheduler, self._world.shape
        planner, is_step = scheduler.planner, isinstance(event, MakeBatch)
        is_broken = isinstance(event, WorkerLost | Configure) or (is_step and flight is None)
        is_broken = is_broken or not self._places.is_by_age  # the bound is that of one tenant
        # Those whose grammar is not there yet come in later, and go before younger ones.
        is_broken = is_broken or any(r.state in TO_COMPUTE and r.mask < 0 for r in scheduler.requests.values())
        is_short = scheduler.recovery.chunk < shape.prefill_chunk_tokens or planner.max_running < shape.max_num_seqs
        if self._num_preempted or is_broken or is_short:
            self._num_preempted = 0
            self._claims.clear()
            self._known.clear()
            return
        if not is_step:
            return
        assert flight is not None
        held = {request.request_id for request, _, _ in flight.rows}  # the others' prompts may be in the step before
        queue = [
            r
            for request_id, r in scheduler.requests.items()
            if r.state in TO_COMPUTE and (r.num_remaining > 0 or request_id in held)
        ]
        for claim in self._claims.values():
            claim.steps += 1
        new = [r for r in queue if r.request_id not in self._known]
        for request in new:
            self._heads.add(request)
        planned = {request.request_id: count for request, count, _ in flight.rows}
        works = {r.request_id: self._work(r, planned.get(r.request_id, 0)) for r in queue}
        for request in new:
            self._known.add(request.request_id)
            most, least = works[request.request_id]
            for other_id, claim in self._claims.items():
                claim.by_age += most if request.request_id < other_id else 0
                claim.by_work += most if least <= 2 * claim.work else 0
        has_room = bool(planner.free_slots) and len(planner.running) < planner.max_running
        has_room = has_room and self.has_blocks_for_all(queue)
        admitted = {request.request_id for request in flight.admitted}
        for request in queue:
            request_id = request.request_id
            if not has_room and request.slot < 0:  # it has no claim before it is admitted
                self._claims.pop(request_id, None)
                continue
            if request.slot >= 0 and request_id not in admitted:  # its turn is by the work that it came with
                continue
            is_new = request in new or request_id in admitted
            if not is_new or request_id in self._claims or not request.awaits_first:
                continue
            work = works[request_id][0]
            by_age = sum(most for i, (most, _) in works.items() if i <= request_id)
            by_work = sum(most for most, least in works.values() if least <= 2 * work)
            self._claims[request_id] = Claim(work, by_age, by_work)
        samples = {request.request_id for request in flight.samples}
        num_decodes = sum(is_decode(request, start) for request, _, start in flight.rows)
        tokens = min(self._tokens_beside(num_decodes), shape.max_num_batched_tokens - num_decodes)
        share = max(tokens // 2 - shape.block_size, 1)
        live = {request.request_id: request for request in queue}
        for request_id, claim in list(self._claims.items()):
            claim.share = min(claim.share, share)
            waits = request_id in live and request_id not in samples
            if not waits or self._heads.is_shared(live[request_id]):  # it may wait for a prefix
                del self._claims[request_id]
            elif claim.steps > -(-(min(claim.by_age, claim.by_work) + claim.work) // claim.share) + 2:
                raise Violation(f"request {request_id} waits for its first token for {claim.steps} steps")
            else:
                self._world.counts["claims checked"] += 1

    def _work(self, request: Request, planned: int) -> tuple[int, int]:
        """What `request` has to compute, `planned` tokens of the step included: at most, and at least."""
        most = request.num_remaining + planned
        is_sure = request.slot >= 0 or not (request.kv.host_blocks or self._heads.is_shared(request))
        return most, most if is_sure else 0

    def has_blocks_for_all(self, queue: list[Request]) -> bool:
        """Whether all of `queue` could be admitted now, each with its headroom."""
        planner, size = self._world.scheduler.planner, self._world.shape.block_size
        needed = sum(_blocks(request, size) + 1 - len(request.kv.blocks) for request in queue)
        headroom = HEADROOM + (len(planner.running) + len(queue)) // RUNNING_PER_BLOCK + 1
        return needed + 4 * headroom <= self._world.cache.pool.num_available


def is_decode(request: Request, start: int) -> bool:
    """Whether a row that was just planned decodes: it has had its prompt, or has it with the step before."""
    return request.state is RequestState.DECODE or start >= len(request.token_ids)


def _blocks(request: Request, size: int) -> int:
    return -(-len(request.token_ids) // size)


def _is_worth_it(other: Request, request: Request, size: int, oldest: int) -> bool:
    """Whether `other` has still to compute a block that `request` could share, and is not much later with that."""
    shared = 0
    for mine, its in zip(request.token_ids[:-1], other.token_ids, strict=False):
        if mine != its:
            break
        shared += 1
    is_soon = other.request_id == oldest or other.num_remaining <= 2 * len(request.token_ids)
    return is_soon and other.num_planned < shared // size * size
