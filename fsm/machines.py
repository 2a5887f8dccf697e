"""All machines: those of an engine, in the order in which a request meets them, and those that read its answers."""

from __future__ import annotations

from enum import StrEnum

from novainfer.fsm.client.gate import Gate
from novainfer.fsm.client.stream import Stream
from novainfer.fsm.core.machine import Machine, each_row
from novainfer.fsm.device.flights import Flights
from novainfer.fsm.device.process import Process
from novainfer.fsm.device.roster import Roster
from novainfer.fsm.device.worker import Worker
from novainfer.fsm.engine import Engine
from novainfer.fsm.parsing.answer import Answer
from novainfer.fsm.schedule.ladder import Ladder
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.scheduler import Scheduler

MACHINES: tuple[type[Machine], ...] = (
    Gate,
    Engine,
    Scheduler,
    Request,
    Worker,
    Roster,
    Process,
    Flights,
    Ladder,
    Stream,
)
READERS: tuple[type[Machine], ...] = (Answer,)  # of what an engine has written: no part of it


def states(machine: type[Machine]) -> list[StrEnum]:
    """The states of `machine`, in the order of their definition; the first is where it begins."""
    return list(type(next(state for state, _, _ in each_row(machine.TABLE))))
