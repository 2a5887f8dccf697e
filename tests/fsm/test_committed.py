"""Requests that go on with tokens which another engine gave them."""

from __future__ import annotations

import pytest

from novainfer.fsm.messages.events import Committed, Submit
from novainfer.fsm.messages.outputs import FinishReason
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.simulation.checks.oracle import expected_run
from tests.fsm.helpers import Bench

PROMPT = [70, 71, 72, 73, 74]
KINDS = {
    "sampled": SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True),
    "penalties": SamplingParams(max_tokens=12, temperature=1.0, frequency_penalty=1.5, ignore_eos=True),
    "a stop string": SamplingParams(max_tokens=24, temperature=1.0, stop=["ab", "bca"], ignore_eos=True),
    "no end at first": SamplingParams(max_tokens=24, temperature=1.0, min_tokens=9, stop=["a"]),
}


def given(params: SamplingParams, num_committed: int) -> tuple[list[int], str, FinishReason | None, int]:
    """All that a request is given that goes on with so many tokens, and the steps that it took."""
    bench = Bench()
    expected = expected_run(PROMPT, params, 7, 0, 64)
    committed = Committed(token_ids=expected.token_ids[:num_committed])
    bench.tell(
        Submit(
            request_id=0, stream_id=0, choice=0, token_ids=PROMPT, params=params, seed=7,
            committed=committed if num_committed else None,
        )
    )  # fmt: skip
    bench.run()
    tokens = [token for output in bench.outputs for token in output.token_ids]
    ends = [output.end for output in bench.outputs if output.end is not None]
    assert len(ends) == 1
    assert [output.first is not None for output in bench.outputs] == [True] + [False] * (len(bench.outputs) - 1)
    text = "".join(output.text for output in bench.outputs)
    bench.scheduler.check()
    return tokens, text, ends[0].finish_reason, bench.scheduler.statistics().steps_total


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_what_is_given_is_the_same_wherever_it_goes_on(params: SamplingParams) -> None:
    expected = expected_run(PROMPT, params, 7, 0, 64)
    whole = given(params, 0)
    assert whole[:3] == (expected.token_ids, expected.text, expected.finish_reason)
    for num_committed in range(1, len(expected.token_ids) + 1):
        found = given(params, num_committed)
        assert found[:3] == whole[:3], num_committed
        assert found[3] == whole[3] - num_committed, "nothing that is known is sampled again"


def test_what_has_its_end_needs_no_device() -> None:
    assert given(KINDS["a stop string"], 100)[3] == 0
