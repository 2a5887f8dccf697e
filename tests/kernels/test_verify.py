"""Drafts change nothing but the number of steps: tokens, log probabilities and what penalties count stay the same."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import BACKENDS, Driver, Sequence, make_runner, seated

from novainfer.fsm.messages.step import NO_TOKEN, Logprobs, SeqParams, StepPlan
from novainfer.kernels.cpu.sampling import NativeSampler
from novainfer.kernels.sampling.sampler import LOGIT_ROWS_MAX, RowSampler, TorchSampler
from novainfer.kernels.sampling.verify import Positions, Sampled, accept, sampled_positions
from novainfer.kernels.step import StepBuffers

SHAPE = Shape("plain", 4, 2, 16, 64, 160, eos_token_id=3)
CPU = torch.device("cpu")
VOCAB = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("plain"))


# ---- positions and acceptance ----------------------------------------------------------------------------------------


def test_a_step_with_drafts_is_sampled_at_its_last_positions() -> None:
    plan = StepPlan([4, 1, 2], [3, 5, 1], [9, 20, 7], [10, 11, 12, 20, 21, 22, 23, 24, 30])
    plan.sample_seqs, plan.num_drafts = [1, 0, 2], [2, 0, 0]
    at = sampled_positions(plan)
    assert at.slots == [1, 1, 1, 4, 2]
    assert at.positions == [18, 19, 20, 9, 7]
    assert at.drafts == [23, 24, NO_TOKEN, NO_TOKEN, NO_TOKEN]
    buffers = StepBuffers(
        max_num_seqs=6, max_num_batched_tokens=16, max_model_len=40, block_size=4, vocab_size=100, device=CPU
    )
    buffers.begin(1)
    step = buffers.fill(plan)
    assert step.num_samples == 5
    assert step.logit_rows is not None
    assert step.logit_rows.tolist() == [5, 6, 7, 2, 8]


def test_where_every_position_is_sampled_no_row_is_picked() -> None:
    plan = StepPlan([0, 1], [3, 2], [9, 20], [10, 11, 12, 20, 21], sample_seqs=[0, 1], num_drafts=[2, 1])
    buffers = StepBuffers(
        max_num_seqs=6, max_num_batched_tokens=16, max_model_len=40, block_size=4, vocab_size=100, device=CPU
    )
    buffers.begin(1)
    step = buffers.fill(plan)
    assert (step.num_samples, step.logit_rows) == (5, None)


@pytest.mark.parametrize(
    ("sample_seqs", "num_drafts", "sentence"),
    [
        ([0], [1, 0], "sample_seqs and num_drafts of a step must be of one length"),
        ([0], [-1], "num_drafts of a step must be 0 to 15, not -1"),
        ([0, 1], [1, 1], "a sequence of a step has no token before its drafts"),
        ([0, 0], [1, 1], "a step samples, scores and pools more positions than it holds"),
    ],
)
def test_drafts_that_cannot_be_are_refused(sample_seqs: list[int], num_drafts: list[int], sentence: str) -> None:
    buffers = StepBuffers(
        max_num_seqs=6, max_num_batched_tokens=16, max_model_len=40, block_size=4, vocab_size=100, device=CPU
    )
    buffers.begin(1)
    plan = StepPlan([0, 1], [2, 1], [9, 20], [1, 2, 3], sample_seqs=sample_seqs, num_drafts=num_drafts)
    with pytest.raises(ValueError, match=sentence):
        buffers.fill(plan)


@pytest.mark.parametrize(
    ("token_ids", "expected", "counts"),
    [
        ([5, 6, 7, 8], [5, 6, 7, 8], [3, 1]),  # all drafts, and the token behind them
        ([5, 9, 7, 8], [5, 9, 8], [2, 1]),
        ([9, 6, 7, 8], [9, 8], [1, 1]),
        ([NO_TOKEN, 6, 7, 8], [NO_TOKEN, 8], [1, 1]),
        ([5, NO_TOKEN, 7, NO_TOKEN], [5, NO_TOKEN, NO_TOKEN], [2, 1]),
    ],
)
def test_tokens_count_up_to_the_first_that_is_not_the_draft(
    token_ids: list[int], expected: list[int], counts: list[int]
) -> None:
    logprobs: list[Logprobs | None] = [(-float(i), [], []) for i in range(4)]
    found, num_tokens = accept(Sampled(token_ids, logprobs), [5, 6, NO_TOKEN, NO_TOKEN], [2, 0])
    assert (found.token_ids, num_tokens) == (expected, counts)
    ends = [0, counts[0], counts[0] + counts[1]]
    rows = [found.logprobs[begin:end] for begin, end in pairwise(ends)]
    assert rows == [logprobs[: counts[0]], logprobs[3:]]
    assert accept(Sampled(token_ids, []), [5, 6, NO_TOKEN, NO_TOKEN], [2, 0])[0].logprobs == []


# ---- the sampler -----------------------------------------------------------------------------------------------------


def random_params(chance: random.Random, prompt: list[int]) -> SeqParams:
    """Every field that changes a draw, each on and off."""

    def some(on: Any, off: Any) -> Any:
        return on if chance.random() < 0.4 else off

    return SeqParams(
        slot=0,
        temperature=chance.choice([0.0, 0.0, 0.3, 0.7]),
        top_k=some(chance.randint(2, 20), 0),
        top_p=some(0.9, 1.0),
        min_p=some(0.05, 0.0),
        repetition_penalty=some(1.4, 1.0),
        presence_penalty=some(0.8, 0.0),
        frequency_penalty=some(0.9, 0.0),
        seed=chance.getrandbits(63),
        num_prompt_tokens=len(prompt),
        min_position=len(prompt) + some(4, 0),
        stop_token_ids=some([1, 2, 3], []),
        logit_bias=some({5: 3.0, 6: -3.0}, {}),
        allowed_token_ids=some(list(range(0, VOCAB, 2)), None),
        logprobs=some(chance.randint(0, 3), None),
    )


@pytest.mark.parametrize("kernel", [NativeSampler, RowSampler, TorchSampler])
@pytest.mark.parametrize("seed", range(8))
def test_all_positions_at_once_draw_what_one_after_the_other_draws(seed: int, kernel: Any) -> None:
    """Tokens, log probabilities, and what penalties count afterwards; drafts right, and wrong from anywhere on."""
    chance = random.Random(seed)
    num_rows, length = 5, 12
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 6))] for _ in range(num_rows)]
    params = [random_params(chance, prompt) for prompt in prompts]
    # The logits of a position depend on nothing but the position, so penalties decide much.
    table = torch.randn(num_rows, 64, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.0

    def fresh() -> Any:
        sampler = kernel.over(VOCAB, num_rows, 64, CPU)
        for slot, (row, prompt) in enumerate(zip(params, prompts, strict=True)):
            sampler.admit(seated(slot, row, prompt))
        return sampler

    plain = fresh()
    expected: list[list[tuple[int, Logprobs | None]]] = [[] for _ in range(num_rows)]
    for step in range(length + 6):
        at = [len(prompt) + step for prompt in prompts]
        logits = torch.stack([table[slot, position] for slot, position in enumerate(at)])
        got = plain.draw(logits, Positions(range(num_rows), at)).read()
        for slot in range(num_rows):
            expected[slot].append((got.token_ids[slot], got.logprobs[slot] if got.logprobs else None))

    sampler = fresh()
    found: list[list[tuple[int, Logprobs | None]]] = [[] for _ in range(num_rows)]
    while any(len(row) < length for row in found):
        slots, positions, drafts, num_drafts = [], [], [], []
        for slot in range(num_rows):
            done, k = len(found[slot]), chance.randint(0, 5)
            right = [token for token, _ in expected[slot][done : done + k]]
            guesses = [token if chance.random() < 0.8 else chance.randrange(VOCAB) for token in right]
            slots += [slot] * (len(guesses) + 1)
            positions += range(len(prompts[slot]) + done, len(prompts[slot]) + done + len(guesses) + 1)
            drafts += [*guesses, NO_TOKEN]
            num_drafts.append(len(guesses))
        logits = torch.stack([table[slot, position] for slot, position in zip(slots, positions, strict=True)])
        kept, counts = accept(sampler.draw(logits, Positions(slots, positions, drafts)).read(), drafts, num_drafts)
        logprobs = kept.logprobs or [None] * len(kept.token_ids)
        at = 0
        for slot, count in enumerate(counts):
            found[slot] += zip(kept.token_ids[at : at + count], logprobs[at : at + count], strict=True)
            del found[slot][length + 6 :]
            at += count
            if params[slot].needs_history:  # exactly what is committed
                history = sampler._history[slot, : len(prompts[slot]) + len(found[slot])].tolist()
                assert history == prompts[slot] + [token for token, _ in found[slot]]
    for slot in range(num_rows):
        assert found[slot] == expected[slot][: len(found[slot])]


# ---- the runner ------------------------------------------------------------------------------------------------------

PROMPTS = [[7, 8, 9] * 7, [40], [i % 150 for i in range(30)], [11, 12]]
ROWS = [
    SeqParams(slot=0),
    SeqParams(slot=0, temperature=1.0, seed=5, logprobs=2),
    SeqParams(slot=0, temperature=0.8, seed=6, frequency_penalty=0.7, repetition_penalty=1.2, num_prompt_tokens=30),
    SeqParams(slot=0, presence_penalty=1.0, num_prompt_tokens=2, min_position=12, stop_token_ids=[3, 5, 7]),
]


def sequences(driver: Driver) -> list[Sequence]:
    return [driver.add(slot, prompt, row) for slot, (prompt, row) in enumerate(zip(PROMPTS, ROWS, strict=True))]


def logprobs_of(driver: Driver, counts: list[int]) -> list[list[Logprobs | None]]:
    flat = driver.last.logprobs or [None] * sum(counts)
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [flat[begin:end] for begin, end in pairwise(ends)]


# In bf16 only what promises row invariance has no near ties that fall the other way in another batch.
@pytest.mark.parametrize(("backend", "dtype"), [*((name, "float32") for name in BACKENDS), ("native", "bfloat16")])
def test_a_run_with_drafts_is_the_run_without(folder: Path, backend: str, dtype: str) -> None:
    """Whatever the drafts; to the bit where kernels promise row invariance."""
    length, chance = 24, random.Random(1)
    plain = Driver(make_runner(folder, backend, dtype=dtype))
    rows = sequences(plain)
    expected: list[list[Logprobs | None]] = [[] for _ in rows]
    for _ in range(length + 6):
        plain.step(*rows)
        for mine, entry in zip(expected, logprobs_of(plain, [1] * len(rows)), strict=True):
            mine += entry
    wanted = [row.tokens for row in rows]

    driver = Driver(make_runner(folder, backend, dtype=dtype), seed=2)
    rows = sequences(driver)
    found: list[list[Logprobs | None]] = [[] for _ in rows]
    steps = num_accepted = 0
    while todo := [row for row in rows if len(row.tokens) < len(PROMPTS[row.slot]) + length]:
        drafts = []
        for row in todo:
            done = len(row.tokens)
            guesses = wanted[row.slot][done : done + chance.randint(0, 5)]
            drafts.append([token if chance.random() < 0.8 else chance.randrange(160) for token in guesses])
        counts = driver.verify(todo, drafts)
        steps += 1
        num_accepted += sum(counts) - len(todo)
        for row, entry in zip(todo, logprobs_of(driver, counts), strict=True):
            found[row.slot] += entry
    assert num_accepted > steps, "most drafts were right"
    for slot, row in enumerate(rows):
        assert row.tokens == wanted[slot][: len(row.tokens)]
        for got, right in zip(found[slot], expected[slot], strict=False):
            if driver.runner.info.row_invariant:
                assert got == right
            elif got is not None and right is not None:
                assert got[0] == pytest.approx(right[0], abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_position_among_drafts_has_the_logits_it_has_alone(folder: Path, backend: str, dtype: str) -> None:
    length = 40
    alone = Driver(make_runner(folder, backend, dtype=dtype), capture=True)
    first, second = alone.add(0, PROMPTS[2]), alone.add(1, PROMPTS[0])
    for _ in range(length):
        alone.step(first)
    expected = list(alone.capturing.logits)
    wanted = first.tokens

    driver = Driver(make_runner(folder, backend, dtype=dtype), seed=3, capture=True)
    first, second = driver.add(0, PROMPTS[2]), driver.add(1, PROMPTS[0])
    found: list[torch.Tensor] = []
    k = 0
    while len(found) < length:
        k = (k + 1) % 7
        right = wanted[len(first.tokens) : len(first.tokens) + k]
        before = len(driver.capturing.logits)
        driver.verify([second, first], [[], right])  # beside one that only decodes
        found += driver.capturing.logits[before + 1 : before + 2 + len(right)]
        first.tokens = wanted[: len(PROMPTS[2]) + len(found)]
    for got, right in zip(found[:length], expected, strict=True):
        if driver.runner.info.row_invariant:
            assert torch.equal(got, right)
        else:
            torch.testing.assert_close(got, right, atol=0.05 if dtype == "bfloat16" else 1e-4, rtol=0.05)


def test_drafts_across_the_parts_in_which_logits_are_computed_are_accepted_alike(folder: Path) -> None:
    num_rows, k = LOGIT_ROWS_MAX // 4, 4  # five positions a row: parts end inside rows
    runner = make_runner(folder, num_blocks=4 * num_rows, max_num_seqs=num_rows)
    params = SeqParams(slot=0, temperature=1.0, frequency_penalty=1.0, num_prompt_tokens=2)
    rows = [msgspec.structs.replace(params, seed=i) for i in range(num_rows)]
    plain = Driver(runner)
    expected = plain.generate([plain.add(i, [i, 9], row) for i, row in enumerate(rows)], 12)
    driver = Driver(runner)
    found = [driver.add(i, [i, 9], row) for i, row in enumerate(rows)]
    driver.step(*found)
    while any(len(row.tokens) < 14 for row in found):
        drafts = [right[len(row.tokens) - 2 :][:k] for row, right in zip(found, expected, strict=True)]
        driver.verify(found, drafts)
    for row, right in zip(found, expected, strict=True):
        assert row.tokens[2:14] == right
