"""Bugs planted in what counts a worker's losses, and in what becomes of its processes."""

from __future__ import annotations

from novainfer.fsm.simulation.mutants import Mutant
from novainfer.fsm.worker import Worker

PROCESS_MUTANTS = [
    # ---- the restart budget
    Mutant(
        "a job that fails counts as lost when the loss before it was",
        Worker,
        "_job_failed",
        "event.message, event.at_s)",
        "event.message, (self._losses or [event.at_s])[-1])",
        seeds=1000,
    ),
    Mutant(
        "a loss of long ago still counts",
        Worker,
        "_lose",
        "if loss_s > at_s - policy.window_s]",
        "if True]",
    ),
    Mutant(
        "a loss is forgotten before its window is over",
        Worker,
        "_lose",
        "if loss_s > at_s - policy.window_s]",
        "if loss_s > at_s - policy.window_s / 2]",
    ),
    Mutant(
        "a worker that is up again has its whole budget",
        Worker,
        "_warmed",
        "self._was_ready = True",
        "self._was_ready = not self._losses.clear()",
    ),
    Mutant(
        "a step that fails restores the restart budget",
        Worker,
        "_step_failed",
        "if event.fault is Fault.OOM:",
        "if not self._losses.clear() and event.fault is Fault.OOM:",
        seeds=1000,
    ),
]
