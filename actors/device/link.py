"""Between the worker's machine and its device: jobs go in, and what became of them comes out as events.

The machine lives on the loop whatever the device is: a thread of this process here, a process of its own in
`novainfer.actors.device.process`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from novainfer.actors.core.thread import JobThread
from novainfer.actors.device.device import Device
from novainfer.actors.device.faulty import PROCESS_ONLY, FaultyDevice, injection
from novainfer.actors.device.jobs import Jobs, leaves_unusable
from novainfer.fsm.core.machine import Machine
from novainfer.fsm.health import Sighting
from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.events import DeviceLost, Kill, Run
from novainfer.fsm.messages.step import StepMasks

logger = logging.getLogger(__name__)

# The device's thread needs the interpreter to begin a step, and would get it when the loop has served all readers, or
# after the switch interval of 5 ms. Letting go of it for a moment here took the pause between two steps of 256 requests
# from 1.4 to 0.3 ms (and from 7 to 2 ms on a busy machine).
HANDOVER_S = 20e-6
LAST_WORD_S = 1.0  # for a job that has taken too long already

Deliver = Callable[[Any], None]


class DeviceLink(Protocol):
    """What the system talks to. All of it is called on the loop, and so is the `deliver` that a link was made with."""

    @property
    def pid(self) -> int:
        """The process that holds the device; 0 while there is none."""

    def put(self, job: Any) -> None:
        """Do `job` after those before it."""

    def give(self, masks: StepMasks) -> None:
        """Masks for a step that was put before; of no use to one that has ended."""

    def stop(self) -> None:
        """End after the jobs that were put before, or after a bounded time."""

    async def run(self) -> None:
        """Live from now until `stop`, and end with nothing left; raises what killed the link itself."""

    def silence_s(self) -> float | None:
        """Seconds since the device's process last said that it lives; None where none says so."""

    def num_signs(self) -> int | None:
        """A number that grows with each sign that the device gets on; None where none comes."""

    def sightings(self, silence_limit_s: float) -> Iterable[Sighting]:
        """What there is to be watched beside the worker: its spare, and processes that are ending."""

    def overdue(self, actor: str, message: str) -> bool:
        """One of `sightings` is late; True when something is done about it, which is an incident of its own."""

    def machines(self) -> Iterable[Machine]:
        """The machines that live on the loop for it."""

    def inject(self, kind: str, **how: Any) -> None:
        """Let the device fail (`novainfer.actors.device.faulty`); raises `InvalidParameter` when it cannot be done."""


MakeLink = Callable[[Deliver], DeviceLink]


class ThreadLink:
    """A device in a thread of this process; at the end it has `patience_s` seconds for the job under way."""

    def __init__(self, device: Device, deliver: Deliver, *, patience_s: float = 60.0) -> None:
        self._patience_s = patience_s
        self._device = FaultyDevice(device)
        jobs = Jobs(self._device, lambda answer: self._thread.tell(self._or_lost(answer)))
        self._thread = JobThread("novainfer-device", lambda job: self._or_lost(jobs.do(job)), deliver, jobs.end)
        self._giving_up: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def put(self, job: Any) -> None:
        """Do `job` after those before it. No thread can be ended: to kill it is not to wait for it any more."""
        if type(job) is Kill:
            self._thread.abandon()
            return
        self._thread.put(job)
        if type(job) is Run:
            time.sleep(HANDOVER_S)

    def give(self, masks: StepMasks) -> None:
        """The device's thread may wait for them."""
        self._device.give(masks)

    def _or_lost(self, answer: Any) -> Any:
        """`answer`; where the device is of no more use, that it is lost: nothing that is asked of it would be told."""
        if leaves_unusable(self._device, answer):
            return DeviceLost(answer.epoch, f"the device is of no more use: {answer.message}", time.monotonic())
        return answer

    def stop(self) -> None:
        """End after the jobs that were put before; but an engine must not live on for a job that never returns."""
        self._thread.stop()
        busy_s = time.monotonic() - self._thread.since_s
        left_s = max(self._patience_s - busy_s, LAST_WORD_S)
        self._giving_up = asyncio.get_running_loop().call_later(left_s, self._give_up)

    async def run(self) -> None:
        """Live from now until `stop`; raises what killed the thread."""
        try:
            await self._thread.run()
        finally:
            if self._giving_up is not None:
                self._giving_up.cancel()

    def _give_up(self) -> None:
        logger.error("the device's thread is left behind: its job does not return")
        self._thread.abandon()

    def silence_s(self) -> float | None:
        """A thread says nothing between two jobs."""
        return None

    def num_signs(self) -> int | None:
        """A thread says nothing while it loads: the model may even be fetched then."""
        return None

    def sightings(self, silence_limit_s: float) -> Iterable[Sighting]:
        """A thread has no spare."""
        return ()

    def overdue(self, actor: str, message: str) -> bool:
        """There is nothing beside the worker."""
        return False

    def machines(self) -> Iterable[Machine]:
        """None: those of a device live with it, in its thread."""
        return ()

    def inject(self, kind: str, **how: Any) -> None:
        """Let the device fail from its next step on."""
        if kind in PROCESS_ONLY:
            raise InvalidParameter(
                f'a fault "{kind}" needs a worker in a process of its own (worker "process")', param="kind"
            )
        self._device.arm(injection(kind, how))
