"""A cancel from every state, for every cause: at once, once, and nobody else notices."""

import pytest

from novainfer.fsm.messages.events import CancelRequest, Cause, KeepOver, PauseRequest, ResumeRequest
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.schedule.lifetimes import STATE_OF_CAUSE
from novainfer.fsm.schedule.request import ENDED, LIVE, RequestState
from novainfer.fsm.simulation.checks.oracle import expected_run
from tests.fsm.helpers import Bench

VICTIM, SIBLING, OLD = [1] * 5, [2] * 5, [3] * 5


class Scene:
    """A bench with an older request, the victim, and a younger sibling; `victim` is in the state of the scene."""

    def __init__(self, **shape: int) -> None:
        self.bench = bench = Bench(**{"num_blocks": 64, "num_host_blocks": 16, **shape})
        self.old = bench.submit(OLD, max_tokens=40)
        self.victim = bench.submit(VICTIM, max_tokens=20)
        self.sibling = bench.submit(SIBLING, max_tokens=20)

    def steps(self, count: int) -> "Scene":
        for _ in range(count):
            self.bench.step()
        return self


def waiting() -> Scene:
    return Scene(max_num_seqs=1).steps(2)


def in_prefill() -> Scene:
    return Scene(prefill_chunk_tokens=4).steps(3)


def in_decode() -> Scene:
    return Scene().steps(3)


def paused() -> Scene:
    scene = in_decode()
    scene.bench.tell(PauseRequest(scene.victim))
    return scene.steps(1)


def paused_in_flight() -> Scene:
    scene = in_decode()
    scene.bench.tell(PauseRequest(scene.victim))
    return scene


def parked() -> Scene:
    scene = paused()
    scene.bench.tell(KeepOver(scene.victim))
    return scene


def preempted() -> Scene:
    """Its reader came back after its blocks had been given away, and no slot is free."""
    scene = Scene(max_num_seqs=3)
    scene.steps(3)
    scene.bench.tell(PauseRequest(scene.victim))
    scene.steps(1)
    scene.bench.submit([4] * 5, max_tokens=40)
    scene.steps(2)
    scene.bench.tell(ResumeRequest(scene.victim))
    return scene


def fetching() -> Scene:
    scene = parked()
    scene.bench.tell(ResumeRequest(scene.victim))
    return scene.steps(1)


def recovering() -> Scene:
    scene = in_decode()
    scene.bench.lose()
    return scene


SCENES = {
    waiting: RequestState.WAITING,
    in_prefill: RequestState.PREFILL,
    in_decode: RequestState.DECODE,
    paused: RequestState.PAUSED,
    paused_in_flight: RequestState.PAUSED,
    parked: RequestState.PAUSED,
    preempted: RequestState.PREEMPTED,
    fetching: RequestState.WAITING_FOR_REMOTE_KVS,
    recovering: RequestState.RECOVERING,
}
each_scene = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
# The deadline of the first token ends no request that has one: see test_first_token.
each_cause = pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.QUEUE])


def test_the_scenes_show_every_state_that_can_be_cancelled():
    assert set(SCENES.values()) == set(LIVE)


@each_scene
@each_cause
def test_a_cancel_ends_the_request_once_and_for_the_cause(scene, cause):
    at = scene()
    request = at.bench.request(at.victim)
    assert request.state is SCENES[scene]
    for _ in range(3):
        at.bench.tell(CancelRequest(at.victim, cause))
    assert at.bench.end(at.victim).end.cause is cause
    assert request.state is STATE_OF_CAUSE[cause]
    assert request.state in ENDED


@each_scene
@each_cause
def test_what_it_owned_is_free_one_step_later_at_most_and_it_gets_nothing_more(scene, cause):
    at = scene()
    request = at.bench.request(at.victim)
    at.bench.tell(CancelRequest(at.victim, cause))
    outputs = len(at.bench.outputs)
    if at.bench.plan is None:
        at.bench.recover()
    else:
        at.bench.step()
    assert (request.kv.blocks, request.kv.host_blocks, request.slot) == ([], [], -1)
    at.bench.run()
    assert all(o.request_id != at.victim for o in at.bench.outputs[outputs:])
    stats = at.bench.scheduler.statistics()
    assert stats.blocks.num_owned == 0
    assert stats.num_host_blocks_free == stats.num_host_blocks


@each_scene
def test_the_others_get_the_tokens_they_would_have_got(scene):
    at = scene()
    at.bench.cancel(at.victim)
    if at.bench.plan is None:
        at.bench.recover()
    at.bench.run()
    for request_id, prompt, max_tokens in ((at.old, OLD, 40), (at.sibling, SIBLING, 20)):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        got = [t for o in at.bench.outputs if o.request_id == request_id for t in o.token_ids]
        assert got == expected_run(prompt, params, 1, 0, 64).token_ids


@each_scene
def test_the_same_scene_without_a_cancel_ends_well(scene):
    at = scene()
    if at.bench.plan is None:
        at.bench.recover()
    at.bench.tell(ResumeRequest(at.victim))
    at.bench.run()
    got = [t for o in at.bench.outputs if o.request_id == at.victim for t in o.token_ids]
    assert (
        got == expected_run(VICTIM, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0), 1, 0, 64).token_ids
    )
