"""The ladder, by an account of its own: what may move it, how long it may stay down, and what readers are told of it.

The words are those of docs/reliability.md and of `ladder`. Readers are told what their streams were told (`degraded`
looks at that).

    down        only by a failed canary: for want of memory without graphs, where there are any, and then to int8; to
                the next kernels after an exception, or after a step without a number; the other axis stays as it is
    up          a quiet time after the last trouble: not before it, and not later once steps go well
    too soon    trouble before the first quiet time up there is over doubles the next one, up to 16 times; once for each
                way up, however many modes are tried on the way down
    left out    a mode that could not be switched to is never asked for again
    held back   an engine that runs fewer requests than it has slots does not say that it is FULL
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from novainfer.fsm.messages.events import Configure, Fault, MakeBatch, Output, Quiet, StepFailed, WorkerLost
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.outputs import Delta
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.ladder import Rung
from novainfer.fsm.schedule.scheduler import SchedulerState as S
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.world.shape import modes_against

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.simulation.world.world import World

QUIET_TIMES_MAX = 16  # in one
SLACK_S = 0.1  # for messages: what is due within so much of a limit may be on its way


class Rungs:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._modes = world.shape.modes
        self._exact = self._modes[0]  # each device comes up in it
        self._mode = self._exact  # asked for, before the event
        self._flight: Flight | None = None  # before the event
        self._ran_in = self._exact  # the mode of the device, as the steps that it ran have shown
        self._left_out: set[Mode] = set()
        self._told: set[tuple[int, int]] = set()  # streams and choices that were given a degraded token
        self._times = 1  # quiet times that make the next one
        self._trouble_s = 0.0  # when it came to the mode that it is in, or was in trouble there
        self._good_s: float | None = 0.0  # the first good step since one failed, or the end of the last request
        self._rests = False  # no step has been good since one failed, and no request is left
        self._up_s: float | None = None  # when the first mode was tried again, until a quiet time is over there
        self._slept_s = world.slept_s  # when it was in the first mode last
        self._is_blind = False  # a quiet time was cut short, or ended just when something else came

    # ---- what happens --------------------------------------------------------------------------------------------

    def before(self, event: Any) -> None:
        """The scheduler is about to handle `event`."""
        scheduler = self._world.scheduler
        self._mode = self._asked
        self._flight = scheduler.oldest_flight if isinstance(event, MakeBatch | WorkerLost) else None

    def after(self, event: Any) -> None:
        """The scheduler has handled it."""
        scheduler, flight = self._world.scheduler, self._flight
        outcome = event.outcome if isinstance(event, MakeBatch) else event
        if isinstance(event, Configure):
            self._came_up_with(event.modes)
        wanted = self._mode
        if flight is not None and isinstance(outcome, StepDone | StepFailed | WorkerLost):
            wanted = self._ended(flight, outcome)
        mode = self._asked
        if self._mode == self._exact:
            self._slept_s = self._world.slept_s
        if mode != wanted:
            if mode != self._exact or not isinstance(event, Quiet):
                raise Violation(f"{type(event).__name__} leads from {self._mode} to {mode}, not to {wanted}")
            self._came_up()
        if mode != self._mode:
            self._trouble_s = self._world.now_s
        if self._good_s is None and not scheduler.requests:
            self._good_s, self._rests = self._world.now_s, True
        elif self._rests and scheduler.requests:
            self._good_s, self._rests = None, False
        self._check_asked()

    def _came_up_with(self, modes: tuple[Mode, ...]) -> None:
        """A device has come up, in the first of these."""
        if modes != self._modes:
            self._modes, self._exact = modes, modes[0]
            self._mode = self._exact
            self._left_out.clear()
            self._times, self._up_s = 1, None
        self._ran_in = self._exact

    def early(self, event: Any) -> None:
        """A timer fires before its time."""
        self._is_blind |= isinstance(event, Quiet)

    def given(self, output: Output) -> None:
        """A stream was given `output`."""
        if output.is_degraded:
            self._told.add((output.stream_id, output.choice))

    def read(self, stream_id: int, what: Delta | Any) -> None:
        """A reader took `what`."""
        if (
            isinstance(what, Delta)
            and what.token_ids
            and what.is_degraded is not ((stream_id, what.index) in self._told)
        ):
            raise Violation(f"stream {stream_id} is told that it is degraded: {what.is_degraded}, and that is not so")

    def still(self) -> None:
        """All messages have arrived, and time goes on."""
        world = self._world
        if self._asked != self._exact and not world.is_stopped:
            self._check_late()

    @property
    def _asked(self) -> Mode:
        """The mode that the next step asks of the device."""
        scheduler = self._world.scheduler
        return self._exact if scheduler.state is S.STARTING else scheduler.recovery.ladder.mode

    # ---- details -------------------------------------------------------------------------------------------------

    @property
    def _quiet_s(self) -> float:
        return self._world.shape.ladder_quiet_s * self._times

    def _ended(self, flight: Flight, outcome: StepDone | StepFailed | WorkerLost) -> Mode:
        """A step is over; the mode that this leads to."""
        is_good = isinstance(outcome, StepDone) and not (flight.canary and outcome.token_ids[0] < 0)
        if not is_good:
            self._good_s = None
        elif not flight.canary and self._good_s is None:
            self._good_s = self._world.now_s
        if isinstance(outcome, WorkerLost):
            return self._mode
        if isinstance(outcome, StepFailed) and outcome.fault is Fault.SWITCH:
            return self._stayed(flight)
        self._ran_in = flight.mode
        if is_good or not flight.canary:
            return self._mode
        return self._below(outcome.fault if isinstance(outcome, StepFailed) else Fault.EXCEPTION)

    def _below(self, fault: Fault) -> Mode:
        """Where a failed canary leads; that it failed is trouble, wherever it leads."""
        there = [m for m in modes_against(fault, self._mode) if m in self._modes and m not in self._left_out]
        if self._mode != self._exact:
            self._trouble_s = self._world.now_s
        if not there:
            return self._mode
        self._settle()
        if self._up_s is not None:
            self._times = min(2 * self._times, QUIET_TIMES_MAX)
            self._up_s = None
        return there[0]

    def _stayed(self, flight: Flight) -> Mode:
        """The device could not be switched: it goes on in the mode that it is in."""
        if flight.mode != self._mode:  # the ladder has left that mode meanwhile
            return self._mode
        self._trouble_s = self._world.now_s
        self._settle()
        if flight.mode != self._exact:
            self._left_out.add(flight.mode)
        elif self._up_s is not None:
            self._up_s = inf  # it never came up, and no quiet time is over there
        return self._ran_in

    def _settle(self) -> None:
        """A quiet time without trouble is over up there, if it is."""
        if self._up_s is not None:
            over_s = self._world.now_s - self._up_s - self._quiet_s
            self._is_blind |= abs(over_s) < SLACK_S
            if over_s >= 0:
                self._times, self._up_s = 1, None

    def _check_late(self) -> None:
        """A quiet time in which steps go well is no longer than it should be, unless the machine slept."""
        world = self._world
        if self._good_s is None or self._is_blind or world.slept_s != self._slept_s:
            return
        since_s = max(self._trouble_s, self._good_s)
        if world.now_s > since_s + self._quiet_s + SLACK_S:
            raise Violation(f"it is still in another mode, {world.now_s - since_s:.1f} s after the last trouble")

    def _came_up(self) -> None:
        now_s, since_s = self._world.now_s, self._trouble_s
        if not self._world.is_large:
            self._check_late()
        if not self._is_blind and now_s < since_s + self._quiet_s - 1e-6:
            raise Violation(f"it is in the first mode again {now_s - since_s:.1f} s after the last trouble")
        self._up_s = now_s

    def _check_asked(self) -> None:
        scheduler = self._world.scheduler
        flight, limit = scheduler.newest_flight, scheduler.planner.max_running
        if flight is not None and flight.mode in self._left_out:
            raise Violation(f"step {flight.step_id} asks for {flight.mode}, which the device could not switch to")
        planned = self._world.planned
        mode = self._asked if planned is None or not planned.is_vacating else self._ran_in  # it computes nothing
        if planned is not None and planned.mode != mode:
            raise Violation(f"step {planned.step_id} is for {planned.mode}, and the engine is to compute in {mode}")
        if limit < self._world.shape.max_num_seqs and scheduler.recovery.ladder.state is Rung.FULL:
            raise Violation(f"{limit} requests may run, and the engine says that it is FULL")
