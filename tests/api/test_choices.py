"""Choices of one prompt give the tokens of requests that share nothing: whatever blocks are copied, lost or swapped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from novainfer import LLM, Engine, EngineConfig, SamplingParams
from novainfer.assembly import model_spec
from novainfer.fsm.messages.step import StepDone, StepPlan
from tests.api.helpers import blocks_back

pytestmark = pytest.mark.slow

PROMPTS = [[(7 * i * i + 3 * i + n) % 900 + 50 for i in range(60 + 21 * n)] for n in range(4)]


class Unreliable:
    """The model's device; every third step fails, after it has written into its blocks."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, plan: StepPlan) -> StepDone:
        done = self._device.run(plan)
        self._num_steps += 1
        if self._num_steps % 3 == 0:
            raise RuntimeError("planted")
        return done


async def answers(*, is_failing: bool = False, **fields: Any) -> tuple[list[Any], Any]:
    """The tokens of all choices of all prompts, each prompt asked for twice: at once, and while the first ones run."""
    config = EngineConfig(max_num_seqs=24, seed=0, **fields)
    device = Unreliable(model_spec(config).make()) if is_failing else None
    async with Engine(config, device=device) as engine:

        async def one(prompt: list[int], seed: int) -> dict[int, list[int]]:
            if seed >= 10:
                # Looked at now and then: a loop that spins keeps the interpreter from the device's thread, whose steps
                # last a thousand times as long then.
                while engine.statistics().generation_tokens_total <= 100:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            params = SamplingParams(n=5, max_tokens=40, temperature=0.9, seed=seed, ignore_eos=True)
            found: dict[int, list[int]] = {}
            async for delta in engine.generate(prompt, params):
                found.setdefault(delta.index, []).extend(delta.token_ids)
            return found

        found = await asyncio.gather(*(one(prompt, n + at) for n in (0, 10) for at, prompt in enumerate(PROMPTS)))
        await blocks_back(engine)
        return found, engine.statistics()


@pytest.fixture(scope="module")
def right() -> list[Any]:
    return asyncio.run(answers(enable_prefix_caching=False))[0]


@pytest.mark.parametrize("block_size", [10, 16, 128])
@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_choices_share_what_they_can_and_give_the_same_tokens(
    right: list[Any], worker: str, block_size: int
) -> None:
    found, statistics = await answers(worker=worker, block_size=block_size)
    assert found == right
    assert statistics.copied_blocks >= 4 * 4


async def test_choices_are_the_same_with_steps_that_fail_and_with_too_few_blocks(right: list[Any]) -> None:
    found, statistics = await answers(is_failing=True)
    assert found == right
    assert statistics.step_failures > 10
    small = {"kv_cache_capacity_mode": "fixed", "num_kv_blocks": 40, "max_model_len": 256}
    for swap_space_gib in (0.0, 0.01):
        found, statistics = await answers(**small, swap_space_gib=swap_space_gib)
        assert found == right
        assert statistics.preemptions > 0
        assert statistics.copied_blocks > 0


async def test_choices_are_the_same_with_drafts(right: list[Any]) -> None:
    found, statistics = await answers(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert found == right
    assert statistics.copied_blocks > 0


def test_what_was_cached_of_a_prompt_is_what_its_first_choice_found() -> None:
    """The others find what the first has computed, whichever ends last."""
    with LLM(max_num_seqs=8, seed=0) as llm:
        (cold,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(n=3, max_tokens=2), use_tqdm=False)
        assert cold.num_cached_tokens == 0
        (warm,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(n=3, max_tokens=2), use_tqdm=False)
        assert 0 < warm.num_cached_tokens < len(PROMPTS[0])


async def test_a_request_is_shown_with_what_its_first_choice_found_in_the_prefix_cache() -> None:
    async with Engine(EngineConfig(max_num_seqs=8, seed=0)) as engine:
        async for _ in engine.generate(PROMPTS[0], SamplingParams(n=3, max_tokens=2)):
            pass
        (found,) = engine.requests()
        assert [choice.cached_tokens for choice in found.choices] == [0, len(PROMPTS[0]) - 1, len(PROMPTS[0]) - 1]
        assert (found.prompt_tokens, found.cached_tokens) == (len(PROMPTS[0]), 0)
