"""Answers with speculation are those without: tokens, log probabilities, text and how they end."""

import asyncio

import pytest

from novainfer import Engine, EngineConfig, InvalidParameter, SamplingParams

LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PROMPT = "one two three one two three one two three one two"
ASKED = [
    SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=60, temperature=0.8, seed=11, ignore_eos=True),  # vLLM #6038: seeds that are ignored
    SamplingParams(max_tokens=60, temperature=1.0, top_p=0.9, top_k=20, seed=12, ignore_eos=True),
    SamplingParams(  # vLLM #22987: penalties that drift within an accepted run
        max_tokens=60, temperature=0.7, seed=13, ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.4
    ),
    SamplingParams(max_tokens=60, temperature=0.0, frequency_penalty=0.7, ignore_eos=True, min_tokens=20),
    SamplingParams(max_tokens=60, temperature=0.0, stop=["e t", "wo th"]),  # vLLM #47616: completed within a run
    SamplingParams(max_tokens=60, temperature=0.9, seed=14, n=3),
]


async def answers(**fields):
    async with Engine(EngineConfig(max_num_seqs=16, seed=0, **fields)) as engine:

        async def one(params):
            found = {}
            async for delta in engine.generate(PROMPT, params):
                so_far = found.setdefault(delta.index, {"tokens": [], "text": "", "logprobs": []})
                so_far["tokens"] += delta.token_ids
                so_far["text"] += delta.text
                so_far["logprobs"] += delta.logprobs or []
                so_far["end"] = delta.finish_reason, delta.stop_reason, delta.num_generated_tokens
            return found

        found = await asyncio.gather(*map(one, ASKED))
        return found, engine.statistics()


@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_answers_are_the_same(worker):
    plain, before = await answers()
    guessed, after = await answers(speculative_config=LOOKUP, worker=worker)
    assert guessed == plain
    assert before.speculation is None
    assert after.speculation.num_accepted_tokens_total > 0
    assert after.generation_tokens_total == before.generation_tokens_total


async def test_json_text_is_as_good_as_an_object():
    config = EngineConfig(speculative_config='{"method": "ngram", "num_speculative_tokens": 2}')
    assert config.speculative_config.num_speculative_tokens == 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be between 1 and"),
        ({"method": "eagle", "num_speculative_tokens": 2}, "eagle"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        ('{"method": "ngram"', "JSON"),
    ],
)
def test_a_config_that_is_wrong_is_told_with_its_field(wrong, says):
    with pytest.raises(InvalidParameter, match=says) as told:
        EngineConfig(speculative_config=wrong)
    assert told.value.param == "speculative_config"
