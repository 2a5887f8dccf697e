"""Offline: the same answers every time, and they are the reference's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from novainfer import LLM, SamplingParams
from tests.acceptance.reference import Reference, exactly

pytestmark = pytest.mark.slow

TEXTS = [
    "Hello",
    "Once upon a time, there was a",
    "The capital of France is",
    "3 + 4 =",
    "日本",
    "Spell the word cat.\n" * 40,
]
CHATS = [
    [{"role": "user", "content": "Who are you?"}],
    [
        {"role": "user", "content": "My name is Anna."},
        {"role": "assistant", "content": "Hello Anna."},
        {"role": "user", "content": "What is my name?"},
    ],
]


def test_greedy_answers_are_the_references(llm: LLM, demo: Reference) -> None:
    outputs = llm.generate(TEXTS, exactly(32), use_tqdm=False) + llm.chat(CHATS, exactly(32), use_tqdm=False)
    assert len(outputs) == len(TEXTS) + len(CHATS)
    for output in outputs:
        assert output.outputs[0].token_ids == demo.greedy(output.prompt_token_ids, 32)


def test_an_answer_ends_where_the_reference_meets_the_end_of_sequence(llm: LLM, demo: Reference) -> None:
    params = SamplingParams(temperature=0, max_tokens=64)
    for output in llm.chat(CHATS, params, use_tqdm=False):
        whole = demo.greedy(output.prompt_token_ids, 64)
        (choice,) = output.outputs
        if demo.eos_token_id in whole:
            assert choice.token_ids == whole[: whole.index(demo.eos_token_id) + 1]
            assert choice.finish_reason == "stop"
        else:
            assert (choice.token_ids, choice.finish_reason) == (whole, "length")


@pytest.mark.parametrize("name", ["mha", "mqa", "wide-heads", "odd", "qwen3", "yarn", "qwen3-sliding"])
def test_random_checkpoints_are_the_references_too(name: str, tiny: Callable[[str], Reference]) -> None:
    reference = tiny(name)
    prompts = [reference.prompt(length, seed) for seed, length in enumerate((1, 2, 15, 16, 17, 33, 70, 100))]
    # Chunks of 24 tokens, so that prompts are prefilled in pieces, beside others that decode.
    with LLM(
        reference.folder, dtype="float32", prefill_chunk_tokens=24, max_num_batched_tokens=32, max_num_seqs=8
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], exactly(12), use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [o.outputs[0].token_ids for o in outputs] == [reference.greedy(p, 12) for p in prompts]


def test_the_same_batch_gives_the_same_answers_and_so_does_another_llm(llm: LLM) -> None:
    params = [SamplingParams(temperature=t, seed=11, max_tokens=24) for t in (0.0, 0.7, 1.0, 1.3)]
    prompts = ["Once upon a time"] * 4

    def run(model: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in model.generate(prompts, params, use_tqdm=False)]

    first = run(llm)
    assert run(llm) == first
    with LLM(max_num_seqs=2, dtype="float32", enable_prefix_caching=False) as other:
        assert run(other) == first
    assert len({tuple(tokens) for tokens in first}) > 1


def test_batched_is_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    together = llm.generate(TEXTS, params, use_tqdm=False)
    for text, output in zip(TEXTS, together, strict=True):
        (alone,) = llm.generate(text, params, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_the_text_is_that_of_the_tokens(llm: LLM, demo: Reference) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(demo.folder))
    for output in llm.generate(TEXTS, SamplingParams(seed=1, max_tokens=40, temperature=1.5), use_tqdm=False):
        (choice,) = output.outputs
        assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
