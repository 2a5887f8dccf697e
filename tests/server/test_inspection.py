"""What the inspector's endpoints tell, of a real engine over a device that the test holds still."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from novainfer import Engine, EngineConfig
from novainfer.fsm.machines import MACHINES
from novainfer.server.app import ROUTES
from novainfer.testing import ByteTokenizer, FakeDevice
from tests.actors.helpers import Valve
from tests.server.conftest import TIMEOUT_S, Serve, eventually
from tests.server.fakes import FakeEngine
from tests.server.test_bad_input import error_of

ADMIN = {"authorization": "Bearer boss"}
BODY = {"prompt": "abcdefgh", "max_tokens": 4, "temperature": 0, "stream": True}


class Held:
    """An engine whose steps wait for the test, and a client of its server."""

    def __init__(self, **config: Any) -> None:
        self.valve = Valve()
        self.engine = Engine(EngineConfig(**config), device=FakeDevice(on_step=self.valve), tokenizer=ByteTokenizer())
        self.client: httpx.AsyncClient = httpx.AsyncClient()
        self.tasks: list[asyncio.Task[httpx.Response]] = []

    async def serve(self, serve: Serve, **settings: Any) -> Held:
        await self.client.aclose()
        server = await serve(self.engine, **settings)
        self.client = httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S)
        return self

    async def ask(self, name: str, **headers: str) -> None:
        """Begin a request that is answered when the valve is opened."""
        before = len(self.engine.requests())
        headers["x-request-id"] = name
        self.tasks.append(asyncio.create_task(self.client.post("/v1/completions", json=BODY, headers=headers)))
        await eventually(lambda: len(self.engine.requests()) > before)

    async def get(self, path: str, **headers: str) -> Any:
        response = await self.client.get(path, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    async def finish(self) -> list[httpx.Response]:
        self.valve.open()
        return await asyncio.gather(*self.tasks)


@pytest.fixture
async def held(serve: Serve) -> AsyncIterator[Held]:
    world = Held(max_num_seqs=1)
    yield world
    await world.finish()
    await world.client.aclose()


async def test_requests_are_listed_with_why_they_wait_and_found_by_each_of_their_names(
    held: Held, serve: Serve
) -> None:
    await held.serve(serve)
    await held.ask("one")
    await held.valve.step_arrived()
    await held.ask("two")
    await eventually(lambda: held.engine.requests()[1].reason == "slots")
    listed = (await held.get("/v1/requests"))["data"]
    assert [(r["id"], r["state"], r["reason"]) for r in listed] == [
        ("cmpl-one", "PREFILL", None),
        ("cmpl-two", "WAITING", "slots"),
    ]
    assert (listed[0]["prompt_tokens"], listed[0]["blocks"], listed[0]["max_tokens"]) == (8, 1, 4)
    for name in ("two", "cmpl-two"):
        found = await held.get(f"/v1/requests/{name}")
        assert (found["id"], found["state"], found["position"]) == ("cmpl-two", "WAITING", 0)
        assert found["data"][0]["history"] == found["history"]
    assert [r["id"] for r in (await held.get("/v1/requests?state=waiting"))["data"]] == ["cmpl-two"]
    assert len((await held.get("/v1/requests?limit=1"))["data"]) == 1
    await held.finish()
    found = await held.get("/v1/requests/one")
    assert [t["state"] for t in found["history"]] == ["WAITING", "PREFILL", "DECODE", "FINISHED_LENGTH"]
    response = await held.client.get("/v1/requests/three")
    assert (response.status_code, error_of(response)["code"]) == (404, "request_not_found")


async def test_several_prompts_of_one_request_are_found_together(held: Held, serve: Serve) -> None:
    await held.serve(serve)
    held.valve.open()
    body = {**BODY, "prompt": ["abc", "de"], "stream": False}
    await held.client.post("/v1/completions", json=body, headers={"x-request-id": "pair"})
    found = await held.get("/v1/requests/pair")
    assert sorted(r["id"] for r in found["data"]) == ["cmpl-pair-0", "cmpl-pair-1"]


async def test_actors_have_names_states_and_processes(held: Held, serve: Serve) -> None:
    await held.serve(serve)
    actors = {actor["name"]: actor for actor in (await held.get("/v1/actors"))["data"]}
    assert set(actors) == {"gate", "engine", "scheduler", "worker-0", "tokenizer"}
    assert set(actors["worker-0"]) >= {"name", "state", "dwell_s", "mailbox_depth", "pid"}
    assert (actors["worker-0"]["state"], actors["gate"]["state"]) == ("READY", "OPEN")
    assert all(actor["pid"] > 0 for actor in actors.values())


async def test_blocks_add_up(held: Held, serve: Serve) -> None:
    await held.serve(serve)
    await held.ask("one")
    await held.valve.step_arrived()
    found = await held.get("/v1/kv")
    assert found["blocks"]["PREFILL"] == 1
    assert sum(found["blocks"].values()) == found["total"] == sum(entry["blocks"] for entry in found["data"])


async def test_steps_are_listed_the_newest_last(held: Held, serve: Serve) -> None:
    await held.serve(serve)
    await held.ask("one")
    await held.finish()
    await eventually(lambda: held.engine.steps()[-1].outputs_us is not None)
    steps = (await held.get("/v1/steps"))["data"]
    assert [(s["num_tokens"], s["outcome"]) for s in steps] == [(8, "done"), (1, "done"), (1, "done"), (1, "done")]
    assert all(s["device_us"] > 0 and s["schedule_us"] > 0 for s in steps)
    assert (await held.get("/v1/steps?last=1"))["data"] == steps[-1:]
    for bad in ("0", "-1", "x", "9999", "1e3"):
        response = await held.client.get(f"/v1/steps?last={bad}")
        assert (response.status_code, error_of(response)["param"]) == (400, "last")


async def test_the_tables_are_told_as_they_are(held: Held, serve: Serve) -> None:
    await held.serve(serve)
    machines = {machine["name"]: machine for machine in (await held.get("/v1/machines"))["data"]}
    assert list(machines) == [machine.__name__ for machine in MACHINES]
    worker = machines["Worker"]
    assert {"name": "RUNNING", "deadline_s": 0.0, "why": "the step's own deadline"} in worker["states"]
    pairs = {(row["state"], row["event"]) for row in worker["rows"]}
    assert len(pairs) == len(worker["states"]) * len(worker["events"])
    meant, other = [row for row in worker["rows"] if (row["state"], row["event"]) == ("READY", "Launch")]
    assert (meant["only"], meant["action"], meant["never"]) == ("that can be begun", "_launch", False)
    assert "RUNNING" in meant["follows"]
    assert (other["only"], other["action"], other["follows"]) == ("any other", None, ["READY"])


async def test_what_went_wrong_is_told_with_whose_requests_it_touched(held: Held, serve: Serve) -> None:
    await held.serve(serve, admin_key="boss")
    response = await held.client.post("/v1/faults", json={"kind": "exception", "num_steps": 9}, headers=ADMIN)
    assert response.json() == {"object": "fault", "kind": "exception", "how": {"num_steps": 9}}
    await held.ask("one")
    await held.finish()
    errors = (await held.get("/v1/errors"))["data"]
    assert errors[0]["kind"] == "exception"
    assert errors[0]["requests"] == ["cmpl-one"]
    assert errors[0]["action"]
    metrics = (await held.client.get("/metrics")).text
    assert f'nova_incidents_total{{kind="exception"}} {len(errors)}.0' in metrics


# ---- the event feed -------------------------------------------------------------------------------------------------


async def listen(client: httpx.AsyncClient, query: str = "", **headers: str) -> AsyncIterator[dict[str, Any]]:
    """The events of one listener; the first item says that it listens."""
    async with client.stream("GET", f"/v1/events{query}", headers=headers) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        async for line in response.aiter_lines():
            if line.startswith(":"):
                yield {}
            elif line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


async def test_transitions_are_told_as_they_happen(held: Held, serve: Serve) -> None:
    await held.serve(serve)
    events = listen(held.client, "?types=request")
    assert await anext(events) == {}
    await held.ask("one")
    await held.finish()
    found = [await anext(events) for _ in range(4)]
    assert [(e["type"], e["id"], e["from"], e["to"]) for e in found] == [
        ("request", "cmpl-one", None, "WAITING"),
        ("request", "cmpl-one", "WAITING", "PREFILL"),
        ("request", "cmpl-one", "PREFILL", "DECODE"),
        ("request", "cmpl-one", "DECODE", "FINISHED_LENGTH"),
    ]
    await events.aclose()  # type: ignore[attr-defined]
    await eventually(lambda: not held.engine._runtime.inspector.feed.is_listened)


async def test_a_listener_that_cannot_keep_up_is_told_what_it_lost(serve: Serve, engine: FakeEngine) -> None:
    from novainfer.inspection import RequestEvent

    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        events = listen(client)
        assert await anext(events) == {}
        for number in range(10_000):
            engine.feed.publish(RequestEvent(time=0.0, id=str(number), choice=0, source=None, target="WAITING"))
        lost = await anext(events)
        assert lost == {"type": "lost", "count": 10_000 - 4096}
        assert (await anext(events))["id"] == str(lost["count"])
        await events.aclose()  # type: ignore[attr-defined]


async def test_listeners_hold_up_no_shutdown_and_get_an_end(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        events = listen(client)
        assert await anext(events) == {}
        server.stop.set()
        assert [event async for event in events] == []


async def test_there_may_be_so_many_listeners_and_no_more(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("novainfer.server.operate.events.LISTENERS_MAX", 1)
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        events = listen(client)
        assert await anext(events) == {}
        response = await client.get("/v1/events")
        assert (response.status_code, error_of(response)["code"]) == (503, "server_is_overloaded")
        await events.aclose()  # type: ignore[attr-defined]
        response = await client.get("/v1/events?types=actor,nothing")
        assert (response.status_code, error_of(response)["param"]) == (400, "types")


# ---- health ---------------------------------------------------------------------------------------------------------


async def test_an_actor_that_stands_still_fails_the_probes_with_the_reason(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url) as client:
        engine.stuck = "the scheduler has taken no turn for 2.3 s (at most 2 s)"
        for path in ("/health", "/readyz", "/livez"):
            response = await client.get(path)
            assert (response.status_code, error_of(response)["code"]) == (503, "engine_stuck")
            assert engine.stuck in error_of(response)["message"]
        metrics = (await client.get("/metrics")).text
        assert "nova_live 0.0" in metrics
        assert "nova_ready 0.0" in metrics
        engine.stuck = None
        assert "nova_ready 1.0" in (await client.get("/metrics")).text
        for path in ("/health", "/readyz", "/livez"):
            assert (await client.get(path)).json()["status"] == "ok"


class Gpu(FakeDevice):
    """A device that says what its memory is used for."""

    def fit(self, num_blocks: int | None = None, *, is_new: bool = False) -> dict[str, Any]:
        return super().fit(num_blocks, is_new=is_new) | {"memory": {"total_bytes": 80, "kv_cache_bytes": 60}}


@pytest.mark.parametrize("device", [FakeDevice, Gpu])
async def test_the_probes_say_what_the_memory_of_a_gpu_is_used_for(serve: Serve, device: type[FakeDevice]) -> None:
    engine = Engine(EngineConfig(), device=device(), tokenizer=ByteTokenizer())
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url) as client:
        for path in ("/health", "/readyz"):
            found = (await client.get(path)).json()
            assert found.get("memory") == ({"total_bytes": 80, "kv_cache_bytes": 60} if device is Gpu else None)
    assert engine.model_info.memory == found.get("memory", {})


async def test_a_server_that_drains_is_alive_and_not_ready(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, shutdown_timeout_s=TIMEOUT_S)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        task = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await engine.wait_until(lambda: engine.active)
        server.stop.set()
        await eventually(lambda: server.service.is_draining)
        assert (await client.get("/livez")).status_code == 200
        assert error_of(await client.get("/readyz"))["code"] == "draining"
        assert "nova_ready 0.0" in (await client.get("/metrics")).text
        engine.release(100)
        assert (await task).status_code == 200


async def test_an_actor_frozen_by_a_drill_is_reported_and_goes_on_when_it_is_thawed(serve: Serve, held: Held) -> None:
    await held.serve(serve, admin_key="boss")
    watchdog = held.engine._runtime.watchdog
    watchdog.stop()
    now_s = 1000.0
    watchdog.clock = lambda: now_s
    watchdog.look()
    body = {"kind": "freeze_actor", "actor": "scheduler"}
    assert (await held.client.post("/v1/faults", json=body, headers=ADMIN)).status_code == 200
    for _ in range(12):
        await asyncio.sleep(0)
        now_s += 0.25
        watchdog.look()
    response = await held.client.get("/livez")
    assert response.status_code == 503
    assert "the scheduler has taken no turn for" in error_of(response)["message"]
    assert 'nova_mailbox_wait_seconds{actor="scheduler"} 2' in (await held.client.get("/metrics")).text
    body["kind"] = "thaw_actor"
    assert (await held.client.post("/v1/faults", json=body, headers=ADMIN)).status_code == 200
    for _ in range(3):
        await asyncio.sleep(0)
        watchdog.look()
    assert (await held.client.get("/livez")).status_code == 200


async def test_a_state_that_is_none_is_told_what_would_be_one(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/requests?state=FOO")
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "state"
    assert error["message"].startswith("state must be WAITING, PREFILL, DECODE, ")
    assert error["message"].endswith(" or OVERFLOW, not 'FOO'")
    for state in ("decode", "OVERFLOW"):
        assert (await client.get(f"/v1/requests?state={state}")).json()["data"] == []


async def test_a_ping_may_be_a_post(client: httpx.AsyncClient) -> None:
    assert (await client.post("/ping")).json() == (await client.get("/ping")).json()


async def test_times_are_told_to_the_microsecond(held: Held, serve: Serve) -> None:
    await held.serve(serve)
    await held.ask("one")
    records = [*(await held.get("/v1/actors"))["data"], *(await held.get("/v1/requests"))["data"]]
    for seconds in (record[name] for record in records for name in ("dwell_s", "wait_s") if name in record):
        assert seconds == round(seconds, 6)


# ---- documents ------------------------------------------------------------------------------------------------------


async def test_every_route_is_described(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    served = {(endpoint.path.replace(":path}", "}"), endpoint.method.lower()) for endpoint in ROUTES}
    described = {(path, method) for path, methods in paths.items() for method in methods}
    assert served <= described


async def test_the_metrics_of_progress_are_there(client: httpx.AsyncClient) -> None:
    lines = (await client.get("/metrics")).text.splitlines()
    for line in (
        'nova_state_dwell_seconds{actor="worker-0",state="READY"} 1.5',
        'nova_mailbox_depth{actor="worker-0"} 2.0',
        'nova_mailbox_wait_seconds{actor="worker-0"} 0.0',
        'nova_kv_blocks{state="DECODE"} 4.0',
        'nova_ladder_rung{rung="FULL"} 1.0',
        'nova_ladder_rung{rung="INT8"} 0.0',
        'nova_mode{kernels="fast",precision="checkpoint",weights="float32"} 1.0',
        "nova_worker_restarts_total 0.0",
        "nova_live 1.0",
    ):
        assert line in lines
