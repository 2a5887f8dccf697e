"""Masks that come while their step is computed: what was given in time counts, and what was not gives no token."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import repeat
from typing import Any

import pytest

from novainfer.fsm.messages.step import NO_MASK, SeqParams, StepDone, StepMasks, StepPlan
from novainfer.kernels.masks import mask_words, packed_mask
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.sampling import awaited
from tests.kernels.driver import Driver, Sequence, make_runner
from tests.kernels.test_masks import PROMPTS, SHAPE, follows, save_checkpoint

Give = Callable[[], None]
WAYS = [SeqParams(slot=0), SeqParams(slot=1, temperature=1.0, top_p=0.9), SeqParams(slot=2, logprobs=2)]


@pytest.fixture(scope="module", params=["native", "reference"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(save_checkpoint(SHAPE, tmp_path_factory.mktemp("plain")), request.param)


class LateDriver(Driver):
    """Launches steps without their masks, but for the first of several; `give(step's masks)` says how they come."""

    def __init__(self, runner: ModelRunner, come: Callable[[Give], None], **how: Any) -> None:
        super().__init__(runner, allowed=follows, **how)
        runner._masks.begin(StepPlan())  # its steps are counted from the first one on
        runner._masks._given.clear()
        self._come = come
        self.lacking: Collection[int] = ()  # slots whose masks do not come
        self.is_said = False  # and that is said
        self.num_given = 0

    def _run(self, plan: StepPlan) -> StepDone:
        size, masks = 4 * mask_words(SHAPE.vocab_size), plan.masks
        places = list(range(min(1, len(plan.mask_positions) - 1), len(plan.mask_positions))) if masks else []
        counts = plan.num_drafts or repeat(0, len(plan.sample_seqs))
        slots = [plan.slots[seq] for seq, num in zip(plan.sample_seqs, counts, strict=True) for _ in range(1 + num)]
        coming = [place for place in places if slots[plan.mask_positions[place]] not in self.lacking]
        plan.masks_to_come = places
        plan.masks = masks[: len(masks) - size * len(places)]  # they are all but the first
        step_id = self._step_id + 1

        def give() -> None:
            self.num_given += len(coming)
            for place in coming:
                self.runner.give(StepMasks(step_id, 0, [place], masks[size * place :][:size]))
            if self.is_said:
                self.runner.give(StepMasks(step_id, 0, [place for place in places if place not in coming]))

        self._come(give)
        return super()._run(plan)


def rows_of(driver: Driver) -> list[Sequence]:
    return [driver.add(way.slot, prompt, way) for way, prompt in zip(WAYS, PROMPTS, strict=True)]


@pytest.fixture(params=["before", "while it waits"])
def come(
    request: pytest.FixtureRequest, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Give], None]:
    """Masks come before their step is begun, or when it has come to sampling and waits."""
    if request.param == "before":
        return lambda give: give()
    due: list[Give] = []
    condition = runner._masks._came

    def wait(timeout: float | None = None) -> bool:
        assert due, "a step waits for masks that have been given"
        due.pop()()
        return True

    monkeypatch.setattr(condition, "wait", wait)
    return due.append


@pytest.mark.parametrize("ahead", [False, True])
def test_the_tokens_are_those_of_masks_that_were_there(
    runner: ModelRunner, come: Callable[[Give], None], ahead: bool
) -> None:
    plain = Driver(runner, allowed=follows)
    wanted = plain.generate(rows_of(plain), 12)
    late = LateDriver(runner, come, ahead=ahead)
    assert late.generate(rows_of(late), 12) == wanted
    assert late.num_given > 12


@pytest.mark.parametrize("is_said", [False, True])
def test_a_row_whose_mask_does_not_come_gets_no_token_and_the_others_theirs(
    runner: ModelRunner, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited, "MASKS_LIMIT_S", 0.0)
    plain = Driver(runner, allowed=follows)
    wanted = plain.generate(rows_of(plain), 8)
    late = LateDriver(runner, lambda give: give(), ahead=True)
    late.is_said = is_said
    rows = rows_of(late)
    for _ in range(3):
        late.step(*rows)
    late.lacking = {1}
    tokens = late.step(*rows)
    assert tokens[1] == NO_MASK
    assert late.last.logprobs[1] is None
    assert [row.tokens[-1] for row in (rows[0], rows[2])] == [wanted[0][3], wanted[2][3]]
    # A step that was planned ahead goes on from a token that never came: whatever its mask is, it gets none either.
    late.lacking = ()
    assert late.step(*rows)[1] == NO_MASK
    # Computed again, with its mask, it is as if nothing had been.
    rows[1].tokens = rows[1].tokens[:-2]
    rows[1].num_computed = len(rows[1].tokens) - 1
    late.ahead = False
    while len(rows[1].tokens) < len(PROMPTS[1]) + 8:
        late.step(*rows[1:2])
    late.step(*[row for row in rows if row is not rows[1]])
    assert rows[1].tokens[len(PROMPTS[1]) :] == wanted[1]
    assert rows[0].tokens[len(PROMPTS[0]) :] == wanted[0][:6]


def test_a_row_with_drafts_whose_masks_do_not_come_gets_no_token_and_the_others_theirs(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited, "MASKS_LIMIT_S", 0.0)
    plain = Driver(runner, allowed=follows)
    wanted = plain.generate(rows_of(plain), 8)
    late = LateDriver(runner, lambda give: give())
    rows = rows_of(late)
    late.generate(rows, 3)
    late.lacking = {1}
    right = [tokens[3:5] for tokens in wanted]
    assert late.verify(rows, [right[0], right[1], [right[2][0], right[2][1] ^ 1]]) == [3, 1, 2]
    assert late.last.token_ids == [*wanted[0][3:6], NO_MASK, *wanted[2][3:5]]
    assert late.last.logprobs[3] is None
    # Verified again, with its masks, it is as if nothing had been.
    late.lacking = ()
    rows[1].tokens.pop()
    rows[1].num_computed -= 1
    assert late.verify(rows[1:2], right[1:2]) == [3]
    assert [row.tokens[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)] == [
        *(wanted[0][:6], wanted[1][:6], wanted[2][:5])
    ]


def test_masks_of_steps_that_have_ended_are_forgotten(runner: ModelRunner) -> None:
    driver = LateDriver(runner, lambda give: give())
    rows = rows_of(driver)
    for _ in range(4):
        driver.step(*rows)
        runner.give(StepMasks(driver._step_id - 1, 0, [0], bytes(4 * mask_words(SHAPE.vocab_size))))
    assert len(runner._masks._given) <= 1


def test_masks_that_are_not_as_many_as_their_places_are_refused(runner: ModelRunner) -> None:
    words = packed_mask([1], SHAPE.vocab_size).tobytes()
    with pytest.raises(ValueError, match=r"2 masks of \d+ bytes each are not"):
        runner.give(StepMasks(1, 0, [0, 1], words))


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "random", "reported"])
def test_what_a_mask_allows_and_a_banned_sequence_forbids_is_not_drawn(runner: ModelRunner, way: SeqParams) -> None:
    """`bad_words` beside a grammar: the last token of a banned sequence is masked behind the others, the rest stays."""
    plain = Driver(runner, allowed=follows)
    row = plain.add(0, PROMPTS[0], SeqParams(slot=0, temperature=way.temperature, top_p=way.top_p))
    plain.generate([row], 9)
    at = next(at for at in range(6, len(row.tokens)) if follows(row.tokens[:at]) is not None)
    banned = row.tokens[at - 1 : at + 1]
    params = SeqParams(slot=0, temperature=way.temperature, top_p=way.top_p, banned_sequences=[banned])
    driver = Driver(runner, allowed=follows)
    other = driver.add(0, PROMPTS[0], params)
    driver.generate([other], 9)
    first = next(at for at in range(1, len(row.tokens)) if row.tokens[at - 1 : at + 1] == banned)
    assert other.tokens[:first] == row.tokens[:first]
    assert all(other.tokens[at - 1 : at + 1] != banned for at in range(len(PROMPTS[0]), len(other.tokens)))
    for at in range(len(PROMPTS[0]), len(other.tokens)):
        allowed = follows(other.tokens[:at])
        assert allowed is None or other.tokens[at] in allowed
