"""Drafts that the device's own model proposes: asked for where they pay, and kept for the next step only."""

from __future__ import annotations

from itertools import pairwise

import pytest

from novainfer.fsm.messages.events import Submit
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.costs import StepCosts
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.speculation import (
    ERRORS_MAX,
    PROBE_EVERY,
    REST_STEPS,
    STRETCH_STEPS,
    TRY_STEPS,
    DraftModel,
    Speculation,
)
from novainfer.fsm.simulation.checks.oracle import VOCABULARY
from tests.fsm.helpers import Bench

COSTS = ((1, 1.0), (2, 1.3), (3, 1.9), (64, 90.0))  # a second token is cheap, a third costs half a step


def request(request_id: int = 0, num_prompt: int = 4, max_len: int = 64) -> Request:
    params = SamplingParams(max_tokens=None, repetition_penalty=1.0)
    submit = Submit(request_id=request_id, stream_id=0, choice=0, token_ids=[5] * num_prompt, params=params, seed=1)
    return Request(submit, VOCABULARY, [0], max_len)


def done(took_s: float, num_sampled: int, draft_s: float = 0.0, drafts: list[list[int]] | None = None) -> StepDone:
    return StepDone(1, 1, [5] * num_sampled, took_s=took_s, draft_s=draft_s, draft_token_ids=drafts or [])


NUM_STEPS = 1000


def asked(speculation: Speculation, rows: list[Request]) -> list[list[int]]:
    """What is asked for in the steps of a rest, and in those after it that try what seems not to pay."""
    found = []
    for _ in range(REST_STEPS[0] + TRY_STEPS):
        if speculation.begin_step(len(rows)):
            speculation.drafts(rows, len(rows), 60)
            found.append(speculation.wanted(rows))
    return [wanted for wanted in found if wanted]


def test_as_many_are_wanted_as_are_likely_to_pay() -> None:
    speculation = Speculation(DraftModel(), 5, COSTS)
    one = request()
    assert speculation.wanted([one]) == [1]  # half of all, while nothing is known: a quarter for the second one
    for _ in range(30):
        speculation.verified(one, 3, 3)
    assert speculation.wanted([one])[0] == 5
    for _ in range(300):
        speculation.verified(one, 3, 0)
    assert speculation.wanted([one]) == []
    one.token_ids += [6] * PROBE_EVERY
    speculation.begin_step(1)
    speculation.drafts([one], 1, 60)  # nothing pays: a rest follows
    assert asked(speculation, [one])[0] == [1]
    assert speculation.wanted([]) == []


def test_none_is_wanted_behind_the_end_of_a_context() -> None:
    speculation = Speculation(DraftModel(), 5)
    assert [speculation.wanted([request(num_prompt=n, max_len=10)]) for n in (4, 6, 7, 8, 9)] == [[4], [2], [1], [], []]


def test_what_was_proposed_is_there_for_one_step() -> None:
    speculation, rows = Speculation(DraftModel(), 5), [request(0), request(1)]
    speculation.proposed(rows, done(0, 2, drafts=[[7, 8], []]))
    assert speculation.drafts(rows, 2, 60) == [[7, 8], []]
    assert speculation.drafts(rows, 2, 1) == [[7], []]
    rows[0].token_ids.append(6)  # by a step of which nothing was noted: others had joined, whose rest goes on
    assert speculation.drafts(rows, 2, 60) == [[], []]
    speculation.proposed(rows, done(0, 2, drafts=[[7], [8]]))
    assert speculation.drafts(rows, 2, 60) == [[7], [8]]
    speculation.proposed(rows, done(0, 2))
    assert speculation.drafts(rows, 2, 60) == [[], []]


def test_the_device_is_told_all_tokens_where_its_model_proposes() -> None:
    one = request()
    assert one.sampling_spec().token_ids is None
    one.tells_tokens = True
    assert one.sampling_spec().token_ids == [5] * 4


PLAIN_MS, TOKEN_MS = 10.0, 1.0  # of a target's step, and of each draft in it
FLAT = ((1, PLAIN_MS), (64, PLAIN_MS + 63 * TOKEN_MS))


def decode(
    num_steps: int, pass_ms: float, right: int, costs: tuple[tuple[int, float], ...] = FLAT
) -> list[tuple[int, int]]:
    """What each step verifies and what it asks for, where passes take so long and so many drafts of a row are right."""
    speculation, one = Speculation(DraftModel(), 3, costs), request(max_len=10_000)
    found = []
    for _ in range(num_steps):
        drafts, wanted = [], 0
        if speculation.begin_step(1):
            (drafts,) = speculation.drafts([one], 1, 60)
            (wanted,) = speculation.wanted([one]) or [0]
        kept = min(right, len(drafts))
        draft_s = pass_ms * wanted / 1e3
        took_s = (PLAIN_MS + TOKEN_MS * len(drafts)) / 1e3 + draft_s
        outcome = done(took_s, 1 + kept, draft_s, [[7] * wanted])
        if speculation.is_noted:
            speculation.took(outcome, 1 + len(drafts), 1, wanted)
        one.token_ids += [6] * (1 + kept)
        if drafts:
            speculation.verified(one, len(drafts), kept)
        if speculation.is_noted:
            speculation.proposed([one], outcome)
        found.append((len(drafts), wanted))
    return found


def test_a_draft_model_that_pays_is_asked_in_nearly_all_steps() -> None:
    found = decode(NUM_STEPS, pass_ms=1.0, right=3)
    assert sum(wanted == 3 for _, wanted in found) >= 0.9 * NUM_STEPS


def test_a_draft_model_as_slow_as_the_target_is_asked_now_and_then_only() -> None:
    """Its passes are counted, though it is always right; in plain steps nothing is computed for drafts."""
    for right, costs in ((3, FLAT), (0, FLAT), (3, ()), (0, ())):  # (): no costs were measured, the yield alone decides
        found = decode(NUM_STEPS, pass_ms=PLAIN_MS * 1.5, right=right, costs=costs)
        assert 1 <= sum(wanted > 0 for _, wanted in found[8:]) <= 0.1 * NUM_STEPS


def test_what_is_asked_for_is_verified() -> None:
    """The step that asks and the next one decide alike, but for the few where what was faster has changed between."""
    for pass_ms, right in ((1.0, 3), (1.0, 0), (15.0, 3)):
        found = decode(NUM_STEPS, pass_ms, right)
        lost = sum(wanted > 0 and not drafts for (_, wanted), (drafts, _) in pairwise(found))
        assert lost <= 0.02 * NUM_STEPS


def test_who_gains_nothing_is_looked_at_again_beside_one_who_does() -> None:
    """The one's drafts are right, so no rest begins; the other's were wrong for long, and are tried once in a while."""
    costs = ((1, 10.0), (64, 10.0 + 63 * 4.0))
    speculation, rows = Speculation(DraftModel(), 1, costs), [request(i, max_len=10_000) for i in range(2)]
    for _ in range(50):
        speculation.verified(rows[0], 1, 1)
        speculation.verified(rows[1], 1, 0)
    tried = 0
    for _ in range(8 * PROBE_EVERY):
        drafts: list[list[int]] = [[], []]
        wanted: list[int] = []
        if speculation.begin_step(2):
            drafts, wanted = speculation.drafts(rows, 2, 60), speculation.wanted(rows)
        tried += len(drafts[1])
        for one, found, kept in zip(rows, drafts, (1, 0), strict=True):
            if found:
                speculation.verified(one, 1, kept)
            one.token_ids += [6] * (1 + len(found) * kept)
        speculation.proposed(rows, done(0.01, 2, drafts=[[7] * count for count in wanted]))
    assert 1 <= tried <= 8


def test_asking_changes_nothing() -> None:
    speculation, one = Speculation(DraftModel(), 3, FLAT), request()
    speculation.took(done(0.01, 1), 1, 1)
    found = []
    for _ in range(2 * STRETCH_STEPS):
        if speculation.begin_step(1):
            speculation.drafts([one], 1, 60)
        found.append([speculation.wanted([one]) for _ in range(3)])
    assert all(a == b == c for a, b, c in found)
    assert {bool(each[0]) for each in found} == {True, False}


def test_nothing_is_asked_for_where_no_draft_would_be_verified() -> None:
    """Sixteen rows, each of which waits for the drafts of all others: they ask for a try now and then."""
    speculation, rows = (
        Speculation(DraftModel(), 3, ((1, 1.0), (64, 64.0))),
        [request(i, max_len=10_000) for i in range(16)],
    )
    asked = 0
    for _ in range(NUM_STEPS):
        wanted: list[int] = []
        size = 16
        if speculation.begin_step(16):
            size += sum(map(len, speculation.drafts(rows, 16, 60)))
            wanted = speculation.wanted(rows)
        asked += any(wanted)
        speculation.took(done(0.001 * size, 16), size, 16, max(wanted, default=0))
        for one in rows:
            one.token_ids.append(6)
        speculation.proposed(rows, done(0.016, 16, drafts=[[7] * count for count in wanted]))
    assert asked <= 40


def test_a_draft_model_that_fails_again_and_again_is_asked_for_nothing_until_there_is_another() -> None:
    speculation, one = Speculation(DraftModel(), 3, FLAT), request()
    failed = StepDone(1, 1, [5], draft_error="no memory")
    for outcome in [failed] * (ERRORS_MAX - 1) + [done(0, 1, drafts=[[7]])] + [failed] * (ERRORS_MAX - 1):
        speculation.proposed([one], outcome)
    assert speculation.begin_step(1)
    assert speculation.wanted([one])
    speculation.proposed([one], failed)
    assert asked(speculation, [one]) == []
    assert not speculation.begin_step(1)  # nor is anything thought of
    assert not speculation.is_noted
    speculation.proposed([one], done(0, 1))  # nothing was asked for, and nothing went wrong
    assert not speculation.begin_step(1)
    speculation.measured(StepCosts())
    assert speculation.begin_step(1)
    assert speculation.wanted([one])


def test_what_passes_take_is_no_cost_of_the_targets_tokens_and_counts_for_the_step_that_verifies() -> None:
    speculation, one = Speculation(DraftModel(), 3, ((1, 10.0), (4, 10.0))), request(max_len=10_000)
    for _ in range(50):
        speculation.took(done(0.030, 1, draft_s=0.020), 1, 1, 1)
        speculation.took(done(0.010, 2), 2, 1)
    known = speculation._stretches[1]
    assert known.pass_ms == pytest.approx(20.0)
    assert speculation._cost.of(1) == pytest.approx(10.0)
    assert speculation.wanted([one]) == []


def test_what_is_tried_costs_a_hundredth_of_the_time_however_slow_the_draft_model_is() -> None:
    for pass_ms in (1.0, 3.0, 10.0, 30.0):
        found = decode(4 * NUM_STEPS, pass_ms, right=0)[STRETCH_STEPS:]
        spent_ms = sum(TOKEN_MS * num_drafts + pass_ms * wanted for num_drafts, wanted in found)
        assert 0 < spent_ms <= 0.02 * PLAIN_MS * len(found)


def test_who_is_tried_alone_is_tried_without_drafts() -> None:
    speculation = Speculation(DraftModel(), 2)
    bench = Bench(speculation=speculation)
    for _ in range(2):
        bench.submit([5, 6, 7], max_tokens=30)
    for _ in range(3):  # both prompts, a step that asks, and the one that verifies
        bench.step(took_s=0.01)
    assert bench.plan is not None
    assert bench.plan.num_drafts
    bench.fail()
    num_tried = 0
    known = speculation._stretches[2]
    num_steps = known.num_steps
    while bench.scheduler.recovery.is_searching:
        assert bench.plan is not None
        assert not bench.plan.num_drafts
        assert not bench.plan.num_drafts_wanted
        num_tried += 1
        bench.step(took_s=0.01)
    assert num_tried == 2
    assert known.num_steps == num_steps + 1  # the step that was planned behind the last of them
    assert 1 not in speculation._stretches  # what one row takes alone was not noted as a step with guesses
    bench.run()
    assert bench.text(0) == bench.text(1)


class Listening(Speculation):
    """Keeps what it is told of the steps that have ended."""

    def __init__(self) -> None:
        super().__init__(DraftModel(), 2, FLAT)
        self.told: list[tuple[str, StepDone, int, int, int]] = []

    def took(self, outcome: StepDone, num_tokens: int, num_rows: int, num_passes: int = 0) -> None:
        """As it is."""
        self.told.append(("alone", outcome, num_tokens, num_rows, num_passes))
        super().took(outcome, num_tokens, num_rows, num_passes)

    def took_beside_prompt(self, outcome: StepDone, num_drafts: int, num_more: int, num_passes: int) -> None:
        """As it is."""
        self.told.append(("beside", outcome, num_drafts, num_more, num_passes))
        super().took_beside_prompt(outcome, num_drafts, num_more, num_passes)


@pytest.mark.parametrize("num_plain", [0.1, 20], ids="a pass takes {} plain steps".format)
def test_what_is_told_of_a_step_is_what_it_held(num_plain: float) -> None:
    """Prompts come in chunks beside rows that decode, with guesses and without."""
    speculation, held = Listening(), set[tuple[str, bool, bool]]()
    bench = Bench(speculation=speculation, max_model_len=128, num_blocks=96, prefill_chunk_tokens=4, max_num_seqs=3)
    bench.device._wrong_drafts_of_16 = 5
    for _ in range(2):
        bench.submit([5, 6, 7], max_tokens=100)
    bench.step()
    for at in range(60):
        if at % 12 == 4:
            bench.submit([5, 6 + at % 50, *range(7, 20)], max_tokens=3)
        plan, is_noted = bench.plan, speculation.is_noted
        assert plan is not None
        speculation.told.clear()
        num_passes = max(plan.num_drafts_wanted, default=0)
        draft_s = num_passes * num_plain * PLAIN_MS / 1e3
        bench.step(took_s=PLAIN_MS / 1e3 + draft_s, draft_s=draft_s)
        drafts = dict(zip(plan.sample_seqs, plan.num_drafts, strict=False))
        has_prompt = any(count > 1 + drafts.get(seq, 0) for seq, count in enumerate(plan.query_lens))
        assert len(speculation.told) == is_noted
        if is_noted:
            ((kind, outcome, one, other, passes),) = speculation.told
            num_drafts, num_more = sum(plan.num_drafts), len(outcome.token_ids) - len(plan.sample_seqs)
            assert kind == "beside" if has_prompt else "alone"
            assert (one, other) == ((num_drafts, num_more) if has_prompt else (len(plan.input_ids), len(plan.slots)))
            assert passes == num_passes
            held.add((kind, num_drafts > 0, num_more > 0))
    expected = {(kind, *what) for kind in ("alone", "beside") for what in ((False, False), (True, False), (True, True))}
    assert held == expected if num_plain < 1 else held >= {("alone", False, False), ("beside", False, False)}


def test_in_a_rest_nothing_is_asked_for_and_what_was_proposed_before_is_not_kept() -> None:
    """Passes take as long as twenty steps."""
    speculation = Speculation(DraftModel(), 2, FLAT)
    bench = Bench(speculation=speculation, max_model_len=128, num_blocks=64)
    one = bench.submit([5, 6, 7], max_tokens=100)
    wanted, kept = [], []
    bench.step()
    while bench.plan is not None:
        asked = max(bench.plan.num_drafts_wanted, default=0)
        wanted.append(asked)
        bench.step(took_s=(PLAIN_MS + 20 * PLAIN_MS * asked) / 1e3, draft_s=20 * PLAIN_MS * asked / 1e3)
        kept.append(bool(bench.scheduler.requests[one].drafts) if one in bench.scheduler.requests else False)
    assert 1 <= sum(map(bool, wanted)) <= 4
    assert wanted[-60:] == [0] * 60
    assert kept[-60:] == [False] * 60
    assert sum(kept) == sum(map(bool, wanted))
