import msgspec
import pytest

from novainfer.fsm.messages.events import Submit
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.costs import StepCosts
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.speculation import (
    CREDIT_AGAIN,
    CREDIT_SHARE,
    LOOK_STEPS,
    PLACES_PER_LOOK,
    PROBE_EVERY,
    REST_STEPS,
    STRETCH_STEPS,
    DraftModel,
    Lookup,
    Speculation,
    Stretches,
)
from novainfer.fsm.schedule.speculative_config import SpeculativeConfig
from novainfer.fsm.simulation.checks.oracle import VOCABULARY

FLAT = [(1, 10.0), (64, 11.0)]  # a draft costs next to nothing
STEEP = [(1, 10.0), (64, 640.0)]  # as much as a token does


class Always:
    def propose(self, request, count):
        return list(range(count))


def request(num_tokens: int = 8, max_len: int = 100) -> Request:
    params = SamplingParams(max_tokens=max_len)
    submit = Submit(request_id=0, stream_id=0, choice=0, token_ids=[1] * num_tokens, params=params, seed=0)
    return Request(submit, VOCABULARY, (), max_len)


def took(took_s: float, num_sampled: int, draft_s: float = 0.0) -> StepDone:
    return StepDone(1, 1, [5] * num_sampled, took_s=took_s, draft_s=draft_s)


def counts(speculation: Speculation, rows: list[Request], num_tokens: int = 0, most: int = 100) -> list[int]:
    return [len(drafts) for drafts in speculation.drafts(rows, num_tokens or len(rows), most)]


def drafts_of(speculation: Speculation, one: Request, most: int = 100) -> list[int]:
    """Those of the next step of `one`, alone."""
    return speculation.drafts([one], 1, most)[0] if speculation.begin_step(1) else []


def test_drafts_are_verified_where_they_cost_nothing_and_not_where_they_cost_a_step():
    assert counts(Speculation(Always(), 5, FLAT), [request()]) == [5]
    assert counts(Speculation(Always(), 5, STEEP), [request()]) == [0]


def test_in_a_large_step_drafts_do_not_pay_though_they_do_in_a_small_one():
    costs = [(1, 10.0), (8, 10.8), (64, 64.0)]
    speculation = Speculation(Always(), 3, costs)
    assert counts(speculation, [request()]) == [3]
    assert counts(speculation, [request() for _ in range(32)]) == [0] * 32


def test_each_draft_more_must_pay_beside_those_that_are_in_the_step_already():
    """By the place that it takes, by the chance that all before it are right, and for the tokens that they bring."""
    knee = [(1, 10.0), (3, 10.2), (4, 100.0)]  # a fourth token is as dear as nine steps
    assert counts(Speculation(Always(), 5, knee), [request()]) == [2]
    speculation = Speculation(Always(), 9, [(1, 10.0), (64, 73.0)])  # 1 ms each
    half = request()
    for _ in range(50):
        speculation.verified(half, 1, 0)
        speculation.verified(half, 1, 1)
    # 1/2 * 10 > 1, 1/4 * 11 > 1.5, but not 1/8 * 12 > 1.75: chance * milliseconds so far > 1 ms * tokens so far
    assert counts(speculation, [half]) == [2]


def test_no_more_than_the_budget_and_none_behind_the_last_token():
    speculation = Speculation(Always(), 5, FLAT)
    assert sum(counts(speculation, [request(), request()], most=3)) == 3
    assert counts(speculation, [request(8, 11)]) == [2]  # 11 tokens: the two, and the one behind them
    assert counts(speculation, [request(10, 11)]) == [0]


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_what_is_tried_again_stays_within_the_budget_too(most):
    """A device's buffers hold so many tokens in a step, and no more."""
    speculation = Speculation(Always(), 5, STEEP)  # no draft pays: each is a try
    rows = [request(8, 10_000) for _ in range(4)]
    for one in rows:
        one.token_ids += [1] * PROBE_EVERY  # long ago
    steps = (speculation.begin_step(len(rows)) for _ in range(2000))
    tried = [sum(counts(speculation, rows, most=most)) for may_guess in steps if may_guess]
    assert max(tried, default=0) <= most
    if most:
        assert max(tried) > 0


def test_the_next_draft_goes_where_it_is_most_likely_right():
    speculation = Speculation(Always(), 5, FLAT)
    right, wrong = request(), request()
    for _ in range(10):
        speculation.verified(right, 3, 3)
        speculation.verified(wrong, 3, 0)
    assert counts(speculation, [wrong, right], most=3) == [0, 3]


def test_a_request_whose_drafts_are_wrong_gets_none_but_is_looked_at_again():
    speculation = Speculation(Always(), 5, [(1, 10.0), (64, 100.0)])
    one = request()
    for _ in range(30):
        speculation.verified(one, 5, 0)
    least, _ = REST_STEPS
    assert [drafts_of(speculation, one) for _ in range(least)] == [[]] * least
    one.token_ids += [1] * PROBE_EVERY
    assert [drafts_of(speculation, one) for _ in range(4)].count([0]) == 1


def test_where_drafts_slow_steps_down_only_one_step_in_many_has_them():
    speculation = Speculation(Always(), 5, FLAT)  # wrong: they cost much more than was measured
    one = request(8, 10_000)
    drafted = 0
    for _ in range(1000):
        drafts = drafts_of(speculation, one)
        drafted += bool(drafts)
        num_tokens = 1 + len(drafts)
        speculation.took(took(0.01 * num_tokens, 1), num_tokens, 1)
        if drafts:
            speculation.verified(one, len(drafts), len(drafts) - 1)
    assert 4 <= drafted <= 16


def test_where_drafts_pay_nearly_all_steps_have_them():
    speculation = Speculation(Always(), 5, STEEP[:1])  # one size was measured: all cost the same
    one = request(8, 10_000)
    drafted = 0
    for _ in range(4 * STRETCH_STEPS):
        drafts = drafts_of(speculation, one)
        drafted += bool(drafts)
        speculation.took(took(0.01, 1 + len(drafts)), 1 + len(drafts), 1)
        if drafts:
            speculation.verified(one, len(drafts), len(drafts))
    assert drafted >= 0.94 * 4 * STRETCH_STEPS


def test_costs_are_corrected_by_what_steps_take():
    cost = StepCosts([(1, 10.0), (4, 10.0), (16, 40.0)])
    assert (cost.of(1), cost.of(4), cost.of(10), cost.of(64)) == (10.0, 10.0, 25.0, 160.0)
    for _ in range(100):
        cost.took(4, 20.0)
    assert cost.of(4) == pytest.approx(20.0, rel=0.05)
    assert 10.0 < cost.of(1) < cost.of(4)
    assert cost.of(16) >= cost.of(4)


def test_nothing_measured_is_a_step_that_costs_the_same_whatever_it_holds():
    assert StepCosts([]).of(1) == StepCosts([]).of(1000)


def test_counts_are_by_place_in_the_row():
    speculation = Speculation(Always(), 3)
    one = request()
    for accepted in (0, 2, 3):
        speculation.verified(one, 3, accepted)
    said = speculation.statistics()
    assert (said.num_drafts_total, said.num_draft_tokens_total, said.num_accepted_tokens_total) == (3, 9, 5)
    assert said.accepted_per_position == [2, 2, 1]


def test_lookup_goes_on_as_the_text_did():
    one = request()
    one.token_ids[:] = [5, 6, 7, 8, 9, 5, 6]
    assert Lookup(2, 4).propose(one, 3) == [7, 8, 9]


def test_the_proposer_is_that_of_the_method():
    assert isinstance(Speculation.of(SpeculativeConfig(num_speculative_tokens=2)).proposer, Lookup)
    assert Speculation.of(SpeculativeConfig(method="draft_model", model="tiny", num_speculative_tokens=2)).is_on_device


def test_measurements_of_a_busy_machine_never_say_that_more_tokens_cost_less():
    cost = StepCosts([(1, 30.0), (2, 10.0), (4, 12.0)])
    assert [cost.of(n) for n in (1, 2, 4)] == [10.0, 10.0, 12.0]


def test_one_slow_step_does_not_turn_a_decision():
    known = Stretches(plain_ms=10.0, guessed_ms=10.0)
    known.took(2000.0, 0.0, 2, 1)
    assert known.has_guesses
    assert known.credit > 1.0


def test_costs_measured_while_the_machine_was_busy_are_forgotten():
    """Only plain steps are seen, four times as fast: a second token does not cost a step for that."""
    speculation, one = Speculation(Always(), 5, [(1, 40.0), (2, 41.0), (64, 60.0)]), request(8, 10_000)
    for _ in range(300):
        speculation.took(took(0.01, 1), 1, 1)
    speculation.verified(one, 5, 5)
    assert sum(bool(drafts_of(speculation, one)) for _ in range(STRETCH_STEPS)) > 0.9 * STRETCH_STEPS


def test_what_guesses_have_cost_is_made_up_for_by_plain_steps_before_they_are_tried_again():
    known = Stretches(plain_ms=10.0)
    while known.has_guesses:
        known.next_step()
        known.took(15.0, 10.0, 1, 1)  # and a draft model took as long as a plain step
    cost = CREDIT_AGAIN - known.credit  # in plain steps
    rested = 0
    while not known.has_guesses:
        known.next_step()
        rested += not known.has_guesses
        known.took(10.0, 0.0, 1, 1)
    assert rested >= cost / CREDIT_SHARE
    assert known.credit == CREDIT_AGAIN
    assert known.is_trying


def test_guesses_beside_prompts_count_too_and_what_those_take_does_not():
    """Requests come and go, and hardly a step has no prompt: where guesses are wrong, they end all the same."""
    for num_more, ends in ((0, True), (2, False)):
        speculation, one = Speculation(DraftModel(), 2, FLAT), request(8, 10_000)
        speculation.begin_step(1)
        known = speculation._stretches[1]
        known.plain_ms, known.left = 10.0, 1000
        for _ in range(20):
            speculation.begin_step(1)
            speculation.wanted([one])
            outcome = took(0.3, 1 + num_more, draft_s=0.005)
            speculation.took_beside_prompt(outcome, 2, num_more, num_passes=2)
        assert known.has_guesses is not ends
        assert known.guessed_ms == 0.0
        assert known.plain_ms == 10.0
        assert 2.4 < known.pass_ms < 2.5  # two passes in 5 ms, the first of which has nine tokens to catch up on


def test_guesses_beside_prompts_cost_what_their_tokens_do():
    speculation = Speculation(Always(), 2, STEEP)
    speculation.begin_step(1)
    known = speculation._stretches[1]
    known.plain_ms = 10.0
    before = known.credit
    speculation.took_beside_prompt(took(0.3, 2), 2, 1, num_passes=0)
    assert known.credit == pytest.approx(before - 2 + 1)  # two tokens as dear as steps, and one token more for them


def test_that_no_guess_pays_beside_a_prompt_says_nothing_of_other_steps():
    speculation, one = Speculation(Always(), 2, [(1, 10.0), (30, 11.0), (31, 111.0)]), request(8, 10_000)
    assert speculation.begin_step(1)
    assert counts(speculation, [one], num_tokens=30) == [0]
    assert speculation._stretches[1].has_guesses
    assert counts(speculation, [one]) == [2]


def test_what_was_drafted_in_several_steps_of_prompts_alone_counts_for_the_first_that_may_verify():
    speculation = Speculation(DraftModel(), 2, FLAT)
    for _ in range(2):
        assert speculation.begin_step(0)
        speculation.took_beside_prompt(took(0.3, 1, draft_s=0.005), 0, 0, num_passes=2)
    speculation.begin_step(1)
    known = speculation._stretches[1]
    known.plain_ms, before = 10.0, known.credit
    speculation.took_beside_prompt(took(0.3, 1), 0, 0, num_passes=0)
    assert known.credit == pytest.approx(before - 1)


def test_after_a_rest_those_guess_first_that_a_draft_model_catches_up_with_soonest():
    """As many as it catches up with in the time of one plain step."""
    speculation = Speculation(DraftModel(), 2, [(1, 10.0), (1000, 1009.0)])
    rows = [request(num_tokens, 10_000) for num_tokens in (400, 20, 900, 30)]
    speculation.begin_step(4)
    known = speculation._stretches[3]
    known.plain_ms, known.pass_ms = 13.0, 13.0 / 5  # a fifth of what the target takes
    known.is_trying, known.at = True, 1
    wanted = speculation.wanted(rows)
    assert [count > 0 for count in wanted] == [False, True, False, True]
    known.pass_ms = 13.0 / 200
    assert all(speculation.wanted(rows))
    known.pass_ms = 13.0 * 2  # with none of them: one is tried all the same
    assert [count > 0 for count in speculation.wanted(rows)] == [False, True, False, False]


def test_drafts_that_nothing_verifies_have_cost_as_much():
    paid, wasted = Stretches(plain_ms=10.0), Stretches(plain_ms=10.0)
    for known, drafting_ms in ((paid, 0.0), (wasted, 5.0)):
        known.rest()
        known.next_step()
        known.took(10.0, drafting_ms, 1, 1)
    assert wasted.left - paid.left == int(0.5 / CREDIT_SHARE)


def test_drafts_that_nothing_verifies_beside_a_prompt_have_cost_as_much():
    """They were asked for in a step after which a rest began, and the next one has a prompt in it."""
    speculation, one = Speculation(DraftModel(), 2, FLAT), request(8, 10_000)
    speculation.begin_step(1)
    known = speculation._stretches[1]
    known.plain_ms = 10.0
    speculation.wanted([one])
    speculation.took_beside_prompt(took(0.3, 1, draft_s=0.005), 0, 0, num_passes=2)
    known.rest()
    for _ in range(2):  # what they have cost is told once
        speculation.begin_step(1)
        least, _ = REST_STEPS
        speculation.took_beside_prompt(took(0.3, 1), 0, 0, num_passes=0)
        assert known.at + known.left == least + int(0.5 / CREDIT_SHARE)


def test_a_rest_has_an_end_however_long_drafts_took_that_nothing_verified():
    known = Stretches(plain_ms=1.0)
    known.rest()
    known.next_step()
    known.took(1.0, 60_000.0, 1, 1)
    assert known.left == REST_STEPS[1]


def test_nothing_is_noted_in_a_rest_but_for_its_beginning_and_its_end():
    known = Stretches(plain_ms=10.0)
    known.rest()
    least, _ = REST_STEPS
    noted = []
    for _ in range(least):
        known.next_step()
        noted.append(known.is_noted)
    assert noted == [True] + [False] * (least - 4) + [True] * 3


def test_whether_a_step_is_noted_is_the_same_where_a_rest_is_passed_over():
    speculation = Speculation(Always(), 5, FLAT)
    speculation.begin_step(1)
    speculation._stretches[1].rest()
    noted, least = [], REST_STEPS[0]
    for _ in range(least):
        assert not speculation.begin_step(1)
        noted.append(speculation.is_noted)
    assert noted == [True] + [False] * (least - 4) + [True] * 3
    assert speculation.begin_step(1)
    assert speculation.is_noted


def test_the_first_step_of_a_rest_is_no_plain_one_and_a_look_is_no_rest():
    """The loop has still to commit what was guessed."""
    known = Stretches(plain_ms=10.0)
    known._begin(has_guesses=False, num_steps=LOOK_STEPS)
    for ms in (15.0, *[10.0] * (LOOK_STEPS - 1)):
        known.next_step()
        known.took(ms, 0.0, 1, 1)
    assert known.plain_ms == 10.0
    known.next_step()
    assert known.has_guesses
    assert not known.is_trying


def test_what_is_tried_after_a_rest_goes_on_while_it_is_right():
    for num_right, goes_on in ((0, False), (1, True)):
        speculation, one = Speculation(Always(), 1, FLAT), request(8, 10_000)
        speculation.begin_step(1)
        known = speculation._stretches[1]
        known.rest()
        while not speculation.begin_step(1):
            pass
        assert known.is_trying
        assert speculation.drafts([one], 1, 100) == [[0]]
        speculation.took(took(0.01, 1 + num_right), 2, 1)
        assert known.is_trying is goes_on


def test_what_passes_between_two_steps_counts():
    """As long as a step itself: then two tokens in a step that is half as long again are faster than two steps."""
    speculation = Speculation(Always(), 1, [(1, 10.0), (2, 16.0), (64, 400.0)])
    one = request(8, 10_000)
    for _ in range(40):
        speculation.verified(one, 1, 0)
    for _ in range(20):
        speculation.verified(one, 1, 1)
    assert 0.4 < speculation._chance(one) < 0.55
    assert counts(speculation, [one]) == [0]
    known = speculation._stretches[1]
    known.plain_ms = 20.0
    assert counts(speculation, [one]) == [1]


def test_guesses_that_slow_down_what_passes_between_two_steps_do_not_pay():
    """The device is as fast as ever, and the loop takes as long for each draft as a step."""
    speculation, one, drafted = Speculation(Always(), 3, FLAT), request(8, 100_000), 0
    for _ in range(1000):
        drafts = drafts_of(speculation, one)
        kept = len(drafts) // 2
        outcome = msgspec.structs.replace(took(0.01, 1 + kept), cycle_s=0.011 + 0.010 * len(drafts))
        speculation.took(outcome, 1 + len(drafts), 1)
        one.token_ids += [1] * (1 + kept)
        if drafts:
            drafted += 1
            speculation.verified(one, len(drafts), kept)
    assert drafted <= 50


def test_a_text_that_begins_to_repeat_is_seen_after_a_rest():
    """Two thousand steps in which all drafts were wrong, and then all are right."""
    for costs, most in ((FLAT, 200), ([(1, 10.0), (2, 14.0), (64, 300.0)], 300)):
        speculation, one = Speculation(Always(), 3, costs), request(8, 1_000_000)
        gained = []
        for is_right in (False, True):
            gained.append(0)
            for _ in range(2000 if not is_right else most + STRETCH_STEPS):
                drafts = drafts_of(speculation, one)
                kept = len(drafts) if is_right else 0
                took_s = StepCosts(costs).of(1 + len(drafts)) / 1e3
                speculation.took(took(took_s, 1 + kept), 1 + len(drafts), 1)
                if drafts:
                    speculation.verified(one, len(drafts), kept)
                one.token_ids += [1] * (1 + kept)
                gained[-1] += kept
        assert gained[1] >= 2 * STRETCH_STEPS


def test_a_long_text_is_looked_through_a_part_at_a_time_and_from_a_recording_as_far_as_before() -> None:
    one = request()
    one.token_ids[:] = [5, 6, *range(100, 100 + 3 * PLACES_PER_LOOK), 5, 6]
    lookup = Lookup(2, 4)
    one.token_ids[2 * PLACES_PER_LOOK : 2 * PLACES_PER_LOOK + 3] = [5, 6, 7]
    found = [lookup.propose(one, 1) for _ in range(2)]
    assert found == [[100], [100]]  # the place at the beginning
    one.draft_state = None  # as it is when a recording is read
    assert lookup.propose(one, 1) == [7]  # the latest one, in the third part
    assert one.num_indexed == 3 * PLACES_PER_LOOK
