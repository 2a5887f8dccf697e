"""The library beside a process that takes one of the cores: by how much each workload is slower than alone.

The busy process spins on one core and does nothing else; it lives only while a run is measured. Alone and beside it
take turns within a repetition, each with prompts that no cache knows, and who begins changes with the repetition.
Ratios are formed within a repetition. On two cores a fair scheduler leaves 1.5 times: two threads of the engine and one
that spins have two thirds of a core each.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from novainfer.bench.machine import describe
from novainfer.bench.report import Target, between, table, targets_json, targets_table
from novainfer.bench.statistic import ratios, spread
from novainfer.bench.worker import Child, ChildError, Task
from novainfer.bench.workload import WORKLOADS, Workload

ALONE, BESIDE = "alone", "beside a busy process"
SLOWER_MAX = 3.0
SPIN_S_MAX = 600  # it ends by itself after so long, and when the process that started it has ended
SPIN = f"""
import os, sys, time
parent, end_s = os.getppid(), time.monotonic() + {SPIN_S_MAX}
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
print("spinning", flush=True)
while os.getppid() == parent and time.monotonic() < end_s:
    for _ in range(10_000):
        pass
"""


@contextmanager
def busy_process() -> Iterator[int]:
    """One core of this machine is taken by a process that spins, until the end of the block; gives its id.

    Raises `ChildError` where it could not, or ended before the block did: nothing was measured beside it.
    """
    process = subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != b"spinning\n":
            raise ChildError(f"the busy process does not spin (exit code {process.wait()}): see its words above")
        yield process.pid
        if process.poll() is not None:
            raise ChildError(f"the busy process ended before the work beside it, which may take {SPIN_S_MAX} s")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run(
    command: Sequence[str],
    *,
    workloads: Sequence[Workload] = WORKLOADS,
    repeat: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """The report and its table, of the system that `command` starts."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {w.name: {ALONE: [], BESIDE: []} for w in workloads}
    with Child(command) as child:
        facts = child.ready.facts
        for workload in workloads:  # code paths are warm, and the pages of the KV cache there, before anything counts
            child.run(_task(workload, facts["vocab_size"], -1))
        for repetition in range(repeat):
            for workload in workloads:
                names = [ALONE, BESIDE][:: -1 if repetition % 2 else 1]
                for name in names:
                    task = _task(workload, facts["vocab_size"], 2 * repetition + names.index(name))
                    if name == BESIDE:
                        with busy_process():
                            result = child.run(task)
                    else:
                        result = child.run(task)
                    runs[workload.name][name].append({"wall_s": result.wall_s, "cpu_s": result.cpu_s})
                    progress(f"{workload.name} #{repetition + 1} {name}: {result.wall_s:.2f} s")
    found: dict[str, dict[str, Any]] = {}
    for workload in workloads:
        of = {name: [one["wall_s"] for one in runs[workload.name][name]] for name in (ALONE, BESIDE)}
        slower = ratios(of[BESIDE], of[ALONE])
        cpu = ratios(*([one["cpu_s"] for one in runs[workload.name][name]] for name in (BESIDE, ALONE)))
        found[workload.name] = {
            "title": workload.title,
            "alone_s": statistics.median(of[ALONE]),
            "beside_s": statistics.median(of[BESIDE]),
            "slower": statistics.median(slower),
            "slower_spread": spread(slower),
            "cpu_ratio": statistics.median(cpu),
            "runs": runs[workload.name],
        }
    targets = [
        Target(
            name=f"{name}: beside a busy process", wanted=SLOWER_MAX, measured=work["slower"], unit="x", at_most=True
        )
        for name, work in found.items()
    ]
    report: dict[str, Any] = {
        "benchmark": "offline-beside-busy",
        "machine": describe(),
        "repeat": repeat,
        "cores": os.cpu_count(),
        "system": facts,
        "workloads": found,
        "targets": targets_json(targets),
    }
    rows = [
        (
            name,
            work["alone_s"],
            work["beside_s"],
            between(work["slower"], work["slower_spread"]),
            work["cpu_ratio"],
        )
        for name, work in found.items()
    ]
    titles = "; ".join(f"{name} {work['title']}" for name, work in found.items())
    title = f"Beside a process that spins on one core, {repeat} interleaved repetitions, medians (from-to)\n{titles}"
    header = ("", "alone s", "beside s", "x slower", "x CPU")
    return report, table(title, header, rows) + "\n\n" + targets_table(targets)


def _task(workload: Workload, vocab_size: int, seed: int) -> Task:
    return Task(prompts=workload.prompts(vocab_size, seed), max_tokens=workload.max_tokens)
