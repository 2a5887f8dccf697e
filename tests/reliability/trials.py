"""Real processes, real faults: a server under live streams whose worker is killed, stopped, or made to fail.

    python -m tests.reliability.trials --trials 100 --fault kill [--warm-spare] [--json FILE]

Half of the streams come over HTTP/1.1, a connection each; the others share one HTTP/2 connection. They are greedy, and
the demo model is served in fp32 with row-invariant kernels, so each text must be exactly that of a run without faults.

Recovery is the time from the fault to the next token, at the client: to the end of the longest silence of all streams
after the fault, since what was on its way when the worker died still arrives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

NUM_STREAMS = 32
MAX_TOKENS = 400
TIMEOUT_S = 120.0
ADMIN_KEY = "trials"
AUTH = {"authorization": f"Bearer {ADMIN_KEY}"}
SUBJECTS = ["a fox", "the moon", "two sisters", "an old clock", "a small boat", "the baker", "a lost key", "the wind"]
PROMPTS = [f"Once upon a time there was {subject}. Part {n}:" for n in range(4) for subject in SUBJECTS]
FAULTS = ("kill", "stop", "exception", "oom", "eat_memory")


@dataclass
class Ended:
    """What one client saw: its text, when its deltas came (loop time, s), and how it ended."""

    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    end: str = "nothing"  # a finish reason, or what went wrong


@dataclass
class Report:
    """What came of some trials of one fault."""

    fault: str
    warm_spare: bool
    trials: int = 0
    injected: int = 0
    streams: int = 0
    exact: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """As JSON can hold it; seconds."""
        times = sorted(self.recovery_s)
        return {
            "fault": self.fault,
            "warm_spare": self.warm_spare,
            "trials": self.trials,
            "injected": self.injected,
            "streams": self.streams,
            "exact": self.exact,
            "ends": dict(self.ends),
            "recovery_s": {
                "p50": round(percentile(times, 0.5), 3),
                "p99": round(percentile(times, 0.99), 3),
                "max": round(times[-1], 3),
            }
            if times
            else None,
        }


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@asynccontextmanager
async def serving(*flags: str, expect: int | None = 0) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A ready `novainfer serve` with its worker in a process, and its URL; it must end with the code `expect`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "novainfer.server", "--port", "0", "--worker", "process"),
        *("--admin-key", ADMIN_KEY, "--heartbeat-timeout", "2", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"at (http://127\.0\.0\.1:\d+) \(ready in", line)
        assert found is not None, f"no ready line: {line!r}"
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            raise
    assert expect is None or code == expect, f"exit code {code}"


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """One client of HTTP/1.1 and one of HTTP/2."""
    limits = httpx.Limits(max_connections=NUM_STREAMS, max_keepalive_connections=NUM_STREAMS)
    async with (
        httpx.AsyncClient(base_url=url, headers=AUTH, timeout=TIMEOUT_S, limits=limits) as http1,
        httpx.AsyncClient(base_url=url, headers=AUTH, timeout=TIMEOUT_S, http1=False, http2=True) as http2,
    ):
        yield http1, http2


class Progress:
    """Deltas that all clients of a run have seen, and one moment that is waited for."""

    def __init__(self, target: int) -> None:
        self._left = target
        self.is_there = asyncio.Event()

    def note(self) -> None:
        """One more delta."""
        self._left -= 1
        if self._left == 0:
            self.is_there.set()


async def stream(client: httpx.AsyncClient, prompt: str, progress: Progress) -> Ended:
    """One streamed completion, and everything that could be wrong with it."""
    seen = Ended()
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    loop = asyncio.get_running_loop()
    is_done = False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                seen.end = f"status {response.status_code}"
                return seen
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if is_done:
                    seen.end = "something came after the end"
                    return seen
                if line == "data: [DONE]":
                    is_done = True
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    seen.end = f"error {chunk['error']['code']}"
                    is_done = True
                    continue
                (choice,) = chunk["choices"]
                seen.text += choice["text"]
                seen.arrivals_s.append(loop.time())
                progress.note()
                if choice["finish_reason"]:
                    seen.end = choice["finish_reason"]
    except httpx.HTTPError as error:
        seen.end = f"connection: {type(error).__name__}"
    if not is_done and not seen.end.startswith("connection"):
        seen.end = "no end"
    return seen


async def all_streams(http1: httpx.AsyncClient, http2: httpx.AsyncClient, progress: Progress) -> list[Ended]:
    """All prompts at once, over both protocols."""
    of_both = (http1, http2)
    return await asyncio.gather(*(stream(of_both[at % 2], prompt, progress) for at, prompt in enumerate(PROMPTS)))


def silence_end_s(seen: list[Ended], at_s: float) -> float:
    """When the longest time after `at_s` in which no stream got anything was over."""
    times_s = sorted([at_s, *(s for one in seen for s in one.arrivals_s if s > at_s)])
    _, end_s = max(pairwise(times_s), key=lambda pair: pair[1] - pair[0], default=(at_s, at_s))
    return end_s


async def worker_pid(client: httpx.AsyncClient) -> int:
    """The process that holds the device; waits until there is one."""
    while True:
        actors = (await client.get("/v1/actors")).json()["data"]
        (worker,) = [actor for actor in actors if actor["name"] == "worker-0"]
        if worker["state"] in ("READY", "RUNNING"):
            return int(worker["pid"])
        await asyncio.sleep(0.05)


async def inject(client: httpx.AsyncClient, fault: str) -> None:
    """Do it to the worker."""
    if fault in ("kill", "stop"):
        os.kill(await worker_pid(client), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    else:
        (await client.post("/v1/faults", json={"kind": fault})).raise_for_status()


async def run(fault: str, trials: int, *, warm_spare: bool = False, seed: int = 0, log: bool = False) -> Report:
    """`trials` times all streams with one fault at a random moment; all against one server."""
    report = Report(fault, warm_spare)
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    flags = ["--warm-spare"] if warm_spare else []
    async with serving(*flags) as (process, url), clients(url) as (http1, http2):
        right = await all_streams(http1, http2, Progress(-1))
        num_deltas = sum(len(seen.arrivals_s) for seen in right)
        assert {seen.end for seen in right} == {"length"}, Counter(seen.end for seen in right)
        for _ in range(trials):
            await worker_pid(http1)  # it is up again
            progress = Progress(int(rng.uniform(0.0, 0.9) * num_deltas) + 1)
            task = asyncio.create_task(all_streams(http1, http2, progress))
            await progress.is_there.wait()
            at_s = loop.time()
            await inject(http2, fault)
            is_live = not task.done()
            seen = await task
            report.trials += 1
            report.injected += is_live
            report.streams += len(seen)
            report.exact += sum(a.text == b.text and a.end == b.end for a, b in zip(seen, right, strict=True))
            report.ends.update(a.end for a in seen)
            if fault in ("kill", "stop"):
                report.recovery_s.append(silence_end_s(seen, at_s) - at_s)
            if log:
                print(json.dumps(report.summary()), file=sys.stderr, flush=True)
        assert process.returncode is None, "the server died"
    return report


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Worker faults under live streams.")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--fault", choices=FAULTS, default="kill")
    parser.add_argument("--warm-spare", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began_s = time.monotonic()
    report = asyncio.run(run(args.fault, args.trials, warm_spare=args.warm_spare, seed=args.seed, log=True))
    result = {**report.summary(), "wall_s": round(time.monotonic() - began_s, 1)}
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
