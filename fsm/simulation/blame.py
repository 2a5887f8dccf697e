"""Blame, by an account of its own: which steps failed with which requests in them, and what that lets the engine do.

The words are those of docs/reliability.md ("Who is blamed"). What is kept: for each request the steps that failed with
it alone, and the workers that were lost under it, since its last token; and the groups that are to be tried apart.

    a group    is half of a step that failed, runs with nothing but its members, and is cleared by a good step
    a member   under which two workers were lost keeps its group apart until it has a token
    otherwise  every decoding request is in every step
    nothing    is tried for ever

That an error needs two failures of the request alone is checked in `checks`, for small worlds too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from novainfer.fsm.events import Batch, Fault, MakeBatch, Output, Outputs, StepDone, StepFailed, WorkerLost
from novainfer.fsm.machine import Effect, Send
from novainfer.fsm.request import RequestState
from novainfer.fsm.simulation.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.draft import Flight
    from novainfer.fsm.simulation.world import World

LOSSES_MIN = 2  # of workers under a request, before it is suspected
FAILURES_MAX = 9  # alone, and as small as can be: nothing is tried for ever


class Blame:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._smallest: Counter[int] = Counter()  # failures alone, and as small as can be, since its last token
        self._losses: Counter[int] = Counter()  # workers lost under it, since its last token
        self._is_canary = False  # the step on the device
        self._groups: list[set[int]] = []  # to be tried apart, the next one first

    @property
    def is_restricted(self) -> bool:
        """Whether the next step need not hold every request that could be computed."""
        return bool(self._groups or self._is_canary)

    # ---- what happens --------------------------------------------------------------------------------------------

    def before(self, event: Any) -> None:
        """The scheduler is about to handle `event`."""
        flight = self._world.scheduler.flight
        if flight is None or not _held(flight)[0]:  # a canary concerns no request
            return
        if isinstance(event, WorkerLost):
            if flight.step_id == event.step_id:
                self._lost(flight)
        elif isinstance(event, MakeBatch) and isinstance(event.outcome, StepFailed):
            if event.outcome.fault is not Fault.SWITCH:
                self._failed(flight, event.outcome)
        elif isinstance(event, MakeBatch) and isinstance(event.outcome, StepDone):
            self._went_well(flight)

    def after(self, event: Any, effects: Sequence[Effect]) -> None:
        """The scheduler has handled it."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.event, Batch | Outputs):
                for output in effect.event.outputs:
                    self._output(output)
        if isinstance(event, MakeBatch):
            self._planned(self._world.scheduler.flight)

    def _failed(self, flight: Flight, outcome: StepFailed) -> None:
        held, live = _held(flight)
        if len(held) == 1:
            num_tokens = sum(count for _, count, _ in flight.rows)
            if outcome.fault is Fault.EXCEPTION or num_tokens <= self._world.shape.block_size:
                self._smallest.update(live)
                self._check_patience(live)
        self._leave_group(held)
        self._split(live)

    def _lost(self, flight: Flight) -> None:
        held, live = _held(flight)
        self._losses.update(live)
        self._leave_group(held)
        suspects = [request_id for request_id in live if self._losses[request_id] >= LOSSES_MIN]
        if len(held) == 1 and suspects:
            self._smallest.update(live)
            self._check_patience(live)
        self._split(suspects)

    def _went_well(self, flight: Flight) -> None:
        held, _ = _held(flight)
        samples = {request.request_id for request in flight.samples}
        found = next((group for group in self._groups if held and held <= group), None)
        if found is not None:
            self._groups.remove(found)
            if any(self._losses[i] >= LOSSES_MIN for i in found - samples if self._is_live(i)):
                self._groups.insert(0, found)

    def _output(self, output: Output) -> None:
        if output.token_ids or output.end is not None:
            self._smallest.pop(output.request_id, None)
            self._losses.pop(output.request_id, None)

    # ---- what is planned -----------------------------------------------------------------------------------------

    def _planned(self, flight: Flight | None) -> None:
        """A step was planned: apart, or of all that can be computed."""
        held = _held(flight)[0] if flight is not None else set()
        self._groups = [group for group in self._groups if any(map(self._is_live, group))]
        self._is_canary = flight is not None and not held
        if self._is_canary:  # it comes before the groups, and is none of them
            return
        while self._groups and not (held and held <= self._groups[0]):
            group = self._groups[0]
            if any(self._can_run(request_id) for request_id in group):
                raise Violation(f"{sorted(group)} are to be tried apart, and the step holds {sorted(held)}")
            self._groups.pop(0)
        if self._groups or flight is None:
            return
        for request in self._world.scheduler.requests.values():
            if request.state is RequestState.DECODE and request.request_id not in held:
                raise Violation(f"request {request.request_id} decodes, is not suspected, and is not in the step")

    # ---- details -------------------------------------------------------------------------------------------------

    def _split(self, live: Sequence[int]) -> None:
        half = (len(live) + 1) // 2
        self._groups += [set(part) for part in (live[:half], live[half:]) if part]

    def _leave_group(self, held: set[int]) -> None:
        group = next((group for group in self._groups if held <= group), None)
        if group is not None:
            self._groups.remove(group)

    def _check_patience(self, live: Sequence[int]) -> None:
        for request_id in live:
            if self._smallest[request_id] > FAILURES_MAX:
                raise Violation(
                    f"request {request_id} has failed alone {self._smallest[request_id]} times, and goes on"
                )

    def _is_live(self, request_id: int) -> bool:
        return request_id in self._world.scheduler.requests

    def _can_run(self, request_id: int) -> bool:
        request = self._world.scheduler.requests.get(request_id)
        return request is not None and request.state is not RequestState.PAUSED


def _held(flight: Flight) -> tuple[set[int], list[int]]:
    """The requests that a step computes or fetches, and, in order, those of them that have not ended."""
    requests = [*(request for request, _, _ in flight.rows), *flight.fetched]
    return {r.request_id for r in requests}, [r.request_id for r in requests if not r.ended]
