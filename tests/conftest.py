"""Settings that must be in place before anything starts.

A spinning OpenMP pool beside an event loop costs 100x, and torch reads its policy once. What a served engine writes for
its user (recordings of faults) goes to a folder that is gone afterwards.
"""

import atexit
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if not shutil.which("nvidia-smi"):  # Triton's functions are defined as what they will be: compiled, or interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")

_state = tempfile.mkdtemp(prefix="novainfer-tests-")
os.environ["XDG_STATE_HOME"] = _state
atexit.register(shutil.rmtree, _state, ignore_errors=True)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process sets the process's log up; the next test finds it as this one did."""
    handlers = [(handler, handler.formatter) for handler in logging.getLogger().handlers]
    levels = [
        (logger, logger.level) for logger in map(logging.getLogger, ("novainfer", "novainfer.access", "novainfer.http"))
    ]
    yield
    for handler, formatter in handlers:
        handler.setFormatter(formatter)
    for logger, level in levels:
        logger.setLevel(level)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name what this run has not tested, and why: a CPU without BF16 skips the kernels that most users run."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"not tested here: {reason} ({count} tests)")
