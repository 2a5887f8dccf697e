"""h2load, as people measure servers: thousands of requests over both versions of HTTP, each of them answered well."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from novainfer import Engine, EngineConfig
from novainfer.testing import ByteTokenizer, FakeDevice
from tests.server.conftest import Serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load is not installed (nghttp2-client)"),
]

TIMEOUT_S = 120.0
COMPLETION = {"prompt": "hi", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
WAYS = {
    "h2c": ("--no-tls-proto=h2c",),
    "HTTP/1.1": ("--h1",),
    "TLS h2": ("--npn-list=h2",),
    "TLS HTTP/1.1": ("--h1",),
}


class Outcome:
    """What h2load says at its end: how many requests, by what became of them and by their status."""

    def __init__(self, said: str) -> None:
        self.said = said
        self.requests = self._numbers("requests: ")
        self.statuses = self._numbers("status codes: ")
        [self.protocol] = re.findall(r"^Application protocol: (\S+)$", said, re.MULTILINE)

    def _numbers(self, head: str) -> dict[str, int]:
        [line] = [line for line in self.said.splitlines() if line.startswith(head)]
        return {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", line)}


async def h2load(*args: str) -> Outcome:
    process = await asyncio.create_subprocess_exec(
        "h2load", *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = said.decode()
    assert process.returncode == 0, text
    return Outcome(text)


@pytest.mark.parametrize(
    ("path", "number", "body"),
    [
        ("/health", 1_000, None),
        ("/v1/models", 500, None),
        ("/v1/completions", 250, COMPLETION),
        ("/v1/completions", 250, COMPLETION | {"stream": True}),
    ],
    ids=["health", "models", "completions", "streams"],
)
@pytest.mark.parametrize("way", WAYS)
async def test_each_request_is_answered_with_success(
    serve: Serve, tmp_path: Path, way: str, path: str, number: int, body: dict[str, object] | None
) -> None:
    engine = Engine(EngineConfig(max_num_seqs=64), device=FakeDevice(), tokenizer=ByteTokenizer())
    server = await serve(engine, self_signed=way.startswith("TLS"))
    args = [*WAYS[way], "-n", str(number), "-c", "8", "-T", "60"]
    if not way.endswith("1.1"):
        args += ["-m", "10"]
    if body is not None:
        (tmp_path / "body").write_text(json.dumps(body))
        args += ["-d", str(tmp_path / "body"), "-H", "content-type: application/json"]
    found = await h2load(*args, f"{server.url}{path}")
    assert found.protocol == {"h2c": "h2c", "TLS h2": "h2"}.get(way, "http/1.1")
    fine = {"total": number, "started": number, "done": number, "succeeded": number}
    assert found.requests == fine | {"failed": 0, "errored": 0, "timeout": 0}, found.said
    assert found.statuses == {"2xx": number, "3xx": 0, "4xx": 0, "5xx": 0}, found.said
    assert server.service.live.num_live == 0


async def test_requests_that_are_refused_are_counted_as_such(serve: Serve) -> None:
    engine = Engine(EngineConfig(max_num_seqs=4), device=FakeDevice(), tokenizer=ByteTokenizer())
    server = await serve(engine, api_keys=("secret",))
    found = await h2load("-n", "20", "-c", "2", f"{server.url}/v1/models")
    assert found.statuses == {"2xx": 0, "3xx": 0, "4xx": 20, "5xx": 0}
