"""All machines, in the order in which a request meets them."""

from __future__ import annotations

from enum import StrEnum

from novainfer.fsm.engine import Engine
from novainfer.fsm.gate import Gate
from novainfer.fsm.ladder import Ladder
from novainfer.fsm.machine import Machine
from novainfer.fsm.process import Process
from novainfer.fsm.request import Request
from novainfer.fsm.roster import Roster
from novainfer.fsm.scheduler import Scheduler
from novainfer.fsm.stream import Stream
from novainfer.fsm.worker import Worker

MACHINES: tuple[type[Machine], ...] = (Gate, Engine, Scheduler, Request, Worker, Roster, Process, Ladder, Stream)


def states(machine: type[Machine]) -> list[StrEnum]:
    """The states of `machine`, in the order of their definition; the first is where it begins."""
    return list(type(next(iter(machine.TABLE))[0]))
