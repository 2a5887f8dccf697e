"""Steps that a device computes beside its host: launched while the one before is computed, and answered in order."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from novainfer.actors.device import jobs
from novainfer.actors.device.fake import FakeDevice
from novainfer.actors.device.faulty import Injection
from novainfer.actors.device.jobs import Jobs
from novainfer.actors.device.process import ProcessLink
from novainfer.fsm.device.worker import RestartPolicy
from novainfer.fsm.messages.events import Close, Fault, Fit, JobDone, Reclaim, Run, StepFailed, Switch
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import SAMPLED, StepDone, StepPlan
from tests.actors.devices import gpu_offended, spec
from tests.actors.gpu import FakeGpu
from tests.actors.helpers import WAIT_S, all_blocks_back, answer, eventually, expected, params, running
from tests.actors.links import appears, plan
from tests.actors.test_two_steps import Server, serving, two

BEHIND = "step 1, which it follows, failed while both were on the device"
REFUSED = "step 1, which it follows, did not end well just before it"


class Thread:
    """A device's thread, and what it and the thread that waits have said."""

    def __init__(self, device: Any, say: Callable[[Any], str | None] = lambda answer: None) -> None:
        self.said: list[Any] = []
        self._unsendable = say
        self.jobs = Jobs(device, self._say)
        self._thread = ThreadPoolExecutor(1)
        self._changed = threading.Condition()

    def _say(self, found: Any) -> str | None:
        why = self._unsendable(found)
        with self._changed:
            if why is None:
                self.said.append(found)
            self._changed.notify_all()
        return why

    def put(self, job: Any) -> Future[Any]:
        """Do `job` behind those before it."""

        def do() -> None:
            if (found := self.jobs.do(job)) is not None:
                self._say(found)

        return self._thread.submit(do)

    def wait_for(self, count: int) -> list[Any]:
        """The first `count` answers."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.said) >= count, WAIT_S), self.said
        return self.said[:count]

    def end(self) -> None:
        """The device's thread ends."""
        self._thread.submit(self.jobs.end).result(WAIT_S)
        self._thread.shutdown()


@contextmanager
def thread(device: Any, say: Callable[[Any], str | None] = lambda answer: None) -> Iterator[Thread]:
    made = Thread(device, say)
    try:
        yield made
    finally:
        made.end()
        if isinstance(device, FakeGpu):
            device.let(100)
            device._stream.put(None)
            device._thread.join(WAIT_S)


def steps(answers: list[Any]) -> list[tuple[type, int]]:
    return [(type(found), found.step_id) for found in answers]


def test_a_step_is_launched_while_the_one_before_it_is_computed_and_goes_on_with_its_token() -> None:
    device = FakeGpu(is_open=False)
    with thread(device) as device_thread:
        first, second = two()
        for job in (first, second):
            device_thread.put(job).result(WAIT_S)  # it is free for the next one
        assert (device_thread.said, device.num_on_device_max) == ([], 2)
        device.let(1)
        assert [found.token_ids for found in device_thread.wait_for(1)] == [[66]]
        device.let(1)
        assert [found.token_ids for found in device_thread.wait_for(2)] == [[66], [67]]


def test_a_third_step_waits_until_the_first_has_ended() -> None:
    device = FakeGpu(is_open=False)
    with thread(device) as device_thread:
        for job in two():
            device_thread.put(job).result(WAIT_S)
        third = device_thread.put(Run(plan(step_id=3, token=SAMPLED, after=2)))
        device.let(1)
        third.result(WAIT_S)
        assert device.log.index("launched 3") > device.log.index("ended 1")
        device.let(2)
        assert [found.token_ids for found in device_thread.wait_for(3)] == [[66], [67], [68]]


@pytest.mark.parametrize("job", [Switch(Mode(), 0), Reclaim(0), Fit(0), Run(plan(step_id=9))])
def test_whatever_does_not_follow_waits_until_nothing_is_on_the_device(job: Any) -> None:
    device = FakeGpu(is_open=False)
    with thread(device) as device_thread:
        for ahead in two():
            device_thread.put(ahead).result(WAIT_S)
        waiting = device_thread.put(job)
        device.let(1)
        device_thread.wait_for(1)
        assert not waiting.done()
        device.let(2)
        waiting.result(WAIT_S)
        assert len(device_thread.wait_for(3)) == 3
        assert device.log.index("ended 2") < len(device.log) - 1


def test_a_device_that_computes_at_once_has_no_thread_that_waits() -> None:
    with thread(FakeDevice()) as device_thread:
        for job in (*two(), Reclaim(0)):
            device_thread.put(job).result(WAIT_S)
        assert steps(device_thread.said[:2]) == [(StepDone, 1), (StepDone, 2)]
        assert device_thread.jobs._waiter is None


def test_what_is_computed_at_once_behind_a_step_is_answered_behind_it() -> None:
    class Mixed(FakeGpu):
        def run(self, plan: StepPlan) -> Any:
            return StepDone(plan.step_id, plan.epoch, [7]) if plan.step_id == 2 else super().run(plan)

    device = Mixed(is_open=False)
    with thread(device) as device_thread:
        for job in two():
            device_thread.put(job).result(WAIT_S)
        assert not device_thread.said
        device.let(1)
        assert [found.token_ids for found in device_thread.wait_for(2)] == [[66], [7]]


@pytest.mark.parametrize(("kind", "fault"), [("MemoryError", Fault.OOM), ("RuntimeError", Fault.EXCEPTION)])
def test_a_launch_that_fails_is_answered_behind_the_step_that_is_computed(kind: str, fault: Fault) -> None:
    device = FakeGpu(is_open=False, at_launch=[2], kind=kind)
    with thread(device) as device_thread:
        first, second = two()
        device_thread.put(first).result(WAIT_S)
        device_thread.put(second).result(WAIT_S)
        reclaim = device_thread.put(Reclaim(0))
        assert not device_thread.said
        device.let(1)
        reclaim.result(WAIT_S)
        done, failed, reclaimed = device_thread.wait_for(3)
        assert (done.token_ids, reclaimed) == ([66], JobDone("Reclaim", None, 0))
        assert failed == StepFailed(2, 0, fault, f"{kind}: a fault of its launch")
        third = device_thread.put(Run(plan(step_id=3, after=2)))
        third.result(WAIT_S)
        assert device_thread.said[3].launched is False


@pytest.mark.parametrize(("kind", "fault"), [("MemoryError", Fault.OOM), ("RuntimeError", Fault.EXCEPTION)])
def test_what_surfaces_late_is_blamed_on_the_oldest_and_the_step_behind_it_fails_when_it_has_ended(
    kind: str, fault: Fault
) -> None:
    device = FakeGpu(is_open=False, late=[1], kind=kind)
    with thread(device) as device_thread:
        for job in two():
            device_thread.put(job).result(WAIT_S)
        device.let(1)
        assert device_thread.wait_for(1) == [
            StepFailed(1, 0, fault, f"{kind}: a fault of its own", launched_behind=True)
        ]
        again = device_thread.put(Run(plan(step_id=3)))
        device.let(2)
        again.result(WAIT_S)
        _, behind, done = device_thread.wait_for(3)
        assert behind == StepFailed(2, 0, Fault.EXCEPTION, BEHIND)
        assert done.token_ids == [66]
        assert device.log.index("ended 2") < device.log.index("launched 3")


def test_a_late_fault_of_a_step_alone_says_that_nothing_was_launched_behind_it() -> None:
    device = FakeGpu(late=[1])
    with thread(device) as device_thread:
        first, second = two()
        device_thread.put(first).result(WAIT_S)
        assert device_thread.wait_for(1) == [StepFailed(1, 0, Fault.EXCEPTION, "RuntimeError: a fault of its own")]
        device_thread.put(second).result(WAIT_S)
        assert device_thread.wait_for(2)[1] == StepFailed(2, 0, Fault.EXCEPTION, REFUSED, launched=False)


def test_a_late_answer_that_cannot_be_sent_fails_the_step_and_the_one_behind_it() -> None:
    device = FakeGpu(is_open=False)
    unsendable = lambda found: "too large" if isinstance(found, StepDone) and found.step_id == 1 else None  # noqa: E731
    with thread(device, unsendable) as device_thread:
        for job in two():
            device_thread.put(job).result(WAIT_S)
        device.let(2)
        first, second = device_thread.wait_for(2)
        assert first == StepFailed(1, 0, Fault.EXCEPTION, "too large", launched_behind=True)
        assert second == StepFailed(2, 0, Fault.EXCEPTION, BEHIND)


def test_an_answer_that_cannot_be_sent_before_a_launch_that_failed_says_that_it_was_begun() -> None:
    device = FakeGpu(is_open=False, at_launch=[2])
    unsendable = lambda found: "too large" if isinstance(found, StepDone) else None  # noqa: E731
    with thread(device, unsendable) as device_thread:
        for job in two():
            device_thread.put(job).result(WAIT_S)
        device.let(1)
        first, second = device_thread.wait_for(2)
        assert first == StepFailed(1, 0, Fault.EXCEPTION, "too large", launched_behind=True)
        assert second.message == "RuntimeError: a fault of its launch"


def test_a_step_takes_the_time_that_the_device_had_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 2.0, 11.0, 16.0])  # both are launched; the first ends, and then the second
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: next(now)))
    device = FakeGpu(is_open=False)
    with thread(device) as device_thread:
        for job in two():
            device_thread.put(job).result(WAIT_S)
        device.let(1)
        device_thread.wait_for(1)
        device.let(1)
        first, second = device_thread.wait_for(2)
    assert (first.took_s, first.cycle_s) == (10.0, 0.0)
    assert (second.took_s, second.cycle_s) == (5.0, 5.0)


# ---- in a process ----------------------------------------------------------------------------------------------------


async def test_answers_say_the_epoch_that_they_were_asked_in(tmp_path: Path) -> None:
    """A step that failed with the one before it ends when a job of the next epoch has come already."""
    heard: list[tuple[int, Any]] = []
    async with serving("gpu", folder=str(tmp_path), late=[1]) as server:
        server.child._on_message = lambda child, epoch, message: heard.append((epoch, message))
        (tmp_path / "hold-2").touch()
        server.run(*two())
        await appears(tmp_path / "ended-1")
        server.child.send(1, Fit(1))
        server.run(Run(plan(epoch=0, step_id=3)))
        (tmp_path / "hold-2").unlink()
        await appears(tmp_path / "ended-3")
        await eventually(lambda: any(isinstance(message, StepDone) for _, message in heard))
    answers = [(epoch, type(message)) for epoch, message in heard if isinstance(message, StepFailed | JobDone)]
    assert answers == [(0, StepFailed), (0, StepFailed), (1, JobDone)]


@pytest.mark.parametrize("poisoned", [1, 2])
async def test_a_fault_that_poisons_the_device_is_lost_with_every_step_that_is_not_answered(
    poisoned: int, tmp_path: Path
) -> None:
    server = Server("gpu", folder=str(tmp_path), poisons=[poisoned])
    await server.up()
    (tmp_path / "hold-1").touch()
    (tmp_path / "hold-2").touch()
    server.run(*two())
    await appears(tmp_path / "launched-2")
    (tmp_path / "hold-1").unlink()
    if poisoned == 2:
        assert await server.next() == StepDone(1, 0, [66])
    (tmp_path / "hold-2").unlink()
    assert "a way that only a new process recovers from" in await server.next()
    assert server.answers.empty()


async def test_killed_with_two_steps_on_the_device_its_end_is_told_and_nothing_else(tmp_path: Path) -> None:
    server = Server("gpu", folder=str(tmp_path))
    await server.up()
    (tmp_path / "hold-1").touch()
    server.run(*two())
    await appears(tmp_path / "launched-2")
    server.child.signal(signal.SIGKILL)
    assert "was killed by signal 9" in await server.next()
    assert server.answers.empty()


async def test_a_number_that_no_message_carries_fails_both() -> None:
    async with serving("gpu_beyond") as server:
        server.run(Run(plan(step_id=1, token=ord("!"))), Run(plan(step_id=2, after=1, token=SAMPLED)))
        first, second = [await server.next() for _ in range(2)]
        assert "cannot be sent" in first.message
        assert second.launched is first.launched_behind
        server.run(Run(plan(step_id=3)))
        assert await server.next() == StepDone(3, 0, [66])


async def test_a_device_is_closed_behind_both_that_it_computes(tmp_path: Path) -> None:
    server = Server("gpu", folder=str(tmp_path))
    await server.up()
    (tmp_path / "hold-1").touch()
    server.run(*two(), Close(0))
    await appears(tmp_path / "launched-2")
    (tmp_path / "hold-1").unlink()
    assert [(await server.next()).token_ids for _ in range(2)] == [[66], [67]]
    assert await server.next() == JobDone("Close", None, 0)
    assert await server.next() == f"the device's process {server.child.pid} ended with exit code 0"


async def test_an_injected_fault_of_a_launch_is_answered_in_order(tmp_path: Path) -> None:
    async with serving("gpu", folder=str(tmp_path)) as server:
        (tmp_path / "hold-1").touch()
        first, second = two()
        server.run(first, Injection(kind="oom"), second)
        await appears(tmp_path / "launched-1")
        (tmp_path / "hold-1").unlink()
        assert await server.next() == StepDone(1, 0, [66])
        assert await server.next() == StepFailed(2, 0, Fault.OOM, "MemoryError: an injected fault: out of memory")


# ---- with everything around it ---------------------------------------------------------------------------------------


def every(nth: int, kind: Callable[[str], BaseException]) -> Callable[[StepPlan], BaseException | None]:
    """Each nth step fails late."""
    return lambda plan: kind("now and then") if plan.step_id % nth == 0 else None


@pytest.mark.parametrize("fault", [None, RuntimeError, MemoryError])
async def test_streams_get_their_tokens_with_two_steps_on_the_device_whatever_fails_late(fault: Any) -> None:
    fails: dict[str, Any] = {} if fault is None else {"fails_with": every(23, fault)}
    device = FakeGpu(**fails, at_launch=[] if fault is None else range(12, 200, 31), patience_s=0.02)
    async with running(device, max_in_flight=2) as runtime:
        prompts = [[65 + i] * (3 + i) for i in range(12)]
        found = await asyncio.gather(*(answer(runtime, prompt, params(30)) for prompt in prompts))
        assert [f.token_ids for f in found] == [expected(prompt, 30) for prompt in prompts]
        assert device.num_on_device_max == 2
        await all_blocks_back(runtime)


@pytest.mark.parametrize("link", ["thread", "process"])
async def test_an_offender_among_two_steps_is_found_and_no_other_request_ends(link: str) -> None:
    async with running_gpu(link, bad=200) as runtime:
        prompts = [[65 + i] * 5 for i in range(8)]
        bad = asyncio.create_task(answer(runtime, [200] * 4))
        found = await asyncio.gather(*(answer(runtime, prompt, params(20)) for prompt in prompts))
        assert [f.token_ids for f in found] == [expected(prompt, 20) for prompt in prompts]
        assert (await bad).end.code == "step_failed"
        await all_blocks_back(runtime)


async def test_an_offender_that_poisons_the_device_is_found_by_the_processes_that_it_costs() -> None:
    async with running_gpu("process", poison=200, restarts=RestartPolicy(max_restarts=6)) as runtime:
        prompts = [[65 + i] * 5 for i in range(4)]
        bad = asyncio.create_task(answer(runtime, [200] * 4))
        found = await asyncio.gather(*(answer(runtime, prompt, params(20)) for prompt in prompts))
        assert [f.token_ids for f in found] == [expected(prompt, 20) for prompt in prompts]
        assert (await bad).end.code is not None
        assert 1 <= runtime._worker.epoch <= 4


def running_gpu(link: str, *, restarts: RestartPolicy | None = None, **arguments: Any) -> Any:
    """A system over a GPU that fails late where a step holds the token `bad`, and is poisoned by the token `poison`."""
    if link == "thread":
        return running(gpu_offended(**arguments), max_in_flight=2)
    made = partial(ProcessLink, spec("gpu_offended", **arguments))
    return running(None, link=made, max_in_flight=2, restarts=restarts or RestartPolicy(max_restarts=3))
