"""Sequences that are not to be written: what completes one is not drawn, at any place, however tokens are computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from checkpoints import Shape, save_checkpoint
from driver import Driver, make_runner

from novainfer.fsm.messages.step import SeqParams, StepPlan
from novainfer.kernels.masks import Masks, packed_mask
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.sampling.banned import BannedSequences
from novainfer.kernels.sampling.verify import Positions

SHAPE = Shape("plain", 4, 2, 16, 64, 160, eos_token_id=3)
PROMPTS = [[9, 4, 2], [7] * 5, [1, 2, 3, 4]]
WAYS = [SeqParams(slot=0), SeqParams(slot=1, temperature=1.0, top_p=0.9), SeqParams(slot=2, logprobs=2)]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(save_checkpoint(SHAPE, tmp_path_factory.mktemp("plain")), "native")


def banned_after(tokens: Sequence[int], sequences: Sequence[Sequence[int]]) -> set[int]:
    """Worked out anew from all tokens."""
    return {one[-1] for one in sequences if list(tokens[len(tokens) - len(one) + 1 :]) == list(one[:-1])}


def written(runner: ModelRunner, sequences: list[list[int]], *, by_masks: bool, ahead: bool = False) -> list[list[int]]:
    def allowed(tokens: Sequence[int]) -> list[int]:
        return [i for i in range(SHAPE.vocab_size) if i not in banned_after(tokens, sequences)]

    driver = Driver(runner, allowed=allowed if by_masks else None, ahead=ahead)
    rows = []
    for way, prompt in zip(WAYS, PROMPTS, strict=True):
        params = SeqParams(slot=way.slot, temperature=way.temperature, top_p=way.top_p, logprobs=way.logprobs)
        params.banned_sequences = [] if by_masks else sequences
        rows.append(driver.add(way.slot, prompt, params))
    driver.generate(rows, 20)
    return [row.tokens for row in rows]


@pytest.fixture(scope="module")
def sequences(runner: ModelRunner) -> list[list[int]]:
    """Of what is written where nothing is banned: pairs, triples, one token, and what a prompt begins."""
    free = written(runner, [], by_masks=True)
    pairs = [list(pair) for tokens in free for pair in list(pairwise(tokens[6:]))[::4]]
    triples = [tokens[at : at + 3] for tokens in free for at in (8, 13)]
    begun = [tokens[len(prompt) - 2 : len(prompt) + 1] for tokens, prompt in zip(free, PROMPTS, strict=True)]
    return [*pairs, *triples, *begun, [free[0][7]]]


@pytest.mark.parametrize("ahead", [False, True])
def test_no_banned_sequence_is_completed(runner: ModelRunner, sequences: list[list[int]], ahead: bool) -> None:
    """The very tokens of a run in which masks forbid the same."""
    expected = written(runner, sequences, by_masks=True)
    assert written(runner, sequences, by_masks=False, ahead=ahead) == expected
    assert expected != written(runner, [], by_masks=True)
    for tokens, prompt in zip(expected, PROMPTS, strict=True):
        for at in range(len(prompt), len(tokens)):
            assert tokens[at] not in banned_after(tokens[:at], sequences)


def test_drafts_that_complete_one_are_wrong(runner: ModelRunner, sequences: list[list[int]]) -> None:
    free, expected = written(runner, [], by_masks=True), written(runner, sequences, by_masks=True)
    driver = Driver(runner, seed=1)
    rows = []
    for way, prompt in zip(WAYS, PROMPTS, strict=True):
        params = SeqParams(slot=way.slot, temperature=way.temperature, top_p=way.top_p, logprobs=way.logprobs)
        params.banned_sequences = sequences
        rows.append(driver.add(way.slot, prompt, params))
    driver.step(*rows)
    for step in range(9):
        guess_of = expected if step % 2 else free
        driver.verify(rows, [guess_of[row.slot][len(row.tokens) : len(row.tokens) + 1 + step % 3] for row in rows])
    for row, right in zip(rows, expected, strict=True):
        assert row.tokens[: len(right)] == right[: len(row.tokens)]


def test_a_mask_that_is_there_keeps_what_it_forbids() -> None:
    banned = BannedSequences(70)
    banned.admit(SeqParams(slot=1, banned_sequences=[[5, 6], [40], [31, 32, 33]], token_ids=[1, 31]))
    plan = StepPlan([0, 1], [1, 1], [4, 3], [9, 32], sample_seqs=[0, 1])
    given = Masks([1], packed_mask([6, 33, 40, 69], 70)[None])
    at = banned.masked(plan, Positions([0, 1], [4, 3], masks=given), lambda slot: 0)
    assert at.masks is not None
    assert list(at.masks.rows) == [1]
    assert np.flatnonzero(at.masks.allowed(70)[0]).tolist() == [6, 69]
    at = banned.masked(plan, Positions([0, 1], [4, 3]), lambda slot: 0)
    assert at.masks is not None
    assert np.flatnonzero(~at.masks.allowed(70)[0]).tolist() == [33, 40]
    banned.admit(SeqParams(slot=1))
    assert banned.masked(plan, Positions([0, 1], [4, 3]), lambda slot: 0).masks is None


def test_tokens_so_far_must_be_told() -> None:
    with pytest.raises(ValueError, match="banned sequences need the tokens so far"):
        BannedSequences(70).admit(SeqParams(slot=1, banned_sequences=[[5, 6]]))
