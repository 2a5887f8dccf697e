"""Greedy tokens are transformers' in fp32, and bf16 logits as close to exact as its own, on every kernel family."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GRID, Shape, greedy, load_transformers, save_checkpoint
from driver import BACKENDS, Driver, make_runner

NUM_TOKENS = 6


class Case:
    """A checkpoint of the grid, prompts, and what transformers makes of them in fp32."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.folder = save_checkpoint(shape, folder)
        self.model = load_transformers(self.folder, torch.float32)
        self._expected: dict[tuple[int, ...], list[int]] = {}

    def prompt(self, length: int, seed: int) -> list[int]:
        """Random token ids."""
        draw = random.Random(seed)
        return [draw.randrange(self.shape.vocab_size) for _ in range(length)]

    def expected(self, prompt: list[int]) -> list[int]:
        """The greedy continuation."""
        key = tuple(prompt)
        if key not in self._expected:
            self._expected[key] = greedy(self.model, prompt, NUM_TOKENS)[0]
        return self._expected[key]


@pytest.fixture(scope="module", params=GRID, ids=lambda shape: shape.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param.name))


@pytest.fixture(params=BACKENDS)
def driver(request: pytest.FixtureRequest, case: Case) -> Driver:
    return Driver(make_runner(case.folder, request.param))


def test_prefill_and_decode_of_a_batch_give_the_tokens_of_transformers(case: Case, driver: Driver) -> None:
    prompts = [case.prompt(length, seed) for seed, length in enumerate((1, 17, 40))]
    sequences = [driver.add(slot, prompt) for slot, prompt in zip((4, 0, 2), prompts, strict=True)]
    assert driver.generate(sequences, NUM_TOKENS) == [case.expected(prompt) for prompt in prompts]


def test_chunks_mixed_with_decodes_give_the_same_tokens(case: Case, driver: Driver) -> None:
    first, second = case.prompt(9, 10), case.prompt(45, 11)
    a, b = driver.add(1, first), driver.add(3, second)
    driver.step(a, (b, 7))
    driver.step(a, (b, 16))
    assert driver.step((b, 1)) == []  # a chunk of one token that ends nothing: no row is sampled
    driver.step((b, 5), a)
    for _ in range(NUM_TOKENS):
        driver.step(b) if len(a.tokens) >= 9 + NUM_TOKENS else driver.step(a, b)
    assert a.tokens[9 : 9 + NUM_TOKENS] == case.expected(first)
    assert b.tokens[45:] == case.expected(second)


def test_a_prefix_is_shared_in_the_same_step_and_later(case: Case, driver: Driver) -> None:
    prefix = case.prompt(33, 20)
    prompts = [prefix, prefix + case.prompt(4, 21), prefix[:32] + case.prompt(3, 22)]
    a = driver.add(0, prompts[0])
    b = driver.share(1, prompts[1], a)  # computed in the same step as the blocks it reads
    driver.step(b, a)
    c = driver.share(2, prompts[2], a)
    driver.step(a, c, b)
    for _ in range(NUM_TOKENS - 1):
        driver.step(c, a, b)
    generated = [s.tokens[len(p) :][:NUM_TOKENS] for s, p in zip((a, b, c), prompts, strict=True)]
    assert generated == [case.expected(prompt) for prompt in prompts]


def test_a_preempted_sequence_goes_on_from_its_own_tokens(case: Case, driver: Driver) -> None:
    prompts = [case.prompt(20, 30), case.prompt(5, 31)]
    a, b = driver.add(0, prompts[0]), driver.add(1, prompts[1])
    driver.generate([a, b], 3)
    driver.release(a)
    driver.step(b)
    driver.step(b, (a, 13))
    a.slot, a.admitted, a.num_sent_blocks = 5, False, 0  # and it moves to another slot on the way
    driver.step(a, b)
    for _ in range(NUM_TOKENS - 4):
        driver.step(a)
    assert a.tokens[20 : 20 + NUM_TOKENS] == case.expected(prompts[0])
    assert b.tokens[5 : 5 + NUM_TOKENS] == case.expected(prompts[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_logits_are_as_close_to_exact_as_those_of_transformers(case: Case, backend: str, tmp_path: Path) -> None:
    folder = save_checkpoint(case.shape, tmp_path, torch.bfloat16)
    runner = make_runner(folder, backend)
    assert runner.info.dtype == "bfloat16"
    driver = Driver(runner, capture=True)
    prompt = case.prompt(30, 40)
    exact, rounded = (load_transformers(folder, dtype) for dtype in (torch.float32, torch.bfloat16))
    tokens, exact_logits = greedy(exact, prompt, NUM_TOKENS)
    sequence = driver.add(0, prompt)
    for token_id in tokens:  # teacher-forced: both see the same tokens
        driver.step(sequence)
        sequence.tokens[-1] = token_id
    ours = torch.stack(driver.capturing.logits)
    with torch.no_grad():
        every = rounded(torch.tensor([prompt + tokens[:-1]])).logits[0].float()
    theirs = every[len(prompt) - 1 :]
    largest = exact_logits.abs().max()
    assert (ours - theirs).abs().max() <= 0.05 * largest
    assert _rms(ours - exact_logits) <= 1.5 * _rms(theirs - exact_logits) + 1e-3 * largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_invariant_kernels_give_the_same_bits_alone_and_in_any_batch(
    case: Case, dtype: torch.dtype, tmp_path: Path
) -> None:
    runner = make_runner(save_checkpoint(case.shape, tmp_path, dtype), "native")
    if not runner.info.row_invariant:
        pytest.skip(f"these kernels are not row-invariant: {runner.info.kernels}")
    prompts = [case.prompt(length, 50 + length) for length in (1, 23, 37)]
    driver = Driver(runner, capture=True)
    together = [driver.add(slot, prompt) for slot, prompt in enumerate(prompts)]
    for _ in range(4):
        driver.step(*together)
    batched = [driver.capturing.logits[i::3] for i in range(3)]
    for i, prompt in enumerate(prompts):
        driver.capturing.logits.clear()
        alone = driver.add(3 + i, prompt)
        while alone.num_computed + 9 < len(prompt):  # in chunks, too
            driver.step((alone, 9))
        for _ in range(4):
            driver.step(alone)
        assert all(torch.equal(x, y) for x, y in zip(batched[i], driver.capturing.logits, strict=True))


def _rms(x: Any) -> Any:
    return x.square().mean().sqrt()
