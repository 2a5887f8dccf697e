"""The link to a device in a thread: what it answers, and that nobody waits for ever for a job that never returns."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest

from novainfer.actors.device import link as module
from novainfer.actors.device.fake import FakeDevice
from novainfer.actors.device.link import ThreadLink
from novainfer.fsm.messages.events import Close, DeviceLost, Fault, JobDone, Kill, Load, Run, Spawn, StepFailed, Switch
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import SAMPLED, StepDone
from tests.actors.devices import captured, unusable
from tests.actors.gpu import FakeGpu
from tests.actors.helpers import WAIT_S
from tests.actors.links import plan


class Stuck(FakeDevice):
    """Its steps end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.finish = threading.Event(), threading.Event()

    def run(self, plan: Any) -> StepDone:
        self.started.set()
        assert self.finish.wait(WAIT_S)
        return super().run(plan)


async def test_jobs_are_answered_in_order_from_this_process() -> None:
    events: list[Any] = []
    link = ThreadLink(FakeDevice(), events.append)
    for job in (Spawn(2), Load(2), Run(plan(2)), Close(2)):
        link.put(job)
    link.stop()
    await link.run()
    await asyncio.sleep(0)
    assert [type(event) for event in events] == [JobDone, JobDone, StepDone, JobDone]
    assert {event.epoch for event in events} == {2}
    assert link.pid == os.getpid()
    assert link.silence_s() is None


async def test_a_fault_is_injected_into_the_next_step() -> None:
    events: list[Any] = []
    link = ThreadLink(FakeDevice(), events.append)
    link.inject("oom")
    link.put(Run(plan()))
    link.put(Run(plan()))
    link.stop()
    await link.run()
    await asyncio.sleep(0)
    assert [type(event) for event in events] == [StepFailed, StepDone]


async def test_two_steps_are_put_and_the_second_is_begun_only_after_the_first() -> None:
    events: list[Any] = []
    device = Stuck()
    link = ThreadLink(device, events.append)
    life = asyncio.create_task(link.run())
    link.put(Run(plan(step_id=1)))
    link.put(Run(plan(step_id=2, after=1, token=SAMPLED)))
    link.put(Run(plan(step_id=4, after=3, token=SAMPLED)))
    assert await asyncio.to_thread(device.started.wait, WAIT_S)
    assert events == []
    device.finish.set()
    link.stop()
    await life
    await asyncio.sleep(0)
    assert [(event.step_id, type(event)) for event in events] == [(1, StepDone), (2, StepDone), (4, StepFailed)]
    assert [event.token_ids for event in events[:2]] == [[66], [67]]
    assert not events[2].launched


@pytest.mark.parametrize("kind", ["oom", "exception"])
async def test_what_follows_on_a_step_with_an_injected_fault_is_not_begun(kind: str) -> None:
    events: list[Any] = []
    link = ThreadLink(FakeDevice(), events.append)
    link.inject(kind)
    for job in (Run(plan(step_id=1)), Run(plan(step_id=2, after=1, token=SAMPLED)), Run(plan(step_id=3))):
        link.put(job)
    link.stop()
    await link.run()
    await asyncio.sleep(0)
    first, second, third = events
    assert (first.fault, first.launched, second.launched) == (Fault(kind), True, False)
    assert second.message == "step 1, which it follows, did not end well just before it"
    assert third.token_ids == [66]


async def test_a_device_of_no_more_use_is_lost_and_not_answered_for() -> None:
    """In a thread, too: a step that fails on a poisoned context is no fault of its requests."""
    events: list[Any] = []
    link = ThreadLink(unusable(), events.append)
    link.put(Run(plan(3)))
    link.stop()
    await link.run()
    await asyncio.sleep(0)
    message = "the device is of no more use: RuntimeError: an illegal memory access was encountered"
    assert [(type(event), event.epoch, event.message) for event in events] == [(DeviceLost, 3, message)]


async def test_a_device_that_a_late_step_leaves_of_no_more_use_is_lost() -> None:
    events: list[Any] = []
    device = FakeGpu(poisons=[2])
    link = ThreadLink(device, events.append)
    for job in (Run(plan(step_id=1)), Run(plan(step_id=2, after=1, token=SAMPLED))):
        link.put(job)
    link.stop()
    await link.run()
    await asyncio.sleep(0)
    assert DeviceLost in [type(event) for event in events]
    assert StepFailed not in [type(event) for event in events[:2]]
    device.close()


async def test_a_device_that_a_job_leaves_of_no_more_use_is_lost() -> None:
    events: list[Any] = []
    link = ThreadLink(captured(), events.append)
    link.put(Switch(Mode(), 5))
    link.stop()
    await link.run()
    await asyncio.sleep(0)
    (lost,) = events
    assert (type(lost), lost.epoch) == (DeviceLost, 5)


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_step_that_never_returns_is_left_behind(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_WORD_S", 0.01)
    device, events = Stuck(), list[Any]()
    link = ThreadLink(device, events.append, patience_s=0.0)
    life = asyncio.create_task(link.run())
    link.put(Run(plan()))
    assert await asyncio.to_thread(device.started.wait, WAIT_S)
    (thread,) = [t for t in threading.enumerate() if t.name == "novainfer-device"]
    if how == "killed":
        link.put(Kill(0))
    else:
        link.put(Close(0))
        link.stop()
    async with asyncio.timeout(WAIT_S):
        await life
    assert thread.is_alive()
    device.finish.set()
    await asyncio.to_thread(thread.join, WAIT_S)
    assert events == []


async def test_a_step_under_way_is_waited_for_within_its_time() -> None:
    device, events = Stuck(), list[Any]()
    link = ThreadLink(device, events.append)
    life = asyncio.create_task(link.run())
    link.put(Run(plan()))
    assert await asyncio.to_thread(device.started.wait, WAIT_S)
    link.put(Close(0))
    link.stop()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not life.done()
    device.finish.set()
    await life
    await asyncio.sleep(0)
    assert [type(event) for event in events] == [StepDone, JobDone]
