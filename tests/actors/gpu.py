"""A device that computes beside its host, as a GPU does: a stream, events, steps that end late, and errors that do.

What it is told of a step lies in one of two pinned buffers until the stream gets there: a buffer that is used again
before, or a step that reads what was not told, is an error that no test forgives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from novainfer.actors.device.fake import FakeDevice, successor
from novainfer.fsm.messages.step import STEPS_IN_FLIGHT_MAX, StepDone, StepPlan

ILLEGAL = "CUDA error: an illegal memory access was encountered"
KINDS: dict[str, Callable[[str], BaseException]] = {"MemoryError": MemoryError, "RuntimeError": RuntimeError}


class Event:
    """Behind a step on the stream; `gpu.poison` is raised by every event that is waited for after it came up."""

    def __init__(self, gpu: FakeGpu, plan: StepPlan) -> None:
        self.plan = plan
        self.found: StepDone | BaseException | None = None
        self._gpu = gpu
        self._has_ended = threading.Event()

    def record(self, found: StepDone | BaseException) -> None:
        """The stream has come this far."""
        self.found = found
        self._has_ended.set()

    def wait(self) -> None:
        """As `Flight.wait`."""
        self._gpu.note(f"waited for {self.plan.step_id}")
        self._has_ended.wait()
        if self._gpu.poison is not None:
            raise RuntimeError(self._gpu.poison)
        if isinstance(self.found, BaseException):
            raise self.found

    def done(self) -> StepDone:
        """As `Flight.done`."""
        assert isinstance(self.found, StepDone), "it is read before it was waited for"
        return self.found


class FakeGpu(FakeDevice):
    """Steps end when `let` was called, or there is no file "hold-" and their id in `folder`; each makes a file there.

    Steps in `at_launch` raise `kind` when they are launched, those in `late` when they have ended, and those in
    `poisons` leave the device of no more use; `fails_with` says what else does. A step ends when the next one is there,
    or `patience_s` seconds are over.
    """

    def __init__(
        self,
        *,
        folder: str | None = None,
        at_launch: Iterable[int] = (),
        late: Iterable[int] = (),
        poisons: Iterable[int] = (),
        kind: str = "RuntimeError",
        is_open: bool = True,
        next_token: Callable[[int], int] = successor,
        fails_with: Callable[[StepPlan], BaseException | None] = lambda plan: None,
        patience_s: float = 0.0,
    ) -> None:
        super().__init__(num_blocks=64, next_token=next_token)
        self.poison: str | None = None
        self.log: list[str] = []
        self.num_on_device_max = 0
        self._folder = None if folder is None else Path(folder)
        self._at_launch, self._late, self._poisons = set(at_launch), set(late), set(poisons)
        self._fails_with = fails_with
        self._kind = KINDS[kind]
        self._patience_s = patience_s
        self._permits = threading.Semaphore(0)
        self._is_open = is_open
        self._pinned: list[StepPlan | None] = [None] * STEPS_IN_FLIGHT_MAX
        self._stream: SimpleQueue[tuple[int, Event] | None] = SimpleQueue()
        self._num_told = self._num_on_device = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._compute_all, name="fake-gpu", daemon=True)
        self._thread.start()

    def note(self, what: str) -> None:
        """Write down what happens; in a folder, as a file."""
        self.log.append(what)
        if self._folder is not None:
            (self._folder / what.replace(" ", "-")).touch()

    def let(self, count: int = 1) -> None:
        """Let so many steps end."""
        self._permits.release(count)

    def run(self, plan: StepPlan) -> Any:
        """Tell the stream of a step."""
        if self.poison is not None:
            raise RuntimeError(self.poison)
        if plan.step_id in self._at_launch:
            self._at_launch.discard(plan.step_id)
            self.note(f"failed to launch {plan.step_id}")
            raise self._kind("a fault of its launch")
        at, self._num_told = self._num_told % STEPS_IN_FLIGHT_MAX, self._num_told + 1
        assert self._pinned[at] is None, f"step {plan.step_id} is laid out where an earlier one is still read"
        self._pinned[at] = plan
        with self._lock:
            self._num_on_device += 1
            self.num_on_device_max = max(self.num_on_device_max, self._num_on_device)
        event = Event(self, plan)
        self._stream.put((at, event))
        self.note(f"launched {plan.step_id}")
        return event

    def switch(self, mode: Any) -> None:
        """It computes the same, and nothing beside it."""
        self._must_be_clear("switch")

    def reclaim(self) -> None:
        """Nothing is computed beside it."""
        self._must_be_clear("reclaim")

    def fit(self, num_blocks: int | None = None, *, is_new: bool = False) -> dict[str, Any]:
        """Nothing is computed beside it."""
        self._must_be_clear("fit")
        return super().fit(num_blocks, is_new=is_new)

    def close(self) -> None:
        """The stream ends."""
        self._must_be_clear("close")
        self._stream.put(None)
        self._thread.join()
        super().close()

    def is_usable(self) -> bool:
        """False once a step has poisoned it."""
        return self.poison is None

    def _must_be_clear(self, what: str) -> None:
        self.note(what)
        assert not self._num_on_device, f"{what} beside a step"

    def _compute_all(self) -> None:
        while (told := self._stream.get()) is not None:
            at, event = told
            self._hold(event.plan)
            found = self._compute(self._pinned[at])
            self._pinned[at] = None
            with self._lock:
                self._num_on_device -= 1
            self.note(f"ended {event.plan.step_id}")
            event.record(found)

    def _hold(self, plan: StepPlan) -> None:
        if not self._is_open:
            self._permits.acquire()
        until_s = time.monotonic() + self._patience_s
        while self._stream.empty() and time.monotonic() < until_s:
            threading.Event().wait(0.001)
        while self._folder is not None and (self._folder / f"hold-{plan.step_id}").exists():
            threading.Event().wait(0.002)

    def _compute(self, plan: StepPlan | None) -> StepDone | BaseException:
        if plan is None:
            return AssertionError("the stream reads a buffer that was not filled")
        if plan.step_id in self._poisons:
            self.poison = ILLEGAL
        if self.poison is not None:
            return RuntimeError(self.poison)
        try:
            found = super().run(plan)
        except Exception as error:
            return error
        if plan.step_id in self._late:
            return self._kind("a fault of its own")
        return self._fails_with(plan) or found
