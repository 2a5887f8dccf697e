"""Readers that stop reading, beside readers that do not: what the others notice, what it costs, what they find later.

    python -m tests.reliability.stalled [--stalled 200] [--tokens 1500] [--json FILE]

The stalled ones shut their HTTP/2 window after a few events. Once all of them are paused, 32 others are served as if
they were alone; then the stalled ones read on, and must find exactly the text that they would have got at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from tests.reliability import trials
from tests.server.rawh2 import RawH2

STREAMS_PER_CONNECTION = 20
WINDOW_BYTES = 4096  # some fifteen events
ROUNDS = 3  # of the normal streams with the stalled ones, and as many without: before and after


def prompts(number: int) -> list[str]:
    """One for each stalled reader."""
    return [f"{number}. Tell me of {trials.SUBJECTS[number % len(trials.SUBJECTS)]}!" for number in range(number)]


def body(prompt: str, max_tokens: int) -> dict[str, Any]:
    """A greedy stream of exactly so many tokens."""
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}


def text_of(data: bytes) -> str:
    """What the events say, up to a proper end; an AssertionError when there is none."""
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in chunk for chunk in chunks), chunks[-1]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def resident_kib(pid: int) -> int:
    """The resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


async def texts(client: httpx.AsyncClient, wanted: list[str], max_tokens: int) -> list[str]:
    """The text that each prompt gets from a reader that keeps up."""

    async def one(prompt: str) -> str:
        answer = await client.post("/v1/completions", json=body(prompt, max_tokens) | {"stream": False})
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    return await asyncio.gather(*map(one, wanted))


async def gaps(http1: httpx.AsyncClient, http2: httpx.AsyncClient) -> list[float]:
    """Seconds between two deltas of a stream, for 32 normal streams, `ROUNDS` times."""
    found: list[float] = []
    for _ in range(ROUNDS):
        for seen in await trials.all_streams(http1, http2, trials.Progress(-1)):
            assert seen.end == "length", seen.end
            found += [b - a for a, b in pairwise(seen.arrivals_s)]
    return sorted(found)


async def states(client: httpx.AsyncClient) -> Counter[str]:
    """Live requests by state."""
    return Counter(item["state"] for item in (await client.get("/v1/requests")).json()["data"])


async def all_paused(client: httpx.AsyncClient, number: int) -> None:
    """Wait for it."""
    async with asyncio.timeout(trials.TIMEOUT_S):
        while (await states(client))["PAUSED"] < number:  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # a look from outside


async def run(number: int, max_tokens: int) -> dict[str, Any]:
    """All of it; the figures in milliseconds and KiB."""
    flags = ("--stall-timeout", "600", "--stall-keep-s", "1")
    async with trials.serving(*flags) as (process, url), trials.clients(url) as (http1, http2):
        # After its end-of-sequence token the model may go on with more of them, which are no text and fill no window.
        candidates = prompts(2 * number)
        both = zip(candidates, await texts(http1, candidates, max_tokens), strict=True)
        wanted, right = map(
            list, zip(*[(p, text) for p, text in both if len(text) > 2 * max_tokens][:number], strict=True)
        )
        assert len(wanted) == number, f"only {len(wanted)} prompts have long answers"
        before = await gaps(http1, http2)
        rss_before = resident_kib(process.pid)
        port = int(url.rsplit(":", 1)[1])
        stalled: list[tuple[RawH2, int]] = []
        for at in range(0, number, STREAMS_PER_CONNECTION):
            connection = await RawH2.connect(port, takes_data=False, initial_window=WINDOW_BYTES)
            for prompt in wanted[at : at + STREAMS_PER_CONNECTION]:
                data = json.dumps(body(prompt, max_tokens)).encode()
                headers = (("content-type", "application/json"), *trials.AUTH.items())
                stalled.append((connection, await connection.request("/v1/completions", data, headers=headers)))
        await all_paused(http1, number)
        rss_stalled = resident_kib(process.pid)
        beside = await gaps(http1, http2)
        kv = (await http1.get("/v1/kv")).json()
        found = await asyncio.gather(*(_read_on(connection, stalled) for connection in {c: 0 for c, _ in stalled}))
        got = {key: text for part in found for key, text in part.items()}
        exact = sum(got[key] == text for key, text in zip(stalled, right, strict=True))
        after = await gaps(http1, http2)
        alone = sorted([*before, *after])
        p99, p99_alone = (trials.percentile(times, 0.99) for times in (beside, alone))
        return {
            "stalled": number,
            "exact": exact,
            "kib_per_stalled": round((rss_stalled - rss_before) / number, 1),
            "kv_while_stalled": kv,
            "itl_p50_ms": round(trials.percentile(beside, 0.5) * 1e3, 2),
            "itl_p50_alone_ms": round(trials.percentile(alone, 0.5) * 1e3, 2),
            "itl_p99_ms": round(p99 * 1e3, 2),
            "itl_p99_alone_ms": round(p99_alone * 1e3, 2),
            "itl_p99_ratio": round(p99 / p99_alone, 3),
        }


async def _read_on(connection: RawH2, stalled: list[tuple[RawH2, int]]) -> dict[tuple[RawH2, int], str]:
    """Open the windows of one connection again, and read its streams to their ends."""
    mine = [stream_id for owner, stream_id in stalled if owner is connection]
    connection.takes_data = True
    connection.connection.increment_flow_control_window(2**24)
    for stream_id in mine:
        connection.connection.increment_flow_control_window(2**20, stream_id)
    await connection.flush()
    async with asyncio.timeout(trials.TIMEOUT_S):
        while not connection.ended.issuperset(mine):
            assert not connection.is_closed
            await connection.read_some()
    await connection.close()
    return {(connection, stream_id): text_of(bytes(connection.data[stream_id])) for stream_id in mine}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Stalled readers beside normal ones.")
    parser.add_argument("--stalled", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = asyncio.run(run(args.stalled, args.tokens))
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
