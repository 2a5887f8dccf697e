"""Past the restart budget: every stream is told once, health says so, and the process ends with an error code."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.reliability import trials

pytestmark = pytest.mark.slow


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_when_the_worker_may_not_be_restarted_every_stream_ends_with_one_error_and_the_exit_code_says_so() -> (
    None
):
    async with trials.serving("--max-restarts", "0", expect=None) as (process, url):
        async with trials.clients(url) as (http1, http2):
            pid = await trials.worker_pid(http1)
            progress = trials.Progress(200)
            streams = asyncio.create_task(trials.all_streams(http1, http2, progress))
            await progress.is_there.wait()
            os.kill(pid, signal.SIGKILL)
            seen = await streams
        async with asyncio.timeout(trials.TIMEOUT_S):
            code = await process.wait()
    # Those that had no token yet are told by the status.
    assert {one.end for one in seen} - {"status 500"} == {"error engine_dead"}
    assert code not in (0, None)
    assert not is_running(pid)


async def test_a_server_that_is_killed_leaves_no_worker_behind() -> None:
    async with trials.serving("--warm-spare", expect=-signal.SIGKILL) as (process, url):
        async with trials.clients(url) as (http1, _):
            pid = await trials.worker_pid(http1)
        process.kill()
        await process.wait()
        async with asyncio.timeout(trials.TIMEOUT_S):
            while is_running(pid):  # noqa: ASYNC110 - it sees its socket closed
                await asyncio.sleep(0.01)
