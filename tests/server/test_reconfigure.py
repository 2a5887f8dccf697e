"""`POST /v1/admin/reconfigure`, of a real engine over a device that the test holds still."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from novainfer import Engine, EngineConfig
from novainfer.testing import ByteTokenizer, FakeDevice
from tests.actors.helpers import Valve
from tests.server.conftest import Serve, eventually
from tests.server.fakes import FakeEngine
from tests.server.test_bad_input import error_of
from tests.server.test_inspection import ADMIN, BODY, Held

PATH = "/v1/admin/reconfigure"


@pytest.fixture
async def held(serve: Serve) -> AsyncIterator[Held]:
    world = Held(max_num_seqs=4)
    world.engine = Engine(
        EngineConfig(max_num_seqs=4),
        device=FakeDevice(on_step=world.valve, num_blocks=256, num_blocks_max=512),
        tokenizer=ByteTokenizer(),
    )
    await world.serve(serve, admin_key="boss")
    yield world
    await world.finish()
    await world.client.aclose()


def texts(response: httpx.Response) -> str:
    """Of a stream that has ended as it should."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1] if json.loads(line)["choices"])


async def test_streams_go_on_and_every_page_knows_it(held: Held) -> None:
    await held.ask("one")
    await held.valve.step_arrived()
    asked = asyncio.create_task(held.client.post(PATH, json={"num_kv_blocks": 300}, headers=ADMIN))
    await eventually(lambda: held.engine._runtime._reconfiguring is not None)
    refused = await held.client.post(PATH, json={"num_kv_blocks": 400}, headers=ADMIN)
    assert (refused.status_code, error_of(refused)["code"]) == (409, "reconfigure_in_progress")
    assert "x-should-retry" not in refused.headers
    (answer,) = await held.finish()
    assert texts(answer) == "ijkl"
    response = await asked
    assert response.status_code == 200
    found = response.json()
    assert (found["object"], found["num_kv_blocks"], found["precision"]) == ("configuration", 300, "checkpoint")
    assert (found["block_size"], found["modes"]) == (16, [{"kernels": "fast", "precision": "checkpoint"}])
    assert (await held.get("/v1/kv"))["total"] == 300
    metrics = (await held.client.get("/metrics")).text
    assert sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("nova_kv_blocks{")) == 300
    response = await held.client.post(PATH, json={"precision": "int8", "num_kv_blocks": None}, headers=ADMIN)
    assert (response.json()["precision"], response.json()["num_kv_blocks"]) == ("int8", 300)
    assert (await held.get("/health"))["mode"] == {"kernels": "fast", "precision": "int8"}
    assert 'nova_mode{kernels="fast",precision="int8",weights="int8"} 1.0' in (await held.client.get("/metrics")).text


async def test_while_it_lasts_probes_are_well_and_requests_say_why_they_wait(serve: Serve) -> None:
    class Slow(FakeDevice):
        def fit(self, num_blocks: int | None = None, *, is_new: bool = False) -> dict[str, Any]:
            if is_new:
                assert asyncio.run_coroutine_threadsafe(may_fit.wait(), loop).result(10)
            return super().fit(num_blocks, is_new=is_new)

    may_fit, loop, world = asyncio.Event(), asyncio.get_running_loop(), Held()
    device = Slow(num_blocks=256, on_step=Valve(is_open=True))
    world.engine = Engine(EngineConfig(), device=device, tokenizer=ByteTokenizer())
    await world.serve(serve, admin_key="boss")
    asked = asyncio.create_task(world.client.post(PATH, json={"num_kv_blocks": 300}, headers=ADMIN))
    await eventually(lambda: world.engine.statistics().state == "RECONFIGURING")
    await world.ask("late")
    for path in ("/health", "/readyz", "/livez"):
        assert (await world.client.get(path)).status_code == 200
    assert (await world.get("/health"))["state"] == "RECONFIGURING"
    await eventually(lambda: [request.reason for request in world.engine.requests()] != ["tokenizing"])
    assert [(r["state"], r["reason"]) for r in (await world.get("/v1/requests"))["data"]] == [
        ("WAITING", "reconfiguring")
    ]
    may_fit.set()
    assert (await asked).status_code == 200
    (answer,) = await world.finish()
    assert texts(answer) == "ijkl"
    await world.client.aclose()


async def test_a_client_that_leaves_leaves_it_going_on(held: Held) -> None:
    await held.ask("one")
    await held.valve.step_arrived()
    with pytest.raises(httpx.ReadTimeout):
        await held.client.post(PATH, json={"num_kv_blocks": 300}, headers=ADMIN, timeout=0.2)
    await held.finish()
    await eventually(lambda: held.engine.model_info.num_kv_blocks == 300)


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({}, 400, "num_kv_blocks", "num_kv_blocks or precision must be given"),
        ({"num_kv_blocks": None}, 400, "num_kv_blocks", "num_kv_blocks or precision must be given"),
        ({"num_kv_blocks": 12.5}, 400, "num_kv_blocks", "num_kv_blocks: expected `int | null`, got `float`"),
        ({"num_kv_blocks": 12}, 400, "num_kv_blocks", "num_kv_blocks must be at least 128, not 12"),
        ({"num_kv_blocks": 10**30}, 400, "num_kv_blocks", "num_kv_blocks"),
        ({"precision": "fp8"}, 400, "precision", "precision must be 'checkpoint' or 'int8', not 'fp8'"),
        ({"blocks": 300}, 400, "blocks", "blocks is not a field of this body"),
        ([300], 400, None, "The body must be a JSON object"),
        ({"num_kv_blocks": 513}, 409, None, "at most 512 blocks fit"),
    ],
)
async def test_what_cannot_be_is_one_sentence(
    held: Held, body: Any, status: int, param: str | None, message: str
) -> None:
    response = await held.client.post(PATH, json=body, headers=ADMIN)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (status, param)
    assert message in error["message"]
    assert response.headers.get("x-should-retry") == ("false" if status == 409 else None)
    assert held.engine.model_info.num_kv_blocks == 256
    held.valve.open()
    answer = await held.client.post("/v1/completions", json=BODY)
    assert texts(answer) == "ijkl"


async def test_bytes_that_are_no_json_are_refused(held: Held) -> None:
    headers = {**ADMIN, "content-type": "application/json"}
    for body in (b"", b"{", b"\xff", b"[" * 100_000):
        response = await held.client.post(PATH, content=body, headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_json")


async def test_it_needs_the_admin_key(serve: Serve) -> None:
    body = {"num_kv_blocks": 300}
    for settings, headers, status in (
        ({}, {}, 403),
        ({"api_keys": ("alice",)}, {"authorization": "Bearer alice"}, 403),
        ({"api_keys": ("alice",), "admin_key": "boss"}, {}, 401),
        ({"api_keys": ("alice",), "admin_key": "boss"}, {"authorization": "Bearer alice"}, 403),
        ({"admin_key": "boss"}, {}, 403),
        ({"admin_key": "boss"}, ADMIN, 200),
    ):
        engine = FakeEngine()
        server = await serve(engine, **settings)
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.post(PATH, json=body, headers=headers)).status_code == status
        assert engine.model_info.num_kv_blocks == (300 if status == 200 else 100)


async def test_before_the_model_is_there_it_is_loading(serve: Serve) -> None:
    (engine := FakeEngine()).start_gate = asyncio.Event()
    server = await serve(engine, wait_ready=False, admin_key="boss")
    async with httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post(PATH, json={"num_kv_blocks": 300}, headers=ADMIN)
    assert (response.status_code, error_of(response)["code"]) == (503, "model_loading")
