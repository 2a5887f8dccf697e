"""Scores of prompts: what a step says of tokens that it was given is what it would say if it drew there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import Driver, Sequence, make_runner

from novainfer.fsm.messages.step import Logprobs, SeqParams, StepPlan
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.sampling.sampler import LOGIT_ROWS_MAX
from novainfer.kernels.sampling.scores import scores
from novainfer.kernels.step import StepBuffers

CPU = torch.device("cpu")
SHAPE = Shape("plain", 4, 2, 16, 64, 160, eos_token_id=3)
TOPS = 3
PROMPT = [(17 * at + at * at) % 90 for at in range(LOGIT_ROWS_MAX + 9)]


@pytest.fixture(scope="module", params=["torch", "native"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(save_checkpoint(SHAPE, tmp_path_factory.mktemp("plain")), request.param)


def drawn_one_by_one(runner: ModelRunner) -> list[Logprobs]:
    """What a sampler says at each place of the prompt, with its tokens put where others were drawn."""
    driver, found = Driver(runner), []
    sequence = driver.add(0, PROMPT[:1], SeqParams(slot=0, logprobs=TOPS))
    for token_id in PROMPT[1:]:
        driver.step(sequence)
        (told,) = driver.last.logprobs
        assert told is not None
        found.append(told)
        sequence.tokens[-1] = token_id
    return found


def score(plan: StepPlan, sequence: Sequence, num_tokens: int, *, num_before: int) -> None:
    """Have the next tokens of `sequence` scored, which stand behind `num_before` of the step's tokens."""
    first, last = sequence.num_computed, min(sequence.num_computed + num_tokens, len(PROMPT) - 1)
    plan.score_rows += range(num_before, num_before + last - first)
    plan.score_ids += PROMPT[first + 1 : last + 1]
    plan.score_tops += [TOPS] * (last - first)


@pytest.mark.parametrize("chunk", [len(PROMPT), 29])
def test_a_prompt_scores_what_would_be_drawn_at_each_of_its_places(runner: ModelRunner, chunk: int) -> None:
    """Beside rows that decode, and verify drafts, whose own tokens stay what they are."""
    drawn = drawn_one_by_one(runner)
    driver = Driver(runner)
    beside, alone = driver.add(1, [4, 5, 6]), driver.add(2, [4, 5, 6])
    driver.generate([alone], 9)
    driver.step(beside)
    sequence, found = driver.add(3, PROMPT), list[Logprobs]()
    for begin in range(0, len(PROMPT), chunk):
        tokens = PROMPT[: begin + chunk]
        guess = alone.tokens[len(beside.tokens)]
        plan = StepPlan(sample_seqs=[0], num_drafts=[1])
        driver._add_row(plan, beside, [*beside.tokens, guess])
        score(plan, sequence, len(tokens) - begin, num_before=2)
        driver._add_row(plan, sequence, tokens)
        if len(tokens) == len(PROMPT):
            plan.sample_seqs, plan.num_drafts = [0, 1], [1, 0]
        done = driver._run(plan)
        found += done.scores
        beside.tokens += done.token_ids[:2]
        beside.num_computed, sequence.num_computed = len(beside.tokens) - 1, len(tokens)
    assert beside.tokens == alone.tokens[: len(beside.tokens)]
    assert len(found) == len(drawn) == len(PROMPT) - 1
    for (logprob, ids, values), (_, drawn_ids, drawn_values), token_id in zip(found, drawn, PROMPT[1:], strict=True):
        assert ids == drawn_ids
        assert values == pytest.approx(drawn_values, abs=2e-5)
        if token_id in ids:
            assert logprob == values[ids.index(token_id)]
        else:
            assert logprob < values[-1]


def test_scores_are_log_probabilities() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)) * 3
    logits[2, 7:] = -torch.inf
    expected = logits.double().log_softmax(-1)
    token_ids, tops = [3, 39, 2, 8, 11], [0, 4, 9, 1, 40]
    found = scores(logits, token_ids, tops)
    for row, (logprob, ids, values) in enumerate(found):
        assert logprob == pytest.approx(float(expected[row, token_ids[row]]), abs=1e-6)
        best = expected[row].topk(min(tops[row], 7 if row == 2 else 40))
        assert ids == best.indices.tolist()
        assert values == pytest.approx(best.values.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"score_rows": [0], "score_ids": [1]}, "score_rows, score_ids and score_tops of a step must be of one length"),
        ({"score_rows": [3], "score_ids": [1], "score_tops": [0]}, "score_rows of a step must be 0 to 2, not 3"),
        ({"score_rows": [0], "score_ids": [100], "score_tops": [0]}, "score_ids of a step must be 0 to 99, not 100"),
        ({"score_rows": [0], "score_ids": [1], "score_tops": [-1]}, "score_tops of a step must be 0 to 99, not -1"),
        (
            {"score_rows": [0, 1], "score_ids": [1, 1], "score_tops": [0, 0]},
            "a step samples, scores and pools more positions than it holds",
        ),
    ],
)
def test_scores_that_cannot_be_are_refused(given: dict[str, Any], sentence: str) -> None:
    buffers = StepBuffers(
        max_num_seqs=6, max_num_batched_tokens=16, max_model_len=40, block_size=4, vocab_size=100, device=CPU
    )
    buffers.begin(1)
    plan = StepPlan([0, 1], [2, 1], [9, 20], [1, 2, 3], sample_seqs=[0, 1], **given)
    with pytest.raises(ValueError, match=sentence):
        buffers.fill(plan)
