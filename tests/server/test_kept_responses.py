"""Responses that are kept: continued, made in the background, followed, cancelled, deleted, dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItemList

from novainfer import EngineDraining
from novainfer.server.serve import Server
from tests.leftovers import other_tasks
from tests.server.conftest import Serve, eventually
from tests.server.fakes import FakeEngine, FakeModelInfo
from tests.server.openai_types import checked
from tests.server.test_responses import FORMATS, PARIS, TOOL, created, events_of, let


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.model_info = FakeModelInfo(formats=FORMATS, max_model_len=4096)
    return engine


@pytest.fixture
async def web(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{server.url}/v1", timeout=10, http1=False, http2=True) as client:
        yield client


async def get(web: httpx.AsyncClient, response_id: str) -> Response:
    reply = await web.get(f"/responses/{response_id}")
    assert reply.status_code == 200, reply.text
    return checked(Response, reply.content)


async def ended(web: httpx.AsyncClient, response_id: str) -> Response:
    async with asyncio.timeout(10):
        while (found := await get(web, response_id)).status in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return found


async def says(web: httpx.AsyncClient, response_id: str, text: str) -> Response:
    async with asyncio.timeout(10):
        while (found := await get(web, response_id)).output_text != text:  # noqa: ASYNC110
            await asyncio.sleep(0)
    return found


async def is_gone(web: httpx.AsyncClient, response_id: str) -> bool:
    reply = await web.get(f"/responses/{response_id}")
    if reply.status_code == 200:
        return False
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "response_not_found")
    assert "is kept no longer" in reply.json()["error"]["message"]
    return True


def seen(engine: FakeEngine) -> list[str]:
    return [message["content"] for message in engine.seen[-1][0].messages]


# ---- conversations ---------------------------------------------------------------------------------------------------


async def test_a_response_continues_another_one(web: httpx.AsyncClient, engine: FakeEngine):
    first = await created(web, input="one", instructions="I")
    second = await created(web, input="two", previous_response_id=first.id)
    assert seen(engine) == ["one", "Hello, world!", "two"], "instructions are those of one response"
    assert second.previous_response_id == first.id
    await created(web, input="three", previous_response_id=second.id, instructions="J")
    assert seen(engine) == ["J", "one", "Hello, world!", "two", "Hello, world!", "three"]
    await created(web, input="other", previous_response_id=first.id)
    assert seen(engine) == ["one", "Hello, world!", "other"]


async def test_calls_and_thoughts_are_continued(web: httpx.AsyncClient, engine: FakeEngine):
    engine.answer = ("<think>", "Hm", "</think>", "I look", *PARIS)
    first = await created(web, tools=[TOOL])
    call = first.output[-1]
    assert call.type == "function_call"
    said = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    await created(web, input=said, previous_response_id=first.id, tools=[TOOL])
    _, turn, tool = engine.seen[-1][0].messages
    assert (turn["reasoning_content"], turn["content"]) == ("Hm", "I look")
    assert turn["tool_calls"][0]["id"] == tool["tool_call_id"] == call.call_id
    assert tool["content"] == "sun"


async def test_a_conversation_outlives_its_beginning(web: httpx.AsyncClient, engine: FakeEngine):
    first = await created(web, input="one")
    second = await created(web, input="two", previous_response_id=first.id)
    assert (await web.delete(f"/responses/{first.id}")).json() == {
        "id": first.id,
        "object": "response",
        "deleted": True,
    }
    assert await is_gone(web, first.id)
    await created(web, input="three", previous_response_id=second.id)
    assert seen(engine)[:4] == ["one", "Hello, world!", "two", "Hello, world!"]


async def test_what_is_not_kept_cannot_be_continued(web: httpx.AsyncClient, engine: FakeEngine):
    reply = await web.post("/responses", json={"input": "a", "previous_response_id": "resp_1"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (
        *(400, "previous_response_not_found"),
        "previous_response_id",
    )
    assert error["message"].startswith("Previous response with id 'resp_1' not found")
    engine.is_paced = True
    running = await created(web, background=True)
    reply = await web.post("/responses", json={"input": "a", "previous_response_id": running.id})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "previous_response_id")
    assert "still being made" in reply.json()["error"]["message"]


async def test_an_item_is_referred_to_by_its_id(web: httpx.AsyncClient, engine: FakeEngine):
    first = await created(web)
    [message] = first.output
    items: list[Any] = [{"type": "item_reference", "id": message.id}, {"role": "user", "content": "And?"}]
    await created(web, input=items)
    assert seen(engine) == ["Hello, world!", "And?"]
    await web.delete(f"/responses/{first.id}")
    gone = await web.post("/responses", json={"input": items})
    assert (gone.status_code, gone.json()["error"]["param"]) == (400, "input[0].id")


async def test_input_items_are_pages_of_all_that_was_given(web: httpx.AsyncClient, engine: FakeEngine):
    engine.answer = ("<think>", "Hm", "</think>", "I look", *PARIS)
    first = await created(web, input=[{"role": "developer", "content": "D"}, {"role": "user", "content": "U"}])
    second = await created(
        web,
        input=[
            {"type": "function_call_output", "call_id": "c", "output": "sun"},
            {"role": "assistant", "content": "A"},
        ],
        previous_response_id=first.id,
    )

    async def page(**query: Any) -> ResponseItemList:
        reply = await web.get(f"/responses/{second.id}/input_items", params=query)
        assert reply.status_code == 200, reply.text
        return checked(ResponseItemList, reply.content)

    all_items = await page(order="asc")
    kinds = [(item.type, getattr(item, "role", None)) for item in all_items.data]
    assert kinds == [
        *(("message", "developer"), ("message", "user"), ("reasoning", None), ("message", "assistant")),
        *(("function_call_output", None), ("message", "assistant")),
    ]
    ids = [item.id for item in all_items.data]
    assert (all_items.first_id, all_items.last_id, all_items.has_more) == (ids[0], ids[-1], False)
    assert [item.id for item in (await page()).data] == ids[::-1]
    two = await page(limit=2)
    assert ([item.id for item in two.data], two.has_more) == (ids[:-3:-1], True)
    rest = await page(limit=4, after=two.last_id)
    assert ([item.id for item in rest.data], rest.has_more) == (ids[-3::-1], False)
    for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")):
        reply = await web.get(f"/responses/{second.id}/input_items", params=query)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_openais_client_pages_through_input_items(server: Server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as ai:
        items: Any = [{"role": "user", "content": str(i)} for i in range(45)]
        reply = await ai.responses.create(model="fake", input=items)
        texts = [item.content[0].text async for item in ai.responses.input_items.list(reply.id)]  # type: ignore[union-attr]
    assert texts == [str(i) for i in reversed(range(45))]


# ---- in the background -----------------------------------------------------------------------------------------------


async def test_one_in_the_background_is_there_at_once_and_goes_on_alone(web: httpx.AsyncClient, engine: FakeEngine):
    engine.is_paced = True
    async with httpx.AsyncClient(base_url=web.base_url) as other:
        reply = await created(other, background=True)
    assert (reply.status, reply.output, reply.background, reply.usage) == ("queued", [], True, None)
    assert (await get(web, reply.id)).status == "queued"
    engine.release(2)
    await engine.wait_until(lambda: engine.active)
    now = await says(web, reply.id, "Hello,")
    assert now.status == now.output[0].status == "in_progress"
    engine.release(3)
    done = await ended(web, reply.id)
    assert (done.status, done.output_text) == ("completed", "Hello, world!")


async def test_what_fails_in_the_background_says_so(web: httpx.AsyncClient, engine: FakeEngine):
    engine.fail_at = 1
    failed = await ended(web, (await created(web, background=True)).id)
    assert (failed.status, failed.output_text) == ("failed", "Hello")
    assert failed.error is not None
    assert failed.error.code == "server_error"
    assert "secret" not in failed.error.message


async def follow(web: httpx.AsyncClient, response_id: str, starting_after: int | None = None) -> str:
    query: dict[str, Any] = {"stream": "true"}
    if starting_after is not None:
        query["starting_after"] = starting_after
    reply = await web.get(f"/responses/{response_id}", params=query)
    assert reply.status_code == 200, reply.text
    return reply.text


async def test_its_events_come_again_from_any_one_on(web: httpx.AsyncClient):
    reply = await web.post("/responses", json={"input": "a", "background": True, "stream": True})
    events = events_of(reply.text)
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.response.status for event in events[:3]] == ["queued", "queued", "in_progress"]
    response_id = events[0].response.id
    assert await follow(web, response_id) == reply.text
    blocks = reply.text.split("\n\n")[:-1]
    for number in range(len(blocks)):
        rest = await follow(web, response_id, number)
        assert rest.split("\n\n")[:-1] == blocks[number + 1 :]
    assert await follow(web, response_id, len(blocks) - 1) == ""


async def test_who_comes_back_gets_the_rest_while_it_is_written(web: httpx.AsyncClient, engine: FakeEngine):
    engine.is_paced = True
    reply = await created(web, background=True)
    engine.release(2)
    readers = [asyncio.create_task(follow(web, reply.id, after)) for after in (None, 0, 4, 7)]
    await eventually(lambda: all(not reader.done() for reader in readers))
    for _ in range(3):
        engine.release(1)
        await asyncio.sleep(0)
    texts = await asyncio.gather(*readers)
    whole = texts[0].split("\n\n")
    events_of(texts[0])
    assert [text.split("\n\n") for text in texts[1:]] == [whole[after + 1 :] for after in (0, 4, 7)]
    assert texts[0] == await follow(web, reply.id)


async def test_openais_client_resumes_a_stream(server: Server, engine: FakeEngine):
    engine.is_paced = True
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
        stream = await ai.responses.create(model="fake", input="a", background=True, stream=True)
        engine.release(2)
        response_id, text, last = "", "", -1
        async for event in stream:
            last = event.sequence_number
            if event.type == "response.created":
                response_id = event.response.id
            elif event.type == "response.output_text.delta":
                text += event.delta
                if text == "Hello,":
                    break
        await stream.close()
        await asyncio.sleep(0)
        engine.release(3)
        resumed = await ai.responses.retrieve(response_id, stream=True, starting_after=last)
        numbers = []
        async for event in resumed:
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                text += event.delta
        assert text == "Hello, world!"
        assert numbers == list(range(last + 1, last + 1 + len(numbers)))
        async with ai.responses.stream(response_id=response_id, starting_after=last) as helped:
            assert (await helped.get_final_response()).output_text == text


async def test_one_in_the_foreground_is_followed_too(web: httpx.AsyncClient):
    reply = await web.post("/responses", json={"input": "a", "stream": True})
    [created_event, *_] = events_of(reply.text)
    assert await follow(web, created_event.response.id) == reply.text
    whole = await created(web)
    for query, param in (
        ({"stream": "true"}, "stream"),
        ({"stream": "maybe"}, "stream"),
        ({"starting_after": 1}, "starting_after"),
        ({"include": "x"}, "include"),
    ):
        refused = await web.get(f"/responses/{whole.id}", params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    refused = await web.get(f"/responses/{created_event.response.id}", params={"stream": "true", "starting_after": "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")
    last = reply.text.count("event: ") - 1
    assert await follow(web, created_event.response.id, last) == ""  # it has all there is
    refused = await web.get(
        f"/responses/{created_event.response.id}", params={"stream": "true", "starting_after": last + 1}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")
    assert f"at most {last}, not {last + 1}" in refused.json()["error"]["message"]


@pytest.mark.parametrize("when", ["queued", "running"])
async def test_cancelling_ends_it_and_its_streams(
    web: httpx.AsyncClient, engine: FakeEngine, when: str, server: Server
):
    engine.is_paced = True
    reply = await created(web, background=True)
    reader = asyncio.create_task(follow(web, reply.id))
    if when == "running":
        engine.release(2)
        await says(web, reply.id, "Hello,")
    cancelled = checked(Response, (await web.post(f"/responses/{reply.id}/cancel")).content)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hello," if when == "running" else "")
    events = events_of(await reader)
    assert (events[-1].type, events[-1].response) == ("response.incomplete", cancelled)
    again = checked(Response, (await web.post(f"/responses/{reply.id}/cancel")).content)
    assert again == cancelled == await get(web, reply.id)
    assert not engine.active
    assert len(engine.left_early) == 1
    assert not server.service.live.num_live
    assert not server.service.background


async def test_a_request_that_is_cancelled_cancels_its_response(web: httpx.AsyncClient, engine: FakeEngine):
    engine.is_paced = True
    reply = await created(web, background=True)
    found = (await web.post(f"/requests/{reply.id}/cancel")).json()
    assert found["status"] == "cancelled"
    assert (await ended(web, reply.id)).status == "cancelled"


async def test_what_has_ended_and_what_is_not_in_the_background_is_not_cancelled(web: httpx.AsyncClient):
    done = await ended(web, (await created(web, background=True)).id)
    assert checked(Response, (await web.post(f"/responses/{done.id}/cancel")).content) == done
    whole = await created(web)
    refused = await web.post(f"/responses/{whole.id}/cancel")
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "background" in refused.json()["error"]["message"]
    for method, path in (("POST", "/cancel"), ("DELETE", ""), ("GET", "/input_items")):
        gone = await web.request(method, f"/responses/resp_1{path}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")


async def test_deleting_one_that_is_made_ends_it(web: httpx.AsyncClient, engine: FakeEngine, server: Server):
    engine.is_paced = True
    reply = await created(web, background=True)
    reader = asyncio.create_task(follow(web, reply.id))
    await eventually(lambda: any(record._changed for record in server.service.store._all.values()))
    assert (await web.delete(f"/responses/{reply.id}")).status_code == 200
    assert await is_gone(web, reply.id)
    assert not engine.active
    last = events_of(await reader)[-1]
    assert last.type in ("error", "response.incomplete")
    assert server.service.store.num_bytes == 0
    letting = asyncio.create_task(let(engine, 1))
    async with web.stream("POST", "/responses", json={"input": "a", "stream": True}) as stream:
        await letting
        [record] = server.service.store._all.values()
        assert (await web.delete(f"/responses/{record.id}")).status_code == 200
        engine.release(4)
        events = events_of((await stream.aread()).decode())
        assert events[-1].type == "response.completed", "its client has it all the same"
    assert server.service.store.num_bytes == 0


async def test_a_reader_that_does_not_read_holds_nothing_up(web: httpx.AsyncClient, engine: FakeEngine, server: Server):
    engine.answer = ("x" * 50_000,) * 40
    engine.is_paced = True
    reply = await created(web, background=True)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"GET /v1/responses/{reply.id}?stream=true HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    await eventually(lambda: any(record._changed for record in server.service.store._all.values()))
    engine.release(40)
    done = await ended(web, reply.id)
    assert (done.status, len(done.output_text)) == ("completed", 2_000_000)
    writer.transport.abort()


async def test_background_responses_count_as_their_clients_requests(serve: Serve, engine: FakeEngine):
    engine.is_paced = True
    server = await serve(engine, max_client_reqs=2)
    async with httpx.AsyncClient(base_url=f"{server.url}/v1") as web:
        for _ in range(2):
            await created(web, background=True)
        refused = await web.post("/responses", json={"input": "a", "background": True})
        assert refused.status_code == 429
        assert len(server.service.store) == 2
        engine.is_paced = False
        engine.release(5)
        await eventually(lambda: not server.service.background)
        await created(web)


# ---- whose they are, and for how long --------------------------------------------------------------------------------


async def test_each_key_sees_its_own_only(serve: Serve, engine: FakeEngine):
    server = await serve(engine, api_keys=("one", "two"), admin_key="admin")

    def client(key: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"{server.url}/v1", headers={"authorization": f"Bearer {key}"})

    async with client("one") as one, client("two") as two, client("admin") as admin:
        reply = await created(one)
        assert await is_gone(two, reply.id)
        for method, path in (("POST", "/cancel"), ("DELETE", ""), ("GET", "/input_items")):
            assert (await two.request(method, f"/responses/{reply.id}{path}")).status_code == 404
        body: dict[str, Any] = {"input": "a", "previous_response_id": reply.id}
        assert (await two.post("/responses", json=body)).status_code == 400
        body = {"input": [{"type": "item_reference", "id": reply.output[0].id}]}
        assert (await two.post("/responses", json=body)).status_code == 400
        assert (await get(admin, reply.id)).id == (await get(one, reply.id)).id == reply.id


async def test_the_one_that_was_not_asked_for_longest_makes_room(serve: Serve, engine: FakeEngine):
    server = await serve(engine, max_stored_responses=3)
    async with httpx.AsyncClient(base_url=f"{server.url}/v1") as web:
        kept = [(await created(web)).id for _ in range(3)]
        await get(web, kept[0])
        last = await created(web, previous_response_id=kept[2])
        assert [await is_gone(web, one) for one in (*kept, last.id)] == [False, True, False, False]
        engine.is_paced = True
        running = [(await created(web, background=True)).id for _ in range(3)]
        full = await web.post("/responses", json={"input": "a"})
        assert (full.status_code, full.json()["error"]["code"]) == (503, "store_full")
        assert [await is_gone(web, one) for one in running] == [False] * 3
        assert len(engine.active) == 3
        engine.is_paced = False
        engine.release(5)
        assert (await created(web, store=False)).status == "completed"


async def test_one_that_grows_beyond_all_room_ends_where_nothing_else_has_it(serve: Serve, engine: FakeEngine):
    engine.answer = ("x" * 10_000,) * 10
    server = await serve(engine, max_stored_bytes=50_000)
    async with httpx.AsyncClient(base_url=f"{server.url}/v1") as web:
        reply = await web.post("/responses", json={"input": "a", "stream": True})
        *_, last = events = events_of(reply.text)
        assert last.type == "response.completed"
        assert last.response.to_dict()["store"] is False
        assert await is_gone(web, events[0].response.id)
        assert server.service.store.num_bytes == 0
        failed = await ended(web, (await created(web, background=True)).id)
        assert (failed.status, failed.error and failed.error.code) == ("failed", "server_error")
        assert failed.error is not None
        assert "can be kept" in failed.error.message
        assert not engine.active
        await created(web)
        assert await is_gone(web, failed.id), "it has made room"


async def test_one_for_which_there_is_no_room_at_all_leaves_nothing_running(serve: Serve, engine: FakeEngine):
    engine.is_paced = True
    server = await serve(engine, max_stored_bytes=3000)
    async with httpx.AsyncClient(base_url=f"{server.url}/v1") as web:
        reply = await created(web, background=True)
        assert (await ended(web, reply.id)).status == "failed", "its first events are too much"
        assert not engine.active
        assert not server.service.live.num_live


async def test_a_reader_of_one_that_is_dropped_is_told(serve: Serve, engine: FakeEngine):
    server = await serve(engine, max_stored_responses=1)
    async with httpx.AsyncClient(base_url=f"{server.url}/v1") as web:
        engine.is_paced = True
        reply = await created(web, background=True)
        reader = asyncio.create_task(follow(web, reply.id))
        [record] = server.service.store._all.values()
        await eventually(lambda: record._changed)
        record.drop()  # as it is when it must make room
        events = events_of(await reader)
        assert (events[-1].type, events[-1].code) == ("error", "response_not_found")


# ---- the end of the server -------------------------------------------------------------------------------------------


async def test_a_server_that_stops_lets_them_finish(serve: Serve, engine: FakeEngine):
    engine.is_paced = True
    server = await serve(engine, shutdown_timeout_s=10.0)
    async with httpx.AsyncClient(base_url=f"{server.url}/v1") as web:
        reply = await created(web, background=True)
        reader = asyncio.create_task(follow(web, reply.id))
        await eventually(lambda: any(record._changed for record in server.service.store._all.values()))
        assert server.service.live.num_live == 1, "as the line that says what is waited for counts them"
        server.stop.set()
        await eventually(lambda: engine.is_draining)
        refused = await web.post("/responses", json={"input": "a", "background": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, EngineDraining.code)
        assert (await get(web, reply.id)).status == "queued"
        engine.release(5)
        assert events_of(await reader)[-1].type == "response.completed"


async def test_a_server_that_must_stop_ends_them_and_says_so(serve: Serve, engine: FakeEngine):
    engine.is_paced = True
    server = await serve(engine)
    num_tasks = len(other_tasks())
    async with httpx.AsyncClient(base_url=f"{server.url}/v1") as web:
        reply = await created(web, background=True)
        engine.release(1)
        reader = asyncio.create_task(follow(web, reply.id))
        await eventually(lambda: any(record._changed for record in server.service.store._all.values()))
        server.stop.set()
        last = events_of(await reader)[-1]
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert "shutting down" in last.response.error.message
    await eventually(lambda: not server.service.background)
    await eventually(lambda: len(other_tasks()) <= num_tasks)


async def test_what_does_not_end_by_itself_is_ended(server: Server):
    task: asyncio.Task[Any] = asyncio.create_task(asyncio.Event().wait())
    server.service.background.add(task)
    await server.service.end_background(0.0)
    assert task.cancelled()
    server.service.background.clear()
