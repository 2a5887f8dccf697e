"""The command as users run it: a process, its signals and its exit codes."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow  # each starts a process that loads torch

TIMEOUT_S = 60.0
LONG = {"prompt": "Once", "max_tokens": 300, "stream": True, "ignore_eos": True}

Process = asyncio.subprocess.Process
Start = Callable[..., Awaitable[tuple[Process, str]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """`await start(*flags)`: a ready `python -m novainfer.server` and its URL.

    On a busy machine a stream takes longer than the 30 s that a drain gives it.
    """
    processes: list[Process] = []

    async def run(*flags: str) -> tuple[Process, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "novainfer.server", "--port", "0", "--shutdown-timeout", "240", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "NOVAINFER_NATIVE": "0"},
        )
        processes.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"serves demo at (http://127\.0\.0\.1:\d+) \(ready in", line)
        assert found is not None, f"no ready line: {line!r}"
        return process, found[1]

    yield run
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def stderr_after(process: Process) -> tuple[int, str]:
    async with asyncio.timeout(TIMEOUT_S):
        _, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, err.decode()


@asynccontextmanager
async def streaming(url: str, *, http2: bool = False, **more: Any) -> AsyncIterator[AsyncIterator[str]]:
    """The data lines of a long stream whose first one has come."""
    async with (
        httpx.AsyncClient(base_url=url, http1=not http2, http2=http2, timeout=TIMEOUT_S) as client,
        client.stream("POST", "/v1/completions", json=LONG | more) as response,
    ):
        assert response.status_code == 200
        lines = response.aiter_lines()
        await anext(lines)
        yield (line.removeprefix("data: ") async for line in lines if line)


@pytest.mark.parametrize("flags", [(), ("--api-processes", "2")], ids=["one process", "API processes"])
async def test_a_signal_drains_and_exits_with_0(start: Start, flags: tuple[str, ...]) -> None:
    process, url = await start(*flags)
    async with streaming(url) as lines:
        process.send_signal(signal.SIGTERM)
        assert [line async for line in lines][-1] == "[DONE]"
    code, err = await stderr_after(process)
    assert code == 0
    assert "Stopping: 1 running requests have up to 240 s" in err
    assert "Traceback" not in err


async def test_what_runs_too_long_gets_an_error_event(start: Start) -> None:
    process, url = await start("--shutdown-timeout", "0")
    async with streaming(url, http2=True, max_tokens=2000) as lines:
        process.send_signal(signal.SIGINT)
        last = [line async for line in lines][-1]
    assert json.loads(last)["error"]["code"] == "draining"
    code, err = await stderr_after(process)
    assert code == 0
    assert "Traceback" not in err


async def test_a_second_ctrl_c_ends_at_once(start: Start) -> None:
    process, url = await start()

    async def interrupt_twice() -> None:
        async with streaming(url, max_tokens=2000, n=64) as lines:
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            while b"Stopping" not in await process.stderr.readline():
                pass
            process.send_signal(signal.SIGINT)
            async for _ in lines:
                pass

    with pytest.raises(httpx.HTTPError):
        await interrupt_twice()
    assert (await stderr_after(process))[0] == 130


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["/no/such/model"], "/no/such/model"),
        (["--port", "{taken}"], "is in use"),
    ],
)
async def test_what_cannot_start_is_one_sentence_and_exit_code_2(flags: list[str], said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "novainfer.server", "--port", "0", *(flag.format(taken=port) for flag in flags)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        code, err = await stderr_after(process)
    assert code == 2, err
    *_, last = err.splitlines()
    assert last.startswith("Error: ")
    assert said in last
    assert "Traceback" not in err


async def test_a_drain_ends_those_who_wait_for_room_at_once_and_leaves_no_process_behind(start: Start) -> None:
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--max-num-overflow-reqs", "1")
    process, url = await start("--worker", "process", *flags)
    children = children_of(process.pid)
    assert children
    short = LONG | {"max_tokens": 2, "stream": False}
    async with streaming(url, max_tokens=900) as lines, httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        queued = asyncio.create_task(client.post("/v1/completions", json=short))
        async with asyncio.timeout(TIMEOUT_S):
            while "nova_queued_requests 1.0" not in (await client.get("/metrics")).text:
                pass
        body = short | {"stream": True, "max_queue_ms": 3_600_000}
        async with client.stream("POST", "/v1/completions", json=body) as overflowed:
            assert overflowed.headers["x-novainfer-queue"] == "overflow"
            process.send_signal(signal.SIGTERM)
            *_, last = [line.removeprefix("data: ") async for line in overflowed.aiter_lines() if line]
        assert json.loads(last)["error"]["code"] == "draining"
        assert [line async for line in lines][-1] == "[DONE]"
        assert (await queued).status_code == 200
    code, err = await stderr_after(process)
    assert code == 0
    assert "Traceback" not in err
    assert not living(children)


def children_of(pid: int) -> list[str]:
    """Process ids."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def living(pids: list[str]) -> list[str]:
    """Those that are still there."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
