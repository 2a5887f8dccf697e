"""What one client may hold: live requests, and answers that it does not read. Others notice nothing of its bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest

from novainfer import InvalidParameter
from novainfer.server.http import clients, http2, writer
from novainfer.server.http.errors import TooManyRequests
from novainfer.server.http.exchange import network_of
from novainfer.server.serve import Server
from novainfer.server.settings import ServerSettings
from tests.server.conftest import TIMEOUT_S, Serve, eventually
from tests.server.fakes import FakeEngine
from tests.server.rawh2 import RawH2
from tests.server.test_bad_input import error_of

PATH = "/v1/completions"
ALICE, BOB = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
KEYS = {"api_keys": ("alice", "bob")}
both_kinds = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def client_of(server: Server, **headers: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, **headers)


@both_kinds
@pytest.mark.parametrize("has_keys", [False, True], ids=["addresses", "keys"])
async def test_a_client_with_too_many_live_requests_is_refused_and_others_are_not(
    serve: Serve, stream: bool, has_keys: bool
) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, max_client_reqs=4, **(KEYS if has_keys else {}))
    body = {"prompt": ["a", "b"], "stream": stream}
    async with client_of(server, headers=ALICE) as alice, client_of(server, headers=BOB) as bob:
        tasks = [asyncio.create_task(alice.post(PATH, json=body)) for _ in range(2)]
        await engine.wait_until(lambda: len(engine.active) == 4)
        refused = await alice.post(PATH, json={"prompt": "c"})
        assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_requests")
        assert "4 live requests" in error_of(refused)["message"]
        assert int(refused.headers["retry-after"]) >= 1
        if has_keys:
            tasks.append(asyncio.create_task(bob.post(PATH, json=body)))
            await engine.wait_until(lambda: len(engine.active) == 6)
        engine.is_paced = False
        engine.release()
        assert [response.status_code for response in await asyncio.gather(*tasks)] == [200] * len(tasks)
        too_large = await alice.post(PATH, json={"prompt": ["a"] * 5})
        assert (too_large.status_code, error_of(too_large)["param"]) == (400, "prompt")
        too_many = await alice.post(PATH, json={"prompt": "a", "n": 5})
        assert (too_many.status_code, error_of(too_many)["param"]) == (400, "n")
    await eventually(lambda: not server.service.clients.live)


@both_kinds
async def test_a_client_may_leave_only_so_many_answers_unread(
    serve: Serve, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "UNREAD_AFTER_S", 0.01)
    monkeypatch.setattr(writer, "UNREAD_AFTER_S", 0.01)
    server = await serve(FakeEngine(), max_client_unread=2)
    unread = server.service.clients.unread
    away = await RawH2.connect(server.port, initial_window=0)
    body = json.dumps({"prompt": "a", "stream": stream}).encode()
    kept = [await away.request(PATH, body) for _ in range(2)]
    await eventually(lambda: unread["127.0.0.1"] == 2)
    async with client_of(server) as client:
        refused = await client.post(PATH, json={"prompt": "c"})
        assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_requests")
        assert error_of(refused)["message"].startswith("2 answers wait for this client to read them")
    for stream_id in kept:
        away.connection.increment_flow_control_window(100_000, stream_id)
        await away.flush()
        assert (await away.response(stream_id))[0] == 200
    await eventually(lambda: not unread)
    async with client_of(server) as client:
        assert (await client.post(PATH, json={"prompt": "c"})).status_code == 200
    await away.close()


@both_kinds
async def test_of_many_answers_that_stay_unread_at_once_those_above_the_limit_are_reset(
    serve: Serve, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "UNREAD_AFTER_S", 0.05)
    monkeypatch.setattr(writer, "UNREAD_AFTER_S", 0.05)
    server = await serve(FakeEngine(), max_client_unread=3)
    away = await RawH2.connect(server.port, initial_window=0)
    body = json.dumps({"prompt": "a", "stream": stream}).encode()
    asked = [await away.request(PATH, body) for _ in range(10)]
    await away.read_until(lambda: len(away.resets) == 7)
    assert server.service.clients.unread["127.0.0.1"] == 3
    for stream_id in set(asked) - set(away.resets):
        away.connection.increment_flow_control_window(100_000, stream_id)
        await away.flush()
        assert (await away.response(stream_id))[0] == 200
    await eventually(lambda: not server.service.clients.unread and not server.service.clients.live)
    await away.close()


async def test_a_whole_answer_that_is_never_read_is_reset_in_the_end(serve: Serve) -> None:
    server = await serve(FakeEngine(), stall_timeout_s=0.02, stall_grace_s=0.02)
    away = await RawH2.connect(server.port, initial_window=0)
    stream_id = await away.request(PATH, b'{"prompt": "a"}')
    await away.read_until(lambda: stream_id in away.resets)
    assert stream_id in away.resets
    assert server.service.metrics.http_requests["POST", PATH, 499] == 1
    await away.close()


async def test_the_unsent_bytes_of_a_connection_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "CONNECTION_HIGH_BYTES", 20_000)
    engine = FakeEngine(answer=("x" * 1000,) * 100)
    server = await serve(engine)
    away = await RawH2.connect(server.port, initial_window=0)
    body = b'{"prompt": "a", "stream": true}'
    asked = [await away.request(PATH, body) for _ in range(10)]
    await away.read_until(lambda: len(away.headers) == 10)
    (connection,) = server.service.connections
    held = connection.protocol.protocol  # type: ignore[attr-defined]
    async with client_of(server) as client:  # time passes
        for _ in range(20):
            assert (await client.get("/health")).status_code == 200
    assert held._unsent_bytes < 20_000 + 10 * (http2.SHARE_BYTES + 2000)
    away.connection.increment_flow_control_window(10_000_000)
    for stream_id in asked:
        away.connection.increment_flow_control_window(1_000_000, stream_id)
    await away.flush()
    for stream_id in asked:
        status, data = await away.response(stream_id)
        assert status == 200
        assert data.count(b"x" * 1000) == 100
    assert held._unsent_bytes == 0
    await away.close()


def test_while_others_are_here_a_client_leaves_them_room_and_a_minute_later_has_all_again() -> None:
    now_s = 0.0
    found = clients.Clients(ServerSettings(max_client_reqs=100, client_room=12), clock=lambda: now_s)

    def may_have(client: str) -> int:
        number = 0
        with contextlib.suppress(TooManyRequests):
            while True:
                found.enter(client, 1, 1, 1)
                number += 1
        for _ in range(number):
            found.begin(client, 1)
            found.leave(client, 1)
        return number

    assert may_have("a") == 100
    found.enter("b", 1, 1, 1)
    assert may_have("a") == 12
    found.leave("b", 1)
    now_s += clients.RECENT_S - 1
    assert may_have("c") == 12, "a was here a moment ago"
    now_s += clients.RECENT_S + 1
    found.enter("b", 1, 1, 1)
    now_s += clients.RECENT_S + 1
    assert may_have("a") == 12, "b is still at it"
    found.leave("b", 1)
    now_s += clients.RECENT_S + 1
    assert may_have("a") == 100


def test_an_address_that_is_alone_has_everything_and_keeps_it() -> None:
    now_s = 0.0
    found = clients.Clients(ServerSettings(client_room=3), clock=lambda: now_s)
    for _ in range(100):
        found.enter("a", 1, 1, 1)
    found.enter("b", 1, 1, 1)
    with pytest.raises(TooManyRequests, match="has 100 live requests, and may have 3"):
        found.enter("a", 1, 1, 1)
    found.enter("b", 2, 1, 1)
    with pytest.raises(TooManyRequests, match="has 3 live requests, and may have 3"):
        found.enter("b", 1, 1, 1)
    found.leave("b", 3)
    now_s += clients.RECENT_S + 1
    found.enter("a", 1, 1, 1)


def test_one_request_is_no_way_around_what_a_client_may_have() -> None:
    found = clients.Clients(
        ServerSettings(max_client_reqs=100, client_room=20, client_tokens=1000, max_client_tokens=900)
    )
    with pytest.raises(InvalidParameter, match="101 prompts with n=1, and a client may have 100 choices"):
        found.enter("a", 101, 1, 1)
    with pytest.raises(InvalidParameter, match="have 901 tokens, and those of a client that wait may have 900"):
        found.enter("a", 2, 1, 901)
    found.enter("b", 1, 1, 1)
    found.enter("c", 1, 1, 1)
    with pytest.raises(TooManyRequests, match="has 0 live requests, and may have 20 while others are here"):
        found.enter("a", 21, 1, 1)
    with pytest.raises(TooManyRequests, match="wait with 0 tokens, and may have 333 while others are here"):
        found.enter("a", 2, 1, 334)
    assert not found.live["a"]
    assert not found.waiting["a"]
    found.enter("a", 1, 20, 334)  # one prompt, which is as long as it may be
    with pytest.raises(TooManyRequests, match="has 20 live requests, and may have 20: wait for one to end"):
        found.enter("a", 1, 1, 1)


def test_no_client_takes_all_tokens_of_the_queue() -> None:
    settings = ServerSettings(max_client_tokens=1000, client_tokens=1200)
    found = clients.Clients(settings)
    found.enter("a", 1, 1, 400)
    found.enter("a", 1, 1, 600)
    with pytest.raises(TooManyRequests, match="Prompts of this client wait with 1000 tokens, and may have 1000"):
        found.enter("a", 1, 1, 1)
    found.begin("a", 400)
    found.enter("a", 1, 1, 1)
    found.enter("b", 1, 1, 600)
    with pytest.raises(TooManyRequests, match="wait with 601 tokens, and may have 600"):
        found.enter("a", 1, 1, 1)
    found.enter("c", 1, 1, 5000)  # one prompt alone is let in, as the queue does
    found.begin("a", 601)
    found.enter("a", 1, 1, 400)


@both_kinds
async def test_prompts_count_against_their_client_until_their_first_token(serve: Serve, stream: bool) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, max_client_tokens=40, **KEYS)
    waiting = server.service.clients.waiting
    body = {"prompt": ["a" * 12, "a" * 16], "stream": stream}
    async with client_of(server, headers=ALICE) as alice, client_of(server, headers=BOB) as bob:
        task = asyncio.create_task(alice.post(PATH, json=body))
        await engine.wait_until(lambda: len(engine.active) == 2)
        refused = await alice.post(PATH, json={"prompt": "a" * 13})
        assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_requests")
        assert "28 tokens" in error_of(refused)["message"]
        away = asyncio.create_task(bob.post(PATH, json={"prompt": "a" * 39}))
        await engine.wait_until(lambda: len(engine.active) == 3)
        assert sum(waiting.values()) == 67
        away.cancel()
        await eventually(lambda: sum(waiting.values()) == 28)
        engine.release(1)
        await eventually(lambda: not waiting)
        assert not task.done()
        engine.release(100)
        assert (await task).status_code == 200
    await eventually(lambda: not server.service.clients.live)
    assert not waiting


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::1", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("::1", "::"),
        ("", ""),
        ("a:socket", "a:socket"),
    ],
)
def test_a_client_is_an_address_or_a_network_of_ipv6(address: str, network: str) -> None:
    assert network_of(address) == network
