"""The device between two steps: what share of its time it waits for the next one.

The device says so itself, wherever it lives: it notes when each step comes to it and when it gives the answer, and
writes that down when it is closed. What lies between is idle: the answer's way to the engine, the commit, the plan, and
its way back; or, where the next step is there already (`async_scheduling`), next to nothing. It sleeps for the time of
a step, so nothing else has to wait for a core because of it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from novainfer.bench.control import decode, sizes
from novainfer.bench.machine import describe
from novainfer.bench.report import Target, table, targets_json, targets_table
from novainfer.bench.statistic import percentile
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.server.loop import loop_factory
from novainfer.testing import FactorySpec, FakeDevice

NAMES = {False: "when the one before has ended", True: "while the one before runs"}
SHARE_MAX = 0.02  # the target, for a step of 10 ms


class NotingDevice(FakeDevice):
    """Writes [sequences, began, ended] of each step, in seconds of the monotonic clock, to the file `notes`."""

    def __init__(self, notes: str, **more: Any) -> None:
        super().__init__(**more)
        self._notes = Path(notes)
        self._steps: list[tuple[int, float, float]] = []

    def run(self, plan: StepPlan) -> StepDone:
        """One step, noted."""
        began_s = time.monotonic()
        done = super().run(plan)
        self._steps.append((len(plan.slots), began_s, time.monotonic()))
        return done

    def close(self) -> None:
        """Write it down."""
        self._notes.write_text(json.dumps(self._steps))
        super().close()


def run(
    requests: int = 256,
    steps: int = 300,
    repeat: int = 5,
    device_ms: float = 10.0,
    worker: Literal["thread", "process"] = "process",
    ways: Sequence[bool] = (False, True),
) -> tuple[dict[str, Any], str]:
    """The report and its tables; `ways` are values of `async_scheduling`, measured in turns."""
    found: dict[bool, list[dict[str, float]]] = {is_async: [] for is_async in ways}
    for _ in range(repeat):
        for is_async, runs in found.items():
            runs.append(run_once(requests, steps, device_ms / 1e3, worker=worker, async_scheduling=is_async))
    rows = {
        NAMES[is_async]: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for is_async, runs in found.items()
    }
    share = rows[NAMES[ways[-1]]]["idle_share"]
    targets = [Target(name="idle share of the device, %", wanted=1e2 * SHARE_MAX, measured=1e2 * share, at_most=True)]
    report = {
        "benchmark": "idle",
        "machine": describe(),
        "repeat": repeat,
        "requests": requests,
        "device_ms": device_ms,
        "worker": worker,
        "ways": rows,
        "runs": {NAMES[is_async]: runs for is_async, runs in found.items()},
        "targets": targets_json(targets),
    }
    title = f"A device in a {worker} between two steps of {requests} requests ({repeat} x {steps} steps, medians)"
    header = ("a step is planned", "step, ms", "idle, us", "p99, us", "idle share, %")
    lines = [
        (name, row["step_ms"], row["idle_us"], row["idle_us_p99"], 1e2 * row["idle_share"])
        for name, row in rows.items()
    ]
    return report, "\n\n".join((table(title, header, lines), targets_table(targets)))


def run_once(requests: int, steps: int, device_s: float, **options: Any) -> dict[str, float]:
    """Of steps that hold all `requests`, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "steps.json"
        arguments = {**sizes(requests, steps), "step_s": device_s, "notes": str(notes)}
        device = FactorySpec(f"{__name__}:{NotingDevice.__name__}", arguments)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(decode(device, requests, steps, **options))
        noted = json.loads(notes.read_text())
    return idle_between(noted, requests)


def idle_between(noted: list[tuple[int, float, float]], requests: int) -> dict[str, float]:
    """From [sequences, began, ended] of each step: of those that hold `requests`, the pauses between neighbours."""
    pairs = [(before, after) for before, after in pairwise(noted) if before[0] == after[0] == requests]
    idle_s = [after[1] - before[2] for before, after in pairs]
    busy_s = [before[2] - before[1] for before, _ in pairs]
    return {
        "steps": len(pairs),
        "step_ms": 1e3 * statistics.median(busy_s),
        "idle_us": 1e6 * statistics.median(idle_s),
        "idle_us_p99": 1e6 * percentile(idle_s, 99),
        "idle_share": sum(idle_s) / (sum(idle_s) + sum(busy_s)),
    }
