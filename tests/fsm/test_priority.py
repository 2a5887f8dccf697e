"""Priorities: what is urgent goes first, and nothing waits for ever."""

from __future__ import annotations

import pytest

from novainfer.fsm.messages.events import AgeOver
from tests.fsm.helpers import Bench

STEP_S = 0.5


def one_at_a_time(**limits: object) -> Bench:
    return Bench(max_num_seqs=1, scheduling_policy="priority", priority_wait_s=5.0, **limits)


def order_of(bench: Bench) -> list[int]:
    """Run to the end; the requests in the order of their first tokens."""
    bench.run()
    return [output.request_id for output in bench.outputs if output.first]


def test_the_lower_priority_goes_first_and_the_older_of_equals():
    bench = one_at_a_time()
    for priority in (0, 5, -5, 0, 5, -5):
        bench.submit([1, priority + 10], max_tokens=2, priority=priority)
    assert order_of(bench) == [2, 5, 0, 3, 1, 4]


def test_without_the_policy_priorities_mean_nothing_to_the_scheduler():
    bench = Bench(max_num_seqs=1)
    for priority in (0, 5, -5):
        bench.submit([1, priority + 10], max_tokens=2, priority=priority)
    assert order_of(bench) == [0, 1, 2]
    assert not bench.timers


def test_what_has_waited_goes_before_all_that_came_since():
    bench = one_at_a_time()
    low = [bench.submit([1, 2, i + 1], max_tokens=4, priority=7 + i) for i in range(3)]
    bench.start()
    bench.step()
    [timer] = bench.timers
    assert (timer.delay_s, timer.event) == (5.0, AgeOver(0))
    urgent = [bench.submit([2, i + 1], max_tokens=1, priority=-1) for i in range(3)]
    bench.tell(timer.event)  # it was for the first of all; the next one is for those that came meanwhile
    [timer] = bench.timers
    assert timer.event == AgeOver(urgent[-1])
    late = [bench.submit([3, i + 1], max_tokens=1, priority=-2) for i in range(3)]
    bench.tell(timer.event)
    assert order_of(bench) == [*low, *urgent, *late]


@pytest.mark.parametrize("num_urgent", [10, 100])
def test_a_low_request_waits_twice_as_long_as_others_may_go_before_it_at_most(num_urgent):
    bench = one_at_a_time(num_blocks=64)
    bench.submit([7], max_tokens=1, priority=-9)  # its timer runs when the low one comes
    bench.start()
    low = bench.submit([1, 2, 3], max_tokens=1, priority=9)
    now_s, due = 0.0, {}
    for i in range(num_urgent):
        bench.submit([2, i % 100 + 1], max_tokens=1, priority=0)
    while not any(output.request_id == low and output.first for output in bench.outputs):
        bench.submit([2, 3], max_tokens=1, priority=0)  # for each that is done, another one comes
        for timer in bench.timers:
            due.setdefault(timer.event, now_s + timer.delay_s)
        bench.step()
        now_s += STEP_S
        for timer in [timer for timer in bench.timers if due[timer.event] <= now_s]:
            bench.tell(timer.event)
    assert now_s <= 2 * 5.0 + 3 * STEP_S  # what runs then ends first, and its own step follows


def test_a_timer_runs_only_while_something_may_age():
    bench = one_at_a_time()
    bench.submit([1], max_tokens=2)
    assert len(bench.timers) == 1
    bench.run()
    assert not bench.timers


def test_the_least_urgent_is_preempted_first():
    bench = Bench(num_blocks=10, max_model_len=40, scheduling_policy="priority")
    low = bench.submit([1, 2, 3], max_tokens=30, priority=3)
    bench.step()
    bench.step()
    urgent = bench.submit([4, 5, 6], max_tokens=30, priority=0)
    preempted = set()
    while bench.scheduler.requests:
        bench.step()
        preempted |= {r.request_id for r in bench.scheduler.requests.values() if r.num_preemptions}
    assert preempted == {low}
    assert urgent not in preempted
