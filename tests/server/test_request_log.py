"""The line of each request: exactly one, with what an operator asks for and nothing that a user has written."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from novainfer import Engine, EngineConfig, StepFailedError
from novainfer.server.logs import JsonFormatter
from novainfer.testing import ByteTokenizer, FakeDevice
from tests.server.conftest import Serve, eventually
from tests.server.fakes import FakeEngine
from tests.server.rawh2 import RawH2
from tests.server.test_endings import BODY

SECRET = "what nobody else may read"
Lines = list[dict[str, Any]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What the logger of requests writes, as JSON has it."""
    found: Lines = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(json.loads(self.format(record)))

    handler = Keep()
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("novainfer.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
async def real(serve: Serve) -> Any:
    """A server of a real engine over a fake device, with the log on."""
    device = FakeDevice(num_blocks=64)
    engine = Engine(EngineConfig(max_num_seqs=4), device=device, tokenizer=ByteTokenizer())
    server = await serve(engine, access_log=True, api_keys=("k",), admin_key="boss")
    headers = {"authorization": "Bearer k"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=10) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_is_one_line_with_tokens_latencies_and_its_end(
    real: httpx.AsyncClient, lines: Lines, stream: bool
) -> None:
    body = {"prompt": SECRET, "max_tokens": 4, "stream": stream, "ignore_eos": True, "stop": [SECRET]}
    response = await real.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert response.status_code == 200
    await eventually(lambda: lines)
    (line,) = lines
    assert SECRET not in json.dumps(line)
    assert response.headers["x-request-id"] == line["id"] == "mine"
    assert int(response.headers["openai-processing-ms"]) >= 0
    expected = {
        "level": "info",
        "logger": "novainfer.access",
        "message": "POST /v1/completions 200",
        "method": "POST",
        "path": "/v1/completions",
        "http_version": "1.1",
        "status": 200,
        "client": "127.0.0.1",
        "generation": "cmpl-mine",
        "model": "demo",
        "prompt_tokens": len(SECRET),
        "cached_tokens": 0,
        "completion_tokens": 4,
        "end": "length",
    }
    assert {name: line[name] for name in expected} == expected
    assert line["response_bytes"] > 0
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"]
    assert line["key"] == "api-key-1"


async def test_a_generation_is_told_when_it_comes_in_numbers_alone(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "novainfer.requests")
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, enable_log_requests=True, api_keys=("k",))
    headers = {"authorization": "Bearer k", "x-request-id": "mine"}
    asked = {"max_tokens": 4, "temperature": 0.5, "n": 2, "stop": [SECRET], "user": SECRET}
    asked["session_id"] = SECRET.replace(" ", "-")
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=10) as client:
        body = {"messages": [{"role": "user", "content": SECRET}], "stream": True, **asked}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await eventually(lambda: engine.active or asking.done())
        (record,) = caplog.records  # before it has a token
        engine.release(100)
        assert (await asking).status_code == 200
    line = json.loads(JsonFormatter().format(record))
    text = json.dumps(line) + record.getMessage()
    assert SECRET not in text
    assert asked["session_id"] not in text
    expected = {"message": "chatcmpl-mine came", "generation": "chatcmpl-mine", "model": "fake", "key": "api-key-1"}
    expected |= {"num_prompts": 1, "max_tokens": 4, "temperature": 0.5, "n": 2}
    assert {name: value for name, value in line.items() if name not in ("time", "level", "logger")} == expected
    assert record.getMessage() == (
        "chatcmpl-mine came key=api-key-1 generation=chatcmpl-mine model=fake num_prompts=1 "
        "n=2 temperature=0.5 max_tokens=4"
    )


async def test_what_is_refused_has_its_code_and_no_tokens(real: httpx.AsyncClient, lines: Lines) -> None:
    await real.post("/v1/completions", json={"prompt": "x", "temperature": -1})
    await real.post("/v1/completions", json={"prompt": "x"}, headers={"authorization": "Bearer other"})
    await real.get("/nothing%0A forged")
    await eventually(lambda: len(lines) == 3)
    assert [(line["status"], line["end"]) for line in lines] == [
        (400, "invalid_value"),
        (401, "invalid_api_key"),
        (404, "path_not_found"),
    ]
    assert lines[2]["path"] == "/nothing\\n forged"
    assert all("model" not in line for line in lines)


async def test_probes_are_told_only_when_they_fail_or_to_who_debugs(serve: Serve, lines: Lines) -> None:
    engine = FakeEngine()
    server = await serve(engine, access_log=True)
    async with httpx.AsyncClient(base_url=server.url) as client:
        for path in ("/health", "/livez", "/metrics"):
            assert (await client.get(path)).status_code == 200
        server.service.is_draining = True
        assert (await client.get("/readyz")).status_code == 503
        server.service.is_draining = False
        assert lines == []
        engine.stuck = "the scheduler does not move"
        assert (await client.get("/livez")).status_code == 503
        await eventually(lambda: lines)
        assert [line["path"] for line in lines] == ["/livez"]
        logging.getLogger("novainfer.access").setLevel(logging.DEBUG)
        engine.stuck = None
        await client.get("/livez")
        await eventually(lambda: len(lines) == 2)
        assert lines[1]["level"] == "debug"


async def test_a_client_that_leaves_and_a_failure_mid_stream_are_told_as_ends(serve: Serve, lines: Lines) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, access_log=True)
    client = await RawH2.connect(server.port)
    stream = await client.request("/v1/chat/completions", BODY)
    await engine.wait_until(lambda: engine.active)
    engine.release(2)
    await client.read_until(lambda: stream in client.headers)
    client.writer.transport.abort()
    await eventually(lambda: lines)
    assert (lines[0]["status"], lines[0]["end"], lines[0]["http_version"]) == (499, "disconnect", "2")
    engine.is_paced = False
    engine.fail_at, engine.failure = 2, StepFailedError("the step failed")
    async with httpx.AsyncClient(base_url=server.url) as plain:
        await plain.post("/v1/chat/completions", content=BODY)
    await eventually(lambda: len(lines) == 2)
    assert (lines[1]["status"], lines[1]["end"], lines[1]["completion_tokens"]) == (200, StepFailedError.code, 2)


@pytest.mark.parametrize("has_journal", [False, True])
async def test_what_goes_on_behind_its_request_is_told_when_it_ends(
    serve: Serve, lines: Lines, tmp_path: Path, has_journal: bool
) -> None:
    engine = FakeEngine(is_paced=True)
    journal = tmp_path / "journal.db" if has_journal else None
    server = await serve(engine, access_log=True, api_keys=("k",), journal=journal)
    headers = {"authorization": "Bearer k", "x-request-id": "mine"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers) as client:
        body = {"input": SECRET, "background": True}
        name = (await client.post("/v1/responses", json=body)).json()["id"]
    await eventually(lambda: lines)
    assert (lines[0]["generation"], lines[0]["model"], lines[0]["end"]) == (name, "fake", None)
    assert "completion_tokens" not in lines[0], "what it uses is not known yet, and would be counted twice"
    engine.is_paced = False
    engine.release()
    await eventually(lambda: len(lines) == 2)
    line = lines[1]
    expected = {
        "message": f"{name} ended",
        "id": "mine",
        "key": "api-key-1",
        "generation": name,
        "model": "fake",
        "prompt_tokens": 7,
        "cached_tokens": 3,
        "completion_tokens": 5,
        "end": "stop",
    }
    assert {field: line[field] for field in expected} == expected
    assert 0 <= line["ttft_ms"] <= line["total_ms"]
    assert "status" not in line
    assert SECRET not in json.dumps(lines)


async def test_a_stream_of_the_journal_that_its_client_left_is_told_when_it_ends(
    serve: Serve, lines: Lines, tmp_path: Path
) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, access_log=True, journal=tmp_path / "journal.db")
    client = await RawH2.connect(server.port)
    stream = await client.request("/v1/chat/completions", BODY)
    await engine.wait_until(lambda: engine.active)
    engine.release(2)
    await client.read_until(lambda: stream in client.headers)
    client.writer.transport.abort()
    await eventually(lambda: lines)
    assert (lines[0]["status"], lines[0]["end"]) == (499, "disconnect")
    engine.is_paced = False
    engine.release()
    await eventually(lambda: len(lines) == 2)
    assert (lines[1]["generation"], lines[1]["end"]) == (lines[0]["generation"], "stop")
    assert [line.get("completion_tokens") for line in lines] == [None, 5]


async def test_as_text_it_is_one_line_too(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "novainfer.access")
    server = await serve(FakeEngine(), access_log=True)
    async with httpx.AsyncClient(base_url=server.url) as client:
        await client.post("/v1/chat/completions", content=BODY, headers={"x-request-id": "mine"})
    await eventually(lambda: caplog.records)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith('127.0.0.1 "POST /v1/chat/completions HTTP/1.1" 200 ')
    assert " id=mine generation=chatcmpl-mine model=fake prompt_tokens=7 cached_tokens=3 completion_tokens=5 " in text
    assert text.endswith(" end=stop")


async def test_without_the_flag_there_is_no_line(serve: Serve, lines: Lines) -> None:
    server = await serve(FakeEngine())
    async with httpx.AsyncClient(base_url=server.url) as client:
        await client.post("/v1/chat/completions", content=BODY)
    await asyncio.sleep(0)
    assert lines == []


SAY = """
import logging, sys
from novainfer.server.logs import announce, set_up_logging
from novainfer.server.settings import LogSettings
set_up_logging(LogSettings(log_format=sys.argv[1], log_level=sys.argv[2]))
log = logging.getLogger("novainfer.server")
log.info("a file called %s\\nof two lines", "\\udcff")
logging.getLogger("others").info("unheard")
try:
    raise ValueError("no")
except ValueError:
    log.exception("it failed")
announce("\\nNovaInfer serves\\nmany things", to=sys.stdout)
"""


def said(log_format: str, level: str) -> tuple[str, str]:
    """What a program that says these things writes on standard output and standard error."""
    command = [sys.executable, "-c", SAY, log_format, level]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_json_lines_hold_whatever_is_said() -> None:
    out, err = said("json", "info")
    assert out == ""
    found = [json.loads(line) for line in err.splitlines()]
    assert [(line["level"], line["message"]) for line in found] == [
        ("info", "a file called \\udcff\nof two lines"),
        ("error", "it failed"),
        ("info", "NovaInfer serves\nmany things"),
    ]
    assert found[1]["exception"].endswith("ValueError: no")
    assert {(line["logger"], line["time"][-6:]) for line in found} == {("novainfer.server", "+00:00")}


def test_text_is_for_people() -> None:
    out, err = said("text", "warning")
    assert out == "\nNovaInfer serves\nmany things\n"
    first, *_, last = err.splitlines()
    assert first.endswith(" ERROR novainfer.server: it failed")
    assert last == "ValueError: no"
