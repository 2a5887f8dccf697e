"""Online: many users at once, each with a stream of its own."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from novainfer import Engine, EngineConfig, RequestCancelled, SamplingParams
from tests.acceptance.reference import Reference, exactly, read, tokens_of

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(max_num_seqs=64, dtype="float32")
STORIES = ["Once upon a time, there was a", "Tell me a story about a", "The", "I have a"]
PROMPTS = [f"{STORIES[i % 4]} {name}" for i, name in enumerate(["cat", "dog", "bird", "king", "river"] * 10)]


async def test_fifty_users_at_once_each_get_the_references_answer(demo: Reference) -> None:
    async with Engine(CONFIG) as engine:
        found = await asyncio.gather(*(read(engine, prompt, exactly(24)) for prompt in PROMPTS))
        for deltas in found:
            prompt = deltas[0].prompt_token_ids
            assert prompt is not None
            assert tokens_of(deltas) == demo.greedy(prompt, 24)
            assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
            assert {d.request_id for d in deltas} == {deltas[0].request_id}
        assert len({deltas[0].request_id for deltas in found}) == 50


async def test_answers_stream_token_by_token_and_users_take_turns() -> None:
    order: list[int] = []

    async def user(engine: Engine, number: int) -> list[int]:
        sizes = []
        async for delta in engine.generate(PROMPTS[number], exactly(20)):
            order.append(number)
            sizes.append(len(delta.token_ids))
        return sizes

    async with Engine(CONFIG) as engine:
        sizes = await asyncio.gather(*(user(engine, i) for i in range(8)))
    assert all(sum(s) == 20 for s in sizes)
    assert all(len(s) > 5 for s in sizes), "answers came in lumps"
    first, last = [order.index(i) for i in range(8)], [len(order) - 1 - order[::-1].index(i) for i in range(8)]
    assert max(first) < min(last), "somebody was served after somebody else was done"


async def test_a_late_short_request_does_not_wait_for_long_ones() -> None:
    async with Engine(CONFIG) as engine:
        long = [asyncio.create_task(read(engine, prompt, exactly(400))) for prompt in PROMPTS[:4]]
        while engine.statistics().num_running < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert len(tokens_of(await read(engine, "Hello", exactly(3)))) == 3
        assert not any(task.done() for task in long)
        for task in long:
            task.cancel()
        await asyncio.wait(long)


async def wait_to_the_end(engine: Engine, name: str) -> None:
    while await engine.wait_result(name) is not None:
        pass


async def test_users_who_leave_or_cancel_do_not_disturb_those_who_stay() -> None:
    async def leaver(engine: Engine, number: int) -> None:
        async with aclosing(engine.generate(PROMPTS[number], exactly(300))) as stream:
            async for delta in stream:
                if delta.num_generated_tokens > number % 7:
                    return

    async def canceller(engine: Engine, number: int) -> None:
        name = engine.add_request(PROMPTS[number], exactly(300))
        await engine.wait_result(name)
        engine.cancel(name)
        with pytest.raises(RequestCancelled):
            await wait_to_the_end(engine, name)

    async with Engine(CONFIG) as engine:
        alone = [tokens_of(await read(engine, PROMPTS[i], exactly(40))) for i in range(6)]
        staying = [asyncio.create_task(read(engine, PROMPTS[i], exactly(40))) for i in range(6)]
        await asyncio.gather(*(leaver(engine, i) for i in range(6, 30)), *(canceller(engine, i) for i in range(30, 45)))
        assert [tokens_of(deltas) for deltas in await asyncio.gather(*staying)] == alone
        while engine.statistics().state != "IDLE":  # noqa: ASYNC110
            await asyncio.sleep(0)
        found = engine.statistics()
        assert (found.num_running, found.num_waiting, found.kv_blocks_owned) == (0, 0, 0)
        assert found.requests_finished["FINISHED_ABORTED"] == 24 + 15


async def test_more_users_than_places_all_get_their_turn(demo: Reference) -> None:
    config = EngineConfig(max_num_seqs=4, dtype="float32")
    async with Engine(config) as engine:
        found = await asyncio.gather(*(read(engine, prompt, exactly(6)) for prompt in PROMPTS))
        assert engine.statistics().num_running == 0
    for deltas in found:
        assert deltas[0].prompt_token_ids is not None
        assert tokens_of(deltas) == demo.greedy(deltas[0].prompt_token_ids, 6)


async def test_every_users_parameters_are_their_own() -> None:
    async with Engine(CONFIG) as engine:
        wishes = [
            SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
            SamplingParams(temperature=1.2, seed=1, max_tokens=12, ignore_eos=True),
            SamplingParams(temperature=1.2, seed=2, max_tokens=9, ignore_eos=True, top_k=5),
            SamplingParams(temperature=1.0, seed=3, max_tokens=7, ignore_eos=True, logprobs=2, n=2),
            SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, repetition_penalty=1.5),
        ]
        alone = [await read(engine, "Once upon a time", wish) for wish in wishes]
        together = await asyncio.gather(*(read(engine, "Once upon a time", wish) for wish in wishes))
        for a, b, wish in zip(alone, together, wishes, strict=True):
            for choice in range(wish.n):
                assert tokens_of(a, choice) == tokens_of(b, choice)
                assert len(tokens_of(a, choice)) == wish.max_tokens
        assert len({tuple(tokens_of(deltas)[:7]) for deltas in alone}) >= 4
