"""What the inspector costs the engine, and how many pictures a second its page draws.

    python -m tests.bench.inspector [--requests 256] [--rounds 20] [--seconds 3] [--page-seconds 5] [--json FILE]

A server of the demo model writes so many texts at once. Rounds in which somebody reads `GET /v1/inspector` follow
rounds in which nobody does; of the thread that the loop runs in the processor time is read before and after each, and
divided by the steps that there were. What a step costs more while somebody watches is told as a share of the time that
a step takes. Then a browser (Debian's Chromium, without a window or a GPU) counts the pictures of each view.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from novainfer.bench.machine import describe
from tests.bench.metrics import loop_cpu_ms
from tests.webui.rig import CHROMIUM, Served, serving

VIEWS = ("machines", "actors", "requests", "kv", "steps", "faults")
MAX_TOKENS = 1900
SETTLE_S = 0.5
PICTURES = """(ms) => new Promise((done) => {
    const times = [];
    requestAnimationFrame(function next(now) {
        times.push(now);
        if (now - times[0] < ms) requestAnimationFrame(next);
        else done(times);
    });
})"""


@asynccontextmanager
async def writing(api: httpx.AsyncClient, num_requests: int) -> AsyncIterator[None]:
    """So many texts are written, and others when they have come to their end."""

    async def write() -> None:
        prompt = [f"Once upon a time there were {number}" for number in range(num_requests)]
        body = {"model": "demo", "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
        while True:
            async with api.stream("POST", "/v1/completions", json=body) as reply:
                assert reply.status_code == 200, await reply.aread()
                async for _ in reply.aiter_bytes():
                    pass

    task = asyncio.create_task(write())
    try:
        await all_write(api, num_requests)
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def all_write(api: httpx.AsyncClient, num_requests: int) -> None:
    """Wait until so many are past their prompt."""
    while True:
        listed = (await api.get("/v1/requests")).json()["data"]
        if sum(one["state"] == "DECODE" for one in listed) == num_requests:
            return
        await asyncio.sleep(SETTLE_S)


class Watcher:
    """One who reads the feed, as a page does."""

    def __init__(self, api: httpx.AsyncClient) -> None:
        self.num_frames = self.num_bytes = self.num_lost = 0
        self._task = asyncio.create_task(self._read(api))

    async def _read(self, api: httpx.AsyncClient) -> None:
        async with api.stream("GET", "/v1/inspector") as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    self.num_frames += 1
                    self.num_bytes += len(line)
                    self.num_lost += json.loads(line[6:]).get("lost", 0)

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def last_step(api: httpx.AsyncClient) -> int:
    return int((await api.get("/v1/steps")).json()["data"][-1]["step_id"])


async def cost(server: Served, api: httpx.AsyncClient, args: argparse.Namespace) -> dict[str, Any]:
    """Of rounds with a watcher and without."""
    rounds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}  # loop's ms and seconds, of a step
    frames, sizes, lost = [], [], 0
    for number in range(2 * args.rounds):
        await all_write(api, args.requests)
        is_watched = number % 4 in (1, 2)  # neither is always the second
        watcher = Watcher(api) if is_watched else None
        await asyncio.sleep(SETTLE_S)  # the snapshot is no part of it
        seen = (watcher.num_frames, watcher.num_bytes) if watcher is not None else (0, 0)
        step, cpu_ms, began_s = await last_step(api), loop_cpu_ms(server.process.pid), time.monotonic()
        await asyncio.sleep(args.seconds)
        cpu_ms, took_s = loop_cpu_ms(server.process.pid) - cpu_ms, time.monotonic() - began_s
        num_steps = await last_step(api) - step
        rounds[is_watched].append((cpu_ms / num_steps, took_s / num_steps))
        if watcher is not None:
            frames.append((watcher.num_frames - seen[0]) / took_s)
            sizes.append((watcher.num_bytes - seen[1]) / took_s)
            lost += watcher.num_lost
            await watcher.stop()
    (without, step_without), (watched, step_watched) = (
        (statistics.median(cpu for cpu, _ in rounds[key]), statistics.median(took for _, took in rounds[key]))
        for key in (False, True)
    )
    pairs = [with_[0] - no[0] for with_, no in zip(rounds[True], rounds[False], strict=True)]
    low, more, high = statistics.quantiles(pairs, n=4)
    return {
        "step_ms": 1e3 * step_without,
        "step_watched_ms": 1e3 * step_watched,
        "loop_ms": without,
        "loop_watched_ms": watched,
        "more_ms": more,
        "quartiles_ms": [low, high],
        "share": more / (1e3 * step_without),
        "frames_s": statistics.median(frames),
        "bytes_s": statistics.median(sizes),
        "lost": lost,
    }


async def pictures(server: Served, seconds: float) -> dict[str, dict[str, float]]:
    """How many pictures a second each view has, and the longest time without one, in ms."""
    from playwright.async_api import async_playwright

    found = {}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        await page.goto(f"{server.url}/inspector")
        for view in VIEWS:
            await page.evaluate(f"location.hash = '{view}'")
            await page.locator(f'nav [href="#{view}"][aria-current]').wait_for()
            await page.wait_for_timeout(1000)
            times = await page.evaluate(PICTURES, 1e3 * seconds)
            gaps = [after - before for before, after in itertools.pairwise(times)]
            found[view] = {"pictures_s": 1e3 * len(gaps) / sum(gaps), "longest_ms": max(gaps)}
        await browser.close()
    return found


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    with serving("--max-num-seqs", str(args.requests)) as server:
        async with server.api() as api, writing(api, args.requests):
            feed = await cost(server, api, args) if args.rounds else {}
            page = await pictures(server, args.page_seconds) if args.page_seconds else {}
    return {"machine": describe(), "requests": args.requests, "feed": feed, "page": page}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20, help="with a watcher, and as many without; 0: none")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round")
    parser.add_argument("--page-seconds", type=float, default=5.0, help="of each view; 0: no browser")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if feed := found["feed"]:
        low, high = feed["quartiles_ms"]
        print(
            f"a step {feed['step_ms']:.1f} ms, watched {feed['step_watched_ms']:.1f} ms; the loop's time of it "
            f"{feed['loop_ms']:.2f} ms, watched {feed['loop_watched_ms']:.2f} ms: {feed['more_ms']:+.3f} ms (quartiles "
            f"{low:+.3f} and {high:+.3f}), {feed['share']:.2%} of the step; {feed['frames_s']:.1f} frames and "
            f"{feed['bytes_s'] / 1e3:.0f} kB a second, {feed['lost']} details lost"
        )
    for view, one in found["page"].items():
        print(f"{view}: {one['pictures_s']:.1f} pictures a second, the longest {one['longest_ms']:.0f} ms")


if __name__ == "__main__":
    main()
