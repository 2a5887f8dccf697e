"""Answers over an INT8 KV cache: the same with guesses, with cached prefixes, and when blocks run short."""

import asyncio

import pytest

from novainfer import Engine, EngineConfig, SamplingParams
from novainfer.fsm.schedule.speculation import Speculation, Stretches

BEGINNING = "Count with me: one two three one two three one two three. " * 6
PROMPTS = [BEGINNING + end for end in ("one two", "two three", "three one", "Once upon a time")]
ASKED = [
    SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=100, temperature=0.8, seed=11, ignore_eos=True),
]


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Whatever steps take on this machine: drafts are thought to cost nothing, and are in all steps."""
    monkeypatch.setattr(Speculation, "measured", lambda self, costs: None)
    monkeypatch.setattr(Stretches, "next_step", lambda self: None)
    monkeypatch.setattr(Stretches, "rest", lambda self: None)


async def answers(**fields):
    """Tokens and log probabilities, twice: the second time prefixes may be found in the cache."""
    config = EngineConfig(seed=0, kv_cache_dtype="int8", batch_invariant=True, max_model_len=512, **fields)
    async with Engine(config) as engine:

        async def one(prompt, params):
            deltas = [delta async for delta in engine.generate(prompt, params)]
            tokens = [token for delta in deltas for token in delta.token_ids]
            return tokens, [entry for delta in deltas for entry in delta.logprobs or []]

        rounds = [
            await asyncio.gather(*(one(prompt, params) for prompt in PROMPTS for params in ASKED)) for _ in range(2)
        ]
        return rounds, engine.statistics()


async def test_answers_are_the_same_however_they_come_about():
    (first, again), plain = await answers(enable_prefix_caching=False)
    assert again == first
    lookup = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    guessed, with_guesses = await answers(speculative_config=lookup, prefill_chunk_tokens=48)
    assert guessed == [first, first]
    assert with_guesses.speculation.num_accepted_tokens_total > 0
    assert plain.prefix_cache_hits == 0 < with_guesses.prefix_cache_hits
    short, pressed = await answers(kv_cache_capacity_mode="fixed", num_kv_blocks=33, swap_space_gib=1)
    assert short == [first, first]
    assert pressed.preemptions > 0
    assert pressed.swapped_in_blocks > 0
