"""The fake device: its tokens are a fixed function of the last one, with drafts and without."""

from __future__ import annotations

from novainfer.actors.fake import FakeDevice
from novainfer.fsm.step import StepPlan


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
