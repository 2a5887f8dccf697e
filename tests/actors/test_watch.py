"""Who watches an engine knows at each moment what one who begins then is told; nobody who watches costs nothing."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
import pytest

from novainfer.actors.core.streams import StreamHandle
from novainfer.actors.device.fake import FakeDevice
from novainfer.actors.device.process import ProcessLink
from novainfer.actors.inspection import changes, joining, watch
from novainfer.actors.inspection.frames import Frame, Snapshot
from novainfer.actors.inspection.watch import FRAME_S, LATEST_S, Watcher
from novainfer.actors.runtime import Runtime
from novainfer.fsm.device.roster import Roster
from novainfer.fsm.device.worker import RestartPolicy
from novainfer.fsm.health import ENCODE_LIMIT_S
from novainfer.fsm.machines import MACHINES
from novainfer.fsm.messages.events import Cause, Fault, Incident, Output
from tests.actors.devices import spec
from tests.actors.helpers import LIMITS, Valve, answer, ask, eventually, make_runtime, params, read_all, running
from tests.actors.mirror import Mirror, known

PROMPT = [65, 66, 67, 68, 69]


def small(**more: Any) -> Any:
    """A few slots and blocks: requests wait, are preempted, and prefixes are evicted."""
    return msgspec.structs.replace(LIMITS, max_num_seqs=6, block_size=4, prefill_chunk_tokens=16, **more)


def take(watcher: Watcher) -> Snapshot | Frame | None:
    """What is there, without waiting."""
    coming = watcher.__anext__()
    try:
        coming.send(None)
    except StopIteration as found:
        return found.value  # type: ignore[no-any-return]
    coming.close()
    return None


def catch_up(runtime: Runtime, mirror: Mirror, watcher: Watcher) -> None:
    """A frame is made now, and all that is there is taken."""
    runtime.watch._tell_all(runtime.watch._frame())
    take_all(mirror, watcher)


def take_all(mirror: Mirror, watcher: Watcher) -> None:
    """All that is there already."""
    while (one := take(watcher)) is not None:
        mirror.take(one)


def fresh(runtime: Runtime) -> dict[str, Any]:
    """What one who begins now is told."""
    with runtime.watch.subscribe(None) as late:
        first = take(late)
    assert isinstance(first, Snapshot)
    return known(first)


def assert_knows_all(runtime: Runtime, mirror: Mirror, watcher: Watcher) -> None:
    """It knows what one who begins now is told; for whom a frame is made, which tells all what time has changed."""
    expected = fresh(runtime)
    take_all(mirror, watcher)
    assert mirror.known() == expected


def counted(runtime: Runtime, name: str) -> dict[tuple[str, str, str], int]:
    """How often each row of a machine was taken, as the engine has it."""
    (kind,) = (kind for kind in MACHINES if kind.__name__ == name)
    counts = runtime.inspector.rows.counts(kind)
    return {(str(state), event.__name__, str(to)): count for (state, event, to), count in counts.items()}


def rows_of(name: str, mirror: Mirror) -> tuple[list[str], list[str]]:
    """From which states to which."""
    rows = mirror.machines[name][1]
    return [before for before, _, _ in rows], [after for _, _, after in rows]


async def load(runtime: Runtime, chance: random.Random, num: int) -> None:
    """Clients that come and go, some of them before they have their answer."""
    stems = [[65 + i] * 9 for i in range(3)]

    async def client() -> None:
        await asyncio.sleep(0)
        handle = ask(runtime, [*chance.choice(stems), chance.randrange(65, 90)], params(chance.randrange(1, 30)))
        if chance.random() < 0.2:
            runtime.cancel(handle.stream_id, Cause.CLIENT)
        await read_all(handle)

    await asyncio.gather(*(client() for _ in range(num)))


@pytest.mark.parametrize("seed", range(4))
async def test_a_watcher_knows_what_one_who_begins_now_is_told(seed: int) -> None:
    chance = random.Random(seed)
    async with running(FakeDevice(num_blocks=24), limits=small()) as runtime:
        with runtime.watch.subscribe(None) as watcher:
            mirror, loading = Mirror(), asyncio.ensure_future(load(runtime, chance, 40))
            while not loading.done():
                await asyncio.sleep(0.002)
                catch_up(runtime, mirror, watcher)
                assert_knows_all(runtime, mirror, watcher)
            await loading
            catch_up(runtime, mirror, watcher)
            assert_knows_all(runtime, mirror, watcher)
            assert mirror.num_snapshots == 1
            assert mirror.num_frames > 5
            assert {"DECODE", "Finish", "FINISHED_LENGTH"} <= {
                word for row in mirror.machines["Request"][1] for word in row
            }
            assert mirror.evicted
            for name, (_, counts) in mirror.machines.items():
                assert counts == counted(runtime, name)
            assert all(before != after for before, after in zip(*rows_of("Stream", mirror), strict=True))
            ids = [step.id for step in mirror.steps]
            assert ids == sorted(set(ids)), "each step once, in order"
            assert len(ids) + mirror.lost >= runtime.steps.num_launched - 1


async def test_a_watcher_that_is_slow_gets_one_frame_that_tells_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "STEPS_MAX", 64)
    async with running(FakeDevice(num_blocks=24), limits=small()) as runtime:
        with runtime.watch.subscribe(None) as slow, runtime.watch.subscribe(None) as quick:
            mirror, each = Mirror(), Mirror()
            mirror.take(take(slow))  # type: ignore[arg-type]
            for _ in range(5):
                await load(runtime, random.Random(1), 8)
                catch_up(runtime, each, quick)
            mirror.take(take(slow))  # type: ignore[arg-type]
            assert take(slow) is None
            assert mirror.num_frames == 1
            assert_knows_all(runtime, mirror, slow)
            assert len(mirror.steps) <= joining.STEPS_MAX
            assert len(mirror.steps) + mirror.lost >= runtime.steps.num_launched - 1
            assert mirror.lost > 0
            assert mirror.evicted == each.evicted


async def test_one_that_has_missed_too_much_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "GONE_MAX", 20)
    monkeypatch.setattr(changes, "ENDED_TOLD_MAX", 4)
    async with running() as runtime:
        with runtime.watch.subscribe(None) as slow:
            mirror = Mirror()
            mirror.take(take(slow))  # type: ignore[arg-type]
            for _ in range(40):
                await answer(runtime, PROMPT)
                runtime.watch._tell_all(runtime.watch._frame())
            while (one := take(slow)) is not None:
                mirror.take(one)
            assert mirror.num_snapshots == 2
            assert_knows_all(runtime, mirror, slow)


async def test_a_key_is_told_of_its_own_requests_only() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve)) as runtime:
        with runtime.watch.subscribe("alice") as alice, runtime.watch.subscribe(None) as admin:
            handles = [
                runtime.add(f"r{i}", PROMPT, params(4), 0, owner) for i, owner in enumerate(("alice", "bob", "alice"))
            ]
            await eventually(lambda: valve.plans)
            runtime.incidents.take(incident(handles[1]))
            runtime.incidents.take(incident(handles[0]))
            valve.open()
            await asyncio.gather(*map(read_all, handles))
            runtime.watch._tell_all(runtime.watch._frame())
            seen, all_seen = Mirror(), Mirror()
            for mirror, watcher in ((seen, alice), (all_seen, admin)):
                while (one := take(watcher)) is not None:
                    mirror.take(one)
            assert len(all_seen.requests) == 3
            own = {f"{handles[0].stream_id}.0", f"{handles[2].stream_id}.0"}
            assert set(seen.requests) == own
            assert seen.incidents == [1]
            assert all_seen.incidents == [0, 1]
            assert seen.machines == all_seen.machines, "all else is told to everybody"
        with runtime.watch.subscribe("bob") as bob:
            first = take(bob)
        assert isinstance(first, Snapshot)
        assert {now.owner for now in first.requests} == {"bob"}
        assert [record.number for record in first.incidents] == [0]


def incident(handle: StreamHandle) -> Incident:
    return Incident(kind=Fault.OOM, message="too much", action="none", stream_ids=[handle.stream_id])


async def test_a_row_that_was_taken_is_told_with_its_times_and_whose_they_were() -> None:
    async with running() as runtime:
        await answer(runtime, PROMPT)
        row = ("Request", "PREFILL", "Prefilled", "DECODE")
        assert runtime.inspector.taken(*row, None) == [], "nobody had looked before"
        for name, owner in (("one", "alice"), ("two", "bob")):
            await read_all(runtime.add(name, PROMPT, params(4), 0, owner))
        assert [one.of for one in runtime.inspector.taken(*row, None)] == ["one", "two"]
        assert [one.of for one in runtime.inspector.taken(*row, "bob")] == ["", "two"]
        for _ in range(120):
            await answer(runtime, PROMPT)
        taken = runtime.inspector.taken(*row, None)
        assert len(taken) == 100
        assert [one.time for one in taken] == sorted(one.time for one in taken)
        with runtime.watch.subscribe(None) as watcher:
            mirror = Mirror()
            mirror.take(take(watcher))  # type: ignore[arg-type]
        assert mirror.machines["Request"][1][row[1:]] == 123


async def test_rates_are_of_now_and_percentiles_of_what_clients_met() -> None:
    async with running(FakeDevice(step_s=0.01)) as runtime:
        with runtime.watch.subscribe(None) as watcher:
            await asyncio.gather(*(read_all(ask(runtime, PROMPT, params(20))) for _ in range(4)))
            runtime.watch._looked_s = float("-inf")
            frame = runtime.watch._frame()
        assert frame is not None
        rates = frame.rates
        assert rates is not None
        assert rates.tokens_s == 80
        assert (rates.running, rates.waiting) == (0, 0)
        for found in (rates.ttft_ms, rates.inter_token_ms):
            assert found is not None
            assert 9 <= found.p50 <= found.p95 <= found.p99
        assert take(watcher) is not None


async def test_the_end_of_an_engine_is_the_end_of_watching_and_nothing_is_left_of_who_has_left() -> None:
    async with running() as runtime:
        runtime.watch.subscribe(None).close()
        assert runtime.watch._timer is None
        assert not runtime.watch.is_watched
        watcher = runtime.watch.subscribe(None)
        await answer(runtime, PROMPT)
    seen = [one async for one in watcher]
    assert isinstance(seen[0], Snapshot)
    late = runtime.watch.subscribe(None)
    assert [type(one) async for one in late] == [Snapshot]


async def test_one_that_begins_before_there_are_blocks_is_told_of_them_when_there_are() -> None:
    runtime = make_runtime(FakeDevice(num_blocks=24), limits=small())
    with runtime.watch.subscribe(None) as watcher:
        mirror = Mirror()
        catch_up(runtime, mirror, watcher)
        await asyncio.sleep(2 * FRAME_S)  # frames are made by themselves
        await runtime.start()
        catch_up(runtime, mirror, watcher)
        assert_knows_all(runtime, mirror, watcher)
        assert len(mirror.known()["owner"]) == 24
    await runtime.aclose()


async def test_where_no_frame_can_be_made_those_who_watch_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as runtime:
        watcher = runtime.watch.subscribe(None)
        monkeypatch.setattr(runtime.watch, "_frame", lambda: 1 / 0)
        async with asyncio.timeout(20 * FRAME_S):
            assert [type(one) async for one in watcher] == [Snapshot]
        watcher.close()
        with pytest.raises(ZeroDivisionError):
            runtime.watch.subscribe(None)
        assert runtime.watch._timer is None
        monkeypatch.undo()
        with runtime.watch.subscribe(None) as another:
            assert isinstance(take(another), Snapshot)


async def test_streams_are_counted_where_they_come_into_another_state_whether_anybody_watches_or_not() -> None:
    async with running() as runtime:
        await answer(runtime, PROMPT)
        slow = ask(runtime, PROMPT, params(1800))
        await eventually(lambda: slow.state == "STALLED")
        while slow.state == "STALLED":
            slow.read_nowait()
        await eventually(lambda: slow.state == "STALLED" or slow.is_over)
        await read_all(slow)
        open_, closed, stalled = "OPEN", "CLOSED", "STALLED"
        found = counted(runtime, "Stream")
        assert found[open_, "Output", stalled] == found[stalled, "Read", open_] >= 1
        assert found[open_, "Output", closed] == 2
        left = ask(runtime, PROMPT, params(1800))
        await eventually(lambda: left.has_deltas)
    assert counted(runtime, "Stream")[open_, "Stop", closed] == 1


def test_a_pause_is_two_hundred_and_fifty_times_as_long_as_what_frames_took_and_within_its_bounds() -> None:
    assert [watch.pause_s(spent_s) for spent_s in (0.0, 0.0001, 0.001, 0.1)] == [FRAME_S, FRAME_S, 0.25, LATEST_S]


async def test_frames_come_by_themselves_and_what_a_watcher_has_spent_counts() -> None:
    async with running() as runtime, aclosing(stay_busy(runtime)) as busy:
        with runtime.watch.subscribe(None) as watcher:
            await anext(busy)
            assert isinstance(await anext(watcher), Snapshot)
            assert isinstance(await anext(watcher), Frame)
            timer, loop = runtime.watch._timer, asyncio.get_running_loop()
            assert timer is not None
            timer.cancel()
            watcher.spent(60.0)
            before_s = loop.time()
            runtime.watch._tick()
            assert runtime.watch._timer is not None
            assert runtime.watch._timer.when() >= before_s + LATEST_S


async def stay_busy(runtime: Runtime) -> Any:
    """Something to tell, as long as it is wanted."""
    handle = ask(runtime, PROMPT, params(1800))
    yield handle
    runtime.cancel(handle.stream_id, Cause.CLIENT)
    await read_all(handle)


async def test_a_reconfigured_cache_is_told_anew() -> None:
    async with running(FakeDevice(num_blocks=24), limits=small()) as runtime:
        with runtime.watch.subscribe(None) as watcher:
            mirror = Mirror()
            mirror.take(take(watcher))  # type: ignore[arg-type]
            assert len(mirror.owner) == 24
            await runtime.reconfigure(32, None)
            catch_up(runtime, mirror, watcher)
            assert (len(mirror.owner), mirror.num_snapshots) == (32, 2)
            assert_knows_all(runtime, mirror, watcher)


async def test_waiting_requests_say_for_what_and_leave_the_list_when_many_have_ended() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve), limits=small()) as runtime:
        with runtime.watch.subscribe(None) as watcher:
            handles = [ask(runtime, PROMPT, params(2)) for _ in range(120)]
            await eventually(lambda: len(valve.plans) == 1)
            await eventually(lambda: runtime._scheduler is not None and len(runtime._scheduler.requests) == 120)
            mirror = Mirror()
            catch_up(runtime, mirror, watcher)
            assert len(mirror.requests) == 120
            assert {found[1] for found in mirror.requests.values()} <= {None, "slots", "queue", "prefix", "blocks"}
            assert sum(found[0] == "PREFILL" for found in mirror.requests.values()) <= 6
            valve.open()
            await asyncio.gather(*map(read_all, handles))
            catch_up(runtime, mirror, watcher)
            assert len(mirror.requests) == changes.ENDED_TOLD_MAX
            assert_knows_all(runtime, mirror, watcher)


async def test_those_that_ended_first_are_told_of_no_more_one_by_one() -> None:
    async with running() as runtime:
        with runtime.watch.subscribe(None) as watcher, runtime.watch.subscribe("") as own:
            mirror = Mirror()
            for _ in range(changes.ENDED_TOLD_MAX + 10):
                await answer(runtime, PROMPT)
                catch_up(runtime, mirror, watcher)
                assert len(mirror.requests) <= changes.ENDED_TOLD_MAX
            assert_knows_all(runtime, mirror, watcher)
            assert own._keys == set(mirror.requests)
            assert runtime.watch._last_s == {}


async def test_a_reader_that_stands_still_runs_no_more_and_has_rows_of_its_own() -> None:
    async with running() as runtime:
        with runtime.watch.subscribe(None) as watcher:
            slow = ask(runtime, PROMPT, params(1800))
            await eventually(lambda: str(slow.state) == "STALLED" and "PAUSED" in runtime.inspector.counts())
            mirror = Mirror()
            catch_up(runtime, mirror, watcher)
            assert runtime.watch._requests.num_running == runtime.watch._requests.num_waiting == 0
            assert [found[0] for found in mirror.requests.values()] == ["PAUSED"]
            assert mirror.machines["Stream"][1] == {("OPEN", "Output", "STALLED"): 1}
            runtime.cancel(slow.stream_id, Cause.CLIENT)
            await read_all(slow)


async def test_one_that_watches_one_key_only_is_told_the_progress_of_no_other() -> None:
    async with running(FakeDevice(step_s=0.002)) as runtime:
        with runtime.watch.subscribe("alice") as watcher:
            names = ("alice", "bob")
            handles = {name: runtime.add(name, PROMPT, params(200), 0, name) for name in names}
            reading, told = [asyncio.ensure_future(read_all(handle)) for handle in handles.values()], set[str]()
            while not all(task.done() for task in reading):
                await asyncio.sleep(0.002)  # the device's thread needs the interpreter, too
                runtime.watch._tell_all(runtime.watch._frame())
                while (one := take(watcher)) is not None:
                    told |= {key for key, _, _ in one.progress} if isinstance(one, Frame) else set()
            assert all(found.is_well for found in await asyncio.gather(*reading))
            assert told == {f"{handles['alice'].stream_id}.0"}


async def test_tokens_that_come_together_have_taken_a_part_of_the_time_each() -> None:
    async with running() as runtime:
        now_s = [0.0]
        runtime.watch._clock = lambda: now_s[0]
        for _ in range(50):
            now_s[0] += 0.08
            runtime.watch.delivered([Output(0, 0, 0, [65] * 4, "AAAA")])
        found = runtime.watch._inter_token.percentiles_ms(now_s[0])
        assert found is not None
        assert found.p50 == pytest.approx(20, rel=0.03)


async def test_a_first_token_is_timed_once_however_often_its_request_begins_again() -> None:
    async with running(FakeDevice(num_blocks=24), limits=small()) as runtime:
        with runtime.watch.subscribe(None) as watcher:
            mirror = Mirror()
            handles = [ask(runtime, [65 + i] * 9, params(30)) for i in range(6)]
            await asyncio.gather(*map(read_all, handles))
            catch_up(runtime, mirror, watcher)
        rows = mirror.machines["Request"][1]
        assert sum(n for (_, _, to), n in rows.items() if to == "PREEMPTED") > 0, "blocks were too few for all"
        first_tokens = runtime.inspector.first_tokens
        assert sum(count for _, counts in first_tokens._slices for count in counts.values()) == 6


async def test_a_slow_one_is_told_the_last_rates_and_nobody_listens_to_incidents_when_all_have_left() -> None:
    async with running() as runtime:
        with runtime.watch.subscribe(None) as watcher:
            take(watcher)
            await answer(runtime, PROMPT)
            runtime.watch._looked_s = float("-inf")
            runtime.watch._tell_all(runtime.watch._frame())
            await answer(runtime, PROMPT)
            runtime.watch._tell_all(runtime.watch._frame())
            one = take(watcher)
        assert isinstance(one, Frame)
        assert one.rates is not None
        before = len(runtime.incidents._listeners)
        with runtime.watch.subscribe(None):
            assert len(runtime.incidents._listeners) == before + 1
        assert len(runtime.incidents._listeners) == before


async def test_machines_that_are_gone_are_in_no_state_and_a_lost_worker_is_counted() -> None:
    async with running(link=partial(ProcessLink, spec()), restarts=RestartPolicy(3)) as runtime:
        with runtime.watch.subscribe(None) as watcher:
            mirror = Mirror()
            catch_up(runtime, mirror, watcher)
            assert mirror.machines["Process"][0] == {"READY": 1}
            runtime.inject("kill")
            await answer(runtime, PROMPT)
            runtime.watch._looked_s = float("-inf")
            catch_up(runtime, mirror, watcher)
            assert {now.name: now.restarts for now in runtime.watch._actors.values()}["worker-0"] == 1
            await eventually(lambda: not runtime._link.roster.ending)  # type: ignore[attr-defined]
            catch_up(runtime, mirror, watcher)
            assert mirror.machines["Roster"][1] == counted(runtime, Roster.__name__)
            roster = runtime._link.roster  # type: ignore[attr-defined]
            held, roster.worker = roster.worker, None
            catch_up(runtime, mirror, watcher)
            assert mirror.machines["Process"][0] == {}
            roster.worker = held


async def test_an_actor_has_its_states_deadline_and_so_has_a_thread() -> None:
    async with running() as runtime:

        def deadlines() -> dict[str, tuple[str, float | None]]:
            return {now.name: (now.state, now.deadline_s) for now in runtime.overview.now(restarts=0, rung=None)}

        assert deadlines()["tokenizer"] == ("IDLE", None)
        runtime.inject("freeze_actor", actor="tokenizer")
        handle = ask(runtime, "some text")
        await eventually(lambda: deadlines()["tokenizer"] == ("ENCODING", ENCODE_LIMIT_S))
        runtime.inject("thaw_actor", actor="tokenizer")
        await read_all(handle)
