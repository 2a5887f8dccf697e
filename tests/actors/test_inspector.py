"""Every request says where it is, since when and why it waits; blocks add up; what has ended is remembered, bounded."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from novainfer.actors.core.streams import Streams
from novainfer.actors.device.fake import ByteTokenizer, FakeDevice
from novainfer.actors.inspection import inspector as module
from novainfer.actors.inspection.feed import ActorEvent, RequestEvent
from novainfer.actors.inspection.incidents import Incidents
from novainfer.actors.inspection.inspector import HISTORY_MAX, Inspector
from novainfer.actors.inspection.records import RequestRecord, Transition
from novainfer.actors.inspection.times import TimeLog
from novainfer.actors.runtime import Runtime
from novainfer.fsm.client.gate import Gate
from novainfer.fsm.engine import Engine
from novainfer.fsm.messages.events import Cause, Chat, PauseRequest, ResumeRequest
from novainfer.fsm.messages.params import SamplingParams
from tests.actors.helpers import Valve, answer, ask, eventually, params, read_all, running
from tests.fsm.helpers import Bench

PROMPT = [65, 66, 67, 68, 69]


def nothing(*arguments: Any) -> None:
    """Stands for whatever an actor may do."""


class Watched:
    """A scheduler that the test drives step by step, and the inspector that looks at its requests."""

    def __init__(self, **bench: Any) -> None:
        self.now_s = 50.0
        self.bench = Bench(**bench)
        incidents = Incidents(lambda stream_id: None)
        self.inspector = Inspector(Gate(8, 1000), Engine(), Streams(nothing), incidents, {}, clock=lambda: self.now_s)
        self.inspector.watch(self.bench.scheduler)

    def submit(self, token_ids: list[int], *, owner: str = "", max_tokens: int | None = 8) -> int:
        stream_id = self.bench._next_id
        wish = SamplingParams(max_tokens=max_tokens)
        self.inspector.arrived(stream_id, f"r{stream_id}", owner, wish)
        return self.bench.submit(token_ids, max_tokens=max_tokens)

    def seen(self, request_id: int) -> RequestRecord:
        (found,) = self.inspector.requests(ids={f"r{request_id}"})
        return found

    def reasons(self) -> list[str | None]:
        return [record.reason for record in self.inspector.requests()]

    def check_blocks(self) -> dict[str, int]:
        found = self.inspector.kv()
        assert found is not None
        assert sum(found.blocks.values()) == found.total
        return found.blocks


def states(record: RequestRecord) -> list[str]:
    return [transition.state for transition in record.history]


def only(runtime: Runtime) -> RequestRecord:
    (found,) = runtime.inspector.requests()
    return found


# ---- a request's life -----------------------------------------------------------------------------------------------


def test_a_request_is_followed_from_its_arrival_to_its_end() -> None:
    world = Watched()
    world.now_s = 60.0
    one = world.submit([1, 2, 3, 4, 5], max_tokens=3)
    world.now_s = 62.0
    found = world.seen(one)
    assert (found.state, found.reason, found.position, found.dwell_s) == ("WAITING", "queue", 0, 2.0)
    world.bench.step()
    assert (world.seen(one).state, world.seen(one).reason, world.seen(one).blocks) == ("PREFILL", None, 2)
    world.now_s = 63.0
    world.bench.step()
    world.now_s = 63.5
    found = world.seen(one)
    assert (found.state, found.dwell_s) == ("DECODE", 0.5)
    assert (found.prompt_tokens, found.generated_tokens, found.max_tokens) == (5, 1, 3)
    world.bench.step()
    world.bench.step()
    found = world.seen(one)
    assert states(found) == ["WAITING", "PREFILL", "DECODE", "FINISHED_LENGTH"]
    assert {
        (source, to): n for (actor, source, to), n in world.inspector.transitions.items() if actor == "request"
    } == {
        ("WAITING", "PREFILL"): 1,
        ("PREFILL", "DECODE"): 1,
        ("DECODE", "FINISHED_LENGTH"): 1,
    }
    moved = [(source, to) for actor, source, to in world.inspector.transitions if actor == "scheduler"]
    assert ("EMPTY", "FULL") in moved or ("EMPTY", "PARTIAL") in moved
    times = [transition.time for transition in found.history]
    assert [round(t - times[0], 3) for t in times] == [0.0, 2.0, 3.0, 3.5]
    assert (found.state, found.reason, found.generated_tokens, found.blocks) == ("FINISHED_LENGTH", None, 3, 0)


def test_the_times_of_requests_that_ran_are_counted_as_they_end() -> None:
    world = Watched()
    short, long, _ = (world.submit([1, 2, 3, 4, 5], max_tokens=most) for most in (1, 3, 8))
    world.now_s += 2.0
    world.bench.step()
    world.bench.cancel(world.submit([9], max_tokens=8))  # which never runs
    assert sum(world.inspector.times.record().queue.counts) == 0
    world.now_s += 1.0
    world.bench.step()
    world.now_s += 0.5
    world.bench.step()
    world.bench.step()
    assert (states(world.seen(short))[-1], states(world.seen(long))[-1]) == ("FINISHED_LENGTH",) * 2
    found = world.inspector.times.record()
    sums = {name: getattr(found, name).sum for name in ("queue", "prefill", "decode", "inference", "per_token")}
    counts = {name: sum(getattr(found, name).counts) for name in sums}
    assert sums == pytest.approx({"queue": 4.0, "prefill": 2.0, "decode": 0.5, "inference": 2.5, "per_token": 0.25})
    assert counts == {"queue": 2, "prefill": 2, "decode": 2, "inference": 2, "per_token": 1}, "the third one goes on"
    assert (found.preemptions.counts[0], found.preemptions.sum) == (2, 0.0)


def test_how_often_a_request_was_preempted_is_counted_at_its_end() -> None:
    log = TimeLog()
    ways = (
        "OVERFLOW",
        "WAITING",
        "PREFILL",
        "PREEMPTED",
        "PREFILL",
        "DECODE",
        "PREEMPTED",
        "DECODE",
        "FINISHED_STOPPED",
    )
    log.ended([Transition(state, float(at)) for at, state in enumerate(ways)], 3)
    log.ended([Transition("OVERFLOW", 0.0), Transition("WAITING", 1.0), Transition("FINISHED_ABORTED", 9.0)], 0)
    found = log.record()
    assert (found.preemptions.sum, found.preemptions.counts[2]) == (2.0, 1)
    sums = [getattr(found, name).sum for name in ("queue", "prefill", "decode", "inference", "per_token")]
    assert sums == [2.0, 3.0, 3.0, 6.0, 1.5]


async def test_what_is_at_the_tokenizer_waits_for_it_and_a_prompt_that_is_no_good_is_ignored() -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(ByteTokenizer):
        def encode_batch(self, prompts: Sequence[str | Chat]) -> list[list[int] | str]:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            return [
                "cannot be rendered" if prompt == "bad" else ids
                for prompt, ids in zip(prompts, super().encode_batch(prompts), strict=True)
            ]

    async with running(tokenizer=Slow()) as runtime:
        good, bad, gone = ask(runtime, "good"), ask(runtime, "bad"), ask(runtime, "gone")
        await eventually(lambda: [r.reason for r in runtime.inspector.requests()] == ["tokenizing"] * 3)
        assert {r.state for r in runtime.inspector.requests()} == {"WAITING"}
        runtime.abandon(gone.stream_id)
        gate.set()
        await read_all(bad)
        await read_all(good)
        found = {record.state: states(record) for record in runtime.inspector.requests()}
        assert found == {
            "FINISHED_LENGTH": ["WAITING", "PREFILL", "DECODE", "FINISHED_LENGTH"],
            "FINISHED_IGNORED": ["WAITING", "FINISHED_IGNORED"],
            "FINISHED_ABORTED": ["WAITING", "FINISHED_ABORTED"],
        }


async def test_an_end_that_nobody_has_read_yet_is_seen() -> None:
    class Refusing(ByteTokenizer):
        def encode_batch(self, prompts: Sequence[str | Chat]) -> list[list[int] | str]:
            return ["cannot be rendered"] * len(prompts)

    async with running(tokenizer=Refusing()) as runtime:
        handle = ask(runtime, "bad")
        await eventually(lambda: only(runtime).state == "FINISHED_IGNORED")
        assert only(runtime).reason is None
        await read_all(handle)
        assert states(only(runtime)) == ["WAITING", "FINISHED_IGNORED"]


async def test_who_waits_for_room_in_the_queue_is_in_overflow_and_its_way_in_is_noted() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve), max_queue=(1, 1000)) as runtime:
        ask(runtime, PROMPT)
        await valve.step_arrived()
        queued = ask(runtime, PROMPT)
        waiting = [ask(runtime, PROMPT, params(max_queue_s=60.0)) for _ in range(2)]
        found = runtime.inspector.requests()
        assert [(r.state, r.reason, r.position) for r in found[2:]] == [
            ("OVERFLOW", "overflow", 0),
            ("OVERFLOW", "overflow", 1),
        ]
        assert runtime.inspector.counts()["OVERFLOW"] == 2
        runtime.cancel(waiting[1].stream_id, Cause.CLIENT)
        valve.open()
        await read_all(waiting[1])
        await read_all(queued)
        await read_all(waiting[0])
        ends = sorted(states(r) for r in runtime.inspector.requests() if r.history[0].state == "OVERFLOW")
        assert ends == [
            ["OVERFLOW", "FINISHED_ABORTED"],
            ["OVERFLOW", "WAITING", "PREFILL", "DECODE", "FINISHED_LENGTH"],
        ]


async def test_one_whose_reader_has_left_is_there_until_it_has_ended_and_is_remembered_once() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        handle = ask(runtime, PROMPT)
        await valve.step_arrived()
        runtime.abandon(handle.stream_id)
        assert only(runtime).state == "PREFILL"
        valve.open()
        await eventually(lambda: only(runtime).state == "FINISHED_ABORTED")
        assert states(only(runtime)) == ["WAITING", "PREFILL", "FINISHED_ABORTED"]


async def test_one_that_is_refused_leaves_no_trace() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve), max_queue=(1, 1000)) as runtime:
        ask(runtime, PROMPT)
        await valve.step_arrived()
        ask(runtime, PROMPT)
        with pytest.raises(Exception, match="full"):
            ask(runtime, PROMPT)
        assert len(runtime.inspector.requests()) == 2
        valve.open()


async def test_choices_are_told_apart_and_the_first_one_that_lives_speaks_for_all() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        handle = ask(runtime, PROMPT, params(4, n=2))
        await valve.step_arrived()
        await eventually(lambda: len(only(runtime).choices) == 2)
        assert [choice.index for choice in only(runtime).choices] == [0, 1]
        valve.open()
        await read_all(handle)
        found = only(runtime)
        assert (found.state, found.generated_tokens) == ("FINISHED_LENGTH", 8)
        assert [choice.generated_tokens for choice in found.choices] == [4, 4]


# ---- why it waits ---------------------------------------------------------------------------------------------------


def test_one_that_waits_for_a_slot_or_for_those_before_it_says_so() -> None:
    world = Watched(max_num_seqs=1)
    for at in range(3):
        world.submit([10 * at + i for i in range(4)])
    assert world.reasons() == ["queue"] * 3
    world.bench.step()
    assert world.reasons() == [None, "slots", "slots"]
    assert [r.position for r in world.inspector.requests()] == [None, 0, 1]


def test_one_that_waits_for_blocks_says_so_and_who_stands_behind_it_waits_in_the_queue() -> None:
    world = Watched(num_blocks=6)
    world.submit(list(range(1, 13)))
    world.bench.step()
    world.submit(list(range(20, 32)))
    world.submit([40, 41])
    assert world.reasons() == [None, "blocks", "queue"]


def test_one_that_waits_for_a_prefix_which_another_computes_says_so() -> None:
    world = Watched(prefill_chunk_tokens=16)
    world.submit(list(range(1, 60)), max_tokens=2)
    world.bench.step()
    world.submit(list(range(1, 60)), max_tokens=2)
    world.submit([70, 71])  # a short one, for whom a part of the chunk is kept: so the queue is looked through
    world.bench.step()
    assert world.reasons() == [None, "prefix", None]


def test_one_whose_reader_is_slow_says_so_until_it_is_back() -> None:
    world = Watched()
    one = world.submit([1, 2, 3])
    world.bench.step()
    world.bench.step()
    world.bench.tell(PauseRequest(one))
    assert (world.seen(one).state, world.reasons()) == ("PAUSED", ["paused: slow reader"])
    world.bench.tell(ResumeRequest(one))
    assert (world.seen(one).state, world.reasons()) == ("DECODE", [None])
    assert states(world.seen(one)) == ["WAITING", "PREFILL", "DECODE", "PAUSED", "DECODE"]


def test_those_whose_worker_was_lost_recover() -> None:
    world = Watched()
    one = world.submit([1, 2, 3])
    world.bench.step()
    world.bench.step()
    world.bench.lose()
    assert (world.seen(one).state, world.reasons()) == ("RECOVERING", ["recovering"])
    assert world.check_blocks() == {"free": 32, "cached": 0}
    world.bench.recover()
    assert states(world.seen(one)) == ["WAITING", "PREFILL", "DECODE", "RECOVERING", "WAITING", "PREFILL"]


def test_one_that_was_swapped_to_the_host_has_its_blocks_there_and_says_when_they_come_back() -> None:
    world = Watched(num_blocks=8, num_host_blocks=8)
    first = world.submit([1, 2, 3, 4, 5, 6], max_tokens=20)
    second = world.submit([11, 12, 13, 14, 15, 16], max_tokens=20)
    seen: set[tuple[str, str | None]] = set()
    for _ in range(60):
        world.bench.step()
        world.check_blocks()
        for record in world.inspector.requests(ids={"r0", "r1"}):
            seen.add((record.state, record.reason))
            if record.state == "PREEMPTED":
                assert record.host_blocks > 0
                assert record.preemptions == 1
                found = world.inspector.kv()
                assert found is not None
                assert (found.host_total, found.host_used) == (8, record.host_blocks)
    assert ("WAITING_FOR_REMOTE_KVS", "swapped") in seen
    assert "WAITING_FOR_REMOTE_KVS" in states(world.seen(second))
    assert world.seen(first).state == "FINISHED_LENGTH"


# ---- blocks ---------------------------------------------------------------------------------------------------------


def test_blocks_add_up_at_every_step_also_when_they_are_shared() -> None:
    world = Watched(num_blocks=32)
    shared = list(range(1, 13))
    for at in range(6):
        world.submit([*shared, 20 + at], max_tokens=6)
    kinds: set[str] = set()
    for _ in range(20):
        world.bench.step()
        kinds |= set(world.check_blocks())
    assert {"PREFILL", "DECODE", "free", "cached"} <= kinds
    assert world.check_blocks()["free"] + world.check_blocks()["cached"] == 32


def test_blocks_of_one_that_ended_while_its_step_is_on_the_device_are_there_until_it_returns() -> None:
    world = Watched()
    one = world.submit([1, 2, 3, 4, 5])
    world.bench.step()
    world.bench.cancel(one)
    assert world.check_blocks()["ENDED"] == 2
    assert world.seen(one).blocks == 0
    world.bench.step()
    assert "ENDED" not in world.check_blocks()


# ---- bounds, owners, listeners --------------------------------------------------------------------------------------


def test_only_the_newest_ended_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDED_REQUESTS_MAX", 5)
    world = Watched()
    for _ in range(9):
        world.bench.cancel(world.submit([1, 2]))
    assert [record.id for record in world.inspector.requests()] == ["r8", "r7", "r6", "r5", "r4"]


def test_a_long_history_keeps_its_beginning_and_its_end() -> None:
    world = Watched()
    one = world.submit([1, 2, 3])
    world.bench.step()
    world.bench.step()
    for _ in range(HISTORY_MAX):
        world.bench.tell(PauseRequest(one))
        world.bench.tell(ResumeRequest(one))
    found = world.seen(one)
    assert len(found.history) == HISTORY_MAX
    assert states(found)[:3] == ["WAITING", "PREFILL", "DECODE"]
    assert states(found)[-2:] == ["PAUSED", "DECODE"]


def test_an_owner_sees_its_own_requests_only() -> None:
    world = Watched()
    for owner in ("alice", "bob", "alice"):
        world.submit([1, 2], owner=owner)
    world.bench.cancel(0)
    world.bench.cancel(1)
    assert [record.id for record in world.inspector.requests("alice")] == ["r2", "r0"]
    assert [record.id for record in world.inspector.requests("bob")] == ["r1"]
    assert world.inspector.requests("alice", ids={"r1"}) == []
    assert world.inspector.requests("carol") == []


async def test_listeners_hear_of_requests_and_actors_until_they_leave() -> None:
    async with running() as runtime:
        with runtime.inspector.subscribe(None, limit=1000) as events:
            handle = runtime.add("mine", PROMPT, params(2), 0, "alice")
            await read_all(handle)
            found = events.take()
        own = [e for e in found if isinstance(e, RequestEvent)]
        assert [(e.id, e.source, e.target) for e in own] == [
            ("mine", None, "WAITING"),
            ("mine", "WAITING", "PREFILL"),
            ("mine", "PREFILL", "DECODE"),
            ("mine", "DECODE", "FINISHED_LENGTH"),
        ]
        moves = {(e.actor, e.source, e.target) for e in found if isinstance(e, ActorEvent)}
        assert {("engine", "IDLE", "SCHEDULING"), ("worker-0", "READY", "RUNNING")} <= moves
        with runtime.inspector.subscribe("bob", limit=1000) as others:
            await answer(runtime, PROMPT)
            assert not any(isinstance(e, RequestEvent) for e in others.take())
        assert events.take() == []


async def test_a_slot_is_found_by_the_name_of_a_request_that_runs() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        runtime.add("mine", PROMPT, params(), 0)
        await valve.step_arrived()
        assert runtime.inspector.slot_of("mine") == valve.plans[0].slots[0]
        with pytest.raises(ValueError, match="does not run"):
            runtime.inspector.slot_of("another")
        valve.open()


async def test_a_step_has_its_commit_apart_from_the_plan_behind_it() -> None:
    async with running() as runtime:
        await answer(runtime, PROMPT)
        records = runtime.last_steps(100)
    assert all(record.commit_us is not None for record in records)
    assert all(record.commit_us <= later.schedule_us for record, later in itertools.pairwise(records))
