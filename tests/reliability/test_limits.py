"""What a machine may lack: memory at the start, room on its disk, an init that takes orphans."""

from __future__ import annotations

import asyncio
import ctypes
import resource
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.reliability import attack, trials
from tests.reliability.test_the_end import is_running

MIB = 2**20
PR_SET_CHILD_SUBREAPER = 36


@pytest.mark.parametrize(
    "limit_mib",
    [
        pytest.param(320, marks=pytest.mark.slow),  # the libraries do not fit, nor the tokenizer
        pytest.param(500, marks=pytest.mark.slow),  # the worker's process is ended by the loader of libraries, or C++
        pytest.param(800, marks=pytest.mark.long),  # nor the model
        pytest.param(1500, marks=pytest.mark.long),  # nor its KV cache
    ],
)
async def test_a_start_without_enough_memory_ends_with_one_sentence_that_says_so_and_code_2(limit_mib: int) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "novainfer.server", "--port", "0"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_mib * MIB, limit_mib * MIB)),
    )
    try:
        async with asyncio.timeout(trials.TIMEOUT_S):
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    text = err.decode()
    assert process.returncode == 2, text
    assert "Traceback" not in text
    assert "WARNING" not in text
    last = text.splitlines()[-1]
    assert last.startswith("Error: "), text
    assert "memory" in last


@pytest.mark.slow
async def test_a_disk_that_is_full_costs_a_recording_and_nothing_else() -> None:
    most = 16 * 1024  # bytes of any file: a write beyond it fails as on a full disk
    async with attack.serving((), ((resource.RLIMIT_FSIZE, most),)) as target, attack.Neighbour(target) as neighbour:
        for _ in range(20):  # so that there is more to record than fits
            assert await neighbour.ask() is not None
        async with httpx.AsyncClient(base_url=target.url, headers={"authorization": "Bearer boss"}) as admin:
            for _ in range(3):
                response = await admin.post("/v1/recorder/dump", timeout=attack.TIMEOUT_S)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (503, "recorder_unavailable")
                assert "cannot be written" in error["message"]
            assert (await admin.post("/v1/faults", json={"kind": "exception"})).status_code == 200
            assert await neighbour.ask() is not None  # its step fails once, and its recording cannot be written either
        assert await neighbour.ask() is not None


@pytest.fixture
def subreaper() -> Iterator[None]:
    """Orphans of this process's descendants are given to it, not to init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        pytest.skip("only Linux has subreapers")
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("subreaper")
async def test_a_killed_server_leaves_no_worker_where_orphans_go_elsewhere_than_to_init() -> None:
    async with trials.serving("--warm-spare", expect=-9) as (process, url):
        async with trials.clients(url) as (http1, _):
            await trials.worker_pid(http1)
            pids = attack.children(process.pid)
            assert len(pids) >= 2
            await trials.inject(http1, "exception")  # not idle: what it does when it is told may differ
        process.kill()
        await process.wait()
        async with asyncio.timeout(trials.TIMEOUT_S):
            while any(map(is_running, pids)):  # noqa: ASYNC110 - a look from outside
                await asyncio.sleep(0.01)
