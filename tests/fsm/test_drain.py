"""How fast a queue drains, and when a client that is refused should come again."""

from __future__ import annotations

import pytest

from novainfer.fsm.client.drain import RETRY_AFTER_S_DEFAULT, RETRY_AFTER_S_MAX, RETRY_AFTER_S_MIN, DrainRate
from novainfer.fsm.client.gate import Gate
from novainfer.fsm.messages.events import Arrive, Departed, Open
from novainfer.fsm.messages.params import SamplingParams


def rate_of(departures: list[tuple[float, int, int]], now_s: float, *, filled_s: float | None = None) -> float | None:
    """`departures`: when, how many left, how many were still waiting; the queue was empty until `filled_s`."""
    rate = DrainRate()
    if filled_s is not None:
        rate.fills(filled_s)
    for at_s, num_left, num_waiting in departures:
        rate.note(at_s, num_left, num_waiting=num_waiting)
    return rate.per_s(now_s)


def test_a_queue_that_lost_one_every_half_second_drains_at_two_a_second() -> None:
    departures = [(0.5 * i, 1, 10) for i in range(8)]
    assert rate_of(departures, 3.6) == pytest.approx(2.0)


def test_bursts_count_with_the_time_between_them_and_not_with_their_own() -> None:
    for num_bursts in (1, 4):
        departures = [(10.0 * burst + 0.001 * i, 8, 100) for burst in range(1, num_bursts + 1) for i in range(4)]
        for later_s in (0.1, 5.0, 9.9):
            rate = rate_of(departures, 10.0 * num_bursts + later_s, filled_s=0.0)
            assert rate == pytest.approx(3.2, rel=0.01)  # 32 each 10 s


def test_what_an_idle_engine_takes_at_once_says_nothing() -> None:
    assert rate_of([(0.1 * i, 1, 0) for i in range(50)], 5.0, filled_s=-1.0) is None


def test_pauses_without_a_queue_are_no_part_of_it() -> None:
    first = [(0.5 * i, 1, 4 - i) for i in range(5)]
    second = [(100.0 + 0.5 * i, 1, 4 - i) for i in range(5)]
    assert rate_of([*first[3:], *second], 102.1) == pytest.approx(2.0)


def test_a_queue_that_stands_still_drains_slower_and_slower() -> None:
    departures = [(0.5 * i, 1, 10) for i in range(8)]
    rates = [rate_of(departures, 3.5 + later_s) for later_s in (0.1, 0.5, 4.0, 40.0)]
    assert rates == [pytest.approx(2.0), pytest.approx(2.0), pytest.approx(1.0), pytest.approx(0.16, rel=0.02)]


def test_a_queue_that_fills_again_and_stands_still_drains_slower_and_slower() -> None:
    rate = DrainRate()
    for departure in range(8):
        rate.note(0.5 * departure, 1, num_waiting=7 - departure)
    rate.fills(10.0)
    assert [rate.per_s(10.0 + later_s) for later_s in (0.4, 3.5, 20.5)] == [
        pytest.approx(2.0),
        pytest.approx(1.0769, rel=0.01),
        pytest.approx(0.2978, rel=0.01),
    ]


def test_a_stream_leaves_once_though_the_gate_hears_of_it_later() -> None:
    gate, rate = Gate(max_num_queued_reqs=8, max_num_queued_tokens=100), DrainRate()
    gate.handle(Open())
    for stream_id in range(3):
        rate.arrives(gate, 1.0)
        params = SamplingParams(n=2)
        gate.handle(Arrive(stream_id=stream_id, prompt=[1], params=params, seed=1, num_tokens=1))
    rate.departs(gate, Departed([0]), 2.0)
    rate.departs(gate, Departed([0, 1, 1]), 3.0)
    assert rate.per_s(3.0) == pytest.approx(2.0)
    gate.handle(Departed([0, 1]))
    assert rate.wait_s(gate, 3.0, lambda *_: None) == pytest.approx(1.0)
    rate.departs(gate, Departed([2]), 4.0)
    rate.arrives(gate, 90.0)  # all have left, and the gate is about to hear so
    rate.departs(gate, Departed([7]), 91.0)  # which holds no credits any more
    assert rate.per_s(91.0) is None


def test_what_was_a_minute_ago_is_forgotten() -> None:
    assert rate_of([(0.5 * i, 1, 10) for i in range(8)], 64.0) is None


class Waiting(Gate):
    """A gate at which so many requests, and prompt tokens, wait for room and for their turn."""

    def __init__(self, num_queued: int, num_overflow: int = 0) -> None:
        super().__init__(1 << 30, 1 << 30)
        self._queue.take(0, (num_queued, 100))
        self._waiting_room.take(1, (num_overflow, 30 * num_overflow))


@pytest.mark.parametrize(
    ("num_waiting", "retry_after_s"), [(10, 5.0), (0, RETRY_AFTER_S_MIN), (1_000_000, RETRY_AFTER_S_MAX)]
)
def test_a_client_is_to_come_again_when_all_who_wait_will_have_left(num_waiting: int, retry_after_s: float) -> None:
    rate = DrainRate()
    for departure in range(8):
        rate.note(0.5 * departure, 1, num_waiting=10)
    assert rate.wait_s(Waiting(num_waiting), 3.6, lambda *_: 17.0) == pytest.approx(retry_after_s)


def test_while_nothing_has_left_a_client_is_to_come_again_when_all_who_wait_are_expected_to_have() -> None:
    asked: list[tuple[int, int]] = []

    def expected_s(num_waiting: int, num_prompt_tokens: int) -> float:
        asked.append((num_waiting, num_prompt_tokens))
        return 7.5 * num_waiting

    rate = DrainRate()
    assert rate.wait_s(Waiting(1, num_overflow=2), 0.0, expected_s) == 22.5
    assert asked == [(3, 160)], "those on the overflow list are before it as well"
    assert rate.wait_s(Waiting(0), 0.0, expected_s) == RETRY_AFTER_S_MIN
    assert rate.wait_s(Waiting(1000), 0.0, expected_s) == RETRY_AFTER_S_MAX
    assert rate.wait_s(Waiting(1000), 0.0, lambda *_: None) == RETRY_AFTER_S_DEFAULT, "nothing can be said"
