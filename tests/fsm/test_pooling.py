"""Vectors of prompts: each token counts once, however the prompt is computed, and nothing is written behind it."""

from __future__ import annotations

import struct
from math import hypot, inf, nan
from typing import Any

import msgspec
import pytest

from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.events import MakeBatch
from novainfer.fsm.messages.outputs import FinishReason
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.pooling import KINDS, Pooling, PoolingKind, added, floats_of, vector
from novainfer.fsm.schedule.request import RequestState
from novainfer.fsm.schedule.speculation import Speculation
from novainfer.fsm.simulation.checks.oracle import expected_embedding
from tests.fsm.helpers import Bench
from tests.fsm.test_speculation import FLAT, Always

PROMPT = [3, 9, 27, 14, 42, 31, 5, 11, 33, 20, 60, 52, 28, 17, 51, 25, 6, 18, 54, 34, 38]
NEUTRAL: dict[str, Any] = {"max_tokens": 16, "ignore_eos": False, "temperature": 1.0}


def submit(bench: Bench, prompt: list[int], kind: PoolingKind = "mean", **more: Any) -> int:
    return bench.submit(prompt, **NEUTRAL, pooling=Pooling(kind=kind, **more))


def check(bench: Bench, request_id: int, prompt: list[int], kind: PoolingKind = "mean", **more: Any) -> None:
    """It has its vector, once, and nothing else."""
    (output,) = [output for output in bench.outputs if output.request_id == request_id]
    assert output.embedding is not None
    assert floats_of(output.embedding) == pytest.approx(expected_embedding(prompt, Pooling(kind=kind, **more)))
    assert (output.token_ids, output.text) == ([], "")
    assert output.end is not None
    assert output.end.finish_reason is FinishReason.STOP
    assert bench.first(request_id).num_prompt_tokens == len(prompt)
    assert bench.first(request_id).prompt_token_ids == prompt


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [4, 8, 32])
@pytest.mark.parametrize("length", [1, 4, 5, 21])
def test_a_vector_is_the_same_in_any_chunks_and_beside_any_others(kind: PoolingKind, chunk: int, length: int) -> None:
    bench = Bench(prefill_chunk_tokens=chunk)
    beside = bench.submit([7, 8, 9], max_tokens=12)
    request_id = submit(bench, PROMPT[:length], kind)
    other = submit(bench, PROMPT[::-1], kind, normalize=False, dimensions=2)
    bench.run()
    check(bench, request_id, PROMPT[:length], kind)
    check(bench, other, PROMPT[::-1], kind, normalize=False, dimensions=2)
    assert bench.end(beside).end.finish_reason is FinishReason.LENGTH  # type: ignore[union-attr]
    assert bench.end(beside).embedding is None


def test_the_last_token_takes_its_prefix_from_the_cache_and_the_mean_does_not_but_leaves_it_there() -> None:
    bench = Bench()
    mean = submit(bench, PROMPT)
    bench.run()
    again, last = submit(bench, PROMPT), submit(bench, PROMPT, "last")
    bench.run()
    check(bench, mean, PROMPT)
    check(bench, again, PROMPT)
    check(bench, last, PROMPT, "last")
    assert [bench.first(i).num_cached_tokens for i in (mean, again, last)] == [0, 0, 20]


def test_a_step_that_fails_counts_nothing() -> None:
    bench = Bench(prefill_chunk_tokens=8)
    request_id = submit(bench, PROMPT)
    bench.step()
    bench.step()
    bench.fail()
    bench.run()
    check(bench, request_id, PROMPT)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_what_was_summed_before_a_worker_was_lost_is_not_summed_again(num_steps: int) -> None:
    bench = Bench(prefill_chunk_tokens=8)
    request_id = submit(bench, PROMPT)
    for _ in range(num_steps):
        bench.step()
    summed = bench.request(request_id).num_pooled
    assert summed == 8 * (num_steps - 1)
    bench.lose()
    bench.recover()
    lens = []
    while bench.plan is not None:
        lens += bench.plan.pool_lens
        bench.step()
    assert sum(lens) == len(PROMPT) - summed
    check(bench, request_id, PROMPT)


@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_a_request_that_is_preempted_goes_on_where_its_sum_ended(num_host_blocks: int) -> None:
    bench = Bench(num_host_blocks=num_host_blocks, prefill_chunk_tokens=8)
    beside = bench.submit([7, 8, 9, 10], max_tokens=30)
    request_id = submit(bench, PROMPT)
    bench.step()
    bench.step()
    assert bench.plan is not None
    bench.tell(MakeBatch(bench.device.run(bench.plan), vacates=True))
    request = bench.request(request_id)
    assert request.state is RequestState.PREEMPTED
    assert 0 < request.num_pooled < len(PROMPT)
    assert bool(request.kv.num_swapped) is bool(num_host_blocks)
    bench.run()
    check(bench, request_id, PROMPT)
    assert bench.end(beside).end is not None


def test_a_prompt_may_be_as_long_as_the_context() -> None:
    bench = Bench(max_model_len=21)
    whole, one_more = submit(bench, PROMPT), submit(bench, [*PROMPT, 1])
    bench.run()
    check(bench, whole, PROMPT)
    end = bench.end(one_more).end
    assert end is not None
    assert (end.code, end.param) == ("context_length_exceeded", "prompt")
    assert "maximum context length is 21 tokens, but 22 prompt tokens were requested" in (end.error or "")


def test_a_request_that_is_cancelled_gives_no_vector() -> None:
    bench = Bench(prefill_chunk_tokens=32)
    request_id = submit(bench, PROMPT)
    bench.start()
    bench.cancel(request_id)
    bench.run()
    assert [output.embedding for output in bench.outputs] == [None]
    assert bench.end(request_id).end.cause is not None  # type: ignore[union-attr]


def test_drafts_beside_it_change_no_vector() -> None:
    bench = Bench(prefill_chunk_tokens=8, speculation=Speculation(Always(), 3, FLAT))
    bench.submit([7, 8, 9], max_tokens=20)
    bench.step()
    bench.step()
    request_id = submit(bench, PROMPT)
    bench.step()
    assert bench.plan is not None
    assert sum(bench.plan.num_drafts) > 0
    assert bench.plan.pool_seqs
    bench.run()
    check(bench, request_id, PROMPT)


def test_a_vector_without_a_number_ends_its_request_alone_and_is_shared_with_nobody() -> None:
    bench = Bench()
    beside = bench.submit([7, 8, 9])
    request_id = submit(bench, PROMPT)
    bench.start()
    assert bench.plan is not None
    done = bench.device.run(bench.plan)
    bench.tell(MakeBatch(msgspec.structs.replace(done, pooled=[struct.pack("<3d", 1.0, nan, 2.0)])))
    bench.run()
    assert bench.end(request_id).end.error == (  # type: ignore[union-attr]
        "the model's output for this request is not a number: it has no vector"
    )
    assert [incident.kind for incident in bench.incidents] == ["not_a_number"]
    assert bench.end(beside).end.error is None  # type: ignore[union-attr]
    last = submit(bench, PROMPT, "last")
    bench.run()
    assert bench.first(last).num_cached_tokens == 0


def test_it_counts_among_prompts_and_not_among_answers() -> None:
    bench = Bench()
    submit(bench, PROMPT)
    before = bench.scheduler.answer_tokens
    bench.run()
    statistics = bench.scheduler.statistics()
    assert (statistics.prompt_tokens_total, statistics.generation_tokens_total) == (21, 0)
    assert statistics.finished_total[RequestState.FINISHED_STOPPED] == 1
    assert bench.scheduler.answer_tokens == before


def test_vectors_are_cut_before_they_are_normalised() -> None:
    total = struct.pack("<4d", 6.0, 8.0, 5.0, -1.0)
    assert floats_of(vector(Pooling(dimensions=2), total, 2) or b"") == pytest.approx([0.6, 0.8])
    assert floats_of(vector(Pooling(normalize=False), total, 2) or b"") == [3.0, 4.0, 2.5, -0.5]
    whole = floats_of(vector(Pooling(), total, 7) or b"")
    assert hypot(*whole) == pytest.approx(1.0)
    assert floats_of(vector(Pooling(), bytes(16), 7) or b"") == [0.0, 0.0]
    for wrong in (nan, inf):
        assert vector(Pooling(), struct.pack("<2d", 1.0, wrong), 1) is None
    assert struct.unpack("<4d", added(total, added(b"", total))) == (12.0, 16.0, 10.0, -2.0)


@pytest.mark.parametrize(
    ("given", "param"),
    [({"n": 2}, "n"), ({"logprobs": 1}, "logprobs"), ({"stop": "a"}, "stop"), ({"max_tokens": 1}, "max_tokens")],
)
def test_nothing_may_be_said_of_tokens_beside_it(given: dict[str, Any], param: str) -> None:
    sentence = f"{param} cannot be combined with pooling: such a request gives a vector, and no tokens"
    with pytest.raises(InvalidParameter, match=sentence) as caught:
        SamplingParams(pooling=Pooling(), **given)
    assert caught.value.param == param


def test_dimensions_are_at_least_one() -> None:
    with pytest.raises(InvalidParameter, match="dimensions must be between 1 and") as caught:
        SamplingParams(pooling=Pooling(dimensions=0))
    assert caught.value.param == "dimensions"
