"""A device in a process of its own: started, talked to, replaced when the worker's machine says so, and ended.

`fsm/device/roster.py` decides which process is the worker's and which one stands by, `fsm/device/process.py` what each
was asked; this performs, and says what the processes said. Machines take one event at a time, so what one effect brings
at once (a process that has started) waits until all effects before it are performed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import msgspec

from novainfer.actors.core.watchdog import ENDING, SPARE
from novainfer.actors.device.child import Child
from novainfer.actors.device.device import sentence_of
from novainfer.actors.device.faulty import injection
from novainfer.actors.device.link import Deliver
from novainfer.actors.device.spec import DeviceSpec
from novainfer.actors.device.wire import Beat, Hello, LogLine, Ping, Progress, UnsendableError, Unsent, WithoutGraphs
from novainfer.fsm.core.dwell import DYING_LIMIT_S
from novainfer.fsm.core.machine import After, Drop, Effect, Machine, Send, Start
from novainfer.fsm.device.process import Answered, Ask, Ended, Finish, Process, Started, StartFailed, Tell
from novainfer.fsm.device.roster import (
    CLOSE_S,
    Alive,
    CloseOver,
    Dying,
    Find,
    Found,
    Greet,
    Open,
    Probe,
    ProbeOver,
    Roster,
    RosterState,
    SpareOverdue,
)
from novainfer.fsm.health import Sighting, Silence
from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.events import (
    Close,
    Fault,
    JobDone,
    JobFailed,
    Kill,
    Run,
    Spawn,
    StepFailed,
    Stop,
)
from novainfer.fsm.messages.step import StepDone, StepMasks

logger = logging.getLogger(__name__)


class _Seen:
    """What is seen of one process: how long it has been silent, and its state's age."""

    def __init__(self, child: Child, now_s: float) -> None:
        self.child = child
        self.signs = 0  # that it gets on with what it does
        self.state: Any = None
        self.since_s = now_s
        self.is_unwanted = False  # it was ended because the roster wanted that
        self._silence = Silence(child.heard_s)

    def silent_s(self, process: Process, now_s: float) -> float:
        """Seconds in which it said nothing while the loop was listening, beyond what loading excuses."""
        self.child.look()
        return self._silence.look(self.child.heard_s, now_s, is_warm=process.is_warm)


class ProcessLink:
    """`spec` is the device; `deliver` takes what comes back. See `novainfer.actors.device.link.DeviceLink`."""

    def __init__(
        self,
        spec: DeviceSpec,
        deliver: Deliver,
        *,
        warm_spare: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._spec = spec
        self._deliver = deliver
        self._on_progress = on_progress  # of the first process only: a restart is no progress
        self._shares_weights = warm_spare and hasattr(os, "memfd_create")
        self.roster = Roster(warm_spare=warm_spare)
        self._inbox: deque[Any] = deque()
        self._is_turning = False
        self._num_waiting = 0  # events for the loop's next turn: what comes after them does not overtake them
        self._was_up = False  # before, who starts the engine is told by an error, and needs no warning as well
        self._seen: dict[int, _Seen] = {}  # all whose process is not reaped, by serial
        self._serials: dict[Child, int] = {}
        self._probed = -1  # the process that was asked for a sign of life
        self._finding: asyncio.Task[None] | None = None  # the model's folder
        self._timers: dict[type, asyncio.TimerHandle] = {}  # by the kind of event that they bring
        self._weights_fd: int | None = None  # what the worker has packed, the spare finds
        self._precision: str | None = None  # of those weights
        self._stopped = anyio.Event()
        self._changed = anyio.Event()  # a process was reaped

    # ---- DeviceLink ----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The process of the worker; 0 while there is none."""
        worker = self.roster.worker
        return self._seen[worker.serial].child.pid if worker and worker.serial in self._seen else 0

    def put(self, job: Any) -> None:
        """Start, end, or ask the worker's process."""
        self._take(job if isinstance(job, Spawn | Kill | Close) else Ask(job))

    def give(self, masks: StepMasks) -> None:
        """To the worker's process, if it is the one that the step went to."""
        worker = self.roster.worker
        seen = self._seen.get(worker.serial) if worker is not None else None
        if seen is not None:
            seen.child.send(masks.epoch, masks)

    def stop(self) -> None:
        """End: at once, or when the device is closed if that was asked for, within `CLOSE_S` seconds."""
        self._take(Stop())
        self._stopped.set()

    async def run(self) -> None:
        """Live from now until `stop`; when cancelled, every process is killed. Ends with all of them reaped."""
        try:
            await self._stopped.wait()
            await self._all_reaped()
        except BaseException:
            self.stop()
            self._take(CloseOver())
            with anyio.CancelScope(shield=True):
                await self._all_reaped()
            raise

    def silence_s(self) -> float | None:
        """Seconds in which the worker's process said nothing while the loop was listening; None while there is none."""
        worker = self.roster.worker
        if worker is None or worker.serial not in self._seen:
            return None
        return self._seen[worker.serial].silent_s(worker, asyncio.get_running_loop().time())

    def num_signs(self) -> int | None:
        """Signs that the worker's process gets on; None while there is none, or the model is still being found."""
        worker = self.roster.worker
        if worker is None or self.roster.state is RosterState.FINDING or worker.serial not in self._seen:
            return None
        return self._seen[worker.serial].signs

    def sightings(self, silence_limit_s: float) -> Iterable[Sighting]:
        """The spare, and the processes that are ending."""
        now_s = asyncio.get_running_loop().time()
        spare = self.roster.spare
        processes = [*self.roster.ending.values()] + ([spare] if spare is not None else [])
        for process in processes:
            seen = self._seen.get(process.serial)
            if seen is None:
                continue
            is_spare = process is spare
            silent_s = seen.silent_s(process, now_s) if is_spare else None
            name = SPARE if is_spare else f"{ENDING}{seen.child.pid}"
            yield Sighting(
                name, process.state, seen.since_s, None, silent_s, silence_limit_s, seen.signs if is_spare else None
            )

    def overdue(self, actor: str, message: str) -> bool:
        """The watchdog's word about one of `sightings`: a spare is replaced, and that is an incident of its own."""
        spare = self.roster.spare
        if actor == SPARE and spare is not None:
            self._take(SpareOverdue(spare.serial, message, asyncio.get_running_loop().time()))
            return True
        return False

    def machines(self) -> Iterable[Machine]:
        """The roster, and those of its processes that are not gone."""
        roster = self.roster
        processes = (roster.worker, roster.spare, *roster.ending.values())
        return (roster, *(process for process in processes if process is not None))

    def inject(self, kind: str, **how: Any) -> None:
        """Let the worker's process fail, or end it."""
        fault = injection(kind, how)
        worker = self.roster.worker
        child = self._seen[worker.serial].child if worker and worker.serial in self._seen else None
        if worker is None or child is None or not child.is_talking:
            raise InvalidParameter("there is no worker process at the moment", param="kind")
        if kind == "kill":
            child.signal(signal.SIGKILL)
        elif kind == "freeze":
            child.signal(signal.SIGSTOP)
        else:
            try:
                child.send(worker.epoch, fault)
            except UnsendableError as error:
                raise InvalidParameter(str(error), param="kind") from None

    # ---- the machine's shell -------------------------------------------------------------------------------------

    def _take(self, event: Any) -> None:
        self._inbox.append(event)
        if self._is_turning:
            return
        self._is_turning = True
        try:
            while self._inbox:
                for effect in self.roster.handle(self._inbox.popleft()):
                    self._perform(effect)
            self._note_states()
        finally:
            self._is_turning = False

    def _note_states(self) -> None:
        now_s = asyncio.get_running_loop().time()
        roster = self.roster
        for process in (roster.worker, roster.spare, *roster.ending.values()):
            seen = self._seen.get(process.serial) if process is not None else None
            if process is not None and seen is not None and seen.state is not process.state:
                seen.state, seen.since_s = process.state, now_s

    def _perform(self, effect: Effect) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(effect, Send):
            event = effect.event
            if isinstance(event, JobFailed):  # the budget of restarts goes by when a worker was lost
                event = msgspec.structs.replace(event, at_s=loop.time())
            if isinstance(event, JobDone) and event.job == "Warm":
                self._on_progress = None
                self._was_up = True
            if isinstance(event, JobDone | JobFailed) or self._num_waiting:
                self._num_waiting += 1
                loop.call_soon(
                    self._deliver_later, event
                )  # some answers are there already: never within the turn that asks
            else:
                self._deliver(event)
        elif isinstance(effect, After):
            self._timers[type(effect.event)] = loop.call_later(effect.delay_s, self._fire, effect.event)
        elif isinstance(effect, Drop):
            self._timers.pop(type(effect.event)).cancel()
        else:
            self._do(effect)

    def _deliver_later(self, event: Any) -> None:
        self._num_waiting -= 1
        self._deliver(event)

    def _fire(self, event: Any) -> None:
        del self._timers[type(event)]
        if isinstance(event, ProbeOver):
            event = ProbeOver(asyncio.get_running_loop().time())
        self._take(event)

    def _do(self, effect: Start) -> None:
        job = effect.job
        if isinstance(job, Open):
            self._open(job)
        elif isinstance(job, Find):
            self._finding = asyncio.get_running_loop().create_task(self._find(), name="novainfer-find-model")
        elif isinstance(job, Finish) and not job.why:
            self._seen[job.serial].child.signal(signal.SIGKILL)
        elif isinstance(job, Finish):
            self._seen[job.serial].is_unwanted = True
            self._seen[job.serial].child.kill(job.why)
        elif isinstance(job, Tell):
            self._tell(job)
        elif isinstance(job, Greet):
            level = logging.getLogger("novainfer").getEffectiveLevel()
            self._seen[job.serial].child.send(job.epoch, Hello(self._spec, level, self._weights_fd))
        elif isinstance(job, Probe):
            child = self._seen[job.serial].child
            child.look()  # what it said before it was asked proves nothing
            self._probed = job.serial
            child.send(0, Ping())

    def _tell(self, tell: Tell) -> None:
        """What cannot be sent has failed, and the process goes on: a step is tried again in halves, and found out."""
        job, child = tell.job, self._seen[tell.serial].child
        try:
            child.send(tell.epoch, job)
        except UnsendableError as error:
            if isinstance(job, Run):  # the step before may be under way, and its answer comes first
                plan = job.plan
                failed = StepFailed(plan.step_id, plan.epoch, Fault.EXCEPTION, str(error), launched=False)
                child.send(tell.epoch, Unsent(failed))
                return
            answer = JobFailed(type(job).__name__, str(error), tell.epoch)
            self._take(Answered(tell.serial, tell.epoch, answer, asyncio.get_running_loop().time()))

    def _share_weights(self, precision: str | None) -> None:
        """Have a file for the weights of processes in this precision; those who have the one before keep it."""
        if precision != self._precision:
            self._forget_weights()
        if self._shares_weights and self._weights_fd is None:
            self._weights_fd = os.memfd_create("novainfer-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._precision = precision

    def _forget_weights(self) -> None:
        if self._weights_fd is not None:
            os.close(self._weights_fd)
            self._weights_fd = None

    def _open(self, job: Open) -> None:
        loop, serial = asyncio.get_running_loop(), job.serial
        self._share_weights(job.precision)
        fds = () if self._weights_fd is None else (self._weights_fd,)
        try:
            child = Child(self._heard, self._dying, self._ended, *fds)
        except OSError as error:
            self._take(StartFailed(serial, str(error), loop.time()))
            return
        self._seen[serial] = _Seen(child, loop.time())
        self._serials[child] = serial
        self._take(Started(serial, child.pid))

    async def _find(self) -> None:
        """Find the model, which may mean to fetch it; then the process that waits for it can begin."""
        why_not = None
        try:
            await asyncio.to_thread(self._spec.prepare)
        except Exception as error:
            why_not = sentence_of(error)
        self._take(Found(why_not, asyncio.get_running_loop().time()))

    # ---- what processes say --------------------------------------------------------------------------------------

    def _heard(self, child: Child, epoch: int, message: Any) -> None:
        kind = type(message)
        serial = self._serials[child]
        if serial == self._probed:
            self._probed = -1
            self._take(Alive(serial))
        if kind is Beat:
            return
        if kind in (StepDone, StepFailed, JobDone, JobFailed):
            self._seen[serial].signs += 1
            self._take(Answered(serial, epoch, message, asyncio.get_running_loop().time()))
        elif kind is WithoutGraphs:
            self._do_without_graphs()
        elif kind is LogLine:
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        elif kind is Progress:
            self._seen[serial].signs += 1
            if self._on_progress is not None:
                self._on_progress(message.num_done, message.num_all)

    def _do_without_graphs(self) -> None:
        """A capture has cost a process: those that are started from now on shall not be lost in the same way."""
        self._spec = self._spec.without_graphs()
        logger.warning("no CUDA graphs from the next process on: one was lost as it captured them")

    def _dying(self, child: Child) -> None:
        sentence = f"the device's process {child.pid} has died"
        self._take(Dying(self._serials[child], sentence, asyncio.get_running_loop().time()))

    def _ended(self, child: Child, sentence: str) -> None:
        serial = self._serials.pop(child)
        seen = self._seen.pop(serial)
        if self._was_up and not self._stopped.is_set() and self.roster.state is not RosterState.CLOSING:
            logger.log(logging.INFO if seen.is_unwanted else logging.WARNING, "%s", sentence)
        self._changed.set()
        self._changed = anyio.Event()
        self._take(Ended(serial, sentence, asyncio.get_running_loop().time()))

    async def _all_reaped(self) -> None:
        """Every process is gone, or is left behind because the kernel does not let it go."""
        with anyio.move_on_after(CLOSE_S + DYING_LIMIT_S):
            while self._seen:
                await self._changed.wait()
        if self._seen:
            pids = ", ".join(str(seen.child.pid) for seen in self._seen.values())
            logger.error("processes that do not end, though they were killed: %s", pids)
        for timer in self._timers.values():
            timer.cancel()
        self._forget_weights()
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.wait({self._finding})
