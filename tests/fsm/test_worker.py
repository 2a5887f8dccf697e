import pytest

from novainfer.fsm.core.machine import After, Drop, Effect, Send, Start
from novainfer.fsm.device.worker import BACKOFF_S, RestartPolicy, Worker, WorkerState
from novainfer.fsm.messages.events import (
    Begin,
    Close,
    DeviceLost,
    Fault,
    Fit,
    Incident,
    JobDone,
    JobFailed,
    Kill,
    Launch,
    Load,
    Overdue,
    Reclaim,
    Restart,
    Run,
    Spawn,
    StepFailed,
    Stop,
    Switch,
    Warm,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.simulation.world.shape import BEST, LEAN, SAFE

LOADED = {"max_model_len": 64, "vocab_size": 100, "eos_token_ids": [0]}


def plan(step_id: int, epoch: int = 0, mode: Mode = BEST, after: int = 0) -> StepPlan:
    return StepPlan(step_id=step_id, epoch=epoch, mode=mode, after=after)


def come_up(worker: Worker, epoch: int = 0) -> list[Effect]:
    """Everything goes well from LOADING on; returns the last effects."""
    for job, value in (("Spawn", None), ("Load", LOADED), ("Fit", {"num_blocks": 8}), ("Warm", None)):
        effects = worker.handle(JobDone(job, value, epoch))
    return effects


@pytest.fixture
def worker() -> Worker:
    worker = Worker()
    worker.handle(Begin())
    come_up(worker)
    return worker


@pytest.fixture
def running(worker) -> Worker:
    worker.handle(Launch(plan(1)))
    return worker


def test_a_worker_loads_fits_and_warms_and_then_says_what_it_holds():
    worker = Worker()
    assert worker.handle(Begin()) == [Start(Spawn())]
    assert worker.handle(JobDone("Spawn")) == [Start(Load())]
    assert worker.handle(JobDone("Load", LOADED)) == [Start(Fit())]
    assert worker.handle(JobDone("Fit", {"num_blocks": 8})) == [Start(Warm())]
    found = {**LOADED, "num_blocks": 8}
    assert worker.handle(JobDone("Warm", {})) == [Send("engine", WorkerReady(0, 8, 64, 100, [0], found))]
    assert worker.state is WorkerState.READY


def test_costs_of_steps_stay_where_a_device_takes_over_that_has_measured_none():
    worker = Worker(RestartPolicy(max_restarts=1))
    worker.handle(Begin())
    answers = [("Spawn", None), ("Load", LOADED), ("Fit", {"num_blocks": 8}), ("Warm", {"step_costs": [(1, 2.0)]})]
    for job, value in answers:
        (ready,) = worker.handle(JobDone(job, value))
    assert ready.event.step_costs == [(1, 2.0)]
    worker.handle(DeviceLost(0, "killed", 1.0))
    worker.handle(Restart())
    (ready,) = come_up(worker, 1)
    assert ready.event.epoch == 1
    assert ready.event.step_costs == [(1, 2.0)]


@pytest.mark.parametrize("done", [[], ["Spawn"], ["Spawn", "Load"], ["Spawn", "Load", "Fit"]])
def test_a_job_that_fails_while_it_comes_up_fails_the_worker_with_its_sentence(done):
    worker = Worker()
    worker.handle(Begin())
    for job in done:
        worker.handle(JobDone(job, {}))
    failing = ["Spawn", "Load", "Fit", "Warm"][len(done)]
    effects = worker.handle(JobFailed(failing, "no memory"))
    assert Send("engine", WorkerFailed("no memory")) in effects
    assert worker.state is WorkerState.FAILED


def test_a_result_of_a_job_that_is_not_the_current_one_is_dropped():
    worker = Worker()
    worker.handle(Begin())
    worker.handle(JobDone("Spawn"))
    worker.handle(JobDone("Load", {}))
    assert worker.handle(JobDone("Load", {})) == []
    assert worker.state is WorkerState.FITTING


def test_a_step_runs_and_its_result_goes_to_the_engine(running):
    assert running.state is WorkerState.RUNNING
    assert running.handle(StepDone(1, 0, [5])) == [Send("engine", StepDone(1, 0, [5]))]
    assert running.state is WorkerState.READY


def test_a_launch_starts_the_step_on_the_device(worker):
    assert worker.handle(Launch(plan(3))) == [Start(Run(plan(3)))]


@pytest.mark.parametrize("late", [StepDone(0, 0, []), StepDone(1, 1, []), StepFailed(0, 0, Fault.OOM, "")])
def test_a_late_result_of_another_step_or_epoch_is_dropped(running, late):
    assert running.handle(late) == []
    assert running.state is WorkerState.RUNNING


def test_a_result_that_comes_twice_is_dropped(running):
    running.handle(StepDone(1, 0, [5]))
    assert running.handle(StepDone(1, 0, [5])) == []
    assert running.state is WorkerState.READY


def test_after_out_of_memory_the_device_reclaims_before_the_engine_hears_of_it(running):
    failed = StepFailed(1, 0, Fault.OOM, "no memory")
    assert running.handle(failed) == [Start(Reclaim())]
    assert running.state is WorkerState.OOM
    assert running.handle(JobDone("Reclaim")) == [Send("engine", failed)]
    assert running.state is WorkerState.READY


def test_an_exception_goes_to_the_engine_at_once(running):
    failed = StepFailed(1, 0, Fault.EXCEPTION, "broken")
    assert running.handle(failed) == [Send("engine", failed)]


def test_a_device_that_cannot_reclaim_fails_the_worker(running):
    running.handle(StepFailed(1, 0, Fault.OOM, "no memory"))
    effects = running.handle(JobFailed("Reclaim", "no more"))
    assert Send("engine", WorkerFailed("the worker was lost: no more")) in effects
    assert running.state is WorkerState.FAILED


def test_a_stop_closes_the_device_once_in_whatever_state(running):
    assert running.handle(Stop()) == [Start(Close())]
    assert running.handle(Stop()) == []
    assert running.handle(StepDone(1, 0, [5])) == []
    assert running.handle(Launch(plan(2))) == []


def test_a_worker_stopped_before_it_began_does_not_begin():
    worker = Worker()
    worker.handle(Stop())
    assert worker.handle(Begin()) == []
    assert worker.state is WorkerState.STOPPED


# ---- a device that can be replaced ----------------------------------------------------------------------------------

PLAN = RestartPolicy(max_restarts=3, window_s=60.0)


@pytest.fixture
def replaceable() -> Worker:
    worker = Worker(PLAN)
    worker.handle(Begin())
    come_up(worker)
    return worker


def restart(worker: Worker) -> list[Effect]:
    """The timer fires and the next device comes up."""
    worker.handle(Restart())
    return come_up(worker, worker.epoch)


def kinds(effects: list[Effect]) -> list[str]:
    return [e.event.kind for e in effects if isinstance(e, Send) and isinstance(e.event, Incident)]


@pytest.mark.parametrize("state", [WorkerState.READY, WorkerState.RUNNING, WorkerState.OOM, WorkerState.SWITCHING])
@pytest.mark.parametrize(("event", "fault"), [(DeviceLost, Fault.LOST), (Overdue, Fault.TIMEOUT)])
def test_a_device_that_is_lost_or_silent_is_killed_and_replaced_by_the_next_epoch(replaceable, state, event, fault):
    if state is not WorkerState.READY:
        replaceable.handle(Launch(plan(1, mode=SAFE if state is WorkerState.SWITCHING else BEST)))
    if state is WorkerState.OOM:
        replaceable.handle(StepFailed(1, 0, Fault.OOM, "no memory"))
    assert replaceable.state is state
    effects = replaceable.handle(event(0, "killed by signal 9", 100.0))
    assert Start(Kill(0)) in effects
    begun = 1 if state in (WorkerState.RUNNING, WorkerState.OOM) else -1
    assert Send("engine", WorkerLost(0, fault, "killed by signal 9", begun)) in effects, "no other step was computed"
    assert After(0.0, Restart()) in effects
    assert kinds(effects) == [fault]
    assert replaceable.state is WorkerState.RESTARTING
    assert replaceable.handle(Restart()) == [Start(Spawn(1))]
    (ready,) = come_up(replaceable, 1)
    assert ready.event.epoch == 1
    assert replaceable.handle(Launch(plan(2, epoch=1))) == [Start(Run(plan(2, epoch=1)))]


def test_the_cache_of_the_next_device_must_be_as_large_as_that_of_the_last(replaceable):
    replaceable.handle(DeviceLost(0, "gone", 1.0))
    replaceable.handle(Restart())
    replaceable.handle(JobDone("Spawn", None, 1))
    assert replaceable.handle(JobDone("Load", LOADED, 1)) == [Start(Fit(1, 8))]


def test_what_an_older_device_still_says_is_dropped(replaceable):
    replaceable.handle(Launch(plan(1)))
    replaceable.handle(DeviceLost(0, "gone", 1.0))
    late = [StepDone(1, 0, [5]), StepFailed(1, 0, Fault.OOM, ""), JobDone("Load", {}), JobFailed("Load", "")]
    late += [DeviceLost(0, "gone", 1.0), Overdue(0, "silent", 1.0), Launch(plan(1))]
    for event in late:
        assert replaceable.handle(event) == []
    replaceable.handle(Restart())
    for event in late:
        assert replaceable.handle(event) == []
    assert replaceable.state is WorkerState.LOADING
    come_up(replaceable, 1)
    for event in late:
        assert replaceable.handle(event) == []
    assert replaceable.state is WorkerState.READY


def test_losses_without_a_good_step_between_them_use_up_the_budget(replaceable):
    for number in range(PLAN.max_restarts):
        replaceable.handle(DeviceLost(number, "gone", float(number)))
        restart(replaceable)
    effects = replaceable.handle(DeviceLost(PLAN.max_restarts, "gone", 4.0))
    assert Send("engine", WorkerFailed("the worker was lost 4 times in a row: gone")) in effects
    assert kinds(effects) == ["gave_up"]
    assert replaceable.state is WorkerState.FAILED


def test_a_good_step_gives_the_whole_budget_back(replaceable):
    for number in range(3 * PLAN.max_restarts):
        replaceable.handle(DeviceLost(number, "gone", float(number)))
        restart(replaceable)
        replaceable.handle(Launch(plan(number, epoch=number + 1)))
        replaceable.handle(StepDone(number, number + 1, []))
    assert replaceable.state is WorkerState.READY


def test_losses_longer_ago_than_the_window_do_not_count(replaceable):
    for number in range(3 * PLAN.max_restarts):
        replaceable.handle(DeviceLost(number, "gone", number * PLAN.window_s))
        restart(replaceable)
    assert replaceable.state is WorkerState.READY


@pytest.mark.parametrize("gap_s", [PLAN.window_s / PLAN.max_restarts / 2, PLAN.window_s / PLAN.max_restarts])
def test_a_job_that_fails_counts_for_when_it_failed(replaceable, gap_s):
    replaceable.handle(DeviceLost(0, "gone", 0.0))
    for number in range(1, 3 * PLAN.max_restarts):
        if replaceable.state is WorkerState.FAILED:
            break
        replaceable.handle(Restart())
        replaceable.handle(JobFailed("Spawn", "no more processes", number, number * gap_s))
    is_too_often = gap_s * PLAN.max_restarts < PLAN.window_s
    assert replaceable.state is (WorkerState.FAILED if is_too_often else WorkerState.RESTARTING)


def test_a_job_that_fails_while_it_comes_up_again_is_a_loss_too_and_the_engine_hears_of_the_first_only(replaceable):
    replaceable.handle(DeviceLost(0, "gone", 1.0))
    replaceable.handle(Restart())
    effects = replaceable.handle(JobFailed("Spawn", "no more processes", 1))
    assert After(BACKOFF_S, Restart()) in effects
    assert not [e for e in effects if isinstance(e, Send) and e.to == "engine"]
    assert replaceable.state is WorkerState.RESTARTING


@pytest.mark.parametrize("job", ["Load", "Fit", "Warm"])
def test_a_spare_that_cannot_come_up_is_replaced_by_a_new_process_and_is_no_loss(replaceable, job):
    for number in range(3 * PLAN.max_restarts):  # more often than the budget would bear
        epoch = replaceable.epoch
        replaceable.handle(DeviceLost(epoch, "gone", 100.0 * number))
        replaceable.handle(Restart())
        replaceable.handle(JobDone("Spawn", {"spare": True}, epoch + 1))
        for done in ["Load", "Fit", "Warm"][: ["Load", "Fit", "Warm"].index(job)]:
            replaceable.handle(JobDone(done, {**LOADED, "num_blocks": 8}, epoch + 1))
        effects = replaceable.handle(JobFailed(job, "the killed one holds the memory", epoch + 1, 100.0 * number))
        assert effects[0] == Start(Kill(epoch + 1))
        assert effects[-1] == Start(Spawn(epoch + 2))
        assert kinds(effects) == ["spare"]
        assert replaceable.state is WorkerState.LOADING
        for done in ["Spawn", "Load", "Fit", "Warm"]:
            replaceable.handle(JobDone(done, {**LOADED, "num_blocks": 8}, epoch + 2))
        assert replaceable.state is WorkerState.READY


def test_a_new_process_that_fails_after_the_spare_has_is_a_loss(replaceable):
    replaceable.handle(DeviceLost(0, "gone", 1.0))
    replaceable.handle(Restart())
    replaceable.handle(JobDone("Spawn", {"spare": True}, 1))
    replaceable.handle(JobFailed("Load", "no", 1, 1.0))
    assert kinds(replaceable.handle(JobFailed("Spawn", "no", 2, 1.0))) == ["exception"]
    assert replaceable.state is WorkerState.RESTARTING


def test_a_device_that_dies_before_it_was_ever_ready_fails_the_start(replaceable):
    worker = Worker(PLAN)
    worker.handle(Begin())
    assert Send("engine", WorkerFailed("exit code 1")) in worker.handle(DeviceLost(0, "exit code 1", 0.0))
    assert worker.state is WorkerState.FAILED


def test_a_device_that_cannot_be_replaced_fails_the_worker_when_it_is_overdue(worker):
    worker.handle(Launch(plan(1)))
    effects = worker.handle(Overdue(0, "the step takes over 60 s", 1.0))
    assert Send("engine", WorkerFailed("the worker was lost: the step takes over 60 s")) in effects
    assert Start(Kill(0)) not in effects


def test_a_stop_ends_the_restart(replaceable):
    replaceable.handle(DeviceLost(0, "gone", 1.0))
    assert replaceable.handle(Stop()) == [Start(Close(1)), Drop(Restart())]


# ---- modes -----------------------------------------------------------------------------------------------------------


def test_a_plan_in_another_mode_is_run_after_the_switch_and_the_next_one_at_once(worker):
    assert worker.handle(Launch(plan(1, mode=LEAN))) == [Start(Switch(LEAN))]
    assert worker.state is WorkerState.SWITCHING
    assert worker.handle(JobDone("Switch")) == [Start(Run(plan(1, mode=LEAN)))]
    worker.handle(StepDone(1, 0, []))
    assert worker.handle(Launch(plan(2, mode=LEAN))) == [Start(Run(plan(2, mode=LEAN)))]


def test_a_switch_that_fails_fails_the_step_which_was_not_launched(worker):
    worker.handle(Launch(plan(1, mode=LEAN)))
    failed = StepFailed(1, 0, Fault.SWITCH, "no memory", launched=False)
    assert worker.handle(JobFailed("Switch", "no memory")) == [Send("engine", failed)]
    assert worker.handle(Launch(plan(2))) == [Start(Run(plan(2)))]


def lose_in_switch(worker: Worker, step_id: int, mode: str) -> None:
    epoch = worker.epoch
    assert worker.handle(Launch(plan(step_id, epoch, mode))) == [Start(Switch(mode, epoch))]
    effects = worker.handle(DeviceLost(epoch, "killed by signal 9", 1.0))
    assert Send("engine", WorkerLost(epoch, Fault.LOST, "killed by signal 9", -1)) in effects
    restart(worker)


def test_a_mode_whose_switch_costs_two_workers_is_one_that_cannot_be_switched_to(replaceable):
    lose_in_switch(replaceable, 1, LEAN)
    lose_in_switch(replaceable, 2, LEAN)
    why = "2 workers were lost while they were switched to fast kernels in precision int8"
    failed = StepFailed(3, 2, Fault.SWITCH, why, launched=False)
    assert replaceable.handle(Launch(plan(3, 2, LEAN))) == [Send("engine", failed)]
    assert replaceable.state is WorkerState.READY
    assert replaceable.handle(Launch(plan(4, 2, SAFE))) == [Start(Switch(SAFE, 2))]


def test_a_switch_that_goes_well_forgives_the_worker_that_was_lost_in_one(replaceable):
    lose_in_switch(replaceable, 1, LEAN)
    replaceable.handle(Launch(plan(2, 1, LEAN)))
    replaceable.handle(JobDone("Switch", None, 1))
    replaceable.handle(DeviceLost(1, "gone", 1.0))
    restart(replaceable)
    lose_in_switch(replaceable, 3, LEAN)
    assert replaceable.handle(Launch(plan(4, 3, LEAN))) == [Start(Switch(LEAN, 3))]


def test_the_full_mode_is_where_each_worker_comes_up(replaceable):
    for step_id in (1, 2):
        replaceable.handle(Launch(plan(step_id, replaceable.epoch, SAFE)))
        replaceable.handle(JobDone("Switch", None, replaceable.epoch))
        replaceable.handle(StepDone(step_id, replaceable.epoch, []))
        lose_in_switch(replaceable, step_id + 10, BEST)
    assert replaceable.handle(Launch(plan(5, 2))) == [Start(Run(plan(5, 2)))]


def test_a_new_device_computes_in_the_full_mode(replaceable):
    replaceable.handle(Launch(plan(1, mode=LEAN)))
    replaceable.handle(JobDone("Switch"))
    replaceable.handle(DeviceLost(0, "gone", 1.0))
    restart(replaceable)
    assert replaceable.handle(Launch(plan(2, 1, LEAN))) == [Start(Switch(LEAN, 1))]
