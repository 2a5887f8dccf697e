"""All machines: those of an engine, as a request meets them, of several, of their answers, and of what is before."""

from __future__ import annotations

from enum import StrEnum

from novainfer.fsm.client.api_process import ApiProcess
from novainfer.fsm.client.gate import Gate
from novainfer.fsm.client.stream import Stream
from novainfer.fsm.core.machine import Machine, each_row
from novainfer.fsm.device.compiling import Compiling
from novainfer.fsm.device.flights import Flights
from novainfer.fsm.device.masks import Delivery
from novainfer.fsm.device.process import Process
from novainfer.fsm.device.roster import Roster
from novainfer.fsm.device.worker import Worker
from novainfer.fsm.engine import Engine
from novainfer.fsm.models.model import Model
from novainfer.fsm.models.router import Router
from novainfer.fsm.parsing.answer import Answer
from novainfer.fsm.parsing.thoughts import Thinking
from novainfer.fsm.schedule.ladder import Ladder
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.schedule.session import Session

MACHINES: tuple[type[Machine], ...] = (
    Gate,
    Engine,
    Scheduler,
    Request,
    Worker,
    Roster,
    Process,
    Flights,
    Compiling,
    Delivery,
    Ladder,
    Session,
    Stream,
)
OF_MODELS: tuple[type[Machine], ...] = (Router, Model)  # of several engines: no part of any of them
READERS: tuple[type[Machine], ...] = (Answer, Thinking)  # of what an engine has written: no part of it
FRONT: tuple[type[Machine], ...] = (ApiProcess,)  # what stands before an engine: no part of it


def states(machine: type[Machine]) -> list[StrEnum]:
    """The states of `machine`, in the order of their definition; the first is where it begins."""
    return list(type(next(state for state, _, _ in each_row(machine.TABLE))))
