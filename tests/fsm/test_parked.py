"""Slow readers are bounded in number, and preemptions in number for each request."""

from __future__ import annotations

import random

import msgspec
import pytest

from novainfer.fsm.core.machine import Send
from novainfer.fsm.messages.events import Batch, Configure, KeepOver, MakeBatch, PauseRequest, ResumeRequest, Submit
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.lifetimes import PARKED_PER_SLOT
from novainfer.fsm.schedule.planner import Limits
from novainfer.fsm.schedule.request import RequestState
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.checks.oracle import VOCABULARY
from novainfer.fsm.simulation.world.shape import BEST, SAFE
from tests.fsm.helpers import Bench

SLOTS = 2


def pause_one(bench: Bench, pause: bool = True) -> int:
    """A request that has its first tokens, and whose reader has stopped."""
    request_id = bench.submit([bench._next_id % 7 + 1], max_tokens=40)
    while not any(o.request_id == request_id and o.token_ids for o in bench.outputs):
        bench.step()
    bench.step()
    if pause:
        bench.tell(PauseRequest(request_id))
        bench.step()
    return request_id


def test_of_more_parked_requests_than_two_for_each_slot_the_one_paused_longest_ends():
    bench = Bench(max_num_seqs=SLOTS)
    paused = [pause_one(bench) for _ in range(30)]
    planner = bench.scheduler.planner
    left = [i for i in paused if i in bench.scheduler.requests]
    assert len(planner.parked) <= PARKED_PER_SLOT * SLOTS
    assert left == paused[-len(left) :]
    assert len(left) >= PARKED_PER_SLOT * SLOTS
    for request_id in paused[: -len(left)]:
        assert bench.end(request_id).end.code == "stalled"
    assert {incident.kind for incident in bench.incidents} == {"stall"}
    assert len(bench.incidents) == 30 - len(left)


def test_a_reader_that_came_back_in_between_has_not_been_away_longest():
    bench = Bench(max_num_seqs=SLOTS)
    first, second, *_ = [pause_one(bench) for _ in range(PARKED_PER_SLOT * SLOTS)]
    bench.tell(ResumeRequest(first))
    bench.step()
    bench.step()
    assert bench.request(first).state is RequestState.DECODE
    bench.tell(PauseRequest(first))
    while second in bench.scheduler.requests:
        pause_one(bench)
    assert first in bench.scheduler.requests


def test_what_is_parked_by_its_timer_counts_too():
    bench = Bench(max_num_seqs=SLOTS)
    for _ in range(10):
        request_id = pause_one(bench)
        bench.tell(KeepOver(request_id))
        assert len(bench.scheduler.planner.parked) <= PARKED_PER_SLOT * SLOTS


@pytest.mark.parametrize("share", [0.2, 0.4])
@pytest.mark.parametrize("seed", range(3))
def test_no_request_of_a_steady_crowd_is_preempted_more_than_four_times(share, seed):
    rng = random.Random(seed)
    sizes = [(rng.randint(16, 256), rng.randint(64, 256)) for _ in range(192)]
    num_blocks = int(share * sum(-(-(prompt + answer) // 16) for prompt, answer in sizes))
    limits = Limits(max_num_seqs=192, max_num_batched_tokens=2048, prefill_chunk_tokens=512, block_size=16)
    scheduler = Scheduler(limits, VOCABULARY)
    scheduler.handle(Configure(num_blocks, 4096, 256, [0]))
    requests = []
    for at, (prompt, answer) in enumerate(sizes):
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        tokens = [rng.randint(1, 200) for _ in range(prompt)]
        scheduler.handle(Submit(request_id=at, stream_id=at, choice=0, token_ids=tokens, params=params, seed=1))
        requests.append(scheduler.requests[at])
    event, computed = MakeBatch(), 0
    while True:
        (batch,) = [e.event for e in scheduler.handle(event) if isinstance(e, Send) and isinstance(e.event, Batch)]
        if batch.plan is None:
            break
        computed += len(batch.plan.input_ids)
        event = MakeBatch(StepDone(batch.plan.step_id, 0, [5] * len(batch.plan.sample_seqs)))
    assert all(request.state is RequestState.FINISHED_LENGTH for request in requests)
    assert max(request.num_preemptions for request in requests) <= 4
    assert computed <= 1.12 * sum(prompt + answer - 1 for prompt, answer in sizes)


def test_a_pause_is_not_over_because_an_older_one_lasted_too_long():
    bench = Bench(max_num_seqs=SLOTS)
    request_id = pause_one(bench, pause=False)
    bench.submit([5], max_tokens=40)
    bench.tell(PauseRequest(request_id))  # its step is on the device
    bench.tell(KeepOver(request_id))
    bench.tell(ResumeRequest(request_id))
    bench.tell(PauseRequest(request_id))
    bench.step()
    assert bench.request(request_id).state is RequestState.PAUSED
    assert bench.request(request_id).kv.blocks


def test_a_paused_request_whose_worker_was_lost_needs_no_more_room_than_others():
    bench = Bench(max_num_seqs=SLOTS)
    request_id = pause_one(bench)
    bench.lose()
    bench.recover()
    assert bench.request(request_id).num_preemptions == 0


@pytest.mark.parametrize("outcome", ["goes well", "fails"])
def test_a_paused_request_that_has_overstayed_is_parked_after_its_step_whatever_the_step_did(outcome):
    bench = Bench(max_num_seqs=3)
    paused = pause_one(bench, pause=False)
    for token in (5, 6):
        bench.submit([token], max_tokens=40)
    bench.step()
    bench.tell(PauseRequest(paused))  # its step is on the device
    bench.tell(KeepOver(paused))
    assert bench.request(paused).kv.blocks
    if outcome == "fails":
        bench.fail()  # only a part of its requests is tried next
        assert len(bench.rows()) == 1
    else:
        bench.step()
    assert not bench.request(paused).kv.blocks
    assert bench.request(paused).slot < 0


def test_a_paused_request_that_has_overstayed_is_parked_before_a_canary():
    bench = Bench(max_num_seqs=3, modes=(BEST, SAFE))
    request_id = pause_one(bench, pause=False)
    bench.fail()
    assert bench.rows() == {request_id: 1}  # it is tried once more
    bench.tell(PauseRequest(request_id))
    bench.tell(KeepOver(request_id))
    bench.fail()
    assert bench.scheduler.recovery.trial is not None
    assert bench.plan is not None
    assert not bench.request(request_id).kv.blocks


@pytest.mark.parametrize("why", ["reconfigured", "lost"])
def test_those_that_must_leave_their_slots_end_none_of_the_others(why):
    bench = Bench(max_num_seqs=SLOTS)
    while len(bench.scheduler.planner.parked) < PARKED_PER_SLOT * SLOTS:
        pause_one(bench)
    paused = list(bench.scheduler.requests)
    assert len(paused) == (PARKED_PER_SLOT + 1) * SLOTS
    if why == "lost":
        bench.lose()
        bench.recover()
    else:
        bench.tell(MakeBatch(vacates=True))
        bench.tell(MakeBatch(vacates=True))
        assert bench.plan is None
        bench._epoch += 1
        bench.tell(msgspec.structs.replace(bench.configuration, epoch=bench._epoch))
        bench.device.epoch = bench._epoch
        bench.start()
    assert list(bench.scheduler.requests) == paused
    assert len(bench.scheduler.planner.parked) == len(paused)
    assert not [incident for incident in bench.incidents if incident.kind == "stall"]
    bench.tell(ResumeRequest(paused[0]))
    for _ in range(3):
        bench.step()
        assert list(bench.scheduler.requests) == paused
    assert paused[0] not in bench.scheduler.planner.parked
    for _ in range(2 * SLOTS):
        pause_one(bench)
    assert paused[1] not in bench.scheduler.requests  # there is no more room for others than there was
    assert len(bench.scheduler.planner.parked) < len(paused)
