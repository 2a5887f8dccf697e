"""Frames of DATA that are written without h2: the same bytes, out of the same windows, and the same refusals."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.exceptions
import httpx
import pytest

from novainfer.server.http.http2_frames import room_of, send_data
from novainfer.server.http.writer import Writer
from tests.server.conftest import TIMEOUT_S, Serve
from tests.server.fakes import FakeEngine

WINDOW_BYTES = 65_535


@pytest.fixture
def pair() -> tuple[h2.connection.H2Connection, h2.connection.H2Connection]:
    """A client and a server, which has begun to answer the request of stream 1."""
    client = h2.connection.H2Connection(h2.config.H2Configuration())
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    client.initiate_connection()
    server.initiate_connection()
    client.send_headers(1, [(":method", "GET"), (":path", "/"), (":authority", "x"), (":scheme", "http")])
    client.end_stream(1)
    server.receive_data(client.data_to_send())
    server.send_headers(1, [(b":status", b"200")])
    client.receive_data(server.data_to_send())
    return client, server


Pair = tuple[h2.connection.H2Connection, h2.connection.H2Connection]


@pytest.mark.parametrize("data", [b"a", b"b" * 300, b"c" * 16_384])
def test_a_frame_is_what_h2_writes_and_leaves_what_h2_leaves(pair: Pair, data: bytes) -> None:
    _, server = pair
    server.send_data(1, data)
    by_h2, left = server.data_to_send(), server.local_flow_control_window(1)
    before = server.outbound_flow_control_window, server.streams[1].outbound_flow_control_window
    send_data(server, 1, data)
    assert server.data_to_send() == by_h2
    after = server.outbound_flow_control_window, server.streams[1].outbound_flow_control_window
    assert after == (before[0] - len(data), before[1] - len(data))
    assert room_of(server, 1) == min(left - len(data), 16_384)


def test_h2_goes_on_behind_it(pair: Pair) -> None:
    client, server = pair
    send_data(server, 1, b"abc")
    server.send_data(1, b"d", end_stream=True)
    events = client.receive_data(server.data_to_send())
    assert [getattr(event, "data", None) for event in events][:2] == [b"abc", b"d"]
    with pytest.raises(h2.exceptions.StreamClosedError):
        send_data(server, 1, b"e")
    with pytest.raises(h2.exceptions.NoSuchStreamError):
        room_of(server, 3)


def test_there_is_no_more_room_than_the_windows_have(pair: Pair) -> None:
    _, server = pair
    for _ in range(3):
        send_data(server, 1, b"x" * 16_384)
    assert room_of(server, 1) == WINDOW_BYTES - 3 * 16_384
    with pytest.raises(h2.exceptions.FlowControlError):
        send_data(server, 1, b"x" * 16_384)
    send_data(server, 1, b"x" * room_of(server, 1))
    assert room_of(server, 1) == 0


def test_nothing_is_framed_once_the_connection_ends(pair: Pair) -> None:
    _, server = pair
    server.close_connection()
    server.data_to_send()
    with pytest.raises(h2.exceptions.ProtocolError):
        send_data(server, 1, b"late")
    assert server.data_to_send() == b""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What answers say to each event that is offered to them."""
    found = list[bool]()
    write_now = Writer.write_now

    def noted(self: Writer, data: bytes) -> bool:
        found.append(write_now(self, data))
        return found[-1]

    monkeypatch.setattr(Writer, "write_now", noted)
    return found


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "h2c"])
async def test_events_of_a_client_that_reads_are_taken_at_once(serve: Serve, taken: list[bool], http2: bool) -> None:
    server = await serve(FakeEngine(is_paced=False))
    async with httpx.AsyncClient(base_url=server.url, http1=not http2, http2=http2, timeout=TIMEOUT_S) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi", "stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.count("data: ") == len(taken) + 1
    assert any(taken)
