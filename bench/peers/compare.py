"""The engine beside its peers: the same model, the same prompts, in turns, one precision after the other.

Within a precision all systems are up, each in a process and an environment of its own, and one works at a time: each
workload is answered by each of them in turn, and who begins changes with the repetition. For prompts of 8k, and as
servers, they are started once more, so that each has the room that its work needs and no more. Before and after each
run a probe looks at how fast the machine reads and multiplies just then, and a run's roof is the better of its two
looks. Ratios are formed within a repetition; what is reported is their median, and their spread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from novainfer.bench.ideal import Geometry, ideal_s, ideal_served_s
from novainfer.bench.machine import cache_dir, describe
from novainfer.bench.offline import BLOCK_SIZE, ours
from novainfer.bench.peers.files import FileError
from novainfer.bench.peers.http import HTTP_WORK, take_http
from novainfer.bench.peers.known import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    OURS,
    PASSIVE,
    WARM_UPS,
    Place,
    SystemSpec,
    peer_systems,
    programs,
)
from novainfer.bench.peers.probe import Probe
from novainfer.bench.peers.records import Records
from novainfer.bench.peers.report import FORMAT, render, targets
from novainfer.bench.report import targets_json
from novainfer.bench.serve import CLIENTS, our_server
from novainfer.bench.worker import Child, ChildError, Task
from novainfer.bench.workload import LONG, TRAFFIC, WORKLOADS, Traffic, Workload

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
    http_work: Workload | None = HTTP_WORK,
    repeat: int = 3,
    progress: Say = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """The report and its tables; `peers` says where each one is.

    A peer that does not start is left out; one that fails in a work is started anew for the others, and its reason is
    in the report.
    """
    parts = _parts(workloads, traffic, http_work)
    groups: dict[str, Any] = {}
    with programs() as folder, Probe() as probe:
        for precision in precisions:
            geometry = Geometry.read(model_dir, WEIGHT_BYTES[precision])
            works: dict[str, Any] = {}
            for part in parts:
                records = Records(precision, probe, progress)
                place = _place(model_dir, part)
                specs = [_ours(place, precision)]
                for name, where in peers.items():
                    try:
                        spec = peer_systems(name, where, precision, place, folder)
                    except FileError as error:
                        records.leave_out(f"{name} {precision}", part.names, error)
                    else:
                        specs += [] if spec is None else [spec]
                works |= _measured(part, specs, geometry, records, repeat, place)
            groups[precision] = {"workloads": works}
    asked = {work for part in parts for work in part.works}
    report = {
        "benchmark": "peers",
        "format": FORMAT,
        "model": model_dir.name,
        # what is smaller than its name says was promised nothing
        "is_reference": Geometry.read(model_dir).is_reference
        and asked <= {*WORKLOADS, LONG, HTTP_WORK}
        and traffic in (None, TRAFFIC),
        "machine": describe(),
        "precisions": groups,
    }
    promised = targets(report)
    report["targets"] = targets_json(promised)
    return report, render(report, promised)


@dataclass(frozen=True, slots=True)
class _Part:
    """Works that are answered by the same start of all systems, which has room for them and for no larger ones."""

    works: tuple[Workload, ...]
    traffic: Traffic | None = None
    is_served: bool = False

    @property
    def titles(self) -> dict[str, str]:
        """By name."""
        found = {work.name: work.title for work in self.works}
        if self.is_served:
            return {name: f"{title}, {CLIENTS} clients over HTTP" for name, title in found.items()}
        return found if self.traffic is None else {**found, self.traffic.name: self.traffic.title}

    @property
    def names(self) -> list[str]:
        """Of its works."""
        return [*self.titles]


def _parts(workloads: Sequence[Workload], traffic: Traffic | None, http_work: Workload | None) -> list[_Part]:
    """Prompts of 8k apart: a peer whose cache must hold them is not at its best in the others."""
    short = tuple(work for work in workloads if work.name != LONG.name)
    long = tuple(work for work in workloads if work.name == LONG.name)
    parts = [_Part(short, traffic), _Part(long)]
    parts += [] if http_work is None else [_Part((http_work,), is_served=True)]
    return [part for part in parts if part.names]


def _measured(
    part: _Part, specs: Sequence[SystemSpec], geometry: Geometry, records: Records, repeat: int, place: Place
) -> dict[str, Any]:
    """What came of each work of a part, and with what it was measured."""
    starts: dict[str, Any] = {}
    if part.is_served:
        (work,) = part.works
        take_http(specs, work, repeat, records)
        ideals = {work.name: partial(ideal_served_s, work, CLIENTS, geometry)}
    else:
        starts = _Group(specs, geometry.config.vocab_size, records, part).run(repeat)
        ideals = {work.name: partial(ideal_s, work, geometry) for work in part.works}
    return {
        name: {
            "title": part.titles[name],
            "date": describe()["date"],
            "repeat": repeat,
            "settings": place.options,
            "starts": starts,
            "left_out": records.left_out(name, repeat),
            "systems": systems,
        }
        for name, systems in records.compared(ideals).items()
    }


def _place(model_dir: Path, part: _Part) -> Place:
    """Room for the largest of what is asked, and a quarter more tokens."""
    sizes = [(work.num_requests, work.prompt_len + work.max_tokens) for work in part.works]
    sizes += [(len(task.prompts), len(task.prompts[0]) + task.max_tokens) for task in WARM_UPS]
    if (traffic := part.traffic) is not None:
        sizes.append((traffic.num_requests, traffic.prompt_lens[1] + traffic.lengths[1]))
    longest = max(length for _, length in sizes)
    return Place(
        model_dir=model_dir,
        forms=cache_dir() / f"{model_dir.name}-forms",
        max_model_len=-(-(longest + BLOCK_SIZE) // BLOCK_SIZE) * BLOCK_SIZE,
        max_num_tokens=max(number * length for number, length in sizes) * 5 // 4,
        max_requests=CLIENTS if part.is_served else max(number for number, _ in sizes),
    )


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
    model = str(place.model_dir)
    return SystemSpec(OURS, precision, tuple(ours(model, options)), PASSIVE, our_server(model, *flags))


class _Group:
    """All systems of one precision, while they are up for one part of the works."""

    def __init__(self, specs: Sequence[SystemSpec], vocab_size: int, records: Records, part: _Part) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._vocab_size = vocab_size
        self._records = records
        self._part = part
        self._children: dict[str, Child] = {}
        self._facts: dict[str, Any] = {}
        self._failed: set[tuple[str, str]] = set()  # a system, and the work that it cannot do

    def run(self, repeat: int) -> dict[str, Any]:
        """Start all, let each answer everything, and say what they are."""
        traffic = self._part.traffic
        with ExitStack() as stack:
            self._stack = stack
            for name in self._specs:
                self._start(name)
            for repetition in range(repeat):
                for workload in self._part.works:
                    self._each(workload.name, repetition, partial(self._answer, workload, repetition))
                if traffic is not None:
                    self._each(traffic.name, repetition, partial(self._take_traffic, traffic, repetition))
        return self._facts

    def _start(self, name: str) -> None:
        spec = self._specs[name]
        self._records.progress(f"{spec.precision}: starting {name}")
        try:
            child = self._stack.enter_context(Child(spec.command, spec.environment))
            for task in WARM_UPS:
                child.run(task)
        except ChildError as error:
            self._records.leave_out(name, self._part.names, error)
            return
        self._children[name] = child
        ready = child.ready
        self._facts[name] = {
            "version": ready.version,
            "import_s": ready.import_s,
            "load_s": ready.load_s,
            **ready.facts,
        }

    def _each(self, work: str, repetition: int, ask: Callable[[str, Child], None]) -> None:
        """Every system in turn; one that fails is started anew, and not asked for this work again."""
        names = [*self._children]
        shift = repetition % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            if (name, work) in self._failed:
                continue
            try:
                ask(name, self._children[name])
            except ChildError as error:
                self._failed.add((name, work))
                self._records.leave_out(name, [work], error)
                self._children.pop(name).close()
                self._start(name)

    def _answer(self, workload: Workload, repetition: int, name: str, child: Child) -> None:
        task = Task(prompts=workload.prompts(self._vocab_size, repetition), max_tokens=workload.max_tokens)
        self._records.take(workload.name, name, repetition, lambda: child.run(task))

    def _take_traffic(self, traffic: Traffic, repetition: int, name: str, child: Child) -> None:
        """At 70 % of what the system answers when all requests are there at once, by the same clock as all others."""
        if not child.ready.facts["takes_arrivals"]:
            return
        prompts, lengths = traffic.requests(self._vocab_size, 2 * repetition)
        at_once = child.run(Task(prompts=prompts, max_tokens=max(lengths), lengths=lengths))
        per_s = traffic.load * traffic.num_requests / at_once.wall_s
        prompts, lengths = traffic.requests(self._vocab_size, 2 * repetition + 1)  # others: no cache knows them
        clock = traffic.arrivals_s(per_s, repetition)
        task = Task(prompts=prompts, max_tokens=max(lengths), lengths=lengths, arrivals_s=clock)
        self._records.take(traffic.name, name, repetition, lambda: child.run(task), {"requests_per_s": per_s})
