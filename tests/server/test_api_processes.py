"""Real API processes: what one process does, they do together; and what becomes of requests when one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from novainfer import InvalidParameter, ServerError
from novainfer.fsm.client import api_process
from novainfer.server.http.front import ApiProcessRecord
from novainfer.server.http.listen import bind_each
from novainfer.server.http.tls import write_self_signed
from novainfer.server.processes import supervisor
from novainfer.server.processes.forward import Answer, Forward, Sent
from novainfer.server.processes.wire import ANSWER_BYTES
from novainfer.server.responses.events import Event, event_bytes
from novainfer.server.serve import Server
from novainfer.server.settings import ServerSettings
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine
from tests.server.rawh2 import RawH2
from tests.server.test_tls_reload import der, presented

TIMEOUT_S = 20.0  # of a machine that does other things, too
STREAM = b'{"prompt": "a", "stream": true}'
HEAD = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
POST = HEAD % (b"/v1/completions", len(STREAM)) + STREAM
RESPONSE_STREAM = b'{"input": "a", "stream": true}'
RESPONSE = HEAD % (b"/v1/responses", len(RESPONSE_STREAM)) + RESPONSE_STREAM
SAID = [(0, b"a"), (10, b'data: {\\"type\\":\\"response.b\\",\\"sequence_number\\":99,'), (11, b"x" * 400)]
EVENT = re.compile(rb"\ndata: ({.+})\n\n")


async def until(condition: Callable[[], object]) -> None:
    """Wait for what another process does, and leave it the core."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def places(server: Server) -> list[ApiProcessRecord]:
    assert server.service.front is not None
    return list(server.service.front.processes())


async def stream_in_each(server: Server, engine: FakeEngine) -> list[tuple[asyncio.StreamReader, Any]]:
    """Streams over connections of their own, until each process has one; all of them have their first token."""
    streams = []
    while not all(place.num_requests for place in places(server)):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST)
        streams.append((reader, writer))
        await engine.wait_until(lambda: len(engine.active) == len(streams))
    engine.release()
    for reader, _ in streams:
        async with asyncio.timeout(TIMEOUT_S):
            await reader.readuntil(b"data: ")
    return streams


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the last chunk, or until the connection ends."""
    async with asyncio.timeout(TIMEOUT_S):
        try:
            return await reader.readuntil(b"\r\n0\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            return error.partial
        except ConnectionError:
            return b""


async def is_back(server: Server, pid: int) -> None:
    """Wait until the first place has another process than `pid`, which listens."""
    await until(lambda: places(server)[0].state == "OPEN" and places(server)[0].pid not in (0, pid))


async def ask_all(server: Server, number: int = 12) -> None:
    """Requests over new connections, which the system spreads over all processes, are answered."""
    for _ in range(number):
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
            assert (await client.get("/health")).status_code == 200


async def test_a_killed_api_process_takes_its_own_streams_along_and_the_next_one_takes_its_place(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, api_processes=2)
    streams = await stream_in_each(server, engine)
    first = places(server)[0]
    os.kill(first.pid, signal.SIGKILL)
    await engine.wait_until(lambda: len(engine.active) == len(streams) - first.num_requests)
    engine.is_paced = False
    engine.release(10)
    ends = [await rest(reader) for reader, _ in streams]
    assert sum(b"[DONE]" in end for end in ends) == len(streams) - first.num_requests
    await is_back(server, first.pid)
    await ask_all(server)
    assert [place.num_losses for place in places(server)] == [1, 0]
    assert "API process 0 is lost" in caplog.text
    for _, writer in streams:
        writer.close()


async def test_connections_that_wait_for_a_process_that_dies_are_taken_by_the_next_one(serve: Serve) -> None:
    server = await serve(FakeEngine(), api_processes=2)
    first = places(server)[0]
    os.kill(first.pid, signal.SIGSTOP)
    clients = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(12)]  # some to each
    for _, writer in clients:
        writer.write(POST)
    os.kill(first.pid, signal.SIGKILL)
    for reader, writer in clients:
        assert b"[DONE]" in await rest(reader)
        writer.close()
    await is_back(server, first.pid)


async def test_a_process_that_stands_still_is_replaced(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SILENCE_S", 2.0)
    monkeypatch.setattr(supervisor, "LOOK_S", 0.2)
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, api_processes=2)
    streams = await stream_in_each(server, engine)
    first = places(server)[0]
    os.kill(first.pid, signal.SIGSTOP)
    await engine.wait_until(lambda: len(engine.active) == len(streams) - first.num_requests)
    await is_back(server, first.pid)
    for _, writer in streams:
        writer.close()


async def test_signals_that_are_for_the_server_do_nothing_to_its_api_processes(serve: Serve) -> None:
    server = await serve(FakeEngine(), api_processes=2)
    pids = [place.pid for place in places(server)]
    for pid in pids:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
    await ask_all(server)
    assert [place.pid for place in places(server)] == pids


@pytest.mark.parametrize("http2", [False, True], ids=["http/1.1", "h2c"])
async def test_a_server_that_stops_ends_its_streams_and_leaves_no_process(serve: Serve, http2: bool) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, api_processes=2, shutdown_timeout_s=TIMEOUT_S)
    pids = [place.pid for place in places(server)]
    async with httpx.AsyncClient(base_url=server.url, http1=not http2, http2=http2, timeout=TIMEOUT_S) as client:
        answer = asyncio.create_task(client.post("/v1/completions", content=STREAM, headers={"x-request-id": "mine"}))
        await engine.wait_until(lambda: engine.active)
        engine.release()
        server.stop.set()
        await until(lambda: engine.is_draining)
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as other:
            refused = await other.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        engine.is_paced = False
        engine.release(10)
        response = await answer
        assert response.headers["x-request-id"] == "mine"
        assert response.text.rstrip().endswith("data: [DONE]")
    await until(lambda: engine.is_closed)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(OSError, match=r"refused|Connect"):
        await asyncio.open_connection("127.0.0.1", server.port)


def lives(pid: int) -> bool:
    """Whether the process is there, and not only its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


SERVER = """
import asyncio, os
from novainfer.server.serve import Server
from novainfer.server.settings import ServerSettings
from tests.server.fakes import FakeEngine

async def main():
    server = Server(ServerSettings(port=0, api_processes=2))
    engine = FakeEngine(is_paced=True)
    def on_ready():
        pids = [place.pid for place in server.service.front.processes()]
        print(server.port, *pids, flush=True)
    asyncio.get_running_loop().add_reader(0, lambda: engine.release(len(os.read(0, 100))))
    await server.run(lambda: engine, on_ready=on_ready)

asyncio.run(main())
"""


async def test_when_the_engines_process_is_killed_streams_get_an_error_event_and_api_processes_leave() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", textwrap.dedent(SERVER)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        async with asyncio.timeout(60):
            port, *pids = map(int, (await process.stdout.readline()).split())
        begun, waiting, response = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
            begun[1].write(POST)
            response[1].write(RESPONSE)
            while "nova_live_requests 2.0" not in (await client.get("/metrics")).text:
                pass
            process.stdin.write(b"\n")
            async with asyncio.timeout(TIMEOUT_S):
                await begun[0].readuntil(b"data: ")
                told = await response[0].readuntil(b"response.output_text.delta")
            waiting[1].write(POST.replace(b"true}", b"null}"))
            while "nova_live_requests 3.0" not in (await client.get("/metrics")).text:
                pass
        process.kill()
        said = await rest(begun[0])
        assert b'data: {"error":' in said
        assert b"[DONE]" not in said
        events = [json.loads(data) for data in EVENT.findall(told + await rest(response[0]))]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"] for event in events]
        assert (kinds[0], kinds[-1], kinds.count("error")) == ("response.created", "error", 1)
        async with asyncio.timeout(TIMEOUT_S):
            assert (await waiting[0].readline()).startswith(b"HTTP/1.1 503")
        for pid in pids:
            await until(lambda pid=pid: not lives(pid))  # type: ignore[misc]
        for _, writer in (begun, waiting, response):
            writer.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


STANDS_STILL = """
import subprocess, sys
child = "from novainfer.server.processes import process as p; import time; " \
    "p.PARENT_LOOK_S = p.ORPHAN_S = 0.05; p.end_with_parent(); print(1, flush=True); time.sleep(600)"
started = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
started.stdout.readline()
print(started.pid)
"""


async def test_an_api_process_whose_loop_stands_still_ends_after_the_engines_process() -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STANDS_STILL), stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert parent.stdout is not None
    async with asyncio.timeout(60):
        pid = int(await parent.stdout.readline())
    await parent.wait()
    await until(lambda: not lives(pid))


async def test_counts_limits_and_the_log_are_of_all_processes(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "novainfer.access")
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, api_processes=2, max_client_reqs=30, access_log=True)
    streams = await stream_in_each(server, engine)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        await until(lambda: len(server.service.connections) >= len(streams))
        scraped = (await client.get("/metrics")).text
        assert f"nova_live_requests {len(streams)}.0" in scraped
        assert 'nova_api_process_up{process="1"} 1.0' in scraped
        assert 'nova_api_process_cpu_seconds_total{process="0"}' in scraped
        refused = await client.post("/v1/completions", json={"prompt": "a", "n": 31 - len(streams)})
        assert refused.status_code == 429
        counted = (await client.get("/metrics")).text
        assert 'nova_http_requests_total{method="POST",route="/v1/completions",status="429"} 1' in counted
    assert '127.0.0.1 "POST /v1/completions HTTP/1.1" 429' in caplog.text
    for _, writer in streams:
        writer.close()
    await engine.wait_until(lambda: not engine.active)
    await until(lambda: not server.service.connections)


async def test_a_client_that_does_not_read_holds_little_and_gets_everything_when_it_does(serve: Serve) -> None:
    engine = FakeEngine(answer=("x" * 2000,) * 2000)
    server = await serve(engine, api_processes=1)
    front: Any = server.service.front
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
    await asyncio.get_running_loop().sock_sendall(sock, POST)
    requests = front._places[0]._requests
    await until(lambda: requests.untaken_bytes >= ANSWER_BYTES)
    assert requests.untaken_bytes < ANSWER_BYTES + 4096
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        assert (await client.get("/health")).status_code == 200
    assert requests.untaken_bytes < ANSWER_BYTES + 4096
    reader, writer = await asyncio.open_connection(sock=sock)
    said = b""
    async with asyncio.timeout(60):
        while not said.endswith(b"0\r\n\r\n"):
            said += await reader.read(1 << 16)
    assert said.count(b"x" * 100) >= 2000
    assert b"[DONE]" in said
    writer.close()


@pytest.mark.parametrize("http2", [False, True], ids=["http/1.1", "h2"])
async def test_all_processes_get_the_new_certificate_and_so_does_the_one_that_comes_after(
    serve: Serve, tmp_path: Path, http2: bool
) -> None:
    certfile, keyfile = write_self_signed(tmp_path, "127.0.0.1")
    server = await serve(FakeEngine(), api_processes=2, ssl_certfile=certfile, ssl_keyfile=keyfile)
    old = der(certfile)
    assert {await presented(server) for _ in range(8)} == {old}
    write_self_signed(tmp_path, "127.0.0.1")
    server.reload_certificate()
    new = der(certfile)
    await presents(server, new)
    assert {await presented(server) for _ in range(12)} == {new}
    first = places(server)[0]
    os.kill(first.pid, signal.SIGKILL)
    await is_back(server, first.pid)
    certfile.write_text("a renewal that is only half written")
    assert {await presented(server) for _ in range(12)} == {new}
    async with httpx.AsyncClient(base_url=server.url, http2=http2, verify=False) as client:
        answer = await client.post("/v1/completions", content=STREAM)
        assert answer.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
        assert answer.text.rstrip().endswith("[DONE]")


async def presents(server: Server, wanted: bytes) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while {await presented(server) for _ in range(4)} != {wanted}:
            pass


async def test_many_streams_of_one_http2_connection_end_each_with_its_own_end(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, api_processes=2)
    client = await RawH2.connect(server.port)
    ids = [await client.request("/v1/completions", STREAM) for _ in range(20)]
    await engine.wait_until(lambda: len(engine.active) == 20)
    await client.reset(ids[0])
    await engine.wait_until(lambda: len(engine.active) == 19)
    engine.is_paced = False
    engine.release(10)
    for stream_id in ids[1:]:
        status, body = await client.response(stream_id)
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")
    await client.close()


async def test_openais_client_works(serve: Serve) -> None:
    server = await serve(FakeEngine(), api_processes=2)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=TIMEOUT_S) as client:
        whole = await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == "Hello, world!"
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello, world!"
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="fake", messages=[], temperature=-1)


async def test_a_server_whose_api_processes_do_not_stay_alive_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def no_process(link: socket.socket, listening: socket.socket) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(supervisor, "start_process", no_process)
    monkeypatch.setattr(api_process, "BACKOFF_MIN_S", 0.001)
    engine = FakeEngine()
    server = Server(ServerSettings(port=0, api_processes=2, shutdown_timeout_s=0.0))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ServerError, match="No API process stays alive"):
            await server.run(lambda: engine)
    assert "could not be started: Cannot allocate memory" in caplog.text
    assert "is not started again" in caplog.text
    assert engine.is_closed


def test_another_server_does_not_come_to_share_the_port() -> None:
    mine = bind_each(ServerSettings(port=0), 2)
    port = mine[0].getsockname()[1]
    assert {sock.getsockname()[1] for sock in mine} == {port}
    with pytest.raises(InvalidParameter, match=f"port {port} of 127.0.0.1 is in use"):
        bind_each(ServerSettings(port=port), 2)
    for sock in mine:
        sock.close()
    for sock in bind_each(ServerSettings(port=port), 3):
        sock.close()


@pytest.mark.parametrize("value", [-1, 65])
def test_a_number_of_processes_that_cannot_be_is_refused(value: int) -> None:
    with pytest.raises(InvalidParameter, match=f"api_processes must be between 0 and 64, not {value}"):
        ServerSettings(api_processes=value)


def every(kind: type[Event]) -> Iterator[type[Event]]:
    for one in kind.__subclasses__():
        yield from every(one)
        if not one.__subclasses__():
            yield one


@pytest.mark.parametrize("kind", list(every(Event)), ids=lambda kind: kind.__name__)
def test_the_number_of_an_event_stands_where_it_is_looked_for(kind: type[Event]) -> None:
    fields = dict.fromkeys((field.name for field in msgspec.structs.fields(kind)), "anything")
    event = kind(**fields | {"sequence_number": 7})
    sent = Sent()
    sent.add(event_bytes(event))
    assert sent.num_numbered == 8


def test_who_has_some_of_a_response_is_told_of_the_loss_behind_it() -> None:
    scope = {"path": "/v1/responses/resp_a", "headers": [], "query_string": b"stream=true&starting_after=41"}
    answer = Answer(Forward(), 1, scope)
    assert answer._sent.num_numbered == 42


@pytest.mark.parametrize("num_bytes", [1, 7, 1000])
def test_the_number_of_the_last_event_is_read_from_what_was_sent_however_it_was_cut(num_bytes: int) -> None:
    sent = Sent()
    assert (sent.num_numbered, sent.is_whole) == (0, True)
    events = [b'event: response.a\ndata: {"type":"response.a","sequence_number":%d,"x":"%b"}\n\n' % one for one in SAID]
    data = b"".join(events)
    for at in range(0, len(data), num_bytes):
        sent.add(data[at : at + num_bytes])
    assert (sent.num_numbered, sent.is_whole) == (12, True)
    sent.add(b": keep-alive\n\n")
    assert (sent.num_numbered, sent.is_whole) == (12, True)
    sent.add(b'event: response.a\ndata: {"type":"response.a","seq')
    assert (sent.num_numbered, sent.is_whole) == (12, False)
