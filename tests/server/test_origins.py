"""Web pages of other origins: none may use the server, but those that the operator names."""

from __future__ import annotations

import httpx
import pytest

from novainfer import InvalidParameter
from novainfer.server.app import ROUTES
from novainfer.server.settings import ServerSettings
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine
from tests.server.test_chat import USER

PAGE = "https://chat.example:8443"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
BODY = {"messages": USER}


def allowed(response: httpx.Response) -> dict[str, str]:
    """The headers that concern a page, by the end of their names."""
    start = "access-control-allow-"
    return {name.removeprefix(start): text for name, text in response.headers.items() if name.startswith(start)}


@pytest.mark.parametrize("http2", [False, True], ids=["http/1.1", "h2c"])
async def test_a_page_of_a_named_origin_asks_and_reads(serve: Serve, engine: FakeEngine, http2: bool) -> None:
    server = await serve(engine, allowed_origins=("http://a.example", PAGE), api_keys=("key",))
    async with httpx.AsyncClient(base_url=server.url, http1=not http2, http2=http2, headers={"origin": PAGE}) as client:
        response = await client.options("/v1/chat/completions", headers=ASKS)
        assert (response.status_code, response.content) == (200, b"")
        assert allowed(response) == {
            "origin": PAGE,
            "methods": "DELETE, GET, POST",
            "headers": "authorization,x-stainless-os",
        }
        key = {"authorization": "Bearer key"}
        for stream in (False, True):
            response = await client.post("/v1/chat/completions", json={**BODY, "stream": stream}, headers=key)
            assert response.is_success
            assert allowed(response) == {"origin": PAGE}
            assert response.headers["vary"] == "origin"
            assert "x-request-id" in response.headers["access-control-expose-headers"]
        response = await client.post("/v1/chat/completions", json=BODY)
        assert (response.status_code, allowed(response)) == (401, {"origin": PAGE})  # it may read why
        assert allowed(await client.get("/nothing", headers=key)) == {"origin": PAGE}


async def test_an_origin_is_the_same_in_capitals(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine, allowed_origins=(PAGE,))
    async with httpx.AsyncClient(base_url=server.url, headers={"origin": PAGE.upper()}) as client:
        assert allowed(await client.get("/v1/models")) == {"origin": PAGE.upper()}
        assert allowed(await client.options("/v1/models", headers=ASKS))["origin"] == PAGE.upper()


async def test_a_page_may_use_every_endpoint_and_read_what_its_budgets_are(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine, allowed_origins=(PAGE,), session_token_budget=1000, user_token_budget=1000)
    async with httpx.AsyncClient(base_url=server.url, headers={"origin": PAGE}) as client:
        asks = {**ASKS, "access-control-request-method": "DELETE"}
        methods = allowed(await client.options("/v1/responses/resp_1", headers=asks))["methods"]
        assert {endpoint.method for endpoint in ROUTES} == set(methods.split(", "))
        response = await client.post("/v1/chat/completions", json={**BODY, "session_id": "s", "user": "u"})
    read = set(response.headers["access-control-expose-headers"].split(", "))
    assert len(limits := {name for name in response.headers if name.startswith("x-ratelimit-")}) == 4
    assert limits <= read


async def test_a_page_of_another_origin_gets_nothing(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine, allowed_origins=(PAGE,))
    for origin in ("https://evil.example", f"{PAGE}.evil.example", "null", "https://chat.example", ""):
        async with httpx.AsyncClient(base_url=server.url, headers={"origin": origin}) as client:
            response = await client.options("/v1/chat/completions", headers=ASKS)
            assert (response.status_code, allowed(response)) == (405, {})
            response = await client.post("/v1/chat/completions", json=BODY)
            assert allowed(response) == {}
            assert response.headers["vary"] == "origin"


async def test_without_the_flag_nothing_is_said_of_origins(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url, headers={"origin": PAGE}) as client:
        response = await client.options("/v1/chat/completions", headers=ASKS)
        assert (response.status_code, allowed(response)) == (405, {})
        response = await client.post("/v1/chat/completions", json=BODY)
        assert allowed(response) == {}
        assert "vary" not in response.headers


async def test_all_origins_may_be_allowed(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine, allowed_origins=("*",))
    async with httpx.AsyncClient(base_url=server.url, headers={"origin": "null"}) as client:
        assert allowed(await client.options("/v1/completions", headers=ASKS))["origin"] == "*"
        odd = {**ASKS, "access-control-request-headers": "x" * 2000}
        assert allowed(await client.options("/v1/completions", headers=odd))["headers"] == "authorization, content-type"
        assert allowed(await client.post("/v1/chat/completions", json=BODY)) == {"origin": "*"}
        assert (await client.options("/v1/completions")).status_code == 405  # no browser asks so
    assert len(engine.seen) == 1


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/page", "https://", "", "https://a, https://b"]
)
def test_what_is_no_origin_is_told_at_the_start(origin: str) -> None:
    with pytest.raises(InvalidParameter) as found:
        ServerSettings(allowed_origins=(origin,))
    assert found.value.param == "allowed_origins"
