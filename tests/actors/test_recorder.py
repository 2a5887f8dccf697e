"""The flight recorder around real actors: what it records is replayed, and what it writes is worth having."""

from __future__ import annotations

import asyncio
import random
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from novainfer.actors.device.fake import FakeDevice
from novainfer.actors.inspection.recorder import DUMP_INTERVAL_S, FILES_MAX, Recorder
from novainfer.actors.runtime import Runtime
from novainfer.fsm.core.machine import Machine
from novainfer.fsm.messages.errors import InvalidParameter, ModelLoadError, NovaInferError, RecorderUnavailable
from novainfer.fsm.messages.events import Cause, Incident, WorkerReady
from novainfer.fsm.messages.outputs import Delta
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.pooling import KINDS, Pooling, floats_of
from novainfer.fsm.messages.step import StepPlan
from novainfer.fsm.recording.dumpfile import About, decode_dump
from novainfer.fsm.recording.log import Image, Recording
from novainfer.fsm.recording.replay import Replayed, replay
from novainfer.fsm.schedule.planner import Limits
from tests.actors.helpers import WAIT_S, Valve, answer, ask, eventually, params, read_all, running

SMALL = Limits(
    max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk_tokens=16, block_size=4, enable_prefix_caching=True
)


def image_of(recorder: Recorder) -> Image:
    assert recorder.recording is not None, "the recorder gave up"
    return recorder.recording.image()


def read_file(path: Path) -> tuple[Replayed, About]:
    image, about = decode_dump(path.read_bytes())
    return replay(image), about


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*")) if folder.exists() else []


# ---- what is recorded is replayed ------------------------------------------------------------------------------------


async def test_requests_of_every_kind_are_replayed_to_the_same_transitions() -> None:
    recorder = Recorder()
    async with running(limits=SMALL, recorder=recorder) as runtime:
        await answer(runtime, "hello there", params(20))
        await answer(runtime, [65, 66, 67], params(9, n=3, logprobs=2, stop=["QR"]))
        scored = ask(runtime, "s" * 50, params(9, prompt_logprobs=2))
        delta = await scored.read()
        assert isinstance(delta, Delta)
        assert delta.prompt_logprobs is not None
        assert [one.logprob for one in delta.prompt_logprobs] == [0.0] + [-1.0] * 49
        await read_all(scored)
        pooled = ask(runtime, "p" * 50, SamplingParams(pooling=Pooling(kind="mean", normalize=False)))
        delta = await pooled.read()
        assert isinstance(delta, Delta)
        assert floats_of(delta.embedding or b"") == [112.0, 1.0, -56.0, 0.5]
        await read_all(pooled)
        handle = ask(runtime, "x" * 50, params(500))
        await handle.read()
        runtime.cancel(handle.stream_id, Cause.CLIENT)
        await read_all(handle)
        left = ask(runtime, "gone", params(500))
        await left.read()
        runtime.abandon(left.stream_id)
        together = [ask(runtime, "together", params(12, timeout_s=60.0)) for _ in range(6)]
        pushed: list[Delta] = []
        await asyncio.gather(*(handle.forward(lambda delta: not pushed.append(delta)) for handle in together[::2]))
        assert sum(len(delta.token_ids) for delta in pushed) == 36
        await asyncio.gather(*map(read_all, together))
        found = replay(image_of(recorder), check=True)
    assert found.is_same, found.difference
    assert found.violation is None
    assert (found.streams, found.reproduced) == (12, None)
    assert found.finished["FINISHED_LENGTH"] >= 7
    assert found.finished["FINISHED_ABORTED"] == 2


class Client:
    """One reader with a mind of its own."""

    def __init__(self, runtime: Runtime, rng: random.Random, number: int) -> None:
        self.runtime, self.rng, self.number = runtime, rng, number

    async def run(self) -> None:
        rng, runtime = self.rng, self.runtime
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        wish = params(
            rng.randint(1, 24),
            n=rng.choice([1, 1, 2]),
            logprobs=rng.choice([None, None, 1]),
            prompt_logprobs=2 if self.number % 3 == 0 else None,
            timeout_s=rng.choice([None, 0.002, 5]),
            stop=rng.choice([None, ["AB"]]),
        )
        if self.number % 4 == 0:
            wish = SamplingParams(pooling=Pooling(kind=rng.choice(KINDS)), timeout_s=wish.timeout_s)
        prompt = rng.choice(["hello", "x" * rng.randint(1, 40), [65 + self.number]])
        try:
            handle = runtime.add(f"r{self.number}", prompt, wish, self.number)
        except NovaInferError:
            return
        reads, timeouts = 0, rng.randint(1, 40)
        while isinstance(await handle.read(), Delta):
            if self.number % 2:
                await handle.forward(lambda _: rng.random() > 0.2)
            reads += 1
            if reads == timeouts:
                runtime.abandon(handle.stream_id)
                return
            if rng.random() < 0.05:
                runtime.cancel(handle.stream_id, Cause.CLIENT)


async def random_run(seed: int) -> Replayed:
    rng = random.Random(seed)
    rate = rng.choice([0.0, 0.02, 0.1])

    def on_step(plan: StepPlan) -> None:
        if rng.random() < rate:
            raise rng.choice([MemoryError, ValueError])("injected")

    segment_bytes = rng.choice([1500, 1 << 20])
    recorder = Recorder(segment_bytes=segment_bytes, ring_bytes=4 * segment_bytes)
    device = FakeDevice(num_blocks=rng.choice([16, 64, 512]), on_step=on_step)
    queue = (rng.choice([4, 64]), 1 << 20)
    async with running(device, limits=SMALL, recorder=recorder, max_queue=queue) as runtime:
        tasks = [asyncio.create_task(Client(runtime, rng, i).run()) for i in range(rng.randint(1, 16))]
        if rng.random() < 0.3:
            for _ in range(rng.randrange(200)):
                await asyncio.sleep(0)
        else:
            await asyncio.wait(tasks)
        found = replay(image_of(recorder))
        await asyncio.wait(tasks)
    return found


async def assert_replayed(seeds: range) -> int:
    segments = 0
    for seed in seeds:
        found = await random_run(seed)
        assert found.is_same, f"run {seed}: {found.difference}"
        segments += found.segments
    return segments


@pytest.mark.slow
async def test_random_runs_with_failing_steps_are_replayed_to_the_same_transitions() -> None:
    assert await assert_replayed(range(40)) > 45


@pytest.mark.long
async def test_a_thousand_random_runs_are_replayed_to_the_same_transitions() -> None:
    assert await assert_replayed(range(1000)) > 1100


async def test_a_wrapped_ring_is_bounded_and_still_replayed() -> None:
    recorder = Recorder(segment_bytes=2000, ring_bytes=10_000)
    async with running(FakeDevice(num_blocks=64), limits=SMALL, recorder=recorder) as runtime:
        for _ in range(30):
            await asyncio.gather(*(answer(runtime, "round and round", params(30)) for _ in range(4)))
        recording = recorder.recording
        assert recording is not None
        assert recording.bytes_total > 5 * recording.num_bytes
        assert recording.num_bytes < 40_000  # the ring, and a segment with its snapshot beyond it
        found = replay(image_of(recorder))
    assert found.is_same, found.difference
    assert 2 <= found.segments < recording.snapshots_total


@pytest.mark.parametrize("batch", [1, 32])
async def test_a_token_takes_less_than_64_bytes_prompts_included(batch: int) -> None:
    recorder = Recorder()
    async with running(recorder=recorder) as runtime:
        await asyncio.gather(*(answer(runtime, f"{i}" * 16, params(200)) for i in range(batch)))
        assert recorder.recording is not None
        per_token = len(recorder.recording.log) / (200 * batch)
    assert per_token < (64 if batch == 1 else 16)


# ---- files -----------------------------------------------------------------------------------------------------------


async def test_a_dump_is_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "recordings"
    async with running(recorder=Recorder(folder)) as runtime:
        await answer(runtime, "a secret", params(5))
        first = await runtime.recorder.dump()
        second = await runtime.recorder.dump(tmp_path / "mine.novarec", reason="test")
    assert files_in(folder) == [first]
    assert stat.S_IMODE(first.stat().st_mode) == stat.S_IMODE(second.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert first.name.startswith("novainfer-20")
    assert first.name.endswith("Z-asked.novarec")
    for path in (first, second):
        found, about = read_file(path)
        assert found.is_same
        assert found.tokens == 5
        assert abs(about.created - time.time()) < 3600
    assert about.reason == "test"


def failing(*steps: int, error: type[Exception] = ValueError) -> Callable[[StepPlan], None]:
    """Fails the steps of these numbers, by their order."""
    count = iter(range(1_000_000))

    def on_step(plan: StepPlan) -> None:
        if next(count) in steps:
            raise error("injected")

    return on_step


async def test_each_kind_of_fault_is_dumped_with_its_reason_once_a_minute(tmp_path: Path) -> None:
    async with running(FakeDevice(on_step=failing(3, 5, 9)), recorder=Recorder(tmp_path)) as runtime:
        await answer(runtime, "hello", params(20))
        assert runtime.incidents.counts["exception"] >= 2
        runtime._route("incidents", Incident(kind="oom", message="another kind", action="none"), False)
    path, other = files_in(tmp_path)
    assert other.name.endswith("-oom.novarec")
    assert path.name.endswith("-exception.novarec")
    found, about = read_file(path)
    assert found.is_same
    assert about.reason == "exception"
    assert "injected" in about.message
    assert any("exception" in line for line in found.incidents)


async def test_after_a_minute_the_next_fault_is_dumped_and_the_oldest_files_go(tmp_path: Path) -> None:
    clock = iter(1.8e9 + i for i in range(1000))
    recorder = Recorder(tmp_path, clock=lambda: next(clock))
    (tmp_path / "novainfer-mine.txt").write_text("not one of ours")
    async with running(recorder=recorder) as runtime:
        await answer(runtime, "hello", params(3))
        loop = asyncio.get_running_loop()
        for number in range(FILES_MAX + 3):
            recorder._next_dump_s.clear()  # as if DUMP_INTERVAL_S had passed
            runtime._route("incidents", Incident(kind="oom", message=f"number {number}", action="none"), False)
            await eventually(lambda: recorder._wanted is None)
            assert recorder._next_dump_s["oom"] > loop.time() + DUMP_INTERVAL_S / 2
            await recorder.wait_written()
    kept = [path for path in files_in(tmp_path) if path.suffix == ".novarec"]
    assert len(kept) == FILES_MAX
    messages = [read_file(path)[1].message for path in kept]
    assert messages == [f"number {n}" for n in range(3, FILES_MAX + 3)]
    assert (tmp_path / "novainfer-mine.txt").exists()


async def test_what_happens_every_minute_does_not_push_out_what_happened_once(tmp_path: Path) -> None:
    for stamp in range(FILES_MAX + 3):  # as an earlier version left them: more than are kept
        (tmp_path / f"novainfer-20260101T0000{stamp:02d}000Z-died.novarec").touch()
    recorder = Recorder(tmp_path)
    async with running(recorder=recorder):
        once = await recorder.dump(reason="once")
        for _ in range(FILES_MAX):
            latest = await recorder.dump(reason="died")
    kept = files_in(tmp_path)
    assert len(kept) == FILES_MAX
    assert {once, latest} <= set(kept)


async def test_dumps_at_one_time_leave_as_many_files_as_are_kept(tmp_path: Path) -> None:
    numbers = iter(range(100))
    recorder = Recorder(tmp_path, clock=lambda: float(next(numbers)))
    async with running(recorder=recorder):
        await asyncio.gather(*(recorder.dump() for _ in range(FILES_MAX + 8)))
    assert len(files_in(tmp_path)) == FILES_MAX


async def test_starts_that_fail_write_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeDevice):
        def load(self, precision: str | None = None) -> WorkerReady:
            raise RuntimeError("a bad flag")

    for _ in range(3):
        with pytest.raises(ModelLoadError, match="a bad flag"):
            async with running(Broken(), recorder=Recorder(tmp_path)):
                pass
    assert files_in(tmp_path) == []
    assert caplog.messages == []  # `start` has said it


@pytest.mark.parametrize("kind", ["ladder", "stall"])
async def test_what_is_no_fault_is_not_dumped(tmp_path: Path, kind: str) -> None:
    async with running(recorder=Recorder(tmp_path)) as runtime:
        runtime._route("incidents", Incident(kind=kind, message="as designed", action="none"), False)
    assert files_in(tmp_path) == []


async def test_without_a_folder_nothing_is_written_that_nobody_asked_for(tmp_path: Path) -> None:
    recorder = Recorder()
    async with running(FakeDevice(on_step=failing(3)), recorder=recorder) as runtime:
        await answer(runtime, "hello", params(20))
        with pytest.raises(RecorderUnavailable, match="no folder"):
            await recorder.dump()
        assert (await recorder.dump(tmp_path / "asked.novarec")).exists()


async def test_a_dump_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    async with running(recorder=Recorder()) as runtime:
        with pytest.raises(RecorderUnavailable, match="No such file or directory"):
            await runtime.recorder.dump(tmp_path / "none" / "x.novarec")
        with pytest.raises(RecorderUnavailable, match="directory"):
            await runtime.recorder.dump(tmp_path)
    assert files_in(tmp_path) == []


async def test_a_folder_that_cannot_be_made_is_logged_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    async with running(FakeDevice(on_step=failing(3)), recorder=Recorder(tmp_path / "file" / "folder")) as runtime:
        assert (await answer(runtime, "hello", params(20))).is_well
    assert any("cannot write" in message for message in caplog.messages)


def test_a_folder_that_cannot_be_written_is_found_before_anything_goes_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidParameter, match=r"recorder_dir .*folder cannot be written: Not a directory") as caught:
        Recorder(tmp_path / "file" / "folder").check_folder()
    assert caught.value.param == "recorder_dir"
    Recorder(tmp_path / "new" / "folder").check_folder()
    assert files_in(tmp_path / "new" / "folder") == []
    Recorder(tmp_path / "file" / "folder", is_enabled=False).check_folder()


# ---- when an actor dies ----------------------------------------------------------------------------------------------


async def test_an_actor_that_dies_leaves_a_file_in_which_it_dies_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle, asyncio_said = Machine.handle, []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: asyncio_said.append(context["message"]))

    def buggy(machine: Machine, event: Any) -> Any:
        if type(event).__name__ == "PauseRequest" or (type(event).__name__ == "CancelRequest"):
            raise RuntimeError("a bug")
        return handle(machine, event)

    monkeypatch.setattr(Machine, "handle", buggy)
    valve = Valve()
    async with running(FakeDevice(on_step=valve), recorder=Recorder(tmp_path)) as runtime:
        stream = ask(runtime, "hello", params(20))
        await valve.step_arrived()
        runtime.cancel(stream.stream_id, Cause.CLIENT)
        assert (await read_all(stream)).end.code == "engine_dead"
    (path,) = files_in(tmp_path)
    found, about = read_file(path)
    assert path.name.endswith("-died.novarec")
    assert about.message == "the scheduler died: RuntimeError: a bug"
    assert found.reproduced == "scheduler in FULL when CancelRequest came: RuntimeError: a bug"
    assert found.is_same
    monkeypatch.undo()
    fixed, _ = read_file(path)
    assert fixed.is_gone
    assert fixed.difference is None
    assert asyncio_said == ["novainfer: the scheduler died: RuntimeError: a bug"]


async def test_an_engine_that_gives_up_leaves_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeDevice):
        def reclaim(self) -> None:
            raise RuntimeError("the context is poisoned")

    device = Broken(on_step=failing(2, error=MemoryError))
    async with running(device, recorder=Recorder(tmp_path)) as runtime:
        assert (await answer(runtime, "hello", params(20))).end.code == "engine_dead"
    reasons = [read_file(path)[1].reason for path in files_in(tmp_path)]
    assert {"gave_up", "failed"} & set(reasons)
    found, _ = read_file(files_in(tmp_path)[-1])
    assert found.is_same
    assert found.states["worker"] == "FAILED"


async def test_a_recorder_that_cannot_go_on_is_off_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(recorder=Recorder()) as runtime:
        await answer(runtime, "before", params(3))
        monkeypatch.setattr(Recording, "launched", lambda self, plan: 1 / 0)
        assert (await answer(runtime, "after", params(30))).is_well
        assert not runtime.recorder.is_on
        monkeypatch.undo()
        assert (await answer(runtime, "later", params(3))).is_well
        with pytest.raises(RecorderUnavailable, match="off"):
            await runtime.recorder.dump(Path("nowhere"))
    assert sum("the flight recorder is off" in message for message in caplog.messages) == 1


async def test_without_a_recorder_nothing_is_recorded() -> None:
    async with running() as runtime:
        async with asyncio.timeout(WAIT_S):
            await answer(runtime, "hello", params(5))
        assert not runtime.recorder.is_on
        assert not runtime.recorder.log
        with pytest.raises(RecorderUnavailable):
            await runtime.recorder.dump(Path("nowhere"))
