"""Attacks on what stands behind HTTP: the parsers, the door, the tokenizer, templates, listeners, descriptors."""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from tests.reliability.attack import ATTACKER_KEY, TIMEOUT_S, Attack, open_connection, over_tls
from tests.reliability.attacks_http2 import words

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
AT_ONCE = 8
USER = [{"role": "user", "content": "hi"}]


def client(port: int, **settings: Any) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {ATTACKER_KEY}", "content-type": "application/json"}
    scheme = "http" if over_tls("http/1.1") is None else "https"
    url = f"{scheme}://127.0.0.1:{port}"
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, verify=False, **settings)


def posts(path: str, bodies: Callable[[int], bytes], *allowed: int) -> Callable[[int, int], Any]:
    """POST `bodies(0)`, `bodies(1)`, …, eight at once; each must be answered with one of the statuses `allowed`."""

    async def run(port: int, number: int) -> str:
        seen: Counter[str] = Counter()
        left = iter(range(number))

        async def some() -> None:
            async with client(port) as http:
                for at in left:
                    response = await http.post(path, content=bodies(at))
                    assert response.status_code in allowed, f"{response.status_code}: {response.text[:300]}"
                    seen[f"{response.status_code}"] += 1

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        return words(seen)

    return run


TEMPLATES = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 500000000 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
)
RESERVED = ("chat_template", "tools", "documents", "padding", "return_dict", "tokenize", "conversation", "max_length")


def _template(at: int) -> bytes:
    name = RESERVED[at // len(TEMPLATES) % len(RESERVED)]
    return json.dumps({"messages": USER, "chat_template_kwargs": {name: TEMPLATES[at % len(TEMPLATES)]}}).encode()


NUMBERS = (
    "1" * 100_000,
    "-" + "9" * 5000,
    "1e999999",
    "1e-320",
    "NaN",
    "Infinity",
    "1e38",
    str(2**64),
    str(-(2**63) - 1),
)
FIELDS = (
    *("top_k", "min_tokens", "max_tokens", "seed", "n", "temperature", "top_p", "repetition_penalty", "min_p"),
    *("presence_penalty", "frequency_penalty", "timeout", "max_queue_ms", "logprobs"),
)


def _number(at: int) -> bytes:
    name, number = FIELDS[at % len(FIELDS)], NUMBERS[at // len(FIELDS) % len(NUMBERS)]
    return b'{"prompt": "hi", "max_tokens": 1, "%s": %s}' % (name.encode(), number.encode())


DEEP = 400_000
PARSED = (
    b"[" * DEEP,
    b'{"a":' * DEEP,
    b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    b'{"prompt": "hi", "logit_bias": {' + b",".join(b'"%d": 1' % at for at in range(60_000)) + b"}}",
    b'{"prompt": "hi", "stop": [' + b",".join(b'"%d"' % at for at in range(60_000)) + b"]}",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "' + b"\xff" * 1000 + b'"}',
    b"{" + b",".join(b'"x%d": 1' % at for at in range(60_000)) + b"}",
    b'{"messages": [' + b",".join([b'{"role": "user", "content": ""}'] * 25_000) + b"]}",
    b'{"prompt": [' + b",".join([b'"a"'] * 100_000) + b"]}",
)


def _parsed(at: int) -> bytes:
    return PARSED[at % len(PARSED)]


def _long_prompt(at: int) -> bytes:
    return json.dumps({"prompt": f"{at} " + "a b c d e f g " * 64_000, "max_tokens": 1}).encode()


def _large_body(at: int) -> bytes:
    return b'{"prompt": "' + b"x" * 5_000_000 + b'"}'


async def listeners(port: int, number: int) -> str:
    """Listen to the events, and read nothing."""
    seen: Counter[str] = Counter()
    async with client(port, limits=httpx.Limits(max_connections=number)) as http:
        waits = [http.send(http.build_request("GET", "/v1/events"), stream=True) for _ in range(number)]
        for response in await asyncio.gather(*waits):
            seen[str(response.status_code)] += 1
            await response.aclose()
    return words(seen)


async def wrong_keys(port: int, number: int) -> str:
    seen: Counter[str] = Counter()
    async with client(port) as http:
        for at in range(number):
            response = await http.post(TEXT, json={"prompt": "a"}, headers={"authorization": f"Bearer {at}"})
            assert response.status_code == 401
            seen["401"] += 1
    return words(seen)


async def descriptors(port: int, number: int) -> str:
    """More connections than the server has descriptors for, held; then requests on new ones."""
    seen: Counter[str] = Counter()
    held = []
    for _ in range(number):
        try:
            held.append(await open_connection(port, "http/1.1"))
        except OSError:
            seen["not connected"] += 1
    await asyncio.sleep(0.5)
    for at in range(20):
        if at == 10:
            for _, writer in held:
                writer.transport.abort()
        async with client(port) as http:
            response = await http.get("/health")
            seen[str(response.status_code)] += 1
    return words(seen)


FEW_DESCRIPTORS = ((resource.RLIMIT_NOFILE, 64),)
ATTACKS = (
    Attack("prompt flood", "prompts of 0.9 MB, eight at once", 40, posts(TEXT, _long_prompt, 400), 8),
    Attack("template bombs", "templates and arguments of templates in a request", 64, posts(CHAT, _template, 400), 32),
    Attack("number bombs", "numbers that no arithmetic survives", 126, posts(TEXT, _number, 200, 400, 408, 503), 126),
    Attack("json bombs", "bodies that are deep, long, or no text", 60, posts(TEXT, _parsed, 400, 413), 10),
    Attack("json bombs at chat", "the same, as conversations", 60, posts(CHAT, _parsed, 400, 413)),
    Attack("large bodies", "bodies of 5 MB, eight at once", 64, posts(TEXT, _large_body, 413)),
    Attack("listeners", "listeners to the events that read nothing", 300, listeners),
    Attack("wrong keys", "requests with keys that are none", 500, wrong_keys),
    Attack(
        "few descriptors",
        "connections to a server with 64 descriptors",
        200,
        descriptors,
        100,
        limits=FEW_DESCRIPTORS,
        may_refuse=True,
    ),
)
