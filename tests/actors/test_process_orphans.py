"""A device's process never outlives its engine's, however that ends and whatever the device does."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from novainfer.actors.device.child import SERVER_MODULE
from novainfer.actors.device.wire import EXIT_ORPHANED
from tests.actors.helpers import eventually
from tests.actors.links import appears, is_gone

ENGINE = """
import asyncio, sys
from novainfer.actors.device.process import ProcessLink
from novainfer.fsm.messages.events import Fit, Load, Run, Spawn, Warm
from tests.actors.devices import spec
from tests.actors.links import plan

async def main():
    events = asyncio.Queue()
    link = ProcessLink(spec("hanging", at=[sys.argv[1]], mark=sys.argv[2]), events.put_nowait, warm_spare=True)
    life = asyncio.create_task(link.run())
    for job in (Spawn(0), Load(0), Fit(0), Warm(0)):
        link.put(job)
        await events.get()
    while not link.roster.spare or "Load" not in link.roster.spare.ahead:
        await asyncio.sleep(0.005)
    print(link.pid, link.roster.spare.pid, flush=True)
    link.put(Run(plan()))
    await life

asyncio.run(main())
"""


@pytest.mark.parametrize("device", ["idle", "hung", "frozen"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_it_is_gone_when_its_engine_is(tmp_path: Path, device: str, number: signal.Signals) -> None:
    if device == "frozen" and sys.platform != "linux":
        pytest.skip("only Linux ends a stopped process with its parent")
    mark = tmp_path / "hangs"
    engine = subprocess.Popen(  # noqa: ASYNC220 - asyncio's own would leave a thread that waits for it
        [sys.executable, "-c", ENGINE, "run" if device == "hung" else "never", str(mark)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    with engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in (await asyncio.to_thread(engine.stdout.readline)).split()]
        assert len(pids) == 2
        if device == "hung":
            await appears(mark)
        if device == "frozen":
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        engine.send_signal(number)
    await eventually(lambda: all(map(is_gone, pids)))


def test_an_engine_that_leaves_something_unread_is_gone_all_the_same() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    our_life, their_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    numbers = (theirs.fileno(), their_life.fileno(), os.getpid())
    with ours, our_life, theirs, their_life:
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", SERVER_MODULE, *map(str, numbers)],
            pass_fds=numbers[:2],
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        assert ours.recv(1, socket.MSG_PEEK), "it gives a sign of life, which nobody takes"
        time.sleep(0.2)  # until it waits for what it is told
    _, said = server.communicate(timeout=20)
    assert (server.returncode, said) == (EXIT_ORPHANED, "")
