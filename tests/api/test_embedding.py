"""The engine as a guest: it lives on whatever loop its caller runs, and leaves it as it was."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest
import uvloop

from novainfer import Engine, EngineConfig
from novainfer.actors.device.fake import FakeDevice
from tests.api.helpers import CHAT, ask, blocks_back, expected, fake_engine, greedy
from tests.leftovers import open_files, other_tasks

LOOPS: list[Any] = [asyncio.new_event_loop, uvloop.new_event_loop]


def run_on(new_loop: Callable[[], asyncio.AbstractEventLoop], work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
def test_it_runs_on_the_loop_it_finds(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def work() -> None:
        async with fake_engine() as engine:
            found = await asyncio.gather(*(ask(engine, [65 + i], greedy(20)) for i in range(20)))
            assert [f.token_ids() for f in found] == [expected([65 + i], 20) for i in range(20)]
        assert other_tasks() == set()

    run_on(new_loop, work)


@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
def test_a_hundred_lives_leave_nothing_behind(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def work() -> None:
        for cycle in range(100):
            engine = fake_engine()
            await engine.start()
            reader = asyncio.create_task(ask(engine, [65], greedy(2000)))
            assert (await ask(engine, [66], greedy(3))).token_ids() == expected([66], 3)
            if cycle % 2:  # close while a request runs
                reader.cancel()
            await engine.aclose()
            await asyncio.gather(reader, return_exceptions=True)
            assert other_tasks() == set()
            if cycle == 10:
                before = (threading.active_count(), open_files())
        assert (threading.active_count(), open_files()) == before

    run_on(new_loop, work)


def test_engines_that_were_closed_are_garbage() -> None:
    async def live() -> None:
        async with fake_engine() as engine:
            await ask(engine, [65], greedy(3))

    def count() -> int:
        gc.collect()
        return sum(type(thing) in (Engine, FakeDevice) for thing in gc.get_objects())

    before = count()
    for _ in range(3):
        asyncio.run(live())
    assert count() <= before  # those of earlier tests may go meanwhile


def test_a_loop_that_ends_with_an_engine_open_takes_its_threads_along() -> None:
    async def main() -> None:
        engine = fake_engine()
        await engine.start()
        name = engine.add_request([65], greedy(2000))
        await engine.wait_result(name)  # it decodes

    asyncio.run(main())  # cancels every task, the engine's among them
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("novainfer")]


async def test_in_a_task_group_its_errors_are_the_callers_own() -> None:
    async with fake_engine() as engine:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(engine, [65 + i], greedy(5))) for i in range(5)]
        assert [task.result().token_ids() for task in tasks] == [expected([65 + i], 5) for i in range(5)]


# ---- with the model -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
def test_a_few_lives_with_the_demo_model_leave_nothing_behind(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    answers: list[list[int]] = []
    sizes: list[int] = []

    async def work() -> None:
        for cycle in range(4):
            async with Engine(EngineConfig(max_num_seqs=8)) as engine:
                answers.append((await ask(engine, CHAT, greedy(8))).token_ids())
                await blocks_back(engine)
            assert other_tasks() == set()
            if cycle == 1:
                before = (threading.active_count(), open_files())
            gc.collect()
            sizes.append(psutil.Process().memory_info().rss >> 20)
        assert (threading.active_count(), open_files()) == before

    run_on(new_loop, work)
    assert answers == [answers[0]] * 4
    print(f"resident after each life: {sizes} MiB")
    assert sizes[-1] - sizes[1] < 40, "the model of a closed engine is still in memory"


@pytest.mark.slow
async def test_the_callers_loop_stays_responsive_while_the_model_decodes() -> None:
    """Prints the loop's lag; nothing is asserted of times, only that the loop goes on turning meanwhile."""
    lags_us: list[float] = []
    is_over = False

    async def watch() -> None:
        while not is_over:
            asked_s = time.perf_counter()
            await asyncio.sleep(0.001)
            lags_us.append((time.perf_counter() - asked_s - 0.001) * 1e6)

    async with Engine() as engine:
        watcher = asyncio.create_task(watch())
        prompts = [f"The number {i} is" for i in range(8)]
        found = await asyncio.gather(*(ask(engine, p, greedy(64, ignore_eos=True)) for p in prompts))
        is_over = True
        await watcher
    assert all(f.last.num_generated_tokens == 64 for f in found)
    assert len(lags_us) > 10
    lags_us.sort()
    p50, p99 = lags_us[len(lags_us) // 2], lags_us[len(lags_us) * 99 // 100]
    print(f"loop lag while 8 requests decode: p50 {p50:.0f} µs, p99 {p99:.0f} µs, max {lags_us[-1]:.0f} µs")
