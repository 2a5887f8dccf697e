"""A key sees and cancels its own requests; the admin key, all; another's request is as if there were none."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from novainfer import InvalidParameter, Tenant
from novainfer.server.settings import ServerSettings
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine
from tests.server.test_bad_input import error_of
from tests.server.test_inspection import Held, held, listen

__all__ = ["held"]

ALICE, BOB, ADMIN = ({"authorization": f"Bearer {name}"} for name in ("alice-key", "bob-key", "boss"))
KEYS = {"api_keys": ("alice-key", "bob-key"), "admin_key": "boss"}


async def ids(held: Held, headers: dict[str, str]) -> list[str]:
    return [record["id"] for record in (await held.get("/v1/requests", **headers))["data"]]


async def test_each_key_sees_its_own_requests_and_the_admin_key_all(held: Held, serve: Serve) -> None:
    await held.serve(serve, **KEYS)
    await held.ask("a", **ALICE)
    await held.ask("b", **BOB)
    assert await ids(held, ALICE) == ["cmpl-a"]
    assert await ids(held, BOB) == ["cmpl-b"]
    assert await ids(held, ADMIN) == ["cmpl-a", "cmpl-b"]
    assert (await held.get("/v1/requests/a", **ALICE))["id"] == "cmpl-a"
    assert (await held.get("/v1/requests/a", **ADMIN))["id"] == "cmpl-a"
    for name in ("a", "cmpl-a"):
        response = await held.client.get(f"/v1/requests/{name}", headers=BOB)
        assert (response.status_code, error_of(response)["code"]) == (404, "request_not_found")
    await held.finish()
    assert await ids(held, ALICE) == ["cmpl-a"]
    assert (await held.client.get("/v1/requests/a", headers=BOB)).status_code == 404


@pytest.mark.parametrize("path", ["/abort_requests", "/abort_request"])
async def test_several_are_aborted_by_their_key_and_all_by_the_admin(held: Held, serve: Serve, path: str) -> None:
    await held.serve(serve, **KEYS)
    await held.ask("a", **ALICE)
    await held.ask("b", **ALICE)
    await held.ask("c", **BOB)
    await held.ask("d", **BOB)

    async def abort(body: object, headers: dict[str, str]) -> object:
        response = await held.client.post(path, json=body, headers=headers)
        return (
            response.json()["cancelled"] if response.is_success else (response.status_code, error_of(response)["param"])
        )

    assert await abort({"request_ids": ["a", "c", "cmpl-b", "unknown"]}, ALICE) == ["a", "cmpl-b"]  # c is Bob's
    assert await abort({"request_ids": ["a"]}, ALICE) == []  # it is over
    assert await abort({"rid": "c"}, BOB) == ["c"]
    for wrong in ({}, {"request_ids": []}, {"request_ids": ["x"] * 10_001}):
        assert await abort(wrong, BOB) == (400, "request_ids")
    assert await abort({"abort_all": True}, BOB) == (403, None)
    assert await abort({"abort_all": True}, ADMIN) == ["cmpl-d"]
    await held.finish()


async def test_each_key_is_a_tenant_and_requests_without_keys_are_of_one(serve: Serve) -> None:
    with_keys, without = FakeEngine(), FakeEngine()
    for engine, settings in ((with_keys, KEYS), (without, {})):
        server = await serve(engine, **settings)
        async with httpx.AsyncClient(base_url=server.url) as client:
            for headers in (ALICE, BOB, ALICE):
                response = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
                assert response.status_code == 200
    alice, bob, again = with_keys.tenants
    assert alice == again != bob
    assert alice.id
    assert bob.id
    assert without.tenants == [Tenant()] * 3


async def test_a_name_that_two_keys_use_means_to_each_its_own(held: Held, serve: Serve) -> None:
    await held.serve(serve, **KEYS)
    await held.ask("same", **ALICE)
    await held.finish()
    await held.ask("same", **BOB)
    await held.finish()
    for headers in (ALICE, BOB):
        assert len((await held.get("/v1/requests/same", **headers))["data"]) == 1
    assert len((await held.get("/v1/requests/same", **ADMIN))["data"]) == 2


async def test_a_key_cancels_its_own_requests_only(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    world = Held()
    await world.serve(lambda _, **settings: serve(engine, **settings), **KEYS)
    world.engine = engine  # type: ignore[assignment]
    task = asyncio.create_task(
        world.client.post("/v1/completions", json={"prompt": "x"}, headers={**ALICE, "x-request-id": "a"})
    )
    await engine.wait_until(lambda: engine.active)
    for name in ("a", "cmpl-a"):
        assert (await world.client.post(f"/v1/requests/{name}/cancel", headers=BOB)).status_code == 404
    assert engine.active
    assert (await world.client.post("/v1/requests/a/cancel", headers=ALICE)).json()["status"] == "cancelled"
    assert (await task).status_code == 499
    assert (await world.client.post("/v1/requests/a/cancel", headers=ALICE)).json()["status"] == "finished"
    assert (await world.client.post("/v1/requests/a/cancel", headers=BOB)).status_code == 404
    task = asyncio.create_task(
        world.client.post("/v1/completions", json={"prompt": "x"}, headers={**BOB, "x-request-id": "b"})
    )
    await engine.wait_until(lambda: engine.active)
    assert (await world.client.post("/v1/requests/b/cancel", headers=ADMIN)).json()["status"] == "cancelled"
    assert (await task).status_code == 499
    await world.client.aclose()


async def test_errors_and_events_are_filtered_likewise(held: Held, serve: Serve) -> None:
    await held.serve(serve, **KEYS)
    own, others = listen(held.client, "?types=request", **ALICE), listen(held.client, "?types=request", **ADMIN)
    assert await anext(own) == await anext(others) == {}
    await held.client.post("/v1/faults", json={"kind": "exception"}, headers=ADMIN)
    await held.ask("b", **BOB)
    await held.finish()
    await held.ask("a", **ALICE)
    await held.finish()
    assert (await anext(own))["id"] == "cmpl-a"
    assert (await anext(others))["id"] == "cmpl-b"
    assert (await held.get("/v1/errors", **ALICE))["data"] == []
    assert (await held.get("/v1/errors", **BOB))["data"][0]["requests"] == ["cmpl-b"]
    assert (await held.get("/v1/errors", **ADMIN))["data"][0]["requests"] == ["cmpl-b"]
    for events in (own, others):
        await events.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/v1/requests", "/v1/actors", "/v1/kv", "/v1/steps", "/v1/errors", "/v1/events"])
async def test_the_inspector_needs_a_key_where_there_are_keys(serve: Serve, engine: FakeEngine, path: str) -> None:
    server = await serve(engine, **KEYS)
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers={"authorization": "Bearer wrong"})).status_code == 401


async def test_without_keys_everybody_sees_everything(held: Held, serve: Serve) -> None:
    await held.serve(serve)
    await held.ask("a")
    assert await ids(held, {}) == ["cmpl-a"]
    assert await ids(held, {"authorization": "Bearer none"}) == ["cmpl-a"]


async def test_drills_are_off_without_an_admin_key_and_need_it_where_there_is_one(
    serve: Serve, engine: FakeEngine
) -> None:
    body = {"kind": "oom"}
    server = await serve(engine, api_keys=("alice-key",))
    async with httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post("/v1/faults", json=body, headers=ALICE)
        assert (response.status_code, error_of(response)["type"]) == (403, "permission_error")
        assert "--admin-key" in error_of(response)["message"]
    server = await serve(FakeEngine(), **KEYS)
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.post("/v1/faults", json=body)).status_code == 401
        assert (await client.post("/v1/faults", json=body, headers=ALICE)).status_code == 403
    server = await serve(faulty := FakeEngine(), admin_key="boss")
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.post("/v1/faults", json=body)).status_code == 403
        assert (await client.post("/v1/faults", json=body, headers=ALICE)).status_code == 403
        assert (await client.post("/v1/faults", json={"kind": "stall", "seconds": 3}, headers=ADMIN)).is_success
    assert engine.injected == []
    assert faulty.injected == [("stall", {"seconds": 3.0})]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "kind"),
        ({"kind": 3}, "kind"),
        ({"kind": "nothing"}, "kind"),
        ({"kind": "kill"}, "kind"),
        ({"kind": "stall", "seconds": "long"}, "seconds"),
        ({"kind": "oom", "wheels": 4}, "wheels"),
        ({"kind": "freeze_actor"}, "actor"),
        ({"kind": "freeze_actor", "actor": "nobody"}, "actor"),
        ({"kind": "freeze_actor", "actor": "gate", "seconds": 3}, "seconds"),
        ({"kind": "exception", "request": "cmpl-none"}, "request"),
    ],
)
async def test_a_drill_that_cannot_be_is_refused_in_a_sentence(
    held: Held, serve: Serve, body: dict[str, object], param: str
) -> None:
    await held.serve(serve, admin_key="boss")
    response = await held.client.post("/v1/faults", json=body, headers=ADMIN)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert error_of(response)["message"]


@pytest.mark.parametrize("key", ["", "schlüssel", "alice-key"])
def test_an_admin_key_that_is_none_is_refused(key: str) -> None:
    with pytest.raises(InvalidParameter, match="admin_key"):
        ServerSettings(api_keys=("alice-key",), admin_key=key)


async def test_no_name_that_one_key_chooses_meets_a_request_of_another(serve: Serve) -> None:
    """NAME-0 is what a client may call its request, and what a prompt of several is shown as."""
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, **KEYS)
    async with httpx.AsyncClient(base_url=server.url) as client:

        def ask(name: str, prompt: object, headers: dict[str, str]) -> asyncio.Task[httpx.Response]:
            body = {"model": "fake", "prompt": prompt}
            return asyncio.create_task(
                client.post("/v1/completions", json=body, headers={**headers, "x-request-id": name}, timeout=60)
            )

        bobs = ask("pair-0", "b", BOB)
        await engine.wait_until(lambda: len(engine.active) == 1)
        alices = ask("pair", ["a", "aa"], ALICE)
        again = ask("pair-0", "b", ALICE)
        await engine.wait_until(lambda: len(engine.active) == 4)
        assert (await client.post("/v1/requests/pair/cancel", headers=BOB)).status_code == 404
        assert (await client.post("/v1/requests/cmpl-pair-0/cancel", headers=BOB)).status_code == 200
        assert (await bobs).json()["error"]["code"] == "request_cancelled"
        assert len(engine.active) == 3, "the others go on"
        engine.release(100)
        assert (await alices).json()["id"] == "cmpl-pair"
        assert (await again).json()["id"] == "cmpl-pair-0", "nor does a suffix tell that another key uses the name"
