"""All actors at a glance: what each does, since when, and whether all of them move; how to freeze one for a drill."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from novainfer.actors.core.mailbox import Actor
from novainfer.actors.core.watchdog import WORKER, Watchdog
from novainfer.actors.grammar.grammars import Grammars
from novainfer.actors.inspection.frames import ActorNow
from novainfer.actors.inspection.inspector import shown_name
from novainfer.actors.inspection.records import ActorRecord, HealthRecord
from novainfer.actors.tokenizer.threads import TokenizerThreads
from novainfer.fsm.engine import DEVICELESS, EngineState
from novainfer.fsm.health import RECOVERY_READY_S
from novainfer.fsm.messages.errors import InvalidParameter

ENGINE, SCHEDULER, TOKENIZER = "engine", "scheduler", "tokenizer"
FREEZE_ACTOR, THAW_ACTOR = "freeze_actor", "thaw_actor"


class Overview:
    """Of these actors, and of the threads of tokenizer and grammars. `worker_pid()` is the device's process."""

    def __init__(
        self,
        actors: Mapping[str, Actor],
        watchdog: Watchdog,
        *,
        threads: TokenizerThreads,
        grammars: Grammars,
        worker_pid: Callable[[], int],
    ) -> None:
        self._actors = actors
        self._watchdog = watchdog
        self._threads = threads
        self._grammars = grammars
        self._worker_pid = worker_pid

    def actors(self) -> list[ActorRecord]:
        """Each actor's state, dwell time and mailbox depth, and the process it lives in."""
        records = []
        for name, actor in self._actors.items():
            found = actor.statistics()
            records.append(
                ActorRecord(
                    name=shown_name(name),
                    state=found.state,
                    dwell_s=round(found.dwell_s, 6),
                    mailbox_depth=found.mailbox_depth,
                    pid=self._worker_pid() if name == WORKER else os.getpid(),
                    handled_total=found.handled_total,
                    wait_s=round(self._watchdog.wait_s(name), 6),
                )
            )
        threads = self._threads
        records.append(
            _of_thread(TOKENIZER, threads.sighting().state, threads.since_s, threads.num_waiting, threads.num_done)
        )
        records += [
            _of_thread(name, state, thread.since_s, thread.num_waiting, thread.num_done)
            for name, state, thread in self._grammars.threads()
        ]
        return records

    def now(self, *, restarts: int, rung: str | None) -> list[ActorNow]:
        """As the page is told of them: `restarts` of the worker, and the scheduler's `rung`."""
        now, found = time.time(), []
        states: dict[str, StrEnum] = {TOKENIZER: self._threads.sighting().state}
        states |= {name: state for name, state, _ in self._grammars.threads()}
        states |= {shown_name(name): actor.machine.state for name, actor in self._actors.items() if actor.machine}
        for record in self.actors():
            actor = self._actors.get(WORKER if record.name == shown_name(WORKER) else record.name)
            found.append(
                ActorNow(
                    name=record.name,
                    state=record.state,
                    since=round(now - record.dwell_s, 2),
                    deadline_s=self._watchdog.limit_s(states[record.name]) if record.name in states else None,
                    mailbox_depth=record.mailbox_depth,
                    mailbox_max=actor.statistics().mailbox_max if actor is not None else None,
                    handled_total=record.handled_total,
                    restarts=restarts if record.name == shown_name(WORKER) else 0,
                    rung=rung if record.name == SCHEDULER else None,
                    pid=record.pid,
                )
            )
        return found

    def health(self, *, state: str, is_ready: bool, why_not: str | None) -> HealthRecord:
        """Whether everything moves, and whether a request would be taken; `why_not` is what is known beside it."""
        verdict, stuck = self._watchdog.verdict, self._watchdog.stuck
        reason = why_not
        if reason is None and stuck:
            reason = "; ".join(late.sentence() for late in stuck)
        away_s = self._watchdog.dwell_s(ENGINE) if state in DEVICELESS else 0.0
        is_back_late = away_s > RECOVERY_READY_S
        if reason is None and is_back_late:
            what = "was lost" if state == EngineState.RECOVERING else "began to be reconfigured"
            reason = f"the worker {what} {away_s:.0f} s ago, and is not back yet: requests wait for it"
        return HealthRecord(
            is_live=not stuck and why_not is None,
            is_ready=is_ready and not stuck and not is_back_late,
            state=state,
            reason=reason,
            late=list(verdict.late),
            lag_s=verdict.lag_s,
        )

    def freeze(self, kind: str, actor: str | None = None, **how: Any) -> None:
        """Stop this actor's turns, or let it take them again; raises `InvalidParameter` when there is no such actor."""
        if how:
            raise InvalidParameter(
                f'{", ".join(how)}: a fault "{kind}" takes nothing but an actor', param=next(iter(how))
            )
        places: dict[str, Actor | TokenizerThreads] = {shown_name(name): place for name, place in self._actors.items()}
        places |= self._actors
        places[TOKENIZER] = self._threads
        if actor is None or actor not in places:
            names = ", ".join([*map(shown_name, self._actors), TOKENIZER])
            what = "actor is required" if actor is None else f"there is no actor {actor!r}"
            raise InvalidParameter(f"{what}: it is one of {names}", param="actor")
        if kind == THAW_ACTOR:
            places[actor].thaw()
        else:
            places[actor].freeze()


def _of_thread(name: str, state: object, since_s: float, num_waiting: int, num_done: int) -> ActorRecord:
    return ActorRecord(
        name=name,
        state=str(state),
        dwell_s=round(time.monotonic() - since_s, 6),
        mailbox_depth=num_waiting,
        pid=os.getpid(),
        handled_total=num_done,
        wait_s=0.0,
    )
