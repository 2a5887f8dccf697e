"""A router, the engines that it asks for, and its clients, without a loop: what happens next is a move.

A check of a model's files takes any time. An engine is two jobs that do so, too: to come up, or fail to; and to be
gone. Between them it may die. What is said is on its way until a move brings it, so that it may cross what the router
has just decided.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, TypeAlias

import msgspec

from novainfer.fsm.core.machine import After, Drop, Machine, Observer, Row, Send
from novainfer.fsm.models.model import (
    Checked,
    CheckFailed,
    CheckFiles,
    Died,
    Loaded,
    LoadEngine,
    LoadFailed,
    Patience,
    StopEngine,
    Stopped,
)
from novainfer.fsm.models.router import Ask, DrainAll, Gone, Granted, Refused, Router, RouterState, Unload
from novainfer.fsm.simulation.explore.coverage import RowId, event_of
from novainfer.fsm.simulation.models.checks import Checks

Move: TypeAlias = tuple[Any, ...]
LOAD_S = 4.0  # that each engine says it took


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What a world has."""

    models: tuple[str, ...] = ("a", "b")
    max_loaded: int = 1
    max_waiting: int = 2
    patience: Patience = Patience(wait_s=10.0, idle_s=20.0)
    looks_take_time: bool = True  # else each check of files ends, and finds nothing, as soon as it begins


class EngineOf(msgspec.Struct, kw_only=True):
    """One engine, as it really is: `COMING`, `UP`, `DEAD` or `GOING`; gone ones are in no list."""

    model: str
    serial: int
    place: int
    state: str = "COMING"


class RoutedWorld:
    """Moves change it, and `Checks` looks after each."""

    def __init__(self, shape: Shape, *, has_any_order: bool = False) -> None:
        """`has_any_order`: timers run out in any order, and so no time is too late."""
        self.shape = shape
        self.has_any_order = has_any_order
        self.router = Router(
            shape.models, max_loaded=shape.max_loaded, max_waiting=shape.max_waiting, patience=shape.patience
        )
        self.now_s = 0.0
        self.looks: list[CheckFiles] = []  # under way
        self.engines: list[EngineOf] = []
        self.mail: deque[Any] = deque()  # what engines and checks have said, and the router has not heard
        self.heard: list[Any] = []  # what it has
        self.timers: dict[Any, float] = {}  # event -> when it is due
        self.asked: dict[int, Ask] = {}  # clients that have no answer yet
        self.granted: dict[int, tuple[str, int]] = {}  # live requests: model and serial
        self.num_clients = 0
        self.refusals: Counter[str] = Counter()
        self.num_granted = 0
        self.checks = Checks(self)

    def make(self, move: Move) -> None:
        """Let `move` happen; raises `Violation`, or whatever a machine raises."""
        self.checks.begins(move)
        getattr(self, f"_{move[0]}")(*move[1:])
        self.checks.holds()

    # ---- moves ---------------------------------------------------------------------------------------------------

    def _ask(self, model: str, timeout_s: float, by_hand: bool = False) -> None:
        self.num_clients += 1
        event = self.asked[self.num_clients] = Ask(self.num_clients, model, timeout_s, by_hand)
        self.checks.asks(event)
        self._handle(event)

    def _gone(self, request_id: int) -> None:
        """A client leaves, or has its whole answer."""
        self.asked.pop(request_id, None)
        self.granted.pop(request_id, None)
        self._handle(Gone(request_id))

    def _pass(self, at: int) -> None:
        """Nothing is wrong with a model's files."""
        look = self.looks.pop(at)
        self.mail.append(Checked(look.model, look.serial))

    def _flaw(self, at: int) -> None:
        """Something is."""
        look = self.looks.pop(at)
        self.mail.append(CheckFailed(look.model, look.serial, f"{look.model} has no config.json"))

    def _come_up(self, at: int) -> None:
        engine = self.engines[at]
        engine.state = "UP"
        self.mail.append(Loaded(engine.model, engine.serial, LOAD_S))

    def _fail(self, at: int) -> None:
        engine = self.engines.pop(at)
        self.mail.append(LoadFailed(engine.model, engine.serial, f"{engine.model} cannot be read"))

    def _die(self, at: int) -> None:
        engine = self.engines[at]
        engine.state = "DEAD"
        self.mail.append(Died(engine.model, engine.serial, f"{engine.model} died"))

    def _go_down(self, at: int) -> None:
        engine = self.engines.pop(at)
        self.mail.append(Stopped(engine.model, engine.serial))

    def _deliver(self) -> None:
        self.heard.append(self.mail.popleft())
        self._handle(self.heard[-1])

    def _echo(self, at: int) -> None:
        """Something that was said is said again."""
        self._handle(self.heard[at])

    def _fire(self, event: Any) -> None:
        self.now_s = max(self.now_s, self.timers.pop(event))
        self.checks.fires(event)
        self._handle(event)

    def _unload(self, model: str, timeout_s: float) -> None:
        self._handle(Unload(model, timeout_s))

    def _drain(self, timeout_s: float) -> None:
        self._handle(DrainAll(timeout_s))

    # ---- what the router wants done ------------------------------------------------------------------------------

    def _handle(self, event: Any) -> None:
        for effect in self.router.handle(event):
            match effect:
                case Send(event=Granted() as granted):
                    self.checks.grants(granted)
                    ask = self.asked.pop(granted.request_id)
                    self.granted[granted.request_id] = (ask.model, granted.serial)
                    self.num_granted += 1
                case Send(event=Refused() as refused):
                    self.checks.refuses(refused)
                    del self.asked[refused.request_id]
                    self.refusals[refused.reason] += 1
                case After(delay_s, timer):
                    self.timers[timer] = self.now_s + delay_s
                case Drop(timer):
                    self.timers.pop(timer, None)
                case _:
                    self._start(effect.job)  # type: ignore[union-attr]

    def _start(self, job: CheckFiles | LoadEngine | StopEngine) -> None:
        if isinstance(job, CheckFiles):
            self.checks.looks(job)
            self.looks.append(job)
            if not self.shape.looks_take_time:
                self._pass(-1)
            return
        if isinstance(job, LoadEngine):
            self.checks.loads(job)
            self.engines.append(EngineOf(model=job.model, serial=job.serial, place=job.place))
            return
        self.checks.stops(job)
        for engine in self.engines:
            if (engine.model, engine.serial) == (job.model, job.serial):
                engine.state = "GOING"
                return
        # It has failed by itself, which the router has not heard yet: there is nothing to stop.
        self.mail.append(Stopped(job.model, job.serial))


def moves(world: RoutedWorld) -> list[Move]:
    """What engines, checks and time may do next, whatever clients want."""
    found: list[Move] = [("deliver",)] if world.mail else []
    found += [("pass", at) for at in range(len(world.looks))]
    for at, engine in enumerate(world.engines):
        if engine.state == "COMING":
            found.append(("come_up", at))
        elif engine.state == "GOING":
            found.append(("go_down", at))
    return found


def finish(world: RoutedWorld) -> None:
    """No more faults and no more clients: all that was asked for must end; and then the server does."""
    for _ in range(10_000):
        if found := moves(world):
            world.make(found[0])
        elif world.granted:
            world.make(("gone", next(iter(world.granted))))
        elif world.asked:
            world.make(("fire", min(world.timers, key=world.timers.__getitem__)))
        else:
            break
    world.checks.rests()
    if world.router.state is RouterState.OPEN:
        world.make(("drain", 1.0))
    while found := moves(world):
        world.make(found[0])
    world.checks.ends()


class Rows(Observer):
    """Counts the rows that were taken."""

    def __init__(self) -> None:
        self.taken: Counter[RowId] = Counter()

    def takes(self, machine: Machine, event: Any, row: Row) -> None:
        self.taken[type(machine).__name__, str(machine.state), event_of(type(event), row)] += 1

    def watch(self, world: RoutedWorld) -> None:
        """Count what is taken in `world`."""
        for machine in (world.router, *world.router.models.values()):
            machine.observer = self
