"""Large bodies are decoded in turns of clients, and what waits for its turn is bounded."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from novainfer import EngineOverloaded, RequestTimeout, SamplingParams
from novainfer.server.http import turns
from novainfer.server.http.errors import TooManyRequests
from novainfer.server.http.turns import BodyTurns, Turn, after
from tests.server.conftest import TIMEOUT_S, Serve, eventually
from tests.server.fakes import FakeEngine
from tests.server.rawh2 import RawH2
from tests.server.test_bad_input import error_of

MB = 1_000_000
KEYS = {"api_keys": ("alice", "bob")}
ALICE, BOB = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
LARGE = json.dumps({"prompt": "x"}).encode().ljust(100_000)
LATER_S = 1000.0  # that the loop is for others, in tests that let nothing be decoded by themselves


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Bodies:
    """The account alone, with a clock that stands."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.turns = BodyTurns(self.clock)

    def come(self, client: str, number: int = 1, num_bytes: int = MB) -> list[Turn]:
        return [self.turns.enter(client, num_bytes) for _ in range(number)]

    def decoded(self) -> str:
        """Whose bodies are decoded, in order, until none waits."""
        order = ""
        while self.turns.num_bytes:
            turn = self.turns.next()
            order += turn.client if turn is not None else ""
            self.clock.now_s += 0.01
        return order


@pytest.fixture
async def bodies() -> Bodies:
    return Bodies()


async def test_bodies_are_as_far_apart_as_their_bytes_ask_for(bodies: Bodies) -> None:
    first, second = *bodies.come("a"), *bodies.come("a", num_bytes=500_000)
    assert bodies.turns.next() is first
    bodies.clock.now_s += 0.039
    assert bodies.turns.next() is None
    bodies.clock.now_s += 0.002
    assert bodies.turns.next() is second
    assert bodies.turns.next() is None
    assert not bodies.turns.num_bytes


async def test_a_small_body_never_waits_and_a_large_one_that_is_alone_does_not() -> None:
    clock = FakeClock()
    turns = BodyTurns(clock)
    assert await turns.wait("a", MB) == 0.0
    assert await turns.wait("a", 60_000) == 0.0
    clock.now_s += 0.041
    assert await turns.wait("a", MB) == 0.0


async def test_clients_take_turns_and_one_that_has_none_waiting_is_next(bodies: Bodies) -> None:
    bodies.come("a", 5)
    first = bodies.turns.next()
    assert first is not None
    bodies.come("b", 2)
    bodies.come("c", 1)
    assert bodies.decoded() == "bcabaaa"


async def test_a_body_that_is_given_up_costs_others_nothing(bodies: Bodies) -> None:
    left = bodies.come("a", 30)
    bodies.come("b")
    for turn in left:
        bodies.turns.leave(turn)
        bodies.turns.leave(turn)
    assert bodies.turns.num_bytes == {"b": MB}
    turn = bodies.turns.next()
    assert turn is not None
    assert turn.client == "b"


async def test_a_body_whose_task_has_not_heard_of_its_end_yet_takes_no_turn(
    bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "WAITING_BYTES_MAX", 5 * MB)
    first, second, *_, latest = bodies.come("a", 5)
    latest.future.cancel()
    bodies.come("b")  # for which the latest gives way
    first.future.cancel()
    assert bodies.turns.next() is second
    assert not second.future.done()


async def test_a_client_has_only_so_many_bytes_waiting(bodies: Bodies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "CLIENT_BYTES_MAX", 3 * MB)
    bodies.come("a", 3)
    with pytest.raises(TooManyRequests, match="too many large bodies"):
        bodies.come("a")
    bodies.come("b", num_bytes=5 * MB)  # alone, a large one is let in
    bodies.turns.next()
    bodies.come("a")


async def test_where_there_is_no_room_in_all_the_client_that_has_most_gives_way(
    bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "WAITING_BYTES_MAX", 6 * MB)
    *kept, latest = [*bodies.come("a", 4)]
    bodies.come("b", 2)
    bodies.come("c")
    assert isinstance(latest.future.result(), TooManyRequests)
    assert not any(turn.future.done() for turn in kept)
    assert bodies.turns.num_bytes == {"a": 3 * MB, "b": 2 * MB, "c": MB}
    with pytest.raises(EngineOverloaded) as refused:
        bodies.come("a")
    assert refused.value.retry_after_s == pytest.approx(0.24)
    assert bodies.turns.num_bytes.total() == 6 * MB


def test_the_wait_is_taken_from_the_time_that_a_request_has() -> None:
    params = SamplingParams(timeout_s=1.0)
    assert after(params, 0.0) is params
    assert after(params, 0.4).timeout_s == pytest.approx(0.6)
    assert after(SamplingParams(), 5.0).timeout_s is None
    with pytest.raises(RequestTimeout, match="deadline of 1 s"):
        after(params, 1.0)


async def test_bodies_of_a_client_that_leaves_hold_up_no_other_client(serve: Serve) -> None:
    server = await serve(FakeEngine(), **KEYS)
    account = server.service.turns
    account._free_s = account._clock() + LATER_S
    leaving = await RawH2.connect(server.port)
    key = (("authorization", ALICE["authorization"]),)
    streams = [await leaving.request("/v1/completions", LARGE, headers=key) for _ in range(5)]
    await eventually(lambda: account.num_bytes.total() == 5 * len(LARGE))
    for stream in streams[:2]:
        await leaving.reset(stream)
    await eventually(lambda: account.num_bytes.total() == 3 * len(LARGE))
    await leaving.close()
    await eventually(lambda: not account.num_bytes)
    account._free_s = 0.0
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, headers=BOB) as client:
        assert (await client.post("/v1/completions", content=LARGE)).status_code == 200


async def test_what_is_never_decoded_takes_no_turn(serve: Serve) -> None:
    server = await serve(FakeEngine(), **KEYS)
    account = server.service.turns
    account._free_s = account._clock() + LATER_S
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, headers=ALICE) as client:
        text = {"content-type": "text/plain"}
        found = [
            await client.post("/nothing", content=LARGE),
            await client.put("/v1/completions", content=LARGE),
            await client.request("GET", "/v1/models", content=LARGE),
            await client.post("/v1/completions", content=LARGE, headers=text),
            await client.post("/v1/completions", content=LARGE, headers={"authorization": "Bearer wrong"}),
        ]
    assert [response.status_code for response in found] == [404, 405, 200, 415, 401]


async def test_a_body_that_waits_too_long_for_its_request_or_with_too_many_others_is_told_so(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve(FakeEngine(), **KEYS)
    account = server.service.turns
    clock = account._clock = FakeClock()
    account._free_s = clock.now_s + LATER_S
    monkeypatch.setattr(turns, "CLIENT_BYTES_MAX", 150_000)
    timed = json.dumps({"prompt": "x", "timeout": 2.0}).encode().ljust(100_000)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        waits = asyncio.create_task(client.post("/v1/completions", content=timed, headers=ALICE))
        await eventually(lambda: account.num_bytes)
        refused = await client.post("/v1/completions", content=LARGE, headers=ALICE)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_requests")
        assert int(refused.headers["retry-after"]) >= 1
        clock.now_s += LATER_S
        account._go_on()
        answer = await waits
    assert (answer.status_code, error_of(answer)["code"]) == (408, "request_timeout")
