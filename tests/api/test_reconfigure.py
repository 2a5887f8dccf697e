"""An engine becomes another one under its requests: none is lost, and what cannot be leaves it as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import pytest

from novainfer import (
    ContextLengthExceeded,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineDead,
    EngineDraining,
    InvalidParameter,
    ModelInfo,
    ReconfigureFailed,
    ReconfigureInProgress,
)
from novainfer.actors.device.fake import ByteTokenizer, FakeDevice
from novainfer.fsm.messages.mode import CHECKPOINT, INT8
from novainfer.fsm.messages.step import StepPlan
from novainfer.testing import replay_recording
from tests.actors.devices import spec
from tests.api.helpers import WAIT_S, Valve, ask, blocks_back, eventually, expected, fake_engine, greedy

BLOCKS = 256


@asynccontextmanager
async def engine_of(worker: str = "thread", **config: Any) -> AsyncIterator[Engine]:
    """A started engine of `BLOCKS` blocks that finds room for twice as many."""
    sizes = {"num_blocks": BLOCKS, "num_blocks_max": 2 * BLOCKS}
    if worker == "process":
        settings = EngineConfig(max_num_seqs=16, worker="process", **config)
        engine = Engine(settings, device=spec("fake", **sizes), tokenizer=ByteTokenizer())
    else:
        engine = fake_engine(FakeDevice(**sizes), **config)
    async with asyncio.timeout(WAIT_S):
        await engine.start()
    try:
        yield engine
    finally:
        async with asyncio.timeout(WAIT_S):
            await engine.aclose()


async def read(engine: Engine, prompt: str, num_tokens: int, seen: list[int] | None = None) -> list[int]:
    found: list[int] = []
    async for delta in engine.generate(prompt, greedy(num_tokens)):
        found += delta.token_ids
        if seen is not None:
            seen += delta.token_ids
    return found


def blocks_of(engine: Engine) -> tuple[int, int]:
    return engine.model_info.num_kv_blocks, engine.statistics().kv_blocks_total


@pytest.mark.parametrize(
    ("wanted", "param", "message"),
    [
        ({}, "num_kv_blocks", "num_kv_blocks or precision must be given"),
        ({"num_kv_blocks": 127}, "num_kv_blocks", "must be at least 128, not 127: a request of 2048 tokens"),
        ({"num_kv_blocks": 0}, "num_kv_blocks", "must be at least 128, not 0"),
        ({"num_kv_blocks": -(2**70)}, "num_kv_blocks", "must be at least 128, not -"),
        ({"num_kv_blocks": 2**31}, "num_kv_blocks", "must be at most 2147483647, not 2147483648"),
        ({"num_kv_blocks": True}, "num_kv_blocks", "must be an integer, not True"),
        ({"num_kv_blocks": "300"}, "num_kv_blocks", "must be an integer, not '300'"),
        ({"num_kv_blocks": 300.0}, "num_kv_blocks", "must be an integer, not 300.0"),
        ({"precision": "int3"}, "precision", "precision must be 'checkpoint' or 'int8', not 'int3'"),
        ({"precision": ""}, "precision", "precision must be 'checkpoint' or 'int8', not ''"),
        ({"precision": ["int8"]}, "precision", "precision must be 'checkpoint' or 'int8', not"),
        ({"num_kv_blocks": 300, "precision": 8}, "precision", "precision must be"),
    ],
)
async def test_what_no_engine_could_become_is_refused_at_once(wanted: dict[str, Any], param: str, message: str) -> None:
    async with engine_of() as engine:
        with pytest.raises(InvalidParameter, match=message) as error:
            await engine.reconfigure(**wanted)
        assert error.value.param == param
        assert engine.statistics().state == "IDLE"


async def test_before_the_start_and_after_the_end_there_is_nothing_to_reconfigure() -> None:
    engine = fake_engine()
    with pytest.raises(EngineClosed):
        await engine.reconfigure(num_kv_blocks=300)
    async with engine:
        await engine.drain(0.0)
        with pytest.raises(EngineDraining):
            await engine.reconfigure(num_kv_blocks=engine.model_info.num_kv_blocks)
    for num_blocks in (300, engine.model_info.num_kv_blocks):
        with pytest.raises(EngineClosed):
            await engine.reconfigure(num_kv_blocks=num_blocks)


async def test_integers_and_strings_of_other_kinds_are_as_good_and_can_be_recorded(tmp_path: Path) -> None:
    blocks = IntEnum("blocks", {"MORE": 300})
    precisions = StrEnum("precisions", {"LESS": INT8})
    async with engine_of() as engine:
        info = await engine.reconfigure(num_kv_blocks=blocks.MORE, precision=precisions.LESS)
        assert (info.num_kv_blocks, info.modes[0].precision) == (300, INT8)
        path = await engine.dump_recorder(tmp_path / "of-kinds")
    assert replay_recording(path.read_bytes()).is_same


async def test_one_that_has_ended_meanwhile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model's files are looked at, another one may come and go: both are told what there is then."""
    found, looked = threading.Event(), threading.Event()

    def look(_: EngineConfig) -> None:
        looked.set()
        assert found.wait(WAIT_S)

    monkeypatch.setattr("novainfer.engine.check_model", look)
    async with engine_of() as engine:
        engine._loads["has_model"] = True
        first = asyncio.create_task(engine.reconfigure(num_kv_blocks=BLOCKS, precision=INT8))
        await eventually(looked.is_set)
        await engine.reconfigure(num_kv_blocks=300)
        found.set()
        info = await first
        assert (info.num_kv_blocks, info.modes[0].precision) == (BLOCKS, INT8)


async def test_the_longest_request_is_that_of_the_start() -> None:
    """A device of one's own may begin with fewer blocks than its longest context needs."""
    async with fake_engine(FakeDevice(num_blocks=10)) as engine:
        longest = engine.model_info.max_model_len
        assert longest == 160
        for num_blocks in (20, 10):
            info = await engine.reconfigure(num_kv_blocks=num_blocks)
            assert (info.num_kv_blocks, info.max_model_len) == (num_blocks, longest)
            with pytest.raises(ContextLengthExceeded, match=f"maximum context length is {longest} tokens"):
                await ask(engine, [5] * longest, greedy(1))
            assert len((await ask(engine, [5] * (longest - 1), greedy(1))).token_ids()) == 1


async def test_what_the_engine_is_already_costs_nothing() -> None:
    async with engine_of() as engine:
        before = engine._runtime._worker.epoch
        info = engine.model_info
        assert await engine.reconfigure(num_kv_blocks=BLOCKS, precision=CHECKPOINT) is info
        assert engine._runtime._worker.epoch == before
        assert (await engine.reconfigure(num_kv_blocks=BLOCKS, precision=INT8)).num_kv_blocks == BLOCKS
        assert engine._runtime._worker.epoch == before + 1


@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_requests_go_on_in_more_blocks_and_in_fewer(worker: str) -> None:
    async with engine_of(worker) as engine:
        created = engine.model_info.created
        seen: list[int] = []
        streams = asyncio.gather(*(read(engine, f"stream {at}", 600, seen) for at in range(12)))
        for at, num_blocks in enumerate((300, 128, 512)):
            await eventually(lambda at=at: len(seen) > (at + 1) * 1500)
            info = await engine.reconfigure(num_kv_blocks=num_blocks)
            assert isinstance(info, ModelInfo)
            assert info is engine.model_info
            assert (info.num_kv_blocks, info.created) == (num_blocks, created)
            await eventually(lambda num_blocks=num_blocks: blocks_of(engine) == (num_blocks, num_blocks))
        assert await streams == [expected(f"stream {at}", 600) for at in range(12)]
        assert len(seen) == 12 * 600, "none was given twice"
        found = engine.statistics()
        assert (found.worker_losses, found.step_failures, engine.errors()) == (0, 0, [])
        await blocks_back(engine)


@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_requests_go_on_in_another_precision_and_back(worker: str) -> None:
    async with engine_of(worker) as engine:
        seen: list[int] = []
        streams = asyncio.gather(*(read(engine, f"stream {at}", 400, seen) for at in range(12)))
        pids = {engine._runtime._link.pid}
        for at, precision in enumerate((INT8, CHECKPOINT)):
            await eventually(lambda at=at: len(seen) > (at + 1) * 1500)
            info = await engine.reconfigure(precision=precision, num_kv_blocks=200 + at)
            assert (info.modes[0].precision, info.num_kv_blocks) == (precision, 200 + at)
            pids.add(engine._runtime._link.pid)
        assert await streams == [expected(f"stream {at}", 400) for at in range(12)]
        assert len(pids) == (3 if worker == "process" else 1), "a process of its own has one precision"
        assert (engine.statistics().worker_losses, engine.errors()) == (0, [])
        await blocks_back(engine)


async def test_a_process_that_is_never_restarted_can_be_replaced_on_purpose() -> None:
    async with engine_of("process", max_restarts=0) as engine:
        stream = asyncio.create_task(read(engine, "never", 800))
        await eventually(lambda: engine.statistics().num_running == 1)
        assert (await engine.reconfigure(precision=INT8)).modes[0].precision == INT8
        assert await stream == expected("never", 800)
        os.kill(engine._runtime._link.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="the worker was lost"):
            await read(engine, "lost", 800)


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("precision", [None, INT8])
async def test_more_blocks_than_there_is_room_for_leave_all_as_it_was(worker: str, precision: str | None) -> None:
    async with engine_of(worker) as engine:
        info = engine.model_info
        seen: list[int] = []
        streams = asyncio.gather(*(read(engine, f"stream {at}", 400, seen) for at in range(6)))
        await eventually(lambda: len(seen) > 500)
        with pytest.raises(ReconfigureFailed, match=f"goes on as before: .*at most {2 * BLOCKS} blocks fit") as error:
            await engine.reconfigure(num_kv_blocks=2 * BLOCKS + 1, precision=precision)
        assert error.value.status == 409
        assert engine.model_info == info
        assert await streams == [expected(f"stream {at}", 400) for at in range(6)]
        assert blocks_of(engine) == (BLOCKS, BLOCKS)
        assert (await engine.reconfigure(num_kv_blocks=2 * BLOCKS)).num_kv_blocks == 2 * BLOCKS
        await blocks_back(engine)


async def test_one_at_a_time() -> None:
    valve = Valve()
    async with fake_engine(FakeDevice(num_blocks=BLOCKS, on_step=valve)) as engine:
        stream = asyncio.create_task(read(engine, "held", 4))
        await valve.step_arrived()
        first = asyncio.create_task(engine.reconfigure(num_kv_blocks=300))
        await asyncio.sleep(0)
        for wanted in ({"num_kv_blocks": 400}, {"num_kv_blocks": BLOCKS}, {"precision": INT8}):
            with pytest.raises(ReconfigureInProgress, match="try again when it has ended") as error:
                await engine.reconfigure(**wanted)  # type: ignore[arg-type]
            assert error.value.status == 409
        assert not first.done()
        valve.open()
        assert (await first).num_kv_blocks == 300
        assert await stream == expected("held", 4)
        assert (await engine.reconfigure(num_kv_blocks=400)).num_kv_blocks == 400


async def test_a_caller_that_is_cancelled_leaves_it_going_on() -> None:
    valve = Valve()
    async with fake_engine(FakeDevice(num_blocks=BLOCKS, on_step=valve)) as engine:
        stream = asyncio.create_task(read(engine, "held", 4))
        await valve.step_arrived()
        caller = asyncio.create_task(engine.reconfigure(num_kv_blocks=300))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        with pytest.raises(ReconfigureInProgress):
            await engine.reconfigure(num_kv_blocks=400)
        valve.open()
        assert await stream == expected("held", 4)
        await eventually(lambda: blocks_of(engine) == (300, 300))


async def test_requests_may_be_cancelled_and_may_come_meanwhile() -> None:
    class Slow(FakeDevice):
        def fit(self, num_blocks: int | None = None, *, is_new: bool = False) -> dict[str, Any]:
            if is_new:
                fitting.set()
                assert asyncio.run_coroutine_threadsafe(may_fit.wait(), loop).result(WAIT_S)
            return super().fit(num_blocks, is_new=is_new)

    fitting, may_fit, loop = _Flag(), asyncio.Event(), asyncio.get_running_loop()
    async with fake_engine(Slow(num_blocks=BLOCKS)) as engine:
        seen: list[int] = []
        streams = [asyncio.create_task(read(engine, f"stream {at}", 900, seen)) for at in range(4)]
        await eventually(lambda: len(seen) > 400)
        caller = asyncio.create_task(engine.reconfigure(num_kv_blocks=300))
        await eventually(fitting.is_set)
        assert engine.statistics().state == "RECONFIGURING"
        health = engine.health()
        assert (health.is_live, health.is_ready, health.state) == (True, True, "RECONFIGURING")
        assert {record.reason for record in engine.requests() if record.state == "PREEMPTED"} == {"reconfiguring"}
        streams[1].cancel()
        late = asyncio.create_task(read(engine, "late", 30))
        await eventually(lambda: len([r for r in engine.requests() if r.state in ("WAITING", "PREEMPTED")]) == 4)
        may_fit.set()
        assert (await caller).num_kv_blocks == 300
        assert await late == expected("late", 30)
        for at in (0, 2, 3):
            assert await streams[at] == expected(f"stream {at}", 900)
        await blocks_back(engine)


class _Flag:
    """Set in the device's thread, looked at by the loop."""

    def __init__(self) -> None:
        self.value = False

    def set(self) -> None:
        self.value = True

    def is_set(self) -> bool:
        return self.value


@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_an_engine_that_is_closed_meanwhile_says_so(worker: str) -> None:
    async with engine_of(worker) as engine:
        seen: list[int] = []
        stream = asyncio.create_task(read(engine, "closed", 1500, seen))
        await eventually(lambda: len(seen) > 100)
        caller = asyncio.create_task(engine.reconfigure(num_kv_blocks=300, precision=INT8))
        await eventually(lambda: engine.statistics().state == "RECONFIGURING")
        await engine.aclose()
        with pytest.raises(EngineClosed, match="closed meanwhile"):
            await caller
        with pytest.raises(EngineDraining):
            await stream


@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_an_engine_that_drains_meanwhile_ends_both(worker: str) -> None:
    async with engine_of(worker) as engine:
        seen: list[int] = []
        stream = asyncio.create_task(read(engine, "drained", 800, seen))
        await eventually(lambda: len(seen) > 100)
        caller = asyncio.create_task(engine.reconfigure(num_kv_blocks=300))
        await asyncio.sleep(0)
        await engine.drain(WAIT_S)
        assert await stream == expected("drained", 800)
        assert (await caller).num_kv_blocks == 300
        with pytest.raises(EngineDraining, match="is not reconfigured any more"):
            await engine.reconfigure(num_kv_blocks=400)


async def test_an_actor_that_dies_meanwhile_leaves_no_caller_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_of() as engine:
        runtime = engine._runtime

        def die(_: object) -> list[object]:
            raise RuntimeError("a bug")

        monkeypatch.setattr(runtime._engine, "handle", die)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        with pytest.raises(EngineDead, match="a bug"):
            async with asyncio.timeout(WAIT_S):
                await engine.reconfigure(num_kv_blocks=300)


async def test_a_device_that_is_neither_any_more_ends_the_engine_with_its_reason() -> None:
    class Broken(FakeDevice):
        def load(self, precision: str | None = None) -> dict[str, Any]:
            if self.is_up:
                raise RuntimeError("the disk is gone")
            self.is_up = True
            return super().load(precision)

        is_up = False

    async with fake_engine(Broken(num_blocks=BLOCKS)) as engine:
        stream = asyncio.create_task(read(engine, "broken", 1500))
        await eventually(lambda: engine.statistics().num_running == 1)
        with pytest.raises(EngineDead, match="the disk is gone"):
            await engine.reconfigure(precision=INT8)
        with pytest.raises(EngineDead, match="the disk is gone"):
            await stream


async def test_a_worker_that_is_killed_meanwhile_comes_back_as_it_was() -> None:
    async with engine_of("process") as engine:
        info = engine.model_info
        seen: list[int] = []
        streams = asyncio.gather(*(read(engine, f"stream {at}", 900, seen) for at in range(6)))
        await eventually(lambda: len(seen) > 500)
        old = engine._runtime._link.pid
        caller = asyncio.create_task(engine.reconfigure(precision=INT8))
        await eventually(lambda: engine._runtime._link.pid not in (0, old))
        os.kill(engine._runtime._link.pid, signal.SIGKILL)
        with pytest.raises(ReconfigureFailed, match="goes on as before: the worker was lost"):
            await caller
        assert engine.model_info == info
        assert await streams == [expected(f"stream {at}", 900) for at in range(6)]
        assert (engine.statistics().mode.precision, blocks_of(engine)) == (CHECKPOINT, (BLOCKS, BLOCKS))
        assert engine.statistics().worker_losses == 1
        assert (await engine.reconfigure(precision=INT8)).modes[0].precision == INT8


async def test_a_spare_takes_over_with_as_many_blocks_and_in_the_same_precision() -> None:
    async with engine_of("process", warm_spare=True) as engine:
        roster = engine._runtime._link.roster  # type: ignore[attr-defined]
        for wanted in ({"num_kv_blocks": 300}, {"precision": INT8}, {"num_kv_blocks": 200}):
            await engine.reconfigure(**wanted)  # type: ignore[arg-type]
            await eventually(lambda: roster.spare is not None and "Load" in roster.spare.ahead)
            spare, info = roster.spare.pid, engine.model_info
            seen: list[int] = []
            stream = asyncio.create_task(read(engine, "spare", 900, seen))
            await eventually(lambda seen=seen: len(seen) > 100)
            os.kill(engine._runtime._link.pid, signal.SIGKILL)
            assert await stream == expected("spare", 900)
            assert engine._runtime._link.pid == spare
            assert engine.model_info == info
            assert engine.statistics().kv_blocks_total == info.num_kv_blocks
            assert engine.statistics().mode == info.modes[0]
        assert {error.kind for error in engine.errors()} == {"lost"}


async def test_a_recording_of_it_runs_again(tmp_path: Path) -> None:
    async with engine_of() as engine:
        streams = asyncio.gather(*(read(engine, f"stream {at}", 200) for at in range(6)))
        await eventually(lambda: engine.statistics().num_running == 6)
        await engine.reconfigure(num_kv_blocks=300)
        with pytest.raises(ReconfigureFailed):
            await engine.reconfigure(num_kv_blocks=2 * BLOCKS + 1)
        await engine.reconfigure(precision=INT8)
        await streams
        assert await ask(engine, "after", greedy(5))
        path = await engine.dump_recorder(tmp_path / "reconfigured.novarec")
    replayed = replay_recording(path.read_bytes())
    assert replayed.is_same, replayed


async def test_a_prefix_that_was_cached_before_is_not_taken_for_one_after() -> None:
    plans: list[StepPlan] = []
    async with fake_engine(FakeDevice(num_blocks=BLOCKS, on_step=plans.append)) as engine:
        prompt = "the same words again and again " * 4
        await ask(engine, prompt, greedy(4))
        again = await ask(engine, prompt, greedy(4))
        assert again.last.num_cached_tokens > 0
        await engine.reconfigure(num_kv_blocks=300)
        fresh = await ask(engine, prompt, greedy(4))
        assert fresh.last.num_cached_tokens == 0
