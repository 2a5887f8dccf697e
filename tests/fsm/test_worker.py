import pytest

from novainfer.fsm.events import (
    Begin,
    Close,
    Fault,
    Fit,
    JobDone,
    JobFailed,
    Launch,
    Load,
    Reclaim,
    Run,
    Spawn,
    StepDone,
    StepFailed,
    StepPlan,
    Stop,
    Warm,
    WorkerFailed,
    WorkerReady,
)
from novainfer.fsm.machine import Effect, Send, Start
from novainfer.fsm.worker import Worker, WorkerState

LOADED = {"max_model_len": 64, "vocab_size": 100, "eos_token_ids": [0]}


def plan(step_id: int, epoch: int = 0, mode: str = "full") -> StepPlan:
    empty = {name: [] for name in StepPlan.__struct_fields__ if name not in ("step_id", "epoch", "mode")}
    return StepPlan(step_id=step_id, epoch=epoch, mode=mode, **empty)


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
