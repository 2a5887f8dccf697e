"""A step that the device was told to compute, in the hands of who waits for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from novainfer.fsm.messages.step import StepDone

__all__ = ["Flight"]


class Flight:
    """A step that the device was told to compute; `wait` and `done` may be called by another thread, in this order.

    Neither touches what later steps use. Nothing is left to wait for where `is_through`.
    """

    def __init__(self, done: Callable[[], StepDone], ended: torch.cuda.Event | None = None) -> None:
        """`ended` comes behind the step on the device; `done` reads what the step has copied to the host by then."""
        self._done = done
        self._ended = ended

    @property
    def is_through(self) -> bool:
        """Whether the step had ended when it was handed out."""
        return self._ended is None

    def wait(self) -> None:
        """Block until the step has ended; raises what the device raises, which may be for a step beside it."""
        if self._ended is not None:
            self._ended.synchronize()

    def done(self) -> StepDone:
        """What it gives, once it has ended."""
        return self._done()
