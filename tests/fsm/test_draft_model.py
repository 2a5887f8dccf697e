"""Drafts that the device's own model proposes: asked for where they pay, and kept for the next step only."""

from __future__ import annotations

from novainfer.fsm.events import Submit
from novainfer.fsm.params import SamplingParams
from novainfer.fsm.request import Request
from novainfer.fsm.simulation.oracle import VOCABULARY
from novainfer.fsm.speculation import PROBE_EVERY, DraftModel, Speculation

COSTS = ((1, 1.0), (2, 1.3), (3, 1.9), (64, 90.0))  # a second token is cheap, a third costs half a step


def request(request_id: int = 0, num_prompt: int = 4, max_len: int = 64) -> Request:
    params = SamplingParams(max_tokens=None, repetition_penalty=1.0)
    submit = Submit(request_id=request_id, stream_id=0, choice=0, token_ids=[5] * num_prompt, params=params, seed=1)
    return Request(submit, VOCABULARY, [0], max_len)


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
    assert speculation.wanted([one]) == [1]
    assert speculation.wanted([one, request(1)]) == [1, 0]  # what a third token costs, two rows wait for
    assert speculation.wanted([]) == []


def test_none_is_wanted_behind_the_end_of_a_context() -> None:
    speculation = Speculation(DraftModel(), 5)
    assert [speculation.wanted([request(num_prompt=n, max_len=10)]) for n in (4, 6, 7, 8, 9)] == [[4], [2], [1], [], []]


def test_what_was_proposed_is_there_for_one_step() -> None:
    speculation, rows = Speculation(DraftModel(), 5), [request(0), request(1)]
    speculation.proposed(rows, [[7, 8], []])
    assert speculation.drafts(rows, 2, 60) == [[7, 8], []]
    assert speculation.drafts(rows, 2, 1) == [[7], []]
    speculation.proposed(rows, [])
    assert speculation.drafts(rows, 2, 60) == [[], []]


def test_the_device_is_told_all_tokens_where_its_model_proposes() -> None:
    one = request()
    assert one.sampling_spec().token_ids is None
    one.tells_tokens = True
    assert one.sampling_spec().token_ids == [5] * 4
