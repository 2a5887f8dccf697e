"""Conversations over HTTP: what is kept, whose it is, and what it may use; with a real engine over a fake device."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

import httpx
import pytest

from novainfer import Engine, EngineConfig
from novainfer.fsm.client.budget import Budgets, Hold, Purse, Spent
from novainfer.fsm.client.quota import DAY_NS
from novainfer.models import Models
from tests.api.helpers import fake_engine
from tests.server.conftest import TIMEOUT_S, running

ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in ("alice", "bob"))
PROMPT = [97] * 64  # tokens, which are estimated exactly


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    settings = {"api_keys": ("alice", "bob"), "session_token_budget": 200, "user_token_budget": 100}
    async with (
        running(fake_engine(session_ttl_s=60.0), **settings) as server,
        httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client,
    ):
        yield client


async def complete(client, headers=ALICE, **body) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, **body}, headers=headers)


async def listed(client, headers=ALICE) -> dict[str, dict]:
    return {one["id"]: one for one in (await client.get("/v1/sessions", headers=headers)).json()["data"]}


async def test_a_session_is_kept_listed_found_and_ended_by_its_own_key_only(client) -> None:
    first = await complete(client, session_id="chat")
    assert first.status_code == 200
    found = (await listed(client))["chat"]
    assert (found["state"], found["where"], found["tokens_kept"]) == ("kept", "device", 64)
    assert (found["tokens_used"], found["token_budget"]) == (68, 200)
    assert 0 < found["ttl_left_s"] <= 60
    assert await listed(client, BOB) == {}
    assert (await client.delete("/v1/sessions/chat", headers=BOB)).status_code == 404
    assert (await complete(client, headers=BOB, session_id="chat")).status_code == 200
    assert (await client.delete("/v1/sessions/chat", headers=BOB)).json() == {
        "id": "chat",
        "object": "session",
        "deleted": True,
    }
    assert list(await listed(client)) == ["chat"]
    assert (await client.delete("/v1/sessions/chat", headers=ALICE)).status_code == 200
    again = await client.delete("/v1/sessions/chat", headers=ALICE)
    error = again.json()["error"]
    assert (again.status_code, error["type"], error["code"]) == (404, "not_found_error", "session_not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
async def test_every_endpoint_takes_it_in_the_body_or_in_a_header(client, path, body) -> None:
    limit = {"max_output_tokens": 4} if path == "/v1/responses" else {"max_tokens": 4}
    for name, more in (("b", {"session_id": "b"}), ("h", {})):
        headers = {**ALICE, "x-session-id": "h"}
        answer = await client.post(path, json={**body, **limit, **more}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert name in await listed(client)
    wrong = await client.post(path, json={**body, **limit}, headers={**ALICE, "x-session-id": "two words"})
    assert wrong.status_code == 400
    assert "x-session-id must be 1 to 128 printable ASCII" in wrong.text


async def test_a_session_that_has_spent_its_budget_is_refused_for_good(client) -> None:
    for left in (132, 64):
        answer = await complete(client, session_id="chat")
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-session-tokens"] == "200"
        assert answer.headers["x-ratelimit-remaining-session-tokens"] == str(left)
    refused = await complete(client, session_id="chat")
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "tokens")
    assert "session 'chat' has no room for this request: Limit 200, Used 136, Requested 68." in error["message"]
    assert "retry-after" not in refused.headers
    assert refused.headers["x-should-retry"] == "false"
    assert (await complete(client, session_id="other")).status_code == 200
    assert (await complete(client, headers=BOB, session_id="chat")).status_code == 200
    assert (await client.delete("/v1/sessions/chat", headers=ALICE)).status_code == 200
    assert (await complete(client, session_id="chat")).status_code == 200


async def test_sessions_are_listed_in_pages_by_their_ids(client) -> None:
    for name in ("b", "a", "c"):
        assert (await complete(client, session_id=name)).status_code == 200

    async def page(**query: object) -> tuple[list[str], str | None, str | None, bool]:
        found = (await client.get("/v1/sessions", headers=ALICE, params=query)).json()
        return [one["id"] for one in found["data"]], found["first_id"], found["last_id"], found["has_more"]

    assert await page() == (["a", "b", "c"], "a", "c", False)
    assert await page(limit=2) == (["a", "b"], "a", "b", True)
    assert await page(limit=2, after="b") == (["c"], "c", "c", False)
    assert await page(after="aa", limit=1) == (["b"], "b", "b", True), "also behind one that has ended meanwhile"
    assert await page(after="c") == ([], None, None, False)
    wrong = await client.get("/v1/sessions", headers=ALICE, params={"limit": 0})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "limit")


async def test_a_user_of_a_key_that_has_spent_his_budget_comes_again_tomorrow(client) -> None:
    assert (await complete(client, user="u")).status_code == 200
    refused = await complete(client, user="u")
    assert refused.status_code == 429
    assert "user 'u' has no room for this request: Limit 100, Used 68, Requested 68." in refused.text
    assert 0 < int(refused.headers["retry-after"]) <= 86_400
    assert (await complete(client, user="v")).status_code == 200
    assert (await complete(client, headers=BOB, user="u")).status_code == 200


async def test_of_several_models_each_tells_what_it_keeps_and_all_of_them_end_it() -> None:
    def make(config: EngineConfig) -> Engine:
        return fake_engine(session_ttl_s=60.0, served_model_name=config.served_model_name)

    models = Models({name: EngineConfig(model=name) for name in ("small", "large")}, make)
    async with (
        running(models, api_keys=("alice", "bob"), session_token_budget=200) as server,
        httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client,
    ):
        for model in ("small", "large"):
            assert (await complete(client, session_id="chat", model=model)).status_code == 200
        found = (await client.get("/v1/sessions", headers=ALICE)).json()["data"]
        assert [(one["id"], one["model"], one["tokens_kept"]) for one in found] == [
            ("chat", "small", 64),
            ("chat", "large", 64),
        ]
        assert {one["tokens_used"] for one in found} == {136}  # one budget, whichever model it is spent on
        paged = (await client.get("/v1/sessions", headers=ALICE, params={"limit": 1})).json()
        assert (len(paged["data"]), paged["has_more"]) == (2, False), "a page ends with a whole conversation"
        of_one = await client.get("/v1/sessions", headers=ALICE, params={"model": "large"})
        assert [one["model"] for one in of_one.json()["data"]] == ["large"]
        assert await listed(client, BOB) == {}
        assert (await client.delete("/v1/sessions/chat", headers=BOB)).status_code == 404
        assert (await client.delete("/v1/sessions/chat", headers=ALICE)).status_code == 200
        assert await listed(client) == {}


def admitted(budgets: Budgets, name: str, num_tokens: int, now_ns: int) -> Hold:
    hold = budgets.admit(name, num_tokens, now_ns)
    assert isinstance(hold, Hold)
    return hold


def test_budgets_reserve_settle_and_forget() -> None:
    budgets = Budgets(100, keep_ns=10, num_max=2, is_daily=True)
    first = admitted(budgets, "a", 1000, 0)
    assert first.num_tokens == 100  # nothing is used: one that asks for more is let in, and owes
    assert isinstance(budgets.admit("a", 1, 0), Spent)
    budgets.settle("a", first, 30, 1)
    second = admitted(budgets, "a", 70, 2)
    found = budgets.admit("a", 1, 3)
    assert found == Spent(most=100, used=100, wanted=1, wait_ns=None)  # what is reserved may come back
    budgets.settle("a", second, 70, 4)
    found = budgets.admit("a", 1, 5)
    assert isinstance(found, Spent)
    assert found.wait_ns == DAY_NS - 5
    assert admitted(budgets, "a", 100, DAY_NS).num_tokens == 100
    for name in ("b", "c", "d"):
        budgets.settle(name, admitted(budgets, name, 1, DAY_NS), 1, DAY_NS)
    assert set(budgets.items(DAY_NS + 1)) == {"a", "d"}  # what is here stays, and the latest
    assert set(budgets.items(DAY_NS + 10)) == {"a"}


def test_what_ends_behind_the_end_of_its_conversation_is_nothing_to_the_next_one_of_that_name() -> None:
    budgets = Budgets(100, keep_ns=10, num_max=2, is_daily=False)
    old = admitted(budgets, "a", 10, 0)
    assert budgets.end("a")
    budgets.settle("a", old, 10, 1)
    assert budgets.find("a", 1) is None
    for _ in range(2):
        old = admitted(budgets, "a", 10, 2)
        assert budgets.end("a")
        new = admitted(budgets, "a", 80, 3)
        budgets.settle("a", old, 10, 4)
        budgets.settle("a", new, 50, 5)
        purse = budgets.find("a", 5)
        assert purse is not None
        assert (purse.used, purse.reserved, purse.num_live) == (50, 0, 0)
        assert budgets.end("a")


def test_a_request_looks_at_few_of_very_many_budgets() -> None:
    budgets = Budgets(100, keep_ns=10**9, num_max=1000, is_daily=False)
    looked_at = 0

    class Counted(Purse):
        @property
        def num_live(self) -> int:
            nonlocal looked_at
            looked_at += 1
            return 0

        @num_live.setter
        def num_live(self, value: int) -> None: ...

    for at in range(500):
        budgets._purses[at] = Counted(0)
    for at in range(500, 510):
        budgets.admit(at, 1, 1)
    assert looked_at <= 10 * 2


async def test_a_session_of_any_name_can_be_ended(client) -> None:
    for name in ("a/b", "a%2Fb", "?", "#", "a;b=c"):
        assert (await complete(client, session_id=name)).status_code == 200
        assert (await client.delete(f"/v1/sessions/{quote(name, safe='')}", headers=ALICE)).json()["id"] == name
