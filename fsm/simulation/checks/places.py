"""Whose turn it is, by an account of its own: by what tenants were given, by priorities, and by what has waited.

A tenant is given a token for each that a step computes for it, and one for each that it samples, over its weight. That
is counted from when several tenants are here on, and anew when a request finds the queue empty. A tenant that has
nothing there when one of its comes begins with the least of those that have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from novainfer.fsm.core.machine import After, Effect
from novainfer.fsm.messages.events import AgeOver, MakeBatch, Submit
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.request import Request, RequestState
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.simulation.world.world import World

FIRST = -(1 << 60)  # the rank of what has waited for as long as others may go before it


class Places:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._by_priority = world.shape.scheduling_policy == "priority"
        self._given: dict[str, float] = {}
        self._waiting: set[str] = set()  # tenants with something in the queue, before the event
        self._newest = self._aged = -1
        self._aging: list[int] = []  # up to which requests age, by the timers that run
        self._computed: dict[int, int] = {}  # tokens of prompts in the step that was planned last, by request

    # ---- questions -----------------------------------------------------------------------------------------------

    @property
    def is_by_age(self) -> bool:
        """Whether age alone tells requests apart."""
        return not self._by_priority and len(self._here()) < 2

    def key(self, request: Request) -> tuple[int, float, int]:
        """What comes first, if one of two is to be first."""
        return self.rank(request), self.given(request), request.request_id

    def rank(self, request: Request) -> int:
        """By priority, and by what has waited."""
        if not self._by_priority:
            return 0
        return FIRST if request.request_id <= self._aged else request.params.priority

    def given(self, request: Request) -> float:
        """What its tenant was given."""
        return self._given.get(request.tenant.id, 0.0)

    def of(self, requests: Iterable[Request]) -> dict[int, int]:
        """The places of `requests`, which wait or were in prefill before the step that was planned last."""
        left = sorted(requests, key=lambda r: r.request_id)
        if self.is_by_age:
            return {request.request_id: at for at, request in enumerate(left)}
        given = {(self.rank(r), r.tenant.id): self.given(r) for r in left}
        places: dict[int, int] = {}
        while left:
            heads = {(self.rank(r), r.tenant.id): r for r in reversed(left)}
            line = min(heads, key=lambda line: (line[0], given[line], heads[line].request_id))
            first = heads[line]
            given[line] += self._num_to_compute(first) / first.tenant.weight
            places[first.request_id] = len(places)
            left.remove(first)
        return places

    def of_all(self, flight: Flight) -> dict[int, int]:
        """The places of all that waited before `flight`, which was planned last, or were in prefill."""
        planner = self._world.scheduler.planner
        self._computed = {r.request_id: count for r, count, start in flight.rows if start < len(r.token_ids)}
        self._computed |= {r.request_id: len(r.token_ids) - r.num_remaining for r in flight.admitted}
        prefill = RequestState.PREFILL
        computing = [r for r in planner.running.values() if r.state is prefill and self._num_to_compute(r) > 0]
        fetched = [r for r in flight.fetched if r not in computing]
        return self.of([*computing, *fetched, *planner.waiting])

    def _here(self) -> set[str]:
        """The tenants of all requests that have not ended."""
        return {request.tenant.id for request in self._world.scheduler.requests.values()}

    def _num_to_compute(self, request: Request) -> int:
        return request.num_remaining + self._computed.get(request.request_id, 0)

    # ---- what happens --------------------------------------------------------------------------------------------

    def before(self, event: Any) -> None:
        """The scheduler is about to handle `event`."""
        scheduler = self._world.scheduler
        self._computed = {}
        if isinstance(event, Submit):
            self._waiting = {request.tenant.id for request in scheduler.planner.waiting}
        elif isinstance(event, MakeBatch) and isinstance(event.outcome, StepDone):
            flight = scheduler.oldest_flight
            is_shared = len(self._given) > 1 or len(self._here()) > 1
            if flight is not None and not flight.canary and is_shared:
                for request, count, _ in flight.rows:
                    self._give(request, count)
                for request in flight.samples:
                    self._give(request, 1)

    def after(self, event: Any, effects: Sequence[Effect]) -> None:
        """The scheduler has handled it."""
        requests = self._world.scheduler.requests
        if isinstance(event, Submit):
            self._newest = event.request_id
            if event.request_id in requests:
                self._lift(requests[event.request_id].tenant.id)
        elif isinstance(event, AgeOver):
            self._aging.remove(event.request_id)
            self._aged = event.request_id
        for effect in effects:
            if isinstance(effect, After) and isinstance(effect.event, AgeOver):
                self._check_timer(effect, effect.event)
        if not requests:
            self._given.clear()
            self._aging.clear()
        elif self._by_priority and not self._aging and max(requests) > self._aged:
            raise Violation(f"request {max(requests)} has a priority, and will never have waited for too long")

    def _lift(self, tenant: str) -> None:
        if not self._waiting:
            self._given.clear()
        elif tenant not in self._waiting:
            least = min(self._given.get(other, 0.0) for other in self._waiting)
            self._given[tenant] = max(self._given.get(tenant, 0.0), least)
        self._given.setdefault(tenant, 0.0)

    def _give(self, request: Request, num_tokens: int) -> None:
        self._given[request.tenant.id] = self.given(request) + num_tokens / request.tenant.weight

    def _check_timer(self, effect: After, event: AgeOver) -> None:
        """It is for all that are here, and for as long as was asked for."""
        if event.request_id != self._newest or effect.delay_s != self._world.shape.priority_wait_s:
            raise Violation(f"{effect} is set, and request {self._newest} was the last that came")
        self._aging.append(event.request_id)
