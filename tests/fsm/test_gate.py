import pytest

from novainfer.fsm.events import Arrive, Departed, Drain, Open, Rejected, Stop
from novainfer.fsm.gate import Gate, GateState
from novainfer.fsm.machine import Send
from novainfer.fsm.params import SamplingParams


def arrive(stream_id: int, num_tokens: int = 1) -> Arrive:
    return Arrive(stream_id=stream_id, prompt="", params=SamplingParams(), seed=1, num_tokens=num_tokens)


@pytest.fixture
def gate() -> Gate:
    gate = Gate(max_num_queued_reqs=2, max_num_queued_tokens=10)
    gate.handle(Open())
    return gate


def answer(gate: Gate, event: Arrive) -> str:
    """The reason of a rejection, or "" when it was let in."""
    (effect,) = gate.handle(event)
    assert isinstance(effect, Send)
    return effect.event.reason if isinstance(effect.event, Rejected) else ""


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


def test_one_prompt_larger_than_all_credits_is_let_in_when_nobody_waits(gate):
    assert answer(gate, arrive(0, 99)) == ""


def test_a_stream_that_departs_twice_gives_its_credits_back_once(gate):
    for stream_id in (0, 1):
        answer(gate, arrive(stream_id, 4))
    gate.handle(Departed([0]))
    gate.handle(Departed([0]))
    assert (gate.num_queued, gate.num_queued_tokens) == (1, 4)


def test_a_draining_gate_lets_nobody_in_and_takes_credits_back(gate):
    answer(gate, arrive(0))
    gate.handle(Drain())
    assert answer(gate, arrive(1)) == "draining"
    gate.handle(Departed([0]))
    assert gate.num_queued == 0


@pytest.mark.parametrize("last", [Stop(), Stop("broken")])
def test_a_stopped_gate_is_closed_and_holds_no_credits(gate, last):
    answer(gate, arrive(0))
    gate.handle(last)
    assert (gate.state, gate.num_queued, gate.num_queued_tokens) == (GateState.CLOSED, 0, 0)
    assert answer(gate, arrive(1)) == "closed"


def test_a_gate_that_has_not_opened_says_so():
    assert answer(Gate(2, 10), arrive(0)) == "closed"


def test_draining_before_it_opened_closes_it_for_good():
    gate = Gate(2, 10)
    gate.handle(Drain())
    gate.handle(Open())
    assert gate.state is GateState.CLOSED
