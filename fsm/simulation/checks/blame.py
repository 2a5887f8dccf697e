"""Blame, by an account of its own: which steps failed with which requests in them, and what that lets the engine do.

The words are those of docs/reliability.md ("Who is blamed"). What is kept: for each request the steps that failed with
it alone, and the workers that were lost under it, since its last token; and the groups that are to be tried apart.

    a group    is half of a step that failed, runs with nothing but its members, and is cleared by a good step; of one
               that is larger than a step may be by now, as many as it may hold are the next group
    a member   under which two workers were lost keeps its group apart until it has a token
    otherwise  every decoding request is in every step
    nothing    is tried for ever

That an error needs two failures of the request alone is checked in `checks`, for small worlds too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from novainfer.fsm.core.machine import Effect, Send
from novainfer.fsm.messages.events import Batch, Fault, MakeBatch, Output, Outputs, StepFailed, WorkerLost
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.schedule.request import AWAITED, Request, RequestState
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.world.shape import modes_against

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.simulation.world.world import World

LOSSES_MIN = 2  # of workers under a request, before it is suspected
ENDS_AFTER = 6  # failures alone, whatever the canaries say: two in each of three modes, or of as many as there are


class Blame:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._smallest: Counter[int] = Counter()  # failures alone, and as small as can be, since its last token
        self._losses: Counter[int] = Counter()  # workers lost under it, since its last token
        self._is_canary = False  # the step on the device
        self._failures: Counter[int] = Counter()  # the same, counted as rule 4 does, to the letter
        self._on_trial: tuple[int, int] | None = None  # request, and its failures, of the last canary
        self._last_alone: dict[int, tuple[Fault, int]] = {}  # how the last of them failed, and with how many tokens
        self._groups: list[list[int]] = []  # to be tried apart, the next one first

    @property
    def is_restricted(self) -> bool:
        """Whether the next step need not hold every request that could be computed."""
        return bool(self._groups or self._is_canary)

    # ---- what happens --------------------------------------------------------------------------------------------

    def before(self, event: Any) -> None:
        """The scheduler is about to handle `event`."""
        scheduler = self._world.scheduler
        flight = scheduler.oldest_flight
        if isinstance(event, WorkerLost):
            flight = next((flight for flight in scheduler.flights if flight.step_id == event.step_id), None)
        if flight is None or not _held(flight)[0]:  # a canary concerns no request
            return
        if isinstance(event, WorkerLost):
            self._lost(flight)
        elif isinstance(event, MakeBatch) and isinstance(event.outcome, StepFailed):
            if event.outcome.fault is not Fault.SWITCH:
                self._failed(flight, event.outcome)
        elif isinstance(event, MakeBatch) and isinstance(event.outcome, StepDone):
            self._went_well(flight)

    def after(self, event: Any, effects: Sequence[Effect]) -> None:
        """The scheduler has handled it."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.event, Batch):
                self._check_canary(effect.event.plan)
            if isinstance(effect, Send) and isinstance(effect.event, Batch | Outputs):
                for output in effect.event.outputs:
                    self._output(output)
        if isinstance(event, MakeBatch) and not event.vacates and not self._world.is_held:
            self._planned(self._world.planned)

    def _failed(self, flight: Flight, outcome: StepFailed) -> None:
        held, live = _held(flight)
        is_tried_at_once = False
        if len(held) == len(live) == 1 and not (outcome.fault is Fault.OOM and self._is_long(flight)):
            self._failures.update(live)
            self._last_alone[live[0]] = outcome.fault, sum(count for _, count, _ in flight.rows)
            is_tried_at_once = self._failures[live[0]] % 2 == 1
        if len(held) == 1:
            num_tokens = sum(count for _, count, _ in flight.rows)
            if outcome.fault is Fault.EXCEPTION or num_tokens <= self._world.shape.block_size:
                self._smallest.update(live)
                self._check_patience(live)
        self._leave_group(held)
        if is_tried_at_once:
            self._groups.insert(0, live)
        else:
            self._split(live)

    def _lost(self, flight: Flight) -> None:
        held, live = _held(flight)
        self._losses.update(live)
        self._leave_group(held)
        suspects = [request_id for request_id in live if self._losses[request_id] >= LOSSES_MIN]
        if len(held) == 1 and suspects and not self._is_long(flight):
            self._failures.update(live)
            self._last_alone[live[0]] = Fault.LOST, 0
        if len(held) == 1 and suspects:
            self._smallest.update(live)
            self._check_patience(live)
        self._split(suspects)

    def _went_well(self, flight: Flight) -> None:
        held, _ = _held(flight)
        samples = {request.request_id for request in flight.samples}
        found = next((group for group in self._groups if held and held.issubset(group)), None)
        if found is not None:
            self._groups.remove(found)
            if any(self._losses[i] >= LOSSES_MIN for i in found if i not in samples and self._is_live(i)):
                self._groups.insert(0, found)

    def _output(self, output: Output) -> None:
        if output.token_ids or output.end is not None:
            self._smallest.pop(output.request_id, None)
            self._losses.pop(output.request_id, None)
            self._failures.pop(output.request_id, None)
            self._last_alone.pop(output.request_id, None)

    def _check_canary(self, plan: StepPlan | None) -> None:
        """A canary comes after each second failure, where there is a rung, and is as large as the step that failed."""
        world = self._world
        flight, trial = world.planned, world.scheduler.recovery.trial
        for request_id, count in self._failures.items():
            if count >= self._ends_after and self._is_live(request_id):
                raise Violation(f"request {request_id} has failed alone {count} times, and goes on")
        if plan is None or flight is None or not flight.canary or trial is None:
            return
        count, (fault, num_tokens) = self._failures[trial.request_id], self._last_alone[trial.request_id]
        if count % 2 or not count or fault is Fault.LOST:
            raise Violation(f"a canary is computed for request {trial.request_id} after {count} failures, by {fault}")
        now, is_again = world.scheduler.recovery.ladder.mode, (trial.request_id, count) == self._on_trial
        self._on_trial = trial.request_id, count  # the device could not be switched for it: it is computed all the same
        if not is_again and not any(mode in world.modes for mode in modes_against(fault, now)):
            raise Violation(f"a canary is computed for {fault}, and there is no rung for that")
        pool = world.cache.pool
        room = (pool.num_available + len(flight.canary)) * world.shape.block_size
        if sum(plan.query_lens) < min(num_tokens, room):
            raise Violation(f"the canary has {sum(plan.query_lens)} tokens, and the step that failed had {num_tokens}")

    # ---- what is planned -----------------------------------------------------------------------------------------

    def _planned(self, flight: Flight | None) -> None:
        """A step was planned: apart, or of all that can be computed."""
        held = _held(flight)[0] if flight is not None else set()
        self._groups = [live for group in self._groups if (live := list(filter(self._is_live, group)))]
        self._is_canary = flight is not None and not held
        if self._is_canary:  # it comes before the groups, and is none of them
            return
        while self._groups:
            self._cut()
            group = self._groups[0]
            if held and held.issubset(group):
                break
            if any(self._can_run(request_id) for request_id in group):
                raise Violation(f"{sorted(group)} are to be tried apart, and the step holds {sorted(held)}")
            self._groups.pop(0)
        if self._groups or flight is None:
            return
        for request in self._world.scheduler.requests.values():
            if request.state is not RequestState.DECODE or request.request_id in held or request.mask == AWAITED:
                continue
            if not ends_in_flight(request) and not goes_nowhere(request):
                raise Violation(f"request {request.request_id} decodes, is not suspected, and is not in the step")

    @property
    def _ends_after(self) -> int:
        modes = self._world.modes
        return max(
            ENDS_AFTER, 2 * (len({mode.kernels for mode in modes}) + len({mode.precision for mode in modes}) - 1)
        )

    # ---- details -------------------------------------------------------------------------------------------------

    def _split(self, live: Sequence[int]) -> None:
        half = (len(live) + 1) // 2
        self._groups += [list(part) for part in (live[:half], live[half:]) if part]

    def _cut(self) -> None:
        """Of the next group a step holds as many as it may."""
        group, most = self._groups[0], self._world.scheduler.planner.max_running
        self._groups[:1] = [part for part in (group[:most], group[most:]) if part]

    def _is_long(self, flight: Flight) -> bool:
        """Whether it held more of a prompt than a block, so that it is tried with fewer tokens."""
        return flight.num_prompt_tokens > self._world.shape.block_size

    def _leave_group(self, held: set[int]) -> None:
        group = next((group for group in self._groups if held.issubset(group)), None)
        if group is not None:
            self._groups.remove(group)

    def _check_patience(self, live: Sequence[int]) -> None:
        for request_id in live:
            if 2 * self._smallest[request_id] > 3 * self._ends_after:  # nothing is tried for ever
                raise Violation(
                    f"request {request_id} has failed alone {self._smallest[request_id]} times, and goes on"
                )

    def _is_live(self, request_id: int) -> bool:
        return request_id in self._world.scheduler.requests

    def _can_run(self, request_id: int) -> bool:
        request = self._world.scheduler.requests.get(request_id)
        if request is None or request.state is RequestState.PAUSED or request.mask == AWAITED:
            return False
        return request.mask >= 0 or request.slot >= 0  # none is admitted before its mask has come


def goes_nowhere(request: Request) -> bool:
    """Whether the step in flight gives `request` no token, since the one before it has given it none."""
    return request.num_planned > len(request.token_ids)


def ends_in_flight(request: Request) -> bool:
    """Whether the step in flight gives `request` the last token that it may have."""
    length = len(request.token_ids)
    return request.is_in_flight and request.num_planned == length and length + 1 >= request.max_len


def _held(flight: Flight) -> tuple[set[int], list[int]]:
    """The requests that a step computes or fetches, and, in order, those of them that have not ended."""
    requests = list(flight.held())
    return {r.request_id for r in requests}, [r.request_id for r in requests if not r.ended]
