"""What a test must not leave behind: threads, errors that only a log heard of; for conftest files to import."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail the test when one of its threads lives on, or when asyncio logged an error that nobody raised."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    before = set(threading.enumerate())
    listener = Listener(logging.ERROR)
    logging.getLogger("asyncio").addHandler(listener)
    yield
    logging.getLogger("asyncio").removeHandler(listener)
    # asyncio.to_thread's own threads go with the loop, which outlives this fixture.
    left = [t.name for t in threading.enumerate() if t not in before and not t.name.startswith("asyncio_")]
    assert not left, f"threads left behind: {left}"
    assert not heard, f"asyncio complained: {heard}"


def open_files() -> int:
    """How many file descriptors this process holds."""
    folder = Path("/proc/self/fd")
    return len(os.listdir(folder)) if folder.exists() else 0


def other_tasks() -> set[asyncio.Task[object]]:
    """The running loop's tasks without the one that asks."""
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
