"""Answers that go on from tokens which another engine gave: from any of them on, they are what they would have been."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from novainfer import Committed, Delta, Engine, EngineConfig, InvalidParameter, SamplingParams
from novainfer.fingerprint import fingerprint
from tests.api.helpers import blocks_back, fake_engine
from tests.api.test_structured_outputs import PROMPT, SCHEMA, held_to

LIVELY = {"temperature": 1.0, "seed": 2**64 - 1}
KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=3),
    "two choices, with log probabilities": SamplingParams(n=2, max_tokens=24, logprobs=2, **LIVELY),
    "penalties and a stop string": SamplingParams(
        max_tokens=48, presence_penalty=1.0, repetition_penalty=1.2, stop=["the ", ", a"], min_tokens=6, **LIVELY
    ),
    "a schema": held_to(json=SCHEMA, temperature=1.0),
}


async def answer(engine: Engine, params: SamplingParams, committed: list[Committed]) -> list[Delta]:
    """Each choice as one delta."""
    found = [Delta(request_id="") for _ in range(params.n)]
    async for delta in engine.generate(PROMPT, params, committed=committed):
        one = found[delta.index]
        one.text += delta.text
        one.token_ids = one.token_ids + delta.token_ids
        one.logprobs = [*(one.logprobs or []), *(delta.logprobs or [])]
        one.finish_reason, one.stop_reason = delta.finish_reason, delta.stop_reason
        one.seed, one.num_generated_tokens = delta.seed, delta.num_generated_tokens
    return found


@pytest.mark.slow
async def test_they_are_the_same_from_any_token_on() -> None:
    async with Engine(EngineConfig(num_threads=1)) as engine:
        for name, params in KINDS.items():
            whole = await answer(engine, params, [])
            longest = max(len(one.token_ids) for one in whole)
            assert longest > 10, "it is worth going on with"
            for at in (0, 1, 2, longest // 2, longest - 1, longest):
                counts = [at, max(at - 3, 0)][: params.n]
                committed = [
                    Committed(
                        token_ids=one.token_ids[:count],
                        logprobs=None if params.logprobs is None else (one.logprobs or [])[:count],
                    )
                    for one, count in zip(whole, counts, strict=True)
                ]
                for told, right in zip(await answer(engine, params, committed), whole, strict=True):
                    assert told.text == right.text, (name, at)
                    assert told.token_ids == right.token_ids, (name, at)
                    assert (told.finish_reason, told.stop_reason) == (right.finish_reason, right.stop_reason)
                    assert (told.seed, told.num_generated_tokens) == (right.seed, right.num_generated_tokens)
                    assert told.logprobs == right.logprobs, (name, at)
        assert await engine.fingerprint() == await engine.fingerprint()
        await blocks_back(engine)


async def test_an_answer_does_not_go_on_under_another_chat_template(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    async with fake_engine() as engine:
        config = msgspec.structs.replace(engine.config, chat_template=template)
        first, plain = (fingerprint(one, engine.model_info, "1", has_model=True) for one in (config, engine.config))
        template.write_text("{{ messages[1:] }}")
        assert len({plain, first, fingerprint(config, engine.model_info, "1", has_model=True)}) == 3


async def test_what_cannot_have_been_given_is_refused() -> None:
    wrong = {
        "for each of n=2": (SamplingParams(n=2), [Committed(token_ids=[1])]),
        "integers from 0": (SamplingParams(), [Committed(token_ids=[10**6])]),
        "logprobs where": (SamplingParams(logprobs=1), [Committed(token_ids=[1])]),
        "for each token": (SamplingParams(logprobs=1), [Committed(token_ids=[1], logprobs=[])]),
    }
    async with fake_engine() as engine:
        for said, (params, committed) in wrong.items():
            with pytest.raises(InvalidParameter, match=said):
                await anext(engine.generate("a", params, committed=committed))
