"""A device's process that is out of its mind, and one that is told to fail: both end in an event, never in a hang."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from novainfer.actors.device import child
from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.events import DeviceLost, Kill, Run, Spawn, StepFailed
from novainfer.fsm.messages.step import StepDone
from tests.actors.helpers import eventually
from tests.actors.links import is_gone, linked, plan


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("garbage", "is gone: it was ended, because it sent a frame of 4294967295 bytes"),
        ("twice", "is gone: it was ended, because it sent frame 0 came where frame 1 was due"),
        ("half a frame", "ended with exit code 0"),
        ("closes", "was killed by signal 9"),
    ],
)
async def test_one_that_does_not_speak_the_language_is_ended(
    monkeypatch: pytest.MonkeyPatch, how: str, said: str
) -> None:
    monkeypatch.setattr(child, "SERVER_MODULE", "tests.actors.bad_server")
    monkeypatch.setenv("NOVA_BAD_SERVER", how)
    async with linked() as line:
        await line.ask(Spawn(0))
        lost = await line.next()
        assert isinstance(lost, DeviceLost)
        assert said in lost.message
        assert line.link.pid == 0


async def test_answers_that_nobody_asked_for_are_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "SERVER_MODULE", "tests.actors.bad_server")
    monkeypatch.setenv("NOVA_BAD_SERVER", "unasked")
    async with linked() as line:
        await line.ask(Spawn(0))
        heard = line.child(line.link.roster.worker)
        await eventually(lambda: heard._reader._seq == 5)
        assert line.nothing_came()


async def test_one_that_is_told_garbage_says_so_and_ends(capfd: pytest.CaptureFixture[str]) -> None:
    async with linked() as line:
        await line.up()
        line.child(line.link.roster.worker)._sock.send(b"\xff" * 64)
        lost = await line.next()
        assert lost.message.endswith("ended with exit code 71: it did not understand what it was told")
    assert "novainfer: the engine sent a frame of 4294967295 bytes" in capfd.readouterr().err


async def test_one_that_does_not_listen_is_ended_when_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "SERVER_MODULE", "tests.actors.bad_server")
    monkeypatch.setattr(child, "UNSENT_BYTES_MAX", 2**20)
    monkeypatch.setenv("NOVA_BAD_SERVER", "deaf")
    async with linked() as line:
        await line.ask(Spawn(0))
        big = plan()
        big.input_ids = list(range(2**16, 2**16 + 1_000_000))
        line.link.put(Run(big))
        lost = await line.next()
        assert lost.message.endswith("is gone: it no longer read what it was told")


async def test_what_it_does_not_read_at_once_it_reads_later() -> None:
    async with linked() as line:
        await line.up()
        line.link.inject("freeze")
        big = plan()
        big.input_ids = [65] * 1_000_000
        big.query_lens = [1_000_000]
        line.link.put(Run(big))
        process = line.child(line.link.roster.worker)
        assert process._unsent
        os.kill(line.link.pid, signal.SIGCONT)
        assert await line.next() == StepDone(1, 0, [66])
        assert not process._unsent
        assert not asyncio.get_running_loop().remove_writer(process._sock), "the loop would turn for nothing"


# ---- faults on request ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "said"), [("oom", "out of memory"), ("exception", "an injected fault")])
async def test_a_step_fails_on_request(kind: str, said: str) -> None:
    async with linked() as line:
        await line.up()
        line.link.inject(kind)
        failed = await line.step()
        assert isinstance(failed, StepFailed)
        assert said in failed.message
        assert isinstance(await line.step(), StepDone)


async def test_memory_is_eaten_on_request_and_the_process_goes_on() -> None:
    async with linked() as line:
        await line.up()
        line.link.inject("eat_memory")
        failed = await line.step()
        assert isinstance(failed, StepFailed)
        assert failed.fault == "oom"
        assert isinstance(await line.step(), StepDone)


async def test_it_is_killed_and_hangs_on_request() -> None:
    async with linked() as line:
        await line.up()
        line.link.inject("kill")
        lost = await line.next()
        assert "signal 9" in lost.message
        with pytest.raises(InvalidParameter, match="no worker process at the moment"):
            line.link.inject("kill")
        await line.up(1)
        line.link.inject("hang")
        line.link.put(Run(plan(1)))
        pid = line.link.pid
        line.link.put(Kill(1))
        await eventually(lambda: is_gone(pid))
        assert line.nothing_came()
