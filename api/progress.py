"""Progress bars: for people at a terminal only."""

from __future__ import annotations

from tqdm import tqdm


class Bar(tqdm):  # type: ignore[type-arg]
    """A progress bar without tqdm's monitor, a thread that would outlive it."""

    monitor_interval = 0


class LoadingBar:
    """An engine's `on_progress`: tensors read, on stderr, if that is a terminal; it goes when all are there."""

    def __init__(self) -> None:
        self._bar: Bar | None = None

    def __call__(self, num_done: int, num_all: int) -> None:
        """Called from the device's thread after each tensor."""
        if self._bar is None:
            self._bar = Bar(total=num_all, desc="loading", unit="tensor", disable=None, leave=False, dynamic_ncols=True)
        self._bar.update(num_done - self._bar.n)
        if num_done >= num_all:
            self._bar.close()
