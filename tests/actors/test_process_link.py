"""A device in a process: every job is answered, every end is told once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from novainfer.fsm import health
from novainfer.fsm.core.machine import Send
from novainfer.fsm.device import roster
from novainfer.fsm.messages.events import (
    Close,
    DeviceLost,
    Fault,
    Fit,
    JobDone,
    JobFailed,
    Kill,
    Load,
    Reclaim,
    Run,
    Spawn,
    StepFailed,
    Switch,
    Warm,
)
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.simulation.world.shape import SAFE
from tests.actors.devices import model, spec
from tests.actors.helpers import WAIT_S, eventually
from tests.actors.links import Line, appears, is_gone, linked, plan
from tests.leftovers import open_files, other_tasks


async def test_every_job_is_answered_from_another_process() -> None:
    async with linked(spec("fake", num_blocks=7)) as line:
        spawned = await line.ask(Spawn(3))
        assert spawned == JobDone("Spawn", {"pid": line.link.pid, "spare": False}, 3)
        assert line.link.pid not in (0, os.getpid())
        loaded = await line.ask(Load(3))
        assert (loaded.job, loaded.epoch, loaded.value["vocab_size"]) == ("Load", 3, 257)
        assert await line.ask(Fit(3)) == JobDone("Fit", {"num_blocks": 7}, 3)
        assert await line.ask(Warm(3)) == JobDone("Warm", None, 3)
        assert await line.step(3, step_id=9, slots=(0, 1)) == StepDone(9, 3, [66, 66])
        assert await line.ask(Switch(SAFE, 3)) == JobDone("Switch", None, 3)
        assert await line.ask(Reclaim(3)) == JobDone("Reclaim", None, 3)
        assert line.nothing_came()


async def test_a_cache_as_large_as_before_is_asked_for() -> None:
    async with linked() as line:
        await line.up(0, num_blocks=5)
        assert await line.ask(Fit(0, 11)) == JobDone("Fit", {"num_blocks": 11}, 0)


async def test_another_precision_and_another_cache_reach_the_device() -> None:
    async with linked(spec("fake", num_blocks_max=20)) as line:
        await line.ask(Spawn(0, "int8"))
        assert (await line.ask(Load(0, "int8"))).value["modes"] == [{"kernels": "fast", "precision": "int8"}]
        refused = await line.ask(Fit(0, 21, is_new=True))
        assert (refused.job, refused.message) == ("Fit", "MemoryError: at most 20 blocks fit")
        assert await line.ask(Fit(0, 21)) == JobDone("Fit", {"num_blocks": 21}, 0)


@pytest.mark.parametrize("job", ["load", "fit", "warm"])
async def test_a_job_that_raises_is_one_sentence(job: str) -> None:
    async with linked(spec("raising", at=[job])) as line:
        await line.ask(Spawn(0))
        answers = [await line.ask(Load(0)), await line.ask(Fit(0)), await line.ask(Warm(0))]
        (failed,) = [answer for answer in answers if isinstance(answer, JobFailed)]
        assert (failed.job, failed.message, failed.epoch) == (job.capitalize(), "RuntimeError: a fault of its own", 0)
        assert failed.at_s > 0, "the budget of restarts goes by when"


@pytest.mark.parametrize(("kind", "fault"), [("RuntimeError", Fault.EXCEPTION), ("MemoryError", Fault.OOM)])
async def test_a_step_that_raises_has_failed_and_the_device_goes_on(kind: str, fault: Fault) -> None:
    async with linked(spec("raising", at=["run"], kind=kind)) as line:
        await line.up()
        for step_id in (1, 2):
            assert await line.step(step_id=step_id) == StepFailed(step_id, 0, fault, f"{kind}: a fault of its own")


STAGES: dict[str, list[Any]] = {
    "spawned": [],
    "load": [Load(0)],
    "fit": [Load(0), Fit(0)],
    "warm": [Load(0), Fit(0), Warm(0)],
    "run": [Load(0), Fit(0), Warm(0), Run(plan())],
}


@pytest.mark.parametrize("stage", STAGES)
async def test_killed_at_any_stage_its_loss_is_told_once_and_another_one_takes_over(stage: str, tmp_path: Path) -> None:
    mark = tmp_path / "reached"
    async with linked(spec("hanging", at=[stage], mark=str(mark))) as line:
        await line.ask(Spawn(0))
        for job in STAGES[stage][:-1]:
            await line.ask(job)
        for job in STAGES[stage][-1:]:
            line.link.put(job)
            await appears(mark)
        pid = line.link.pid
        os.kill(pid, signal.SIGKILL)
        lost = await line.next()
        assert isinstance(lost, DeviceLost)
        assert (lost.epoch, lost.message) == (0, f"the device's process {pid} was killed by signal 9 (SIGKILL)")
        assert is_gone(pid)
        assert line.link.pid == 0
        line.link.put(Load(0))  # of an epoch that is over
        spawned = await line.ask(Spawn(1))
        assert (spawned.epoch, spawned.value["pid"] != pid) == (1, True)
        assert line.nothing_came()


async def test_killed_while_idle() -> None:
    async with linked() as line:
        await line.up()
        await line.step()
        os.kill(line.link.pid, signal.SIGKILL)
        assert isinstance(await line.next(), DeviceLost)
        await line.up(1)
        assert await line.step(1) == StepDone(1, 1, [66])


async def test_killed_where_the_system_has_no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    async with linked() as line:
        await line.up()
        pid = line.link.pid
        os.kill(pid, signal.SIGKILL)
        assert (await line.next()).message.endswith("was killed by signal 9 (SIGKILL)")
        assert is_gone(pid)
        await line.up(1)
        line.link.put(Kill(1))
        await line.up(2)


@pytest.mark.parametrize("job", ["load", "run"])
async def test_a_process_that_ends_by_itself_is_lost_with_its_exit_code(job: str) -> None:
    async with linked(spec("exiting", at=[job], code=3)) as line:
        await line.ask(Spawn(0))
        lost = await line.ask(Load(0))
        if job == "run":
            await line.ask(Fit(0))
            lost = await line.step()
        assert isinstance(lost, DeviceLost)
        assert lost.message.endswith("ended with exit code 3")


async def test_a_device_that_leaves_the_interpreter_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    async with linked(spec("raising", at=["run"], kind="SystemExit", text="enough")) as line:
        await line.up()
        lost = await line.step()
        assert isinstance(lost, DeviceLost)
        assert lost.message.endswith("ended with exit code 1")
    assert "enough" in capfd.readouterr().err


async def test_a_device_of_no_more_use_is_lost_with_its_step_which_is_blamed_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked(spec("unusable")) as line:
        await line.up()
        lost = await line.step()
        assert isinstance(lost, DeviceLost)
        assert lost.message.endswith("its device had failed in a way that only a new process recovers from")
        assert line.nothing_came()
    assert "the device is of no more use: RuntimeError: an illegal memory access was encountered" in caplog.messages


async def test_a_process_that_is_lost_to_the_capture_of_graphs_is_followed_by_one_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked(spec("captured")) as line:
        assert (await line.up())[1].value["graphs"]
        failed = await line.ask(Switch(Mode(), 0))
        assert isinstance(failed, JobFailed)
        assert failed.message.startswith("RuntimeError: captures_underway")
        lost = await line.next()
        assert isinstance(lost, DeviceLost)
        assert lost.message.endswith("its device had failed in a way that only a new process recovers from")
        assert not (await line.up(1))[1].value["graphs"]
        assert isinstance(await line.ask(Switch(Mode(), 1)), JobDone)
    assert "no CUDA graphs from the next process on: one was lost as it captured them" in caplog.messages


async def test_a_loss_that_is_seen_with_an_answer_does_not_overtake_it() -> None:
    async with linked() as line:
        failed, lost = JobFailed("Switch", "a fault", 0), DeviceLost(0, "it has ended")
        line.link._perform(Send("", failed))
        line.link._perform(Send("", lost))
        told = [await line.next(), await line.next()]
        assert [type(event) for event in told] == [JobFailed, DeviceLost]


async def test_a_frozen_process_is_silent_and_a_hung_one_is_not(tmp_path: Path) -> None:
    async with linked(spec("hanging", at=["run"], mark=str(tmp_path / "hangs"))) as line:
        await line.up()
        line.link.put(Run(plan()))
        await appears(tmp_path / "hangs")
        for _ in range(3):  # it beats: silence ends again and again
            await eventually(lambda: (line.link.silence_s() or 0.0) > 0.04)
            await eventually(lambda: (line.link.silence_s() or 0.0) < 0.04)
        line.link.inject("freeze")
        await eventually(lambda: (line.link.silence_s() or 0.0) > 0.4)
        os.kill(line.link.pid, signal.SIGCONT)
        await eventually(lambda: (line.link.silence_s() or 0.0) < 0.1)
        line.link.inject("freeze")
        pid = line.link.pid
        line.link.put(Kill(0))
        assert line.link.silence_s() is None
        await eventually(lambda: is_gone(pid))
        await line.up(1)
        assert line.link.pid != pid


async def test_silence_is_borne_while_the_process_comes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked() as line:
        await line.ask(Spawn(0))
        await line.ask(Load(0))
        line.link.inject("freeze")
        worker = line.link.roster.worker
        assert worker is not None
        seen = line.link._seen[worker.serial]
        await eventually(lambda: (line.link.silence_s(), seen._silence._silent_s > 0.4)[1])
        assert line.link.silence_s() == 0.0
        monkeypatch.setattr(health, "LOAD_SILENCE_S", 0.1)
        assert (line.link.silence_s() or 0.0) > 0.2


async def test_the_loops_own_pause_is_not_the_process_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked() as line:
        await line.up()
        line.link.inject("freeze")
        await eventually(lambda: (line.link.silence_s() or 0.0) > 0.2)
        loop = asyncio.get_running_loop()
        later_s = loop.time() + 3600.0
        with monkeypatch.context() as patch:
            patch.setattr(loop, "time", lambda: later_s)
            assert (line.link.silence_s() or 0.0) < 3.0
        line.link.put(Kill(0))


async def test_a_kill_ends_a_hung_process_and_nothing_answers(tmp_path: Path) -> None:
    async with linked(spec("hanging", at=["run"], mark=str(tmp_path / "hangs"))) as line:
        await line.up()
        line.link.put(Run(plan()))
        await appears(tmp_path / "hangs")
        pid = line.link.pid
        line.link.put(Kill(0))
        await eventually(lambda: is_gone(pid))
        assert line.nothing_came()
        line.link.put(Kill(0))  # twice is once
        await line.up(1)
        assert (await line.ask(Reclaim(1))).epoch == 1


async def test_a_worker_that_could_not_be_brought_up_is_replaced_with_its_process() -> None:
    async with linked(spec("raising", at=["load"])) as line:
        await line.ask(Spawn(0))
        assert isinstance(await line.ask(Load(0)), JobFailed)
        pid = line.link.pid
        line.link.put(Kill(0))
        assert (await line.ask(Spawn(1))).value["pid"] != pid
        await eventually(lambda: is_gone(pid))
        assert line.nothing_came()


@pytest.mark.parametrize("executable", ["/no/such/python", ""])
async def test_a_process_that_cannot_be_started_is_a_failed_job(
    monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    files = open_files()
    async with linked() as line:
        monkeypatch.setattr(sys, "executable", executable)
        failed = await line.ask(Spawn(0))
        assert isinstance(failed, JobFailed)
        assert failed.message.startswith("the device's process cannot be started: ")
    assert open_files() <= files


async def test_a_model_that_is_not_there_is_one_sentence() -> None:
    async with linked(model("/no/such/model")) as line:
        failed = await line.ask(Spawn(0))
        assert isinstance(failed, JobFailed)
        assert "/no/such/model" in failed.message
        assert "\n" not in failed.message


@pytest.mark.slow
async def test_the_demo_model_computes_in_its_process_and_this_one_hears_of_its_progress() -> None:
    seen: list[tuple[int, int]] = []
    async with linked(model("demo"), on_progress=lambda done, of: seen.append((done, of))) as line:
        answers = await line.up()
        assert all(isinstance(answer, JobDone) for answer in answers), answers
        assert seen
        assert seen[-1][0] == seen[-1][1]
        reads = len(seen)
        os.kill(line.link.pid, signal.SIGKILL)
        assert isinstance(await line.next(), DeviceLost)
        await line.up(1, num_blocks=answers[2].value["num_blocks"])
        assert len(seen) == reads, "a restart is no progress"
        assert isinstance(await line.step(1), StepDone)


async def test_what_the_process_logs_is_in_our_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="novainfer"):
        async with linked(spec("telling", line="from over there: 100%")) as line:
            await line.ask(Spawn(0))
            loaded = await line.ask(Load(0))
    heard = [(r.name, r.levelname, r.getMessage()) for r in caplog.records]
    assert ("novainfer.kernels.test", "INFO", "from over there: 100%") in heard
    assert not [text for _, _, text in heard if "nobody asked" in text]
    assert loaded.value["omp"] == "passive"
    assert set(loaded.value["path"]) >= {entry for entry in sys.path if entry}


async def test_signals_for_the_terminal_and_the_service_are_not_for_the_process() -> None:
    async with linked() as line:
        await line.up()
        assert os.getpgid(line.link.pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(line.link.pid, number)
        assert isinstance(await line.step(), StepDone)


async def test_the_device_is_closed_before_its_process_ends(tmp_path: Path) -> None:
    mark, gate = tmp_path / "closing", tmp_path / "gate"
    async with linked(spec("gated", at=["close"], mark=str(mark), gate=str(gate)), close=False) as line:
        await line.up()
        line.link.put(Close(0))
        line.link.stop()
        await appears(mark)
        gate.touch()
        assert await line.next() == JobDone("Close", None, 0)


async def test_a_device_that_cannot_be_closed_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "CLOSE_S", 0.05)
    async with linked(spec("hanging", at=["run"], mark=str(tmp_path / "hangs"))) as line:
        await line.up()
        line.link.put(Run(plan()))
        await appears(tmp_path / "hangs")
        pid = line.link.pid
    assert is_gone(pid)
    assert line.nothing_came()


async def test_stopped_without_closing_it_ends_at_once() -> None:
    async with linked(close=False) as line:
        await line.ask(Spawn(0))
        pid = line.link.pid
    assert is_gone(pid)


async def test_cancelled_it_leaves_no_process(tmp_path: Path) -> None:
    line = Line(spec("hanging", at=["load"], mark=str(tmp_path / "hangs")))
    life = asyncio.create_task(line.link.run())
    await line.ask(Spawn(0))
    pid = line.link.pid
    line.link.put(Load(0))
    await appears(tmp_path / "hangs")
    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life
    assert is_gone(pid)
    assert line.nothing_came()


async def test_stopped_before_it_ran_it_ends_at_once() -> None:
    line = Line()
    line.link.stop()
    async with asyncio.timeout(WAIT_S):
        await line.link.run()


@pytest.mark.slow
async def test_fifty_lives_leave_no_files_threads_tasks_or_processes() -> None:
    async def one(at: int) -> None:
        async with linked(close=at % 2 == 0) as line:
            await line.up()
            if at % 3 == 0:
                os.kill(line.link.pid, signal.SIGKILL)
                await line.next()

    await one(0)  # what is made once
    before = open_files(), threading.active_count(), other_tasks(), len(psutil.Process().children())
    for at in range(50):
        await one(at)
    assert (open_files(), threading.active_count(), other_tasks(), len(psutil.Process().children())) == before


def test_it_works_on_uvloop_too() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def live() -> None:
        async with linked() as line:
            await line.up()
            os.kill(line.link.pid, signal.SIGKILL)
            assert isinstance(await line.next(), DeviceLost)
            await line.up(1)
            assert await line.step(1) == StepDone(1, 1, [66])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(live())
