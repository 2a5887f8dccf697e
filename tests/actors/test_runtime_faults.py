"""Whatever fails, each stream ends exactly once, with a reason, and those not at fault get their exact tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from novainfer.actors.device.fake import ByteTokenizer, FakeDevice
from novainfer.actors.runtime import Runtime
from novainfer.fsm.messages.errors import EngineClosed, ModelLoadError
from novainfer.fsm.messages.step import StepPlan
from tests.actors.helpers import (
    Read,
    Valve,
    all_blocks_back,
    answer,
    ask,
    eventually,
    expected,
    make_runtime,
    params,
    read_all,
    running,
)
from tests.leftovers import other_tasks

NO_CREDIT_LIMIT = (1 << 17, 1 << 20)
BAD = 200  # a token of the offender's prompt only: FakeDevice answers printable bytes


class Heard(list[str]):
    """What the loop's exception handler was told."""

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.append(context["message"])


@pytest.fixture
async def heard() -> Heard:
    """The loop's exception handler, listening."""
    listener = Heard()
    asyncio.get_running_loop().set_exception_handler(listener)
    return listener


def fail_on(token_id: int, error: BaseException) -> Callable[[StepPlan], None]:
    """A device that cannot compute this token."""

    def on_step(plan: StepPlan) -> None:
        if token_id in plan.input_ids:
            raise error

    return on_step


async def test_a_step_that_raises_ends_only_the_offender() -> None:
    async with running(FakeDevice(on_step=fail_on(BAD, ValueError("bad luck")))) as runtime:
        prompts = [[65 + i] * 5 for i in range(20)]
        bad = asyncio.create_task(answer(runtime, [BAD] * 4))
        found = await asyncio.gather(*(answer(runtime, prompt, params(20)) for prompt in prompts))
        assert [f.token_ids for f in found] == [expected(prompt, 20) for prompt in prompts]
        end = (await bad).end
        assert end.code == "step_failed"
        assert end.error == "the step that computed this request failed: ValueError: bad luck"
        assert (await answer(runtime, "after")).token_ids == expected("after", 8)
        await all_blocks_back(runtime)


async def test_running_out_of_memory_takes_the_same_road() -> None:
    async with running(FakeDevice(on_step=fail_on(BAD, MemoryError("too little")))) as runtime:
        prompts = [[65 + i] * 40 for i in range(10)]
        bad = asyncio.create_task(answer(runtime, [BAD] * 300))
        found = await asyncio.gather(*(answer(runtime, prompt, params(20)) for prompt in prompts))
        assert [f.token_ids for f in found] == [expected(prompt, 20) for prompt in prompts]
        end = (await bad).end
        assert end.code == "step_failed"
        assert end.error is not None
        assert "ran out of memory" in end.error
        await all_blocks_back(runtime)


async def test_a_short_lack_of_memory_costs_nobody_anything() -> None:
    failures = iter([MemoryError("one"), MemoryError("two")])

    def on_step(plan: StepPlan) -> None:
        if len(plan.slots) > 3 and (error := next(failures, None)) is not None:
            raise error

    async with running(FakeDevice(on_step=on_step)) as runtime:
        prompts = [[65 + i] * 30 for i in range(12)]
        found = await asyncio.gather(*(answer(runtime, prompt, params(20)) for prompt in prompts))
        assert [f.token_ids for f in found] == [expected(prompt, 20) for prompt in prompts]
        statistics = runtime.scheduler_statistics()
        assert statistics is not None
        assert statistics.step_failures_total == 2
        assert statistics.rollbacks_total == {"oom": 2}
        await all_blocks_back(runtime)


async def test_a_device_that_fails_every_step_ends_every_stream_once() -> None:
    def on_step(plan: StepPlan) -> None:
        raise RuntimeError("dead board")

    async with running(FakeDevice(on_step=on_step)) as runtime:
        found = await asyncio.gather(*(answer(runtime, [65 + i]) for i in range(8)))
        assert {f.end.code for f in found} == {"step_failed"}
        assert [f.token_ids for f in found] == [[]] * 8
        await all_blocks_back(runtime)


def break_on(machine: Any, event_name: str, *, also_stop: bool = False) -> None:
    """Plant a bug: `machine` raises at the first event of this name (and when it should stop, if `also_stop`)."""
    handle = machine.handle

    def broken(event: Any) -> Any:
        name = type(event).__name__
        if name == event_name or (also_stop and name == "Stop"):
            raise KeyError("a planted bug")
        return handle(event)

    machine.__class__ = type("Broken", (type(machine),), {"__slots__": (), "handle": lambda self, event: broken(event)})


def machine_of(runtime: Runtime, name: str) -> Any:
    return runtime._actors[name].machine


@pytest.mark.parametrize("also_stop", [False, True], ids=["", "and cannot even be stopped"])
@pytest.mark.parametrize(
    ("actor", "event"),
    [
        ("engine", "StepDone"),
        ("engine", "Batch"),
        ("scheduler", "MakeBatch"),
        ("worker", "Launch"),
        ("gate", "Departed"),
    ],
)
async def test_an_actor_that_raises_ends_each_stream_once_and_the_engine_says_so(
    heard: Heard, actor: str, event: str, also_stop: bool
) -> None:
    device = FakeDevice()
    runtime = make_runtime(device)
    await runtime.start()
    assert (await answer(runtime, "all is well")).is_well
    break_on(machine_of(runtime, actor), event, also_stop=also_stop)
    handles = [ask(runtime, [65 + i], params(50)) for i in range(10)]
    found = await asyncio.gather(*(read_all(handle) for handle in handles))
    assert [f.end.code for f in found] == ["engine_dead"] * 10
    assert {f.end.error for f in found} == {f"the {actor} died: KeyError: 'a planted bug'"}
    assert runtime.error == f"the {actor} died: KeyError: 'a planted bug'"
    await eventually(lambda: other_tasks() == set())
    assert not runtime.is_ready
    with pytest.raises(EngineClosed, match="a planted bug"):
        ask(runtime, "anyone there?")
    await runtime.drain(5.0)
    await runtime.aclose()
    assert heard[0] == f"novainfer: {runtime.error}"
    if not (also_stop and actor == "worker"):
        assert device.is_closed


async def test_a_stream_machine_that_raises_is_an_actor_that_raises(heard: Heard) -> None:
    async with running() as runtime:
        handle = ask(runtime, "hello")
        break_on(handle._stream, "Output")
        other = ask(runtime, "world")
        assert (await read_all(other)).end.code == "engine_dead"
        assert (await read_all(handle)).end.code == "engine_dead"


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()], ids=repr)
async def test_a_device_thread_that_is_killed_ends_each_stream_once(heard: Heard, error: BaseException) -> None:
    async with running(FakeDevice(on_step=fail_on(BAD, error))) as runtime:
        good = asyncio.create_task(answer(runtime, [65], params(1000)))
        await asyncio.sleep(0)
        found = await answer(runtime, [BAD])
        assert found.end.code == "engine_dead"
        assert found.end.error is not None
        assert found.end.error.startswith("the device died")
        assert (await good).end.code == "engine_dead"
        assert len(heard) == 1


async def test_a_device_thread_killed_while_it_loads_ends_the_start(heard: Heard) -> None:
    class Killed(FakeDevice):
        def load(self, precision: str | None = None) -> dict[str, Any]:
            raise SystemExit("no more")

    runtime = make_runtime(Killed())
    with pytest.raises(ModelLoadError, match="no more"):
        await runtime.start()
    assert other_tasks() == set()


async def test_a_tokenizer_with_a_bug_ends_the_engine_aloud(heard: Heard) -> None:
    class Broken(ByteTokenizer):
        def encode_batch(self, prompts: Any) -> Any:
            raise ZeroDivisionError("half a token")

    async with running(tokenizer=Broken()) as runtime:
        found = await answer(runtime, "hello")
        assert found.end.error == "the tokenizer thread died: ZeroDivisionError: half a token"
        assert heard == [f"novainfer: {runtime.error}"]


async def test_a_prompt_that_cannot_be_tokenised_spoils_only_itself() -> None:
    class Picky(ByteTokenizer):
        def encode_batch(self, prompts: Any) -> Any:
            return ["no x, please" if p == "x" else list(p.encode()) for p in prompts]

    async with running(tokenizer=Picky()) as runtime:
        good, bad = await asyncio.gather(answer(runtime, "hello"), answer(runtime, "x"))
        assert good.token_ids == expected("hello", 8)
        assert (bad.end.error, bad.end.code, bad.end.param) == ("no x, please", "invalid_value", "prompt")
        assert runtime.num_queued == 0


async def test_ids_beyond_the_models_vocabulary_never_reach_the_device() -> None:
    """A tokenizer may know more tokens than the model has rows: the device would read beyond its embedding."""

    class Foreign(ByteTokenizer):
        def encode_batch(self, prompts: Any) -> Any:
            return [[*prompt.encode(), 257 if "!" in prompt else 32] for prompt in prompts]

        def vocabulary(self) -> Any:
            found = super().vocabulary()
            return type(found).build([*found.token_bytes, b"extra"], found.special_ids)

    valve = Valve(is_open=True)
    async with running(FakeDevice(on_step=valve), tokenizer=Foreign()) as runtime:
        good, bad = await asyncio.gather(answer(runtime, "hello"), answer(runtime, "hello!"))
        assert good.is_well
        assert bad.end.code == "invalid_value"
        assert bad.end.error is not None
        assert "257" in bad.end.error
        assert all(max(plan.input_ids, default=0) < 257 for plan in valve.plans)


async def test_a_worker_that_cannot_recover_its_memory_ends_the_engine_with_its_reason() -> None:
    class Stuck(FakeDevice):
        def reclaim(self) -> None:
            raise RuntimeError("the context is poisoned")

    async with running(Stuck(on_step=fail_on(BAD, MemoryError("short")))) as runtime:
        one, two = await asyncio.gather(answer(runtime, [BAD]), answer(runtime, [65], params(1000)))
        for found in (one, two):
            assert isinstance(found, Read)
            assert found.end.code == "engine_dead"
            assert found.end.error == "the worker was lost: RuntimeError: the context is poisoned"
        assert runtime.error == "the worker was lost: RuntimeError: the context is poisoned"


@pytest.mark.slow
async def test_more_choices_than_a_mailbox_holds_do_not_kill_the_engine() -> None:
    valve = Valve()
    async with running(FakeDevice(on_step=valve), max_queue=NO_CREDIT_LIMIT) as runtime:
        handles = [ask(runtime, [65], params(1, n=128)) for _ in range(600)]  # 76,800 requests in one turn
        await valve.step_arrived()
        assert runtime.error is None
        for handle in handles:
            runtime.abandon(handle.stream_id)
        await eventually(lambda: runtime._engine.num_streams == 0)
        valve.open()
        await all_blocks_back(runtime)
        assert runtime.error is None


@pytest.mark.slow
async def test_refusing_every_choice_of_many_streams_does_not_kill_the_engine() -> None:
    async with running(max_queue=NO_CREDIT_LIMIT) as runtime:
        handles = [ask(runtime, [65], params(5000, n=128)) for _ in range(600)]
        found = await asyncio.gather(*(read_all(handle) for handle in handles))
        assert {f.end.code for f in found} == {"context_length_exceeded"}
        assert (await answer(runtime, "still here")).is_well
        await eventually(lambda: runtime.num_queued == 0)
