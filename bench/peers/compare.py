"""The engine beside its peers: the same model, the same prompts, in turns, one precision after the other.

Within a precision all systems are up, each in a process and an environment of its own, and one works at a time: each
workload is answered by each of them in turn, and who begins changes with the repetition. Before and after each run a
probe looks at how fast the machine reads and multiplies just then, and a run's roof is the better of its two looks.
Ratios are formed within a repetition; what is reported is their median, and their spread.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from novainfer.bench.ideal import Geometry, Roof, ideal_s
from novainfer.bench.machine import cache_dir, describe
from novainfer.bench.offline import BLOCK_SIZE, WARM_UP, ours
from novainfer.bench.peers.files import FileError
from novainfer.bench.peers.http import HTTP_WORK, measure_http
from novainfer.bench.peers.known import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    OURS,
    Place,
    SystemSpec,
    peer_systems,
    programs,
)
from novainfer.bench.peers.probe import Look, Probe
from novainfer.bench.peers.report import render, targets
from novainfer.bench.report import targets_json
from novainfer.bench.statistic import median_ratio, medians, ratios, spread, summary
from novainfer.bench.worker import Child, ChildError, Result, Task
from novainfer.bench.workload import Traffic, Workload

__all__ = ["WEIGHT_BYTES", "run"]

WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5}  # of an element, by which a precision's roof is counted
QUANTIZATION = {"bf16": None, "int8": "int8", "int4": "int4"}
Say = Callable[[str], None]


def run(
    model_dir: Path,
    peers: Mapping[str, str],
    *,
    precisions: Sequence[str],
    workloads: Sequence[Workload],
    traffic: Traffic | None = None,
    with_http: bool = True,
    repeat: int = 3,
    progress: Say = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """The report and its tables; `peers` says where each one is.

    A peer that does not start, or fails on the way, is left out from then on, with its reason in the report.
    """
    asked = [*workloads, HTTP_WORK] if with_http else workloads
    longest = max([w.prompt_len + w.max_tokens for w in asked], default=0)
    together = max([w.num_requests * (w.prompt_len + w.max_tokens) for w in asked], default=0)
    if traffic is not None:
        sizes = traffic.prompt_lens[1] + traffic.lengths[1]
        longest, together = max(longest, sizes), max(together, traffic.num_requests * sizes)
    max_len = -(-(longest + BLOCK_SIZE) // BLOCK_SIZE) * BLOCK_SIZE
    place = Place(model_dir, cache_dir() / f"{model_dir.name}-forms", max_len, together * 5 // 4)
    groups: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    with programs() as folder:
        for precision in precisions:
            specs = [_ours(place, precision)]
            for name, where in peers.items():
                try:
                    spec = peer_systems(name, where, precision, place, folder)
                except FileError as error:
                    skipped[f"{name} {precision}"] = str(error)
                else:
                    specs += [] if spec is None else [spec]
            group = _Group(specs, place, skipped, progress)
            groups[precision] = group.run(precision, workloads, traffic, repeat)
            if with_http:
                groups[precision]["http"] = measure_http(specs, HTTP_WORK, repeat, skipped, progress)
    report = {
        "benchmark": "peers",
        "model": model_dir.name,
        "machine": describe(),
        "repeat": repeat,
        "settings": place.options,
        "skipped": skipped,
        "precisions": groups,
    }
    promised = targets(report) if Geometry.read(model_dir).is_reference else []
    report["targets"] = targets_json(promised)
    return report, render(report, promised)


def _ours(place: Place, precision: str) -> SystemSpec:
    options: dict[str, Any] = {
        "max_model_len": place.max_model_len,
        "num_kv_blocks": -(-place.max_num_tokens // BLOCK_SIZE),
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
    }
    flags: tuple[str, ...] = ("--max-model-len", str(place.max_model_len))
    if (quantization := QUANTIZATION[precision]) is not None:
        options["quantization"] = quantization
        flags += ("--quantization", quantization)
    command = ours(str(place.model_dir), options)
    server = (command[0], "-m", "novainfer.server", str(place.model_dir), "--port", "{port}", *flags)
    return SystemSpec(OURS, precision, tuple(command), {}, server)


class _Group:
    """All systems of one precision, while they are up."""

    def __init__(self, specs: Sequence[SystemSpec], place: Place, skipped: dict[str, str], progress: Say) -> None:
        self._specs = specs
        self._place = place
        self._skipped = skipped
        self._progress = progress
        self._children: dict[str, Child] = {}
        self._runs: dict[str, dict[str, list[dict[str, Any]]]] = {}  # workload -> system -> one record a repetition
        self._memory: dict[str, list[Result]] = {}

    def run(
        self, precision: str, workloads: Sequence[Workload], traffic: Traffic | None, repeat: int
    ) -> dict[str, Any]:
        """Start all, let each answer everything, and say what came of it."""
        geometry = Geometry.read(self._place.model_dir, WEIGHT_BYTES[precision])
        with ExitStack() as stack:
            for spec in self._specs:
                self._progress(f"{precision}: starting {spec.name}")
                with self._left_out_if_it_fails(spec.name):
                    child = stack.enter_context(Child(spec.command, spec.environment))
                    child.run(WARM_UP)
                    self._children[spec.name] = child
            self._probe = stack.enter_context(Probe())
            for repetition in range(repeat):
                for workload in workloads:
                    prompts = workload.prompts(geometry.config.vocab_size, repetition)
                    task = Task(prompts=prompts, max_tokens=workload.max_tokens)
                    for name in self._turns(repetition):
                        with self._left_out_if_it_fails(name):
                            self._measure(workload.name, name, task)
                if traffic is not None:
                    self._take_traffic(traffic, geometry.config.vocab_size, repetition)
            ready = {name: child.ready for name, child in self._children.items()}
        titles = {w.name: w.title for w in workloads}
        if traffic is not None:
            titles[traffic.name] = traffic.title
        ideals = {w.name: lambda look, w=w: ideal_s(w, geometry, _roof(look, precision)) for w in workloads}
        return {
            "systems": {
                name: {"version": r.version, "import_s": r.import_s, "load_s": r.load_s, **r.facts}
                for name, r in ready.items()
            },
            "workloads": {
                name: {"title": titles[name], "systems": _compared(runs, ideals.get(name))}
                for name, runs in self._runs.items()
            },
            "peak_mb": {
                name: max(result.memory.peak_bytes for result in results) / 1e6
                for name, results in self._memory.items()
            },
        }

    def _turns(self, repetition: int) -> list[str]:
        names = list(self._children)
        shift = repetition % max(1, len(names))
        return names[shift:] + names[:shift]

    @contextmanager
    def _left_out_if_it_fails(self, name: str) -> Iterator[None]:
        """A peer that fails is not asked again; NovaInfer must not fail."""
        try:
            yield
        except ChildError as error:
            if name == OURS:
                raise
            self._skipped[name] = str(error)
            self._children.pop(name, None)
            self._progress(f"{name} is left out: {error}")

    def _measure(self, workload: str, name: str, task: Task) -> None:
        before = self._probe.look()
        result = self._children[name].run(task)
        look = before.at_least(self._probe.look())
        record = summary(result.timelines, result.wall_s) | {"cpu_s": result.cpu_s, "look": msgspec.to_builtins(look)}
        self._runs.setdefault(workload, {}).setdefault(name, []).append(record)
        self._memory.setdefault(name, []).append(result)
        self._progress(f"{workload} {name}: {record['output_tok_s']:.1f} output tok/s")

    def _take_traffic(self, traffic: Traffic, vocab_size: int, repetition: int) -> None:
        """At 70 % of what each system answers when all requests are there at once, by the same clock."""
        for name in self._turns(repetition):
            child = self._children[name]
            if not child.ready.facts["takes_arrivals"]:
                continue
            with self._left_out_if_it_fails(name):
                prompts, lengths = traffic.requests(vocab_size, 2 * repetition)
                at_once = child.run(Task(prompts=prompts, max_tokens=max(lengths), lengths=lengths))
                per_s = traffic.load * traffic.num_requests / at_once.wall_s
                prompts, lengths = traffic.requests(vocab_size, 2 * repetition + 1)  # others: no cache knows them
                clock = traffic.arrivals_s(per_s, repetition)
                task = Task(prompts=prompts, max_tokens=max(lengths), lengths=lengths, arrivals_s=clock)
                self._measure(traffic.name, name, task)
                self._runs[traffic.name][name][-1]["requests_per_s"] = per_s


def _roof(look: Look, precision: str) -> Roof:
    return Roof(bytes_per_s=look.bytes_per_s, flops_per_s=look.bf16_per_s if precision == "bf16" else look.int8_per_s)


def _compared(
    runs: Mapping[str, list[dict[str, Any]]], ideal: Callable[[Look], float] | None
) -> dict[str, dict[str, Any]]:
    """The medians of each system, our ratio to it, and its share of the roof."""
    own = runs[OURS]
    found: dict[str, dict[str, Any]] = {}
    for name, records in runs.items():
        pairs = ratios(
            [record["output_tok_s"] for record in own[: len(records)]], [record["output_tok_s"] for record in records]
        )
        found[name] = medians(records) | {
            "ratio": statistics.median(pairs),
            "ratio_spread": spread(pairs),
            "cpu_ratio": median_ratio(
                [record["cpu_s"] for record in records], [record["cpu_s"] for record in own[: len(records)]]
            ),
            "runs": records,
        }
        if ideal is not None:
            shares = [ideal(msgspec.convert(record["look"], Look)) / record["wall_s"] for record in records]
            found[name] |= {"share_of_roof": statistics.median(shares), "share_spread": spread(shares)}
    return found
