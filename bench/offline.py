"""The engine as a library beside transformers' `generate`: the same checkpoint, the same prompts, in turns.

Each system lives in a process of its own, and only one works at a time: within a repetition every workload is run by
each system in turn, and the order of the systems changes from one repetition to the next, so that whatever else the
machine does hits all alike. Ratios are formed within a repetition; what is reported is their median, and their spread.

The roof of a run is of its own moment, too: NovaInfer's process reads the model's packed weights, on the pages that its
steps read them from, before and after each of its runs. The peak of matrix products, and the rate of reading where the
weights are not packed, are measured before, between and after the repetitions.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from novainfer.bench.ideal import Geometry, Roof, ideal_s
from novainfer.bench.machine import describe
from novainfer.bench.offline_report import render, targets
from novainfer.bench.report import targets_json
from novainfer.bench.statistic import median_ratio, medians, ratios, spread, summary
from novainfer.bench.worker import Child, ChildError, Ready, Result, Task
from novainfer.bench.workload import MAX_LEN, MAX_TOKENS_AT_ONCE, PREFIX, WORKLOADS, Workload

OURS = "novainfer"
TRANSFORMERS = "transformers"
BLOCK_SIZE = 16
# The KV pool holds the largest workload and a quarter more, so that after some repetitions all of it was touched:
# then what is resident beside weights and cache is known exactly.
NUM_KV_BLOCKS = MAX_TOKENS_AT_ONCE * 5 // 4 // BLOCK_SIZE
WARM_UP = Task(prompts=[[1] * 16], max_tokens=4)
NUM_READS = 3  # of the weights, before and after each run
PREFIX_PAIRS = 3  # per repetition: a pair takes a second

MeasureRoof = Callable[[], Roof]


def ours(model: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """The command that runs NovaInfer on `model`; `options` are fields of EngineConfig."""
    merged: dict[str, Any] = {"max_model_len": MAX_LEN + BLOCK_SIZE, "block_size": BLOCK_SIZE}
    merged |= {"kv_cache_capacity_mode": "fixed", "num_kv_blocks": NUM_KV_BLOCKS, **(options or {})}
    return [sys.executable, "-m", "novainfer.bench.peers.run_novainfer", model, msgspec.json.encode(merged).decode()]


def transformers(model: str) -> list[str]:
    """The command that runs transformers on `model`."""
    return [sys.executable, "-m", "novainfer.bench.peers.run_transformers", model]


def run(
    model_dir: Path,
    commands: Mapping[str, Sequence[str]],
    *,
    measure_roof: MeasureRoof | None,
    workloads: Sequence[Workload] = WORKLOADS,
    prefix: Workload | None = PREFIX,
    repeat: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """The report and its tables; `commands` maps each system's name to its command, NovaInfer among them.

    A system other than NovaInfer that does not start is left out, with the reason in the report.
    """
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        children: dict[str, Child] = {}
        for name, command in commands.items():
            progress(f"starting {name}")
            try:
                children[name] = stack.enter_context(Child(command))
            except ChildError as error:
                if name == OURS:
                    raise
                skipped[name] = str(error)
        for child in children.values():
            child.run(WARM_UP)
        ready = {name: child.ready for name, child in children.items()}
        turns = _Turns(children, ready[OURS].facts["vocab_size"], progress)
        roofs = [measure_roof()] if measure_roof else []
        for repetition in range(repeat):
            for workload in workloads:
                turns.take(workload, repetition)
            if prefix is not None:
                turns.take_prefix(prefix, repetition)
            if measure_roof:
                roofs.append(measure_roof())
    geometry = Geometry.read(model_dir)
    report = {
        "benchmark": "offline",
        "model": model_dir.name,
        "machine": describe(),
        "repeat": repeat,
        "systems": {name: _facts(r) for name, r in ready.items()},
        "skipped": skipped,
        "roofline": [msgspec.to_builtins(roof) for roof in roofs],
        "workloads": {
            w.name: _report(w, turns.runs[w.name], geometry, _roofs_of(roofs, turns.reads[w.name])) for w in workloads
        },
        "prefix": _prefix_report(turns.prefix_ms),
        "memory": {name: _memory(ready[name], turns.memory[name]) for name in children},
    }
    promised = targets(report) if geometry.is_reference and list(workloads) == list(WORKLOADS) else []
    report["targets"] = targets_json(promised)
    return report, render(report, promised)


class _Turns:
    """Runs workloads on each child in turn and keeps what came of it."""

    def __init__(self, children: Mapping[str, Child], vocab_size: int, progress: Callable[[str], None]) -> None:
        self._children = children
        self._vocab_size = vocab_size
        self._progress = progress
        self.runs: dict[str, dict[str, list[dict[str, Any]]]] = {}  # workload -> system -> one record a repetition
        self.memory: dict[str, list[Result]] = {name: [] for name in children}
        self.reads: dict[
            str, list[list[float]]
        ] = {}  # workload -> bytes/s around NovaInfer's run, one list a repetition
        self.prefix_ms: list[tuple[float, float]] = []

    def take(self, workload: Workload, repetition: int) -> None:
        """Every system answers the workload once; who begins changes."""
        prompts = workload.prompts(self._vocab_size, repetition)
        names = list(self._children)
        shift = repetition % len(names)
        for name in names[shift:] + names[:shift]:
            num_reads = NUM_READS if name == OURS else 0
            result = self._children[name].run(
                Task(prompts=prompts, max_tokens=workload.max_tokens, num_reads=num_reads)
            )
            if name == OURS:
                self.reads.setdefault(workload.name, []).append(result.read_bytes_per_s)
            record = summary(result.timelines, result.wall_s) | {"cpu_s": result.cpu_s}
            self.runs.setdefault(workload.name, {}).setdefault(name, []).append(record)
            self.memory[name].append(result)
            self._progress(f"{workload.name} #{repetition + 1} {name}: {record['output_tok_s']:.1f} output tok/s")

    def take_prefix(self, workload: Workload, repetition: int) -> None:
        """The time to the first token of a prompt, and of one that shares its long beginning, one after the other."""
        for pair in range(PREFIX_PAIRS):
            prompts = workload.prompts(self._vocab_size, repetition * PREFIX_PAIRS + pair)
            result = self._children[OURS].run(Task(prompts=prompts, max_tokens=workload.max_tokens, at_once=1))
            first, second = (1e3 * line.times_s[0] for line in result.timelines)
            self.prefix_ms.append((first, second))


def _report(
    workload: Workload, runs: dict[str, list[dict[str, Any]]], geometry: Geometry, roofs: Sequence[Roof]
) -> dict[str, Any]:
    own = [record["output_tok_s"] for record in runs[OURS]]
    own_cpu_s = [record["cpu_s"] for record in runs[OURS]]
    ideals = [ideal_s(workload, geometry, roof) for roof in roofs]
    found: dict[str, Any] = {
        "title": workload.title,
        "ideal_s": statistics.median(ideals) if ideals else None,
        "roofs": [msgspec.to_builtins(roof) for roof in roofs],
    }
    for name, records in runs.items():
        to_own = ratios(own, [record["output_tok_s"] for record in records])
        shares = ratios(ideals, [record["wall_s"] for record in records]) if ideals else []
        found[name] = medians(records) | {
            "ratio": statistics.median(to_own),
            "ratio_spread": spread(to_own),
            "cpu_ratio": median_ratio([record["cpu_s"] for record in records], own_cpu_s),
            "share_of_roofline": statistics.median(shares) if shares else None,
            "share_spread": spread(shares) if shares else None,
            "runs": records,
        }
    return found


def _roofs_of(roofs: Sequence[Roof], reads: Sequence[Sequence[float]]) -> list[Roof]:
    """One a repetition: the machine is at least as fast as the fastest of several looks at it.

    Of reading, those are the model's own weights around the run; where they cannot be read so, what was measured before
    and after the repetition.
    """
    return [
        Roof(
            bytes_per_s=max(own, default=max(before.bytes_per_s, after.bytes_per_s)),
            flops_per_s=max(before.flops_per_s, after.flops_per_s),
        )
        for (before, after), own in zip(itertools.pairwise(roofs), reads, strict=False)
    ]


def _prefix_report(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    if not pairs:
        return None
    return {
        "first_ttft_ms": statistics.median(first for first, _ in pairs),
        "cached_ttft_ms": statistics.median(second for _, second in pairs),
        "ratio": statistics.median(second / first for first, second in pairs),
        "runs": [list(pair) for pair in pairs],
    }


def _facts(ready: Ready) -> dict[str, Any]:
    return {"version": ready.version, "import_s": ready.import_s, "load_s": ready.load_s, **ready.facts}


def _memory(ready: Ready, results: Sequence[Result]) -> dict[str, float]:
    """Megabytes (10^6 bytes): the highest of all tasks, and the most that neither weights nor cache explain."""
    rest = max(r.memory.peak_bytes - r.memory.weight_bytes - r.memory.kv_bytes for r in results)
    return {
        "peak_mb": max(r.memory.peak_bytes for r in results) / 1e6,
        "weights_mb": ready.memory.weight_bytes / 1e6,
        "kv_mb": max(r.memory.kv_bytes for r in results) / 1e6,
        "rest_mb": rest / 1e6,
        "after_load_mb": ready.memory.resident_bytes / 1e6,
        "load_peak_mb": ready.memory.peak_bytes / 1e6,
    }
