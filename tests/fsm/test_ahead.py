"""Two steps in flight: what is planned behind a step on the device, and what becomes of it when that one has ended."""

from __future__ import annotations

from typing import Any

import pytest

from novainfer.fsm.core.machine import IllegalEvent, Send, Start
from novainfer.fsm.device.process import Answered, Ask, Process, ProcessState, Started, Tell
from novainfer.fsm.device.worker import RestartPolicy, Worker, WorkerState
from novainfer.fsm.engine import Engine, EngineState
from novainfer.fsm.messages.events import (
    Batch,
    Begin,
    CancelRequest,
    Cause,
    Configure,
    DeviceLost,
    Fault,
    JobDone,
    JobFailed,
    KeepOver,
    Launch,
    MakeBatch,
    PauseRequest,
    Reclaim,
    ResumeRequest,
    Run,
    StepFailed,
    Submit,
    Switch,
    WorkerLost,
    WorkerReady,
)
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import NO_TOKEN, SAMPLED, StepDone, StepPlan
from novainfer.fsm.schedule.planner import Limits
from novainfer.fsm.schedule.scheduler import Scheduler, SchedulerState
from novainfer.fsm.simulation.checks.oracle import VOCABULARY
from novainfer.fsm.simulation.world.shape import BEST, LEAN

EOS = 0
A = 65


# ---- the scheduler -------------------------------------------------------------------------------------------------


class Steps:
    """A scheduler with two steps in flight; `plans` are those that the device has not answered, oldest first."""

    def __init__(
        self, *, num_blocks: int = 32, num_host_blocks: int = 0, block_size: int = 4, chunk: int = 32, **limits: Any
    ) -> None:
        fields = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_chunk_tokens": chunk} | limits
        self.scheduler = Scheduler(Limits(block_size=block_size, **fields), VOCABULARY, max_in_flight=2)
        self.plans: list[StepPlan] = []
        self.said: list[Any] = []
        self.tell(Configure(num_blocks, 64, 128, [EOS], 0, num_host_blocks, (BEST,)))

    def tell(self, event: Any) -> Batch | None:
        effects = self.scheduler.handle(event)
        self.scheduler.check()
        found = [e.event for e in effects if isinstance(e, Send)]
        batch = next((e for e in found if isinstance(e, Batch)), None)
        self.said += [output for e in found for output in getattr(e, "outputs", ())]
        if batch is not None and batch.plan is not None:
            self.plans.append(batch.plan)
        return batch

    def submit(self, request_id: int, token_ids: list[int], **params: Any) -> None:
        params = {"max_tokens": 8, "temperature": 0.0} | params
        self.tell(
            Submit(
                request_id=request_id,
                stream_id=request_id,
                choice=0,
                token_ids=token_ids,
                params=SamplingParams(**params),
                seed=1,
            )
        )

    def ask(self) -> StepPlan | None:
        batch = self.tell(MakeBatch())
        assert batch is not None
        return batch.plan

    def done(self, *sampled: int) -> StepPlan | None:
        plan = self.plans.pop(0)
        batch = self.tell(MakeBatch(StepDone(plan.step_id, 0, list(sampled))))
        assert batch is not None
        return batch.plan

    def failed(self, fault: Fault = Fault.EXCEPTION, *, launched_behind: bool = False) -> StepPlan | None:
        plan, self.plans = self.plans[0], []
        batch = self.tell(MakeBatch(StepFailed(plan.step_id, 0, fault, "broken", launched_behind=launched_behind)))
        assert batch is not None
        return batch.plan

    def request(self, request_id: int) -> Any:
        return self.scheduler.requests[request_id]

    def tokens(self, request_id: int) -> list[int]:
        return [t for output in self.said if output.request_id == request_id for t in output.token_ids]


def test_a_step_is_planned_behind_one_on_the_device_from_a_token_that_is_not_known():
    steps = Steps()
    steps.submit(0, [1, 2, 3])
    first = steps.ask()
    assert steps.scheduler.state is SchedulerState.PARTIAL
    second = steps.ask()
    assert steps.scheduler.state is SchedulerState.FULL
    assert (first.after, second.after) == (0, first.step_id)
    assert (second.input_ids, second.context_lens, second.admissions) == ([SAMPLED], [4], [])
    third = steps.done(A)
    assert (third.input_ids, third.after) == ([SAMPLED], second.step_id)
    assert steps.tokens(0) == [A]


def test_chunks_of_a_prompt_follow_each_other_and_their_tokens_are_known():
    steps = Steps(chunk=4)
    steps.submit(0, list(range(1, 11)))
    assert steps.ask().input_ids == [1, 2, 3, 4]
    assert steps.ask().input_ids == [5, 6, 7, 8]
    assert steps.done().input_ids == [9, 10]
    assert steps.done().input_ids == [SAMPLED]


def test_a_third_step_is_refused_and_changes_nothing():
    steps = Steps()
    steps.submit(0, [1])
    steps.ask()
    steps.ask()
    before = steps.scheduler.fingerprint()
    with pytest.raises(AssertionError):
        steps.scheduler.handle(MakeBatch())
    assert steps.scheduler.fingerprint() == before


def test_the_step_that_gives_the_last_token_is_followed_by_none():
    steps = Steps()
    steps.submit(0, [1, 2, 3], max_tokens=2)
    steps.ask()
    steps.ask()
    assert steps.done(A) is None
    assert steps.scheduler.state is SchedulerState.PARTIAL
    assert steps.done(A) is None
    assert steps.scheduler.state is SchedulerState.EMPTY
    assert steps.tokens(0) == [A, A]


def test_what_ends_a_step_before_it_is_known_costs_one_row_and_leaks_nothing():
    steps = Steps()
    steps.submit(0, [1, 2, 3])
    free = steps.scheduler.planner.cache.statistics().num_owned
    steps.ask()
    steps.ask()
    assert steps.done(EOS) is None
    assert steps.scheduler.planner.cache.statistics().num_owned > free  # the row behind still writes there
    assert steps.done(A) is None
    assert steps.tokens(0) == [EOS]
    assert steps.scheduler.planner.cache.statistics().num_owned == free
    assert steps.scheduler.statistics().generation_tokens_total == 1


@pytest.mark.parametrize("num_known", [0, 1])
def test_a_request_cancelled_in_both_steps_keeps_its_room_until_the_last_of_them(num_known):
    steps = Steps()
    steps.submit(0, [1, 2, 3])
    steps.ask()
    steps.ask()
    for _ in range(num_known):
        steps.done(A)
    steps.tell(CancelRequest(0, Cause.CLIENT))
    owned = []
    while steps.plans:
        owned.append(steps.scheduler.planner.cache.statistics().num_owned)
        steps.done(A)
    assert all(owned)
    assert steps.scheduler.planner.cache.statistics().num_owned == 0


def test_a_step_that_fails_takes_the_one_behind_it_along_and_both_are_planned_anew():
    steps = Steps()
    steps.submit(0, [1, 2, 3])
    steps.submit(1, [4, 5])
    before = steps.scheduler.fingerprint()
    steps.ask()
    steps.ask()
    again = steps.failed(Fault.OOM)
    assert again.after == 0
    assert again.input_ids == [1, 2, 3]  # the first half of those it held, alone
    assert steps.ask() is None  # while the one to blame is looked for, each step waits for the one before
    assert before != steps.scheduler.fingerprint()
    assert steps.scheduler.statistics().step_failures_total == 1
    assert steps.scheduler.statistics().rollbacks_total == {"oom": 1, "behind": 1}


def test_a_step_that_fails_behind_one_that_went_well_keeps_its_token():
    steps = Steps()
    steps.submit(0, [1, 2, 3])
    steps.ask()
    steps.ask()
    steps.done(A)
    again = steps.failed()
    assert again.input_ids == [A]
    assert steps.tokens(0) == [A]


@pytest.mark.parametrize("at", [0, 1, None])
def test_of_two_steps_lost_with_the_worker_the_one_that_ran_is_blamed(at):
    steps = Steps()
    steps.submit(0, [1, 2, 3])
    steps.ask()
    steps.ask()
    step_id = -1 if at is None else steps.plans[at].step_id
    steps.tell(WorkerLost(0, Fault.LOST, "killed", step_id))
    assert steps.scheduler.state is SchedulerState.RECOVERING
    assert steps.request(0).slot < 0
    assert steps.request(0).losses == (at is not None)
    assert steps.scheduler.statistics().step_failures_total == (at is not None)
    assert steps.scheduler.statistics().rollbacks_total == {"lost": 1, "behind": 1}


def test_a_request_is_not_preempted_for_a_step_planned_ahead():
    steps = Steps(num_blocks=8, block_size=2)
    steps.submit(0, [1], max_tokens=10)
    steps.submit(1, [4], max_tokens=10)
    steps.ask()
    steps.ask()
    while steps.plans:
        sampled = [A] * len(steps.plans[0].sample_seqs)
        num_before = steps.scheduler.statistics().preemptions_total
        num_in_flight = len(steps.plans)
        steps.done(*sampled)
        if num_in_flight == 2:
            assert steps.scheduler.statistics().preemptions_total == num_before
        if len(steps.plans) == 1:
            steps.ask()
    assert steps.scheduler.statistics().preemptions_total
    assert [len(steps.tokens(i)) for i in (0, 1)] == [10, 10]


def test_who_is_paused_for_too_long_leaves_as_soon_as_no_step_holds_it():
    steps = Steps()
    steps.submit(0, [1, 2, 3])
    steps.submit(1, [4, 5, 6])
    steps.ask()
    steps.ask()
    steps.done(A, A)
    steps.tell(PauseRequest(0))
    steps.tell(KeepOver(0))
    steps.done(A, A)
    assert steps.request(0).slot >= 0  # the third step holds it yet
    steps.done(A, A)
    assert steps.request(0).slot < 0
    assert steps.request(1).slot >= 0


def test_what_gave_no_number_is_not_copied_while_the_step_behind_holds_it():
    """Its blocks come back with that step only; until then the last one of its prompt could be found."""
    steps = Steps()
    steps.submit(0, [1, 2, 3])
    steps.ask()
    steps.ask()
    steps.submit(1, [1, 2, 3])
    third = steps.done(NO_TOKEN)
    assert 0 not in steps.scheduler.requests
    assert third is not None
    assert third.copy_from_blocks == []
    assert third.query_lens == [3]


def test_what_a_step_behind_was_to_swap_is_swapped_later_when_the_one_before_fails():
    """It was never begun: what it was to copy out is still on the device only, and what to copy in still outside."""
    steps = Steps(num_host_blocks=8)
    steps.submit(0, [1, 2, 3], max_tokens=20)
    steps.submit(1, [4, 5, 6], max_tokens=20)
    steps.ask()
    steps.ask()
    steps.done(A, A)
    steps.tell(PauseRequest(0))
    steps.done(A, A)
    steps.done(A, A)
    steps.tell(KeepOver(0))  # no step holds it, but two are in flight
    swaps_out = steps.done(A)
    assert swaps_out is not None
    assert swaps_out.swap_out_blocks
    again = steps.failed()
    assert again.swap_out_blocks == swaps_out.swap_out_blocks
    assert again.swap_out_hosts == swaps_out.swap_out_hosts
    steps.done(A)
    steps.ask()
    steps.tell(ResumeRequest(0))
    fetches = steps.done(A)
    assert fetches is not None
    assert fetches.swap_in_hosts == swaps_out.swap_out_hosts
    num_swapped = steps.request(0).kv.num_swapped
    steps.failed()
    assert steps.request(0).kv.num_swapped == num_swapped > 0
    fetches = steps.done(A)
    assert fetches is not None
    assert fetches.swap_in_hosts == swaps_out.swap_out_hosts


def test_what_a_step_behind_was_fetching_when_the_one_before_failed_is_computed_again():
    """It had been begun on the device: what it was to copy in may have been overwritten on either side."""
    steps = Steps(num_host_blocks=8)
    steps.submit(0, [1, 2, 3], max_tokens=20)
    steps.submit(1, [4, 5, 6], max_tokens=20)
    steps.ask()
    steps.ask()
    steps.done(A, A)
    steps.tell(PauseRequest(0))
    for _ in range(2):
        steps.done(A, A)
    steps.tell(KeepOver(0))
    for _ in range(3):
        steps.done(A)
    steps.tell(ResumeRequest(0))
    fetches = steps.done(A)
    assert fetches is not None
    assert fetches.swap_in_hosts
    steps.failed(launched_behind=True)
    assert steps.request(0).kv.num_swapped == 0
    again = steps.done(A)
    assert again is not None
    assert again.swap_in_hosts == []
    assert max(again.query_lens) > 1, "of what was swapped nothing is computed again"


def test_a_step_ahead_is_not_begun_while_the_mode_is_to_change():
    steps = Steps()
    steps.submit(0, [1, 2, 3])
    steps.ask()
    steps.scheduler.planner.mode = Mode("plain", "checkpoint")
    assert steps.ask() is None


# ---- the engine ----------------------------------------------------------------------------------------------------


def plan(step_id: int, after: int = 0, mode: Mode = BEST, epoch: int = 0) -> StepPlan:
    return StepPlan(step_id=step_id, after=after, mode=mode, epoch=epoch)


def batch(step_id: int | None, *, may_follow: bool = False) -> Batch:
    return Batch(plan(step_id) if step_id is not None else None, [], [], 0, 0, may_follow)


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.handle(WorkerReady(0, 8, 64, 100, [0]))
    engine._work_sent = 0
    engine._wake()
    engine.state = EngineState.SCHEDULING
    return engine


def test_the_engine_asks_for_a_step_behind_the_one_that_it_hands_over(engine):
    assert engine.handle(batch(1, may_follow=True)) == [Send("worker", Launch(plan(1))), Send("scheduler", MakeBatch())]
    assert engine.state is EngineState.AHEAD
    assert engine.handle(batch(2)) == [Send("worker", Launch(plan(2)))]
    assert engine.state is EngineState.WAITING_WORKER
    assert engine.handle(StepDone(1, 0)) == [Send("scheduler", MakeBatch(StepDone(1, 0)))]
    assert engine.state is EngineState.AHEAD
    assert engine.handle(batch(None)) == []
    assert engine.state is EngineState.WAITING_WORKER
    engine.handle(StepDone(2, 0))
    assert engine.state is EngineState.SCHEDULING


def test_an_outcome_that_comes_while_the_scheduler_plans_is_told_when_it_has(engine):
    engine.handle(batch(1, may_follow=True))
    assert engine.handle(StepDone(1, 0)) == []
    assert engine.state is EngineState.SCHEDULING
    told = [Send("worker", Launch(plan(2))), Send("scheduler", MakeBatch(StepDone(1, 0)))]
    assert engine.handle(batch(2)) == told
    assert engine.state is EngineState.AHEAD


def test_what_was_planned_behind_a_step_that_has_failed_meanwhile_is_not_handed_over(engine):
    engine.handle(batch(1, may_follow=True))
    failed = StepFailed(1, 0, Fault.OOM, "no memory")
    assert engine.handle(failed) == []
    assert engine.state is EngineState.ROLLBACK
    assert engine.handle(batch(2)) == [Send("scheduler", MakeBatch(failed))]
    assert engine.state is EngineState.ROLLBACK
    engine.handle(batch(3))
    assert (engine.state, engine.step) == (EngineState.WAITING_WORKER, (3, 0))


def test_the_outcome_of_a_step_behind_one_that_failed_is_not_heard(engine):
    engine.handle(batch(1, may_follow=True))
    engine.handle(batch(2))
    failed = StepFailed(1, 0, Fault.OOM, "no memory")
    assert engine.handle(failed) == [Send("scheduler", MakeBatch(failed))]
    assert engine.handle(StepFailed(2, 0, Fault.EXCEPTION, "", launched=False)) == []
    engine.handle(batch(3))
    assert engine.handle(StepFailed(2, 0, Fault.EXCEPTION, "", launched=False)) == []
    assert engine.state is EngineState.WAITING_WORKER


def test_with_the_worker_an_outcome_that_was_not_told_is_lost(engine):
    engine.handle(batch(1, may_follow=True))
    engine.handle(StepDone(1, 0))
    engine.handle(WorkerLost(0, Fault.LOST, "killed", -1))
    engine.handle(WorkerReady(1, 8, 64, 100, [0]))
    assert engine.handle(batch_of(5, epoch=1)) == [Send("worker", Launch(plan(5, epoch=1)))]


def batch_of(step_id: int, epoch: int) -> Batch:
    return Batch(plan(step_id, epoch=epoch), [], [], 0, epoch)


# ---- the worker ----------------------------------------------------------------------------------------------------


@pytest.fixture
def worker() -> Worker:
    worker = Worker(RestartPolicy(max_restarts=2))
    worker.handle(Begin())
    loaded = {"max_model_len": 64, "vocab_size": 100, "eos_token_ids": [0], "modes": (BEST, LEAN)}
    for job, value in (("Spawn", None), ("Load", loaded), ("Fit", {"num_blocks": 8}), ("Warm", None)):
        worker.handle(JobDone(job, value, 0))
    return worker


def test_the_worker_has_two_steps_at_the_device_and_renews_its_deadline_with_each(worker):
    worker.handle(Launch(plan(1)))
    assert worker.handle(Launch(plan(2, after=1))) == [Start(Run(plan(2, after=1)))]
    num_renewals = worker.num_renewals
    worker.handle(StepDone(1, 0))
    assert (worker.state, worker.num_renewals) == (WorkerState.RUNNING, num_renewals + 1)
    worker.handle(StepDone(2, 0))
    assert worker.state is WorkerState.READY


def test_a_step_whose_predecessor_has_failed_is_not_begun(worker):
    worker.handle(Launch(plan(1)))
    worker.handle(StepFailed(1, 0, Fault.EXCEPTION, "broken"))
    assert worker.handle(Launch(plan(2, after=1))) == []
    assert worker.handle(Launch(plan(3))) == [Start(Run(plan(3)))]


def test_a_step_behind_one_that_ran_out_of_memory_is_dropped_and_its_refusal_not_heard(worker):
    worker.handle(Launch(plan(1)))
    worker.handle(Launch(plan(2, after=1)))
    failed = StepFailed(1, 0, Fault.OOM, "no memory")
    assert worker.handle(failed) == [Start(Reclaim(0))]
    assert worker.handle(StepFailed(2, 0, Fault.EXCEPTION, "", launched=False)) == []
    assert worker.handle(JobDone("Reclaim", None, 0)) == [Send("engine", failed)]
    assert worker.state is WorkerState.READY


def test_steps_that_wait_for_a_switch_are_begun_in_order_or_not_at_all(worker):
    assert worker.handle(Launch(plan(1, mode=LEAN))) == [Start(Switch(LEAN, 0))]
    assert worker.handle(Launch(plan(2, after=1, mode=LEAN))) == []
    begun = [Start(Run(plan(1, mode=LEAN))), Start(Run(plan(2, after=1, mode=LEAN)))]
    assert worker.handle(JobDone("Switch", None, 0)) == begun
    for step_id in (1, 2):
        worker.handle(StepDone(step_id, 0))
    worker.handle(Launch(plan(3)))
    worker.handle(Launch(plan(4, after=3)))
    failed = StepFailed(3, 0, Fault.SWITCH, "no memory", launched=False)
    assert worker.handle(JobFailed("Switch", "no memory", 0)) == [Send("engine", failed)]
    assert (worker.state, worker.step) == (WorkerState.READY, (-1, -1))


def test_the_older_of_two_steps_is_said_to_be_lost_with_the_device(worker):
    worker.handle(Launch(plan(1)))
    worker.handle(Launch(plan(2, after=1)))
    effects = worker.handle(DeviceLost(0, "killed", 1.0))
    assert Send("engine", WorkerLost(0, Fault.LOST, "killed", 1)) in effects


def test_a_step_of_another_mode_is_never_launched_behind_one(worker):
    worker.handle(Launch(plan(1)))
    with pytest.raises(AssertionError, match="modes are changed when nothing is in flight"):
        worker.handle(Launch(plan(2, after=1, mode=LEAN)))


def test_a_step_that_follows_no_step_cannot_come_while_one_runs_of_an_older_worker(worker):
    worker.handle(Launch(plan(1)))
    with pytest.raises(IllegalEvent):
        worker.handle(Launch(plan(2, after=7)))


# ---- the process ---------------------------------------------------------------------------------------------------


def test_a_process_answers_two_steps_in_order():
    process = Process(0, 0)
    process.handle(Started(0, 4711))
    for job in ("Load", "Fit", "Warm"):
        process.asked.append((job, 0, -1))
        process.state = ProcessState.BUSY
        process.handle(Answered(0, 0, JobDone(job, None, 0)))
    assert process.state is ProcessState.READY
    first, second = Run(plan(1)), Run(plan(2, after=1))
    assert process.handle(Ask(first)) == [Start(Tell(0, 0, first))]
    assert process.handle(Ask(second)) == [Start(Tell(0, 0, second))]
    assert process.handle(Answered(0, 0, StepDone(2, 0))) == []  # out of order: not what is waited for
    assert process.handle(Answered(0, 0, StepDone(1, 0))) == [Send("worker", StepDone(1, 0))]
    assert process.state is ProcessState.RUNNING
    assert process.handle(Answered(0, 0, StepDone(2, 0))) == [Send("worker", StepDone(2, 0))]
    assert process.state is ProcessState.READY
