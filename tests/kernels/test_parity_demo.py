"""The demo model answers on every kernel family as it does in transformers, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import greedy, load_transformers
from driver import BACKENDS, Driver, make_runner

from novainfer.kernels.demo import model_path

pytestmark = pytest.mark.skipif(
    not (model_path() / "model.safetensors").is_file(), reason="the demo model has not been trained yet"
)

QUESTIONS = ("Hello!", "What is 17 + 25?", "Spell apple", "What is the capital of France?", "Tell me a short story.")
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_path())
    found = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found.append(tokenizer(text).input_ids)
    return found


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    model = load_transformers(model_path(), torch.float32)
    return [greedy(model, prompt, NUM_TOKENS)[0] for prompt in prompts]


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_those_of_transformers(backend: str, prompts: list[list[int]], expected: list[list[int]]) -> None:
    runner = make_runner(model_path(), backend, num_blocks=160)
    assert runner.info.dtype == "float32"
    driver = Driver(runner)
    together = [driver.add(slot, prompt) for slot, prompt in enumerate(prompts)]
    assert driver.generate(together, NUM_TOKENS) == expected
    for sequence in together:
        driver.release(sequence)
    # The first answers again while it joins others that are in the middle of theirs.
    late = driver.add(5, prompts[0])
    others = [driver.add(slot, prompt) for slot, prompt in enumerate(prompts[1:])]
    driver.step(*others)
    driver.step((late, 3), *others)
    for _ in range(NUM_TOKENS):
        driver.step(late, *others)
    assert late.tokens[len(prompts[0]) :] == expected[0]
    answers = [s.tokens[len(p) :][:NUM_TOKENS] for s, p in zip(others, prompts[1:], strict=True)]
    assert answers == expected[1:]
