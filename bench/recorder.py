"""What the flight recorder costs: the control plane with it and without it, in turns.

As in `control`, the CPU time of the loop's thread is counted, over a device that sleeps for `device_ms`: what wakes up
with cold caches pays more. The median of the differences between two runs that follow each other is set against the
whole step.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

from novainfer.bench.control import run_once
from novainfer.bench.machine import describe
from novainfer.bench.report import Target, table, targets_json, targets_table
from novainfer.server.loop import loop_factory

BATCHES = (1, 32, 256)
STEPS = 300
DEVICE_MS = 10.0  # a decode step of a 0.5B model: 10 ms on a GPU, 25 to 90 ms on a CPU
SHARE_MAX = 0.01


def run(
    batches: tuple[int, ...] = BATCHES, steps: int = STEPS, repeat: int = 7, device_ms: float = DEVICE_MS
) -> tuple[dict[str, Any], str]:
    """The report and its table."""
    found: dict[tuple[int, bool], list[dict[str, float]]] = {(b, on): [] for b in batches for on in (False, True)}
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        for turn in range(repeat):
            for batch in batches:
                for on in (turn % 2 == 0, turn % 2 == 1):  # who goes first changes with the turn
                    once = run_once(batch, steps, device_ms / 1e3, "thread", recorder=on)
                    found[batch, on].append(runner.run(once))
    rows: dict[int, dict[str, float]] = {}
    for batch in batches:
        without, with_it = ([run["loop_us_per_step"] for run in found[batch, is_on]] for is_on in (False, True))
        more_us = statistics.median(b - a for a, b in zip(without, with_it, strict=True))
        wall_us = statistics.median(run["wall_us_per_step"] for run in found[batch, False])
        off_us, on_us = statistics.median(without), statistics.median(with_it)
        rows[batch] = {
            "off_us": off_us,
            "on_us": on_us,
            "ratio": on_us / off_us,
            "more_us": more_us,
            "wall_us": wall_us,
            "share": more_us / wall_us,
        }
    targets = [
        Target(name=f"share of a step, {batch} requests", wanted=SHARE_MAX, measured=row["share"], at_most=True)
        for batch, row in rows.items()
    ]
    report = {
        "benchmark": "recorder",
        "machine": describe(),
        "repeat": repeat,
        "steps": steps,
        "device_ms": device_ms,
        "batches": {str(batch): row for batch, row in rows.items()},
        "targets": targets_json(targets),
    }
    header = ("running requests", "loop CPU us/step without", "with", "more, us", "per token, us", "share of a step")
    lines = [(b, r["off_us"], r["on_us"], r["more_us"], r["more_us"] / b, f"{r['share']:.2%}") for b, r in rows.items()]
    title = f"Flight recorder, steps of {device_ms:g} ms ({repeat} x {steps} steps in turns, medians)"
    return report, table(title, header, lines) + "\n\n" + targets_table(targets)
