"""Runs between two looks at the machine, and what that is worth: medians, ratios, shares of the roof."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from novainfer.bench.ideal import Roof
from novainfer.bench.peers.known import OURS
from novainfer.bench.peers.probe import Look, Probe
from novainfer.bench.statistic import medians, ratios, spread, summary
from novainfer.bench.worker import Result

__all__ = ["Records"]

Record = dict[str, Any]


class Records:
    """The runs of one precision: work -> system -> repetition."""

    def __init__(self, precision: str, probe: Probe, progress: Callable[[str], None]) -> None:
        self._precision = precision
        self._probe = probe
        self._progress = progress
        self._runs: dict[str, dict[str, dict[int, Record]]] = {}
        self._peak_bytes: dict[str, int] = {}

    def take(
        self, work: str, system: str, repetition: int, run: Callable[[], Result], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Keep what `run` gives, with `facts`; what it raises leaves no trace."""
        before = self._probe.look()
        result = run()
        look = before.at_least(self._probe.look())
        record = summary(result.timelines, result.wall_s) | {"cpu_s": result.cpu_s, "look": msgspec.to_builtins(look)}
        self._runs.setdefault(work, {}).setdefault(system, {})[repetition] = record | dict(facts or {})
        self._peak_bytes[system] = max(self._peak_bytes.get(system, 0), result.memory.peak_bytes)
        self._progress(f"{work} {self._precision} {system}: {record['output_tok_s']:.1f} output tok/s")

    def peak_mb(self) -> dict[str, float]:
        """The most that each system's processes held, in 10^6 bytes."""
        return {system: peak / 1e6 for system, peak in self._peak_bytes.items()}

    def compared(self, ideals: Mapping[str, Callable[[Roof], float]]) -> dict[str, dict[str, Record]]:
        """work -> system -> medians, our ratio to it, and its share of the roof where `ideals` tells the least time."""
        return {
            work: {system: self._worth(runs[OURS], found, ideals.get(work)) for system, found in runs.items()}
            for work, runs in self._runs.items()
        }

    def _worth(
        self, own: Mapping[int, Record], found: Mapping[int, Record], ideal: Callable[[Roof], float] | None
    ) -> Record:
        runs = [*found.values()]
        pairs = [(own[repetition], run) for repetition, run in found.items()]
        to_own = ratios([a["output_tok_s"] for a, _ in pairs], [b["output_tok_s"] for _, b in pairs])
        worth = medians(runs) | {
            "ratio": statistics.median(to_own),
            "ratio_spread": spread(to_own),
            "cpu_ratio": statistics.median(b["cpu_s"] / a["cpu_s"] for a, b in pairs),
            "runs": runs,
        }
        if ideal is not None:
            shares = [ideal(self._roof(run)) / run["wall_s"] for run in runs]
            worth |= {"share_of_roofline": statistics.median(shares), "share_spread": spread(shares)}
        return worth

    def _roof(self, run: Record) -> Roof:
        look = msgspec.convert(run["look"], Look)
        flops_per_s = look.bf16_per_s if self._precision == "bf16" else look.int8_per_s
        return Roof(bytes_per_s=look.bytes_per_s, flops_per_s=flops_per_s)
