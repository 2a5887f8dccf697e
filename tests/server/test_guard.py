"""Keys, limits and the small endpoints."""

import asyncio
import contextlib
import re
from html.parser import HTMLParser

import httpx
import pytest

from novainfer import InvalidParameter
from novainfer.server.settings import ServerSettings
from tests.server.conftest import TIMEOUT_S, Serve
from tests.server.fakes import FakeEngine, FakeModelInfo
from tests.server.rawh2 import RawH2
from tests.server.test_bad_input import error_of
from tests.server.test_chat import USER

PUBLIC = ("/health", "/healthz", "/livez", "/readyz", "/ready", "/ping", "/docs")
GUARDED = (
    *("/v1/models", "/v1/models/fake", "/metrics", "/version", "/openapi.json", "/nothing"),
    *("/load", "/server_info", "/tokenizer_info", "/kv_event_sources"),
)


async def test_every_path_but_the_probes_needs_a_key(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine, api_keys=("first-key", "second-key"))
    async with httpx.AsyncClient(base_url=server.url) as client:
        for path in PUBLIC:
            assert (await client.get(path)).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first-key"}):
            for path in GUARDED:
                response = await client.get(path, headers=headers)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert error_of(response)["code"] == "invalid_api_key"
            for path in ("/v1/chat/completions", "/tokenize", "/detokenize", "/v1/requests/x/cancel", "/nothing"):
                assert (await client.post(path, json={"messages": USER}, headers=headers)).status_code == 401
        assert not engine.seen
        for key in ("first-key", "second-key"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.post("/v1/chat/completions", json={"messages": USER}, headers=headers)).is_success


async def test_a_body_that_trickles_in_is_408_and_holds_up_nobody(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine, body_timeout_s=0.05)
    client = await RawH2.connect(server.port)
    slow = await client.request("/v1/completions", b'{"prompt":', end=False)
    status, _ = await client.response(await client.request("/health"))
    assert status == 200
    status, body = await client.response(slow)
    assert status == 408
    assert b"within 0.05 seconds" in body

    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    async with asyncio.timeout(10):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 ")
    writer.close()
    await writer.wait_closed()


async def test_the_limit_is_settable_and_exact(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine, body_bytes=100)
    async with httpx.AsyncClient(base_url=server.url) as client:
        body = b'{"prompt":"x"}'
        assert (await client.post("/v1/completions", content=body.ljust(100))).status_code == 200
        response = await client.post("/v1/completions", content=body.ljust(101))
        assert response.status_code == 413
        assert "100 bytes" in error_of(response)["message"]


async def test_a_client_that_leaves_during_its_body_is_forgotten(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine)
    client = await RawH2.connect(server.port)
    stream = await client.request("/v1/completions", b'{"prompt":', end=False)
    assert (await client.response(await client.request("/health")))[0] == 200  # so it has begun
    await client.reset(stream)
    assert (await client.response(await client.request("/health")))[0] == 200
    assert server.service.metrics.http_requests["POST", "other", 499] == 1


async def test_nothing_is_served_while_the_model_loads(serve: Serve) -> None:
    engine = FakeEngine()
    engine.start_gate = asyncio.Event()
    server = await serve(engine, wait_ready=False)
    async with httpx.AsyncClient(base_url=server.url) as client:
        for path in ("/health", "/healthz", "/readyz", "/ready", "/ping", "/v1/models"):
            response = await client.get(path)
            assert response.status_code == 503
            assert error_of(response)["code"] == "model_loading"
            assert int(response.headers["retry-after"]) >= 1
        response = await client.post("/v1/chat/completions", json={"messages": USER})
        assert error_of(response)["code"] == "model_loading"
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        engine.start_gate.set()
        await server.ready.wait()
        assert (await client.get("/health")).json() == {
            "status": "ok",
            "model": "fake",
            "state": "IDLE",
            "rung": "FULL",
            "mode": {"kernels": "fast", "precision": "checkpoint"},
            "weights": "float32",
        }


async def test_kernels_that_failed_their_self_test_are_told(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert "nova_failed_kernels 0.0" in (await client.get("/metrics")).text
    failed = {
        "forward triton-graphs": "a decode through a decoder has other bits than one kernel after the other gives"
    }
    engine.model_info = FakeModelInfo(failed_kernels=failed)
    assert (await client.get("/readyz")).json()["failed_kernels"] == failed
    engine.model_info = FakeModelInfo(failed_kernels=failed, step_costs=[(1, 20.0), (64, 51.5)])
    assert (await client.get("/readyz")).json()["step_costs"] == [[1, 20.0], [64, 51.5]]
    assert "nova_failed_kernels 1.0" in (await client.get("/metrics")).text


async def test_models_are_listed(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 64)
    assert (await client.get("/v1/models/fake")).json() == model
    response = await client.get("/v1/models/org/other")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


async def test_metrics_count_what_happened(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for stream in (True, False):
        await client.post("/v1/chat/completions", json={"messages": USER, "stream": stream})
    engine.fail_at = 1
    await client.post("/v1/chat/completions", json={"messages": USER, "stream": True})
    await client.get("/wp-admin.php")
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = set(response.text.splitlines())
    labels = 'engine="0",model_name="fake"'
    assert f"vllm:num_requests_running{{{labels}}} 0.0" in lines
    assert f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 2.0' in lines
    assert f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} 1.0' in lines
    assert 'nova_transitions_total{actor="request",from="PREFILL",to="DECODE"} 7.0' in lines
    assert 'nova_rollbacks_total{cause="oom"} 2.0' in lines
    assert f"vllm:kv_cache_usage_perc{{{labels}}} 0.04" in lines
    assert f"vllm:prefix_cache_hits_total{{{labels}}} 5.0" in lines
    assert f"vllm:time_to_first_token_seconds_count{{{labels}}} 3.0" in lines
    assert f"vllm:inter_token_latency_seconds_count{{{labels}}} 8.0" in lines
    assert f"vllm:e2e_request_latency_seconds_count{{{labels}}} 2.0" in lines
    assert 'vllm:request_generation_tokens_bucket{engine="0",le="5.0",model_name="fake"} 2.0' in lines
    assert 'vllm:request_params_n_bucket{engine="0",le="1.0",model_name="fake"} 2.0' in lines
    assert f"vllm:request_params_max_tokens_count{{{labels}}} 0.0" in lines, "they did not say how many"
    assert f"vllm:request_queue_time_seconds_sum{{{labels}}} 1.5" in lines
    assert f"vllm:iteration_tokens_total_sum{{{labels}}} 40.0" in lines
    assert f"vllm:prompt_tokens_cached_total{{{labels}}} 5.0" in lines
    assert 'nova_terminal_events_total{kind="finish"} 2.0' in lines
    assert 'nova_terminal_events_total{kind="error"} 1.0' in lines
    assert 'nova_http_requests_total{method="POST",route="/v1/chat/completions",status="200"} 3.0' in lines
    assert 'nova_http_requests_total{method="GET",route="other",status="404"} 1.0' in lines
    assert 'nova_kv_blocks{state="DECODE"} 4.0' in lines
    assert {
        "nova_copied_blocks_total 7.0",
        "nova_swapped_out_blocks_total 3.0",
        "nova_swapped_in_blocks_total 2.0",
    } <= lines


async def test_metrics_count_what_requests_ask_for(client: httpx.AsyncClient) -> None:
    for n in (1, 3):
        body = {"messages": USER, "n": n, "max_tokens": 5 * n}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    lines = (await client.get("/metrics")).text.splitlines()
    labels = 'engine="0",model_name="fake"'
    for name, total in (("n", 4), ("max_tokens", 20)):
        assert f"vllm:request_params_{name}_count{{{labels}}} 2.0" in lines
        assert f"vllm:request_params_{name}_sum{{{labels}}} {total:.1f}" in lines


async def test_two_apps_in_one_process_have_metrics_of_their_own(serve: Serve) -> None:
    first, second = await serve(FakeEngine()), await serve(FakeEngine())
    async with httpx.AsyncClient() as client:
        await client.post(f"{first.url}/v1/completions", json={"prompt": "x"})
        assert 'kind="finish"} 1.0' in (await client.get(f"{first.url}/metrics")).text
        assert 'kind="finish"} 0.0' in (await client.get(f"{second.url}/metrics")).text


async def test_the_openapi_document_describes_every_route(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    assert "/v1/chat/completions" in document["paths"]
    schema = document["components"]["schemas"]["ChatCompletionRequest"]
    assert schema["required"] == ["messages"]
    assert "max_completion_tokens" in schema["properties"]
    for path in document["paths"]:
        name = path.replace("{model}", "fake").replace("{request_id}", "x")
        assert (await client.options(name)).status_code == 405, f"{path} is described but not served"


async def test_behind_a_proxy_with_a_prefix_the_document_names_it_and_both_kinds_of_proxy_are_served(
    serve: Serve, engine: FakeEngine
) -> None:
    server = await serve(engine, root_path="/llm/one", api_keys=("k",))
    async with httpx.AsyncClient(base_url=server.url) as client:
        for path in ("/v1/models", "/llm/one/v1/models"):  # stripped, or passed on as it came
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"authorization": "Bearer k"})).status_code == 200
        assert (await client.get("/llm/one/health")).status_code == 200  # a probe needs no key there, either
        for path in ("/llm/onev1/models", "/llm/v1/models", "/llm/one", "/llm/one/llm/one/v1/models"):
            assert (await client.get(path, headers={"authorization": "Bearer k"})).status_code == 404, path
        document = (await client.get("/openapi.json", headers={"authorization": "Bearer k"})).json()
        assert document["servers"] == [{"url": "/llm/one"}]
        page = (await client.get("/docs")).text
    assert "<code>/llm/one/v1/models</code>" in page
    assert "<a href=openapi.json>" in page  # beside it, wherever that is


@pytest.mark.parametrize("path", ["", "/", "llm", "/llm/", "//x", "/a b", "/a?b", "https://x/llm"])
def test_a_root_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(InvalidParameter, match="such as /llm") as found:
        ServerSettings(root_path=path)
    assert found.value.param == "root_path"


async def test_the_docs_page_is_whole_in_itself_and_says_nothing_of_its_server(serve: Serve) -> None:
    server = await serve(FakeEngine(), api_keys=("first-key",))
    async with httpx.AsyncClient(base_url=server.url) as client:
        response = await client.get("/docs")
        document = (await client.get("/openapi.json", headers={"authorization": "Bearer first-key"})).json()
    page = response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    names = re.findall(r"(?:id|href)='#?([^']*)'", page)
    assert set(document["components"]["schemas"]) <= set(names)  # a record has its place, and links lead to one
    assert set(names) <= set(document["components"]["schemas"])
    for path in document["paths"]:
        assert f"<code>{path}</code>" in page
    assert "truncate_prompt_tokens" in page
    assert not re.search(r"<script|src=|url\(|https?://", page)
    assert document["info"]["version"] not in page
    HTMLParser().feed(page)


async def test_head_and_version(client: httpx.AsyncClient) -> None:
    response = await client.head("/health")
    assert (response.status_code, response.content) == (200, b"")
    assert (await client.get("/version")).json()["version"]


@pytest.mark.parametrize("bad", ["a b", "x" * 200, 'a"b', ""])
async def test_a_request_id_unfit_for_a_log_is_replaced(server: object, client: httpx.AsyncClient, bad: str) -> None:
    response = await client.get("/health", headers={"x-request-id": bad})
    assert response.headers["x-request-id"] != bad
    assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_body_of_too_many_fields_is_refused(serve: Serve, path: str) -> None:
    server = await serve(FakeEngine())
    async with httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post(path, json={f"x{at}": 1 for at in range(257)})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "The body must have at most 256 fields, not 257"


async def raw(port: int, data: bytes) -> bytes:
    """What the server says to `data`, until it closes the connection or says no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    said = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TIMEOUT_S):
            while chunk := await reader.read(65536):
                said += chunk
            said += b"(closed)"
    writer.close()
    return said


async def test_a_body_of_two_lengths_is_refused_with_its_connection(serve: Serve) -> None:
    server = await serve(engine := FakeEngine())
    inner = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    said = await raw(server.port, head + b"0\r\n\r\n" + inner)
    assert said.startswith(b"HTTP/1.1 400 ")
    assert said.endswith(b"(closed)")
    assert said.count(b"HTTP/1.1 ") == 1, "what follows is not looked at"
    assert engine.seen == []


@pytest.mark.parametrize("target", [b"http://other:8000/v1/models?a=1", b"HTTPS://other/v1/models", b"/v1/models"])
async def test_a_target_may_name_its_host(serve: Serve, target: bytes) -> None:
    server = await serve(FakeEngine())
    said = await raw(server.port, b"GET %s HTTP/1.1\r\nhost: other\r\nconnection: close\r\n\r\n" % target)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b'"object":"list"' in said


@pytest.mark.parametrize("target", [b"http://other", b"http://other?a=/v1/models", b"http:/v1/models", b"*"])
async def test_a_target_that_names_nothing_else_is_no_path(serve: Serve, target: bytes) -> None:
    server = await serve(FakeEngine(), webui=False)  # so that / is none, either
    said = await raw(server.port, b"GET %s HTTP/1.1\r\nhost: other\r\nconnection: close\r\n\r\n" % target)
    assert said.startswith(b"HTTP/1.1 404 ")
