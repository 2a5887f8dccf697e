"""Guesses of what follows in answers that are held to grammars: the tokens are the same with and without."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from novainfer import Engine, EngineConfig, SamplingParams, StructuredOutputsParams
from novainfer.fsm.messages.structured import Thoughts
from novainfer.kernels.demo import model_path
from tests.api.helpers import Answer, ask, eventually
from tests.api.test_speculation import LOOKUP, drafting

RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "minLength": 2, "maxLength": 8},
        "age_in_years": {"type": "integer", "minimum": 10, "maximum": 99},
        "favourite_animal": {"enum": ["elephant", "elk", "fox"]},
    },
    "required": ["first_name", "age_in_years", "favourite_animal"],
    "additionalProperties": False,
}
RECORDS = {"type": "array", "items": RECORD, "minItems": 2, "maxItems": 2}
MARKERS = {
    token["content"]: token["id"] for token in json.loads((model_path() / "tokenizer.json").read_text())["added_tokens"]
}
THOUGHTS = Thoughts(open_id=MARKERS["<think>"], close_id=MARKERS["</think>"], budget=12)
PROMPT = 'Two records: {"first_name": "Anna", "age_in_years": 12, "favourite_animal": "fox"} and '


def held_to(temperature: float, seed: int, **how: Any) -> SamplingParams:
    more = {name: how.pop(name) for name in list(how) if name in SamplingParams.__struct_fields__}
    grammar = StructuredOutputsParams(**how)
    return SamplingParams(max_tokens=200, temperature=temperature, seed=seed, structured_outputs=grammar, **more)


SCHEMAS = [
    *({"json": RECORDS}, {"json": RECORDS, "disable_any_whitespace": True}),
    {"json": RECORD, "whitespace_pattern": " "},
    *({"regex": r"(the (fox|owl|bear) saw ){3,6}it\."}, {"choice": ["a badger", "an owl", "a badger and an owl"]}),
    {"structural_tag": {"structures": [{"begin": "{", "schema": RECORD, "end": ";"}], "triggers": ["{"]}},
]
ASKED = [
    *(held_to(temperature, seed, **how) for how in SCHEMAS for temperature, seed in ((0.0, 1), (1.0, 2), (1.3, 3))),
    held_to(1.0, 4, json=RECORD, n=3, logprobs=2),
    held_to(0.8, 5, json=RECORD, presence_penalty=0.7, repetition_penalty=1.3, top_k=20, min_p=0.01),
    held_to(0.0, 6, json=RECORDS, stop=["years"], min_tokens=4),
    *(held_to(temperature, 8, json=RECORD, thoughts=THOUGHTS) for temperature in (0.0, 1.0)),
    SamplingParams(max_tokens=60, temperature=1.0, seed=9, thoughts=THOUGHTS),
    held_to(1.0, 7, json=RECORD, bad_words=["elephant"], include_stop_str_in_output=True, stop=["animal"]),
]


async def answers(asked: list[SamplingParams], **fields: Any) -> tuple[list[Any], Any]:
    """What each request gets in one engine, all at once; and what the engine says of its guesses."""
    async with Engine(EngineConfig(max_num_seqs=16, **fields)) as engine:
        found = await asyncio.gather(*(ask(engine, PROMPT, params) for params in asked))
        assert engine._runtime._grammars.num_held == 0
        return [
            [(answer.token_ids(at), answer.text(at), *_said(answer, at)) for at in range(params.n)]
            for answer, params in zip(found, asked, strict=True)
        ], engine.statistics()


def _said(answer: Answer, choice: int) -> tuple[list[Any], list[Any]]:
    """Its log probabilities, and how it ended."""
    deltas = [delta for delta in answer.deltas if delta.index == choice]
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs or ()]
    return logprobs, [(delta.finish_reason, delta.stop_reason) for delta in deltas if delta.finish_reason]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return asyncio.run(answers(ASKED))[0]


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("how", "worker"), [("ngram", "thread"), ("ngram", "process"), ("draft_model", "process")])
async def test_answers_in_grammars_are_the_same_with_guesses(plain: list[Any], how: str, worker: str) -> None:
    config = LOOKUP if how == "ngram" else drafting("demo")
    found, after = await answers(ASKED, speculative_config=config, worker=worker)
    assert found == plain
    assert after.speculation.num_accepted_tokens_total > 100
    assert after.speculation.accepted_per_position[2] > 10


@pytest.mark.usefixtures("eager")
async def test_what_a_grammar_leaves_no_choice_of_is_guessed() -> None:
    keys = {f"a_long_name_{at}": {"const": at} for at in range(6)}
    schema = {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}
    asked = [held_to(1.0, 1, json=schema, disable_any_whitespace=True)]
    wanted, before = await answers(asked)
    never = {**LOOKUP, "prompt_lookup_min": 32, "prompt_lookup_max": 32}
    found, after = await answers(asked, speculative_config=never)
    assert found == wanted
    assert json.loads(found[0][0][1]) == {name: at for at, name in enumerate(keys)}
    said = after.speculation
    assert said.num_accepted_tokens_total == said.num_draft_tokens_total
    assert after.steps < before.steps / 3


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
async def test_an_answer_with_guesses_goes_on_token_for_token_when_its_worker_is_killed() -> None:
    asked = [held_to(0.0, 1, json=RECORDS), held_to(1.0, 2, json=RECORDS, n=2), held_to(1.0, 3, json=RECORD)]
    config: dict[str, Any] = {"worker": "process", "dtype": "float32", "max_num_seqs": 8}
    async with Engine(EngineConfig(**config | {"worker": "thread"})) as engine:
        wanted = [await ask(engine, PROMPT, params) for params in asked]

    async def one(engine: Engine, params: SamplingParams, seen: list[str]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(params.n)]
        async for delta in engine.generate(PROMPT, params):
            found[delta.index] += delta.token_ids
            seen.append(delta.text)
        return found

    async with Engine(EngineConfig(**config, speculative_config=LOOKUP)) as engine:
        seen: list[str] = []
        tasks = [asyncio.create_task(one(engine, params, seen)) for params in asked]
        await eventually(lambda: len(seen) > 20)
        os.kill(engine._runtime._link.pid, signal.SIGKILL)
        for answer, task in zip(wanted, tasks, strict=True):
            found = await task
            assert found == [answer.token_ids(choice) for choice in range(len(found))]
        assert engine.statistics().worker_losses == 1
        assert engine.statistics().speculation.num_accepted_tokens_total > 0
