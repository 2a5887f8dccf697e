"""What it costs to draw tokens: a batch that is sampled in several ways, each beside a greedy one.

The ways take turns within a repetition, each with prompts that no cache knows, and the order changes with the
repetition. What counts is the time between tokens while all decode; its ratio to greedy is formed within a repetition.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from novainfer.bench.machine import describe
from novainfer.bench.report import Target, between, table, targets_json, targets_table
from novainfer.bench.statistic import percentile, ratios, spread
from novainfer.bench.worker import Child, Task
from novainfer.bench.workload import Workload

GREEDY, DEFAULTS = "greedy", "Qwen's defaults"
DEFAULTS_MAX = 1.06  # times greedy
WAYS: Mapping[str, dict[str, Any]] = {
    GREEDY: {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    # generation_config.json of Qwen2.5-Instruct
    DEFAULTS: {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "top_p .95": {"temperature": 1.0, "top_p": 0.95},
    "greedy, 5 log probabilities": {"temperature": 0.0, "logprobs": 5},
}
BATCH = Workload(name="S", title="32 requests, 128 in, 64 out", num_requests=32, prompt_len=128, max_tokens=64)


def run(
    command: Sequence[str],
    *,
    workload: Workload = BATCH,
    repeat: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """The report and its table, of the system that `command` starts."""
    steps_s: dict[str, list[float]] = {name: [] for name in WAYS}
    with Child(command) as child:
        facts = child.ready.facts
        for at, (name, sampling) in enumerate(WAYS.items()):  # code paths are warm before anything counts
            child.run(_task(workload, facts, -1 - at, sampling))
            progress(f"warm: {name}")
        for repetition in range(repeat):
            shift = repetition % len(WAYS)
            names = list(WAYS)
            for name in names[shift:] + names[:shift]:
                result = child.run(_task(workload, facts, repetition * len(WAYS) + names.index(name), WAYS[name]))
                steps_s[name].append(_step_s(result.timelines))
                progress(f"{name} #{repetition + 1}: {1e3 * steps_s[name][-1]:.2f} ms a step")
    ways: dict[str, dict[str, Any]] = {}
    for name, seconds in steps_s.items():
        to_greedy = ratios(seconds, steps_s[GREEDY])
        added_ms = [1e3 * (own - greedy) for own, greedy in zip(seconds, steps_s[GREEDY], strict=True)]
        ways[name] = {
            "sampling": WAYS[name],
            "step_ms": 1e3 * statistics.median(seconds),
            "step_ms_spread": spread([1e3 * second for second in seconds]),
            "added_ms": statistics.median(added_ms),
            "added_ms_spread": spread(added_ms),
            "ratio_to_greedy": statistics.median(to_greedy),
            "ratio_spread": spread(to_greedy),
            "runs_ms": [1e3 * second for second in seconds],
        }
    targets = [
        Target(
            name=f"{DEFAULTS}, a step of {workload.num_requests} over greedy",
            wanted=DEFAULTS_MAX,
            measured=ways[DEFAULTS]["ratio_to_greedy"],
            unit="x",
            at_most=True,
        )
    ]
    report: dict[str, Any] = {
        "benchmark": "offline-sampling",
        "machine": describe(),
        "repeat": repeat,
        "workload": msgspec.to_builtins(workload),
        "system": facts,
        "ways": ways,
        "targets": targets_json(targets),
    }
    rows = [
        (
            name,
            between(way["step_ms"], way["step_ms_spread"]),
            between(way["added_ms"], way["added_ms_spread"]),
            between(way["ratio_to_greedy"], way["ratio_spread"]),
        )
        for name, way in ways.items()
    ]
    place = f"Sampling, {workload.title}, on {report['machine']['cpu']}"
    title = f"{place}, {repeat} interleaved repetitions, medians (from-to)"
    header = ("", "ms a step", "more than greedy", "x greedy")
    return report, table(title, header, rows) + "\n\n" + targets_table(targets)


def _task(workload: Workload, facts: Mapping[str, Any], seed: int, sampling: dict[str, Any]) -> Task:
    prompts = workload.prompts(facts["vocab_size"], seed)
    return Task(prompts=prompts, max_tokens=workload.max_tokens, sampling=sampling)


def _step_s(timelines: Sequence[Any]) -> float:
    """The median time between tokens from when all requests have their first one."""
    begin = max(line.times_s[0] for line in timelines)
    gaps = [b - a for line in timelines for a, b in zip(line.times_s, line.times_s[1:], strict=False) if a >= begin]
    return percentile(gaps, 50)
