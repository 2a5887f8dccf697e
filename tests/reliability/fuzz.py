"""Tens of thousands of bodies against a server as users start it: each gets one answer, and nothing is left behind.

    python -m tests.reliability.fuzz [--bodies 100000] [--seed 1] [--json FILE]

An answer is what the document of the server says: a status that stands there, never a 500 or more, within `ANSWER_S`;
a body of JSON, or a stream with one end; and where it refuses, one sentence that names the field, unless the body as a
whole is no JSON object. When all have been sent, live requests, connections and tasks are what they were, and memory is
up to a stated slack what it was before the second half was sent once more: the same bodies reach the same highest water
of an allocator, and what is kept (grammars, names of requests) is full by then, so that only a leak grows again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.reliability.attack import ATTACKER_KEY, Left, Neighbour, Target, serving
from tests.reliability.bodies import Bodies, Body

ANSWER_S = 60.0
NUM_CLIENTS = 16
WRONG_MAX = 20  # after so many, the rest would say the same
SHOWN = 1_000  # bytes of a body that had a wrong answer
# Responses that are kept are bounded by bytes, and would not be full before the memory is looked at; nor would all of a
# KV cache that takes what the machine has be written.
FLAGS = (
    *("--max-model-len", "128", "--max-num-seqs", "64", "--max-stored-bytes", "1000000"),
    *("--kv-cache-capacity-mode", "fixed", "--num-kv-blocks", "1024"),
)
WHOLE_BODY = {"invalid_json", "payload_too_large", "unsupported_media_type"}  # errors in which no field could be named
HALF = r"\S.* has half of a character"  # in a field that may be none of the document's, or in its name
ENDS = {
    "/v1/responses": ("response.completed", "response.incomplete", "response.failed"),
    "/v1/messages": ("message_stop", "error"),
}
DONE = "data: [DONE]"
CANCELLED = re.compile(r'data: \{"error":.*"code":"request_cancelled"\}\}')  # by a body that aborts requests
FIRST_GRAMMAR = {"model": "demo", "prompt": "a", "max_tokens": 4, "structured_outputs": {"choice": ["a", "b"]}}


class WrongAnswer(AssertionError):
    """What came back is not what the document says."""


class Client:
    """One connection that is kept, and opened again where the server ends it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: Body) -> tuple[int, dict[str, str], bytes]:
        """Status, headers by their names in lower case, and the whole body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = f"POST {body.path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ATTACKER_KEY}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body.data)}\r\n\r\n"
        writer.write(head.encode() + body.data)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        if headers.get("transfer-encoding") == "chunked":
            data = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                data += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        else:
            data = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            await self.close()
        return int(lines[0].split(" ")[1]), headers, data

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def judge(document: dict[str, Any], body: Body, status: int, headers: dict[str, str], data: bytes) -> None:
    """Raise `WrongAnswer` unless it is what the document says."""
    has_waited = status == 503 and b"max_queue_ms" in body.data and "retry-after" in headers  # as it asked
    if str(status) not in document["paths"][body.path]["post"]["responses"] or (status >= 500 and not has_waited):
        raise WrongAnswer(f"status {status}: {data[:500]!r}")
    if headers["content-type"].startswith("text/event-stream"):
        _judge_stream(body.path, data.decode())
        return
    found = json.loads(data)
    if status == 200:
        return
    error = found["error"]
    message = error["message"]
    if not message or "\n" in message or "Traceback" in message or len(message) > 1_000:
        raise WrongAnswer(f"not one sentence: {message[:1000]!r}")
    code = error["code"] if "code" in error else error["details"]["error_code"]  # OpenAI's error, or Anthropic's
    # A matter of the key, of time, of another body or of load, or of no field.
    if status in (403, 408, 429, 499, 503) or code in WHOLE_BODY:
        return
    named = error["param"] if "param" in error else _field_named(message, document, body.path)
    if not named:
        raise WrongAnswer(f"names no field: {error}")


def _field_named(message: str, document: dict[str, Any], path: str) -> bool:
    """Anthropic's errors have no place for a field: the sentence names it."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"]
    return any(re.search(rf"\b{name}\b", message) for name in fields) or bool(re.match(HALF, message))


def _judge_stream(path: str, text: str) -> None:
    events = [event for event in text.split("\n\n") if event.strip() and not event.startswith(":")]
    if path in ENDS:
        names = [line[7:] for event in events for line in event.split("\n") if line.startswith("event: ")]
        ends = [at for at, name in enumerate(names) if name in ENDS[path]]
        if ends != [len(names) - 1]:
            raise WrongAnswer(
                f"ends of the stream: {[names[at] for at in ends]} of {len(names)} events, {text[-500:]!r}"
            )
        return
    ends = [at for at, event in enumerate(events) if event == DONE or CANCELLED.fullmatch(event)]
    if ends != [len(events) - 1]:
        raise WrongAnswer(f"[DONE] does not come once, and last: {text[-500:]!r}")


async def fuzz(target: Target, number: int, seed: int) -> dict[str, Any]:
    """Send them; what came back, by kind and status. Raises `WrongAnswer` with the first that had a wrong one."""
    headers = {"authorization": f"Bearer {ATTACKER_KEY}"}
    async with httpx.AsyncClient(base_url=target.url, headers=headers, timeout=ANSWER_S) as client:
        document = (await client.get("/openapi.json")).json()
        held = await client.post(
            "/v1/completions", json=FIRST_GRAMMAR
        )  # with it the threads of grammars come, and stay
        assert held.status_code == 200, held.text
    bodies = Bodies(document, seed)
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    left = 0

    async def one_client() -> None:
        nonlocal left
        client = Client(target.port)
        while left and len(wrong) < WRONG_MAX:
            left -= 1
            body = bodies.next()
            try:
                async with asyncio.timeout(ANSWER_S):
                    status, head, data = await client.post(body)
                judge(document, body, status, head, data)
                seen[f"{body.kind} {status}"] += 1
            except (WrongAnswer, OSError, EOFError, ValueError, KeyError) as error:  # TimeoutError is an OSError
                await client.close()
                shown = body.data if len(body.data) < SHOWN else body.data[:SHOWN] + b"..."
                wrong.append(f"{body.kind} body of {body.path}: {error!r}; {shown!r}")
        await client.close()

    async def send(number: int) -> None:
        nonlocal left
        left = number
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(one_client())
        if wrong:
            raise WrongAnswer("\n" + "\n".join(wrong))

    began_s = time.monotonic()
    async with Neighbour(target) as neighbour:
        assert await neighbour.ask() is not None
        await send(number // 2)
        half = await _settled(neighbour)
        await send(number - number // 2)
        before = await _settled(neighbour)
        bodies = Bodies(document, seed)
        for _ in range(number // 2):
            bodies.next()
        await send(number - number // 2)
        after = await neighbour.all_back(before, before.memory_kib)
        assert await neighbour.ask() is not None
    return {
        "bodies": number,
        "seed": seed,
        "seconds": round(time.monotonic() - began_s, 1),
        "answers": dict(sorted(seen.items())),
        "left": {
            "tasks": after.tasks - before.tasks,
            "second_half_mib": round((before.memory_kib - half.memory_kib) / 1024, 1),
            "mib": round((after.memory_kib - before.memory_kib) / 1024, 1),
        },
    }


async def _settled(neighbour: Neighbour) -> Left:
    """What there is once the last request and connection of before are gone."""
    found = await neighbour.look()
    while True:
        await asyncio.sleep(0.2)
        last, found = found, await neighbour.look()
        if not found.live and (found.connections, found.tasks) == (last.connections, last.tasks):
            return found


async def run(number: int, seed: int) -> dict[str, Any]:
    """All of it, with a server of its own."""
    async with serving(FLAGS) as target:
        return await fuzz(target, number, seed)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Bodies that no client should send.")
    parser.add_argument("--bodies", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = asyncio.run(run(args.bodies, args.seed))
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
