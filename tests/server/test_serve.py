"""Starting and stopping: TLS, ports in use, drain, and what running streams see of it."""

import asyncio
import shutil
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from novainfer import EngineDead, InvalidParameter, ModelLoadError
from novainfer.fsm.messages.events import Chat
from novainfer.server import serve as serve_module
from novainfer.server.http.tls import write_self_signed
from novainfer.server.serve import Server, ready_line
from novainfer.server.settings import ServerSettings
from tests.server.conftest import Serve, eventually, running
from tests.server.fakes import FakeEngine, FakeModelInfo
from tests.server.rawh2 import RawH2
from tests.server.test_chat import USER, events
from tests.server.test_endings import BODY


async def test_drain_lets_running_streams_finish_and_refuses_new_ones() -> None:
    engine = FakeEngine(is_paced=True)
    async with running(engine, shutdown_timeout_s=30.0) as server, httpx.AsyncClient(base_url=server.url) as client:
        answer = asyncio.create_task(client.post("/v1/chat/completions", content=BODY))
        await engine.wait_until(lambda: engine.active)
        engine.release(1)
        server.stop.set()
        await eventually(lambda: engine.is_draining)
        response = await client.post("/v1/chat/completions", json={"messages": USER})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "draining"
        assert "retry-after" in response.headers
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/livez")).status_code == 200
        engine.release(10)
        assert events((await answer).text)[-1] == "[DONE]"
    assert engine.is_closed


@pytest.mark.parametrize("http2", [True, False])
async def test_what_does_not_finish_in_time_ends_with_an_error_event(http2: bool) -> None:
    engine = FakeEngine(is_paced=True)
    async with (
        running(engine, shutdown_timeout_s=0.05) as server,
        httpx.AsyncClient(base_url=server.url, http1=not http2, http2=http2) as client,
    ):
        answer = asyncio.create_task(client.post("/v1/chat/completions", content=BODY))
        await engine.wait_until(lambda: engine.active)
        engine.release(2)
        first_token = server.service.metrics.of("fake").time_to_first_token
        await eventually(lambda: sum(first_token.counts))  # before it, the error would be a status
        server.stop.set()
        text = (await answer).text
    *_, last = events(text)
    assert last["error"]["code"] == "draining"
    assert "[DONE]" not in text


async def test_a_model_that_does_not_load_ends_the_server_with_its_reason() -> None:
    engine = FakeEngine()
    engine.start_failure = ModelLoadError("model.safetensors is missing")
    server = Server(ServerSettings(port=0))
    with pytest.raises(ModelLoadError, match="is missing"):
        await server.run(lambda: engine)
    assert engine.is_closed
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", server.port)


async def test_stopping_while_the_model_loads_ends_quietly() -> None:
    engine = FakeEngine()
    engine.start_gate = asyncio.Event()
    async with running(engine, wait_ready=False):
        pass
    assert engine.is_closed
    assert not engine.is_ready


@pytest.mark.parametrize("http2", [True, False])
async def test_clients_that_read_nothing_cannot_keep_the_server_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, http2: bool
) -> None:
    monkeypatch.setattr(serve_module, "FLUSH_TIMEOUT_S", 0.05)
    engine = FakeEngine(answer=tuple("x" * 500_000 for _ in range(100)))
    async with running(engine, shutdown_timeout_s=0.0) as server:
        if http2:
            client = await RawH2.connect(server.port, takes_data=False, initial_window=2**31 - 1)
            client.connection.increment_flow_control_window(2**31 - 1 - 65535)
            stream = await client.request("/v1/chat/completions", BODY)
            await client.read_until(lambda: stream in client.headers)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        else:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
            )
        await engine.wait_until(lambda: engine.active)
        for _ in range(100):  # time for it to get stuck; it is right either way
            await asyncio.sleep(0)
    assert engine.is_closed
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
    if not http2:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_nothing_is_left_after_many_servers() -> None:
    tasks = len(asyncio.all_tasks())
    for _ in range(5):
        async with running(FakeEngine()) as server, httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.post("/v1/chat/completions", content=BODY)).status_code == 200
    await eventually(lambda: len(asyncio.all_tasks()) == tasks)


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidParameter, match=f"port {port} of 127.0.0.1 is in use") as caught:
            Server(ServerSettings(port=port))
    assert caught.value.param == "port"
    with pytest.raises(InvalidParameter, match="is not known"):
        Server(ServerSettings(host="no.such.host.invalid"))


@pytest.mark.parametrize("http2", [True, False])
async def test_a_self_signed_certificate_serves_both_versions(http2: bool) -> None:
    insecure = ssl.create_default_context()
    insecure.check_hostname, insecure.verify_mode = False, ssl.CERT_NONE
    async with running(FakeEngine(), self_signed=True) as server:
        assert server.url.startswith("https://")
        async with httpx.AsyncClient(base_url=server.url, http2=http2, verify=insecure) as client:
            response = await client.post("/v1/chat/completions", content=BODY)
            assert response.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
            assert events(response.text)[-1] == "[DONE]"


async def test_a_given_certificate_is_served_and_verified(tmp_path: Path) -> None:
    certfile, keyfile = write_self_signed(tmp_path, "127.0.0.1")
    trusting = ssl.create_default_context(cafile=str(certfile))
    async with (
        running(FakeEngine(), ssl_certfile=certfile, ssl_keyfile=keyfile) as server,
        httpx.AsyncClient(base_url=server.url, http2=True, verify=trusting) as client,
    ):
        assert (await client.get("/health")).http_version == "HTTP/2"


def test_a_certificate_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("nonsense")
    (tmp_path / "key.pem").write_text("nonsense")
    for certfile in (tmp_path / "cert.pem", tmp_path / "missing.pem"):
        with pytest.raises(InvalidParameter, match="ssl_certfile"):
            Server(ServerSettings(port=0, ssl_certfile=certfile, ssl_keyfile=tmp_path / "key.pem"))


async def curl(*args: str) -> tuple[str, str]:
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--max-time", "10", *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return out.decode(), err.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("flags", [("--http1.1",), ("--http2-prior-knowledge",), ("--http2",)])
async def test_curl_streams(serve: Serve, flags: tuple[str, ...]) -> None:
    server = await serve(FakeEngine())
    out, err = await curl(
        "-N", *flags, f"{server.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", BODY.decode()
    )
    assert events(out)[-1] == "[DONE]", err
    out, err = await curl(*flags, "-w", "%{http_version}", f"{server.url}/health")
    # --http2 asks for an upgrade, which is ignored: a proxy that passes it on would open a way past its own rules
    version = "2" if flags == ("--http2-prior-knowledge",) else "1.1"
    mode = '{"kernels":"fast","precision":"checkpoint"}'
    assert (
        out
        == f'{{"status":"ok","model":"fake","state":"IDLE","rung":"FULL","mode":{mode},"weights":"float32"}}' + version
    ), err


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("kind", ["chat", "text", "token_ids"])
async def test_the_ready_lines_curl_works_as_printed(kind: str, serve: Serve) -> None:
    engine = FakeEngine()
    engine.model_info = FakeModelInfo(prompt_kind=kind)
    server = await serve(engine)
    first, command = ready_line(server, 1.5).split("\n  curl", 1)
    command = "curl" + command
    assert server.url in first
    assert "1.5 s" in first
    process = await asyncio.create_subprocess_shell(command + " -sS", stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert events(out.decode())[-1] == "[DONE]"
    asked = {"chat": Chat, "text": str, "token_ids": dict}
    assert [type(prompt) for prompt, _, _ in engine.seen] == [asked[kind]]


async def test_a_dead_engine_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "ALIVE_CHECK_S", 0.01)
    engine = FakeEngine()
    server = Server(ServerSettings(port=0))
    task = asyncio.create_task(server.run(lambda: engine))
    await server.ready.wait()
    engine.is_ready = False
    with pytest.raises(EngineDead):
        await task


async def test_a_client_may_stall_for_longer_than_the_kernel_can_count() -> None:
    async with running(FakeEngine(), stall_timeout_s=31_000_000.0) as server, httpx.AsyncClient() as client:
        assert (await client.get(f"{server.url}/health")).status_code == 200
