"""A thread that does one kind of work off the loop: device calls, tokenising.

Jobs go in through a queue, results come back by one `call_soon_threadsafe` each (20 to 30 µs, measured; an executor's
future costs three times as much). The thread's life is a task of the engine's task group: `run` starts it, and
ends when `stop` was called and the thread is through.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import anyio


class JobThread:
    """`work(job)` runs in the thread, one job after the other; `deliver(result)` on the loop.

    Where `work` gives None, `tell` may give the result later. The thread calls `at_end` before it ends. It has a stack
    of `stack_bytes`; 0: the usual one.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Any], Any],
        deliver: Callable[[Any], None],
        at_end: Callable[[], None] | None = None,
        stack_bytes: int = 0,
    ) -> None:
        self.name = name
        self._at_end = at_end
        self._stack_bytes = stack_bytes
        self._work = work
        self._deliver = deliver
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._held: list[Any] | None = None  # jobs put while it is frozen
        self._num_put = 0  # counted on the loop
        self.num_done = 0  # counted in the thread
        self.since_s = time.monotonic()  # when it last got its first job, or did one
        self._is_dropping = False
        self._is_abandoned = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = anyio.Event()
        self._error: BaseException | None = None

    @property
    def num_waiting(self) -> int:
        """Jobs that were put and are not done, those at work included."""
        return self._num_put - self.num_done

    def put(self, job: Any) -> None:
        """Do `job` after those before it."""
        if not self.num_waiting:
            self.since_s = time.monotonic()
        self._num_put += 1
        if self._held is not None:
            self._held.append(job)
        else:
            self._jobs.put(job)

    def tell(self, result: Any) -> None:
        """From any thread: a result that `work` did not give."""
        self._tell(self._deliver, result)

    def freeze(self) -> None:
        """Begin no job that is put from now until `thaw`: a fault for tests and drills."""
        self._held = self._held or []

    def thaw(self) -> None:
        """Go on with what has waited."""
        held, self._held = self._held or [], None
        for job in held:
            self._jobs.put(job)

    def stop(self, *, drop_waiting: bool = False) -> None:
        """End after the jobs that were put before, or (`drop_waiting`) after the one that runs."""
        self._is_dropping = self._is_dropping or drop_waiting
        self._jobs.put(None)

    def abandon(self) -> None:
        """Wait no more for a job that may never return: `run` ends now. The thread dies with the process."""
        self._is_abandoned = True
        self._is_dropping = True
        self._jobs.put(None)
        self._ended.set()

    def give_way(self) -> None:
        """Let all others go first from now on, where a thread has a priority of its own: on Linux."""
        number = self._thread.native_id if self._thread is not None else None
        if sys.platform == "linux" and number is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.setpriority(os.PRIO_PROCESS, number, 19)

    async def run(self) -> None:
        """Live from now until `stop`; raises what killed the thread. When cancelled, the running job is waited for."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._main, name=self.name, daemon=True)
        usual = threading.stack_size(self._stack_bytes)
        try:
            self._thread.start()
        finally:
            threading.stack_size(usual)
        try:
            await self._ended.wait()
        except BaseException:
            self.stop()
            with anyio.CancelScope(shield=True):
                await self._ended.wait()
            raise
        finally:
            if not self._is_abandoned:
                self._thread.join()  # it has left its loop: this takes no time
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        try:
            while (job := self._jobs.get()) is not None and not self._is_dropping:
                if (result := self._work(job)) is not None:
                    self._tell(self._deliver, result)
                self.num_done += 1
                self.since_s = time.monotonic()
            if self._at_end is not None:
                self._at_end()
        except Exception as error:
            self._error = error
        except BaseException as error:  # raised as it is, a SystemExit would go through the caller's loop and end it
            self._error = RuntimeError(f"{self.name} was ended by {type(error).__name__}({error})")
        finally:
            self._tell(self._ended.set)

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call `callback` on the loop, which may be gone if this thread is not waited for any more."""
        assert self._loop is not None
        if not self._is_abandoned:
            self._loop.call_soon_threadsafe(callback, *arguments)
