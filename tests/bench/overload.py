"""A server under more than it can serve: how honest its Retry-After is, and whether its memory stays where it was.

    python -m tests.bench.overload [--times 3] [--seconds 60] [--json FILE]

First its capacity is measured, with as many clients as it has places. Then clients come at `times` that rate, one
half of them willing to wait a while, and none comes back. A refusal is right when those who were waiting at that moment
have all begun to run after Retry-After; a server in a process of its own says how much memory it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import msgspec

MAX_TOKENS = 128
MAX_NUM_SEQS = 8
MAX_NUM_QUEUED_REQS = 64
MAX_NUM_OVERFLOW_REQS = 32
MAX_QUEUE_MS = 10_000
CAPACITY_S = 10.0
SAMPLE_S = 1.0
PROMPT = "Once upon a time there was a number"
FLAGS = {
    "--max-num-seqs": MAX_NUM_SEQS,
    "--max-num-queued-reqs": MAX_NUM_QUEUED_REQS,
    "--max-num-overflow-reqs": MAX_NUM_OVERFLOW_REQS,
}


class Attempt(msgspec.Struct):
    """One request: times in seconds since the start, `retry_after_s` when it was refused, and how it ended."""

    at_s: float
    is_patient: bool
    status: int = 0
    begun_s: float | None = None
    retry_after_s: float | None = None
    answered_s: float = 0.0
    outcome: str = "broken"


async def attempt(port: int, number: int, origin_s: float, *, is_patient: bool) -> Attempt:
    """Ask over a connection of its own, and read to the end."""
    found = Attempt(at_s=time.perf_counter() - origin_s, is_patient=is_patient)
    body: dict[str, Any] = {"prompt": f"{PROMPT} {number}", "max_tokens": MAX_TOKENS, "ignore_eos": True}
    body |= {"temperature": 0, "stream": True} | ({"max_queue_ms": MAX_QUEUE_MS} if is_patient else {})
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        found.answered_s = time.perf_counter() - origin_s - found.at_s
        found.status = int(answer.split(" ", 2)[1])
        if found.status == 503:
            milliseconds = re.search(r"retry-after-ms: (\d+)", answer)
            assert milliseconds is not None, answer
            found.retry_after_s = int(milliseconds[1]) / 1000
        rest = b""
        while piece := await reader.read(65_536):
            rest += piece
            if found.begun_s is None and b'"text":"' in rest and b'"error"' not in rest:
                found.begun_s = time.perf_counter() - origin_s
        if found.status == 200:
            found.outcome = (
                "done" if b"data: [DONE]" in rest else "waited in vain" if b"overloaded" in rest else "broken"
            )
        else:
            found.outcome = "refused" if b"server_is_overloaded" in rest else "broken"
    finally:
        writer.close()
    return found


async def capacity(port: int) -> float:
    """Requests a second with as many clients as there are places, and nobody waiting for long."""
    origin_s = time.perf_counter()
    done = 0

    async def client(name: int) -> None:
        nonlocal done
        while time.perf_counter() - origin_s < CAPACITY_S:
            found = await attempt(port, name, origin_s, is_patient=False)
            done += found.outcome == "done"

    await asyncio.gather(*(client(i) for i in range(2 * MAX_NUM_SEQS)))
    return done / (time.perf_counter() - origin_s)


async def overload(port: int, rate: float, seconds: float, pid: int) -> tuple[list[Attempt], list[int]]:
    """Clients at `rate` a second, whatever becomes of them; and the server's memory, in bytes, once a second."""
    origin_s = time.perf_counter()
    tasks: list[asyncio.Task[Attempt]] = []
    memory: list[int] = []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(number / rate - (time.perf_counter() - origin_s), 0.0))
        tasks.append(asyncio.create_task(attempt(port, number, origin_s, is_patient=number % 2 == 1)))
        if time.perf_counter() - origin_s >= SAMPLE_S * len(memory):
            memory.append(resident_bytes(pid))
    return list(await asyncio.gather(*tasks)), memory


def resident_bytes(pid: int) -> int:
    """Of one process and its children."""
    total = 0
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        total += resident_bytes(int(child))
    status = Path(f"/proc/{pid}/status").read_text()
    return total + 1024 * int(status.partition("VmRSS:")[2].split()[0])


def judge(attempts: list[Attempt], memory: list[int]) -> dict[str, Any]:
    """What came of it. A refusal's truth is when the last of those let in before it began to run."""
    let_in = sorted((a for a in attempts if a.begun_s is not None), key=lambda a: a.at_s)
    errors: list[float] = []
    said: list[float] = []
    for refused in (a for a in attempts if a.retry_after_s is not None):
        before = [a.begun_s for a in let_in if a.at_s < refused.at_s and a.begun_s is not None]
        actual_s = max(max(before, default=0.0) - refused.at_s, 0.0)
        assert refused.retry_after_s is not None
        said.append(refused.retry_after_s)
        errors.append(refused.retry_after_s - actual_s)
    outcomes = {
        name: sum(a.outcome == name for a in attempts) for name in ("done", "refused", "waited in vain", "broken")
    }
    refusals_ms = [1000 * a.answered_s for a in attempts if a.outcome == "refused"]
    sixth = max(len(memory) // 6, 1)
    return {
        "outcomes": outcomes,
        "refused_after_ms_p50": statistics.median(refusals_ms) if refusals_ms else None,
        "retry_after_s_p50": statistics.median(said) if said else None,
        "retry_after_error_s_p50": statistics.median(map(abs, errors)) if errors else None,
        "retry_after_bias_s_p50": statistics.median(errors) if errors else None,
        "memory_mb_by_sixths": [
            round(statistics.median(memory[i * sixth : (i + 1) * sixth]) / 1e6, 1) for i in range(6)
        ],
    }


async def main(times: float, seconds: float) -> dict[str, Any]:
    """Start a server, measure it, overload it, and stop it."""
    flags = [str(item) for pair in FLAGS.items() for item in pair]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "novainfer.server", "--port", "0", *flags, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found is not None, f"no ready line: {line!r}"
        port = int(found[1])
        per_s = await capacity(port)
        attempts, memory = await overload(port, times * per_s, seconds, process.pid)
    finally:
        process.terminate()
        await process.communicate()
    return {"capacity_per_s": per_s, "offered_per_s": times * per_s, "exit_code": process.returncode} | judge(
        attempts, memory
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = asyncio.run(main(options.times, options.seconds))
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
