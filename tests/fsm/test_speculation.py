import pytest

from novainfer.fsm.messages.events import Submit
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.speculation import LOOK_EVERY, PLACES_PER_LOOK, PROBE_EVERY, Cost, Lookup, Pace, Speculation
from novainfer.fsm.schedule.speculative_config import SpeculativeConfig
from novainfer.fsm.simulation.oracle import VOCABULARY

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


def test_drafts_are_verified_where_they_cost_nothing_and_not_where_they_cost_a_step():
    assert counts(Speculation(Always(), 5, FLAT), [request()]) == [5]
    assert counts(Speculation(Always(), 5, STEEP), [request()]) == [0]


def test_in_a_large_step_drafts_do_not_pay_though_they_do_in_a_small_one():
    costs = [(1, 10.0), (8, 10.8), (64, 64.0)]
    speculation = Speculation(Always(), 3, costs)
    assert counts(speculation, [request()]) == [3]
    assert counts(speculation, [request() for _ in range(32)]) == [0] * 32


def test_no_more_than_the_budget_and_none_behind_the_last_token():
    speculation = Speculation(Always(), 5, FLAT)
    assert sum(counts(speculation, [request(), request()], most=3)) == 3
    assert counts(speculation, [request(8, 11)]) == [2]  # 11 tokens: the two, and the one behind them
    assert counts(speculation, [request(10, 11)]) == [0]


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
    assert [counts(speculation, [one]) for _ in range(LOOK_EVERY)] == [[0]] * LOOK_EVERY
    one.token_ids += [1] * PROBE_EVERY
    assert [counts(speculation, [one]) for _ in range(LOOK_EVERY)].count([1]) == 1


def test_where_drafts_slow_steps_down_only_one_step_in_many_has_them():
    speculation = Speculation(Always(), 5, FLAT)  # wrong: they cost much more than was measured
    one = request(8, 10_000)
    drafted = 0
    for _ in range(10 * LOOK_EVERY):
        (drafts,) = speculation.drafts([one], 1, 100)
        drafted += bool(drafts)
        num_tokens = 1 + len(drafts)
        speculation.took(took(0.01 * num_tokens, 1), num_tokens, 1)
        if drafts:
            speculation.verified(one, len(drafts), len(drafts) - 1)
    assert drafted <= 12


def test_where_drafts_pay_nearly_all_steps_have_them():
    speculation = Speculation(Always(), 5, STEEP[:1])  # one size was measured: all cost the same
    one = request(8, 10_000)
    drafted = 0
    for _ in range(10 * LOOK_EVERY):
        (drafts,) = speculation.drafts([one], 1, 100)
        drafted += bool(drafts)
        speculation.took(took(0.01, 1 + len(drafts)), 1 + len(drafts), 1)
        if drafts:
            speculation.verified(one, len(drafts), len(drafts))
    assert drafted >= 8 * LOOK_EVERY


def test_costs_are_corrected_by_what_steps_take():
    cost = Cost([(1, 10.0), (4, 10.0), (16, 40.0)])
    assert (cost.of(1), cost.of(4), cost.of(10), cost.of(64)) == (10.0, 10.0, 25.0, 160.0)
    for _ in range(100):
        cost.took(4, 20.0)
    assert cost.of(4) == pytest.approx(20.0, rel=0.05)
    assert 10.0 < cost.of(1) < cost.of(4)
    assert cost.of(16) >= cost.of(4)


def test_nothing_measured_is_a_step_that_costs_the_same_whatever_it_holds():
    assert Cost([]).of(1) == Cost([]).of(1000)


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
    cost = Cost([(1, 30.0), (2, 10.0), (4, 12.0)])
    assert [cost.of(n) for n in (1, 2, 4)] == [10.0, 10.0, 12.0]


def test_one_slow_step_does_not_turn_a_decision():
    found = Pace()
    for ms in (1.0, 200.0):
        found.took(ms, 1)
    assert 1.0 < found.ms_per_token < 1.2


def test_what_steps_bring_is_their_time_by_their_tokens_not_the_average_of_what_each_brings():
    found = Pace()
    for at in range(100):
        found.took(10.0, 1 + 4 * (at % 2))
    assert found.ms_per_token == pytest.approx(10.0 / 3, rel=0.2)  # 6 is what the average step takes for a token


def test_costs_measured_while_the_machine_was_busy_are_forgotten():
    """Only plain steps are seen, four times as fast: a second token does not cost a step for that."""
    speculation, one = Speculation(Always(), 5, [(1, 40.0), (2, 41.0), (64, 60.0)]), request(8, 10_000)
    for _ in range(300):
        speculation.took(took(0.01, 1), 1, 1)
    speculation.verified(one, 5, 5)
    drafted = sum(bool(speculation.drafts([one], 1, 100)[0]) for _ in range(3 * LOOK_EVERY))
    assert drafted > LOOK_EVERY


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
