"""A warm spare: loaded ahead, it takes over at once; one that is lost is replaced, but not for ever."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from novainfer.fsm.device import roster
from novainfer.fsm.device.process import ProcessState
from novainfer.fsm.device.roster import SPARE_DEATHS_MAX, RosterState
from novainfer.fsm.messages.events import DeviceLost, Fit, Incident, JobDone, Kill, Load, Spawn, Warm
from novainfer.fsm.messages.mode import CHECKPOINT, INT8
from novainfer.fsm.messages.step import StepDone
from tests.actors.devices import model, spec
from tests.actors.helpers import eventually
from tests.actors.links import Line, appears, is_gone, linked
from tests.leftovers import open_files


def spare_of(line: Line) -> Any:
    spare = line.link.roster.spare
    assert spare is not None
    line.pids.add(spare.pid)
    return spare


def is_ready(line: Line) -> bool:
    spare = line.link.roster.spare
    return spare is not None and spare.is_ready_to_step_in


async def kill(line: Line, pid: int | None = None) -> None:
    os.kill(pid or line.link.pid, signal.SIGKILL)
    if pid is None:
        assert isinstance(await line.next(), DeviceLost)


async def test_it_takes_over_with_everything_done() -> None:
    async with linked(spec("raising", at=[]), warm_spare=True) as line:
        first = await line.up(0, num_blocks=9)
        await eventually(lambda: is_ready(line))
        spare = spare_of(line)
        await kill(line)
        again = await line.up(1, num_blocks=9)
        assert line.link.roster.worker is spare
        assert spare.state is ProcessState.READY, "nothing had to be asked for"
        assert again[0] == JobDone("Spawn", {"pid": spare.pid, "spare": True}, 1)
        assert [(a.job, a.value, a.epoch) for a in again[1:]] == [(a.job, a.value, 1) for a in first[1:]]
        assert await line.step(1) == StepDone(1, 1, [66])
        await eventually(lambda: is_ready(line))  # and there is another one
        assert spare_of(line).pid != line.link.pid


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shares memory by memfd")
@pytest.mark.parametrize("quantization", [None, "int8"])
async def test_it_shares_the_weights_that_the_worker_has_packed(quantization: str | None) -> None:
    async with linked(model("demo", native="1", quantization=quantization), warm_spare=True) as line:
        first = (await line.up())[1].value
        await eventually(lambda: is_ready(line))
        await kill(line)
        second = (await line.up(1))[1].value
        assert (first["weights"], second["weights"]) in {("packed", "mapped"), ("own", "own")}
        assert first["weights"] == "packed" or not first["kernels"]["linear"].startswith("native")
        assert first["modes"] == second["modes"]
        assert {mode["precision"] for mode in second["modes"]} == {quantization or "checkpoint"}
        assert (await line.step(1)).token_ids


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shares memory by memfd")
async def test_in_another_precision_it_shares_other_weights() -> None:
    files = open_files()
    async with linked(model("demo", native="1"), warm_spare=True) as line:
        await line.up()
        found = []
        for epoch, precision in ((1, INT8), (3, CHECKPOINT)):
            line.link.put(Kill(epoch - 1))
            up = Spawn(epoch, precision), Load(epoch, precision), Fit(epoch), Warm(epoch)
            found += [await line.ask(job) for job in up]
            await eventually(lambda: is_ready(line))
            await kill(line)
            assert (await line.ask(Spawn(epoch + 1, precision))).value["spare"]
            found += [await line.ask(job) for job in (Load(epoch + 1, precision), Fit(epoch + 1), Warm(epoch + 1))]
        loads = [answer.value for answer in found if answer.job == "Load"]
        assert [load["modes"][0]["precision"] for load in loads] == [INT8, INT8, CHECKPOINT, CHECKPOINT]
        assert [load["weights"] for load in loads] in (["packed", "mapped"] * 2, ["own"] * 4)
        assert loads[0]["weights"] == "packed" or not loads[0]["kernels"]["linear"].startswith("native")
    assert open_files() == files


async def test_it_stands_by_only_once_the_worker_is_warm() -> None:
    async with linked(warm_spare=True) as line:
        for job in (Spawn(0), Load(0), Fit(0)):
            await line.ask(job)
            assert line.link.roster.spare is None
        await line.ask(Warm(0))
        assert line.link.roster.spare is not None


async def test_what_the_worker_died_of_is_in_the_log_if_not_in_the_event(caplog: pytest.LogCaptureFixture) -> None:
    async with linked(spec("raising", at=[]), warm_spare=True) as line:
        await line.up()
        await eventually(lambda: is_ready(line))
        pid = line.link.pid
        os.kill(pid, signal.SIGKILL)
        lost = await line.next()
        assert isinstance(lost, DeviceLost)
        assert lost.message.startswith(f"the device's process {pid} ")
        await eventually(lambda: f"process {pid} was killed by signal 9" in caplog.text)
        assert line.nothing_came()


async def test_needed_while_it_loads_it_takes_over_and_answers_when_it_has_loaded(tmp_path: Path) -> None:
    mark, gate = tmp_path / "loading", tmp_path / "gate"
    gate.touch()
    async with linked(spec("gated", at=["load"], mark=str(mark), gate=str(gate)), warm_spare=True) as line:
        await line.up()
        gate.unlink()
        mark.unlink(missing_ok=True)
        await appears(mark)
        spare = spare_of(line)
        await kill(line)
        assert (await line.ask(Spawn(1))).value["spare"]
        line.link.put(Load(1))
        assert line.nothing_came()
        gate.touch()
        loaded = await line.next()
        assert (loaded.job, loaded.epoch) == ("Load", 1)
        assert await line.ask(Fit(1, 5)) == JobDone("Fit", {"num_blocks": 5}, 1)
        assert line.link.roster.worker is spare


async def test_where_memory_is_not_lazy_it_only_loads() -> None:
    async with linked(spec("fake"), warm_spare=True) as line:
        await line.up()
        await eventually(lambda: "Load" in spare_of(line).ahead)
        assert spare_of(line).state is ProcessState.IDLE
        await kill(line)
        assert [answer.job for answer in await line.up(1)] == ["Spawn", "Load", "Fit", "Warm"]


async def test_one_that_dies_is_replaced_but_not_for_ever_and_each_is_an_incident() -> None:
    async with linked(spec("raising", at=[]), warm_spare=True) as line:
        await line.up()
        for number in range(SPARE_DEATHS_MAX):
            await eventually(lambda: is_ready(line))
            pid = spare_of(line).pid
            os.kill(pid, signal.SIGKILL)
            incident = await line.next()
            assert isinstance(incident, Incident)
            assert (incident.kind, str(pid) in incident.message) == ("spare", True)
            is_last = number == SPARE_DEATHS_MAX - 1
            assert incident.action.startswith("there is none until" if is_last else "another one is started")
            await eventually(lambda pid=pid: is_gone(pid))
        await eventually(lambda: line.link.roster.state is RosterState.SINGLE and not line.link.roster.ending)
        assert await line.step() == StepDone(1, 0, [66])
        assert line.nothing_came()


async def test_one_that_cannot_load_is_given_up_and_that_is_an_incident(tmp_path: Path) -> None:
    mark, gate = tmp_path / "first", tmp_path / "gate"
    gate.touch()
    async with linked(spec("loading_once", mark=str(mark)), warm_spare=True) as line:
        await line.up()
        for _ in range(SPARE_DEATHS_MAX):
            incident = await line.next()
            assert "it could not load the model: RuntimeError: the second time" in incident.message
        assert line.link.roster.spare is None
        assert await line.step() == StepDone(1, 0, [66])


async def test_a_frozen_one_is_not_taken_and_costs_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "PROBE_S", 0.3)
    async with linked(spec("raising", at=[]), warm_spare=True) as line:
        await line.up()
        await eventually(lambda: is_ready(line))
        pid = spare_of(line).pid
        os.kill(pid, signal.SIGSTOP)
        await kill(line)
        line.link.put(Spawn(1))
        incident, spawned = await line.next(), await line.next()
        assert "it was silent when it was needed" in incident.message
        assert spawned == JobDone("Spawn", {"pid": line.link.pid, "spare": False}, 1)
        await eventually(lambda: is_gone(pid))


@pytest.mark.parametrize("first", ["worker", "spare"])
async def test_a_spare_that_is_killed_together_with_the_worker_is_no_second_loss(first: str) -> None:
    async with linked(spec("raising", at=[]), warm_spare=True) as line:
        await line.up()
        await eventually(lambda: is_ready(line))
        pids = [line.link.pid, spare_of(line).pid]
        for pid in pids if first == "worker" else reversed(pids):
            os.kill(pid, signal.SIGKILL)
        line.link._dying(line.child(line.link.roster.worker))  # before the loop has seen either of them
        assert isinstance(await line.next(), DeviceLost)
        line.link.put(Spawn(1))
        events = [await line.next() for _ in range(2)]
        assert sorted(type(event).__name__ for event in events) == ["Incident", "JobDone"]
        (spawned,) = [event for event in events if isinstance(event, JobDone)]
        assert spawned == JobDone("Spawn", {"pid": line.link.pid, "spare": False}, 1)
        for job in (Load(1), Fit(1), Warm(1)):
            assert isinstance(await line.ask(job), JobDone)
        assert await line.step(1) == StepDone(1, 1, [66])


async def test_it_is_gone_with_the_worker_and_so_is_what_they_shared() -> None:
    files = open_files()
    async with linked(warm_spare=True) as line:
        await line.up()
        pid = spare_of(line).pid
        assert open_files() > files
    assert is_gone(pid)
    assert open_files() <= files
