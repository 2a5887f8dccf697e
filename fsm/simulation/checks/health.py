"""The watch of `novainfer.fsm.health`, in a world: what hangs, in any job, is noticed in time, and nothing else.

A hang is watched from its beginning until it is told, in looks as far apart as a server's. What its deadline is stands
here once more, in words of its own: which job, whether the process still beats, whether it gets on. A round looks at
machines that work, for minutes: what moves is never late, and a machine that takes no turns soon is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec

from novainfer.fsm.core.machine import Effect, Send
from novainfer.fsm.health import PERIOD_S, Sighting, Silence, Watch
from novainfer.fsm.messages.events import Fit, Load, MakeBatch, Reclaim, Run, Switch, Warm
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World

STEP_TIMEOUT_S, HEARTBEAT_S = 60.0, 5.0
# How long each job of a process that beats may take without a sign that it gets on, in seconds.
DEADLINE_S: dict[type, float] = {Load: 120.0, Fit: 600.0, Warm: 600.0, Switch: 300.0, Reclaim: 30.0, Run: 60.0}
SPARE_DEADLINE_S = 600.0
COLD_SILENCE_S = 60.0  # more is borne of a process that is not warm yet
TURN_S = 2.0  # without a turn
SLACK_S = 3.0  # the first look counts for nothing, and one that comes late for less than it should


def check_asked(world: World, effects: Sequence[Effect]) -> None:
    """The engine's time for an answer of the scheduler begins when it asks, also when it asks again at once."""
    asks = any(isinstance(effect, Send) and type(effect.event) is MakeBatch for effect in effects)
    if asks and world.entered_s.get("engine", 0.0) != world.now_s:
        raise Violation("the engine asks the scheduler again, and the time for the answer does not begin anew")


class Hang(msgspec.Struct):
    """A process that does not answer any more: whose, in which job, since when, and whether it still beats."""

    actor: str
    job: type
    is_silent: bool
    is_cold: bool
    seconds_per_sign: float = 0.0  # it is slow, and no hang at all: so often it shows that it gets on

    @property
    def deadline_s(self) -> float:
        """After which it must have been noticed."""
        if self.is_silent:
            return HEARTBEAT_S + (COLD_SILENCE_S if self.is_cold else 0.0)
        return SPARE_DEADLINE_S if self.actor == "spare" else DEADLINE_S[self.job]


class Observer:
    """Watches one hang of `world`, from now on."""

    def __init__(self, world: World, hang: Hang) -> None:
        self._world = world
        self._watch = Watch(STEP_TIMEOUT_S)
        self._hang = hang
        self._since_s = world.now_s
        self._slept_s = world.slept_s  # before the hang
        self._silence = Silence(world.now_s)
        self._watched_s = 0.0  # at least
        self._state: Any = None
        self._entered_s = world.now_s
        self._num_looks = 0

    def look(self) -> bool:
        """One look, `PERIOD_S` after the last; True when the hang has been noticed."""
        hang, world = self._hang, self._world
        self._num_looks += 1
        verdict = self._watch.look(world.now_s, [self._sighting()])
        late = [late for late in verdict.late if late.actor == hang.actor]
        if late and hang.seconds_per_sign:
            raise Violation(f"{late[0].sentence()}, and it gets on")
        awake_s = world.now_s - self._since_s - (world.slept_s - self._slept_s)
        # A step that hangs behind one that ran out of memory is late when what waits for it is: to reclaim some.
        deadline_s = min(hang.deadline_s, DEADLINE_S[Reclaim] if Reclaim in map(type, world.jobs) else inf)
        if late and awake_s < deadline_s - SLACK_S:
            raise Violation(f"{hang} is called late after {awake_s:.1f} s")
        if not late and not hang.seconds_per_sign and self._watched_s > hang.deadline_s + SLACK_S:
            raise Violation(f"{hang} has lasted for {self._watched_s:.1f} s, and was not noticed")
        self._watched_s += PERIOD_S
        return bool(late)

    def _sighting(self) -> Sighting:
        hang, world, now_s = self._hang, self._world, self._world.now_s
        roster = world.processes.roster if world.processes is not None else None
        spare = roster.spare if roster is not None else None
        state = spare.state if hang.actor == "spare" and spare is not None else world.worker.state
        if state is not self._state:
            self._state, self._entered_s = state, now_s
        process = None if roster is None else spare if hang.actor == "spare" else roster.worker
        silent_s = None
        if process is not None:
            heard_s = self._since_s if hang.is_silent else now_s
            silent_s = self._silence.look(heard_s, now_s, is_warm=process.is_warm)
        every_s = hang.seconds_per_sign
        signs = int((now_s - self._since_s) / every_s) if every_s else 0
        num_turns = None if hang.actor == "spare" else self._num_looks  # a machine moves while its process hangs
        return Sighting(hang.actor, state, self._entered_s, num_turns, silent_s, HEARTBEAT_S, signs)


class Rounds:
    """Watches all machines of `world`. Each takes a turn after each look, but for one that may be frozen."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._watch = Watch(STEP_TIMEOUT_S)
        self._num_turns = dict.fromkeys(world.machines, 0)
        self._frozen = ""
        self._frozen_s = 0.0  # at least

    def freeze(self, name: str) -> None:
        """This machine takes no turns from now on, unless another one does not already."""
        self._frozen = self._frozen or name

    def thaw(self) -> None:
        """All machines take their turns again."""
        if self._frozen:
            self._num_turns[self._frozen] += 1
        self._frozen, self._frozen_s = "", 0.0

    def look(self) -> None:
        """One look, `PERIOD_S` after the last."""
        world = self._world
        entered_s = world.entered_s
        verdict = self._watch.look(
            world.now_s,
            [
                Sighting(name, machine.state, entered_s.get(name, 0.0), self._num_turns[name])
                for name, machine in world.machines.items()
            ],
        )
        for late in verdict.late:
            if (late.actor, late.what) != (self._frozen, "turn"):
                raise Violation(f"{late.sentence()}, and it moves")
        if not verdict.late and self._frozen_s > TURN_S + SLACK_S:
            raise Violation(f"the {self._frozen} takes no turns, and that was not noticed")
        for name in self._num_turns:
            self._num_turns[name] += name != self._frozen
        if verdict.late:
            self.thaw()
        elif self._frozen:
            self._frozen_s += PERIOD_S
