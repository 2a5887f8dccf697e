"""The streaming clients of `bench serve` against a server over a device without weights, on both versions of HTTP."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from novainfer import Engine, EngineConfig
from novainfer.server.bench import serve
from novainfer.server.bench.client import HTTPFailure, Origin, Version, connect
from novainfer.server.bench.load import Load, drive
from novainfer.server.bench.workload import Workload
from novainfer.server.serve import Server
from novainfer.server.settings import ServerSettings
from novainfer.testing import ByteTokenizer, FakeDevice

PROMPTS = [[65 + at] * (3 + at) for at in range(6)]
both = pytest.mark.parametrize("version", ["h1", "h2"])


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    engine = Engine(EngineConfig(max_num_seqs=4), device=FakeDevice(), tokenizer=ByteTokenizer())
    server = Server(ServerSettings(port=0, api_keys=("secret",), shutdown_timeout_s=0.0))
    task = asyncio.create_task(server.run(lambda: engine))
    await server.ready.wait()
    yield server
    server.stop.set()
    await task


def load(server: Server, key: str | None = "secret") -> Load:
    return Load(origin=Origin.parse(server.url), model=server.service.ready_engine().model_info.name, api_key=key)


@both
async def test_every_token_of_every_request_is_counted_once(server: Server, version: Version) -> None:
    found = await drive(load(server), version, PROMPTS, 20, clients=3)
    assert [line.error for line in found.timelines] == [None] * 6
    assert [line.num_output_tokens for line in found.timelines] == [20] * 6
    assert sorted(line.num_prompt_tokens for line in found.timelines) == [3, 4, 5, 6, 7, 8]
    for line in found.timelines:
        assert line.times_s == sorted(line.times_s)
    assert len(found.whole_s) == 6


@both
async def test_what_the_server_refuses_is_an_error_of_that_request(server: Server, version: Version) -> None:
    found = await drive(load(server, key="wrong"), version, PROMPTS[:3], 4, clients=2)
    assert all((line.error or "").startswith("status 401") for line in found.timelines)
    assert len(found.timelines) == 3


@both
async def test_a_large_body_arrives_whole(server: Server, version: Version) -> None:
    long = [65, 66] * 900  # more than one HTTP/2 frame
    found = await drive(load(server), version, [long], 2, clients=1)
    assert found.timelines[0].error is None


async def test_a_server_that_breaks_off_is_a_failure_and_no_hang() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nda")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        connection = await connect(Origin.parse(f"http://127.0.0.1:{port}"), "h1")
        with pytest.raises(HTTPFailure, match="closed the connection"):
            [piece async for piece in connection.post("/", b"", {})]
        await connection.close()


async def test_the_report_has_both_versions(server: Server) -> None:
    work = Workload(name="load", title="4 requests", num_requests=4, prompt_len=8, max_tokens=5)
    report, text = await asyncio.to_thread(serve.run, server.url, api_key="secret", workload=work, clients=2, repeat=2)
    for version in ("h1", "h2"):
        found = report["systems"][version]
        assert found["requests"] == 4
        assert found["errors"] == 0
        assert found["output_tokens"] == 20
        assert set(found["itl_ms"]) == set(found["ttft_ms"]) == {"p50", "p95", "p99"}
        assert len(found["runs"]) == 2
    assert "HTTP/1.1" in text
    assert "HTTP/2" in text
