import pytest

from novainfer.fsm.client.gate import Gate, GateState
from novainfer.fsm.core.machine import After, Send
from novainfer.fsm.messages.events import (
    Arrive,
    Cancel,
    CancelAll,
    Cause,
    Departed,
    Drain,
    End,
    Open,
    QueueOver,
    Rejected,
    Settled,
    Stop,
)
from novainfer.fsm.messages.params import SamplingParams


def arrive(stream_id: int, num_tokens: int = 1, **params) -> Arrive:
    return Arrive(stream_id=stream_id, prompt="", params=SamplingParams(**params), seed=1, num_tokens=num_tokens)


def patient(stream_id: int, num_tokens: int = 1, **params) -> Arrive:
    return arrive(stream_id, num_tokens, max_queue_s=5.0, **params)


@pytest.fixture
def gate() -> Gate:
    gate = Gate(max_num_queued_reqs=2, max_num_queued_tokens=10, max_num_overflow_reqs=3)
    gate.handle(Open())
    return gate


@pytest.fixture
def full(gate: Gate) -> Gate:
    """Streams 0 and 1 are queued, 2 and 3 wait for them."""
    answers = [answer(gate, event) for event in (arrive(0), arrive(1), patient(2), patient(3))]
    assert answers == ["", "", "later", "later"]
    return gate


def answer(gate: Gate, event: Arrive) -> str:
    """The reason of a rejection, "" when it was let in, or "later"."""
    found = [e.event for e in gate.handle(event) if isinstance(e, Send)]
    assert len(found) <= 1
    return "later" if not found else found[0].reason if isinstance(found[0], Rejected) else ""


def let_in(effects: list) -> list[int]:
    """Streams sent to the engine."""
    return [e.event.stream_id for e in effects if isinstance(e, Send) and isinstance(e.event, Arrive)]


def ended(effects: list) -> dict[int, End | None]:
    """Streams that were turned away, and how."""
    outputs = [e.event.outputs for e in effects if isinstance(e, Send) and e.to == "streams"]
    return {output.stream_id: output.end for each in outputs for output in each}


def test_streams_are_let_in_until_the_credits_are_out_and_again_when_some_have_departed(gate):
    assert [answer(gate, arrive(i)) for i in range(3)] == ["", "", "overloaded"]
    gate.handle(Departed([0]))
    assert answer(gate, arrive(3)) == ""
    assert gate.num_queued == 2


def test_prompt_tokens_are_credits_too(gate):
    assert [answer(gate, arrive(0, 8)), answer(gate, arrive(1, 3)), answer(gate, arrive(2, 2))] == [
        "",
        "overloaded",
        "",
    ]
    assert gate.num_queued_tokens == 10


def test_a_stream_of_several_choices_takes_a_credit_for_each(gate):
    assert [answer(gate, arrive(0)), answer(gate, arrive(1, n=2)), answer(gate, arrive(2))] == ["", "overloaded", ""]
    gate.handle(Departed([0, 2]))
    assert answer(gate, arrive(3, n=2)) == ""
    assert gate.num_queued == 2
    gate.handle(Departed([3]))
    assert gate.num_queued == 0


def test_a_refusal_says_which_limit_was_met(gate):
    answer(gate, arrive(0, 9))
    (tokens,) = gate.handle(arrive(1, 2))
    answer(gate, arrive(1))
    (requests,) = gate.handle(arrive(2))
    assert [(e.event.limit, e.event.message) for e in (tokens, requests)] == [
        ("tokens", "the queue is full: 9 prompt tokens are waiting"),
        ("requests", "the queue is full: 2 requests are waiting"),
    ]


def test_one_prompt_larger_than_all_credits_is_let_in_when_nobody_waits(gate):
    assert answer(gate, arrive(0, 99)) == ""


def test_what_a_prompt_was_thought_to_hold_is_put_right_when_it_is_known(gate):
    answer(gate, arrive(0, 9))
    assert answer(gate, patient(1, 4)) == "later"
    assert let_in(gate.handle(Settled(0, 6))) == [1]
    assert gate.num_queued_tokens == 10
    gate.handle(Departed([0]))
    gate.handle(Settled(0, 7))  # it left meanwhile
    assert (gate.num_queued, gate.num_queued_tokens) == (1, 4)


def test_a_stream_that_departs_twice_gives_its_credits_back_once(gate):
    for stream_id in (0, 1):
        answer(gate, arrive(stream_id, 4))
    gate.handle(Departed([0]))
    gate.handle(Departed([0]))
    assert (gate.num_queued, gate.num_queued_tokens) == (1, 4)


# ---- overflow ----------------------------------------------------------------


def test_who_is_willing_to_wait_is_let_in_when_credits_come_back_first_come_first_served(full):
    assert full.overflow == [2, 3]
    assert let_in(full.handle(Departed([1]))) == [2]
    assert let_in(full.handle(Departed([0, 2]))) == [3]
    assert (full.num_queued, full.num_overflow) == (1, 0)


def test_nobody_overtakes_who_waits(gate):
    answer(gate, arrive(0, 8))
    assert answer(gate, patient(1, 9)) == "later"  # too many tokens for now
    assert [answer(gate, arrive(2, 1)), answer(gate, patient(3, 1))] == ["overloaded", "later"]
    assert let_in(gate.handle(Departed([0]))) == [1, 3]


def test_the_overflow_list_is_full_at_its_limit_of_choices_and_of_tokens(full):
    assert answer(full, patient(4, n=2)) == "overloaded"
    assert answer(full, patient(4, num_tokens=9)) == "overloaded"
    (refused,) = full.handle(patient(4, n=2))
    assert refused.event.limit == "overflow"
    assert answer(full, patient(4)) == "later"


def test_without_an_overflow_list_everybody_is_refused():
    gate = Gate(1, 10, 0)
    gate.handle(Open())
    assert [answer(gate, patient(i)) for i in range(2)] == ["", "overloaded"]


@pytest.mark.parametrize("cause", [Cause.CLIENT, Cause.DISCONNECT, Cause.TIMEOUT])
def test_a_cancel_in_overflow_ends_the_stream_there_and_the_engine_never_hears_of_it(full, cause):
    effects = full.handle(Cancel(2, cause))
    assert ended(effects) == {2: End(cause=cause)}
    assert [e.to for e in effects] == ["streams"]
    assert let_in(full.handle(Departed([0]))) == [3]


def test_when_the_first_who_waits_goes_the_next_one_may_fit(gate):
    answer(gate, arrive(0, 8))
    answer(gate, patient(1, 8))
    answer(gate, patient(2, 2))
    assert let_in(gate.handle(Cancel(1, Cause.CLIENT))) == [2]


def test_every_other_cancel_goes_on_to_the_engine_with_the_number_of_those_sent_before_it(full):
    full.handle(Departed([0]))
    for stream_id in (0, 1, 2):  # it runs, waits, was in overflow
        effects = full.handle(Cancel(stream_id, Cause.CLIENT))
        assert effects == [Send("engine", Cancel(stream_id, Cause.CLIENT, 3), urgent=True)]


def test_cancel_all_ends_overflow_and_goes_on_to_the_engine(full):
    effects = full.handle(CancelAll(Cause.DRAIN))
    assert ended(effects) == dict.fromkeys((2, 3), End(cause=Cause.DRAIN))
    assert effects[-1] == Send("engine", CancelAll(Cause.DRAIN, 2), urgent=True)
    assert let_in(full.handle(Departed([0, 1]))) == []


def test_a_deadline_is_a_timer_that_cancels_wherever_the_stream_is(full):
    for event in (arrive(4, timeout_s=2.5), patient(5, timeout_s=2.5)):
        assert (After(2.5, Cancel(event.stream_id, Cause.TIMEOUT)) in full.handle(event)) is (event.stream_id == 5)
    gate = Gate(2, 10)
    gate.handle(Open())
    assert gate.handle(arrive(0, timeout_s=2.5))[1] == After(2.5, Cancel(0, Cause.TIMEOUT))


def test_who_has_waited_long_enough_is_told_wherever_it_waits(gate):
    assert After(5.0, QueueOver(0)) in gate.handle(patient(0))
    gate.handle(patient(1))
    assert gate.handle(patient(2)) == [After(5.0, QueueOver(2))]
    assert ended(gate.handle(QueueOver(2))) == {2: End(cause=Cause.QUEUE)}
    gate.handle(Departed([0]))
    assert gate.handle(QueueOver(0)) == [Send("engine", Cancel(0, Cause.QUEUE, 2), urgent=True)]  # which knows better
    assert gate.handle(QueueOver(1)) == [Send("engine", Cancel(1, Cause.QUEUE, 2), urgent=True)]
    assert gate.handle(QueueOver(2)) == [Send("engine", Cancel(2, Cause.QUEUE, 2), urgent=True)]  # it has ended


# ---- going down ----------------------------------------------------------------


def test_a_draining_gate_lets_nobody_in_and_takes_credits_back(gate):
    answer(gate, arrive(0))
    gate.handle(Drain())
    assert answer(gate, arrive(1)) == "draining"
    assert answer(gate, patient(1)) == "draining"
    gate.handle(Departed([0]))
    assert gate.num_queued == 0


def test_draining_ends_overflow_at_once_and_the_queue_stays(full):
    assert ended(full.handle(Drain())) == dict.fromkeys((2, 3), End(cause=Cause.DRAIN))
    assert (full.num_queued, full.num_overflow) == (2, 0)
    assert full.handle(QueueOver(2)) == [Send("engine", Cancel(2, Cause.QUEUE, 2), urgent=True)]  # which knows better
    assert let_in(full.handle(Departed([0, 1]))) == []


@pytest.mark.parametrize("last", [Stop(), Stop("broken")])
def test_a_stopped_gate_is_closed_and_holds_no_credits(full, last):
    effects = full.handle(last)
    end = End(error="broken", code="engine_dead") if last.error else End(cause=Cause.DRAIN)
    assert ended(effects) == dict.fromkeys((2, 3), end)
    assert (full.state, full.num_queued, full.num_queued_tokens, full.overflow) == (GateState.CLOSED, 0, 0, [])
    assert answer(full, arrive(1)) == "closed"
    assert full.handle(Cancel(0, Cause.CLIENT)) == []
    assert full.handle(QueueOver(2)) == []


def test_a_gate_that_has_not_opened_says_so():
    gate = Gate(2, 10)
    assert answer(gate, arrive(0)) == "closed"
    assert gate.handle(Cancel(0, Cause.CLIENT)) == gate.handle(CancelAll(Cause.DRAIN)) == []


def test_draining_before_it_opened_closes_it_for_good():
    gate = Gate(2, 10)
    gate.handle(Drain())
    gate.handle(Open())
    assert gate.state is GateState.CLOSED
