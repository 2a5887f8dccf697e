"""The ladder, by an account of its own: what may move it, how long it may stay down, and what readers are told of it.

The words are those of docs/reliability.md and of `ladder`: only a canary that fails leads to another mode, for want of
memory to int8 and else to plain kernels; a quiet time that saw no trouble leads back, and trouble before the next one
is over doubles it, up to 16 times. Readers are told what their streams were told (`degraded` looks at that).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from novainfer.fsm.events import Fault, MakeBatch, Output, StepDone, StepFailed, WorkerLost
from novainfer.fsm.outputs import Delta
from novainfer.fsm.simulation.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.draft import Flight
    from novainfer.fsm.simulation.world import World

LOWER = ("PLAIN_KERNELS", "INT8")  # where answers may differ
QUIET_TIMES_MAX = 16
SLACK_S = 1.0  # for messages


class Rungs:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rung = "FULL"
        self._flight: Flight | None = None  # the step of which the scheduler hears
        self._told: set[tuple[int, int]] = set()  # streams and choices that were given such a token
        self._since_s = 0.0  # the last trouble while it is down
        self._up_s = -1e9  # when it went up
        self._times = 1  # quiet times that it must last
        self._num_good = 0  # steps since one failed

    def before(self) -> None:
        """The scheduler is about to handle an event."""
        self._flight = self._world.scheduler.flight

    def after(self, event: Any) -> None:
        """The scheduler has handled it."""
        outcome = event.outcome if isinstance(event, MakeBatch) else event
        flight, self._flight = self._flight, None
        if isinstance(outcome, StepDone) and flight is not None:
            limit_s = self._times * self._world.shape.ladder_quiet_s
            if not self._num_good and self._world.now_s >= self._since_s + limit_s:  # it was over without a good step
                self._since_s = self._world.now_s
            self._num_good += 1
        elif isinstance(outcome, StepFailed | WorkerLost):
            self._num_good = 0
        rung = str(self._world.scheduler.trouble.ladder.state)
        is_canary = flight is not None and bool(flight.canary)
        if rung != self._rung:
            self._moved(rung, outcome, is_canary=is_canary)
            self._rung = rung
        elif is_canary and isinstance(outcome, StepFailed):
            self._since_s = self._world.now_s

    def _moved(self, rung: str, outcome: Any, *, is_canary: bool) -> None:
        world, now_s = self._world, self._world.now_s
        if rung not in LOWER:
            self._up_s = now_s
            return
        self._since_s = now_s
        if isinstance(outcome, StepFailed) and outcome.fault is Fault.SWITCH:  # the device stays in the mode it is in
            return
        right = "INT8" if isinstance(outcome, StepFailed) and outcome.fault is Fault.OOM else "PLAIN_KERNELS"
        if not is_canary or not isinstance(outcome, StepFailed) or rung != right:
            raise Violation(f"the ladder went from {self._rung} to {rung}, and no canary had failed so: {outcome}")
        if now_s <= self._up_s + self._times * world.shape.ladder_quiet_s + SLACK_S:
            self._times = min(2 * self._times, QUIET_TIMES_MAX)
        else:
            self._times = 1

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
        if self._rung not in LOWER or not self._num_good:
            return
        world = self._world
        limit_s = self._times * world.shape.ladder_quiet_s
        if world.now_s > self._since_s + limit_s + SLACK_S:
            raise Violation(f"nothing went wrong for {world.now_s - self._since_s:g} s, and it is {self._rung} still")
