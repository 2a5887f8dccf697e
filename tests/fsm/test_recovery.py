"""What becomes of requests when the worker under them is lost."""

import pytest

from novainfer.fsm.messages.events import CancelRequest, Cause, Fault, KeepOver, PauseRequest, ResumeRequest, WorkerLost
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.schedule.recovery import LOSSES_SUSPECT, TRIES_ALONE
from novainfer.fsm.schedule.request import RequestState
from novainfer.fsm.schedule.scheduler import SchedulerState
from novainfer.fsm.simulation.checks.oracle import expected_run
from tests.fsm.helpers import Bench


def tokens(bench, request_id):
    return [t for o in bench.outputs if o.request_id == request_id for t in o.token_ids]


def exact(bench, request_id, prompt, max_tokens=8):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    assert tokens(bench, request_id) == expected_run(prompt, params, 1, 0, 64).token_ids


@pytest.mark.parametrize("steps_before", [1, 2, 4])
def test_requests_are_computed_again_from_their_own_tokens_and_nobody_notices(steps_before):
    bench = Bench(prefill_chunk_tokens=8, max_num_seqs=3)
    prompts = [[10 + i] * (3 + 5 * i) for i in range(4)]
    ids = [bench.submit(prompt) for prompt in prompts]
    for _ in range(steps_before):
        bench.step()
    running = list(bench.scheduler.planner.running.values())
    bench.lose()
    assert bench.scheduler.state is SchedulerState.RECOVERING
    # who was admitted by the very step that is lost waits as before
    assert {r.state for r in running} == {RequestState.RECOVERING if steps_before > 1 else RequestState.WAITING}
    assert bench.scheduler.statistics().blocks.num_free == 32
    bench.recover()
    assert {r.state for r in running} <= {RequestState.WAITING, RequestState.PREFILL}
    bench.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        exact(bench, request_id, prompt)


def test_nothing_that_the_lost_worker_held_is_found_in_the_cache():
    bench = Bench()
    bench.submit([1] * 9, max_tokens=1)
    bench.run()
    bench.lose()
    bench.recover()
    bench.submit([1] * 9, max_tokens=1)
    bench.run()
    assert bench.scheduler.statistics().prefix_hit_tokens_total == 0


def test_who_comes_goes_stalls_or_returns_while_there_is_no_worker_is_heeded():
    bench = Bench()
    gone, paused, other = (bench.submit([10 + i] * 3) for i in range(3))
    bench.step()
    bench.step()
    bench.tell(PauseRequest(paused))
    bench.step()
    bench.lose()
    bench.cancel(gone)
    late = bench.submit([20] * 3)
    bench.tell(PauseRequest(other))  # nothing is written now
    bench.tell(ResumeRequest(paused))
    assert bench.end(gone).end.cause is Cause.CLIENT
    bench.recover()
    bench.run()
    for request_id, prompt in ((paused, [11] * 3), (other, [12] * 3), (late, [20] * 3)):
        exact(bench, request_id, prompt)


def test_a_paused_request_stays_paused_and_needs_no_slot():
    bench = Bench(max_num_seqs=1)
    paused = bench.submit([1] * 3)
    bench.step()
    bench.step()
    bench.tell(PauseRequest(paused))
    bench.step()
    bench.lose()
    bench.recover()
    assert bench.request(paused).state is RequestState.PAUSED
    other = bench.submit([2] * 3)
    bench.run()
    exact(bench, other, [2] * 3)
    bench.tell(ResumeRequest(paused))
    bench.run()
    exact(bench, paused, [1] * 3)


def test_one_loss_suspects_nobody():
    bench = Bench()
    for i in range(4):
        bench.submit([10 + i] * 3)
    bench.step()
    bench.lose()
    bench.recover()
    assert len(bench.rows()) == 4


@pytest.mark.parametrize("poison", range(5))
def test_a_request_that_kills_the_worker_each_time_is_found_and_only_it_ends(poison):
    bench = Bench(prefill_chunk_tokens=8)
    prompts = [[10 + i] * (3 + 4 * i) for i in range(5)]
    ids = [bench.submit(prompt) for prompt in prompts]
    bench.step()
    in_a_row = most_in_a_row = 0
    while bench.plan is not None:
        request = bench.scheduler.requests.get(poison)
        # its last chunk is what kills: the first ones go well, also after each restart
        if poison in bench.rows() and request.num_planned == len(prompts[poison]):
            bench.lose()
            bench.recover()
            in_a_row += 1
            most_in_a_row = max(in_a_row, most_in_a_row)
        else:
            bench.step()
            in_a_row = 0
    assert most_in_a_row <= 3  # well within the worker's budget
    for request_id, prompt in zip(ids, prompts, strict=True):
        if request_id == poison:
            assert bench.end(poison).end.error == "the step that computed this request ended the worker: killed"
        else:
            exact(bench, request_id, prompt)


def test_a_request_alone_is_given_up_after_as_many_losses_as_are_borne():
    bench = Bench()
    only = bench.submit([1])
    bench.step()
    for _ in range(LOSSES_SUSPECT - 1 + TRIES_ALONE):
        assert only in bench.scheduler.requests
        bench.lose(Fault.TIMEOUT)
        bench.recover()
    assert "never ended" in bench.end(only).end.error


def test_a_cancel_in_the_lost_step_frees_everything():
    bench = Bench()
    one = bench.submit([1] * 5)
    bench.step()
    bench.tell(CancelRequest(one, Cause.DISCONNECT))
    bench.lose()
    assert bench.scheduler.statistics().blocks.num_free == 32
    bench.recover()
    assert bench.plan is None


# ---- paused requests give up what others need -----------------------------------------------------------------------


def test_paused_requests_give_their_slots_to_those_who_wait():
    bench = Bench(max_num_seqs=2)
    slow = [bench.submit([i] * 3) for i in (1, 2)]
    bench.step()
    bench.step()
    for request_id in slow:
        bench.tell(PauseRequest(request_id))
    bench.step()
    others = [bench.submit([10 + i] * 3) for i in range(5)]
    bench.run()
    for at, request_id in enumerate(others):
        exact(bench, request_id, [10 + at] * 3)
    for request_id in slow:
        bench.tell(ResumeRequest(request_id))
    bench.run()
    for request_id, prompt in zip(slow, ([1] * 3, [2] * 3), strict=True):
        exact(bench, request_id, prompt)


def test_who_is_paused_for_too_long_gives_up_its_blocks_and_the_timer_ends_with_the_pause():
    bench = Bench()
    one, _ = bench.submit([1] * 3), bench.submit([2] * 3, max_tokens=30)
    bench.step()
    bench.step()
    bench.tell(PauseRequest(one))
    assert [after.event for after in bench.timers] == [KeepOver(one)]
    bench.tell(ResumeRequest(one))
    assert bench.timers == []
    bench.tell(PauseRequest(one))
    bench.step()
    assert bench.request(one).kv.blocks
    bench.tell(bench.timers[-1].event)
    assert not bench.request(one).kv.blocks
    assert bench.request(one).state is RequestState.PAUSED
    bench.tell(ResumeRequest(one))
    bench.run()
    exact(bench, one, [1] * 3)


def test_who_overstays_while_its_step_is_on_the_device_gives_up_its_blocks_after_it():
    bench = Bench()
    one, _ = bench.submit([1] * 3), bench.submit([2] * 3, max_tokens=30)
    bench.step()
    bench.step()
    bench.tell(PauseRequest(one))
    bench.tell(bench.timers[-1].event)
    assert bench.request(one).kv.blocks  # the device may write into them
    bench.step()
    assert not bench.request(one).kv.blocks


def test_a_plan_that_never_reached_the_lost_worker_counts_against_nobody():
    bench = Bench()
    one = bench.submit([1] * 3)
    bench.step()
    bench.tell(WorkerLost(0, Fault.LOST, "killed", step_id=-1))
    assert bench.request(one).losses == 0
