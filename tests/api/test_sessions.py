"""Conversations of an engine: what is found again, what is listed, and how one is ended."""

from __future__ import annotations

import pytest

from novainfer import InvalidParameter, SamplingParams, Tenant
from tests.api.helpers import fake_engine, greedy


async def ask(engine, session_id: str, tenant: Tenant) -> None:
    async for _ in engine.generate("a" * 100, greedy(2, session_id=session_id), tenant=tenant):
        pass


async def test_conversations_are_listed_by_tenant_and_ended_by_name() -> None:
    one, other = Tenant("one"), Tenant("other")
    async with fake_engine(session_ttl_s=60.0) as engine:
        await ask(engine, "chat", one)
        await ask(engine, "chat", other)
        assert len(engine.sessions()) == 2
        (found,) = engine.sessions(one)
        assert (found.session_id, found.tenant, found.state) == ("chat", "one", "KEPT")
        assert found.num_tokens == found.num_on_device == 96
        assert found.ttl_left_s is not None
        assert 0 < found.ttl_left_s <= 60
        assert engine.end_session("chat", other)
        assert not engine.end_session("chat", other)
        assert not engine.end_session("chat", Tenant("stranger"))
        assert [record.tenant for record in engine.sessions()] == ["one"]


@pytest.mark.parametrize("name", ["", "two words", "ü", "x" * 129, "line\n"])
def test_a_name_that_no_header_can_carry_is_refused(name: str) -> None:
    with pytest.raises(InvalidParameter, match="session_id must be 1 to 128 printable ASCII") as caught:
        SamplingParams(session_id=name)
    assert caught.value.param == "session_id"
