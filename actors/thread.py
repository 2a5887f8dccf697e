"""A thread that does one kind of work off the loop: device calls, tokenising.

Jobs go in through a queue, results come back by one `call_soon_threadsafe` each (20 to 30 µs, measured; an executor's
future costs three times as much). The thread's life is a task of the engine's task group: `run` starts it, and
ends when `stop` was called and the thread is through.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import anyio


class JobThread:
    """`work(jobs)` runs in the thread with the jobs that wait; `deliver(result)`, on the loop, takes each result."""

    def __init__(
        self,
        name: str,
        work: Callable[[list[Any]], list[Any]],
        deliver: Callable[[Any], None],
        *,
        batched: bool = False,
    ) -> None:
        self._name = name
        self._work = work
        self._deliver = deliver
        self._batched = batched
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = anyio.Event()
        self._error: BaseException | None = None

    def put(self, job: Any) -> None:
        """Do `job` after those before it."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End after the jobs that were put before."""
        self._jobs.put(None)

    async def run(self) -> None:
        """Live from now until `stop`; raises what killed the thread. When cancelled, the running job is waited for."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        self._thread.start()
        try:
            await self._ended.wait()
        except BaseException:
            self.stop()
            with anyio.CancelScope(shield=True):
                await self._ended.wait()
            raise
        finally:
            self._thread.join()  # it has left its loop: this takes no time
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        assert self._loop is not None
        try:
            while (job := self._jobs.get()) is not None:
                jobs = [job]
                while self._batched and not self._jobs.empty():
                    if (more := self._jobs.get()) is None:
                        self._jobs.put(None)
                        break
                    jobs.append(more)
                for result in self._work(jobs):
                    self._loop.call_soon_threadsafe(self._deliver, result)
        except BaseException as error:
            self._error = error
        finally:
            self._loop.call_soon_threadsafe(self._ended.set)
