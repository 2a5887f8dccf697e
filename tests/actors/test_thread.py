"""A thread of jobs answers in order, ends when asked, is waited for when cancelled, and dies aloud."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from novainfer.actors.core.thread import JobThread

WAIT_S = 60.0


class Bench:
    """A job thread, what it delivered, and a way to wait for so many results."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.results: list[Any] = []
        self.thread = JobThread("novainfer-test", work, self._deliver)
        self._came = asyncio.Event()
        self.threads_seen: set[threading.Thread] = set()

    def _deliver(self, result: Any) -> None:
        self.threads_seen.add(threading.current_thread())
        self.results.append(result)
        self._came.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.results) < count:
                self._came.clear()
                await self._came.wait()


def double(job: int) -> int:
    return job * 2


async def test_results_come_in_order_on_the_loop() -> None:
    bench = Bench(double)
    life = asyncio.create_task(bench.thread.run())
    for job in range(100):
        bench.thread.put(job)
    await bench.wait_for(100)
    bench.thread.stop()
    await life
    assert bench.results == [job * 2 for job in range(100)]
    assert bench.threads_seen == {threading.current_thread()}


async def test_jobs_put_before_it_runs_are_done() -> None:
    bench = Bench(double)
    bench.thread.put(1)
    bench.thread.put(2)
    bench.thread.stop()
    await bench.thread.run()
    await bench.wait_for(2)
    assert bench.results == [2, 4]


async def test_stop_lets_the_jobs_before_it_finish() -> None:
    bench = Bench(double)
    bench.thread.put(21)
    bench.thread.stop()
    bench.thread.put(99)
    await bench.thread.run()
    await bench.wait_for(1)
    assert bench.results == [42]


async def test_stopping_in_a_hurry_drops_the_jobs_that_wait() -> None:
    started, finish = threading.Event(), threading.Event()

    def work(job: Any) -> Any:
        started.set()
        assert finish.wait(WAIT_S)
        return job

    bench = Bench(work)
    for job in ("runs", "waits", "waits too"):
        bench.thread.put(job)
    life = asyncio.create_task(bench.thread.run())
    await asyncio.to_thread(started.wait, WAIT_S)
    bench.thread.stop(drop_waiting=True)
    finish.set()
    await life
    assert bench.results == ["runs"]


async def test_cancelled_while_a_job_runs_it_waits_for_the_job() -> None:
    started, finish = threading.Event(), threading.Event()

    def work(job: Any) -> Any:
        started.set()
        assert finish.wait(WAIT_S)
        return job

    bench = Bench(work)
    bench.thread.put("long")
    life = asyncio.create_task(bench.thread.run())
    await asyncio.to_thread(started.wait, WAIT_S)
    life.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not life.done(), "the job is still on the device"
    finish.set()
    with pytest.raises(asyncio.CancelledError):
        await life
    assert bench.results == ["long"]


async def test_an_exception_kills_it_visibly() -> None:
    def work(job: Any) -> Any:
        raise ZeroDivisionError("a bug in the work")

    bench = Bench(work)
    bench.thread.put(1)
    with pytest.raises(ZeroDivisionError, match="a bug in the work"):
        await bench.thread.run()
    assert bench.results == []


async def test_not_even_a_system_exit_dies_in_silence() -> None:
    def work(job: Any) -> Any:
        raise SystemExit(3)

    bench = Bench(work)
    bench.thread.put(1)
    with pytest.raises(RuntimeError, match=r"novainfer-test was ended by SystemExit\(3\)"):
        await bench.thread.run()


async def test_stopped_before_it_ran_it_ends_at_once() -> None:
    bench = Bench(double)
    bench.thread.stop()
    await bench.thread.run()
    assert bench.results == []


def test_it_can_be_made_before_there_is_a_loop() -> None:
    results: list[Any] = []
    thread = JobThread("novainfer-test", double, results.append)
    thread.put(4)
    thread.stop()

    async def live() -> None:
        await thread.run()
        await asyncio.sleep(0)

    asyncio.run(live())
    assert results == [8]


async def test_abandoned_it_is_not_waited_for_and_what_it_still_says_is_not_heard() -> None:
    started, finish, said = threading.Event(), threading.Event(), threading.Event()

    def work(job: Any) -> Any:
        started.set()
        assert finish.wait(WAIT_S)
        said.set()
        return job

    bench = Bench(work)
    bench.thread.put("never ends")
    bench.thread.put("waits")
    life = asyncio.create_task(bench.thread.run())
    await asyncio.to_thread(started.wait, WAIT_S)
    bench.thread.abandon()
    async with asyncio.timeout(WAIT_S):
        await life
    finish.set()
    (thread,) = [t for t in threading.enumerate() if t.name == "novainfer-test"]
    await asyncio.to_thread(thread.join, WAIT_S)
    assert said.is_set()
    assert bench.results == []
