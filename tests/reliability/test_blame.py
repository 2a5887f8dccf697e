"""Requests that fail, each alone in its step, beside others: what the others are answered, and where."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.reliability import attack

NUM_BAD, NUM_GOOD = 8, 24
GOOD = [
    {"prompt": f"{n} years ago there was a fox that", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    for n in range(NUM_GOOD)
]
BAD = {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


async def choices(client: httpx.AsyncClient) -> list[dict[str, object]]:
    """What each of `GOOD` is answered, all at once."""
    answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in GOOD))
    assert {answer.status_code for answer in answers} == {200}
    return [{k: v for k, v in answer.json()["choices"][0].items() if k != "seed"} for answer in answers]


async def fail_alone(client: httpx.AsyncClient, admin: httpx.AsyncClient, name: str) -> None:
    """Ask for much, and have the steps fail that hold this request, until it has failed alone twice and ends."""
    for attempt in range(100):
        named = f"{name}-{attempt}"
        asked = asyncio.create_task(client.post("/v1/completions", json=BAD, headers={"x-request-id": named}))
        num_armed = 0
        while num_armed < 2 and not asked.done():  # it has to run first; each ends with the step that holds it alone
            armed = await admin.post("/v1/faults", json={"kind": "exception", "request": named, "num_steps": 100})
            num_armed += armed.status_code == 200
        response = await asked
        if response.status_code == 500:
            assert response.json()["error"]["code"] == "step_failed"
            return
    raise AssertionError("it was never hit")


@pytest.mark.slow
async def test_eight_requests_that_fail_alone_change_no_answer_of_24_others_and_nothing_is_degraded() -> None:
    limits = httpx.Limits(max_connections=None)
    async with (
        attack.serving(("--max-num-seqs", "64")) as target,
        httpx.AsyncClient(
            base_url=target.url,
            headers={"authorization": f"Bearer {attack.NEIGHBOUR_KEY}"},
            timeout=attack.TIMEOUT_S,
            limits=limits,
        ) as client,
        httpx.AsyncClient(base_url=target.url, headers={"authorization": "Bearer boss"}) as admin,
    ):
        undisturbed = await choices(client)
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_BAD):
                group.create_task(fail_alone(client, admin, f"bad-{number}"))
            beside = group.create_task(choices(client))
        assert beside.result() == undisturbed
        assert await choices(client) == undisturbed  # and so they stay
        assert all("degraded" not in choice for choice in undisturbed)
        errors = (await admin.get("/v1/errors", params={"limit": 1000})).text
        assert errors.count("the request ended with an error") >= NUM_BAD
        assert "PLAIN_KERNELS" not in errors
        assert "INT8" not in errors
