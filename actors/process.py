"""A device in a process of its own: started, talked to, replaced when the worker's machine says so, and ended.

The machine decides; this performs. Spawn starts a process, or takes the spare that stands by; every other job goes to
the process of its epoch, and what comes back is delivered only while that process is the worker's. A spare does Load
ahead, and Fit and Warm where that costs no memory: when it takes over, their answers are there already.

              ┌──────────── Spawn ───────────▶ current ──end──▶ DeviceLost
    process ──┤                                   ▲
              └─ warm_spare, once warm ─▶ spare ──┘ Spawn
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import msgspec

from novainfer.actors.child import Child
from novainfer.actors.device import sentence_of
from novainfer.actors.faulty import injection
from novainfer.actors.link import Deliver
from novainfer.actors.spec import DeviceSpec
from novainfer.actors.wire import SPARE_EPOCH, Beat, Hello, LogLine, Progress, UnsendableError
from novainfer.fsm.errors import InvalidParameter
from novainfer.fsm.events import (
    Close,
    DeviceLost,
    Fault,
    Fit,
    JobDone,
    JobFailed,
    Kill,
    Load,
    Run,
    Spawn,
    StepDone,
    StepFailed,
    Warm,
)

logger = logging.getLogger(__name__)

CLOSE_S = 5.0  # for a device to be closed; what its process holds goes with it in any case
REAP_S = 10.0  # for killed processes to be gone: one that the kernel does not let go is left behind, and named
# Importing torch from a cold disk holds the interpreter, and with it the beat, for many seconds.
LOAD_SILENCE_S = 60.0
# The loop itself may be stopped for a while (Ctrl-Z, a suspended machine): one look counts for no more silence.
LOOK_S_MAX = 1.0
SPARE_SILENCE_S = 2.0  # of a spare that is to take over: twenty beats; to start another process takes about as long
SPARE_DEATHS_MAX = 3  # within
SPARE_WINDOW_S = 600.0  # seconds; after that many, no spare is started until the worker has needed a new process


class _Device:
    """One process and what it was asked: by the machine (`wanted`), or ahead of it."""

    def __init__(self, child: Child, epoch: int) -> None:
        self.child = child
        self.epoch = epoch
        self.is_greeted = False
        self.is_warm = False
        self.is_lost = False  # its loss was told before its end
        self.silent_s = 0.0
        self.looked_s = child.heard_s
        self.asked: dict[str, int] = {}  # job under way -> the epoch it was asked in
        self.wanted: set[str] = set()  # jobs whose answer the machine waits for
        self.ahead: dict[str, JobDone] = {}  # answers that it does not wait for yet
        self.waiting: deque[Any] = deque()  # jobs for a process that was not greeted yet


class ProcessLink:
    """`spec` is the device; `deliver` takes what comes back. See `novainfer.actors.link.DeviceLink`."""

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
        self._warm_spare = warm_spare
        self._on_progress = on_progress  # of the first process only: a restart is no progress
        self._current: _Device | None = None
        self._spare: _Device | None = None
        self._spare_deaths: deque[float] = deque(maxlen=SPARE_DEATHS_MAX)
        self._num_blocks: int | None = None  # of the last KV cache, which a spare makes as large
        self._devices: dict[Child, _Device] = {}  # all whose process is not reaped
        self._finding: asyncio.Task[None] | None = None  # the model's folder
        self._is_found = False
        self._why_not: str | None = None
        self._is_closing = False
        self._weights_fd: int | None = None  # what the worker has packed, the spare finds
        self._stopped = anyio.Event()
        self._changed = anyio.Event()  # a process was reaped

    # ---- DeviceLink ----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The process of the worker; 0 while there is none."""
        return self._current.child.pid if self._current else 0

    def put(self, job: Any) -> None:
        """Start, end, or ask the worker's process."""
        if type(job) is Spawn:
            self._spawn(job.epoch)
            return
        device = self._current
        epoch = job.plan.epoch if type(job) is Run else job.epoch
        if device is None or device.epoch != epoch:
            return  # it is gone, and its loss was told
        if type(job) is Kill:
            self._current = None
            device.child.kill()
            return
        if type(job) is Close:
            self._is_closing = True
        if type(job) is Run:
            self._send(device, job)
        else:
            self._ask(device, job)

    def stop(self) -> None:
        """End: at once, or when the device is closed if that was asked for, within `CLOSE_S` seconds."""
        self._stopped.set()
        for device in list(self._devices.values()):
            if device is not self._current or "Close" not in device.asked:
                device.child.kill()

    async def run(self) -> None:
        """Live from now until `stop`; when cancelled, every process is killed. Ends with all of them reaped."""
        try:
            await self._stopped.wait()
            await self._all_reaped()
        except BaseException:
            self._stopped.set()
            self._kill_all()
            with anyio.CancelScope(shield=True):
                await self._all_reaped()
            raise

    def silence_s(self) -> float | None:
        """Seconds in which the worker's process said nothing while the loop was listening; None while there is none."""
        device = self._current
        if device is None:
            return None
        device.child.look()
        now_s = asyncio.get_running_loop().time()
        if device.child.heard_s > device.looked_s:
            device.silent_s = min(now_s - device.child.heard_s, LOOK_S_MAX)
        else:
            device.silent_s += min(now_s - device.looked_s, LOOK_S_MAX)
        device.looked_s = now_s
        return device.silent_s if device.is_warm else max(0.0, device.silent_s - LOAD_SILENCE_S)

    def inject(self, kind: str, **how: Any) -> None:
        """Let the worker's process fail, or end it."""
        fault = injection(kind, how)
        device = self._current
        if device is None or not device.child.is_talking:
            raise InvalidParameter("there is no worker process at the moment", param="kind")
        if kind == "kill":
            device.child.signal(signal.SIGKILL)
        elif kind == "freeze":
            device.child.signal(signal.SIGSTOP)
        else:
            try:
                device.child.send(device.epoch, fault)
            except UnsendableError as error:
                raise InvalidParameter(str(error), param="kind") from None

    # ---- processes -----------------------------------------------------------------------------------------------

    def _spawn(self, epoch: int) -> None:
        if self._current is not None:  # it lives, but could not be brought up
            self._current.child.kill()
        self._current = self._take_spare()
        is_spare = self._current is not None
        if self._current is not None:
            self._current.epoch = epoch
        else:
            try:
                self._current = self._start(epoch)
            except OSError as error:
                self._soon(JobFailed("Spawn", f"the device's process cannot be started: {error}", epoch))
                return
        self._soon(JobDone("Spawn", {"pid": self._current.child.pid, "spare": is_spare}, epoch))

    def _start(self, epoch: int) -> _Device:
        if self._warm_spare and self._weights_fd is None and hasattr(os, "memfd_create"):
            self._weights_fd = os.memfd_create("novainfer-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fds = () if self._weights_fd is None else (self._weights_fd,)
        device = _Device(Child(self._heard, self._dying, self._ended, *fds), epoch)
        self._devices[device.child] = device
        if self._is_found:
            self._greet(device)
        elif self._finding is None:
            self._finding = asyncio.get_running_loop().create_task(self._find(), name="novainfer-find-model")
        return device

    async def _find(self) -> None:
        """Find the model, which may mean to fetch it; then the processes that wait for it can begin."""
        try:
            await asyncio.to_thread(self._spec.prepare)
        except Exception as error:
            self._why_not = sentence_of(error)
        self._is_found = True
        for device in list(self._devices.values()):
            self._greet(device)

    def _greet(self, device: _Device) -> None:
        device.is_greeted = True
        if self._why_not is None:
            level = logging.getLogger("novainfer").getEffectiveLevel()
            device.child.send(device.epoch, Hello(self._spec, level, self._weights_fd))
        while device.waiting:
            self._ask(device, device.waiting.popleft())

    def _ask(self, device: _Device, job: Any) -> None:
        """The machine's job: its answer may be there already, or on its way, or has to be asked for."""
        name = type(job).__name__
        if name == "Close" and not device.is_warm:
            return  # nothing is lost when `stop` ends the process, and whoever stops it now is in a hurry
        if (answer := device.ahead.pop(name, None)) is not None and _fits(answer, job):
            self._answer(device, answer)
        elif name in device.asked:
            device.wanted.add(name)
        elif not device.is_greeted:
            device.waiting.append(job)
        elif self._why_not is not None:
            self._soon(JobFailed(name, self._why_not, device.epoch))
        else:
            device.wanted.add(name)
            self._send(device, job)

    def _send(self, device: _Device, job: Any) -> None:
        """What cannot be sent has failed, and the process goes on: a step is tried again in halves, and found out."""
        name = type(job).__name__
        try:
            device.child.send(device.epoch, job)
        except UnsendableError as error:
            if type(job) is Run:
                step_id, epoch = job.plan.step_id, job.plan.epoch
                self._soon(StepFailed(step_id, epoch, Fault.EXCEPTION, str(error), launched=False))
            else:
                device.wanted.discard(name)
                self._soon(JobFailed(name, str(error), device.epoch))
            return
        device.asked[name] = device.epoch

    def _heard(self, child: Child, epoch: int, message: Any) -> None:
        kind = type(message)
        device = self._devices[child]
        if kind is Beat:
            return
        if kind is StepDone or kind is StepFailed:
            if device is self._current and device.asked.pop("Run", None) == epoch:
                self._deliver(message)
        elif kind is JobDone or kind is JobFailed:
            if device.asked.get(message.job) == epoch:
                del device.asked[message.job]
                self._job_ended(device, message)
        elif kind is LogLine:
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        elif kind is Progress and self._on_progress is not None:
            self._on_progress(message.num_done, message.num_all)

    def _job_ended(self, device: _Device, answer: JobDone | JobFailed) -> None:
        is_done = isinstance(answer, JobDone)
        device.is_warm = device.is_warm or (is_done and answer.job == "Warm")
        if answer.job in device.wanted:
            device.wanted.discard(answer.job)
            self._answer(device, answer)
        elif isinstance(answer, JobDone):
            device.ahead[answer.job] = answer
            if device is self._spare:
                self._go_ahead(device, answer)
        elif device is self._spare and answer.job == "Load":
            device.child.kill(f"it could not load the model: {answer.message}")

    def _answer(self, device: _Device, answer: JobDone | JobFailed) -> None:
        """Deliver what the worker's process answered, for the epoch that it works in now, on a later turn."""
        self._soon(msgspec.structs.replace(answer, epoch=device.epoch))
        if isinstance(answer, JobDone) and answer.job == "Fit":
            self._num_blocks = answer.value["num_blocks"]
        elif isinstance(answer, JobDone) and answer.job == "Warm":
            self._on_progress = None
            self._start_spare()

    def _soon(self, event: JobDone | JobFailed | StepFailed) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(event, JobFailed):  # the budget of restarts goes by when a worker was lost
            event = msgspec.structs.replace(event, at_s=loop.time())
        loop.call_soon(self._deliver, event)

    def _dying(self, child: Child) -> None:
        """A spare that has memory of its own takes over before the system has taken back the worker's."""
        device, spare = self._current, self._spare
        if device is None or device.child is not child or spare is None or "Warm" not in spare.ahead:
            return
        if self._is_closing or self._stopped.is_set():
            return
        self._current = None
        device.is_lost = True
        child.signal(signal.SIGKILL)  # should nothing but the thread have ended that holds the pipe
        sentence = f"the device's process {child.pid} has died"
        self._deliver(DeviceLost(device.epoch, sentence, asyncio.get_running_loop().time()))

    def _ended(self, child: Child, sentence: str) -> None:
        device = self._devices.pop(child)
        self._changed.set()
        self._changed = anyio.Event()
        if device is self._current:
            self._current = None
            if not self._is_closing and not self._stopped.is_set():
                logger.warning("%s", sentence)
                self._deliver(DeviceLost(device.epoch, sentence, asyncio.get_running_loop().time()))
        elif device.is_lost:
            logger.warning("%s", sentence)
        elif device is self._spare:
            self._spare = None
            if not self._stopped.is_set():
                logger.warning("a spare is lost: %s", sentence)
                self._spare_deaths.append(asyncio.get_running_loop().time())
                self._start_spare()

    def _kill_all(self) -> None:
        for child in list(self._devices):
            child.kill()

    async def _all_reaped(self) -> None:
        with anyio.move_on_after(CLOSE_S):
            await self._no_devices()
        self._kill_all()
        with anyio.move_on_after(REAP_S):
            await self._no_devices()
        if self._devices:
            pids = ", ".join(str(child.pid) for child in self._devices)
            logger.error("processes that do not end, though they were killed: %s", pids)
        if self._weights_fd is not None:
            os.close(self._weights_fd)
            self._weights_fd = None
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.wait({self._finding})

    async def _no_devices(self) -> None:
        while self._devices:
            await self._changed.wait()

    # ---- the spare -----------------------------------------------------------------------------------------------

    def _start_spare(self) -> None:
        if not self._warm_spare or self._spare is not None or self._stopped.is_set() or self._is_closing:
            return
        deaths, now_s = self._spare_deaths, asyncio.get_running_loop().time()
        if len(deaths) == SPARE_DEATHS_MAX and now_s - deaths[0] < SPARE_WINDOW_S:
            logger.warning("%d spares were lost within %g s: there is none for now", len(deaths), SPARE_WINDOW_S)
            return
        try:
            self._spare = self._start(SPARE_EPOCH)
        except OSError as error:
            logger.warning("a spare cannot be started: %s", error)
            return
        self._send(self._spare, Load(SPARE_EPOCH))

    def _take_spare(self) -> _Device | None:
        """The spare, if there is one that still lives."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        spare.child.look()
        silent_s = asyncio.get_running_loop().time() - spare.child.heard_s
        if "Load" in spare.ahead and silent_s > SPARE_SILENCE_S:
            spare.child.kill("it stood by as a spare, and was silent when it was needed")
        return spare if spare.child.is_talking else None

    def _go_ahead(self, device: _Device, answer: JobDone) -> None:
        """Let the spare do what the machine will ask for next, as far as that takes nothing from the worker."""
        if answer.job == "Load" and answer.value.get("kv_is_lazy", False) and self._num_blocks is not None:
            self._send(device, Fit(SPARE_EPOCH, self._num_blocks))
        elif answer.job == "Fit":
            self._send(device, Warm(SPARE_EPOCH))


def _fits(answer: JobDone, job: Any) -> bool:
    """Whether an answer that was got ahead is one to this very job."""
    return type(job) is not Fit or job.num_blocks in (None, answer.value["num_blocks"])
