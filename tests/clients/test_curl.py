"""curl against the demo model: HTTP/1.1 and HTTP/2, each with TLS and without."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from novainfer.server.http.tls import write_self_signed
from tests.server.test_demo_model import DemoServer
from tests.witness import events_of

pytestmark = [
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
    pytest.mark.timeout(120),
]
ASKED = {
    "messages": [{"role": "user", "content": "What is 7 + 5?"}],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_self_signed(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@pytest.fixture(scope="module")
def secure(certificate: tuple[Path, Path]) -> Iterator[DemoServer]:
    certfile, keyfile = certificate
    server = DemoServer(ssl_certfile=certfile, ssl_keyfile=keyfile)
    server.start()
    yield server
    server.stop()


async def curl(*words: str) -> str:
    """What it says; raises when it fails."""
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "--fail", "--noproxy", "*", "--max-time", "60", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize(
    ("flag", "is_secure", "version"),
    [
        ("--http1.1", False, "1.1"),
        ("--http2-prior-knowledge", False, "2"),
        ("--http1.1", True, "1.1"),
        ("--http2", True, "2"),
    ],
    ids=["h1", "h2c", "TLS h1", "TLS h2"],
)
async def test_curl_streams_an_answer(
    flag: str, is_secure: bool, version: str, demo: DemoServer, secure: DemoServer, certificate: tuple[Path, Path]
) -> None:
    server = secure if is_secure else demo
    trusting = ("--cacert", str(certificate[0])) if is_secure else ()
    common = (flag, *trusting, "-H", "content-type: application/json")
    url = f"{server.server.url}/v1/chat/completions"
    told = await curl("-N", *common, "-w", "\n%{http_version}", "-d", json.dumps(ASKED), url)
    text, _, spoken = told.rpartition("\n")
    assert spoken == version
    *chunks, done = [event.data for event in events_of(text)]
    assert done == "[DONE]"
    *said, usage = map(json.loads, chunks)
    answer = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in said)
    assert "12" in answer
    assert [chunk["choices"][0]["finish_reason"] for chunk in said if chunk["choices"][0]["finish_reason"]] == ["stop"]
    whole = json.loads(await curl(*common, "-d", json.dumps({**ASKED, "stream": False, "stream_options": None}), url))
    assert whole["choices"][0]["message"]["content"] == answer
    assert whole["usage"]["completion_tokens"] == usage["usage"]["completion_tokens"]
