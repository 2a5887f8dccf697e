"""Events of a stream go out in the engine's own turn while its client keeps up, and by its task where it does not."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from novainfer import Engine, EngineConfig
from novainfer.actors.core.streams import StreamHandle
from novainfer.testing import ByteTokenizer, FakeDevice
from tests.server.conftest import TIMEOUT_S, Serve, Server, eventually
from tests.server.rawh2 import RawH2

NUM_TOKENS = 60


@asynccontextmanager
async def serving(serve: Serve, *, step_s: float = 0.0, **settings: Any) -> AsyncIterator[tuple[Server, Engine]]:
    """A server of an engine whose device makes tokens without a model, in the test's own loop."""
    engine = Engine(EngineConfig(model="fake"), device=FakeDevice(step_s=step_s), tokenizer=ByteTokenizer())
    yield await serve(engine, api_processes=0, **settings), engine


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the task of each stream has read it."""
    found: Counter[int] = Counter()
    read = StreamHandle.read

    async def noted(self: StreamHandle) -> object:
        found[self.stream_id] += 1
        return await read(self)

    monkeypatch.setattr(StreamHandle, "read", noted)
    return found


def tokens_of(body: str) -> list[int]:
    """The ids in a whole stream's chunks; one ending, behind all of them."""
    *chunks, done = [line.removeprefix("data: ") for line in body.split("\n\n")[:-1] if line.startswith("data: ")]
    assert done == "[DONE]"
    return [token for chunk in chunks for choice in json.loads(chunk)["choices"] for token in choice["token_ids"]]


def asking(**more: object) -> dict[str, object]:
    return {"prompt": "abc", "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True} | more


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "h2c"])
async def test_a_stream_whose_client_keeps_up_is_read_by_its_task_at_both_ends_only(
    serve: Serve, reads: Counter[int], http2: bool
) -> None:
    async with (
        serving(serve) as (server, engine),
        httpx.AsyncClient(base_url=server.url, http1=not http2, http2=http2, timeout=TIMEOUT_S) as client,
    ):
        body = asking(return_token_ids=True)
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))
        whole = (await client.post("/v1/completions", json=body | {"stream": False})).json()
        for answer in answers:
            assert tokens_of(answer.text) == whole["choices"][0]["token_ids"]
        assert len(reads) == 9
        assert sum(sorted(reads.values())[:8]) <= 8 * 4  # the first delta, the end, and where it was behind for once
        assert engine.statistics().num_running == 0


async def test_several_choices_are_read_by_their_task_which_leaves_the_loop_to_others_between_them(
    serve: Serve, reads: Counter[int]
) -> None:
    async with serving(serve) as (server, _), httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        answer = await client.post("/v1/completions", json=asking(n=2, return_token_ids=True))
        assert len(tokens_of(answer.text)) == 2 * NUM_TOKENS
        assert reads.total() > NUM_TOKENS // 2  # and not at both ends only


async def test_each_choice_of_several_has_its_tokens_and_one_end(serve: Serve) -> None:
    async with serving(serve) as (server, _), httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        answer = await client.post("/v1/completions", json=asking(n=3, prompt=["abc", "de"]))
        *chunks, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n")[:-1]]
        choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
        assert done == "[DONE]"
        assert Counter(choice["index"] for choice in choices if choice["finish_reason"]) == Counter(range(6))


async def test_a_client_that_falls_behind_goes_on_with_all_there_is(serve: Serve, reads: Counter[int]) -> None:
    async with serving(serve) as (server, engine):
        client = await RawH2.connect(server.port, takes_data=False, initial_window=2_000)
        body = asking(return_token_ids=True, max_tokens=1_000)
        stream = await client.request("/v1/completions", json.dumps(body).encode())
        await client.read_until(lambda: len(client.data[stream]) == 2_000)
        await eventually(lambda: engine.statistics().num_paused)  # its buffers are full, and the engine's are
        before = reads.total()
        client.takes_data = True
        client.connection.increment_flow_control_window(1 << 24, stream)
        client.connection.increment_flow_control_window(1 << 24)
        await client.flush()
        status, data = await client.response(stream)
        assert status == 200
        assert reads.total() - before < 100  # and not one a token
        whole = {**body, "stream": False}
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as other:
            reply = (await other.post("/v1/completions", json=whole)).json()
        assert tokens_of(data.decode()) == reply["choices"][0]["token_ids"]
        await client.close()


@pytest.mark.parametrize("how", ["reset", "close", "cancel"])
async def test_a_stream_that_is_ended_between_two_steps_leaves_nothing(serve: Serve, how: str) -> None:
    async with serving(serve, step_s=0.001) as (server, engine):
        client = await RawH2.connect(server.port, initial_window=1 << 24)
        client.connection.increment_flow_control_window(1 << 24)
        body = json.dumps(asking(max_tokens=2_000, request_id="mine")).encode()
        stream = await client.request("/v1/completions", body)
        await client.read_until(lambda: client.data[stream].count(b"data: ") > 20 or stream in client.ended)
        assert client.data[stream].count(b"data: ") > 20, client.data[stream]
        if how == "reset":
            await client.reset(stream)
        elif how == "close":
            client.writer.close()
        else:
            assert engine.cancel(engine.requests()[0].id)
            _, data = await client.response(stream)
            *_, last = data.decode().split("\n\n")[:-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_cancelled"
        await eventually(lambda: engine.statistics().num_running == 0)
        await eventually(lambda: not engine._runtime._streams.machines())
