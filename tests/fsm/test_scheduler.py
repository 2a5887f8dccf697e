import pytest

from novainfer.fsm.kv.blocks import Journal
from novainfer.fsm.messages.events import CancelRequest, Cause, Fault, MakeBatch, PauseRequest, ResumeRequest
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import NONE_ALLOWED, StepDone
from novainfer.fsm.schedule.allowance import PATIENCE_MAX
from novainfer.fsm.schedule.ladder import Rung
from novainfer.fsm.schedule.recovery import TRIES_ALONE
from novainfer.fsm.schedule.request import RequestState
from novainfer.fsm.simulation.checks.oracle import TOKEN_BYTES, expected_run
from novainfer.fsm.simulation.world.device import EOS
from novainfer.fsm.simulation.world.shape import ALL_MODES, BEST
from tests.fsm.helpers import Bench

A, B, AB = TOKEN_BYTES.index(b"a"), TOKEN_BYTES.index(b"b"), TOKEN_BYTES.index(b"ab")
PAD = 9


@pytest.mark.parametrize("offender", range(5))
def test_a_bisection_isolates_the_request_that_fails_and_only_that_one_ends(offender):
    bench = Bench()
    ids = [bench.submit([10 + i] * 3, max_tokens=4) for i in range(5)]
    bench.step()
    while bench.plan is not None:
        if offender in bench.rows():
            bench.fail()
        else:
            bench.step()
    for request_id in ids:
        end = bench.end(request_id).end
        if request_id == offender:
            assert end.error == "the step that computed this request failed: broken"
            assert end.code == "step_failed"
        else:
            assert end.finish_reason == "length"
            expected = expected_run(
                [10 + request_id] * 3, SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0), 1, 0, 64
            )
            got = [t for o in bench.outputs if o.request_id == request_id for t in o.token_ids]
            assert got == expected.token_ids
    assert bench.scheduler.statistics().finished_total[RequestState.FINISHED_ERROR] == 1


def test_nobody_is_blamed_for_steps_that_failed_with_others_in_them_however_often():
    bench = Bench()
    ids = [bench.submit([10 + i] * 3, max_tokens=12) for i in range(3)]
    bench.step()
    for _ in range(2 * TRIES_ALONE):
        assert len(bench.rows()) == 3
        bench.fail()
        while len(bench.rows()) < 3:
            bench.step()
    bench.run()
    assert [bench.end(i).end.finish_reason for i in ids] == ["length"] * 3


def test_a_request_that_fails_alone_is_tried_once_more():
    bench = Bench()
    only = bench.submit([1, 2])
    bench.step()
    for _ in range(TRIES_ALONE - 1):
        bench.fail()
        assert bench.rows() == {only: 2}
    bench.run()
    assert bench.end(only).end.finish_reason == "length"


def test_out_of_memory_shrinks_the_chunk_and_it_recovers():
    bench = Bench(prefill_chunk_tokens=32, block_size=4, num_blocks=400, max_model_len=1600)
    long = bench.submit([1] * 60, max_tokens=1500)
    bench.start()
    assert bench.rows() == {long: 32}
    bench.fail(Fault.OOM)
    assert bench.rows() == {long: 16}
    bench.fail(Fault.OOM)
    assert bench.rows() == {long: 8}
    for _ in range(PATIENCE_MAX):
        bench.step()
    late = bench.submit([2] * 60)
    bench.step()
    assert bench.rows() == {long: 1, late: 32}


def test_a_step_that_was_never_launched_is_taken_back_exactly():
    bench = Bench(prefill_chunk_tokens=8)
    bench.submit([1] * 5)
    bench.step()
    bench.submit([2] * 12)
    bench.step()
    bench.submit([3] * 5)
    planner = bench.scheduler.planner
    taken: list[object] = []
    begin = planner.cache.pool.open

    def watched(journal: Journal) -> None:
        taken.append(bench.scheduler.fingerprint())
        begin(journal)

    planner.cache.pool.open = watched
    bench.step()  # one decodes, one is in the middle of its prompt, one is new
    assert len(bench.rows()) == 3
    (before,) = taken
    flight = bench.scheduler.oldest_flight
    assert bench.scheduler.fingerprint() != before
    planner.rollback(flight, launched=False)
    assert bench.scheduler.fingerprint() == before


def test_a_stop_token_ends_the_request_and_is_named():
    bench = Bench()
    one = bench.submit([1], stop_token_ids=[A])
    bench.step()
    bench.step([PAD])
    bench.step([A])
    output = bench.end(one)
    assert (output.end.finish_reason, output.end.stop_reason, output.token_ids) == ("stop", A, [A])


def test_the_end_of_sequence_ends_a_request_without_a_stop_reason_unless_it_is_ignored():
    bench = Bench()
    one, two = bench.submit([1], ignore_eos=False), bench.submit([2], ignore_eos=True, max_tokens=2)
    bench.step()
    bench.step([EOS, EOS])
    assert (bench.end(one).end.finish_reason, bench.end(one).end.stop_reason) == ("stop", None)
    assert bench.rows() == {two: 1}
    bench.step([PAD])
    assert bench.end(two).end.finish_reason == "length"


def test_a_stop_string_across_tokens_ends_the_request_and_none_of_it_is_sent():
    bench = Bench()
    one = bench.submit([1], stop="bab")
    bench.step()
    for token in (A, B, AB, PAD):
        if bench.plan is not None:
            bench.step([token])
    assert bench.text(one) == "a"
    assert bench.end(one).end.stop_reason == "bab"


def test_a_stop_string_is_sent_when_the_request_wants_it():
    bench = Bench()
    one = bench.submit([1], stop="bab", include_stop_str_in_output=True)
    bench.step()
    for token in (A, B, AB):
        bench.step([token])
    assert bench.text(one) == "abab"


def test_nothing_stops_a_request_before_its_min_tokens():
    bench = Bench()
    one = bench.submit([1], stop="a", stop_token_ids=[PAD], ignore_eos=False, min_tokens=4, max_tokens=8)
    bench.step()
    for token in (A, EOS, PAD):
        bench.step([token])
    assert bench.plan is not None
    bench.step([A])
    assert bench.end(one).end.stop_reason == "a"


def test_a_request_without_max_tokens_runs_to_the_end_of_the_context():
    bench = Bench(max_model_len=10)
    one = bench.submit([1, 2, 3], max_tokens=None)
    bench.run()
    assert bench.end(one).end.finish_reason == "length"
    assert sum(len(o.token_ids) for o in bench.outputs) == 7


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code", "param"),
    [
        ([], 1, "invalid_value", "prompt"),
        ([1] * 10, None, "context_length_exceeded", "prompt"),
        ([1] * 8, 3, "context_length_exceeded", "max_tokens"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused_with_the_field(prompt, max_tokens, code, param):
    bench = Bench(max_model_len=10)
    one = bench.submit(prompt, max_tokens=max_tokens)
    assert (bench.end(one).end.code, bench.end(one).end.param) == (code, param)
    bench.start()
    assert bench.plan is None


def test_usage_counts_prompt_generated_and_cached_tokens():
    bench = Bench(block_size=4)
    bench.submit([1] * 9, max_tokens=3)
    bench.run()
    bench.submit([1] * 9, max_tokens=2)
    bench.run()
    stats = bench.scheduler.statistics()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (18, 5)
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (18, 8)
    assert [o.first.num_cached_tokens for o in bench.outputs if o.first] == [0, 8]
    assert stats.finished_total[RequestState.FINISHED_LENGTH] == 2


def test_a_cancel_frees_what_is_not_on_the_device_at_once_and_the_rest_with_its_step():
    bench = Bench(num_blocks=8)
    one, two = bench.submit([1] * 5), bench.submit([2] * 5)
    bench.step()
    blocks = set(bench.request(one).kv.blocks)
    bench.cancel(one)
    assert bench.scheduler.statistics().blocks.num_owned == 4  # its step is on the device
    bench.step()
    assert bench.scheduler.statistics().blocks.num_owned == 2
    assert blocks.isdisjoint(bench.request(two).kv.blocks)
    assert [o.request_id for o in bench.outputs if o.token_ids] == [two]


def test_a_cancel_that_comes_before_its_submit_ends_the_request_when_it_comes():
    bench = Bench()
    bench.tell(CancelRequest(0, Cause.TIMEOUT))
    one = bench.submit([1])
    assert bench.end(one).end.cause is Cause.TIMEOUT
    assert not bench.scheduler.requests


def test_a_cancel_of_a_request_that_has_ended_changes_nothing():
    bench = Bench()
    one = bench.submit([1], max_tokens=1)
    bench.run()
    before = (bench.scheduler.fingerprint(), len(bench.outputs))
    bench.cancel(one)
    assert (bench.scheduler.fingerprint(), len(bench.outputs)) == before


def test_a_paused_request_is_left_out_and_goes_on_where_it_was():
    bench = Bench()
    one, two = bench.submit([1]), bench.submit([2])
    bench.step()
    bench.step()
    bench.tell(PauseRequest(one))
    bench.step()
    assert bench.rows() == {two: 1}
    bench.tell(ResumeRequest(one))
    bench.run()
    for request_id, prompt in ((one, [1]), (two, [2])):
        expected = expected_run(prompt, SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0), 1, 0, 64)
        assert [t for o in bench.outputs if o.request_id == request_id for t in o.token_ids] == expected.token_ids


def test_output_that_is_not_a_number_ends_its_request_and_harms_no_other():
    bench = Bench(modes=ALL_MODES)
    prompt = [7] * 10
    one, two = bench.submit(prompt), bench.submit([2] * 3)
    bench.step()
    mode, size = bench.plan.mode, len(bench.rows())
    bench.step(sampled=[-1, A])
    end = bench.end(one).end
    assert (end.error, end.code) == (
        "the model's output for this request is not a number: no token can be drawn from it",
        "step_failed",
    )
    assert [t for o in bench.outputs if o.request_id == two for t in o.token_ids] == [A]
    assert (size, mode, bench.plan.mode, bench.rows()) == (2, BEST, BEST, {two: 1})
    recovery = bench.scheduler.recovery
    assert not recovery.suspects
    (incident,) = bench.incidents
    assert (incident.kind, incident.stream_ids, incident.action) == (
        "not_a_number",
        [one],
        "the request ended with an error",
    )
    again = bench.submit(prompt)  # what was computed of the prompt is of no use
    bench.step()
    assert bench.rows()[again] == len(prompt)
    bench.run()
    assert bench.end(again).end.error is None
    assert bench.end(two).end.error is None


def test_a_mask_that_leaves_no_token_ends_its_request_and_blames_neither_model_nor_prompt():
    bench = Bench(modes=ALL_MODES)
    prompt = [7] * 10
    one, two = bench.submit(prompt), bench.submit([2] * 3)
    bench.step()
    bench.step(sampled=[NONE_ALLOWED, A])
    end = bench.end(one).end
    assert end.error.startswith("no token is left for this request")
    assert end.code == "no_token_allowed"
    assert [t for o in bench.outputs if o.request_id == two for t in o.token_ids] == [A]
    assert (bench.plan.mode, bench.rows(), bench.incidents) == (BEST, {two: 1}, [])
    again = bench.submit(prompt)
    bench.step()
    assert bench.rows()[again] < len(prompt), "what was computed of the prompt is good"
    bench.run()


def test_output_that_is_not_a_number_comes_alone_as_often_as_it_likes_and_moves_no_rung():
    bench = Bench(modes=ALL_MODES)
    for at in range(12):
        one = bench.submit([10 + at] * 3)
        bench.step()
        bench.step(sampled=[-1])
        assert bench.end(one).end.error is not None
        assert bench.scheduler.recovery.ladder.state is Rung.FULL


def test_log_probabilities_come_with_the_bytes_of_the_tokens():
    bench = Bench()
    one = bench.submit([1], logprobs=2, max_tokens=1)
    bench.start()
    done = StepDone(bench.plan.step_id, 0, [A], [(-0.5, [A, B], [-0.5, -1.0])])
    bench.tell(MakeBatch(done))
    (logprob,) = bench.end(one).logprobs
    assert (logprob.token, logprob.top) == (b"a", [(A, b"a", -0.5), (B, b"b", -1.0)])
