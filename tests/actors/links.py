"""A link to a device, and the events that it delivered, for tests to ask and to wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from novainfer.actors.device.child import Child
from novainfer.actors.device.process import ProcessLink
from novainfer.actors.device.spec import DeviceSpec
from novainfer.fsm.device.process import Process
from novainfer.fsm.messages.events import Close, Fit, JobDone, Load, Run, Spawn, Warm
from novainfer.fsm.messages.step import StepDone, StepPlan
from tests.actors.devices import spec
from tests.actors.helpers import WAIT_S, eventually


def plan(
    epoch: int = 0, *, step_id: int = 1, token: int = 65, slots: tuple[int, ...] = (0,), after: int = 0
) -> StepPlan:
    """A step in which each slot decodes one token."""
    count = len(slots)
    return StepPlan(
        step_id=step_id,
        epoch=epoch,
        after=after,
        slots=list(slots),
        query_lens=[1] * count,
        context_lens=[1] * count,
        input_ids=[token] * count,
        table_slots=[],
        table_indexes=[],
        table_blocks=[],
        sample_seqs=list(range(count)),
        admissions=[],
    )


class Line:
    """A process link, and what came of it."""

    def __init__(self, device: DeviceSpec | None = None, **more: Any) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.link = ProcessLink(device or spec(), self.events.put_nowait, **more)
        self.pids: set[int] = set()

    async def next(self) -> Any:
        """The next event; how long a step took is not of interest."""
        async with asyncio.timeout(WAIT_S):
            event = await self.events.get()
        return msgspec.structs.replace(event, took_s=0.0) if isinstance(event, StepDone) else event

    async def ask(self, job: Any) -> Any:
        """Put a job, and wait for what comes back."""
        self.link.put(job)
        self.pids.add(self.link.pid)
        return await self.next()

    async def up(self, epoch: int = 0, num_blocks: int | None = None) -> list[Any]:
        """Spawn, load, fit and warm; gives the four answers."""
        answers = []
        for job in (Spawn(epoch), Load(epoch), Fit(epoch, num_blocks), Warm(epoch)):
            answers.append(await self.ask(job))
            assert isinstance(answers[-1], JobDone), answers[-1]
        return answers

    async def step(self, epoch: int = 0, **more: Any) -> Any:
        """One step."""
        return await self.ask(Run(plan(epoch, **more)))

    def child(self, process: Process | None) -> Child:
        """The operating system's side of one of the roster's processes."""
        assert process is not None
        return self.link._seen[process.serial].child

    def nothing_came(self) -> bool:
        """True when nobody has said anything more."""
        return self.events.empty()


@asynccontextmanager
async def linked(device: DeviceSpec | None = None, *, close: bool = True, **more: Any) -> AsyncIterator[Line]:
    """A running link, ended as a worker's machine would; at the end none of its processes is left."""
    line = Line(device, **more)
    life = asyncio.create_task(line.link.run())
    try:
        yield line
    finally:
        if close and line.link.pid and line.link.roster.worker is not None:
            line.link.put(Close(line.link.roster.worker.epoch))
        line.link.stop()
        async with asyncio.timeout(WAIT_S):
            await life
        assert not line.link._seen
        assert not [child for child in psutil.Process().children() if child.pid in line.pids]


def is_gone(pid: int) -> bool:
    """True when no process of this id does anything any more."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def appears(path: Path) -> None:
    """Wait for a file."""
    await eventually(path.exists)
