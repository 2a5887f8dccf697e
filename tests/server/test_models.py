"""Several models behind one server, with fake engines: which one answers, what is told of all, and what goes wrong."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from novainfer import EngineDead, ModelLoadError
from novainfer.inspection import SessionRecord
from novainfer.server.keys.record import digest
from novainfer.server.serve import Server
from novainfer.server.settings import ServerSettings
from tests.server.conftest import TIMEOUT_S, Serve, eventually
from tests.server.stable import ADMIN, Stable, ask


@pytest.fixture
def stable() -> Stable:
    return Stable()


@pytest.fixture
async def client(serve: Serve, stable: Stable) -> AsyncIterator[httpx.AsyncClient]:
    """Of a server of three models with room for two, of which one cannot be loaded."""
    server = await serve(stable.models("small", "broken", "large", max_loaded=2), admin_key="admin-key")
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        yield client


async def answer(client: httpx.AsyncClient, model: str) -> str:
    reply = await client.post("/v1/completions", json=ask(model))
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    return reply.json()["choices"][0]["text"]


async def statuses(client: httpx.AsyncClient) -> dict[str, dict[str, object]]:
    reply = await client.get("/v1/models")
    return {one["id"]: one["status"] for one in reply.json()["data"]}


async def test_the_body_says_which_model_answers_and_each_has_its_share_of_memory(client, stable):
    assert [await answer(client, name) for name in ("small", "large")] == ["I am small", "I am large"]
    assert {config.memory_share for config in stable.configs} == {0.5}
    assert [config.model for config in stable.configs] == [f"/models/{n}" for n in ("small", "broken", "large")]


async def test_all_models_are_listed_loaded_or_not(client):
    found = await statuses(client)
    assert found["small"] == {"value": "loaded", "state": "IDLE", "failed": False}
    assert found["large"] == {"value": "unloaded", "state": "ABSENT", "failed": False}
    assert found["broken"] == {
        "value": "unloaded",
        "state": "FAILED",
        "failed": True,
        "error": "it could not be loaded, or its engine died; the log says why",
    }
    told = (await client.get("/v1/models/broken", headers=ADMIN)).json()["status"]
    assert told["error"] == "config.json is missing"
    one = (await client.get("/v1/models/large")).json()
    assert (one["id"], one["max_model_len"]) == ("large", None)
    assert (await client.get("/v1/models/other")).status_code == 404


async def test_an_unknown_model_is_404_and_none_at_all_400(client):
    unknown = await client.post("/v1/completions", json=ask("gpt-4"))
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    none = await client.post("/v1/completions", json=ask(None))
    assert none.status_code == 400
    assert none.json()["error"]["message"] == "model must be small, broken or large"
    assert none.json()["error"]["param"] == "model"


async def test_one_that_cannot_be_loaded_is_503_and_harms_no_other_and_the_operator_hears_why(client):
    asked = {"model": "broken", "messages": []}
    reply = await client.post("/v1/chat/completions", json=asked)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_unavailable")
    assert reply.json()["error"]["message"] == "The model could not be loaded; the log says why"
    told = await client.post("/v1/chat/completions", json=asked, headers=ADMIN)
    assert told.json()["error"]["message"] == "The model could not be loaded: config.json is missing"
    for headers, error in (
        ({}, "it could not be loaded, or its engine died; the log says why"),
        (ADMIN, "config.json is missing"),
    ):
        health = await client.get("/health", headers=headers)
        assert [one.get("error") for one in health.json()["models"]] == [None, error, None]
    assert int(reply.headers["retry-after"]) >= 1
    assert await answer(client, "small") == "I am small"


async def test_one_whose_files_are_wrong_makes_no_other_go_and_comes_when_they_are_mended(serve, stable):
    stable.unfit, stable.failing = {"broken"}, set()
    server = await serve(stable.models("small", "broken", max_loaded=1), admin_key="admin-key")
    models = server.service.models
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, headers=ADMIN) as client:
        refused = await client.post("/v1/completions", json=ask("broken"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
        assert refused.json()["error"]["message"].endswith("/models/broken holds no config.json")
        again = await client.post("/models/load", json={"model": "broken"})  # at once, though it has just failed
        assert (again.status_code, again.json()["error"]["code"]) == (503, "model_unavailable")
        assert await answer(client, "small") == "I am small"
        assert [(one.loads_total, one.failures_total) for one in models.models()] == [(1, 0), (0, 2)]
        assert [len(stable.made[name]) for name in ("small", "broken")] == [1, 0]

        stable.unfit = set()
        assert (await client.post("/models/load", json={"model": "broken"})).status_code == 200
        assert stable.made["small"][0].is_closed
        assert await answer(client, "broken") == "I am broken"


async def test_models_make_room_for_each_other_but_not_while_they_answer(serve, stable):
    stable.is_paced = True
    server = await serve(stable.models("small", "large", max_loaded=1), model_wait_timeout_s=0.05)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        running = asyncio.create_task(answer(client, "small"))
        await eventually(lambda: stable.made["small"][0].active)
        refused = await client.post("/v1/completions", json=ask("large"))
        assert refused.status_code == 503
        assert "other models have all the room" in refused.json()["error"]["message"]
        own = await client.post("/v1/completions", json=ask("large"), headers={"x-request-timeout-ms": "10"})
        assert (own.status_code, own.json()["error"]["code"]) == (408, "request_timeout")
        stable.made["small"][0].release(9)
        assert await running == "I am small"
        stable.is_paced = False
        await eventually(lambda: server.service.models.models()[0].num_live == 0)
        await server.service.models.load("large", TIMEOUT_S)  # a busy machine takes longer than requests may wait here
        assert await answer(client, "large") == "I am large"
        assert stable.made["small"][0].is_closed


async def test_a_stream_holds_its_model_until_its_last_byte_and_a_client_that_leaves_lets_it_go(serve, stable):
    stable.is_paced = True
    server = await serve(stable.models("small", "large", max_loaded=1))
    models = server.service.models
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        [engine] = stable.made["small"]
        engine.answer = ("I", " am", " here")

        async def release_one() -> None:
            await eventually(lambda: engine.active)
            engine.release(1)

        releasing = asyncio.create_task(release_one())
        async with client.stream("POST", "/v1/completions", json=ask("small", stream=True)) as reply:
            await releasing
            await anext(reply.aiter_lines())
            assert models.models()[0].num_live == 1
        await eventually(lambda: models.models()[0].num_live == 0)


async def test_a_client_that_leaves_while_its_model_is_loaded_waits_no_more(serve, stable):
    stable.is_paced = True
    server = await serve(stable.models("small", "large", max_loaded=1))
    models = server.service.models
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        running = asyncio.create_task(answer(client, "small"))
        await eventually(lambda: models.models()[0].num_live == 1)
        waiting = asyncio.create_task(client.post("/v1/completions", json=ask("large")))
        await eventually(lambda: models.models()[1].num_waiting == 1)
        waiting.cancel()
        await eventually(lambda: models.models()[1].num_waiting == 0)
        stable.made["small"][0].release(9)
        await running


async def test_load_and_unload_by_hand_need_the_admin_key(client, stable):
    assert (await client.post("/models/load", json={"model": "large"})).status_code == 403
    loaded = await client.post("/models/load", json={"model": "large"}, headers=ADMIN)
    assert (loaded.status_code, loaded.json()["status"]["value"]) == (200, "loaded")
    unloaded = await client.post("/models/unload", json={"model": "large"}, headers=ADMIN)
    assert (unloaded.status_code, unloaded.json()["status"]["value"]) == (200, "unloading")
    await eventually(lambda: stable.made["large"][0].is_closed)
    failed = await client.post("/models/load", json={"model": "broken"}, headers=ADMIN)
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_unavailable")
    assert len(stable.made["broken"]) == 2  # though it had just failed
    assert (await client.post("/models/load", json={"model": "other"}, headers=ADMIN)).status_code == 404


async def test_a_server_of_one_model_loads_none_by_hand(serve, engine):
    server = await serve(engine, admin_key="admin-key")
    async with httpx.AsyncClient(base_url=server.url) as client:
        reply = await client.post("/models/unload", json={"model": "fake"}, headers=ADMIN)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
        [model] = (await client.get("/v1/models")).json()["data"]
        assert model["status"] == {"value": "loaded", "failed": False}


async def test_probes_tell_of_each_model_and_are_well_while_one_is_not(client):
    reply = await client.get("/readyz")
    assert reply.status_code == 200
    found = {one["id"]: one for one in reply.json()["models"]}
    assert reply.json()["memory_share"] == 0.5
    assert [found[name]["state"] for name in ("small", "broken", "large")] == ["IDLE", "FAILED", "ABSENT"]
    assert found["small"]["engine"]["model"] == "small"
    assert "could not be loaded" in found["broken"]["error"]
    assert (await client.get("/livez")).status_code == 200


async def test_one_scrape_tells_of_all_engines_with_one_head_each(client):
    await answer(client, "small")
    await answer(client, "large")
    text = (await client.get("/metrics")).text
    heads = [line for line in text.splitlines() if line.startswith("# HELP")]
    assert len(heads) == len({line.split()[2] for line in heads})
    families = {one.name: one for one in text_string_to_metric_families(text)}
    running = {sample.labels["model_name"] for sample in families["vllm:num_requests_running"].samples}
    assert running == {"small", "large"}
    assert {sample.labels["model_name"] for sample in families["nova_steps"].samples} == running
    ttft = families["vllm:time_to_first_token_seconds"].samples
    counts = {one.labels["model_name"]: one.value for one in ttft if one.name.endswith("_count")}
    assert counts == {"small": 1.0, "large": 1.0}
    states = {
        one.labels["model_name"]: one.labels["state"] for one in families["nova_model_state"].samples if one.value
    }
    assert states == {"small": "IDLE", "broken": "FAILED", "large": "IDLE"}
    assert {one.labels["model_name"]: one.value for one in families["nova_model_failures"].samples}["broken"] == 1.0


async def test_requests_of_all_engines_are_told_and_cancelled(serve, stable):
    stable.is_paced = True
    server = await serve(stable.models("small", "large"))
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        running = [
            asyncio.create_task(client.post("/v1/completions", json=ask(name, request_id=f"mine-{name}")))
            for name in ("small", "large")
        ]
        await eventually(lambda: stable.made["small"][0].active and stable.made["large"][0].active)
        for name in ("small", "large"):
            cancelled = await client.post(f"/v1/requests/cmpl-mine-{name}/cancel")
            assert cancelled.json()["status"] == "cancelled"
        assert [(await one).status_code for one in running] == [499, 499]
        asked = await client.get("/v1/actors")
        assert (asked.status_code, asked.json()["error"]["param"]) == (400, "model")
        assert (await client.get("/v1/actors", params={"model": "large"})).status_code == 200
        assert (await client.get("/v1/requests")).status_code == 200


async def test_a_key_uses_and_sees_the_models_that_it_may(serve, stable, tmp_path):
    from novainfer.server.keys.record import KeyRecord
    from novainfer.server.keys.store import KeyStore

    file = tmp_path / "keys.yaml"
    KeyStore.at(file).add(KeyRecord(name="guest", hash=digest(b"guest-key"), models=("small",)))
    server = await serve(stable.models("small", "large"), keys_file=file)
    headers = {"authorization": "Bearer guest-key"}
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, headers=headers) as client:
        assert await answer(client, "small") == "I am small"
        assert list(await statuses(client)) == ["small"]
        refused = await client.post("/v1/completions", json=ask("large"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        none = await client.post("/v1/completions", json=ask(None))
        assert none.json()["error"]["message"] == "model must be small"


async def test_what_a_model_kept_of_a_conversation_is_told_to_be_lost_with_it(serve, stable):
    server = await serve(stable.models("small", "large"), admin_key="admin-key")
    kept = SessionRecord(
        session_id="chat", tenant="", state="KEPT", num_tokens=9, num_on_device=9, num_on_host=0, ttl_left_s=5.0
    )
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:

        async def states() -> list[tuple[str, str, str]]:
            listed = (await client.get("/v1/sessions")).json()["data"]
            return [(one["id"], one["model"], one["state"]) for one in listed]

        stable.made["small"][0].kept = [kept]
        assert await states() == [("chat", "small", "kept")]
        await client.post("/models/unload", json={"model": "small"}, headers=ADMIN)
        await eventually(lambda: stable.made["small"][0].is_closed)
        assert await states() == [("chat", "small", "lost")]
        await answer(client, "small")
        stable.made["small"][1].kept = [kept]
        assert await states() == [("chat", "small", "kept")]
        stable.made["small"][1].kept = []
        assert await states() == []
        server.service.lost.note("small", [("", "chat")])
        assert (await client.delete("/v1/sessions/chat")).status_code == 200
        assert await states() == []


async def test_idle_models_go_and_come_back(serve, stable):
    server = await serve(stable.models("small", idle_s=0.02))
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        await eventually(lambda: stable.made["small"][0].is_closed)
        assert (await client.get("/readyz")).status_code == 200
        assert await answer(client, "small") == "I am small"
    assert len(stable.made["small"]) >= 2


async def test_where_no_model_can_be_loaded_the_server_does_not_start(serve, stable):
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        await serve(stable.models("broken"))


async def test_the_end_lets_requests_of_all_models_finish(serve, stable):
    stable.is_paced = True
    server = await serve(stable.models("small", "large"), shutdown_timeout_s=TIMEOUT_S)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        running = [asyncio.create_task(answer(client, name)) for name in ("small", "large")]
        await eventually(lambda: stable.made["small"][0].active and stable.made["large"][0].active)
        server.stop.set()
        await eventually(lambda: server.service.is_draining)
        for name in ("small", "large"):
            stable.made[name][0].release(9)
        assert await asyncio.gather(*running) == ["I am small", "I am large"]
        await eventually(lambda: all(engines[0].is_closed for name, engines in stable.made.items() if engines))


async def test_who_waits_for_a_model_while_the_first_ones_are_loaded_is_told_of_the_servers_end(serve, stable):
    stable.gate = asyncio.Event()
    server = await serve(stable.models("small", "large", max_loaded=1), wait_ready=False)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        waiting = [asyncio.create_task(client.post("/v1/completions", json=ask(name))) for name in ("small", "large")]
        models = server.service.models
        await eventually(lambda: [one.num_waiting for one in models.models()] == [2, 1])
        server.stop.set()
        replies = await asyncio.gather(*waiting)
        assert [(one.status_code, one.json()["error"]["code"]) for one in replies] == [(503, "draining")] * 2
    assert stable.made["small"][0].is_closed


async def test_a_server_whose_router_died_is_not_well_and_ends(stable):
    server, models = Server(ServerSettings(port=0)), stable.models("small", "large")
    task = asyncio.create_task(server.run(models))
    async with asyncio.timeout(TIMEOUT_S), httpx.AsyncClient(base_url=server.url) as client:
        await server.ready.wait()
        models._router._died("router", RuntimeError("a bug"))
        assert (await client.get("/readyz")).status_code == 503
        with pytest.raises(EngineDead):
            await task
    assert all(engine.is_closed for engines in stable.made.values() for engine in engines)


async def test_a_profile_ends_though_its_model_has_gone(serve, stable, tmp_path):
    server = await serve(stable.models("small", "large"), admin_key="admin-key")
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, headers=ADMIN) as client:
        stable.made["small"][0].recorder_dir = tmp_path
        assert (await client.post("/start_profile", params={"model": "small"})).status_code == 200
        await client.post("/models/unload", json={"model": "small"})
        await eventually(lambda: stable.made["small"][0].is_closed)
        ended = await client.post("/stop_profile")
        assert (ended.status_code, ended.json()["state"]) == (200, "written")
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(ended.json()["files"])


async def test_routers_may_ask_a_server_of_several_models_for_its_kv_events(client):
    await answer(client, "large")
    assert (await client.get("/kv_event_sources")).json() == {}


async def test_a_response_in_the_background_holds_its_model_though_its_client_has_gone(serve, stable):
    stable.is_paced = True
    server = await serve(stable.models("small", "large", max_loaded=1))
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        reply = await client.post("/v1/responses", json={"model": "small", "input": "Who?", "background": True})
        assert reply.status_code == 200
        small = stable.made["small"][0]
        await eventually(lambda: small.active)
        await client.get("/version")  # the exchange of the first request is over
        assert server.service.models.models()[0].num_live == 1
        small.release(9)
        await eventually(lambda: server.service.models.models()[0].num_live == 0)
        done = await client.get(f"/v1/responses/{reply.json()['id']}")
        assert done.json()["status"] == "completed"
