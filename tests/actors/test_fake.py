"""The fake device: its tokens are a fixed function of the last one, with drafts and without."""

from __future__ import annotations

import pytest

from novainfer.actors.device.fake import FakeDevice
from novainfer.fsm.messages.step import NO_TOKEN, SAMPLED, StepPlan


def test_drafts_are_taken_while_they_are_what_follows() -> None:
    plan = StepPlan([0, 1, 2], [4, 2, 3], [9, 5, 3], [65, 66, 67, 70, 80, 81, 40, 41, 42])
    plan.sample_seqs, plan.num_drafts = [0, 1], [3, 1]
    done = FakeDevice().run(plan)
    assert done.token_ids == [66, 67, 68, 81, 82]
    assert done.num_tokens == [3, 2]
    assert done.draft_token_ids == [[], []]


def test_the_drafts_that_it_proposes_are_right() -> None:
    plan = StepPlan([0, 1], [1, 1], [9, 5], [65, 80], sample_seqs=[0, 1], num_drafts_wanted=[2, 0])
    done = FakeDevice().run(plan)
    assert (done.token_ids, done.draft_token_ids) == ([66, 81], [[67, 68], []])


def test_without_drafts_each_row_gets_one_token() -> None:
    done = FakeDevice().run(StepPlan([0, 1], [2, 1], [9, 5], [65, 66, 80], sample_seqs=[1, 0]))
    assert (done.token_ids, done.num_tokens) == ([81, 67], [])


def test_a_token_that_the_plan_leaves_open_is_the_one_that_the_slot_was_given_last() -> None:
    device = FakeDevice(next_token=lambda token: NO_TOKEN if token == 90 else token + 1)
    device.run(
        StepPlan([4, 7, 2], [1, 3, 1], [9, 5, 3], [65, 70, 71, 72, 90], sample_seqs=[0, 1, 2], num_drafts=[0, 1, 0])
    )
    plan = StepPlan([7, 4, 2], [1, 2, 1], [6, 11, 4], [SAMPLED, 50, SAMPLED, SAMPLED], sample_seqs=[0, 1, 2], after=1)
    assert device.run(plan).token_ids == [74, 67, 1]
    assert plan.input_ids == [SAMPLED, 50, SAMPLED, SAMPLED]
    with pytest.raises(KeyError, match="5"):
        device.run(StepPlan([5], [1], [6], [SAMPLED], sample_seqs=[0], after=1))
