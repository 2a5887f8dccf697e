"""Prometheus' text format (0.0.4), written with as little work as a scrape can be.

What stays the same from scrape to scrape (names, help, labels) is put together once and kept; a scrape writes numbers
behind it. Label values are few: routes, states, actors.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import accumulate
from typing import Any

from novainfer.inspection import Histogram, HistogramRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTER, GAUGE, HISTOGRAM, SUMMARY = "counter", "gauge", "histogram", "summary"
KEPT_MAX = 4096  # beginnings of lines of one metric: more values of its labels are not kept
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_BOOTED = re.compile(r"^btime (\d+)$", re.MULTILINE)


class Family:
    """One metric: its name, kind and help, and the names of its labels, in order of the alphabet."""

    def __init__(self, name: str, kind: str, text: str, *labels: str) -> None:
        assert list(labels) == sorted(labels), f"{name}: labels in order, so that lines of all families look alike"
        self._name = name
        self._head = f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        self._labels = labels
        self._kept: dict[Any, str] = {}

    def one(self, value: float, *of: str) -> str:
        """Its only line: a number for these values of its labels."""
        return f"{self._head}{self._begin(of)}{value!r}\n"

    def each(self, values: Mapping[Any, float]) -> str:
        """A line for the values of its labels: a tuple of them, or the one there is."""
        found = [f"{self._begin(key)}{float(values[key])!r}\n" for key in sorted(values)]
        return self._head + "".join(found)

    def _begin(self, of: Any) -> str:
        begin = self._kept.get(of)
        if begin is None:
            texts = of if isinstance(of, tuple) else (of,)
            begin = f"{self._name}{shown(zip(self._labels, texts, strict=True))} "
            if len(self._kept) < KEPT_MAX:
                self._kept[of] = begin
        return begin


class HistogramFamily:
    """A metric of buckets, their sum and their count."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._head = f"# HELP {name} {text}\n# TYPE {name} {HISTOGRAM}\n"
        self._labels = labels
        self._kept: dict[tuple[str, ...], list[str]] = {}

    def one(self, histogram: Histogram | HistogramRecord, *of: str) -> str:
        """All its lines, for these values of its labels."""
        begins = self._kept.get(of)
        if begins is None:
            begins = self._kept[of] = list(self._begins(histogram.bounds, of))
        lines = [f"{begin}{count}.0\n" for begin, count in zip(begins, accumulate(histogram.counts), strict=False)]
        count, total = begins[-2:]
        return f"{self._head}{''.join(lines)}{count}{sum(histogram.counts)}.0\n{total}{histogram.sum!r}\n"

    def _begins(self, bounds: tuple[float, ...], of: tuple[str, ...]) -> Iterator[str]:
        labels = dict(zip(self._labels, of, strict=True))
        for bound in (*(str(float(bound)) for bound in bounds), "+Inf"):
            yield f"{self._name}_bucket{shown(sorted({**labels, 'le': bound}.items()))} "
        for ending in ("_count", "_sum"):
            yield f"{self._name}{ending}{shown(labels.items())} "


class SummaryFamily:
    """A metric of sums and counts, for each value of one label."""

    def __init__(self, name: str, text: str, label: str) -> None:
        self._name = name
        self._head = f"# HELP {name} {text}\n# TYPE {name} {SUMMARY}\n"
        self._label = label

    def each(self, values: Mapping[str, tuple[float, int]]) -> str:
        """Sum and count for each value of the label."""
        name, lines = self._name, [self._head]
        for value, (total, count) in values.items():
            labels = shown([(self._label, value)])
            lines.append(f"{name}_count{labels} {float(count)!r}\n{name}_sum{labels} {float(total)!r}\n")
        return "".join(lines)


def of_model(part: str, model: str) -> str:
    """The lines of a metric with the label `model_name`, for one that is an engine's and there are several."""
    label = shown([("model_name", model)])[1:-1]
    lines = part.splitlines(keepends=True)
    for at, line in enumerate(lines):
        if line.startswith("#") or 'model_name="' in line:
            continue
        name, brace, rest = line.partition("{")
        if brace:
            lines[at] = f"{name}{{{label},{rest}"
        else:
            name, _, rest = line.partition(" ")
            lines[at] = f"{name}{{{label}}} {rest}"
    return "".join(lines)


def together(parts: Iterable[str]) -> str:
    """The metrics of `parts`, those of one name below one head."""
    lines: dict[str, list[str]] = {}
    for part in parts:
        head_end = part.index("\n", part.index("\n") + 1) + 1
        lines.setdefault(part[:head_end], []).append(part[head_end:])
    return "".join(head + "".join(found) for head, found in lines.items())


def shown(labels: Any) -> str:
    """Labels as they stand behind a name: nothing where there are none."""
    pairs = [f'{name}="{str(value).translate(_ESCAPED)}"' for name, value in labels]
    return f"{{{','.join(pairs)}}}" if pairs else ""


_VIRTUAL = Family("process_virtual_memory_bytes", GAUGE, "Address space")
_RESIDENT = Family("process_resident_memory_bytes", GAUGE, "Memory")
_STARTED = Family("process_start_time_seconds", GAUGE, "When it started, in seconds since 1970")
_CPU = Family("process_cpu_seconds_total", COUNTER, "CPU time of user and system")
_OPEN = Family("process_open_fds", GAUGE, "Open file descriptors")
_OPEN_MAX = Family("process_max_fds", GAUGE, "How many it may open")


def process_text() -> str:
    """The lines of this process, by the names that Prometheus' own clients use; without /proc, those that need none."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    parts = [_CPU.one(used.ru_utime + used.ru_stime)]
    parts.append(_OPEN_MAX.one(float(resource.getrlimit(resource.RLIMIT_NOFILE)[0])))
    started_s = _started_s()
    if started_s is not None:
        with open("/proc/self/statm", "rb") as file:
            virtual, resident, *_ = file.read().split()
        page_bytes = resource.getpagesize()
        parts.append(_VIRTUAL.one(float(int(virtual) * page_bytes)))
        parts.append(_RESIDENT.one(float(int(resident) * page_bytes)))
        parts.append(_STARTED.one(started_s))
        parts.append(_OPEN.one(float(_num_open())))
    return "".join(parts)


def _num_open() -> int:
    """Linux 6.2 and newer tell the number at once; listing ten thousand takes milliseconds."""
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))


@cache
def _started_s() -> float | None:
    """When this process started, in seconds since 1970; None where there is no /proc."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            booted = _BOOTED.search(file.read())
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None
    return int(booted[1]) + ticks / os.sysconf("SC_CLK_TCK") if booted else None
