"""What prompts score: each token once, behind the very tokens before it, however the prompt is computed."""

from __future__ import annotations

from math import nan

import msgspec
import pytest

from novainfer.fsm.messages.events import MakeBatch
from novainfer.fsm.messages.outputs import TokenLogprob
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.schedule.request import RequestState
from novainfer.fsm.schedule.speculation import Speculation
from novainfer.fsm.simulation.checks.oracle import VOCABULARY
from novainfer.fsm.simulation.world.device import expected_score, fold
from tests.fsm.helpers import Bench
from tests.fsm.test_speculation import FLAT, Always

PROMPT = [3, 9, 27, 14, 42, 31, 5, 11, 33, 20, 60, 52, 28, 17, 51, 25, 6, 18, 54, 34, 38]


def expected(prompt: list[int], num_top: int) -> list[TokenLogprob]:
    """Worked out from the prompt alone."""
    found = [TokenLogprob(prompt[0], VOCABULARY.bytes_of(prompt[0]), 0.0, [])]
    for at, token_id in enumerate(prompt[1:], 1):
        logprob, ids, values = expected_score(fold(prompt[:at]), token_id, num_top)
        top = [(i, VOCABULARY.bytes_of(i), value) for i, value in zip(ids, values, strict=True)]
        found.append(TokenLogprob(token_id, VOCABULARY.bytes_of(token_id), logprob, top))
    return found


def check(bench: Bench, request_id: int, prompt: list[int], num_top: int = 2) -> None:
    assert bench.first(request_id).prompt_logprobs == expected(prompt, num_top)
    assert bench.end(request_id).end is not None


@pytest.mark.parametrize("chunk", [4, 8, 32])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 21])
def test_each_token_is_scored_behind_those_before_it(chunk: int, length: int) -> None:
    bench = Bench(prefill_chunk_tokens=chunk)
    beside = bench.submit([7, 8, 9], max_tokens=12)
    request_id = bench.submit(PROMPT[:length], prompt_logprobs=2)
    plain = bench.submit(PROMPT[:length], logprobs=1)
    bench.run()
    check(bench, request_id, PROMPT[:length])
    for other in (beside, plain):
        assert bench.first(other).prompt_logprobs is None
        assert bench.end(other).end.error is None


def test_a_prompt_that_is_scored_takes_nothing_from_the_cache_and_leaves_it_there() -> None:
    bench = Bench()
    requests = [bench.submit(PROMPT, prompt_logprobs=2)]
    bench.run()
    requests.append(bench.submit(PROMPT, prompt_logprobs=2))
    bench.run()
    last = bench.submit(PROMPT)
    bench.run()
    for request_id in requests:
        check(bench, request_id, PROMPT)
        assert bench.first(request_id).num_cached_tokens == 0
    assert bench.first(last).num_cached_tokens == 20


def test_a_step_that_fails_is_scored_again() -> None:
    bench = Bench(prefill_chunk_tokens=8)
    request_id = bench.submit(PROMPT, prompt_logprobs=2)
    bench.step()
    bench.step()
    bench.fail()
    bench.run()
    check(bench, request_id, PROMPT)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_what_was_scored_before_a_worker_was_lost_is_not_asked_again(num_steps: int) -> None:
    bench = Bench(prefill_chunk_tokens=8)
    request_id = bench.submit(PROMPT, prompt_logprobs=2)
    for _ in range(num_steps):
        bench.step()
    scored = len(bench.request(request_id).scores or [])
    assert scored == 8 * (num_steps - 1)
    bench.lose()
    bench.recover()
    asked = []
    while bench.plan is not None:
        asked += bench.plan.score_ids
        bench.step()
    assert asked == PROMPT[scored + 1 :]
    check(bench, request_id, PROMPT)


def test_drafts_beside_it_move_no_score() -> None:
    bench = Bench(prefill_chunk_tokens=8, speculation=Speculation(Always(), 3, FLAT))
    bench.submit([7, 8, 9], max_tokens=20)
    bench.step()
    bench.step()
    request_id = bench.submit(PROMPT, prompt_logprobs=2)
    bench.step()
    assert bench.plan is not None
    assert sum(bench.plan.num_drafts) > 0
    row = bench.plan.score_rows[0]
    assert bench.plan.input_ids[row : row + 2] == PROMPT[:2]
    bench.run()
    check(bench, request_id, PROMPT)


def test_a_score_that_is_not_a_number_ends_its_request_alone() -> None:
    bench = Bench()
    beside = bench.submit([7, 8, 9])
    request_id = bench.submit(PROMPT, prompt_logprobs=0)
    bench.start()
    assert bench.plan is not None
    done = bench.device.run(bench.plan)
    scores = [(nan, [], []) if at == 5 else score for at, score in enumerate(done.scores)]
    bench.tell(MakeBatch(msgspec.structs.replace(done, scores=scores)))
    bench.run()
    assert bench.end(request_id).end.error is not None
    assert "number" in (bench.end(request_id).end.error or "")
    assert bench.end(beside).end.error is None
    assert RequestState.FINISHED_ERROR in bench.scheduler.statistics().finished_total
    assert SamplingParams(prompt_logprobs=0).prompt_logprobs == 0
