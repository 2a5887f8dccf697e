"""Guards: by what an answer is known as the one that is waited for, so that the table refuses every other one.

A late answer, one that came twice, and one from a worker that is gone are known by what they answer: a step, a job, an
epoch. What a machine waits for is in an attribute of the same name (`step`, `asked`, `epoch`).
"""

from __future__ import annotations

from typing import Any

from novainfer.fsm.core.machine import Guard


class OfEpoch(Guard):
    """The epoch is that of the worker."""

    name = "of this epoch"
    why = "it belongs to an older epoch"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return event.epoch == machine.epoch  # type: ignore[no-any-return]


class OfStep(Guard):
    """The step is the one on the device: by its number and its epoch, since numbers begin anew nowhere."""

    name = "of this step"
    why = "it came twice, or late"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return machine.step == (event.step_id, event.epoch)  # type: ignore[no-any-return]


class OfJob(Guard):
    """The job is the one that was asked for last, in this epoch."""

    name = "of this job"
    why = "it came twice, or late, or belongs to an older epoch"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return bool((event.job, event.epoch) == machine.asked)
