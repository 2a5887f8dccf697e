"""Conversations that are kept: within their bounds, for as long as was asked for, and at nobody's cost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from novainfer.fsm.messages.events import Configure, EndSession, MakeBatch, SessionOver, StepFailed, WorkerLost
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.session import SessionState
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.checks.verified import without_number

if TYPE_CHECKING:
    from novainfer.fsm.kv.blocks import Journal
    from novainfer.fsm.schedule.request import Request
    from novainfer.fsm.simulation.world.world import World


class Sessions:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._before: set[int] = set()  # the numbers of conversations before the event
        self._copied: list[bytes] = []  # what the step has copied to the host that has just ended well
        self._on_host: set[bytes] = set()  # before the event
        self._num_preemptions = 0
        self._mode = world.shape.modes[0]
        self._is_looked_at = True  # what happens now, from before to after

    # ---- what happens --------------------------------------------------------------------------------------------

    def before(self, event: Any) -> None:
        """The scheduler is about to handle `event`."""
        world, scheduler = self._world, self._world.scheduler
        self._is_looked_at = world.looks_closely
        if not self._is_looked_at:
            return
        self._before = {session.number for session in scheduler.sessions.values()}
        made_room = {one.made_room for flight in scheduler.flights for one in flight.journal.saved}
        self._on_host = {*world.cache.host._kept, *made_room}
        self._num_preemptions = scheduler.planner.num_preemptions
        flight, outcome = scheduler.oldest_flight, event.outcome if isinstance(event, MakeBatch) else None
        self._copied = []
        if flight is not None and isinstance(outcome, StepDone) and not without_number(world, flight, outcome):
            self._copied = [one.name for one in flight.journal.saved]

    def after(self, event: Any) -> None:
        """The scheduler has handled `event`."""
        world = self._world
        if not self._is_looked_at:
            return
        self._check_room()
        self._check_keeps()
        self._check_bounds(event)
        self._check_copies(event)
        if isinstance(event, WorkerLost):
            self._check_lost()
        elif isinstance(event, Configure) and event.epoch and not event.keeps_host and world.cache.host._kept:
            raise Violation(f"the host came up anew, and is thought to keep {len(world.cache.host._kept)} blocks")
        if world.planned is not None:
            self._check_evicted(world.planned.journal)
            self._check_found()

    def still(self) -> None:
        """All messages have arrived: whatever is kept without a request will be over some day."""
        if not self._world.looks_closely:
            return
        timers = {event.number for event in self._world.timers.values() if isinstance(event, SessionOver)}
        kept = set(self._world.scheduler.kept)
        if timers != kept:
            raise Violation(f"conversations {sorted(kept)} are kept, and those end some day: {sorted(timers)}")

    def end(self) -> None:
        """Everybody has left, and no timer runs."""
        scheduler = self._world.scheduler
        if scheduler.sessions and not self._world.is_stopped:
            raise Violation(f"everybody has left, and conversations {sorted(scheduler.sessions)} are kept for ever")

    # ---- at nobody's cost ----------------------------------------------------------------------------------------

    def _check_room(self) -> None:
        """What nobody owns can be had, whoever keeps it; so nothing that is decided by room depends on what is kept."""
        cache = self._world.cache
        pool, host = cache.pool, cache.host
        unowned = pool._refs.count(0)
        if cache.room != unowned:
            raise Violation(f"{unowned} blocks are nobody's, and there is said to be room for {cache.room}")
        owned = sum(len(request.kv.host_blocks) for request in self._requests())
        busy = len(cache._saving) + len(host._readers)
        if host.num_available != host.num_blocks - owned - busy:
            raise Violation(
                f"{owned} blocks on the host are somebody's, {busy} are in use, and {host.num_available} free"
            )

    def _requests(self) -> list[Request]:
        scheduler = self._world.scheduler
        departed = [request for flight in scheduler.flights for request in flight.departed]
        return [*scheduler.requests.values(), *departed]

    def _check_evicted(self, journal: Journal) -> None:
        """What is kept goes last, beyond its share first; and to the host, if that has room for it."""
        cache = self._world.cache
        pool, host = cache.pool, cache.host
        evicted = [name for did, _, name in journal.entries if did.name == "EVICTED"]
        kept = [name for name in evicted if name in pool.keeps]
        num_revived = sum(did.name == "REVIVED" for did, _, _ in journal.entries)
        if evicted and pool._free:
            raise Violation(f"{len(evicted)} blocks were evicted, and {len(pool._free)} are free")
        if kept and pool._cached and len(pool._kept) + 1 + num_revived <= pool.num_kept_max:
            raise Violation(f"blocks of conversations were evicted, and {len(pool._cached)} of nobody's are cached")
        if len(evicted) > len(kept) and len(pool._kept) > pool.num_kept_max:
            raise Violation(f"{len(pool._kept)} blocks are kept, which is too many, and others were evicted")
        saved = [one.name for one in journal.saved]
        if len(saved) != len(set(saved)):
            raise Violation("something is copied to the host twice")
        for name in kept:
            if name not in saved and host.find(name) is None and host.num_available:
                raise Violation(f"a block of a conversation is dropped, and the host has {host.num_available} to spare")
        if any(one.made_room for one in journal.saved) and host._free:
            raise Violation("a copy on the host made room, and others are free")

    def _check_copies(self, event: Any) -> None:
        """What a step has copied to the host is there, and what one was to copy that has failed is not."""
        world = self._world
        cache, planner = world.cache, world.scheduler.planner
        has_failed = isinstance(event, WorkerLost) or isinstance(getattr(event, "outcome", None), StepFailed)
        if has_failed and not set(cache.host._kept) <= self._on_host:
            raise Violation("a step has failed, and what it was to copy to the host is thought to be there")
        made_room = {one.made_room for one in world.planned.journal.saved} if world.planned is not None else set()
        if planner.num_preemptions > self._num_preemptions or planner.mode != self._mode:
            self._mode = planner.mode
            return
        for name in self._copied:
            if name in cache.pool.keeps and name not in made_room and cache.host.find(name) is None:
                raise Violation("what a step has copied to the host is not found there")

    def _check_found(self) -> None:
        """Who is admitted computes nothing that the host keeps."""
        world = self._world
        flight, cache = world.planned, world.cache
        assert flight is not None
        taken = {one.name for one in flight.journal.saved}
        starts = {request.request_id: start for request, _, start in flight.rows}
        size = world.shape.block_size
        for request in flight.admitted:
            if request in flight.fetched or request.needs_every_row or not world.shape.enable_prefix_caching:
                continue
            at = starts[request.request_id] // size
            names = request.kv.names
            is_full = at < min(len(names), (len(request.token_ids) - 1) // size)
            if is_full and names[at] not in taken and cache.host.find(names[at]) is not None:
                raise Violation(f"request {request.request_id} computes its block {at}, which the host keeps")

    # ---- within bounds, and not for longer than it should ----------------------------------------------------------

    def _check_keeps(self) -> None:
        """What is kept is what conversations have, and nothing else: here, and on the host."""
        scheduler, cache = self._world.scheduler, self._world.cache
        names = Counter(name for session in scheduler.sessions.values() for name in session.names)
        if names != cache.pool.keeps:
            raise Violation(f"{len(cache.pool.keeps)} names are kept, and conversations have {len(names)}")
        if not set(cache.host._kept) <= names.keys():
            raise Violation("the host keeps what no conversation has")
        if any(cache.pool._name[block] not in names for block in cache.pool._kept):
            raise Violation("a block is kept for no conversation")

    def _check_bounds(self, event: Any) -> None:
        world, scheduler = self._world, self._world.scheduler
        busy = Counter(r.session.number for r in scheduler.requests.values() if r.session is not None)
        for key, session in scheduler.sessions.items():
            if session.state is SessionState.ENDED or key != (session.tenant, session.session_id):
                raise Violation(f"conversation {key} is {session.state}")
            if (session.state is SessionState.KEPT) != (session.number in scheduler.kept):
                raise Violation(f"conversation {key} is {session.state}, and kept: {session.number in scheduler.kept}")
            if session.state is SessionState.KEPT and busy[session.number]:
                raise Violation(f"conversation {key} may end, and {busy[session.number]} requests of it are here")
            if session.state is SessionState.BUSY and session.num_requests != busy[session.number]:
                raise Violation(f"conversation {key} has {session.num_requests} requests, and {busy} are here")
        if len(scheduler.kept) > world.shape.max_sessions or (scheduler.kept and not world.shape.session_ttl_s):
            raise Violation(f"{len(scheduler.kept)} conversations are kept")
        for request in scheduler.requests.values():
            session_id, its = request.params.session_id, request.session
            if its is not None and (its.tenant, its.session_id) != (request.tenant.id, session_id):
                raise Violation(f"request {request.request_id} is of {session_id}, and kept by {its.session_id}")
        if isinstance(event, EndSession) and (event.tenant, event.session_id) in scheduler.sessions:
            raise Violation(f"{event} was asked for, and it is kept")
        if not isinstance(event, EndSession | SessionOver):
            gone = self._before - {session.number for session in scheduler.sessions.values()}
            if gone and len(scheduler.kept) < world.shape.max_sessions and world.shape.session_ttl_s:
                raise Violation(f"conversations {sorted(gone)} have ended, and nobody asked for that")

    def _check_lost(self) -> None:
        cache = self._world.cache
        if any(cache.kept(session.names).num_on_device for session in self._world.scheduler.sessions.values()):
            raise Violation("the worker is lost, and a conversation is thought to be on its device")
