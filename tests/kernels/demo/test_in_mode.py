"""The engine's kernels answer as transformers does, and INT8 weights cost next to nothing."""

from __future__ import annotations

import pytest

from novainfer.fsm.messages.mode import CHECKPOINT, INT8
from novainfer.kernels.demo import model_path
from tools.demo.evaluate import evaluate, load
from tools.demo.in_mode import ModeModel

SEED = 7


@pytest.mark.slow
def test_the_engine_answers_as_transformers_does() -> None:
    for group, count in (("names", 64), ("json", 24)):
        scores = [
            evaluate(*load(model_path(), precision), group, seed=SEED, num_questions=count)
            for precision in (None, CHECKPOINT)
        ]
        assert scores[0] == scores[1]


@pytest.mark.slow
def test_int8_weights_answer_nearly_as_well() -> None:
    tokenizer, model = load(model_path(), INT8)
    assert model.runner.mode.precision == INT8
    for group, least in (("sums", 0.95), ("products", 0.98), ("facts", 0.93), ("names", 0.9), ("json", 0.93)):
        score = evaluate(tokenizer, model, group, seed=SEED, num_questions=128)
        assert score.num_right / score.num_asked >= least, group


def test_scores_are_of_the_tokens_given() -> None:
    model = ModeModel(model_path())
    prompts = [[40, 41, 42], [43, 44, 45, 46, 47]]
    replies = [[50, 51, 52, 53], [60]]
    together = model.score(prompts, replies)
    assert [len(row) for row in together] == [4, 1]
    assert model.score(prompts[:1], replies[:1])[0] == together[0]
    assert all(logprob < 0 for row in together for logprob, _ in row)
    most_likely = [[token for _, token in row] for row in together]
    assert most_likely != replies
    likely = [most_likely[0][:1]]
    assert model.score(prompts[:1], likely)[0][0][1] == likely[0][0]
