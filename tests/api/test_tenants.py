"""Tenants and priorities of an engine: what a caller says, and what is refused."""

from __future__ import annotations

import asyncio

import pytest

from novainfer import InvalidParameter, SamplingParams, Tenant
from tests.api.helpers import fake_engine, greedy


async def cached(engine, prompt, tenant, **params) -> int:
    deltas = [delta async for delta in engine.generate(prompt, greedy(2, **params), tenant=tenant)]
    return max(delta.num_cached_tokens for delta in deltas)


@pytest.mark.parametrize("shared", [False, True])
async def test_a_tenant_finds_prefixes_of_its_own_unless_all_share_them(shared: bool) -> None:
    async with fake_engine(share_prefix_cache=shared) as engine:
        prompt = "a" * 100
        found = [await cached(engine, prompt, Tenant(name)) for name in ("a", "a", "b", "")]
        assert found == ([0, 96, 96, 96] if shared else [0, 96, 0, 0])
        assert await cached(engine, prompt, Tenant("a"), cache_salt="s") == 0
        assert await cached(engine, prompt, Tenant("a"), cache_salt="s") == 96


async def test_a_priority_needs_the_policy() -> None:
    async with fake_engine() as engine:
        with pytest.raises(InvalidParameter, match="scheduling_policy") as caught:
            engine.add_request("x", SamplingParams(priority=1))
        assert caught.value.param == "priority"


async def test_what_is_urgent_has_its_first_token_first() -> None:
    order: list[int] = []

    async def ask(priority: int) -> None:
        params = greedy(1 if priority else 20, priority=priority)  # the first is at it until the last has come
        order.extend([priority async for _ in engine.generate("x", params)])

    async with fake_engine(max_num_seqs=1, scheduling_policy="priority") as engine:
        await asyncio.gather(*map(ask, [0, 3, 2, -1]))
    assert order[-2:] == [2, 3]
    assert set(order[:-2]) == {0, -1}  # by the end of their answers


@pytest.mark.parametrize("field", [{"priority_wait_s": 0.0}, {"scheduling_policy": "sjf"}, {"share_prefix_cache": 1}])
def test_a_setting_that_cannot_be_is_named(field: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(field))):
        fake_engine(**field)
