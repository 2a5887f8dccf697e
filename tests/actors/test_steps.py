"""The log of steps: phases by the clock, outcomes by the answers, and no more than it may hold."""

from __future__ import annotations

from novainfer.actors.inspection.steps import StepLog
from novainfer.fsm.messages.events import Fault, Launch, MakeBatch, StepFailed
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.simulation.world.shape import SAFE


class World:
    """A log on a clock that the test moves."""

    def __init__(self, limit: int = 10) -> None:
        self.now_s = 100.0
        self.outcome: StepDone | None = None  # that the scheduler is told when it is asked again
        self.log = StepLog(limit=limit, clock=lambda: self.now_s)

    def wait(self, us: float) -> None:
        self.now_s += us / 1e6

    def step(self, step_id: int, *, schedule_us: float = 0, device_us: float | None = 0, epoch: int = 0) -> None:
        self.log.asked(MakeBatch(self.outcome))
        self.outcome = None
        self.wait(schedule_us)
        self.log.planned(Launch(plan(step_id, epoch)))
        self.log.handed_on()
        self.log.launched(plan(step_id, epoch))
        if device_us is not None:
            self.wait(device_us)
            self.outcome = StepDone(step_id, epoch, [7, 8])
            self.log.returned(self.outcome)


def plan(step_id: int, epoch: int = 0) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        epoch=epoch,
        slots=[0, 1, 2],
        query_lens=[1, 1, 5],
        context_lens=[9, 9, 5],
        input_ids=[1] * 7,
        table_slots=[],
        table_indexes=[],
        table_blocks=[],
        sample_seqs=[0, 1],
        admissions=[],
        swap_out_blocks=[4],
        swap_out_hosts=[0],
        mode=SAFE,
    )


def test_a_step_has_its_phases_and_its_sizes() -> None:
    world = World()
    world.step(1, schedule_us=150, device_us=2000)
    world.step(2)
    tokens = world.log.tokens.record()
    assert (tokens.sum, tokens.counts[tokens.bounds.index(8)]) == (14.0, 2)
    for seconds in (10e-6, 30e-6):
        world.log.delivered(seconds)
    found, _ = world.log.records(5, is_running=False)
    assert (found.schedule_us, found.device_us, found.outputs_us) == (150.0, 2000.0, 30.0)
    assert (found.num_requests, found.num_tokens, found.num_samples) == (3, 7, 2)
    assert (found.num_swapped_out, found.num_swapped_in, found.mode, found.outcome) == (1, 0, SAFE, "done")


def test_outputs_belong_to_the_step_that_was_committed_while_the_next_one_runs() -> None:
    world = World()
    world.step(1)
    world.log.delivered(5e-6)
    world.step(2, device_us=None)
    world.log.delivered(30e-6)
    one, two = world.log.records(5, is_running=True)
    assert (one.outputs_us, two.outputs_us) == (30.0, None)
    assert (two.outcome, two.device_us) == ("running", None)


def test_two_steps_in_flight_share_the_time_of_the_device_and_each_has_its_own_outputs() -> None:
    """Planned while the one before runs, sent when that has been asked for which follows, answered early."""
    world = World()
    log, done = world.log, [StepDone(i, 0, [7, 8]) for i in range(4)]

    def plan_and_launch(step_id: int, schedule_us: float, outcome: StepDone | None) -> None:
        log.asked(MakeBatch(outcome))
        world.wait(schedule_us)
        log.planned(Launch(plan(step_id)))
        log.handed_on()

    plan_and_launch(1, 100, None)
    log.launched(plan(1))
    plan_and_launch(2, 40, None)
    log.asked(MakeBatch())  # for the third one, before the worker has its turn
    log.launched(plan(2))
    world.wait(60)
    log.returned(done[1])
    for seconds in (1e-6, 2e-6):
        log.delivered(seconds)
    assert [r.outcome for r in log.records(5, is_running=True)] == ["done", "running"]
    plan_and_launch(3, 10, done[1])
    log.launched(plan(3))
    world.wait(290)
    assert [r.outcome for r in log.records(2, is_running=True)] == ["running", "running"]
    assert [r.outcome for r in log.records(5, is_running=False)] == ["done", "lost", "lost"]
    log.returned(done[2])
    log.delivered(3e-6)
    plan_and_launch(4, 5, done[2])
    log.launched(plan(4))
    log.delivered(4e-6)
    found = log.records(5, is_running=True)
    assert [r.schedule_us for r in found] == [100.0, 40.0, 10.0, 5.0]
    assert [r.device_us for r in found] == [100.0, 300.0, None, None]
    assert [r.outputs_us for r in found] == [3.0, 4.0, None, None]
    assert [r.outcome for r in found] == ["done", "done", "running", "running"]
    assert round(1e6 * log.totals().device[0]) == 400


def test_steps_that_go_to_the_device_together_were_asked_for_one_after_the_other() -> None:
    """They wait for a switch of mode, say. One that was planned before, and never went there, is passed over."""
    world = World()
    log = world.log
    for step_id, schedule_us in ((1, 5), (2, 100), (3, 40)):
        log.asked(MakeBatch())
        world.wait(schedule_us)
        log.planned(Launch(plan(step_id)))
    log.asked(MakeBatch())
    for step_id in (2, 3):
        log.launched(plan(step_id))
    assert [record.schedule_us for record in log.records(5, is_running=True)] == [140.0, 40.0]


def test_outputs_that_come_without_a_step_are_those_of_none() -> None:
    world = World()
    world.step(1)
    world.step(2, device_us=None)
    world.log.delivered(1e-6)
    world.log.delivered(5e-6)
    world.log.asked(MakeBatch())
    world.log.handed_on()
    world.log.delivered(99e-6)
    assert [record.outputs_us for record in world.log.records(5, is_running=True)] == [5.0, None]


def test_a_failed_step_says_how() -> None:
    world = World()
    world.log.launched(plan(1))
    world.log.returned(StepFailed(1, 0, Fault.OOM, "too little"))
    assert world.log.records(1, is_running=False)[0].outcome == "oom"


def test_a_step_whose_worker_was_lost_is_lost() -> None:
    world = World()
    world.step(1, device_us=None)
    assert world.log.records(1, is_running=False)[0].outcome == "lost"
    world.step(2, device_us=None, epoch=1)
    assert [r.outcome for r in world.log.records(2, is_running=True)] == ["lost", "running"]


def test_an_answer_that_comes_twice_or_for_another_step_changes_nothing() -> None:
    world = World()
    world.log.returned(StepDone(0, 0, []))
    world.step(1, device_us=50)
    world.wait(1000)
    world.log.returned(StepDone(1, 0, []))
    world.log.returned(StepDone(2, 0, []))
    assert world.log.records(1, is_running=False)[0].device_us == 50.0
    assert world.log.totals().device[1] == 1


def test_only_the_newest_are_kept_but_all_are_counted() -> None:
    world = World(limit=3)
    for step_id in range(10):
        world.step(step_id, schedule_us=10, device_us=100)
    assert [r.step_id for r in world.log.records(100, is_running=False)] == [7, 8, 9]
    assert [r.step_id for r in world.log.records(2, is_running=False)] == [8, 9]
    assert world.log.records(0, is_running=False) == []
    seconds, count = world.log.totals().device
    assert count == 10
    assert round(seconds * 1e6) == 1000


def test_a_step_whose_predecessor_failed_is_called_discarded() -> None:
    world = World()
    world.step(1, device_us=None)
    world.step(2, device_us=None)
    world.log.returned(StepFailed(1, 0, Fault.OOM, "no memory"))
    world.log.returned(StepFailed(2, 0, Fault.EXCEPTION, "it follows one that failed", launched=False))
    assert [record.outcome for record in world.log.records(5, is_running=False)] == ["oom", "discarded"]


# ---- what a flame is told -------------------------------------------------------------------------------------------


def told(
    world: World, number: int = 0, *, is_running: bool = True
) -> tuple[list[tuple[int, str, list[str]]], int, int]:
    found, following, lost = world.log.told(number, 64, is_running=is_running)
    return [(step.id, step.outcome, [phase.name for phase in step.phases]) for step in found], following, lost


def test_a_step_is_told_once_it_has_all_of_its_phases() -> None:
    world = World()
    world.log.asked(MakeBatch())
    world.wait(100)
    world.log.planned(Launch(plan(1)))
    world.log.launched(plan(1))
    world.wait(2000)
    done = StepDone(1, 0, [7, 8], sample_s=400e-6)
    world.log.returned(done)
    assert told(world) == ([], 0, 0), "its outputs are not handed on"
    world.wait(50)
    world.log.asked(MakeBatch(done))
    world.wait(300)
    world.log.plans()
    world.wait(70)
    world.log.planned(Launch(plan(2)))
    world.log.handed_on()
    world.log.launched(plan(2))
    world.wait(20)
    world.log.delivered(20e-6)
    (step,), following, lost = world.log.told(0, 64, is_running=True)
    assert [(p.name, p.began_ms, p.took_ms) for p in step.phases] == [
        ("schedule", 0.0, 0.1),
        ("kernel", 0.1, 1.6),
        ("sample", 1.7, 0.4),
        ("detokenise", 2.15, 0.3),
        ("send", 2.52, 0.02),
    ]
    assert (step.id, step.num_seqs, step.num_tokens, step.budget, step.is_failed) == (1, 3, 7, 64, False)
    assert (following, lost) == (1, 0)
    record = world.log.records(2, is_running=True)[0]
    assert (record.sample_us, record.commit_us, record.schedule_us) == (400.0, 300.0, 100.0)
    world.log.returned(StepDone(2, 0, [7, 8]))
    (second,) = world.log.told(1, 64, is_running=True)[0] or [None]
    assert second is None, "nor are those of the next one"
    world.wait(300_000)
    (second,), *_ = world.log.told(1, 64, is_running=True)
    assert [(p.name, p.took_ms) for p in second.phases] == [("schedule", 0.07), ("kernel", 0.02)], "there were none"


def test_steps_are_told_in_order_each_once_and_those_that_are_forgotten_are_counted() -> None:
    world = World(limit=4)
    for step_id in range(1, 4):
        world.step(step_id)
    found, following, lost = told(world)
    assert [(step_id, outcome) for step_id, outcome, _ in found] == [(1, "done"), (2, "done")]
    assert (following, lost) == (2, 0)
    for step_id in range(4, 10):
        world.step(step_id)
    world.log.launched(plan(10))
    world.log.returned(StepFailed(10, 0, Fault.OOM, "too much"))
    found, following, lost = told(world, following, is_running=False)
    assert [(step_id, outcome) for step_id, outcome, _ in found] == [(7, "done"), (8, "done"), (9, "done"), (10, "oom")]
    assert (following, lost) == (10, 4)


def test_a_step_whose_worker_was_lost_is_told_as_lost() -> None:
    world = World()
    world.step(1, device_us=None)
    assert told(world) == ([], 0, 0), "it runs"
    assert told(world, is_running=False) == ([(1, "lost", ["schedule"])], 1, 0)
    world.step(2, epoch=1)
    world.log.delivered(5e-6)
    assert [step_id for step_id, *_ in told(world)[0]] == [1]
