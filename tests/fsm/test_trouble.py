"""What is tried when memory is short, or kernels fail whoever they compute."""

import pytest

from novainfer.fsm.events import Fault, KeepOver, MakeBatch, PauseRequest, Quiet, ResumeRequest, StepFailed
from novainfer.fsm.ladder import Rung
from novainfer.fsm.params import SamplingParams
from novainfer.fsm.request import RequestState
from novainfer.fsm.simulation.oracle import expected_run
from novainfer.fsm.trouble import CHUNK_RECOVERY_STEPS, FAILED_ALONE_MAX, OOM_STEPS_MAX, TRIES_ALONE
from tests.fsm.helpers import Bench

ALL = ("full", "plain", "int8")


def rung(bench):
    return bench.scheduler.trouble.ladder.state


def until_all_run(bench, number):
    """The bisection goes well, and the next step holds everybody."""
    while len(bench.rows()) < number:
        bench.step()


def test_steps_that_run_out_of_memory_again_and_again_make_the_batch_smaller_until_it_is_quiet():
    bench = Bench(modes=ALL)
    ids = [bench.submit([10 + i] * 3, max_tokens=40) for i in range(8)]
    bench.step()
    bench.step()
    for _ in range(OOM_STEPS_MAX - 1):
        bench.fail(Fault.OOM)
        until_all_run(bench, 8)
    assert rung(bench) is Rung.FULL
    bench.fail(Fault.OOM)
    assert rung(bench) is Rung.SMALLER_BATCH
    sizes = set()
    for _ in range(12):
        bench.step()
        sizes.add(len(bench.rows()))
    assert max(sizes) == 4
    assert bench.scheduler.statistics().preemptions_total == 4
    timer = next(after.event for after in reversed(bench.timers) if isinstance(after.event, Quiet))
    bench.tell(timer)
    assert rung(bench) is Rung.FULL
    bench.run()
    for at, request_id in enumerate(ids):
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
        got = [t for o in bench.outputs if o.request_id == request_id for t in o.token_ids]
        assert got == expected_run([10 + at] * 3, params, 1, 0, 64).token_ids


def test_steps_out_of_memory_far_apart_are_bisected_and_no_more():
    bench = Bench(max_model_len=400, num_blocks=400)
    for i in range(2):
        bench.submit([10 + i] * 3, max_tokens=390)
    bench.step()
    bench.step()
    for _ in range(2):
        bench.fail(Fault.OOM)
        until_all_run(bench, 2)
        for _ in range(2 * CHUNK_RECOVERY_STEPS):
            bench.step()
    assert rung(bench) is Rung.FULL


def test_a_request_alone_for_which_memory_is_short_takes_the_engine_down_the_ladder_before_it_ends():
    bench = Bench(modes=ALL)
    one = bench.submit([1] * 4)
    bench.step()
    seen = []
    while one in bench.scheduler.requests:
        seen.append((rung(bench), bench.plan.mode))
        bench.fail(Fault.OOM)
    modes = {Rung.FULL: "full", Rung.SMALLER_BATCH: "full", Rung.PLAIN_KERNELS: "plain", Rung.INT8: "int8"}
    assert seen == [(r, mode) for r, mode in modes.items() for _ in range(TRIES_ALONE)]
    assert bench.end(one).end.error == "the step that computed this request ran out of memory: broken"


def test_a_request_for_which_a_lower_rung_is_enough_ends_well():
    bench = Bench(modes=ALL)
    one = bench.submit([1] * 4)
    bench.step()
    while bench.plan is not None:
        if bench.plan.mode == "int8":
            bench.step()
        else:
            bench.fail(Fault.OOM)
    assert bench.end(one).end.finish_reason == "length"


def test_an_exception_that_follows_one_request_ends_it_and_leaves_the_ladder_alone():
    bench = Bench(modes=ALL)
    one = bench.submit([1] * 4)
    bench.step()
    for _ in range(TRIES_ALONE):
        bench.fail(Fault.EXCEPTION)
    assert bench.end(one).end.error == "the step that computed this request failed: broken"
    assert rung(bench) is Rung.FULL


def test_kernels_that_fail_for_one_request_after_the_other_are_left_for_plainer_ones():
    bench = Bench(modes=ALL)
    ids = [bench.submit([10 + i] * 4) for i in range(6)]
    bench.step()
    while bench.plan is not None:
        if bench.plan.mode == "plain":
            bench.step()
        else:
            bench.fail(Fault.EXCEPTION)
    ends = [bench.end(i).end.finish_reason for i in ids]
    assert ends.count(None) == FAILED_ALONE_MAX - 1
    assert ends.count("length") == len(ids) - (FAILED_ALONE_MAX - 1)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_switch_that_fails_blames_nobody_and_the_step_is_tried_without_it(num_requests):
    bench = Bench(modes=("full", "int8"))
    ids = [bench.submit([10 + i] * 4) for i in range(num_requests)]
    bench.step()
    while bench.plan is not None:
        if bench.plan.mode == "int8":
            failed = StepFailed(bench.plan.step_id, 0, Fault.SWITCH, "no memory", launched=False)
            bench.tell(MakeBatch(failed))
            break
        bench.fail(Fault.OOM)
    assert rung(bench) is Rung.SMALLER_BATCH
    bench.run()
    assert [bench.end(i).end.finish_reason for i in ids] == ["length"] * num_requests


def test_every_failed_step_is_an_incident_that_says_what_is_done_about_it():
    bench = Bench()
    one, two = bench.submit([1] * 3), bench.submit([2] * 3)
    bench.step()
    bench.fail(Fault.OOM)
    while bench.plan is not None:
        bench.fail(Fault.EXCEPTION) if one in bench.rows() else bench.step()
    said = [(i.kind, i.stream_ids, i.action) for i in bench.incidents]
    assert said[0] == ("oom", [one, two], "its requests are tried in halves")
    assert ("exception", [one], "it is tried once more") in said
    assert said[-1] == ("exception", [one], "the request ended with an error")


def test_a_quiet_time_in_which_nothing_went_well_either_counts_from_the_next_good_step():
    bench = Bench(modes=ALL)
    bench.submit([1] * 4, max_tokens=20)
    bench.step()
    for _ in range(TRIES_ALONE):
        bench.fail(Fault.OOM)
    timer = bench.timers[-1].event
    bench.tell(timer)
    assert rung(bench) is Rung.SMALLER_BATCH
    bench.step()
    assert bench.timers[-1].event != timer
    bench.tell(bench.timers[-1].event)
    assert rung(bench) is Rung.FULL


def test_a_request_that_fails_on_every_rung_ends_even_if_the_ladder_is_climbed_meanwhile():
    bench = Bench(modes=ALL)
    one = bench.submit([1] * 4)
    other = bench.submit([2] * 4, max_tokens=50)
    bench.step()
    for _ in range(200):
        if one not in bench.scheduler.requests:
            break
        if one in bench.rows():
            bench.fail(Fault.OOM)
        else:
            bench.step()
            for after in bench.timers:
                bench.tell(after.event)
    assert bench.end(one).end.error is not None
    bench.run()
    assert bench.end(other).end.finish_reason == "length"


def test_a_step_that_cannot_fetch_is_reported_and_what_it_would_have_fetched_is_computed_again():
    bench = Bench(num_host_blocks=8)
    one = bench.submit([1] * 5)
    bench.step()
    bench.step()
    bench.tell(PauseRequest(one))
    bench.step()
    bench.tell(KeepOver(one, 1))
    bench.tell(ResumeRequest(one))
    bench.step()
    assert bench.request(one).state is RequestState.WAITING_FOR_REMOTE_KVS
    bench.fail(Fault.EXCEPTION)
    assert bench.incidents[-1].stream_ids == [one]
    assert not bench.request(one).host_blocks
    bench.run()
    assert bench.end(one).end.finish_reason == "length"


def test_nobody_is_blamed_for_a_step_that_held_a_cancelled_request_as_well():
    bench = Bench()
    gone, one = bench.submit([1] * 3), bench.submit([2] * 3)
    bench.step()
    bench.cancel(gone)
    bench.fail(Fault.EXCEPTION)
    assert bench.request(one).failures == 0
    assert bench.incidents[-1].action == "it is tried alone"
    bench.run()
    assert bench.end(one).end.finish_reason == "length"
