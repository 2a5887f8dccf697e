"""Answers that are asked for again, of every kind that the journal keeps: whole ones, messages, responses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from novainfer import StepFailedError
from novainfer.fsm.client.quota import DAY_NS
from novainfer.fsm.parsing.formats import Formats
from novainfer.server.keys.counted import Counted
from novainfer.server.keys.quotas import Quotas
from novainfer.server.keys.record import KeyRecord, digest
from novainfer.server.keys.ring import KeyRing
from novainfer.server.keys.store import KeyStore
from novainfer.server.settings import ServerSettings
from tests.server.conftest import Serve, eventually
from tests.server.fakes import ANSWER, FakeEngine
from tests.server.test_journal import Spelled, blocks, last_id
from tests.server.test_tools import PARIS, TOOL

TEXT = "".join(ANSWER)
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
KEYED = {"idempotency-key": "my key 1"}
WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "n": 2},
    COMPLETIONS: {"prompt": [72, 105], "echo": True, "logprobs": 1, "n": 2, "best_of": 3},
    MESSAGES: {"messages": HELLO, "max_tokens": 50},
    RESPONSES: {"input": "Hello"},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


async def post(url: str, path: str, body: Any, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=10.0) as client:
        return await client.post(path, json=body, headers=headers)


async def get(url: str, path: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=10.0) as client:
        return await client.get(path, headers=headers)


async def left(server: Any, engine: FakeEngine, path: str, body: Any, num_tokens: int, **headers: str) -> None:
    """Ask, and leave before the end, when so many tokens of each choice are there."""
    num_seen, known = len(engine.seen), set(server.service.kept)
    asking = asyncio.create_task(post(server.url, path, body, **headers))
    await engine.wait_until(lambda: len(engine.seen) > num_seen)
    _, params, engine_id = engine.seen[-1]
    engine.active[engine_id].permits = num_tokens * params.n
    engine.active[engine_id].changed.set()
    await eventually(lambda: not engine.active[engine_id].permits)
    for name in set(server.service.kept) - known:
        kept = server.service.kept[name]
        await eventually(lambda kept=kept: len(kept.pieces) == num_tokens * params.n)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def ended(server: Any, engine: FakeEngine) -> None:
    server.stop.set()
    await eventually(lambda: engine.is_closed)
    await asyncio.to_thread(server.service.journal.close)


@pytest.mark.parametrize("path_", WHOLE)
async def test_a_request_that_is_repeated_with_its_key_gets_the_answer_that_went_on(
    serve: Serve, path: Path, path_: str
) -> None:
    body = WHOLE[path_]
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path)
    await left(server, engine, path_, body, 2, **KEYED)
    assert engine.active, "it goes on without its client"
    [kept] = server.service.kept.values()
    again = [asyncio.create_task(post(server.url, path_, body, **KEYED)) for _ in range(2)]
    await eventually(lambda: kept._num_readers == 2)
    await ended(server, engine)
    assert {(await one).status_code for one in again} == {503}, "the server stops, which is no end of the answer"

    engine = Spelled()
    server = await serve(engine, journal=path, resume=True)
    found = await post(server.url, path_, body, **KEYED)
    assert found.status_code == 200, found.text
    assert [committed.token_ids for committed in engine.committed[0]] == [[0, 1]] * engine.seen[0][1].n
    assert TEXT in json.loads(found.text, parse_float=str).__repr__().replace("', '", "")
    assert (await post(server.url, path_, body, **KEYED)).content == found.content, "now that it has ended, too"
    assert (await get(server.url, f"{path_}/{found.json()['id']}")).content == found.content, "and by its address"
    assert len(engine.seen) == 1, "it was made once"
    for other, headers in ((body, {"idempotency-key": "another"}), (body | {"temperature": 0.5}, KEYED)):
        assert (await post(server.url, path_, other, **headers)).json()["id"] != found.json()["id"]
    assert len(engine.seen) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path_", WHOLE)
async def test_requests_that_come_at_once_with_one_key_get_one_answer(
    serve: Serve, path: Path, path_: str, stream: bool
) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path)
    body = {**WHOLE[path_], "stream": stream}
    if path_ == COMPLETIONS and stream:
        del body["best_of"]
    asking = [asyncio.create_task(post(server.url, path_, body, **KEYED)) for _ in range(3)]
    await engine.wait_until(lambda: engine.active)
    await asyncio.sleep(0.1)
    assert len(engine.seen) == 1, "the others wait, also while it has no token yet"
    engine.release(40)
    found = [await one for one in asking]
    assert {one.status_code for one in found} == {200}, found[0].text
    assert len({one.content for one in found}) == 1
    assert len(engine.seen) == 1
    assert not server.service.beginning


async def test_of_requests_with_one_key_the_next_one_begins_where_the_first_could_not(serve: Serve, path: Path) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path)
    for path_ in WHOLE:
        num_seen = len(engine.seen)
        body = {**WHOLE[path_], "stream": True}
        body.pop("best_of", None)
        first = asyncio.create_task(post(server.url, path_, body, **KEYED))
        await engine.wait_until(lambda: len(engine.active) == 1)
        second = asyncio.create_task(post(server.url, path_, body, **KEYED))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await engine.wait_until(lambda num=num_seen: len(engine.seen) == num + 2)
        engine.release(40)
        assert (await second).status_code == 200
        await engine.wait_until(lambda: not engine.active)


async def test_what_went_wrong_is_made_anew_and_what_has_no_key_is_not_kept(serve: Serve, path: Path) -> None:
    engine = Spelled()
    server = await serve(engine, journal=path, api_keys=("a", "b"))
    mine, body = {"authorization": "Bearer a"}, {"messages": HELLO}
    engine.fail_at, engine.failure = 2, StepFailedError("a step failed")
    assert (await post(server.url, CHAT, body, **mine, **KEYED)).status_code == 500
    engine.fail_at, engine.overloaded = None, True
    assert (await post(server.url, CHAT, body, **mine, **KEYED)).status_code == 503
    engine.overloaded = False
    found = await post(server.url, CHAT, body, **mine, **KEYED)
    assert found.status_code == 200
    assert found.json()["choices"][0]["message"]["content"] == TEXT
    theirs = await post(server.url, CHAT, body, authorization="Bearer b", **KEYED)
    assert theirs.status_code == 200
    assert len(engine.seen) == 3, "another key's answer is not found"
    for wrong in ("", "a" * 256, "one\ttwo"):
        refused = await post(server.url, CHAT, body, **mine, **{"idempotency-key": wrong})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "Idempotency-Key"
    plain = await post(server.url, CHAT, body, **mine)
    assert (await get(server.url, f"{CHAT}/{plain.json()['id']}", **mine)).status_code == 404


async def test_an_answer_that_a_server_without_resume_ended_is_made_anew(serve: Serve, path: Path) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path)
    for path_, body in WHOLE.items():
        await left(server, engine, path_, body, 1, **KEYED)
    await ended(server, engine)
    engine = Spelled()
    server = await serve(engine, journal=path)
    for path_, body in WHOLE.items():
        assert (await post(server.url, path_, body, **KEYED)).status_code == 200
    assert [committed for seen in engine.committed for committed in seen] == []


async def test_a_stream_that_is_repeated_with_its_key_is_told_from_its_beginning(serve: Serve, path: Path) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path)
    body = {"messages": HELLO, "stream": True}
    await left(server, engine, CHAT, body, 3, **KEYED)
    asking = asyncio.create_task(post(server.url, CHAT, body, **KEYED))
    await eventually(lambda: next(iter(server.service.kept.values()))._num_readers)
    engine.release(20)
    told = blocks((await asking).text)
    assert last_id(told[:1]).endswith(":1")
    assert len(told) == 1 + len(ANSWER) + 1 + 1
    assert len(engine.seen) == 1


# ---- messages ------------------------------------------------------------------------------------------------------


async def test_a_stream_of_a_message_goes_on_behind_its_last_event(serve: Serve, path: Path) -> None:
    """Its calls keep their ids."""
    formats = Formats(tool_calls="hermes", marker_ids={"<tool_call>": 0, "</tool_call>": len(PARIS) - 1})
    tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    body = {"messages": HELLO, "max_tokens": 50, "stream": True, "tools": [tool]}
    engine = Spelled(is_paced=True, answer=PARIS)
    engine.model_info = msgspec.structs.replace(engine.model_info, formats=formats)
    server = await serve(engine, journal=path)
    found = ""

    async def listen() -> None:
        nonlocal found
        async with (
            httpx.AsyncClient(base_url=server.url) as client,
            client.stream("POST", MESSAGES, json=body, headers={"x-request-id": "one"}) as response,
        ):
            async for text in response.aiter_text():
                found += text

    listening = asyncio.create_task(listen())
    await engine.wait_until(lambda: engine.active)
    engine.release(7)
    await eventually(lambda: "input_json_delta" in found)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    first = blocks(found)
    assert last_id(first).startswith("msg-one:")
    await ended(server, engine)

    engine = Spelled(answer=PARIS)
    engine.model_info = msgspec.structs.replace(engine.model_info, formats=formats)
    server = await serve(engine, journal=path, resume=True)
    rest = blocks((await post(server.url, MESSAGES, body, **{"last-event-id": last_id(first)})).text)
    whole = blocks((await get(server.url, f"{MESSAGES}/msg-one")).text)
    assert [*first, *rest] == whole
    assert whole[-1].endswith('{"type":"message_stop"}')
    told = [json.loads(block.split("data: ")[1]) for block in whole]
    assert [one["delta"]["stop_reason"] for one in told if one["type"] == "message_delta"] == ["tool_use"]
    arguments = [one["delta"]["partial_json"] for one in told if one.get("delta", {}).get("type") == "input_json_delta"]
    assert "Paris" in "".join(arguments)
    wrong = await post(server.url, MESSAGES, body, **{"last-event-id": "msg-two:1"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "not_found_error")


# ---- responses in the foreground -----------------------------------------------------------------------------------


async def test_a_stream_of_a_response_goes_on_behind_the_event_that_its_client_names(serve: Serve, path: Path) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path)
    asked = {"input": "Hello", "stream": True}
    await left(server, engine, RESPONSES, asked, 2)
    await left(server, engine, RESPONSES, asked | {"store": False}, 2)
    await engine.wait_until(lambda: len(engine.active) == 1)
    assert engine.left_early, "what is not stored ends with its client"
    [(response_id, _)] = server.service.kept
    await ended(server, engine)

    server = await serve(Spelled(), journal=path, resume=True)
    found = await get(server.url, f"{RESPONSES}/{response_id}?stream=true&starting_after=3")
    told = [json.loads(line[6:]) for line in found.text.split("\n") if line.startswith("data: ")]
    assert told[0]["sequence_number"] == 4
    assert told[-1]["type"] == "response.completed"
    assert told[-1]["response"]["background"] is False
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == TEXT
    again = await post(server.url, RESPONSES, {"input": "And?", "previous_response_id": response_id})
    assert again.status_code == 200


async def test_a_response_that_was_answered_whole_is_kept_over_a_restart_and_one_that_broke_off_is_not(
    serve: Serve, path: Path
) -> None:
    engine = Spelled()
    server = await serve(engine, journal=path)
    whole = (await post(server.url, RESPONSES, {"input": "Hello"})).json()
    engine.is_paced = True
    asking = asyncio.create_task(post(server.url, RESPONSES, {"input": "Hello"}))
    await engine.wait_until(lambda: engine.active)
    await ended(server, engine)
    assert (await asking).status_code == 503
    engine = Spelled()
    server = await serve(engine, journal=path, resume=True)
    assert (await get(server.url, f"{RESPONSES}/{whole['id']}")).json() == whole
    assert len(server.service.store) == 1, "the other one's client has no name for it"
    assert not engine.seen
    behind = await post(server.url, RESPONSES, {"input": "And?", "previous_response_id": whole["id"]})
    assert behind.status_code == 200


async def test_a_response_without_a_reader_is_cancelled_unless_it_is_made_in_the_background(
    serve: Serve, path: Path
) -> None:
    engine = Spelled(is_paced=True)
    server = await serve(engine, journal=path, journal_grace_s=0.05)
    background = await post(server.url, RESPONSES, {"input": "Hello", "background": True})
    await left(server, engine, RESPONSES, {"input": "Hello", "stream": True}, 1)
    await engine.wait_until(lambda: engine.left_early)
    records = server.service.store._all.values()
    await eventually(lambda: any(record.is_over for record in records))
    [left_id] = [record.id for record in records if record.is_over]
    assert left_id != background.json()["id"]
    assert (await get(server.url, f"{RESPONSES}/{left_id}")).json()["status"] == "cancelled"
    assert engine.active
    engine.release(20)


# ---- budgets -------------------------------------------------------------------------------------------------------


async def test_what_a_key_a_user_and_a_conversation_have_used_outlasts_the_server(serve: Serve, path: Path) -> None:
    keys = path.with_name("keys.yaml")
    KeyStore.at(keys).add(KeyRecord(name="alice", hash=digest(b"nova-alice"), tokens_per_day=1500))
    settings = {"journal": path, "keys_file": keys, "user_token_budget": 9999, "session_token_budget": 9999}
    mine, user = {"authorization": "Bearer nova-alice"}, "ü" * 400
    body = {"messages": HELLO, "user": user, "session_id": "chat", "max_tokens": 10}
    used = 7 + len(ANSWER)
    server = await serve(engine := Spelled(), **settings)
    assert (await post(server.url, CHAT, body, **mine)).status_code == 200
    assert (await post(server.url, CHAT, body | {"session_id": "gone"}, **mine)).status_code == 200
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.delete("/v1/sessions/gone", headers=mine)).status_code == 200
    engine.is_paced = True
    await left(server, engine, CHAT, body | {"stream": True}, 2, **mine)
    await ended(server, engine)

    server = await serve(engine := Spelled(), resume=True, **settings)
    await eventually(lambda: not server.service.kept)
    spending, [owner] = server.service.spending, [record.owner for record in KeyStore.at(keys).read()]
    for budgets, times in ((spending.sessions, 2), (spending.users, 3)):
        [(key, purse)] = budgets.items(spending.clock()).items()
        await eventually(lambda purse=purse: not purse.num_live)
        assert purse.used == times * used, "the answer that goes on counts when it has ended, as a whole"
        assert len(key[1]) < 50, "a long name takes no room"
    account = server.service.quotas._accounts[owner]
    assert account.used_today(spending.clock()) == 3 * used
    refused = await post(
        server.url,
        CHAT,
        body | {"messages": [HELLO[0] | {"content": "x" * 1500}], "user": "v", "session_id": "w"},
        **mine,
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert f"Used {3 * used}" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("days_ago", "num_used"), [(0, 100), (1, 0)])
def test_a_day_that_is_over_when_another_server_begins_is_not_counted(path: Path, days_ago: int, num_used: int) -> None:
    keys = path.with_name("keys.yaml")
    KeyStore.at(keys).add(KeyRecord(name="alice", hash=digest(b"nova-alice"), tokens_per_day=1500))
    ring = KeyRing(ServerSettings(keys_file=keys))
    [owner] = ring._by_owner
    now_ns = 20_000 * DAY_NS + 5
    found, kept = Quotas(ring, lambda: now_ns), list[Counted]()
    found.keep = kept.append
    at_ns = now_ns - days_ago * DAY_NS
    found.restore(Counted("key", owner, "", at_ns, at_ns, 100))
    found.admit(owner, 1, 50).settle(7)
    assert [one.num_tokens for one in kept] == [num_used + 7]


@pytest.mark.parametrize("path_", WHOLE)
async def test_a_failure_of_what_is_not_streamed_is_logged_once_and_also_when_nobody_waits(
    serve: Serve, path: Path, caplog: pytest.LogCaptureFixture, path_: str
) -> None:
    engine = Spelled(is_paced=True)
    engine.fail_at = 3
    server = await serve(engine, journal=path)
    engine.is_paced = False
    refused = await post(server.url, path_, WHOLE[path_], **KEYED)
    assert refused.status_code == 500
    assert sum("failed" in line for line in caplog.messages) == 1
    caplog.clear()
    engine.is_paced = True
    await left(server, engine, path_, WHOLE[path_], 2, **KEYED)
    await eventually(lambda: not any(kept._num_readers for kept in server.service.kept.values()))
    engine.release(40)
    await engine.wait_until(lambda: not engine.active)
    await eventually(lambda: not server.service.kept)
    assert sum("failed" in line for line in caplog.messages) == 1


async def test_a_key_for_a_response_that_is_not_stored_is_named_as_ignored(serve: Serve, path: Path) -> None:
    engine = Spelled()
    server = await serve(engine, journal=path)
    body = {"input": "Hello", "store": False}
    found = [await post(server.url, RESPONSES, body, **KEYED) for _ in range(2)]
    assert [one.headers["x-nova-ignored-fields"] for one in found] == ["Idempotency-Key"] * 2
    assert found[0].json()["id"] != found[1].json()["id"]
    assert len(engine.seen) == 2
    stored = await post(server.url, RESPONSES, {"input": "Hello"}, **KEYED)
    assert "x-nova-ignored-fields" not in stored.headers
    strict = await serve(Spelled(), journal=path.with_name("other.db"), strict_fields=True)
    refused = await post(strict.url, RESPONSES, body, **KEYED)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")
