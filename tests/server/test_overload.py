"""A full queue, and clients that read slowly or not at all: a real engine over a fake device, behind real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from novainfer import Engine
from novainfer.actors.device.fake import FakeDevice
from novainfer.server.serve import Server
from tests.actors.helpers import Valve, expected
from tests.api.helpers import blocks_back, fake_engine
from tests.server.conftest import TIMEOUT_S, eventually, running
from tests.server.rawh2 import RawH2
from tests.server.test_chat import events

PATH = "/v1/completions"
BASE = {"prompt": [65], "max_tokens": 4, "temperature": 0}
LONG_MS = 3_600_000
both_versions = pytest.mark.parametrize("http2", [False, True], ids=["http/1.1", "h2c"])


def text_of(token_ids: list[int]) -> str:
    return bytes(token_ids).decode()


def text_in(chunks: list[Any]) -> str:
    """The text of all chunks of a stream of completions."""
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if isinstance(chunk, dict) and "choices" in chunk)


class Full:
    """A server whose device is held, with one request that runs and one that is queued: the queue is full."""

    def __init__(self, engine: Engine, server: Server, http2: bool, valve: Valve) -> None:
        self.engine, self.server, self.valve, self._http2 = engine, server, valve, http2
        self.tasks: list[asyncio.Task[httpx.Response]] = []

    def post(self, headers: dict[str, str] | None = None, **body: Any) -> asyncio.Task[httpx.Response]:
        """Ask for four tokens after "A"."""
        return asyncio.create_task(self._post(headers, BASE | body))

    async def _post(self, headers: dict[str, str] | None, body: dict[str, Any]) -> httpx.Response:
        async with self.client() as client:
            return await client.post(PATH, json=body, headers=headers)

    def client(self) -> httpx.AsyncClient:
        """A connection of its own: httpcore's HTTP/2 lets an answer wait for a silent stream that is read before it."""
        return http_client(self.server, self._http2)

    async def waiting(self, headers: dict[str, str] | None = None, **body: Any) -> asyncio.Task[httpx.Response]:
        """A request that is in overflow."""
        before = self.engine.statistics().admission.num_overflow
        task = self.post(headers, **{"max_queue_ms": LONG_MS, **body})
        await eventually(lambda: self.engine.statistics().admission.num_overflow > before)
        return task

    async def finish(self) -> None:
        """Those who were let in get their answers."""
        self.valve.open()
        for task in self.tasks:
            assert (await task).json()["choices"][0]["text"] == text_of(expected([65], 4))
        await blocks_back(self.engine)
        admission = self.engine.statistics().admission
        assert (admission.num_queued, admission.num_overflow) == (0, 0)


def http_client(server: Server, http2: bool) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, http1=not http2, http2=http2, timeout=TIMEOUT_S)


@asynccontextmanager
async def full_server(http2: bool, **settings: Any) -> AsyncIterator[Full]:
    valve = Valve()
    engine = fake_engine(FakeDevice(on_step=valve), max_num_seqs=1, max_num_queued_reqs=1, max_num_overflow_reqs=2)
    settings.setdefault("shutdown_timeout_s", 0.0)
    async with running(engine, **settings) as server:
        full = Full(engine, server, http2, valve)
        try:
            full.tasks.append(full.post())
            await valve.step_arrived()
            await eventually(lambda: engine.statistics().admission.num_queued == 0)
            full.tasks.append(full.post())
            await eventually(lambda: engine.statistics().admission.num_queued == 1)
            yield full
        finally:
            valve.open()
            await asyncio.gather(*full.tasks, return_exceptions=True)


def is_overloaded(response: httpx.Response) -> bool:
    """True for a 503 that says when to come back."""
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "service_unavailable_error"
    assert int(response.headers["retry-after"]) >= 1
    assert int(response.headers["retry-after-ms"]) >= 1
    return bool(response.json()["error"]["code"] == "server_is_overloaded")


# ---- waiting for room ----------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("stream", [False, True])
async def test_who_does_not_say_how_long_it_would_wait_is_refused_at_once(http2: bool, stream: bool) -> None:
    async with full_server(http2) as full:
        assert is_overloaded(await full.post(stream=stream))
        assert is_overloaded(await full.post(stream=stream, max_queue_ms=None))
        await full.finish()


@both_versions
async def test_who_would_wait_gets_its_whole_answer(http2: bool) -> None:
    async with full_server(http2) as full:
        full.tasks.append(await full.waiting())
        full.tasks.append(await full.waiting())
        refused = await full.post(max_queue_ms=LONG_MS)
        assert is_overloaded(refused)
        assert "the list of those who wait for it: 2 requests" in refused.json()["error"]["message"]
        await full.finish()


@both_versions
async def test_a_stream_that_waits_for_room_is_told_so_at_once(http2: bool) -> None:
    async with full_server(http2) as full:
        body = BASE | {"stream": True, "max_queue_ms": LONG_MS}
        async with full.client() as client, client.stream("POST", PATH, json=body) as response:
            assert (response.status_code, response.headers["x-novainfer-queue"]) == (200, "overflow")
            lines = response.aiter_lines()
            assert await anext(lines) == ": waiting for room in the queue"
            full.valve.open()
            rest = "\n".join([line async for line in lines]).strip()
        assert text_in(events(rest)) == text_of(expected([65], 4))
        assert events(rest)[-1] == "[DONE]"
        await full.finish()


@both_versions
async def test_who_has_waited_long_enough_is_told_when_to_come_back(http2: bool) -> None:
    async with full_server(http2) as full:
        assert is_overloaded(await full.post(max_queue_ms=10))
        response = await full.post(max_queue_ms=10, stream=True)
        assert response.status_code == 200  # it was told that it has to wait
        *_, last = events(response.text)
        assert last["error"]["code"] == "server_is_overloaded"
        assert "try again in" in last["error"]["message"]
        assert "[DONE]" not in response.text
        async with full.client() as client:
            metrics = (await client.get("/metrics")).text
        for line in ('nova_cancels_total{cause="queue"} 2.0', "nova_overflowed_total 2.0", "nova_queued_requests 1.0"):
            assert line in metrics
        await full.finish()


@both_versions
async def test_a_request_that_has_no_token_in_time_is_told_so_with_a_status(http2: bool) -> None:
    valve = Valve()
    engine = fake_engine(FakeDevice(on_step=valve), max_num_seqs=1)
    async with running(engine, shutdown_timeout_s=0.0) as server, http_client(server, http2) as client:
        runs = asyncio.create_task(client.post(PATH, json=BASE | {"max_queue_ms": 20}))
        await valve.step_arrived()
        for stream in (False, True):
            async with http_client(server, http2) as other:
                assert is_overloaded(await other.post(PATH, json=BASE | {"max_queue_ms": 20, "stream": stream}))
        assert is_overloaded(await runs)
        valve.open()


@both_versions
@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline", "header"])
async def test_who_leaves_while_it_waits_leaves_nothing_behind(http2: bool, how: str) -> None:
    async with full_server(http2) as full:
        if how in ("deadline", "header"):
            by_body = {"timeout": 0.02} if how == "deadline" else {"timeout": 3600.0}
            headers = {"x-request-timeout-ms": "20"} if how == "header" else None
            response = await full.post(headers, max_queue_ms=LONG_MS, **by_body)
            assert (response.status_code, response.json()["error"]["code"]) == (408, "request_timeout")
        else:
            task = await full.waiting({"x-request-id": "mine"})
            if how == "disconnect":
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                async with full.client() as client:
                    assert (await client.post("/v1/requests/mine/cancel")).json()["status"] == "cancelled"
                assert (await task).status_code == 499
        await eventually(lambda: full.engine.statistics().admission.num_overflow == 0)
        full.tasks.append(await full.waiting())
        await full.finish()
        await eventually(lambda: full.server.service.live.num_live == 0)


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({"x-request-timeout-ms": "soon"}, {}, "x-request-timeout-ms"),
        ({"x-request-timeout-ms": "1_000"}, {}, "x-request-timeout-ms"),
        ({"x-request-timeout-ms": "nan"}, {}, "x-request-timeout-ms"),
        ({"x-request-timeout-ms": "-1"}, {}, "x-request-timeout-ms"),
        ({"x-request-timeout-ms": "inf"}, {}, "x-request-timeout-ms"),
        ({}, {"max_queue_ms": 0}, "max_queue_ms"),
        ({}, {"max_queue_ms": "5"}, "max_queue_ms"),
        ({}, {"timeout": 0}, "timeout"),
    ],
)
async def test_a_time_that_is_none_is_a_bad_request(headers: dict[str, str], body: dict[str, Any], param: str) -> None:
    engine = fake_engine()
    async with running(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post(PATH, json=BASE | body, headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@both_versions
async def test_a_drain_ends_those_who_wait_for_room_and_lets_the_others_finish(http2: bool) -> None:
    async with full_server(http2, shutdown_timeout_s=TIMEOUT_S) as full:
        waits, streams = await full.waiting(), await full.waiting(stream=True)
        full.server.stop.set()
        response = await waits
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in response.headers
        *_, last = events((await streams).text)
        assert last["error"]["code"] == "draining"
        refused = await full.post(max_queue_ms=LONG_MS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers.get("connection") == (None if http2 else "close")
        await full.finish()


# ---- readers that stay away ----------------------------------------------------------------

STALLS = BASE | {"stream": True, "max_tokens": 1900}
HEAD = b"POST %s HTTP/1.1\r\nhost: x\r\nx-request-id: %s\r\ncontent-length: %d\r\n\r\n"


class Away:
    """A client that has asked for a long answer and reads nothing of it, until it comes back."""

    async def come_back(self) -> str:
        """Read to the end."""
        raise NotImplementedError


class AwayH2(Away):
    def __init__(self, client: RawH2, stream_id: int) -> None:
        self._client, self._stream_id = client, stream_id

    @classmethod
    async def ask(cls, port: int) -> AwayH2:
        client = await RawH2.connect(port, takes_data=False)
        stream_id = await client.request(PATH, json.dumps(STALLS).encode())
        return cls(client, stream_id)

    async def come_back(self) -> str:
        client = self._client
        client.takes_data = True
        client.connection.increment_flow_control_window(1 << 20)
        client.connection.increment_flow_control_window(1 << 20, self._stream_id)
        await client.flush()
        _, data = await client.response(self._stream_id)
        return data.decode()


class AwayH1(Away):
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    async def ask(cls, port: int) -> AwayH1:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", port))
        body = json.dumps(STALLS | {"stream_options": {"continuous_usage_stats": True}}).encode()
        # A long id is in every chunk: the kernel's buffers are full that much sooner.
        await loop.sock_sendall(sock, HEAD % (PATH.encode(), b"x" * 128, len(body)) + body)
        return cls(sock)

    async def come_back(self) -> str:
        loop = asyncio.get_running_loop()
        data = bytearray()
        async with asyncio.timeout(TIMEOUT_S):
            while not data.endswith(b"0\r\n\r\n"):
                more = await loop.sock_recv(self._sock, 1 << 16)
                assert more, "the connection was closed in the middle"
                data += more
        self._sock.close()
        head, _, rest = bytes(data).partition(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower()
        body = bytearray()
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body += rest[: int(size, 16)]
            rest = rest[int(size, 16) + 2 :]
        return body.decode()


both_kinds = pytest.mark.parametrize("kind", [AwayH1, AwayH2], ids=["http/1.1", "h2c"])


@both_kinds
async def test_a_client_that_stays_away_too_long_finds_what_there_was_and_one_error_event(kind: Any) -> None:
    engine = fake_engine(stall_timeout_s=0.1)
    async with running(engine, stall_timeout_s=TIMEOUT_S, shutdown_timeout_s=0.0) as server:
        away = await kind.ask(server.port)
        await eventually(lambda: engine.statistics().admission.stalls_total)
        async with httpx.AsyncClient(base_url=server.url) as client:  # others never notice
            response = await client.post(PATH, json=BASE)
        assert response.json()["choices"][0]["text"] == text_of(expected([65], 4))
        await eventually(lambda: engine.errors())
        await blocks_back(engine)
        *chunks, last = events(await away.come_back())
        assert last["error"]["code"] == "stalled"
        text = text_in(chunks)
        assert text_of(expected([65], 1900)).startswith(text)
        assert len(text) > 512
        assert [error.kind for error in engine.errors()] == ["stall"]


@both_kinds
async def test_a_client_that_comes_back_in_time_gets_all_of_it(kind: Any) -> None:
    engine = fake_engine()
    async with running(engine, shutdown_timeout_s=0.0) as server:
        away = await kind.ask(server.port)
        await eventually(lambda: engine.statistics().admission.num_stalled)
        await eventually(lambda: engine.statistics().num_paused == 1)
        *chunks, last = events(await away.come_back())
        assert last == "[DONE]"
        assert text_in(chunks) == text_of(expected([65], 1900))
        await blocks_back(engine)


async def test_a_client_that_never_comes_back_has_its_stream_reset_in_the_end() -> None:
    engine = fake_engine(stall_timeout_s=0.05)
    async with running(engine, stall_timeout_s=0.05, stall_grace_s=0.05, shutdown_timeout_s=0.0) as server:
        client = await RawH2.connect(server.port, takes_data=False)
        stream_id = await client.request(PATH, json.dumps(STALLS).encode())
        await client.read_until(lambda: stream_id in client.resets)
        await eventually(lambda: server.service.live.num_live == 0)
        await blocks_back(engine)
        await client.close()
