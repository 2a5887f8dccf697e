"""An engine that becomes another one while it works: what each machine does, and that no request notices."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from novainfer.fsm.client.drain import DrainRate
from novainfer.fsm.client.gate import Gate
from novainfer.fsm.core.machine import Effect, Send, Start
from novainfer.fsm.device.process import Adopt, Answered, Ask, Ended, GoAhead, Process, Started, Tell
from novainfer.fsm.device.roster import Alive, Found, Open, Probe, Roster, RosterState
from novainfer.fsm.device.worker import RestartPolicy, Worker, WorkerState
from novainfer.fsm.engine import LOST, ONE_AT_A_TIME, Engine, EngineState
from novainfer.fsm.messages.events import (
    Arrive,
    Batch,
    Begin,
    Configure,
    Departed,
    DeviceLost,
    Fault,
    Fit,
    JobDone,
    JobFailed,
    KeepOver,
    Kill,
    Launch,
    Load,
    MakeBatch,
    PauseRequest,
    Reconfigure,
    Reconfigured,
    Restart,
    ResumeRequest,
    Spawn,
    StepFailed,
    Stop,
    Switch,
    Warm,
    WorkerLost,
    WorkerReady,
)
from novainfer.fsm.messages.events import Open as OpenGate
from novainfer.fsm.messages.mode import INT8
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.simulation.world.device import EOS, VOCAB_SIZE
from novainfer.fsm.simulation.world.shape import BEST, LEAN
from tests.fsm.helpers import Bench

READY = WorkerReady(0, 8, 64, 100, [0])
LARGER = Reconfigure(1, num_blocks=16)
VACANT = Batch(None, [], [], 0, is_vacant=True)


def sent(effects: list[Effect]) -> list[tuple[str, Any]]:
    return [(effect.to, effect.event) for effect in effects if isinstance(effect, Send)]


def plan_of(step_id: int) -> StepPlan:
    return StepPlan(step_id=step_id)


# ---- the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.handle(READY)
    return engine


def test_an_idle_engine_has_the_kv_cache_vacated_and_then_asks_the_worker(engine):
    assert sent(engine.handle(LARGER)) == [("scheduler", MakeBatch(vacates=True))]
    assert sent(engine.handle(VACANT)) == [("worker", LARGER)]
    assert engine.state is EngineState.RECONFIGURING
    ready = msgspec.structs.replace(READY, epoch=1, num_blocks=16, keeps_host=True)
    answer, configure, ask = sent(engine.handle(ready))
    assert answer == ("client", Reconfigured(1, None, ready))
    assert configure == ("scheduler", Configure(16, 64, 100, [0], 1, keeps_host=True))
    assert ask == ("scheduler", MakeBatch())
    assert engine.state is EngineState.SCHEDULING


def test_steps_in_flight_end_first_and_none_is_planned_behind_them(engine):
    engine.handle(Arrive(stream_id=0, prompt=[1], params=SamplingParams(), seed=1, num_tokens=1))
    engine.handle(Batch(plan_of(1), [], [], 1, may_follow=True))
    engine.handle(Batch(plan_of(2), [], [], 1))
    assert engine.state is EngineState.WAITING_WORKER
    assert sent(engine.handle(LARGER)) == []
    assert sent(engine.handle(StepDone(1, 0))) == [("scheduler", MakeBatch(StepDone(1, 0), vacates=True))]
    assert sent(engine.handle(Batch(None, [], [], 1))) == []
    failed = StepFailed(2, 0, Fault.OOM, "no memory")
    assert sent(engine.handle(failed)) == [("scheduler", MakeBatch(failed, vacates=True))]
    assert sent(engine.handle(Batch(plan_of(3), [], [], 1)))[0][0] == "worker"  # what leaves for the host
    engine.handle(StepDone(3, 0))
    assert sent(engine.handle(VACANT)) == [("worker", LARGER)]


def test_a_step_that_another_might_follow_is_the_last_one(engine):
    engine.handle(Arrive(stream_id=0, prompt=[1], params=SamplingParams(), seed=1, num_tokens=1))
    engine.handle(LARGER)
    launched = sent(engine.handle(Batch(plan_of(1), [], [], 1, may_follow=True)))
    assert launched == [("worker", Launch(plan_of(1)))], "another question would be answered by nothing"
    assert engine.state is EngineState.WAITING_WORKER


def test_one_at_a_time(engine):
    engine.handle(LARGER)
    assert sent(engine.handle(Reconfigure(2, num_blocks=32))) == [("client", Reconfigured(2, ONE_AT_A_TIME))]
    engine.handle(VACANT)
    assert sent(engine.handle(Reconfigure(3, num_blocks=32))) == [("client", Reconfigured(3, ONE_AT_A_TIME))]
    engine.handle(msgspec.structs.replace(READY, epoch=1))
    engine.handle(Batch(None, [], [], 0, epoch=1))
    assert sent(engine.handle(Reconfigure(4, num_blocks=32))) == [("scheduler", MakeBatch(vacates=True))]


def test_a_worker_that_is_lost_before_its_turn_is_reconfigured_when_it_is_back(engine):
    engine.handle(LARGER)
    lost = WorkerLost(0, Fault.LOST, "killed")
    assert sent(engine.handle(lost)) == [("scheduler", lost)]
    assert sent(engine.handle(msgspec.structs.replace(READY, epoch=1)))[-1] == ("scheduler", MakeBatch(vacates=True))
    vacant = msgspec.structs.replace(VACANT, epoch=1)
    assert sent(engine.handle(vacant)) == [("worker", msgspec.structs.replace(LARGER, epoch=1))]


def test_a_worker_that_is_lost_on_the_way_is_told_and_comes_up_as_it_was(engine):
    engine.handle(LARGER)
    engine.handle(VACANT)
    answer, forwarded = sent(engine.handle(WorkerLost(1, Fault.LOST, "killed")))
    assert answer == ("client", Reconfigured(1, f"{LOST}: killed"))
    assert forwarded[0] == "scheduler"
    assert engine.state is EngineState.RECOVERING


@pytest.mark.parametrize("events", [[LARGER], [LARGER, VACANT]])
def test_a_stop_answers_what_was_not_answered(engine, events):
    for event in events:
        engine.handle(event)
    assert ("client", Reconfigured(1, "the engine stops")) in sent(engine.handle(Stop()))
    assert sent(engine.handle(Reconfigure(2))) == [("client", Reconfigured(2, "the engine has stopped"))]


# ---- the worker ----------------------------------------------------------------------------------------------------

LOADED = {"max_model_len": 64, "vocab_size": 100, "eos_token_ids": [0], "modes": [msgspec.structs.asdict(BEST)]}
AS_INT8 = {**LOADED, "modes": [msgspec.structs.asdict(LEAN)]}


def come_up(worker: Worker, epoch: int = 0, num_blocks: int = 8, loaded: dict[str, Any] = LOADED) -> list[Effect]:
    for job, value in (("Spawn", None), ("Load", loaded), ("Fit", {"num_blocks": num_blocks}), ("Warm", None)):
        effects = worker.handle(JobDone(job, value, epoch))
    return effects


def test_a_first_step_without_memory_has_the_worker_come_up_with_less_and_stay_so() -> None:
    worker = Worker(RestartPolicy(max_restarts=3))
    worker.handle(Begin())
    for job, value in (("Spawn", None), ("Load", LOADED), ("Fit", {"num_blocks": 8})):
        worker.handle(JobDone(job, value))
    assert ready_of(worker.handle(JobDone("Warm", {"num_blocks": 7}))).num_blocks == 7
    worker.handle(DeviceLost(0, "gone"))
    worker.handle(Restart())
    for job, value in (("Spawn", None), ("Load", LOADED)):
        effects = worker.handle(JobDone(job, value, 1))
    assert jobs(effects) == [Fit(1, 7)]


@pytest.fixture(params=[0, 3], ids=["thread", "process"])
def worker(request) -> Worker:
    worker = Worker(RestartPolicy(max_restarts=request.param))
    worker.handle(Begin())
    come_up(worker)
    return worker


def jobs(effects: list[Effect]) -> list[Any]:
    return [effect.job for effect in effects if isinstance(effect, Start)]


def ready_of(effects: list[Effect]) -> WorkerReady:
    (ready,) = [event for _, event in sent(effects) if isinstance(event, WorkerReady)]
    return ready


def test_another_kv_cache_is_made_in_the_place_of_the_one_there_is(worker):
    assert jobs(worker.handle(LARGER)) == [Fit(1, 16, is_new=True)]
    assert worker.state is WorkerState.FITTING
    assert jobs(worker.handle(JobDone("Fit", {"num_blocks": 16}, 1))) == [Warm(1)]
    ready = ready_of(worker.handle(JobDone("Warm", None, 1)))
    assert (ready.epoch, ready.num_blocks, ready.keeps_host, ready.error) == (1, 16, True, None)


def test_another_precision_is_loaded_by_a_device_of_the_next_epoch(worker):
    is_process = worker._policy.max_restarts > 0
    effects = worker.handle(Reconfigure(1, num_blocks=16, precision=INT8))
    assert jobs(effects) == [*([Kill(0)] if is_process else []), Spawn(1, INT8)]
    assert jobs(worker.handle(JobDone("Spawn", None, 1))) == [Load(1, INT8)]
    assert jobs(worker.handle(JobDone("Load", AS_INT8, 1))) == [Fit(1, 16, is_new=True)]
    worker.handle(JobDone("Fit", {"num_blocks": 16}, 1))
    ready = ready_of(worker.handle(JobDone("Warm", None, 1)))
    assert (ready.num_blocks, ready.modes, ready.keeps_host, ready.error) == (16, (LEAN,), False, None)


def test_what_there_is_no_room_for_leads_back(worker):
    worker.handle(LARGER)
    assert jobs(worker.handle(JobFailed("Fit", "at most 12 blocks fit", 1))) == [Fit(2, 8)]
    assert worker.handle(JobDone("Fit", {"num_blocks": 16}, 1)) == []  # of the epoch before
    worker.handle(JobDone("Fit", {"num_blocks": 8}, 2))
    ready = ready_of(worker.handle(JobDone("Warm", None, 2)))
    assert (ready.num_blocks, ready.error, ready.keeps_host) == (8, "at most 12 blocks fit", True)


def test_a_precision_that_cannot_be_loaded_leads_back_to_the_one_before(worker):
    worker.handle(Reconfigure(1, precision=INT8))
    worker.handle(JobDone("Spawn", None, 1))
    assert jobs(worker.handle(JobFailed("Load", "there is no int8", 1)))[-1] == Spawn(2, None)
    ready = ready_of(come_up(worker, 2))
    assert (ready.num_blocks, ready.error, ready.modes) == (8, "there is no int8", (BEST,))


def test_a_worker_that_fails_on_the_way_back_too_is_lost(worker):
    worker.handle(LARGER)
    worker.handle(JobFailed("Fit", "no room", 1))
    worker.handle(JobFailed("Fit", "no room", 2))
    is_process = worker._policy.max_restarts > 0
    assert worker.state is (WorkerState.RESTARTING if is_process else WorkerState.FAILED)


def test_a_worker_that_is_lost_on_its_way_back_has_nothing_to_say_of_it_later():
    worker = Worker(RestartPolicy(max_restarts=3))
    worker.handle(Begin())
    come_up(worker)
    worker.handle(LARGER)
    worker.handle(JobFailed("Fit", "no room", 1))
    worker.handle(DeviceLost(2, "killed"))
    worker.handle(Restart())
    assert ready_of(come_up(worker, 3)).error is None


def test_what_was_done_in_place_once_is_not_taken_for_this_time(worker):
    worker.handle(LARGER)
    worker.handle(JobDone("Fit", {"num_blocks": 16}, 1))
    worker.handle(JobDone("Warm", None, 1))
    worker.handle(Reconfigure(2, precision=INT8, epoch=1))
    worker.handle(JobDone("Spawn", None, 2))
    assert jobs(worker.handle(JobFailed("Load", "there is no int8", 2)))[-1] == Spawn(3, None)
    ready = ready_of(come_up(worker, 3, 16))
    assert (ready.error, ready.keeps_host) == ("there is no int8", False)


def test_a_spare_that_took_over_long_ago_is_a_worker_like_any_other():
    worker = Worker(RestartPolicy(max_restarts=3))
    worker.handle(Begin())
    come_up(worker)
    worker.handle(DeviceLost(0, "killed"))
    worker.handle(Restart())
    worker.handle(JobDone("Spawn", {"spare": True}, 1))
    for job, value in (("Load", LOADED), ("Fit", {"num_blocks": 8}), ("Warm", None)):
        worker.handle(JobDone(job, value, 1))
    worker.handle(msgspec.structs.replace(LARGER, epoch=1))
    worker.handle(JobFailed("Fit", "no room", 2))
    (incident,) = [event for to, event in sent(worker.handle(JobFailed("Fit", "no room", 3))) if to == "incidents"]
    assert incident.kind == Fault.EXCEPTION
    assert worker.state is WorkerState.RESTARTING


def test_a_device_that_died_before_it_was_asked_is_lost_all_the_same():
    worker = Worker(RestartPolicy(max_restarts=3))
    worker.handle(Begin())
    come_up(worker)
    worker.handle(LARGER)
    told = sent(worker.handle(DeviceLost(0, "killed")))  # it was sent before the next epoch began
    assert told[0] == ("engine", WorkerLost(1, Fault.LOST, "killed"))
    assert worker.state is WorkerState.RESTARTING


def test_a_worker_that_is_replaced_is_what_it_was_made_last():
    worker = Worker(RestartPolicy(max_restarts=3))
    worker.handle(Begin())
    come_up(worker)
    worker.handle(Reconfigure(1, num_blocks=16, precision=INT8))
    come_up(worker, 1, 16, AS_INT8)
    worker.handle(DeviceLost(1, "killed"))
    assert jobs(worker.handle(Restart())) == [Spawn(2, INT8)]
    worker.handle(JobDone("Spawn", None, 2))
    assert jobs(worker.handle(JobDone("Load", AS_INT8, 2))) == [Fit(2, 16)]


def test_a_device_in_another_mode_is_made_anew_for_a_kv_cache_too():
    modes = {**LOADED, "modes": [msgspec.structs.asdict(BEST), msgspec.structs.asdict(LEAN)]}
    worker = Worker(RestartPolicy(max_restarts=3))
    worker.handle(Begin())
    come_up(worker, loaded=modes)
    worker.handle(Launch(StepPlan(step_id=1, mode=LEAN)))
    assert worker.asked == (Switch.__name__, 0)
    worker.handle(JobDone("Switch", None, 0))
    worker.handle(StepDone(1, 0))
    assert jobs(worker.handle(LARGER)) == [Kill(0), Spawn(1)]


# ---- the scheduler -------------------------------------------------------------------------------------------------


def vacated(bench: Bench) -> None:
    """The step under way ends, and all leave."""
    assert bench.plan is not None
    bench.tell(MakeBatch(bench.device.run(bench.plan), vacates=True))
    while bench.plan is not None:
        bench.tell(MakeBatch(bench.device.run(bench.plan), vacates=True))


def refit(bench: Bench, num_blocks: int, *, keeps_host: bool = True) -> None:
    bench._epoch += 1
    bench.device.epoch = bench._epoch
    bench.device.fit(num_blocks)
    if not keeps_host:
        bench.device = bench._new_device()
        bench.device.fit(num_blocks)
    wanted = msgspec.structs.replace(bench.configuration, num_blocks=num_blocks, epoch=bench._epoch)
    bench.tell(msgspec.structs.replace(wanted, keeps_host=keeps_host))
    bench.start()


def texts(bench: Bench) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for output in bench.outputs:
        found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


@pytest.mark.parametrize("num_host_blocks", [0, 3, 16])
@pytest.mark.parametrize("keeps_host", [True, False])
@pytest.mark.parametrize("num_blocks", [16, 64])
def test_requests_go_on_as_if_nothing_had_happened(num_host_blocks, keeps_host, num_blocks):
    def bench_with_three() -> Bench:
        bench = Bench(num_host_blocks=num_host_blocks)
        for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7, 8, 9, 10], [11]):
            bench.submit(prompt, max_tokens=12)
        bench.start()
        for _ in range(4):
            bench.step()
        return bench

    plain, bench = bench_with_three(), bench_with_three()
    plain.run()
    vacated(bench)
    assert bench.scheduler.planner.cache.statistics().num_owned == 0
    swapped = bench.scheduler.statistics().swapped_out_blocks_total
    assert swapped == {0: 0, 3: 3, 16: 3 + 4 + 2}[num_host_blocks]  # the oldest comes first
    refit(bench, num_blocks, keeps_host=keeps_host)
    bench.run()
    assert texts(bench) == texts(plain)
    found = bench.scheduler.statistics()
    assert found.swapped_in_blocks_total == (swapped if keeps_host else 0)
    assert found.blocks.num_blocks == num_blocks
    assert found.preemptions_total == 0


def test_what_a_failed_step_was_to_copy_out_is_computed_again():
    bench = Bench(num_host_blocks=16)
    bench.submit([1, 2, 3, 4, 5], max_tokens=6)
    bench.start()
    bench.step()
    bench.tell(MakeBatch(bench.device.run(bench.plan), vacates=True))
    assert bench.plan is not None
    assert bench.plan.slots == []
    failed = StepFailed(bench.plan.step_id, 0, Fault.EXCEPTION, "broken", launched=False)
    bench.tell(MakeBatch(failed, vacates=True))
    assert bench.plan is None
    assert bench.incidents[-1].kind == Fault.EXCEPTION
    refit(bench, 16)
    bench.run()
    assert bench.scheduler.statistics().swapped_in_blocks_total == 0
    assert bench.scheduler.statistics().finished_total["FINISHED_LENGTH"] == 1


def test_what_the_host_had_before_the_step_that_failed_is_there_and_what_that_was_to_copy_of_who_is_paused_is_not():
    bench = Bench(num_host_blocks=16)
    copied, paused, _ = (bench.submit([1 + i, 2, 3, 4, 5], max_tokens=20) for i in range(3))
    bench.start()
    bench.step()
    bench.tell(PauseRequest(copied))
    bench.step()
    bench.tell(KeepOver(copied))
    bench.step()
    bench.step()
    num_copied = bench.scheduler.planner.cache.num_copied(bench.request(copied))
    assert num_copied == bench.scheduler.statistics().swapped_out_blocks_total == 2
    bench.tell(PauseRequest(paused))
    bench.step()
    bench.tell(MakeBatch(bench.device.run(bench.plan), vacates=True))
    assert bench.plan is not None
    assert len(bench.plan.swap_out_blocks) > 3
    failed = StepFailed(bench.plan.step_id, 0, Fault.EXCEPTION, "broken", launched=False)
    bench.tell(MakeBatch(failed, vacates=True))
    refit(bench, 32)
    for request_id in (copied, paused):
        bench.tell(ResumeRequest(request_id))
    bench.run()
    assert bench.scheduler.statistics().swapped_in_blocks_total == num_copied
    assert bench.scheduler.statistics().finished_total["FINISHED_LENGTH"] == 3
    alone = Bench()
    for i in range(3):
        alone.submit([1 + i, 2, 3, 4, 5], max_tokens=20)
    alone.run()
    assert texts(bench) == texts(alone)


def test_the_host_has_as_many_blocks_as_the_worker_says():
    bench = Bench(num_host_blocks=16)
    for num_host_blocks in (4, 20):
        bench.configuration = msgspec.structs.replace(bench.configuration, num_host_blocks=num_host_blocks)
        bench.lose()
        bench.recover()
        assert bench.scheduler.statistics().num_host_blocks == num_host_blocks


def test_a_worker_that_dies_while_requests_leave_clears_none_of_those_that_are_to_be_tried_alone():
    bench = Bench(num_host_blocks=16)
    for prompt in ([1, 2], [3, 4]):
        bench.submit(prompt, max_tokens=6)
    bench.start()
    bench.step()
    bench.fail()
    bench.tell(MakeBatch(bench.device.run(bench.plan), vacates=True))  # the first one alone
    suspects = [list(group) for group in bench.scheduler.recovery.suspects]
    assert suspects == [[1]]
    assert bench.plan is not None
    assert bench.plan.swap_out_blocks
    bench.lose()
    bench.recover()
    assert bench.plan is not None
    assert [list(group) for group in bench.scheduler.recovery.suspects] == suspects
    assert len(bench.plan.slots) == 1


def test_what_leaves_for_the_host_leaves_in_the_mode_that_the_device_is_in():
    bench = Bench(modes=(BEST, LEAN), num_host_blocks=16)
    bench.submit([1, 2, 3, 4, 5], max_tokens=6)
    bench.start()
    bench.step()
    bench.scheduler.planner.change_mode(LEAN)  # as before a first step in it
    assert bench.plan is not None
    bench.tell(MakeBatch(bench.device.run(bench.plan), vacates=True))
    assert bench.plan is not None
    assert bench.plan.swap_out_blocks
    assert bench.plan.mode == BEST


def test_another_precision_begins_a_ladder_of_its_own():
    bench = Bench(modes=(BEST, LEAN))
    bench.submit([1, 2], max_tokens=4)
    bench.start()
    vacated(bench)
    bench._epoch += 1
    bench.tell(Configure(32, 64, VOCAB_SIZE, [EOS], 1, modes=(LEAN,)))
    bench.start()
    assert bench.plan is not None
    assert bench.plan.mode == LEAN
    assert bench.scheduler.statistics().rungs == ("FULL", "SMALLER_BATCH")


# ---- processes -----------------------------------------------------------------------------------------------------


def with_spare() -> Roster:
    """Both are warm, with a cache of eight blocks."""
    roster = Roster(warm_spare=True)
    loaded, fitted = JobDone("Load", {"kv_is_lazy": True}), JobDone("Fit", {"num_blocks": 8})
    for event in (Spawn(0), Started(0, 100), Found(None, 0.0)):
        roster.handle(event)
    for job, answer in ((Load(0), loaded), (Fit(0), fitted), (Warm(0), JobDone("Warm", {}))):
        roster.handle(Ask(job))
        roster.handle(Answered(0, 0, answer))
    roster.handle(Started(1, 101))
    for answer in (loaded, fitted, JobDone("Warm", {})):
        roster.handle(Answered(1, -1, msgspec.structs.replace(answer, epoch=-1)))
    assert roster.state is RosterState.PAIR
    return roster


def told(effects: list[Effect]) -> list[Any]:
    return [job.job for job in jobs(effects) if isinstance(job, Tell)]


def test_the_process_of_the_worker_goes_on_in_the_next_epoch():
    roster = with_spare()
    assert told(roster.handle(Ask(Fit(1, 16, is_new=True)))) == [Fit(1, 16, is_new=True)]
    answer = JobDone("Fit", {"num_blocks": 16}, 1)
    assert sent(roster.handle(Answered(0, 1, answer))) == [("worker", answer)]
    assert told(roster.handle(Ask(Warm(1)))) == [Warm(1)]
    roster.handle(Answered(0, 1, JobDone("Warm", {}, 1)))
    assert roster.state is RosterState.PAIR


def test_a_spare_with_a_cache_of_another_size_makes_another_when_it_takes_over():
    roster = with_spare()
    roster.handle(Ask(Fit(1, 16, is_new=True)))
    roster.handle(Answered(0, 1, JobDone("Fit", {"num_blocks": 16}, 1)))
    roster.handle(Ended(0, "killed", 1.0))
    assert jobs(roster.handle(Spawn(2))) == [Probe(1)]
    roster.handle(Alive(1))
    assert told(roster.handle(Ask(Load(2)))) == []  # that is done
    assert told(roster.handle(Ask(Fit(2, 16)))) == [Fit(2, 16)]
    roster.handle(Answered(1, 2, JobDone("Fit", {"num_blocks": 16}, 2)))
    assert told(roster.handle(Ask(Warm(2)))) == [Warm(2)]


def test_a_spare_that_is_making_a_cache_of_another_size_makes_the_right_one_next():
    spare = Process(1, -1)
    for event in (Started(1, 101), GoAhead(Fit(-1, 8)), Adopt(2)):
        spare.handle(event)
    assert told(spare.handle(Ask(Fit(2, 16)))) == [Fit(2, 16)]
    assert spare.handle(Answered(1, -1, JobDone("Fit", {"num_blocks": 8}, -1))) == []
    answer = JobDone("Fit", {"num_blocks": 16}, 2)
    assert sent(spare.handle(Answered(1, 2, answer))) == [("worker", answer)]


def test_a_spare_with_other_weights_is_ended_and_not_missed():
    roster = with_spare()
    roster.handle(Kill(0))
    effects = roster.handle(Spawn(1, INT8))
    assert [job for job in jobs(effects) if isinstance(job, Open)] == [Open(2, INT8)]
    assert not [event for to, event in sent(effects) if to == "incidents"]
    assert roster.state is RosterState.SINGLE
    assert roster.spare is None


# ---- the queue -----------------------------------------------------------------------------------------------------


def test_one_who_waited_for_room_in_the_queue_waits_in_it_when_the_others_leave():
    """While nothing is computed, none of those who wait shall be told to come again at once."""
    gate, rate = Gate(1, 1000, 4), DrainRate()
    gate.handle(OpenGate())
    for stream_id in (0, 1):
        rate.arrives(gate, 10.0)
        params = SamplingParams(max_queue_s=60.0)
        gate.handle(Arrive(stream_id=stream_id, prompt=[1], params=params, seed=1, num_tokens=1))
    rate.departs(gate, Departed([0]), 11.0)
    gate.handle(Departed([0]))
    assert gate.num_queued == 1
    assert rate.wait_s(gate, 31.0, lambda *_: None) > 9
