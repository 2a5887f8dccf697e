"""Two steps in a device's process: the second is there when the first ends, and is begun only if that ended well."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from novainfer.actors.device.child import Child
from novainfer.actors.device.fake import successor
from novainfer.actors.device.faulty import Injection
from novainfer.actors.device.server import DeviceServer
from novainfer.actors.device.wire import FrameWriter, Hello, Ping, Unsent
from novainfer.fsm.messages.events import Close, Fault, Fit, JobDone, Load, Reclaim, Run, StepFailed, Warm
from novainfer.fsm.messages.step import SAMPLED, StepDone
from tests.actors.devices import spec
from tests.actors.helpers import WAIT_S, eventually
from tests.actors.links import appears, plan

JOBS = (Load(0), Fit(0), Warm(0))
REFUSED = "step 1, which it follows, did not end well just before it"


class Server:
    """A device's process without the machines that talk to it, and what it has said."""

    def __init__(self, name: str, **arguments: Any) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.child = Child(self._heard, lambda child: None, lambda child, end: self.answers.put_nowait(end))
        self.child.send(0, Hello(spec(name, **arguments), logging.WARNING))
        self.run(*JOBS)

    def _heard(self, child: Child, epoch: int, message: Any) -> None:
        if isinstance(message, JobDone | StepDone | StepFailed):
            self.answers.put_nowait(message)

    def run(self, *jobs: Any) -> None:
        for job in jobs:
            self.child.send(0, job)

    async def next(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            answer = await self.answers.get()
        return msgspec.structs.replace(answer, took_s=0.0, cycle_s=0.0) if isinstance(answer, StepDone) else answer

    async def up(self) -> None:
        for _ in JOBS:
            assert isinstance(await self.next(), JobDone)


@asynccontextmanager
async def serving(name: str = "fake", **arguments: Any) -> AsyncIterator[Server]:
    server = Server(name, **arguments)
    try:
        await server.up()
        yield server
    finally:
        server.child.kill()
        while not isinstance(await server.next(), str):
            pass


def two(**more: Any) -> tuple[Run, Run]:
    """A step, and one that follows it, which were planned together."""
    return Run(plan(step_id=1, **more)), Run(plan(step_id=2, token=SAMPLED, after=1, **more))


def stand_still_until_there_is(path: Path) -> None:
    """And let nothing else happen on the loop."""
    until_s = time.monotonic() + WAIT_S
    while not path.exists():
        time.sleep(0.001)
        assert time.monotonic() < until_s


async def test_the_second_goes_on_with_what_the_first_has_sampled() -> None:
    async with serving() as server:
        server.run(*two(slots=(3, 5)), Run(plan(step_id=3, token=SAMPLED, after=2, slots=(5,))))
        assert [await server.next() for _ in range(3)] == [
            StepDone(1, 0, [66, 66]), StepDone(2, 0, [67, 67]), StepDone(3, 0, [68])
        ]  # fmt: skip


async def test_the_second_begins_without_a_word_from_the_engine(tmp_path: Path) -> None:
    async with serving("stepping", folder=str(tmp_path)) as server:
        (tmp_path / "hold-1").touch()
        server.run(*two())
        await appears(tmp_path / "1")
        assert not (tmp_path / "2").exists()
        (tmp_path / "hold-1").unlink()
        stand_still_until_there_is(tmp_path / "2")  # so that no answer is read
        assert server.answers.empty()
        assert [await server.next() for _ in range(2)] == [StepDone(1, 0, [66]), StepDone(2, 0, [67])]


async def test_the_second_is_read_while_the_first_is_computed(tmp_path: Path) -> None:
    """However large: it does not wait in the socket, which could not hold it."""
    async with serving("stepping", folder=str(tmp_path)) as server:
        (tmp_path / "hold-1").touch()
        first, second = two()
        second.plan.swap_out_blocks = [2**40] * 2**20
        server.run(first, second)
        await appears(tmp_path / "1")
        await eventually(lambda: not server.child._unsent)
        assert server.answers.empty()
        (tmp_path / "hold-1").unlink()
        assert [(await server.next()).step_id for _ in range(2)] == [1, 2]


@pytest.mark.parametrize(("kind", "fault"), [("RuntimeError", Fault.EXCEPTION), ("MemoryError", Fault.OOM)])
async def test_what_follows_a_step_that_failed_is_not_begun(kind: str, fault: Fault, tmp_path: Path) -> None:
    async with serving("stepping", folder=str(tmp_path), fails=[1], kind=kind) as server:
        server.run(*two(), Run(plan(step_id=3, token=SAMPLED, after=2)), Reclaim(0), Run(plan(step_id=4)))
        assert await server.next() == StepFailed(1, 0, fault, f"{kind}: a fault of its own")
        assert await server.next() == StepFailed(2, 0, Fault.EXCEPTION, REFUSED, launched=False)
        why = REFUSED.replace("1", "2")
        assert await server.next() == StepFailed(3, 0, Fault.EXCEPTION, why, launched=False)
        assert isinstance(await server.next(), JobDone)
        assert await server.next() == StepDone(4, 0, [66])
        assert not (tmp_path / "2").exists()
        assert not (tmp_path / "3").exists()


async def test_what_was_refused_or_failed_has_changed_no_token(tmp_path: Path) -> None:
    async with serving("stepping", folder=str(tmp_path), fails=[3]) as server:
        server.run(
            Run(plan(step_id=1)),
            Run(plan(step_id=2, after=7, token=90)),
            Run(plan(step_id=3, token=80)),
            Run(plan(step_id=4, token=50, slots=(1,))),
            Run(plan(step_id=5, after=4, token=SAMPLED)),
        )
        found = [await server.next() for _ in range(5)]
        assert [type(answer) for answer in found] == [StepDone, StepFailed, StepFailed, StepDone, StepDone]
        assert found[4].token_ids == [67], "what the first step gave that slot"


async def test_a_row_without_a_token_is_no_failure(tmp_path: Path) -> None:
    async with serving("stepping", folder=str(tmp_path), nothing=65) as server:
        server.run(*two())
        assert await server.next() == StepDone(1, 0, [-1])
        second = await server.next()
        assert (type(second), second.token_ids) == (StepDone, [successor(0)])


async def test_an_answer_that_could_not_be_sent_is_not_followed() -> None:
    async with serving("beyond") as server:
        server.run(Run(plan(step_id=1, token=ord("!"))), Run(plan(step_id=2, after=1)), Run(plan(step_id=3)))
        first, second, third = [await server.next() for _ in range(3)]
        assert "cannot be sent" in first.message
        assert (second.message, second.launched) == (REFUSED, False)
        assert third == StepDone(3, 0, [66])


async def test_a_step_that_could_not_be_sent_is_answered_in_its_turn(tmp_path: Path) -> None:
    async with serving("stepping", folder=str(tmp_path)) as server:
        (tmp_path / "hold-1").touch()
        failed = StepFailed(2, 0, Fault.EXCEPTION, "it cannot be sent", launched=False)
        server.run(Run(plan(step_id=1)), Unsent(failed), Run(plan(step_id=3, after=1)), Run(plan(step_id=4)))
        await appears(tmp_path / "1")
        (tmp_path / "hold-1").unlink()
        first, second, third, fourth = [await server.next() for _ in range(4)]
        assert (first.step_id, second) == (1, failed)
        assert (third.message, third.launched) == (REFUSED, False)
        assert fourth == StepDone(4, 0, [66])


@pytest.mark.parametrize("at", [1, 2])
async def test_a_fault_is_injected_in_the_order_in_which_it_was_told(at: int) -> None:
    async with serving() as server:
        jobs = [*two(), Run(plan(step_id=3))]
        server.run(*jobs[: at - 1], Injection(kind="exception"), *jobs[at - 1 :])
        found = [await server.next() for _ in range(3)]
        good = [type(answer) is StepDone for answer in found]
        assert good == ([False, False, True] if at == 1 else [True, False, True])
        assert found[1].launched is (at == 2)


async def test_killed_between_two_steps_its_end_is_told_once_and_nothing_else(tmp_path: Path) -> None:
    async with serving("stepping", folder=str(tmp_path)) as server:
        (tmp_path / "hold-2").touch()
        server.run(*two())
        await appears(tmp_path / "2")
        server.child.signal(signal.SIGKILL)
        assert await server.next() == StepDone(1, 0, [66])
        assert "was killed by signal 9" in await server.next()
        assert server.answers.empty()
        server.answers.put_nowait("for the end of this test")


async def test_a_device_is_closed_behind_both(tmp_path: Path) -> None:
    server = Server("stepping", folder=str(tmp_path))
    await server.up()
    (tmp_path / "hold-1").touch()
    server.run(*two(), Close(0))
    await appears(tmp_path / "1")
    (tmp_path / "hold-1").unlink()
    assert [(await server.next()).token_ids for _ in range(2)] == [[66], [67]]
    assert await server.next() == JobDone("Close", None, 0)
    assert await server.next() == f"the device's process {server.child.pid} ended with exit code 0"


async def test_garbage_ends_the_process_behind_the_steps_that_came_before_it(tmp_path: Path) -> None:
    server = Server("stepping", folder=str(tmp_path))
    await server.up()
    (tmp_path / "hold-1").touch()
    server.run(*two())
    server.child._sock.send(b"\x00\x00\x00\x05hello")
    await appears(tmp_path / "1")
    (tmp_path / "hold-1").unlink()
    assert [(await server.next()).token_ids for _ in range(2)] == [[66], [67]]
    assert "exit code 71: it did not understand what it was told" in await server.next()


# ---- memory ----------------------------------------------------------------------------------------------------------


class Short:
    """Calls `real`, but the first of them finds no memory."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.is_short = True

    def __call__(self, *arguments: Any) -> Any:
        if self.is_short:
            self.is_short = False
            raise MemoryError
        return self.real(*arguments)


@pytest.mark.parametrize("name", ["take", "_decode"])
def test_what_found_no_memory_while_a_step_was_computed_is_read_when_it_has_ended(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that is under way may have taken it all."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = DeviceServer(theirs, -1)
        short = Short(getattr(server._reader, name))
        monkeypatch.setattr(server._reader, name, short)
        frames = FrameWriter()
        ours.sendall(frames.frame(3, Ping()) + frames.frame(4, Run(plan())))
        server._read_ahead()
        assert (short.is_short, list(server._heard)) == (False, [])
        assert [server._next(), server._next()] == [(3, Ping()), (4, Run(plan()))]
        ours.sendall(frames.frame(5, Ping()))
        server._read_ahead()
        server._read_ahead()  # nothing more is there, which it does not wait for
        assert list(server._heard) == [(5, Ping())]
        short.is_short = True
        ours.sendall(frames.frame(6, Ping()))
        assert server._next() == (5, Ping())
        with pytest.raises(MemoryError):  # no step is under way: the process has no reason to wait
            server._next()
