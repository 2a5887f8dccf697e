"""What HTTP itself refuses has the error object that all other refusals have."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from novainfer.server.http.connection import NO_ROOM
from tests.server.conftest import TIMEOUT_S
from tests.server.rawh2 import RawH2
from tests.server.test_http2 import app_of, is_fine, serving

HOST = b"host: x\r\n"
GET = b"GET /ok HTTP/1.1\r\n" + HOST
POST = b"POST /ok HTTP/1.1\r\n" + HOST


async def never(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("it is refused before")


def parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert first.split(" ", 2)[2], "h2load wants a reason"
    return int(first.split(" ")[1]), headers, body


def error_of(headers: dict[str, str], body: bytes) -> dict[str, Any]:
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body)
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


async def asked(port: int, data: bytes) -> bytes:
    """All that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(TIMEOUT_S):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("data", "status", "code", "said"),
    [
        (b"nonsense\r\n\r\n", 400, "malformed_request", "illegal request line"),
        (b"GET /ok HTTP/1.1\r\n\r\n", 400, "malformed_request", "Host"),
        (GET + b"a : b\r\n\r\n", 400, "malformed_request", "header"),
        (GET + b"a: \x00\xff\r\n\r\n", 400, "malformed_request", "header"),
        (POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", 400, "malformed_request", "Content-Length"),
        (POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400, "malformed_request", "not both"),
        (POST + b"transfer-encoding: gzip\r\n\r\n", 501, "not_implemented", "chunked"),
        (GET + b"a: " + b"b" * 100_000, 431, "headers_too_large", "16384 bytes"),
        (b"GET /ok HTTP/3.0\r\n" + HOST + b"\r\n", 505, "http_version_not_supported", "not HTTP/3.0"),
        (b"GET /ok HTTP/2.0\r\n" + HOST + b"\r\n", 505, "http_version_not_supported", "not HTTP/2.0"),
        (b"PRI /ok HTTP/2.0\r\n" + HOST + b"\r\n", 505, "http_version_not_supported", "not HTTP/2.0"),
    ],
)
async def test_what_is_no_http_is_refused_in_the_one_shape(data: bytes, status: int, code: str, said: str) -> None:
    async with serving(app_of(never)) as port:
        found, headers, body = parsed(await asked(port, data))
        error = error_of(headers, body)
        assert (found, error["code"], error["type"]) == (status, code, "invalid_request_error")
        assert said in error["message"]
        assert headers["connection"] == "close"


async def test_a_head_that_is_refused_has_no_body_and_hides_none() -> None:
    async with serving(app_of(never)) as port:
        status, headers, body = parsed(await asked(port, b"HEAD /ok HTTP/3.0\r\n" + HOST + b"\r\n"))
    assert (status, body) == (505, b"")
    assert int(headers["content-length"]) > 0, "what a GET would have had"


async def test_a_later_minor_version_is_answered_as_the_one_that_is_known() -> None:
    """RFC 9110 2.5."""
    async with serving(app_of(never)) as port:
        status, _, body = parsed(await asked(port, GET.replace(b"1.1", b"1.9") + b"connection: close\r\n\r\n"))
    assert (status, b"ok" in body) == (200, True)


@pytest.mark.parametrize("takes_data", [True, False])
async def test_http2_refuses_a_stream_in_the_same_shape(takes_data: bool) -> None:
    async with serving(app_of(never)) as port:
        client = await RawH2.connect(port, initial_window=None if takes_data else 0)
        client.connection.config.normalize_outbound_headers = False
        for path, status, code in (("/\xe9", 400, "malformed_request"), (None, 501, "not_implemented")):
            if path is not None:
                stream = await client.request(path)
            else:
                stream = client.connection.get_next_available_stream_id()
                client.connection.send_headers(stream, [(":method", "CONNECT"), (":authority", "x")], end_stream=True)
                await client.flush()
            found, body = await client.response(stream)
            assert found == status
            if takes_data:
                assert json.loads(body)["error"]["code"] == code
            else:
                assert body == b""
        if takes_data:
            await is_fine(client)
        await client.close()


def test_a_connection_for_which_there_is_no_room_is_told_in_the_same_shape() -> None:
    status, headers, body = parsed(NO_ROOM)
    assert (status, error_of(headers, body)["code"]) == (503, "too_many_connections")
    assert (headers["retry-after"], headers["connection"]) == ("1", "close")
