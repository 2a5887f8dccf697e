"""What is tried when memory is short, or kernels fail whoever they compute."""

from math import log2

import pytest

from novainfer.fsm.messages.events import Fault, KeepOver, MakeBatch, PauseRequest, Quiet, ResumeRequest, StepFailed
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.schedule.allowance import PATIENCE, PATIENCE_MAX
from novainfer.fsm.schedule.ladder import Rung
from novainfer.fsm.schedule.recovery import TRIES_ALONE
from novainfer.fsm.schedule.request import RequestState
from novainfer.fsm.simulation.checks.oracle import expected_run
from novainfer.fsm.simulation.world.shape import ALL_MODES, BEST, LEAN, SAFE
from tests.fsm.helpers import Bench


def rung(bench):
    return bench.scheduler.recovery.ladder.rung


def is_canary(bench):
    return any(flight.canary for flight in bench.scheduler.flights)


def right(prompt, max_tokens):
    """The tokens of a run without a fault."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    return expected_run(prompt, params, 1, 0, 64).token_ids


def until_all_run(bench, number):
    """The bisection goes well, and the next step holds everybody."""
    while len(bench.rows()) < number:
        bench.step()


class Crowd:
    """Requests that want to run together for ever, on a device with room for so many rows and prompt tokens."""

    def __init__(self, number, **limits):
        fields = {"max_num_seqs": number, "max_num_batched_tokens": 2 * number, "num_blocks": 1 << 15}
        self.bench = Bench(max_model_len=1 << 14, modes=ALL_MODES, **{**fields, **limits})
        self.ids = [self.bench.submit([i % 60 + 2] * 3, max_tokens=None) for i in range(number)]
        self.failed = []
        self.num_steps = 0
        self.bench.step()

    def run(self, num_steps, room):
        """So many steps; those fail that hold more rows than there is room for."""
        for _ in range(num_steps):
            self.num_steps += 1
            if len(self.bench.rows()) > room:
                self.failed.append(self.num_steps)
                self.bench.fail(Fault.OOM)
            else:
                self.bench.step()


@pytest.mark.parametrize("room", [1, 5, 16, 23, 40, 63])
def test_where_memory_is_short_for_long_steps_hold_as_many_as_go_well_and_few_fail(room):
    crowd = Crowd(64)
    crowd.run(600, room)
    assert len(crowd.failed) <= log2(64) + 3
    crowd.run(400, room)
    assert len([at for at in crowd.failed if at > 600]) <= 4
    assert rung(crowd.bench) == Rung.SMALLER_BATCH
    assert all(i in crowd.bench.scheduler.requests for i in crowd.ids)


def test_steps_hold_everything_again_when_memory_is_not_short_any_more():
    crowd = Crowd(8)
    crowd.run(300, room=3)
    crowd.run(PATIENCE_MAX + 8 * PATIENCE, room=8)
    assert rung(crowd.bench) == Rung.FULL
    assert len(crowd.bench.rows()) == 8


def test_texts_are_exact_while_the_batch_is_made_smaller_and_larger():
    bench = Bench(modes=ALL_MODES)
    ids = [bench.submit([10 + i] * 3, max_tokens=40) for i in range(8)]
    bench.step()
    while bench.plan is not None:
        if len(bench.rows()) > 3:
            bench.fail(Fault.OOM)
        else:
            bench.step()
    assert rung(bench) == Rung.SMALLER_BATCH
    for at, request_id in enumerate(ids):
        got = [t for o in bench.outputs if o.request_id == request_id for t in o.token_ids]
        assert got == right([10 + at] * 3, 40)
        assert not any(o.is_degraded for o in bench.outputs if o.request_id == request_id)


def test_steps_out_of_memory_far_apart_are_bisected_and_no_more():
    bench = Bench(max_model_len=400, num_blocks=400)
    for i in range(2):
        bench.submit([10 + i] * 3, max_tokens=390)
    bench.step()
    bench.step()
    for _ in range(2):
        bench.fail(Fault.OOM)
        until_all_run(bench, 2)
        for _ in range(2 * PATIENCE):
            bench.step()
    assert rung(bench) == Rung.FULL


# ---- blame ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.OOM, Fault.EXCEPTION])
def test_requests_that_fail_alone_end_one_by_one_and_however_many_they_are_they_move_no_rung(fault):
    bench = Bench(modes=ALL_MODES)
    ids = [bench.submit([10 + i] * 4) for i in range(8)]
    canaries = 0
    bench.step()
    while bench.plan is not None:
        canaries += is_canary(bench)
        if is_canary(bench):
            bench.step()
        else:
            bench.fail(fault)
    assert [bench.end(i).end.code for i in ids] == ["step_failed"] * 8
    assert canaries == 8
    assert rung(bench) == Rung.FULL


@pytest.mark.parametrize("fault", [Fault.OOM, Fault.EXCEPTION])
def test_poison_beside_others_ends_alone_and_the_others_are_exact_and_not_degraded(fault):
    bench = Bench(modes=ALL_MODES, max_num_seqs=16)
    poison = [bench.submit([1] * 4) for _ in range(8)]
    others = [bench.submit([10 + i] * 4, max_tokens=20) for i in range(8)]
    bench.step()
    while bench.plan is not None:
        if any(i in bench.rows() for i in poison):
            bench.fail(fault)
        else:
            bench.step()
    assert [bench.end(i).end.code for i in poison] == ["step_failed"] * 8
    for at, request_id in enumerate(others):
        assert [t for o in bench.outputs if o.request_id == request_id for t in o.token_ids] == right([10 + at] * 4, 20)
    assert rung(bench) == Rung.FULL
    assert not any(o.is_degraded for o in bench.outputs)


@pytest.mark.parametrize(("fault", "mode"), [(Fault.OOM, LEAN), (Fault.EXCEPTION, SAFE)])
@pytest.mark.parametrize("number", [1, 6])
def test_when_a_canary_fails_too_the_engine_goes_down_and_no_request_ends(fault, mode, number):
    bench = Bench(modes=ALL_MODES)
    ids = [bench.submit([10 + i] * 4) for i in range(number)]
    bench.step()
    while bench.plan is not None:
        if bench.plan.mode == mode:
            bench.step()
        else:
            bench.fail(fault)
    assert [bench.end(i).end.finish_reason for i in ids] == ["length"] * number
    assert all(o.is_degraded for o in bench.outputs)
    assert bench.scheduler.recovery.ladder.device_mode == mode


def test_a_request_that_fails_whatever_the_mode_ends_when_all_were_tried():
    bench = Bench(modes=ALL_MODES)
    one = bench.submit([1] * 4)
    bench.step()
    seen = []
    while one in bench.scheduler.requests:
        seen.append((bench.plan.mode, is_canary(bench)))
        bench.fail(Fault.OOM)
    tries = [(BEST, False)] * TRIES_ALONE
    assert seen == [*tries, (BEST, True), *([(LEAN, False)] * TRIES_ALONE)]
    assert bench.end(one).end.error == "the step that computed this request ran out of memory: broken"


def test_a_device_with_one_mode_computes_no_canaries():
    bench = Bench()
    one = bench.submit([1] * 4)
    bench.step()
    for _ in range(TRIES_ALONE):
        assert not is_canary(bench)
        bench.fail(Fault.EXCEPTION)
    assert bench.end(one).end.error == "the step that computed this request failed: broken"


def test_without_room_for_a_canary_the_request_ends():
    bench = Bench(modes=ALL_MODES, num_blocks=8, max_num_seqs=2)
    others = [bench.submit([9] * 12, max_tokens=8), bench.submit([1] * 4, max_tokens=8)]
    bench.step()
    bench.step()
    while bench.plan is not None:
        assert not is_canary(bench)
        if others[1] in bench.rows():
            bench.fail(Fault.EXCEPTION)
        else:
            bench.step()
    assert bench.end(others[1]).end.code == "step_failed"
    assert bench.end(others[0]).end.finish_reason == "length"
    assert rung(bench) == Rung.FULL


def test_a_canary_is_as_large_as_the_step_that_failed_and_holds_nothing_of_a_client():
    bench = Bench(modes=ALL_MODES)
    bench.submit([7] * 11, max_tokens=2)
    bench.step()
    for _ in range(TRIES_ALONE):
        bench.fail(Fault.EXCEPTION)
    assert is_canary(bench)
    assert bench.plan.input_ids == [0] * 11
    assert bench.plan.admissions[0].temperature == 0
    before = bench.scheduler.planner.cache.statistics().num_owned
    assert before == 3
    bench.step()
    assert bench.scheduler.planner.cache.statistics().num_owned == 0


def test_a_request_on_trial_that_is_cancelled_ends_once():
    bench = Bench(modes=ALL_MODES)
    one = bench.submit([7] * 4)
    bench.step()
    for _ in range(TRIES_ALONE):
        bench.fail(Fault.EXCEPTION)
    bench.cancel(one)
    bench.step()
    assert bench.end(one).end.cause is not None


def test_a_canary_that_is_lost_with_its_worker_says_nothing():
    bench = Bench(modes=ALL_MODES)
    one = bench.submit([7] * 4)
    bench.step()
    for _ in range(TRIES_ALONE):
        bench.fail(Fault.EXCEPTION)
    bench.lose()
    bench.recover()
    assert bench.rows() == {one: 4}
    bench.run()
    assert bench.end(one).end.finish_reason == "length"


def test_a_canary_that_is_lost_clears_no_other_that_is_suspected():
    bench = Bench(modes=ALL_MODES)
    one, other = bench.submit([7] * 4), bench.submit([8] * 4)
    bench.step()
    while not is_canary(bench):  # both together, then the first of them twice
        bench.fail(Fault.EXCEPTION)
    bench.lose()
    bench.recover()
    assert bench.rows() == {other: 4}
    bench.step()
    assert bench.rows() == {one: 4}


@pytest.mark.parametrize("fault", [Fault.OOM, Fault.EXCEPTION])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("number", range(1, 9))
def test_when_every_other_step_fails_no_request_is_to_blame(fault, first, number):
    bench = Bench(modes=ALL_MODES)
    ids = [bench.submit([7 + n] * 4) for n in range(number)]
    bench.step()
    for turn in range(1000):
        if bench.plan is None:
            break
        if turn % 2 == first and not is_canary(bench):
            bench.fail(fault)
        else:
            bench.step()
    assert [bench.end(i).end.finish_reason for i in ids] == ["length"] * number


def test_one_lost_worker_keeps_no_group_apart_that_is_tried_for_another_reason():
    bench = Bench(prefill_chunk_tokens=16)
    one, two, three = bench.submit([7] * 24), bench.submit([8] * 4), bench.submit([9] * 4)
    bench.step()
    bench.lose()
    bench.recover()
    bench.fail(Fault.EXCEPTION)
    tried = bench.rows().keys()
    assert tried < {one, two, three}
    bench.step()
    assert bench.rows().keys() == {one, two, three} - tried
    bench.step()
    assert bench.rows().keys() == {one, two, three}


def test_what_was_computed_in_another_mode_is_shared_with_no_request_afterwards():
    bench = Bench(modes=ALL_MODES)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    one = bench.submit(prompt, max_tokens=30)
    bench.step()
    while bench.plan.mode == BEST:
        bench.fail(Fault.OOM)
    bench.step()
    bench.step()
    same = bench.submit(prompt, max_tokens=2)
    while bench.end_of(same) is None:
        bench.step()
    assert bench.first(same).num_cached_tokens == 8
    bench.tell(next(after.event for after in reversed(bench.timers) if isinstance(after.event, Quiet)))
    assert rung(bench) in (Rung.FULL, Rung.SMALLER_BATCH)
    bench.step()
    late = bench.submit(prompt, max_tokens=2)
    later = bench.submit(prompt, max_tokens=4)
    while bench.end_of(later) is None:
        bench.step()
    assert bench.plan.mode == BEST
    assert bench.first(late).num_cached_tokens == 0
    assert bench.first(later).num_cached_tokens == 8
    flags = {i: {o.is_degraded for o in bench.outputs if o.request_id == i} for i in (one, same, late, later)}
    assert flags == {one: {True}, same: {True}, late: {False}, later: {False}}


# ---- slow and lethal steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.TIMEOUT, Fault.LOST])
@pytest.mark.parametrize("most", [4, 13, 40, 100])
def test_where_steps_above_some_size_cost_their_worker_all_prompts_are_computed_in_smaller_ones(fault, most):
    bench = Bench(max_model_len=1000, num_blocks=800, max_num_batched_tokens=512, prefill_chunk_tokens=512)
    ids = [bench.submit([10 + i] * 900, max_tokens=2) for i in range(3)]
    bench.step()
    num_lost = 0
    while bench.plan is not None:
        if sum(bench.rows().values()) > most:
            num_lost += 1
            bench.lose(fault)
            bench.recover()
        else:
            bench.step()
    assert [bench.end(i).end.finish_reason for i in ids] == ["length"] * 3
    assert num_lost <= 12


@pytest.mark.parametrize("token_s", [0.02, 0.1, 0.4])
def test_on_a_machine_that_is_slow_no_worker_is_lost_at_all(token_s):
    bench = Bench(max_model_len=1000, num_blocks=800, max_num_batched_tokens=512, prefill_chunk_tokens=512)
    ids = [bench.submit([10 + i] * 900, max_tokens=2) for i in range(3)]
    bench.step()
    while bench.plan is not None:
        took_s = token_s * sum(bench.rows().values())
        assert took_s < 60.0
        bench.step(took_s=took_s)
    assert [bench.end(i).end.finish_reason for i in ids] == ["length"] * 3


@pytest.mark.parametrize("fault", [Fault.TIMEOUT, Fault.LOST])
@pytest.mark.parametrize("length", [3, 60, 500])
def test_a_prompt_that_costs_its_worker_in_steps_of_any_size_ends_alone_within_the_restart_budget(fault, length):
    bench = Bench(max_model_len=1000, num_blocks=800, max_num_batched_tokens=512, prefill_chunk_tokens=512)
    bad = bench.submit([1] * length)
    bench.step()
    num_lost = 0
    while bad in bench.scheduler.requests:
        bench.lose(fault)
        num_lost += 1
        bench.recover()
    assert num_lost <= 5  # `max_restarts` of a server
    assert bench.end(bad).end.code == "step_failed"


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_switch_that_fails_blames_nobody_and_the_step_is_tried_without_it(num_requests):
    bench = Bench(modes=(BEST, LEAN))
    ids = [bench.submit([10 + i] * 4) for i in range(num_requests)]
    bench.step()
    while bench.plan is not None:
        if bench.plan.mode == LEAN:
            failed = StepFailed(bench.plan.step_id, 0, Fault.SWITCH, "no memory", launched=False)
            bench.tell(MakeBatch(failed))
            break
        bench.fail(Fault.OOM)
    assert not bench.scheduler.recovery.ladder.is_down
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
    bench = Bench(modes=ALL_MODES)
    bench.submit([1] * 4, max_tokens=20)
    bench.step()
    for _ in range(TRIES_ALONE + 1):  # with the canary
        bench.fail(Fault.OOM)
    bench.tell(bench.timers[-1].event)
    assert rung(bench) == "INT8"
    assert bench.timers == []
    bench.step()
    bench.tell(bench.timers[-1].event)
    assert rung(bench) == Rung.FULL


def test_a_quiet_time_in_which_nothing_went_well_begins_again_when_the_last_request_has_ended():
    bench = Bench(modes=ALL_MODES)
    one = bench.submit([1] * 4, max_tokens=20)
    bench.step()
    for _ in range(TRIES_ALONE + 1):  # with the canary
        bench.fail(Fault.OOM)
    bench.tell(bench.timers[-1].event)
    assert bench.timers == []
    bench.cancel(one)
    assert rung(bench) == "INT8"
    bench.tell(bench.timers[-1].event)
    assert rung(bench) == Rung.FULL


@pytest.mark.parametrize("num_new", [0, 1])
def test_a_step_of_decoding_requests_that_is_lost_again_is_made_as_small_as_can_be(num_new):
    bench = Bench()
    old = [bench.submit([i] * 3, max_tokens=20) for i in range(1, 4)]
    bench.step()
    new = [bench.submit([9], max_tokens=20) for _ in range(num_new)]
    bench.step()
    assert list(bench.rows()) == old + new
    bench.request(old[0]).losses = 2  # one that was swapped in, and has had no token since
    bench.lose()
    assert bench.scheduler.planner.max_running == 1


def test_a_group_that_is_larger_than_a_step_may_be_by_now_is_tried_in_parts():
    crowd = Crowd(16)
    crowd.run(2, room=16)
    sizes = []
    while not sizes or sizes[-1] > 2:
        sizes.append(len(crowd.bench.rows()))
        crowd.run(1, room=1)
    assert sizes == [16, 8, 4, 2]
    tried = []
    while crowd.bench.scheduler.recovery.suspects:
        tried += crowd.bench.rows()
        crowd.run(1, room=1)
    assert sorted(tried) == crowd.ids
    assert len(crowd.failed) == len(sizes)


def test_a_request_that_fails_on_every_rung_ends_even_if_the_ladder_is_climbed_meanwhile():
    bench = Bench(modes=ALL_MODES)
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
    bench.tell(KeepOver(one))
    bench.tell(ResumeRequest(one))
    bench.step()
    assert bench.request(one).state is RequestState.WAITING_FOR_REMOTE_KVS
    bench.fail(Fault.EXCEPTION)
    assert bench.incidents[-1].stream_ids == [one]
    assert not bench.request(one).kv.host_blocks
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


def test_a_canary_whose_output_is_not_a_number_has_failed():
    bench = Bench(modes=ALL_MODES)
    one = bench.submit([7] * 4)
    bench.step()
    for _ in range(TRIES_ALONE):
        bench.fail(Fault.EXCEPTION)
    bench.step(sampled=[-1])
    assert rung(bench) == "PLAIN_KERNELS"
    bench.run()
    assert bench.end(one).end.finish_reason == "length"
