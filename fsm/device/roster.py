"""The roster: which process is the worker's, which one stands by, and what becomes of both when one of them is lost.

    NEW ──Spawn──▶ FINDING ──Found──▶ SINGLE ◀──a spare is lost, a spare is started──▶ PAIR
                                       │  ▲                                             │
                       the worker's    │  │ Alive, ProbeOver                            │ the worker's
                       process is lost ▼  │                                             ▼ process is lost
                                     EMPTY PROBING ◀────────────Spawn──────────────── SPARED
                                       └─Spawn─▶ SINGLE

A spare is started when the worker is warm, and loads ahead; where the KV cache takes memory only when it is written, it
goes on to Fit and Warm. It takes over when it has given a sign of life after it was asked for one: whatever killed the
worker may have killed the spare as well, and that is one loss. What becomes of a spare is an incident, and no loss.
One whose weights are in another precision than the next worker's is ended, and not missed. One whose cache is of
another size than the next worker's makes another.

Where it takes memory at once, a worker makes none while a process that was ended may still hold some: in HOLDING it
waits for the end of all of them, and at most `MEMORY_S`.

Any state goes to CLOSING when the worker has stopped, and to STOPPED when all processes are to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import Dwell, any_time
from novainfer.fsm.core.machine import Guard, Machine, Send, Table, ignore, never, on, stay, table, timer
from novainfer.fsm.device.process import (
    SPARE_EPOCH,
    Adopt,
    Answered,
    Ask,
    End,
    Ended,
    GoAhead,
    Process,
    ProcessState,
    Shut,
    Started,
    StartFailed,
)
from novainfer.fsm.messages.events import (
    Close,
    DeviceLost,
    Fit,
    Incident,
    JobDone,
    JobFailed,
    Kill,
    Load,
    Spawn,
    Stop,
    Warm,
)

PROBE_S = 1.0  # for a spare's sign of life: ten beats; to start another process takes about as long
MEMORY_S = 10.0  # for what a killed process held: 0.5 s for each GiB; one that takes longer may never end
CLOSE_S = 5.0  # for a device to be closed; what its process holds goes with it in any case
SPARE_DEATHS_MAX = 3  # within
SPARE_WINDOW_S = 600.0  # seconds; after that many, no spare is started until the worker has needed a new process


class RosterState(StrEnum):
    """Which processes there are."""

    NEW = "NEW"  # none, and where the model lies is not known
    FINDING = "FINDING"  # the worker's, which waits until the model is found
    SINGLE = "SINGLE"  # the worker's
    HOLDING = "HOLDING"  # the worker's, which makes no cache until the memory of those before it is free
    PAIR = "PAIR"  # the worker's and a spare
    SPARED = "SPARED"  # a spare
    PROBING = "PROBING"  # a spare, which takes over as soon as it shows that it lives
    EMPTY = "EMPTY"  # none
    CLOSING = "CLOSING"  # the worker has stopped
    STOPPED = "STOPPED"  # all end


S = RosterState
UP = (S.FINDING, S.SINGLE, S.HOLDING, S.PAIR, S.SPARED, S.PROBING, S.EMPTY)
DOWN = (S.CLOSING, S.STOPPED)
TOLD = "it is lost already, and that was told"


class Found(msgspec.Struct, frozen=True):
    """The model is found, which may mean that it was fetched; or it cannot be, and `why_not` says why."""

    why_not: str | None
    at_s: float


class Alive(msgspec.Struct, frozen=True):
    """The process has said something since it was asked for a sign of life."""

    serial: int


class ProbeOver(msgspec.Struct, frozen=True):
    """Timer: so long has the spare said nothing."""

    at_s: float = 0.0


class Dying(msgspec.Struct, frozen=True):
    """The process is ending, and its memory is not free yet: Ended says when it is."""

    serial: int
    sentence: str
    at_s: float


class SpareOverdue(msgspec.Struct, frozen=True):
    """The watchdog: this spare gives no sign of life, or does not get on."""

    serial: int
    message: str
    at_s: float


class HoldOver(msgspec.Struct, frozen=True):
    """Timer: so long has the worker's process waited for memory, which may never be free."""


class CloseOver(msgspec.Struct, frozen=True):
    """Timer: the device has had the time to close."""


class Open(msgspec.Struct, frozen=True):
    """Effect: start a process, which will load weights in `precision`; Started or StartFailed comes back."""

    serial: int
    precision: str | None = None


class Find(msgspec.Struct, frozen=True):
    """Effect: find the model; Found comes back."""


class Greet(msgspec.Struct, frozen=True):
    """Effect: tell the process which device it is to be."""

    serial: int
    epoch: int


class Probe(msgspec.Struct, frozen=True):
    """Effect: take what the process has said, and ask it for a sign of life: Alive, if one comes."""

    serial: int


class OfWorker(Guard):
    """The process is the worker's."""

    name = "of the worker's process"
    why = "the process that says it was ended"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return machine.worker is not None and event.serial == machine.worker.serial


class OfSpare(Guard):
    """The process is the spare."""

    name = "of the spare"
    why = "the process that says it, or of which it is said, was ended"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return machine.spare is not None and event.serial == machine.spare.serial


class Roster(Machine):
    """See the module."""

    TABLE: ClassVar[Table] = table(
        S,
        (
            *(Spawn, Kill, Ask, Close, Started, StartFailed, Found, Answered, Alive, ProbeOver, Dying, Ended),
            *(SpareOverdue, Stop, HoldOver, CloseOver),
        ),
        on(S.NEW, Spawn, "_find", S.FINDING),
        on(S.EMPTY, Spawn, "_spawn", S.SINGLE),
        on(S.SPARED, Spawn, "_probe", S.PROBING, S.SINGLE),
        never(
            (S.FINDING, S.SINGLE, S.HOLDING, S.PAIR, S.PROBING),
            Spawn,
            "a worker ends its process before it wants another",
        ),
        never(S.CLOSING, Spawn, "the worker has stopped"),
        ignore(S.STOPPED, Spawn, "nothing is started any more"),
        on((S.FINDING, S.SINGLE, S.HOLDING), Kill, "_kill", S.EMPTY),
        on(S.PAIR, Kill, "_kill", S.SPARED),
        on(S.PROBING, Kill, "_kill_probed", S.EMPTY),
        ignore((S.SPARED, S.EMPTY), Kill, TOLD),
        never(S.NEW, Kill, "there was never a process"),
        never(S.CLOSING, Kill, "the worker has stopped"),
        ignore(S.STOPPED, Kill, "all end"),
        on(S.SINGLE, Ask, "_ask", S.SINGLE, S.PAIR, S.HOLDING),
        stay(S.PAIR, Ask, "_ask"),
        ignore((S.SPARED, S.EMPTY), Ask, TOLD),
        never((S.NEW, S.FINDING, S.PROBING), Ask, "the worker waits for its process"),
        never(S.HOLDING, Ask, "the worker waits for its cache"),
        never(S.CLOSING, Ask, "the worker has stopped"),
        ignore(S.STOPPED, Ask, "all end"),
        on((S.NEW, *UP), Close, "_close", S.CLOSING),
        never(S.CLOSING, Close, "a worker is stopped once"),
        ignore(S.STOPPED, Close, "all end"),
        stay((S.FINDING, S.SINGLE, S.PAIR, S.SPARED, S.PROBING, S.CLOSING), Started, "_started"),
        never((S.NEW, S.HOLDING, S.EMPTY, S.STOPPED), Started, "what was to start has started, or was ended"),
        on((S.FINDING, S.SINGLE), StartFailed, "_start_failed", S.EMPTY),
        on(S.PAIR, StartFailed, "_spare_not_started", S.SINGLE),
        on(S.SPARED, StartFailed, "_spare_not_started", S.EMPTY),
        on(S.PROBING, StartFailed, "_probed_not_started", S.SINGLE),
        stay(S.CLOSING, StartFailed, "_never_started"),
        never((S.NEW, S.HOLDING, S.EMPTY, S.STOPPED), StartFailed, "what was to start has started, or was ended"),
        on(S.FINDING, Found, "_found", S.SINGLE, S.EMPTY),
        ignore((S.EMPTY, *DOWN), Found, "no process waits for it any more"),
        never((S.NEW, S.SINGLE, S.HOLDING, S.PAIR, S.SPARED, S.PROBING), Found, "it is found once"),
        on(S.SINGLE, Answered, "_pass_and_note", S.SINGLE, S.PAIR, only=OfWorker),
        stay((S.HOLDING, S.PAIR, *DOWN), Answered, "_pass_and_note", only=OfWorker),
        on(S.PAIR, Answered, "_spare_answered", S.PAIR, S.SINGLE, only=OfSpare),
        on(S.SPARED, Answered, "_spare_answered", S.SPARED, S.EMPTY, only=OfSpare),
        on(S.PROBING, Answered, "_spare_answered", S.PROBING, S.SINGLE, only=OfSpare),
        stay(S.CLOSING, Answered, "_answered_late", only=OfSpare),
        ignore(S.EMPTY, Answered, "the process that says it was ended"),
        ignore(S.FINDING, Answered, "nothing was asked yet"),
        never(S.NEW, Answered, "there was never a process"),
        on(S.PROBING, Alive, "_alive", S.SINGLE, only=OfSpare),
        ignore(
            (S.SINGLE, S.HOLDING, S.PAIR, S.SPARED, S.EMPTY, *DOWN),
            Alive,
            "it has shown that before, or it is too late",
        ),
        never((S.NEW, S.FINDING), Alive, "there is no spare before the worker"),
        timer(S.PROBING, ProbeOver, "_probe_over", S.SINGLE),
        on(S.PAIR, Dying, "_dying", S.PAIR, S.SPARED, only=OfWorker),
        on(S.PAIR, Dying, "_spare_dying", S.SINGLE, only=OfSpare),
        on(S.SPARED, Dying, "_spare_dying", S.EMPTY, only=OfSpare),
        on(S.PROBING, Dying, "_spare_dying", S.SINGLE, only=OfSpare),
        ignore((S.FINDING, S.SINGLE, S.HOLDING), Dying, "a new process needs its memory, which its end gives back"),
        ignore((S.EMPTY, *DOWN), Dying, "its end is expected"),
        never(S.NEW, Dying, "there was never a process"),
        on((S.FINDING, S.SINGLE, S.HOLDING), Ended, "_worker_ended", S.EMPTY, only=OfWorker),
        on(S.PAIR, Ended, "_worker_ended", S.SPARED, only=OfWorker),
        on(S.PAIR, Ended, "_spare_ended", S.SINGLE, S.PAIR, only=OfSpare),
        on(S.SPARED, Ended, "_spare_ended", S.EMPTY, only=OfSpare),
        on(S.PROBING, Ended, "_spare_ended", S.SINGLE, only=OfSpare),
        never(S.FINDING, Ended, "there was no process before the worker's"),
        on(S.SINGLE, Ended, "_ended_beside", S.SINGLE, S.PAIR),
        on(S.HOLDING, Ended, "_ended_while_held", S.HOLDING, S.SINGLE),
        stay((S.PAIR, S.SPARED, S.PROBING), Ended, "_forget"),
        stay((S.EMPTY, *DOWN), Ended, "_forget"),
        never(S.NEW, Ended, "there was never a process"),
        on((S.PAIR, S.PROBING), SpareOverdue, "_spare_overdue", S.SINGLE, only=OfSpare),
        on(S.SPARED, SpareOverdue, "_spare_overdue", S.EMPTY, only=OfSpare),
        ignore((S.SINGLE, S.HOLDING, S.EMPTY, *DOWN), SpareOverdue, "it has taken over, or is ending"),
        never((S.NEW, S.FINDING), SpareOverdue, "there is no spare before the worker"),
        on((S.NEW, *UP, S.CLOSING), Stop, "_stop", S.STOPPED),
        ignore(S.STOPPED, Stop, "stopping twice is stopping once"),
        timer(S.HOLDING, HoldOver, "_hold_over", S.SINGLE),
        timer(S.STOPPED, CloseOver, "_close_over", S.STOPPED),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        **dict.fromkeys(S, any_time("its processes and the worker have deadlines of their own")),
        **dict.fromkeys((S.PROBING, S.HOLDING), any_time("a timer of its own ends it")),
    }

    def __init__(self, *, warm_spare: bool = False) -> None:
        super().__init__(S.NEW)
        self._warm_spare = warm_spare
        self._num_started = 0
        self.worker: Process | None = None
        self.spare: Process | None = None
        self.ending: dict[int, Process] = {}  # ended, and not reaped yet
        self._epoch = 0  # that the spare is probed for
        self._precision: str | None = None  # of the worker's weights, and of the spare's
        self._is_new = False  # the worker's process was not warm yet: then a spare is started
        self._num_blocks: int | None = None  # of the last KV cache, which a spare makes as large
        self._kv_is_lazy = False  # what Load said
        self._held: Ask | None = None  # what HOLDING holds back
        self._deaths: deque[float] = deque(maxlen=SPARE_DEATHS_MAX)  # of spares
        self._lost_spare: int | None = None  # that is replaced when it is gone

    # ---- what the worker wants -----------------------------------------------------------------------------------

    def _open(self, epoch: int) -> Process:
        process = self._nest(Process(self._num_started, epoch))
        self._num_started += 1
        self._start(Open(process.serial, self._precision))
        return process

    def _open_worker(self, epoch: int) -> RosterState:
        self.worker = self._open(epoch)
        self._is_new = True
        return S.SINGLE

    def _pass(self, process: Process, event: Any) -> None:
        self._effects.extend(process.handle(event))

    def _find(self, event: Spawn) -> RosterState:
        self._open_worker(event.epoch)
        self._start(Find())
        return S.FINDING

    def _spawn(self, event: Spawn) -> RosterState:
        self._precision = event.precision
        return self._open_worker(event.epoch)

    def _probe(self, event: Spawn) -> RosterState:
        assert self.spare is not None
        if event.precision != self._precision:
            self._end(self.spare, "its weights are in another precision")
            self.spare = None
            return self._spawn(event)
        self._epoch = event.epoch
        self._start(Probe(self.spare.serial))
        self._until_left(PROBE_S, ProbeOver())
        return S.PROBING

    def _end(self, process: Process, why: str) -> None:
        self._pass(process, End(why))
        self.ending[process.serial] = process

    def _kill(self, _: Kill) -> RosterState:
        assert self.worker is not None
        self._end(self.worker, "it was ended")
        self.worker = None
        return S.EMPTY if self.spare is None else S.SPARED

    def _kill_probed(self, _: Kill) -> RosterState:
        assert self.spare is not None
        self._end(self.spare, "it was ended before it had taken over")
        self.spare = None
        return S.EMPTY

    def _ask(self, event: Ask) -> StrEnum:
        worker = self.worker
        assert worker is not None
        if isinstance(event.job, Fit) and worker.is_warm:  # in the place of the cache that it has
            self._pass(worker, Adopt(event.job.epoch))
        elif isinstance(event.job, Fit) and self.ending and not self._kv_is_lazy:
            self._held = event
            self._until_left(MEMORY_S, HoldOver())
            return S.HOLDING
        return self._pass_and_note(event)

    def _go_on(self) -> RosterState:
        """Nothing is waited for any more."""
        assert self.worker is not None
        assert self._held is not None
        self._pass(self.worker, self._held)
        self._held = None
        return S.SINGLE

    def _ended_while_held(self, event: Ended) -> RosterState:
        self._forget(event)
        return S.HOLDING if self.ending else self._go_on()

    def _hold_over(self, _: HoldOver) -> RosterState:
        return self._go_on()

    def _pass_and_note(self, event: Ask | Answered) -> StrEnum:
        """The worker's process takes `event`; what it answers may let a spare be started."""
        worker = self.worker
        assert worker is not None
        effects = worker.handle(event)
        self._effects.extend(effects)
        answers = [effect.event for effect in effects if isinstance(effect, Send)]
        for answer in answers:
            if not isinstance(answer, JobDone):
                continue
            if answer.job == "Load":
                self._kv_is_lazy = answer.value.get("kv_is_lazy", False)
            elif answer.job == "Fit":
                self._num_blocks = answer.value["num_blocks"]
            elif answer.job == "Warm":  # it may have found room for less
                self._num_blocks = (answer.value or {}).get("num_blocks", self._num_blocks)
                if self._is_new and self.state is S.SINGLE:
                    self._is_new = False
                    return self._stand_by()
        return self.state

    def _close(self, event: Close) -> RosterState:
        if self.worker is not None:
            self._pass(self.worker, Shut(event))
        return S.CLOSING

    # ---- what becomes of processes -------------------------------------------------------------------------------

    def _started(self, event: Started) -> StrEnum:
        process = self._of(event.serial)
        assert process is not None
        self._pass(process, event)
        if process is self.spare:
            self._start(Greet(process.serial, SPARE_EPOCH))
            self._pass(process, GoAhead(Load(SPARE_EPOCH, self._precision)))
        elif self.state is S.SINGLE:
            self._greet(process)
        return self.state

    def _greet(self, process: Process) -> None:
        self._start(Greet(process.serial, process.epoch))
        self._send("worker", JobDone("Spawn", {"pid": process.pid, "spare": False}, process.epoch))

    def _start_failed(self, event: StartFailed) -> RosterState:
        worker, self.worker = self.worker, None
        assert worker is not None
        self._pass(worker, event)
        message = f"the device's process cannot be started: {event.message}"
        self._send("worker", JobFailed("Spawn", message, worker.epoch, event.at_s))
        return S.EMPTY

    def _spare_not_started(self, event: StartFailed) -> RosterState:
        assert self.spare is not None
        self._pass(self.spare, event)
        self.spare = None
        self._say(f"a spare cannot be started: {event.message}", "there is none for now")
        return S.EMPTY if self.worker is None else S.SINGLE

    def _never_started(self, event: StartFailed) -> RosterState:
        process = self._of(event.serial)
        assert process is not None
        self._pass(process, event)
        if process is self.worker:
            self.worker = None
        else:
            self.spare = None
        return S.CLOSING

    def _found(self, event: Found) -> RosterState:
        worker = self.worker
        assert worker is not None
        if event.why_not is None:
            self._greet(worker)
            return S.SINGLE
        self._end(worker, "there is no model for it")
        self.worker = None
        self._send("worker", JobFailed("Spawn", event.why_not, worker.epoch, event.at_s))
        return S.EMPTY

    def _spare_answered(self, event: Answered) -> StrEnum:
        spare = self.spare
        assert spare is not None
        job = spare.job
        self._pass(spare, event)
        return self.state if spare.job == job else self._went_ahead(spare, event)  # the process knows what was asked

    def _answered_late(self, event: Answered) -> StrEnum:
        assert self.spare is not None
        self._pass(self.spare, event)
        return self.state

    def _went_ahead(self, spare: Process, event: Answered) -> StrEnum:
        """Let the spare do what the worker would ask for next, as far as that takes nothing from the worker."""
        answer = event.answer
        if isinstance(answer, JobFailed):
            if answer.job == "Load":
                return self._drop_spare(f"it could not load the model: {answer.message}", event.at_s)
            message = f"the spare's {answer.job} failed: {answer.message}"
            self._say(message, "it is done again when the worker needs it")
        elif answer.job == "Load" and answer.value.get("kv_is_lazy", False) and self._num_blocks is not None:
            self._pass(spare, GoAhead(Fit(SPARE_EPOCH, self._num_blocks)))
        elif answer.job == "Fit":
            self._pass(spare, GoAhead(Warm(SPARE_EPOCH, measures=False)))
        return self.state

    def _dying(self, event: Dying) -> StrEnum:
        worker, spare = self.worker, self.spare
        assert worker is not None
        assert spare is not None
        if not spare.is_ready_to_step_in:
            return S.PAIR  # another process would need the memory, which the end of this one gives back
        self._end(worker, "")  # should nothing of it have ended but what told so
        return self._lose_worker(event.sentence, event.at_s)

    def _spare_dying(self, event: Dying) -> StrEnum:
        return self._drop_spare("", event.at_s, event.sentence)

    def _spare_overdue(self, event: SpareOverdue) -> StrEnum:
        return self._drop_spare(event.message, event.at_s)

    def _worker_ended(self, event: Ended) -> RosterState:
        assert self.worker is not None
        self._pass(self.worker, event)
        return self._lose_worker(event.sentence, event.at_s)

    def _ended_beside(self, event: Ended) -> StrEnum:
        self._forget(event)
        return self._stand_by_again(event.serial)

    def _spare_ended(self, event: Ended) -> StrEnum:
        assert self.spare is not None
        self._pass(self.spare, event)
        self._lose_spare(event.serial, event.sentence, event.at_s)
        if self.state is S.PROBING:
            return self._take_another()
        if self.worker is None:
            return S.EMPTY
        return self._stand_by_again(event.serial) if self._lost_spare == event.serial else S.SINGLE

    def _forget(self, event: Ended) -> StrEnum:
        process = self.ending.pop(event.serial, None) or self._of(event.serial)
        assert process is not None
        if process in (self.worker, self.spare):
            self._pass(process, event)
            self.worker, self.spare = (None if p is process else p for p in (self.worker, self.spare))
        else:
            self._pass(process, event)
        return self.state

    def _lose_worker(self, sentence: str, at_s: float) -> RosterState:
        worker, self.worker = self.worker, None
        assert worker is not None
        self._send("worker", DeviceLost(worker.epoch, sentence, at_s))
        return S.EMPTY if self.spare is None else S.SPARED

    # ---- the spare -----------------------------------------------------------------------------------------------

    def _stand_by(self) -> RosterState:
        """The worker is warm: start a spare, if there is to be one."""
        if not self._warm_spare:
            return S.SINGLE
        self._lost_spare = None
        self.spare = self._open(SPARE_EPOCH)
        return S.PAIR

    def _stand_by_again(self, serial: int) -> StrEnum:
        """What is left of this process is gone: if it was a spare that is to be replaced, there is room for another."""
        if serial != self._lost_spare or self.worker is None or self.spare is not None:
            return self.state
        self._lost_spare = None
        return self._stand_by() if self.worker.is_warm else S.SINGLE

    def _drop_spare(self, why: str, at_s: float, sentence: str = "") -> StrEnum:
        """The spare is of no more use, or is dying."""
        spare = self.spare
        assert spare is not None
        self._end(spare, why)
        self._lose_spare(spare.serial, sentence or f"the spare process {spare.pid} was ended: {why}", at_s)
        if self.state is S.PROBING:
            return self._take_another()
        return S.EMPTY if self.worker is None else S.SINGLE

    def _lose_spare(self, serial: int, message: str, at_s: float) -> None:
        """It is an incident, and no loss of the worker's. It is replaced, but not for ever."""
        self.spare = None
        deaths = self._deaths
        deaths.append(at_s)
        if len(deaths) == SPARE_DEATHS_MAX and at_s - deaths[0] < SPARE_WINDOW_S:
            times = f"{SPARE_DEATHS_MAX} within {SPARE_WINDOW_S:g} s"
            self._say(message, f"there is none until the worker was replaced: {times} were lost")
            self._lost_spare = None
        else:
            self._say(message, "another one is started as soon as the worker is warm")
            self._lost_spare = serial

    def _say(self, message: str, action: str) -> None:
        self._send("incidents", Incident(kind="spare", message=message, action=action))

    # ---- taking over ---------------------------------------------------------------------------------------------

    def _alive(self, _: Alive) -> RosterState:
        spare = self.spare
        assert spare is not None
        self.worker, self.spare, self._is_new = spare, None, True
        self._pass(spare, Adopt(self._epoch))
        self._send("worker", JobDone("Spawn", {"pid": spare.pid, "spare": True}, self._epoch))
        return S.SINGLE

    def _take_another(self) -> RosterState:
        """There is no spare to take over: start a process."""
        return self._open_worker(self._epoch)

    def _probed_not_started(self, event: StartFailed) -> RosterState:
        self._spare_not_started(event)
        return self._take_another()

    def _probe_over(self, event: ProbeOver) -> StrEnum:
        return self._drop_spare("it was silent when it was needed", event.at_s)

    # ---- the end -------------------------------------------------------------------------------------------------

    def _stop(self, _: Stop) -> RosterState:
        for process in (self.worker, self.spare):
            if process is not None and process.state is not ProcessState.CLOSING:
                self._end(process, "the engine stops")
        closing = self.worker
        is_closing = closing is not None and closing.state is ProcessState.CLOSING
        self.worker, self.spare = closing if is_closing else None, None
        if is_closing:
            self._until_left(CLOSE_S, CloseOver())
        return S.STOPPED

    def _close_over(self, _: CloseOver) -> RosterState:
        if self.worker is not None:
            self._end(self.worker, "its device did not close in time")
            self.worker = None
        return S.STOPPED

    def _of(self, serial: int) -> Process | None:
        """The process, unless it is ending."""
        for process in (self.worker, self.spare):
            if process is not None and process.serial == serial:
                return process
        return None
