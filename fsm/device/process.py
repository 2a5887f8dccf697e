"""One process that holds a device: what it was asked, by the worker or ahead of it, and whether its answers count.

    STARTING ──▶ IDLE ──Ask──▶ BUSY ──answer──▶ IDLE        READY ──Ask──▶ RUNNING ──answer──▶ READY
                  └──GoAhead──▶ AHEAD ──answer──▶ IDLE        └─Shut─▶ CLOSING
                  BUSY, AHEAD ──the answer to Warm──▶ READY
                               any of these ──End──▶ DYING ──Ended──▶ GONE

The worker waits for the answer to each of its jobs before it asks for the next, steps apart: the process has two of
them at a time, and answers them in order. A spare does what the worker would ask for ahead of it: its answers are kept
until they are asked for, and the job that is under way then is not begun again: unless the worker's cache has become
one of another size.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import DYING_LIMIT_S, ENDED, MEMORY_LIMIT_S, Dwell, any_time
from novainfer.fsm.core.machine import Guard, Machine, Table, ignore, never, on, stay, table
from novainfer.fsm.messages.events import Close, Fit, JobDone, JobFailed, Run

SPARE_EPOCH = -1  # of a process that works for no worker yet


class ProcessState(StrEnum):
    """What the process does."""

    STARTING = "STARTING"
    IDLE = "IDLE"
    AHEAD = "AHEAD"
    BUSY = "BUSY"
    READY = "READY"
    RUNNING = "RUNNING"
    CLOSING = "CLOSING"
    DYING = "DYING"
    GONE = "GONE"


S = ProcessState
COLD = (S.STARTING, S.IDLE, S.AHEAD, S.BUSY)  # its device cannot compute yet
WARM = (S.READY, S.RUNNING, S.CLOSING)
OVER = (S.DYING, S.GONE)


# ---- what comes to it ----------------------------------------------------------------------------------------------


class Started(msgspec.Struct, frozen=True):
    """The system has started the process."""

    serial: int
    pid: int


class StartFailed(msgspec.Struct, frozen=True):
    """The system has refused to start the process; `at_s` is when, on a clock that only grows."""

    serial: int
    message: str
    at_s: float


class Ask(msgspec.Struct, frozen=True):
    """The worker wants `job` done, and waits for the answer."""

    job: Any


class GoAhead(msgspec.Struct, frozen=True):
    """Do `job` before the worker asks for it."""

    job: Any


class Answered(msgspec.Struct, frozen=True):
    """The process has answered a job that was asked in `epoch`: JobDone, JobFailed, StepDone or StepFailed."""

    serial: int
    epoch: int
    answer: Any
    at_s: float = 0.0


class Adopt(msgspec.Struct, frozen=True):
    """It works for the worker of this epoch from now on."""

    epoch: int


class Shut(msgspec.Struct, frozen=True):
    """The worker has stopped: let the device be closed."""

    job: Close


class End(msgspec.Struct, frozen=True):
    """It is of no more use. `why` is a sentence; empty: it is dying by itself, and its end says why."""

    why: str


class Ended(msgspec.Struct, frozen=True):
    """The process is gone, and its memory with it; `sentence` says how, `at_s` when."""

    serial: int
    sentence: str
    at_s: float


# ---- what it wants done --------------------------------------------------------------------------------------------


class Tell(msgspec.Struct, frozen=True):
    """Effect: send `job` to the process."""

    serial: int
    epoch: int
    job: Any


class Finish(msgspec.Struct, frozen=True):
    """Effect: end the process at once; without a `why`, only make sure that it ends."""

    serial: int
    why: str


class OfAsk(Guard):
    """The answer is to the job under way, or to the step: the first of those that were asked."""

    name = "of what was asked"
    why = "nothing of the kind was asked, or it came twice"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        answer = event.answer
        is_job = isinstance(answer, JobDone | JobFailed)
        job, step_id = (answer.job, -1) if is_job else (Run.__name__, answer.step_id)
        return bool(machine.asked and machine.asked[0] == (job, event.epoch, step_id))


class Process(Machine):
    """See the module. `serial` tells the processes of one engine apart, and only grows."""

    TABLE: ClassVar[Table] = table(
        S,
        (Started, StartFailed, Ask, GoAhead, Answered, Adopt, Shut, End, Ended),
        on(S.STARTING, Started, "_started", S.IDLE),
        never((S.IDLE, S.AHEAD, S.BUSY, *WARM), Started, "it starts once"),
        never(OVER, Started, "what was ended while it started does not start any more"),
        on(S.STARTING, StartFailed, "_start_failed", S.GONE),
        never((S.IDLE, S.AHEAD, S.BUSY, *WARM), StartFailed, "it has started"),
        never(OVER, StartFailed, "what was ended while it started does not fail to"),
        on(S.IDLE, Ask, "_ask", S.BUSY, S.IDLE),
        on(S.READY, Ask, "_ask", S.RUNNING, S.READY),
        on(S.AHEAD, Ask, "_ask_ahead", S.BUSY, S.AHEAD),
        stay(S.RUNNING, Ask, "_ask_behind"),
        never(S.BUSY, Ask, "the worker waits for the job before"),
        never(S.STARTING, Ask, "the worker hears first that it has started"),
        never((S.CLOSING, *OVER), Ask, "it is not the worker's any more"),
        on(S.IDLE, GoAhead, "_go_ahead", S.AHEAD),
        never((S.AHEAD, S.BUSY, *WARM, S.STARTING, *OVER), GoAhead, "only a spare with nothing to do goes ahead"),
        on(S.AHEAD, Answered, "_got_ahead", S.IDLE, S.READY, only=OfAsk),
        on(S.BUSY, Answered, "_answered", S.IDLE, S.READY, only=OfAsk),
        on(S.RUNNING, Answered, "_answered", S.READY, S.RUNNING, only=OfAsk),
        stay(S.CLOSING, Answered, "_closed", only=OfAsk),
        ignore((S.IDLE, S.READY), Answered, "nothing was asked, or it came twice"),
        ignore(S.DYING, Answered, "it is not heard any more"),
        never((S.STARTING, S.GONE), Answered, "it is not there"),
        stay((S.IDLE, S.AHEAD, S.READY), Adopt, "_adopt"),
        never((S.STARTING, S.BUSY, S.RUNNING, S.CLOSING, *OVER), Adopt, "only a spare that has shown its life"),
        on((S.READY, S.RUNNING), Shut, "_shut", S.CLOSING),
        ignore(COLD, Shut, "nothing is lost when it is ended, and it is stopped in a hurry"),
        never((S.CLOSING, *OVER), Shut, "a worker is stopped once"),
        on((*COLD, *WARM), End, "_end", S.DYING),
        ignore(S.DYING, End, "it is ending already"),
        never(S.GONE, End, "it is forgotten"),
        on((*COLD, *WARM, S.DYING), Ended, "_ended", S.GONE),
        never(S.GONE, Ended, "it ends once"),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.STARTING: any_time("it starts within a turn"),
        S.IDLE: any_time("it waits for a job"),
        S.AHEAD: Dwell(MEMORY_LIMIT_S, "a spare that gets on, however slowly", by_signs=True),
        S.BUSY: any_time("the worker's state has a deadline for its job"),
        S.READY: any_time("it waits for a step"),
        S.RUNNING: any_time("the worker's state has a deadline for its job"),
        S.CLOSING: any_time("a timer of its own ends it"),
        S.DYING: Dwell(DYING_LIMIT_S, "the system takes back what it held"),
        S.GONE: ENDED,
    }

    def __init__(self, serial: int, epoch: int) -> None:
        super().__init__(S.STARTING)
        self.serial = serial
        self.epoch = epoch
        self.pid = 0
        self._ahead: Any = None  # the job that was begun last before it was asked for
        self.asked: list[tuple[str, int, int]] = []  # jobs under way: of which kind, asked in which epoch, which step
        self.ahead: dict[str, JobDone] = {}  # answers that were not asked for yet

    @property
    def is_ready_to_step_in(self) -> bool:
        """True once it has done all that a worker needs, ahead."""
        return self.state is S.READY

    @property
    def is_warm(self) -> bool:
        """True once its device can compute."""
        return self.state in WARM

    @property
    def job(self) -> str:
        """The job under way; empty when there is none."""
        return self.asked[0][0] if self.asked else ""

    def _started(self, event: Started) -> ProcessState:
        self.pid = event.pid
        return S.IDLE

    def _start_failed(self, _: StartFailed) -> ProcessState:
        return S.GONE

    def _tell(self, job: Any) -> None:
        self.asked.append((type(job).__name__, self.epoch, job.plan.step_id if type(job) is Run else -1))
        self._start(Tell(self.serial, self.epoch, job))

    def _take_ahead(self, job: Any) -> bool:
        """Answer from what was done ahead, if it was."""
        answer = self.ahead.pop(type(job).__name__, None)
        if answer is None:
            return False
        if isinstance(job, Fit) and job.num_blocks != answer.value["num_blocks"]:
            self.ahead.pop("Warm", None)
            return False
        self._send("worker", msgspec.structs.replace(answer, epoch=self.epoch))
        return True

    def _ask(self, event: Ask) -> StrEnum:
        if self._take_ahead(event.job):
            return self.state
        self._tell(event.job)
        return S.BUSY if self.state is S.IDLE else S.RUNNING

    def _ask_behind(self, event: Ask) -> ProcessState:
        self._tell(event.job)
        return S.RUNNING

    def _ask_ahead(self, event: Ask) -> ProcessState:
        if self._take_ahead(event.job):
            return S.AHEAD
        if not _is_same(self._ahead, event.job):
            self.asked.clear()
            self._tell(event.job)  # after the one under way, whose answer is not needed then
        return S.BUSY

    def _go_ahead(self, event: GoAhead) -> ProcessState:
        self._ahead = event.job
        self._tell(event.job)
        return S.AHEAD

    def _got_ahead(self, event: Answered) -> ProcessState:
        job = self.asked.pop(0)[0]
        if not isinstance(event.answer, JobDone):
            return S.IDLE
        self.ahead[job] = event.answer
        return S.READY if job == "Warm" else S.IDLE

    def _answered(self, event: Answered) -> StrEnum:
        job = self.asked.pop(0)[0]
        answer = event.answer
        if isinstance(answer, JobDone | JobFailed):  # it may have been asked before the worker of this epoch was
            answer = msgspec.structs.replace(answer, epoch=self.epoch)
        self._send("worker", answer)
        if self.state is S.RUNNING:
            return S.RUNNING if self.asked else S.READY
        if job == "Warm" and isinstance(answer, JobDone):
            return S.READY
        return S.IDLE

    def _closed(self, event: Answered) -> ProcessState:
        self.asked.clear()
        self._send("worker", event.answer)
        return S.CLOSING

    def _adopt(self, event: Adopt) -> StrEnum:
        self.epoch = event.epoch
        return self.state

    def _shut(self, event: Shut) -> ProcessState:
        self.asked.clear()  # what runs is finished first, and its answer is of no use any more
        self._tell(event.job)
        return S.CLOSING

    def _end(self, event: End) -> ProcessState:
        self._start(Finish(self.serial, event.why))
        return S.DYING

    def _ended(self, _: Ended) -> ProcessState:
        return S.GONE


def _is_same(job: Any, asked: Any) -> bool:
    """Whether the answer to `job` is one to what was asked."""
    if type(job) is not type(asked):
        return False
    return not isinstance(job, Fit) or job.num_blocks == asked.num_blocks
