"""What a key may do, over real connections: who is refused with what, what the headers tell, and that nothing leaks."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from novainfer import EngineOverloaded, InvalidParameter, StepFailedError
from novainfer.server.http.clients import Clients
from novainfer.server.keys import quotas
from novainfer.server.keys.quotas import OPEN_ENDED_TOKENS, Quotas, duration
from novainfer.server.keys.record import KeyRecord, digest
from novainfer.server.keys.store import KeyStore
from novainfer.server.serve import Server, _stop_on_signals
from novainfer.server.settings import ServerSettings
from tests.server.conftest import TIMEOUT_S, Serve, eventually
from tests.server.fakes import ANSWER, FakeEngine
from tests.server.rawh2 import RawH2
from tests.server.test_bad_input import error_of

PATH = "/v1/completions"
ALICE_KEY, BOB_KEY, ADMIN_KEY = "nova-alice-secret", "nova-bob-secret", "nova-admin-secret"
ALICE, BOB, ADMIN = ({"authorization": f"Bearer {key}"} for key in (ALICE_KEY, BOB_KEY, ADMIN_KEY))
ASK = {"prompt": "abcd", "max_tokens": 5}  # 4 + 5 tokens, and that is what it takes
USED = 4 + len(ANSWER)


class World:
    """A server with a file of keys, and a clock that a test sets."""

    def __init__(self, path: Path, engine: FakeEngine) -> None:
        self.store = KeyStore.at(path)
        self.engine = engine
        self.now_ns = 20_000 * 86_400_000_000_000
        self.server: Server
        self.client: httpx.AsyncClient

    def add(self, name: str, key: str, **fields: Any) -> None:
        self.store.add(KeyRecord(name=name, hash=digest(key.encode()), **fields))

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)

    async def ask(self, headers: dict[str, str] = ALICE, path: str = PATH, **fields: Any) -> httpx.Response:
        return await self.client.post(path, json={**ASK, **fields}, headers=headers)

    def connect(self, http2: bool) -> None:
        self.is_http2 = http2
        self.client = httpx.AsyncClient(base_url=self.server.url, http1=not http2, http2=http2, timeout=TIMEOUT_S)

    async def leave(self, task: asyncio.Task[httpx.Response]) -> None:
        """The client goes away, with its connection: httpx resets no stream of HTTP/2."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.client.aclose()
        self.connect(self.is_http2)

    def begin(self, headers: dict[str, str] = ALICE, **fields: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.ask(headers, **fields))


Start = Callable[..., Any]


@pytest.fixture(params=["http/1.1", "h2c"])
async def start(
    request: pytest.FixtureRequest, serve: Serve, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """`await start(tokens_per_min=..., ...)`: a server whose key alice has these limits; bob has none."""
    http2 = request.param == "h2c"
    worlds: list[World] = []

    async def begin(
        suffix: str = ".yaml", settings: dict[str, Any] | None = None, engine: FakeEngine = engine, **limits: Any
    ) -> World:
        world = World(tmp_path / f"keys{suffix}", engine)
        world.add("alice", ALICE_KEY, **limits)
        world.add("bob", BOB_KEY)
        world.add("ops", ADMIN_KEY, is_admin=True)
        monkeypatch.setattr(quotas, "unix_clock", lambda: lambda: world.now_ns)
        world.server = await serve(engine, keys_file=world.store.path, **(settings or {}))
        world.connect(http2)
        worlds.append(world)
        return world

    yield begin
    for world in worlds:
        await world.client.aclose()


def rate_limits(response: httpx.Response) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {name.removeprefix(prefix): value for name, value in response.headers.items() if name.startswith(prefix)}


# ---- who is let in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".yaml", ".db"])
async def test_keys_of_a_file_are_let_in_and_no_others(start: Start, suffix: str) -> None:
    world = await start(suffix)
    for headers in (ALICE, BOB, ADMIN, {"x-api-key": ALICE_KEY}, {"authorization": f"bearer  {BOB_KEY}"}):
        assert (await world.ask(headers)).status_code == 200
    wrong: list[dict[str, str]] = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {ALICE_KEY}"},
        {"authorization": ALICE_KEY},
        {"authorization": "Bearer"},
        {"authorization": "Bearer " + digest(ALICE_KEY.encode())},
        {"x-api-key": ""},
        {"x-api-key": ALICE_KEY, "authorization": f"Bearer {BOB_KEY}"},
        {"authorization": f"Bearer {ALICE_KEY}x"},
        {"authorization": f"Bearer {ALICE_KEY[:-1]}"},
    ]
    for headers in wrong:
        response = await world.ask(headers)
        assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key"), headers
        assert response.headers["www-authenticate"] == "Bearer"
    metrics = (await world.client.get("/metrics", headers=ADMIN)).text
    assert f"nova_unknown_keys_total {len(wrong)}.0" in metrics


async def test_an_admin_key_of_a_file_sees_all_and_may_do_drills(start: Start) -> None:
    world = await start()
    for headers, status in ((ALICE, 403), (ADMIN, 200)):
        response = await world.client.post("/v1/faults", json={"kind": "oom"}, headers=headers)
        assert response.status_code == status


async def test_a_server_whose_file_has_no_keys_lets_nobody_in(start: Start) -> None:
    world = await start()
    for name in ("alice", "bob", "ops"):
        world.store.remove(name)
    assert (await world.ask()).status_code == 401
    assert (await world.client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "query", ["api_key={}", "x=1&Access_Token={}", "api%5Fkey={}", "key={};a=b", "state=DECODE&token={}"]
)
async def test_a_key_in_the_address_is_refused_even_beside_a_good_one(start: Start, query: str) -> None:
    world = await start()
    for headers in ({}, ALICE):
        response = await world.client.get("/v1/requests?" + query.format(ALICE_KEY), headers=headers)
        assert response.status_code == 401
        assert "addresses are logged" in error_of(response)["message"]
        assert ALICE_KEY not in response.text
    assert (await world.client.get("/v1/requests?state=DECODE", headers=ALICE)).status_code == 200


async def test_no_key_comes_into_answers_logs_or_metrics(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="novainfer")
    world = await start(settings={"access_log": True}, tokens_per_min=10)
    secret = "nova-mistyped-secret"
    texts = [(await world.client.get(f"/v1/models?api_key={secret}")).text]
    for headers in (ALICE, ALICE, {"authorization": f"Bearer {secret}"}, {"x-api-key": secret}):
        response = await world.ask(headers)
        texts.append(response.text + str(response.headers))
    texts.append((await world.client.get("/metrics", headers=ADMIN)).text)
    texts.append((await world.client.get("/v1/requests", headers=ADMIN)).text)
    texts.append(caplog.text)
    for text in texts:
        assert "secret" not in text
        assert digest(ALICE_KEY.encode()).removeprefix("sha256:") not in text
    assert "requests with keys that are not known: 1" in caplog.text


# ---- models ----------------------------------------------------------------------------------------------------------


async def test_a_key_uses_its_own_models_only(start: Start) -> None:
    world = await start(models=("another",))
    for fields in ({}, {"model": "fake"}):
        response = await world.ask(**fields)
        assert (response.status_code, error_of(response)["type"]) == (403, "permission_error")
        assert error_of(response)["param"] == "model"
        assert "The key alice may not use the model 'fake'" in error_of(response)["message"]
    assert (await world.ask(model="another")).status_code == 404
    assert (
        await world.ask(path="/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    ).status_code == 403
    assert (await world.client.post("/tokenize", json={"prompt": "x"}, headers=ALICE)).status_code == 403
    assert (await world.client.get("/v1/models", headers=ALICE)).json()["data"] == []
    assert (await world.client.get("/v1/models/fake", headers=ALICE)).status_code == 403
    assert (await world.ask(BOB)).status_code == 200
    assert not world.engine.seen[1:]


# ---- limits ----------------------------------------------------------------------------------------------------------


async def test_requests_a_minute(start: Start) -> None:
    world = await start(requests_per_min=2)
    first, second, third = [await world.ask() for _ in range(3)]
    assert rate_limits(first) == {"limit-requests": "2", "remaining-requests": "1", "reset-requests": "30s"}
    assert rate_limits(second) == {"limit-requests": "2", "remaining-requests": "0", "reset-requests": "1m0s"}
    assert third.status_code == 429
    error = error_of(third)
    assert (error["code"], error["type"], error["param"]) == ("rate_limit_exceeded", "rate_limit_error", None)
    assert "requests per min (RPM): Limit 2, Used 2, Requested 1. Please try again in 30s." in error["message"]
    assert (third.headers["retry-after"], third.headers["retry-after-ms"]) == ("30", "30000")
    assert rate_limits(third)["remaining-requests"] == "0"
    assert rate_limits(await world.ask(BOB)) == {}
    world.pass_s(29.999)
    assert (await world.ask()).status_code == 429
    world.pass_s(0.001)
    assert (await world.ask()).status_code == 200
    assert 'nova_rate_limited_total{limit="requests"} 2.0' in (await world.client.get("/metrics", headers=ADMIN)).text


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_a_minute_are_reserved_at_the_beginning_and_settled_at_the_end(start: Start, stream: bool) -> None:
    world = await start(tokens_per_min=100, engine=FakeEngine(is_paced=True))
    task = world.begin(max_tokens=60, stream=stream)
    await world.engine.wait_until(lambda: world.engine.active)
    refused = await world.ask(max_tokens=40)
    assert refused.status_code == 429
    assert "(TPM): Limit 100, Used 64, Requested 44. Please try again in 4.8s." in error_of(refused)["message"]
    assert rate_limits(refused) == {"limit-tokens": "100", "remaining-tokens": "36", "reset-tokens": "38.4s"}
    world.engine.release(100)
    answer = await task
    assert answer.status_code == 200
    told = rate_limits(answer)["remaining-tokens"]
    assert told == ("36" if stream else str(100 - USED)), "a stream tells it before its end"
    world.engine.is_paced = False
    answer = await world.ask()
    assert rate_limits(answer)["remaining-tokens"] == str(100 - 2 * USED)


async def test_who_says_nothing_of_max_tokens_reserves_a_bounded_number(start: Start) -> None:
    """And owes what it takes above that."""
    engine = FakeEngine(is_paced=True)
    world = await start(tokens_per_min=10_000, engine=engine)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    task = asyncio.create_task(world.client.post("/v1/chat/completions", json=chat, headers=ALICE))
    await engine.wait_until(lambda: engine.active)
    seen = int(rate_limits(await world.client.get("/v1/models", headers=ALICE))["remaining-tokens"])
    most = min(OPEN_ENDED_TOKENS, engine.model_info.max_model_len)
    assert 10_000 - most - 1000 < seen <= 10_000 - most
    engine.release(100)
    assert (await task).status_code == 200
    after = int(rate_limits(await world.client.get("/v1/models", headers=ALICE))["remaining-tokens"])
    assert after == 10_000 - 7 - len(ANSWER)


async def test_a_day_has_its_budget(start: Start) -> None:
    world = await start(tokens_per_day=2 * USED)
    for _ in range(2):
        assert (await world.ask()).status_code == 200
    refused = await world.ask()
    error = error_of(refused)
    assert (refused.status_code, error["code"], error["type"]) == (429, "insufficient_quota", "insufficient_quota")
    assert "Please try again in 24h0m0s" in error["message"]
    assert refused.headers["retry-after"] == str(24 * 3600)
    assert refused.headers["x-should-retry"] == "false"
    world.pass_s(24 * 3600)
    assert (await world.ask()).status_code == 200


async def test_so_many_choices_at_a_time(start: Start) -> None:
    engine = FakeEngine(is_paced=True)
    world = await start(max_concurrent=3, engine=engine)
    task = world.begin(n=2)
    await engine.wait_until(lambda: engine.active)
    refused = await world.ask(n=2)
    assert refused.status_code == 429
    assert "requests at a time: Limit 3, Used 2, Requested 2" in error_of(refused)["message"]
    too_many = await world.ask(n=4)
    assert (too_many.status_code, error_of(too_many)["param"]) == (400, "n")
    others = world.begin(BOB, n=4)
    await engine.wait_until(lambda: len(engine.active) == 2)
    engine.release(100)
    assert [(await one).status_code for one in (task, others)] == [200, 200]
    engine.is_paced = False
    assert (await world.ask(n=3)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["left", "cancelled", "failed", "full", "client has too many"])
async def test_however_a_request_ends_its_key_gets_back_what_it_did_not_use(
    start: Start, stream: bool, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(is_paced=True)
    world = await start(requests_per_min=10, tokens_per_min=1000, max_concurrent=2, engine=engine)

    def remaining(what: str = "tokens") -> int:
        found = dict(world.server.service.quotas.headers(world.store.read()[0].owner))
        return int(found[b"x-ratelimit-remaining-" + what.encode()])

    used = 0
    if end == "full":
        engine.overloaded = True
        assert (await world.ask(stream=stream)).status_code == 503
    elif end == "client has too many":
        refuse = EngineOverloaded("no room", retry_after_s=1)
        monkeypatch.setattr(Clients, "enter", lambda *_: (_ for _ in ()).throw(refuse))
        assert (await world.ask(stream=stream)).status_code == 503
    else:
        task = world.begin(stream=stream, n=2)
        await engine.wait_until(lambda: engine.active)
        assert remaining() == 1000 - 4 - 2 * 5
        if end == "failed":
            engine.fail_at, engine.failure = 1, StepFailedError("out of memory")
        engine.release(2)
        used = 4 + 2
        if end == "left":
            await eventually(lambda: not any(active.permits for active in engine.active.values()))
            await world.leave(task)
        elif end == "cancelled":
            await eventually(lambda: not any(active.permits for active in engine.active.values()))
            [live] = {live for group in world.server.service.live._live.values() for live in group}
            await world.client.post(f"/v1/requests/{live.id}/cancel", headers=ALICE)
        else:
            engine.release(10)
        await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: not engine.active)
    await eventually(lambda: remaining() == 1000 - used)
    [account] = world.server.service.quotas._accounts.values()
    assert (account.num_live, account._held) == (0, {})
    assert remaining("requests") == (9 if used else 10), "what was refused by others is no request"


async def test_a_request_that_its_client_leaves_before_the_first_token_counts_with_its_prompt(start: Start) -> None:
    engine = FakeEngine(is_paced=True)
    world = await start(tokens_per_min=1000, engine=engine)
    task = world.begin()
    await engine.wait_until(lambda: engine.active)
    await world.leave(task)
    await eventually(lambda: not engine.active)
    told = rate_limits(await world.client.get("/v1/models", headers=ALICE))
    assert told["remaining-tokens"] == str(1000 - 4)


async def test_a_key_has_its_weight_and_no_request_goes_before_its_priority(start: Start) -> None:
    world = await start(settings={"has_priorities": True}, weight=2.5, priority=3)
    for asked in ({}, {"priority": 4}, {"priority": -9}):
        assert (await world.ask(**asked)).status_code == 200
    assert (await world.ask(BOB, priority=-9)).status_code == 200
    *of_alice, of_bob = [params.priority for _, params, _ in world.engine.seen]
    assert (of_alice, of_bob) == ([3, 7, 3], 0)
    assert [tenant.weight for tenant in world.engine.tenants] == [2.5, 2.5, 2.5, 1.0]
    assert len({tenant.id for tenant in world.engine.tenants}) == 2


async def test_without_a_policy_for_them_priorities_of_keys_mean_nothing(start: Start) -> None:
    world = await start(priority=3)
    assert (await world.ask()).status_code == 200
    assert world.engine.seen[0][1].priority == 0


# ---- the file changes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".yaml", ".db"])
async def test_what_changes_in_the_file_holds_for_the_next_request_and_ends_none(start: Start, suffix: str) -> None:
    engine = FakeEngine(is_paced=True)
    world = await start(suffix, engine=engine)
    task = world.begin(stream=True)
    await engine.wait_until(lambda: engine.active)
    world.store.remove("alice")
    assert (await world.ask()).status_code == 401
    world.add("carol", "nova-carol-key-of-some-length", requests_per_min=1)
    carol = {"authorization": "Bearer nova-carol-key-of-some-length"}
    assert (await world.client.get("/v1/models", headers=carol)).status_code == 200
    engine.release(100)
    assert "[DONE]" in (await task).text
    engine.is_paced = False
    assert (await world.ask(carol)).status_code == 200
    assert (await world.ask(carol)).status_code == 429
    world.store.remove("carol")
    world.add("carol", "nova-carol-key-of-some-length", requests_per_min=10)
    assert rate_limits(await world.ask(carol))["remaining-requests"] == "0", "as full as it was, of ten"
    world.pass_s(6)
    assert (await world.ask(carol)).status_code == 200


async def test_many_changes_in_a_row_are_each_seen_by_the_next_request(start: Start) -> None:
    world = await start()
    for _ in range(10):
        world.store.remove("bob")
        assert [(await world.ask(BOB)).status_code for _ in range(2)] == [401, 401]
        world.add("bob", BOB_KEY)
        answers = await asyncio.gather(*(world.client.get("/v1/models", headers=BOB) for _ in range(5)))
        assert [answer.status_code for answer in answers] == [200] * 5


async def test_a_file_that_cannot_be_read_leaves_the_keys_as_they_were(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    world = await start()
    world.store.path.write_text("keys: [")
    for _ in range(3):
        assert (await world.ask()).status_code == 200
    assert len(re.findall("cannot be read.*the 3 keys that were known stay", caplog.text)) == 1
    world.store.path.unlink()
    assert (await world.ask()).status_code == 200
    assert "is not there" in caplog.text
    world.add("bob", BOB_KEY)
    assert (await world.ask()).status_code == 401
    assert (await world.ask(BOB)).status_code == 200


async def test_a_hangup_has_the_file_read_again(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    world = await start()
    loop = asyncio.get_running_loop()
    _stop_on_signals(world.server)
    try:
        monkeypatch.setattr(KeyStore, "state", lambda _: (1, 2, 3, 4))  # a file system that tells of no change
        assert (await world.ask()).status_code == 200
        world.store.remove("alice")
        assert (await world.ask()).status_code == 200
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: "keys.yaml was read again" in caplog.text)
        assert (await world.ask()).status_code == 401
    finally:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            loop.remove_signal_handler(number)


def test_a_file_that_is_wrong_at_the_start_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    with pytest.raises(InvalidParameter, match="is not there"):
        Server(ServerSettings(port=0, keys_file=path))


# ---- attacks ---------------------------------------------------------------------------------------------------------


async def test_huge_headers_are_refused_and_others_go_on(start: Start) -> None:
    world = await start()
    for size in (2_000, 20_000):
        response = await world.ask({"authorization": "Bearer " + "x" * size})
        assert response.status_code == 401
    for size in (70_000, 70_000 if world.is_http2 else 2_000_000):  # encoding one takes httpx seconds
        try:
            response = await world.ask({"authorization": "Bearer " + "x" * size})
            assert response.status_code in (400, 401, 431)
        except httpx.TransportError:
            await world.client.aclose()  # its connection, and no other one, is closed
            world.connect(world.is_http2)
    assert (await world.ask()).status_code == 200


async def test_many_wrong_keys_leave_nothing_behind(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    world = await start()
    service = world.server.service
    for number in range(300):
        response = await world.ask({"authorization": f"Bearer nova-{number}"})
        assert response.status_code == 401
    assert len(caplog.text.splitlines()) == 1
    assert not service.quotas._accounts
    assert not service.clients.live
    assert service.metrics.unknown_keys == 300
    assert (await world.ask()).status_code == 200


async def test_two_keys_in_one_request_are_one_too_many(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine, api_keys=("alice", "bob"))
    raw = await RawH2.connect(server.port)
    twice = (("authorization", "Bearer alice"), ("authorization", "Bearer bob"))
    assert (await raw.response(await raw.request("/v1/models", headers=twice)))[0] == 401
    same = (("authorization", "Bearer alice"), ("x-api-key", "alice"))
    assert (await raw.response(await raw.request("/v1/models", headers=same)))[0] == 200
    await raw.close()


# ---- metrics without a key -------------------------------------------------------------------------------------------


async def test_metrics_have_a_port_of_their_own_without_a_key(start: Start) -> None:
    world = await start(settings={"metrics_port": 0})
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        base = f"http://127.0.0.1:{world.server.metrics_port}"
        assert "nova_live 1.0" in (await client.get(f"{base}/metrics")).text
        assert world.server.metrics_url == f"{base}/metrics"
        for path in ("/v1/models", "/health", PATH, "/v1/requests"):
            assert (await client.get(base + path)).status_code == 404
        assert (await client.post(base + PATH, json=ASK, headers=ALICE)).status_code == 404
    assert (await world.client.get("/metrics")).status_code == 401
    assert (await world.client.get("/metrics", headers=ALICE)).status_code == 200


def test_a_port_for_metrics_that_is_in_use_is_named(engine: FakeEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidParameter, match=f"metrics_port {port} of 127.0.0.1 is in use"):
            Server(ServerSettings(port=0, metrics_port=port))


async def test_metrics_may_be_public(start: Start) -> None:
    world = await start(settings={"metrics_public": True})
    assert (await world.client.get("/metrics")).status_code == 200
    assert (await world.client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("port", [-1, 65536, 8000])
def test_a_port_for_metrics_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(InvalidParameter, match="metrics_port"):
        ServerSettings(port=8000, metrics_port=port)


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0ms"),
        (1, "1ms"),
        (20_000_000, "20ms"),
        (999_999_999, "1s"),
        (1_500_000_000, "1.5s"),
        (360_000_000_000, "6m0s"),
        (46_802_250_000_000, "13h0m2.25s"),
    ],
)
def test_durations_are_written_as_openai_writes_them_and_rounded_up(nanoseconds: int, text: str) -> None:
    assert duration(nanoseconds) == text


def test_an_owner_that_is_no_key_has_no_limits(engine: FakeEngine) -> None:
    server = Server(ServerSettings(port=0))
    found = Quotas(server.service.keys)
    found.admit("", 1000, 10**9).settle(5)
    assert found.headers("") == []
    for sock in server._sockets:
        sock.close()
