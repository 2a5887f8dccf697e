"""Settings that must be in place before anything starts.

A spinning OpenMP pool beside an event loop costs 100x, and torch reads its policy once. What a served engine writes for
its user (recordings of faults) goes to a folder that is gone afterwards.
"""

import atexit
import os
import shutil
import tempfile
from collections import Counter
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if not shutil.which("nvidia-smi"):  # Triton's functions are defined as what they will be: compiled, or interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")

_state = tempfile.mkdtemp(prefix="novainfer-tests-")
os.environ["XDG_STATE_HOME"] = _state
atexit.register(shutil.rmtree, _state, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name what this run has not tested, and why: a CPU without BF16 skips the kernels that most users run."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"not tested here: {reason} ({count} tests)")
