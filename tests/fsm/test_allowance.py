"""How large steps are while there is room for some only: driven as a device would, that has room for so much."""

from itertools import pairwise
from math import log2

import pytest

from novainfer.fsm.schedule.allowance import PATIENCE, PATIENCE_MAX, SLOW_START, Allowance, Sizes

FULL = 64


def run(allowance, room, num_steps, demand=None):
    """So many steps, of which those fail that hold more than `room`; says which failed."""
    failed = []
    for at in range(num_steps):
        size = min(allowance.limit, demand or allowance.full)
        if size > room:
            allowance.was_too_much(size)
            failed.append(at)
        else:
            allowance.went_well(size)
    return failed


@pytest.mark.parametrize("room", range(1, FULL))
def test_where_there_is_room_for_some_it_settles_there_and_one_try_in_patience_max_steps_fails(room):
    allowance = Allowance(FULL)
    failed = run(allowance, room, 40_000)
    assert allowance.is_short
    gaps = [after - before for before, after in pairwise(failed)]
    falls = [gap for gap in gaps if gap < PATIENCE]
    assert len(falls) <= log2(FULL)
    assert all(gap < PATIENCE for gap in gaps[: len(falls)]), "what went well once is never given up"
    assert min(gaps[-20:]) >= PATIENCE_MAX
    assert sum(gap < PATIENCE_MAX for gap in gaps) <= log2(FULL) + 3
    assert allowance._safe == room


@pytest.mark.parametrize("room", range(1, FULL))
def test_when_the_shortage_is_over_everything_is_back_within_a_stated_number_of_steps(room):
    allowance = Allowance(FULL)
    run(allowance, room, 10_000)
    assert run(allowance, FULL, int(PATIENCE_MAX + 2 * PATIENCE * log2(FULL)) + PATIENCE) == []
    assert allowance.limit == FULL
    assert not allowance.is_short


@pytest.mark.parametrize("rooms", [(16, 48), (48, 16), (3, 5, 7, 40), (63, 1), (20, 64, 20)])
def test_where_the_room_changes_only_the_changes_and_the_tries_cost_steps(rooms):
    allowance = Allowance(FULL)
    num_failed = sum(len(run(allowance, room, 5000)) for room in rooms * 4)
    assert num_failed <= 4 * len(rooms) * (log2(FULL) + 3 + 5000 / PATIENCE_MAX)


def test_what_goes_well_only_sometimes_is_tried_less_and_less_often():
    allowance = Allowance(FULL)
    failed = []
    for at in range(20_000):  # in two steps of three there is room for all, in the third for 8
        failed += [at + gap for gap in run(allowance, FULL if at % 3 else 8, 1)]
    assert len(failed) <= log2(FULL) + 3 + log2(PATIENCE_MAX / PATIENCE) * log2(FULL) + 20_000 / PATIENCE_MAX
    assert len([at for at in failed if at >= 10_000]) <= 10_000 / PATIENCE_MAX + 1


def test_steps_that_need_less_say_nothing_of_more_but_do_not_hold_it_down_for_ever():
    allowance = Allowance(FULL)
    run(allowance, 16, 5000)
    allowance.was_too_much(allowance.limit)
    run(allowance, 16, PATIENCE_MAX - 1, demand=4)
    assert allowance.limit < FULL
    run(allowance, 16, 2 * PATIENCE_MAX, demand=4)
    assert allowance.limit == FULL
    assert not allowance.is_short


def test_one_failed_step_leads_from_a_wrong_guess_back_to_what_went_well():
    allowance = Allowance(FULL)
    run(allowance, 16, 5000)
    run(allowance, 16, PATIENCE_MAX + PATIENCE, demand=4)
    assert run(allowance, 16, PATIENCE) == [0]
    assert allowance.limit == 16


def test_what_cannot_be_made_less_is_not():
    allowance = Allowance(FULL, 16)
    assert allowance.was_too_much(64, 8)
    assert allowance.limit == 16
    assert not allowance.was_too_much(16)
    assert allowance.limit == 16


def test_a_step_that_was_planned_before_the_limit_was_set_counts_once():
    allowance = Allowance(FULL)
    allowance.was_too_much(64)
    allowance.was_too_much(64)
    assert allowance.limit == 32


def took(sizes, token_s, wanted, num_steps):
    """Steps of one prompt, each token of which takes so long; says how long each took."""
    seconds = []
    for _ in range(num_steps):
        num_tokens = min(sizes.prompt_tokens.limit, wanted)
        seconds.append(num_tokens * token_s)
        sizes.went_well(1, num_tokens, seconds[-1])
    return seconds


@pytest.mark.parametrize("token_s", [0.001, 0.01, 0.05, 0.1, 0.2, 0.4])
def test_on_a_slow_machine_no_step_comes_near_its_deadline(token_s):
    sizes = Sizes(256, 4096, 16, step_timeout_s=60.0)
    seconds = took(sizes, token_s, 4096, 500)
    assert max(seconds) <= max(SLOW_START * token_s, 15.0)
    assert max(seconds[5:]) <= 15.0


def test_on_a_fast_machine_prompts_have_their_full_chunk_after_a_few_steps():
    sizes = Sizes(256, 4096, 16, step_timeout_s=60.0)
    took(sizes, 0.0005, 4096, 5)
    assert sizes.prompt_tokens.limit == 4096
    assert not sizes.is_short


def test_a_machine_that_becomes_slow_is_given_less_and_more_again_when_it_is_fast():
    sizes = Sizes(256, 512, 16, step_timeout_s=60.0)
    took(sizes, 0.001, 512, 100)
    assert max(took(sizes, 0.1, 512, 200)[2:]) <= 15.0
    assert sizes.is_short
    took(sizes, 0.001, 512, PATIENCE_MAX)
    assert sizes.prompt_tokens.limit == 512
    assert not sizes.is_short


def test_slow_steps_of_many_requests_hold_fewer_requests():
    sizes = Sizes(256, 512, 16, step_timeout_s=8.0)
    for _ in range(4):
        sizes.went_well(256, 0, 3.0)
    assert sizes.requests.limit == 128
    assert sizes.prompt_tokens.limit == SLOW_START


def test_which_of_the_two_was_too_much_is_the_one_that_was_being_tried():
    sizes = Sizes(64, 512, 16, step_timeout_s=60.0)
    sizes.was_too_much(64, 0)
    while sizes.requests.limit == 32:
        sizes.went_well(32, 0, 0.0)
    sizes.was_too_much(sizes.requests.limit, 128)
    assert sizes.requests.limit == 32
    assert sizes.prompt_tokens.limit == SLOW_START


def test_what_failed_for_a_reason_of_its_own_is_forgotten_and_what_was_known_before_is_not():
    allowance = Allowance(FULL)
    for _ in range(3):
        allowance.was_too_much(allowance.limit)
    allowance.excuse()
    assert (allowance.limit, allowance.is_short) == (FULL, False)
    while allowance.limit != 16 or allowance._num_good < PATIENCE:
        run(allowance, 16, 1)
    for _ in range(3):
        allowance.was_too_much(allowance.limit)
    allowance.excuse()
    assert (allowance.limit, allowance.is_short) == (16, True)
