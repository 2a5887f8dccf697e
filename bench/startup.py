"""How long a model takes from a started process to the first token, imports told apart.

From packed weights that an earlier start has kept (`--cached`): that start is not counted, and leaves the file in the
page cache.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from novainfer.bench.machine import describe
from novainfer.bench.offline import ours
from novainfer.bench.report import Target, table, targets_json, targets_table
from novainfer.bench.worker import Child, Task
from novainfer.fsm.messages.mode import UNQUANTIZED

READY_S_MAX = 5.0  # after imports
READY_CACHED_S_MAX = 3.0
AS_SERVED = {"max_model_len": None, "kv_cache_capacity_mode": "auto", "num_kv_blocks": None}


def run(
    model: str = "demo",
    repeat: int = 3,
    *,
    quantizations: Sequence[str] = (UNQUANTIZED,),
    cached: bool = False,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """The report and its tables; `options` are fields of EngineConfig. All `quantizations` start in each repetition."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in quantizations}
    with ExitStack() as stack:
        settings = {name: {**AS_SERVED, "quantization": name, **(options or {})} for name in quantizations}
        if cached:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="novainfer-packed-"))
            for name, fields in settings.items():
                fields["weight_cache_dir"] = folder
                progress(f"{name}: packed in {_start(model, fields)['ready_s']:.2f} s, for the next start")
        for _ in range(repeat):
            for name, fields in settings.items():
                runs[name].append(_start(model, fields))
                progress(f"{name}: ready after {runs[name][-1]['ready_s']:.2f} s")
    found = {name: {key: statistics.median(one[key] for one in of) for key in of[0]} for name, of in runs.items()}
    wanted = READY_CACHED_S_MAX if cached else READY_S_MAX
    what = f"start to ready after imports{', weights packed before' if cached else ''}, s"
    targets = [
        Target(name=_named(what, name), wanted=wanted, measured=one["ready_s"], at_most=True)
        for name, one in found.items()
    ]
    report: dict[str, Any] = {
        "benchmark": "startup",
        "model": model,
        "cached": cached,
        "machine": describe(),
        "repeat": repeat,
        "starts": {name: {**one, "runs": runs[name]} for name, one in found.items()},
        "targets": targets_json(targets),
    }
    rows = [
        (
            _named(model, name),
            *(one[key] for key in ("import_s", "ready_s", "ready_cpu_s", "first_token_s", "resident_mb")),
        )
        for name, one in found.items()
    ]
    header = ("model", "imports s", "ready s", "its CPU s", "first token s", "resident MB")
    return report, table(f"Start, {repeat} x, medians", header, rows) + "\n\n" + targets_table(targets)


def _named(what: str, quantization: str) -> str:
    return what if quantization == UNQUANTIZED else f"{what} ({quantization})"


def _start(model: str, fields: Mapping[str, Any]) -> dict[str, float]:
    with Child(ours(model, fields)) as child:
        first = child.run(Task(prompts=[[1, 2, 3, 4]], max_tokens=1))
        return {
            "import_s": child.ready.import_s,
            "ready_s": child.ready.load_s,
            "ready_cpu_s": child.ready.load_cpu_s,
            "first_token_s": first.timelines[0].times_s[0],
            "resident_mb": child.ready.memory.resident_bytes / 1e6,
        }
