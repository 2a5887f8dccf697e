"""Every stream ends exactly once, and a client that leaves takes its request with it."""

import asyncio
import json
from urllib.parse import quote

import httpx
import openai
import pytest

from novainfer import NovaInferError, RequestTimeout, StepFailedError
from novainfer.server.directory import shown_id
from tests.server.conftest import TIMEOUT_S, Serve, eventually
from tests.server.fakes import FakeEngine
from tests.server.rawh2 import RawH2
from tests.server.test_chat import USER, events

BODY = json.dumps({"messages": USER, "stream": True}).encode()


async def test_a_failure_mid_stream_is_one_error_event_and_no_done(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.fail_at = 2
    for failure, code in ((StepFailedError("The step failed"), "step_failed"), (ValueError("x"), "internal_error")):
        engine.failure = failure
        response = await client.post("/v1/chat/completions", content=BODY)
        assert response.status_code == 200
        *chunks, last = events(response.text)
        assert last["error"]["code"] == code
        assert "[DONE]" not in response.text
        assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "Hello", ","]


async def test_a_failure_before_the_first_token_is_a_status(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_at, engine.failure = 0, StepFailedError("The step failed")
    response = await client.post("/v1/chat/completions", content=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "step_failed"


@pytest.mark.parametrize(
    "failure",
    [RequestTimeout("The deadline has passed"), StepFailedError("The step failed with this request alone in it")],
    ids=["408", "500"],
)
async def test_openais_client_does_not_send_again_what_would_end_the_same_way(
    serve: Serve, failure: NovaInferError
) -> None:
    engine = FakeEngine()
    engine.fail_at, engine.failure = 0, failure
    server = await serve(engine)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        with pytest.raises(openai.APIStatusError) as raised:
            await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
    assert raised.value.status_code == failure.status
    assert len(engine.seen) == 1


async def test_a_full_queue_is_503_with_retry_after(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.overloaded = True
    for stream in (True, False):
        response = await client.post("/v1/chat/completions", json={"messages": USER, "stream": stream})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "server_is_overloaded"
        assert response.json()["error"]["type"] == "service_unavailable_error"
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("2", "1500")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("http2", [True, False])
async def test_a_client_that_leaves_cancels_its_request(serve: Serve, path: str, stream: bool, http2: bool) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    body = {"stream": stream} | ({"messages": USER} if "chat" in path else {"prompt": ["a", "b"]})
    async with httpx.AsyncClient(base_url=server.url, http1=not http2, http2=http2) as client:
        request = asyncio.create_task(client.post(path, json=body))
        await engine.wait_until(lambda: engine.active)
        engine.release(2)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await engine.wait_until(lambda: not engine.active)
    assert len(engine.left_early) == (1 if "chat" in path else 2)
    await eventually(lambda: server.service.live.num_live == 0)


async def test_an_rst_stream_cancels_only_its_own_request(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    client = await RawH2.connect(server.port)
    first = await client.request("/v1/chat/completions", BODY, headers=(("x-request-id", "first"),))
    second = await client.request("/v1/chat/completions", BODY, headers=(("x-request-id", "second"),))
    await engine.wait_until(lambda: len(engine.active) == 2)
    engine.release(1)
    await client.read_until(lambda: client.data[first] and client.data[second])
    await client.reset(first)
    await engine.wait_until(lambda: len(engine.active) == 1)
    assert [shown_id(one) for one in engine.left_early] == ["chatcmpl-first"]
    engine.release(10)
    status, data = await client.response(second)
    assert status == 200
    assert data.endswith(b"data: [DONE]\n\n")
    await client.close()


async def test_cancel_by_api_ends_the_stream_with_an_error_event(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url) as client:
        headers = {"x-request-id": "job-1"}
        answer = asyncio.create_task(client.post("/v1/chat/completions", content=BODY, headers=headers))
        await engine.wait_until(lambda: engine.active)
        engine.release(2)
        assert (await client.post("/v1/requests/unknown/cancel")).status_code == 404
        response = await client.post("/v1/requests/job-1/cancel")
        assert response.json() == {"id": "job-1", "object": "request.cancel", "status": "cancelled"}
        text = (await answer).text
        assert '"code":"request_cancelled"' in text
        assert "[DONE]" not in text
        for name in ("job-1", "chatcmpl-job-1"):  # again is fine, by either name
            response = await client.post(f"/v1/requests/{name}/cancel")
            assert (response.status_code, response.json()["status"]) == (200, "finished")


@pytest.mark.parametrize("name", ["team/job", "what?", "x#y", "50%", "%2F", "job/cancel", "a//b/", "."])
async def test_a_name_that_is_no_path_is_looked_up_and_cancelled_percent_encoded(serve: Serve, name: str) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    whole = "/v1/requests/" + quote(f"cmpl-{name}", safe="")
    mine = "/v1/requests/" + quote(name, safe="") if name != "." else whole  # clients take dots out of paths
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        answer = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "request_id": name}))
        await engine.wait_until(lambda: len(engine.active) == 1)
        assert (await client.post(f"{mine}x/cancel")).status_code == 404
        for path, asked in ((mine, name if mine != whole else f"cmpl-{name}"), (whole, f"cmpl-{name}")):
            found = await client.get(path)  # the fake engine tells of none
            assert found.json()["error"]["message"].startswith(f"There is no request {asked!r}")
            assert (await client.post(f"{path}/cancel")).status_code == 200
        assert (await answer).json()["error"]["code"] == "request_cancelled"


async def test_a_prompt_of_several_is_cancelled_by_the_name_that_is_listed(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url) as client:
        body, headers = {"prompt": ["a", "b"]}, {"x-request-id": "pair"}
        answer = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        await engine.wait_until(lambda: len(engine.active) == 2)
        assert (await client.post("/v1/requests/cmpl-pair-2/cancel")).status_code == 404
        response = await client.post("/v1/requests/cmpl-pair-1/cancel")
        assert response.json() == {"id": "cmpl-pair-1", "object": "request.cancel", "status": "cancelled"}
        assert (await answer).json()["error"]["code"] == "request_cancelled", "an answer is whole, or none"
        assert not engine.active
        for name in ("cmpl-pair-0", "cmpl-pair-1"):
            response = await client.post(f"/v1/requests/{name}/cancel")
            assert (response.status_code, response.json()["status"]) == (200, "finished")


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_a_cancel_in_the_same_packet_as_its_request_finds_it(serve: Serve, prompt: object) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    client = await RawH2.connect(server.port)
    body = json.dumps({"prompt": prompt, "stream": True}).encode()
    streams = []
    for path, data, name in (("/v1/completions", body, "mine"), ("/v1/requests/mine/cancel", b"", "cancel")):
        streams.append(client.connection.get_next_available_stream_id())
        head = [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", "test")]
        more = [("content-type", "application/json"), ("x-request-id", name)]
        client.connection.send_headers(streams[-1], [*head, *more])
        client.connection.send_data(streams[-1], data, end_stream=True)
    await client.flush()
    _, data = await client.response(streams[1])
    assert json.loads(data)["status"] == "cancelled"
    _, data = await client.response(streams[0])
    assert b"request_cancelled" in data
    assert not engine.active
    await client.close()


async def test_the_same_id_twice_gets_a_suffix(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url) as client:
        headers = {"x-request-id": "twin"}
        answers = [
            asyncio.create_task(client.post("/v1/chat/completions", content=BODY, headers=headers)) for _ in range(2)
        ]
        await engine.wait_until(lambda: len(engine.active) == 2)
        assert "chatcmpl-twin" in map(shown_id, engine.active)
        engine.release(10)
        ids = {events((await answer).text)[0]["id"] for answer in answers}
        assert len(ids) == 2


async def test_silence_is_filled_with_comments(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine, sse_keep_alive_interval_s=0.01)
    client = await RawH2.connect(server.port)
    stream = await client.request("/v1/chat/completions", BODY)
    await client.read_until(lambda: client.data[stream].count(b": keep-alive\n\n") >= 3)
    assert client.headers[stream][":status"] == "200"  # committed, because the first token took too long
    engine.release(10)
    _, data = await client.response(stream)
    assert events(data.decode())[-1] == "[DONE]"
    await client.close()


async def test_a_reader_that_takes_nothing_is_dropped_in_the_end(serve: Serve) -> None:
    engine = FakeEngine(answer=tuple("x" * 10_000 for _ in range(20)))
    server = await serve(engine, stall_timeout_s=0.05, stall_grace_s=0.01)
    client = await RawH2.connect(server.port, takes_data=False)
    stream = await client.request("/v1/chat/completions", BODY)
    await client.read_until(lambda: stream in client.resets)
    assert client.resets[stream] == 2  # INTERNAL_ERROR: not a complete answer
    assert engine.left_early
    await client.close()
