"""Which rows of the tables were taken: `never` rows cannot be, and every other one should be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from novainfer.fsm.core.machine import Machine, Row, each_row
from novainfer.fsm.machines import MACHINES

RowId = tuple[str, str, str]  # machine, state, event (and which of them, where a guard tells them apart)

# Rows that no world reaches, and why they are not `never` rows.
ARGUED: dict[RowId, str] = {
    ("Gate", "STARTING", "Cancel"): "nobody has a stream yet; a program that embeds the engine may try all the same",
    (
        "Ladder",
        "OTHER_MODE",
        "SwitchFailed any other",
    ): "while a step is on the device the ladder goes up only; a shell may repeat an answer all the same",
    (
        "Process",
        "DYING",
        "Answered",
    ): "the roster drops what a process says that was ended; a shell without one may not",
    ("Process", "DYING", "End"): "the roster lets go of a process with its end; a shell without one may end it twice",
    ("Roster", "FINDING", "Answered"): "a process is asked nothing before its model is found; it may say something all "
    "the same",
    **{
        (
            "Worker",
            state,
            "Overdue any other",
        ): "an alarm waits in the mailbox before all that brings the next worker so "
        "far; a shell that keeps no order may bring it later"
        for state in ("OOM", "RUNNING", "SWITCHING")
    },
    ("Process", "STARTING", "Ended"): "a process that cannot be started never ends; the system may kill it in between",
}


def event_of(event: type, row: Row) -> str:
    """The events that `row` is for."""
    return f"{event.__name__} {row.of}" if row.of else event.__name__


class Coverage(msgspec.Struct, frozen=True):
    """Rows of one machine that can be taken, how many were, and which were not."""

    machine: str
    total: int
    taken: int
    never: int
    missing: list[RowId]


def coverage(taken: Mapping[RowId, int], machines: Iterable[type[Machine]] = MACHINES) -> list[Coverage]:
    """By machine; `taken` counts rows by `RowId`."""
    report = []
    for machine in machines:
        name = machine.__name__
        rows = {(name, str(state), event_of(event, row)): row for state, event, row in each_row(machine.TABLE)}
        possible = [key for key, row in rows.items() if not row.impossible]
        missing = [key for key in possible if not taken.get(key)]
        report.append(Coverage(name, len(possible), len(possible) - len(missing), len(rows) - len(possible), missing))
    return report
