"""Other people's routers, each in an environment of its own, in front of two replicas of the demo model.

`make clients` makes the environments. Replicas and routers are processes, started as docs/routers.md says.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import ROUTERS
from tests.clients.fleet import Fleet, Replica, Streamed, body, fleet, until
from tests.clients.needs import each

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

PACE_S = 0.03  # each step takes so much longer, so that streams are under way when something happens
NUM_STREAMS = 8
STREAM_TOKENS = 60
STORY = "Once upon a time there was a cat who lived in a house near the wood, and went out each day to play. " * 4
# What a client sees of its stream when the replica behind it is killed.
KILLED = {
    "vllm-router": "RemoteProtocolError",
    "smg": "an error event, then [DONE]",
    "litellm-proxy": "an error event",
}


@pytest.fixture(params=each(ROUTERS))
async def behind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Fleet]:
    """A fleet behind each router."""
    async with fleet(request.param, tmp_path) as found:
        yield found


def texts_of(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["choices"][0]["message"]["content"] for answer in answers]


async def expected(fleet: Fleet, prompts: list[str], max_tokens: int) -> list[str]:
    """What each prompt is answered, said by the second replica itself."""
    where = fleet.replicas[1].client
    return texts_of([await fleet.ask(prompt, max_tokens, where) for prompt in prompts])


async def begin(fleet: Fleet, prompts: list[str], num_tokens: int = STREAM_TOKENS) -> list[Streamed]:
    """Slow streams through the router, each of which has given something."""
    for replica in fleet.replicas:
        await replica.inject("stall", num_steps=3600, seconds=PACE_S)
    streams = [await fleet.stream(prompt, num_tokens) for prompt in prompts]

    async def has_begun() -> bool:
        return all(stream.text for stream in streams)

    await until(has_begun)
    return streams


async def busiest(fleet: Fleet) -> Replica:
    """The replica that computes most of what is under way."""
    running = [await replica.num_running() for replica in fleet.replicas]
    assert max(running) > 0, running
    return fleet.replicas[running.index(max(running))]


def prompts_of(what: str) -> list[str]:
    return [f"{number} {what}: tell me of {number} cats" for number in range(NUM_STREAMS)]


async def test_answers_are_the_same_through_a_router(behind: Fleet) -> None:
    prompts = prompts_of("same")
    wanted = await expected(behind, prompts, 12)
    assert texts_of([await behind.ask(prompt, 12) for prompt in prompts]) == wanted
    streams = [await behind.stream(prompt, 12) for prompt in prompts]
    await asyncio.gather(*(stream.task for stream in streams))
    assert [stream.fate for stream in streams] == ["whole"] * len(streams)
    assert [stream.text for stream in streams] == wanted
    models = (await behind.client.get("/v1/models")).json()
    assert "demo" in [model["id"] for model in models["data"]]
    refused = await behind.client.post("/v1/chat/completions", json={"model": "demo", "messages": [], "n": "x"})
    assert 400 <= refused.status_code < 500


async def test_a_request_goes_where_its_prefix_is(behind: Fleet) -> None:
    name = behind.router.name
    if name == "litellm-proxy":
        pytest.skip("it does not ask where prefixes are")

    async def is_found(number: int) -> bool:
        """Whether the end of a story is told where its beginning was: by one replica itself, or through the router."""
        where = behind.replicas[number % 2].client if name == "vllm-router" else behind.client
        await behind.ask(f"{number}: {STORY}", 1, where)
        await asyncio.sleep(0.3)  # what a replica tells is under way
        usage = (await behind.ask(f"{number}: {STORY} And then?", 1))["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found > usage["prompt_tokens"] - 48  # all full blocks but those of the question

    warm_up = count(100)

    async def is_heard() -> bool:
        """A router may have begun to listen, or to count, a moment ago."""
        return await is_found(next(warm_up)) and await is_found(next(warm_up))

    await until(is_heard)
    assert [await is_found(number) for number in range(8)] == [True] * 8


async def test_a_drained_replica_loses_nothing(behind: Fleet) -> None:
    prompts = prompts_of("drain")
    wanted = await expected(behind, prompts, STREAM_TOKENS)
    [short] = await expected(behind, ["Hello"], 2)
    streams = await begin(behind, prompts)
    leaving = await busiest(behind)
    other = next(replica for replica in behind.replicas if replica is not leaving)
    leaving.program.process.send_signal(signal.SIGTERM)
    while leaving.program.process.returncode is None or not all(stream.task.done() for stream in streams):
        assert texts_of([await behind.ask("Hello", 2)]) == [short]
    assert [stream.fate for stream in streams] == ["whole"] * len(streams)
    assert [stream.text for stream in streams] == wanted
    assert await leaving.program.wait() == 0
    before = await other.num_answered()
    for _ in range(10):
        assert texts_of([await behind.ask("Hello", 2)]) == [short]
    assert await other.num_answered() == before + 10


async def test_smg_reads_how_much_a_replica_has_to_do(behind: Fleet) -> None:
    if behind.router.name != "smg":
        pytest.skip("it does not say what it reads")
    streams = await begin(behind, prompts_of("load"), 4 * STREAM_TOKENS)

    async def is_read() -> bool:
        loads = (await behind.client.get("/get_loads")).json()["loads"]
        return sum(load["num_running_reqs"] for load in loads) > 0

    await until(is_read)
    await asyncio.gather(*(stream.task for stream in streams))


async def test_a_worker_that_is_killed_is_not_seen(behind: Fleet) -> None:
    prompts = prompts_of("worker")
    wanted = await expected(behind, prompts, STREAM_TOKENS)
    streams = await begin(behind, prompts)
    await (await busiest(behind)).inject("kill")
    await asyncio.gather(*(stream.task for stream in streams))
    assert [stream.fate for stream in streams] == ["whole"] * len(streams)
    assert [stream.text for stream in streams] == wanted


async def test_what_a_router_makes_of_a_replica_that_is_killed(behind: Fleet) -> None:
    prompts = prompts_of("kill")
    wanted = await expected(behind, prompts, STREAM_TOKENS)
    streams = await begin(behind, prompts)
    leaving = await busiest(behind)
    num_there = await leaving.num_running()
    leaving.program.process.kill()
    await asyncio.gather(*(stream.task for stream in streams))
    for stream, text in zip(streams, wanted, strict=True):
        assert (stream.text == text) if stream.is_whole else text.startswith(stream.text)
    fates = sorted(stream.fate for stream in streams if not stream.is_whole)
    assert fates == [KILLED[behind.router.name]] * num_there
    answers = [await behind.client.post("/v1/chat/completions", json=body("Hello", 2)) for _ in range(20)]
    assert [answer.status_code for answer in answers] == [200] * len(answers)  # they are tried elsewhere
