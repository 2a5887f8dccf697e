"""How long the demo model takes from a started process to the first token, imports told apart."""

from __future__ import annotations

import statistics
from typing import Any

from novainfer.bench.machine import describe
from novainfer.bench.offline import ours
from novainfer.bench.report import Target, table, targets_json, targets_table
from novainfer.bench.worker import Child, Task

READY_S_MAX = 5.0  # after imports
AS_SERVED = {"max_model_len": None, "kv_cache_capacity_mode": "auto", "num_kv_blocks": None}


def run(model: str = "demo", repeat: int = 3) -> tuple[dict[str, Any], str]:
    """The report and its tables."""
    runs = []
    for _ in range(repeat):
        with Child(ours(model, AS_SERVED)) as child:
            first = child.run(Task(prompts=[[1, 2, 3, 4]], max_tokens=1))
            runs.append(
                {
                    "import_s": child.ready.import_s,
                    "ready_s": child.ready.load_s,
                    "first_token_s": first.timelines[0].times_s[0],
                    "resident_mb": child.ready.memory.resident_bytes / 1e6,
                }
            )
    found = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    targets = [
        Target(name="start to ready after imports, s", wanted=READY_S_MAX, measured=found["ready_s"], at_most=True)
    ]
    report: dict[str, Any] = {
        "benchmark": "startup",
        "model": model,
        "machine": describe(),
        "repeat": repeat,
        **found,
        "runs": runs,
        "targets": targets_json(targets),
    }
    rows = [(model, found["import_s"], found["ready_s"], found["first_token_s"], found["resident_mb"])]
    header = ("model", "imports s", "ready s", "first token s", "resident MB")
    return report, table(f"Start, {repeat} x, medians", header, rows) + "\n\n" + targets_table(targets)
