"""The watchdog exists because an actor that is stuck cannot say so: it looks at all of them, and says it for them.

One timer looks every quarter of a second, tells `fsm/health.py` what it sees, and asks each actor for a turn, so that
one that has nothing to do is watched as well. A worker that is overdue hears of it as an event, once for each state it
is stuck in: its machine decides (a process is replaced, a thread cannot be). So does the roster, of a spare. An actor
that is stuck is reported as an incident, and `/livez` fails until it moves again; so is a process that does not end,
which is left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

import msgspec

from novainfer.actors.core.mailbox import Actor
from novainfer.fsm.health import PERIOD_S, Late, Sighting, Verdict, Watch
from novainfer.fsm.messages.events import Incident, Overdue

WORKER = "worker"
SPARE = "spare"
ENDING = "process "  # and its number
RESCUE_LIMIT_S = 2.0  # for the worker's machine to have done something about what is overdue


class Watchdog:
    """Looks at `actors`, and at what `more()` sees beside them.

    `silence_s()` is how long the worker's process has given no sign of life (None: it gives none). `overdue(event)`
    reaches the worker, `report(incident)` the error queue. `num_signs()` grows while the worker's process gets on, and
    `rescue(actor, message)` is True when something is done about one of `more` that is late.
    """

    def __init__(
        self,
        actors: Mapping[str, Actor],
        *,
        more: Callable[[], Iterable[Sighting]],
        silence_s: Callable[[], float | None],
        num_signs: Callable[[], int | None],
        rescue: Callable[[str, str], bool],
        epoch: Callable[[], int],
        overdue: Callable[[Overdue], None],
        report: Callable[[Incident], None],
        step_timeout_s: float,
        heartbeat_timeout_s: float,
    ) -> None:
        self._actors = actors
        self._more = more
        self._silence_s = silence_s
        self._num_signs = num_signs
        self._rescue = rescue
        self._epoch = epoch
        self._overdue = overdue
        self._report = report
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._watch = Watch(step_timeout_s)
        self._told: set[tuple[str, str]] = set()  # (actor, what) that is known to be late
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.clock: Callable[[], float] | None = None  # a test's; else the loop's
        self.verdict = Verdict()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look every `PERIOD_S` from now on."""
        self._loop = loop
        self.look()
        self._timer = loop.call_later(PERIOD_S, self._fire)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> Verdict:
        """Look once."""
        assert self._loop is not None
        now_s = self.clock() if self.clock is not None else self._loop.time()
        self.verdict = self._watch.look(now_s, self._sightings())
        for late in self.verdict.late:
            if (late.actor, late.what) not in self._told:
                self._tell(late, now_s)
        self._told = {(late.actor, late.what) for late in self.verdict.late}
        for actor in self._actors.values():
            actor.ask_turn()
        return self.verdict

    @property
    def stuck(self) -> tuple[Late, ...]:
        """Those late about whom nothing is being done: a worker is given a moment to be replaced."""
        return tuple(
            late
            for late in self.verdict.late
            if not is_beside(late.actor) and (not _is_workers(late) or late.for_s > _rescued_by_s(late))
        )

    def wait_s(self, actor: str) -> float:
        """How long `actor` has waited for its turn; 0 when all is well."""
        return self._watch.wait_s(actor)

    def dwell_s(self, actor: str) -> float:
        """How long `actor` has been in its state while the watchdog looked."""
        return self._watch.dwell_s(actor)

    def limit_s(self, state: StrEnum) -> float | None:
        """For how long an actor may be in `state`; None: any time."""
        return self._watch.limit_s(state)

    def _fire(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(PERIOD_S, self._fire)
        self.look()

    def _sightings(self) -> Iterable[Sighting]:
        for name, actor in self._actors.items():
            seen = actor.sighting()
            if seen is None:
                continue
            if name == WORKER:
                silent_s = self._silence_s()
                seen = msgspec.structs.replace(
                    seen,
                    silent_s=silent_s,
                    silence_limit_s=self._heartbeat_timeout_s,
                    num_signs=self._num_signs(),
                )
            yield seen
        yield from self._more()

    def _tell(self, late: Late, now_s: float) -> None:
        if _is_workers(late):
            self._overdue(Overdue(self._epoch(), late.sentence(), now_s))
        elif not is_beside(late.actor):
            self._report(Incident(kind="frozen", message=late.sentence(), action="/livez fails until it moves again"))
        elif not self._rescue(late.actor, late.sentence()):
            self._report(Incident(kind="frozen", message=late.sentence(), action="it is left behind"))


def is_beside(actor: str) -> bool:
    """True for what the engine serves without: a spare, and processes that are ending."""
    return actor == SPARE or actor.startswith(ENDING)


def _is_workers(late: Late) -> bool:
    """True for what the worker's machine can do something about; not when that machine is itself stuck."""
    return late.actor == WORKER and late.what != "turn"


def _rescued_by_s(late: Late) -> float:
    return late.limit_s + RESCUE_LIMIT_S
