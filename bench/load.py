"""Streaming clients for one server: `drive` sends prompts, some at a time, and notes when each token came.

Over HTTP/1.1 each client has a connection of its own, over HTTP/2 all share one, or several. The times are the
clients': from the request's first byte to each event's arrival.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from novainfer.bench.client import Connection, HTTPFailure, Origin, Version, connect
from novainfer.bench.statistic import Timeline


class Choice(msgspec.Struct):
    """What is read of a chunk's choice."""

    text: str = ""
    token_ids: list[int] | None = None


class Chunk(msgspec.Struct):
    """What is read of an event."""

    choices: list[Choice] = []
    error: dict[str, Any] | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for what: a server, a key for it, and the model's name."""

    origin: Origin
    model: str
    api_key: str | None = None

    def headers(self) -> dict[str, str]:
        """Of every request."""
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"content-type": "application/json", "accept": "text/event-stream", **key}


class Drive(msgspec.Struct, kw_only=True):
    """What came of it, request by request.

    `began_s` is when each was sent, by `time.perf_counter`, and `whole_s` from then to its end.
    """

    wall_s: float
    timelines: list[Timeline]
    began_s: list[float]
    whole_s: list[float]


async def drive(
    load: Load,
    version: Version,
    prompts: Sequence[list[int]],
    max_tokens: int,
    clients: int,
    *,
    connections: int = 1,
) -> Drive:
    """Send all prompts, `clients` at a time; over HTTP/2 they share so many connections."""
    origin = load.origin
    waiting: Iterator[list[int]] = iter(prompts)
    lines: list[Timeline] = []
    began_s: list[float] = []
    whole_s: list[float] = []
    shared = [await connect(origin, "h2") for _ in range(connections)] if version == "h2" else []

    async def client(number: int) -> None:
        own = shared[number % connections] if shared else await connect(origin, "h1")
        try:
            for prompt in waiting:
                started = time.perf_counter()
                line = await _ask(own, load, prompt, max_tokens)
                lines.append(line)
                began_s.append(started)
                whole_s.append(time.perf_counter() - started)
                if line.error is not None and not shared:  # what is left in the pipe would spoil the next answer
                    await own.close()
                    own = await connect(origin, "h1")
        finally:
            if not shared:
                await own.close()

    started = time.perf_counter()
    all_clients = (client(number) for number in range(min(clients, len(prompts))))
    try:
        ends = await asyncio.gather(*all_clients, return_exceptions=True)  # each closes what it has opened
        wall_s = time.perf_counter() - started
    finally:
        for one in shared:
            await one.close()
    if failed := next((end for end in ends if end is not None), None):
        raise failed
    return Drive(wall_s=wall_s, timelines=lines, began_s=began_s, whole_s=whole_s)


async def _ask(connection: Connection, load: Load, prompt: list[int], max_tokens: int) -> Timeline:
    """One request; whatever goes wrong is the timeline's error."""
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    line = Timeline(num_prompt_tokens=len(prompt), times_s=[], counts=[])
    started = time.perf_counter()
    rest, is_done = b"", False
    try:
        async for piece in connection.post("/v1/completions", msgspec.json.encode(body), load.headers()):
            now = time.perf_counter() - started
            *events, rest = (rest + piece).split(b"\n\n")
            count = 0
            for event in events:
                if event == b"data: [DONE]":
                    is_done = True
                elif event.startswith(b"data: "):  # else a comment, which keeps the connection alive
                    count += _tokens(event[6:])
            if count:
                line.times_s.append(now)
                line.counts.append(count)
        if not is_done:
            line.error = "the stream ended without [DONE]"
    except (HTTPFailure, OSError, ValueError) as error:  # ValueError: what came is not HTTP, or not JSON
        line.error = str(error) or type(error).__name__
    return line


def _tokens(data: bytes) -> int:
    """Tokens of one event: the ids where the server sends them, else one for each piece of text."""
    chunk = msgspec.json.decode(data, type=Chunk)
    if chunk.error is not None:
        raise HTTPFailure(f"error event: {chunk.error.get('message')}")
    return sum(len(c.token_ids) if c.token_ids is not None else bool(c.text) for c in chunk.choices)
