"""Runs between two looks at the machine, and what that is worth: medians, ratios, shares of the roof."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from novainfer.bench.ideal import Roof
from novainfer.bench.peers.known import OURS
from novainfer.bench.peers.probe import Look, Probe
from novainfer.bench.statistic import median_ratio, medians, ratios, spread, summary
from novainfer.bench.worker import Result

__all__ = ["Records"]

Record = dict[str, Any]


class Records:
    """The runs of one precision, and why there are no more: work -> system -> repetition."""

    def __init__(self, precision: str, probe: Probe, progress: Callable[[str], None]) -> None:
        self.progress = progress
        self._precision = precision
        self._probe = probe
        self._runs: dict[str, dict[str, dict[int, Record]]] = {}
        self._left_out: dict[str, dict[str, str]] = {}

    def take(
        self, work: str, system: str, repetition: int, run: Callable[[], Result], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Keep what `run` gives, with `facts`; what it raises leaves no trace."""
        before = self._probe.look()
        result = run()
        look = before.at_least(self._probe.look())
        record = summary(result.timelines, result.wall_s) | {
            "cpu_s": result.cpu_s,
            "peak_mb": result.memory.peak_bytes / 1e6,
            "look": msgspec.to_builtins(look),
        }
        self._runs.setdefault(work, {}).setdefault(system, {})[repetition] = record | dict(facts or {})
        self.progress(f"{work} {self._precision} {system}: {record['output_tok_s']:.1f} output tok/s")

    def leave_out(self, system: str, works: Sequence[str], error: Exception) -> None:
        """From now on `system` answers none of `works`; raises `error` where that is ours, which must not fail."""
        if system.startswith(OURS):
            raise error
        for work in works:
            self._left_out.setdefault(work, {}).setdefault(system, str(error))
        self.progress(f"{system} is left out of {', '.join(works)}: {error}")

    def left_out(self, work: str, repeat: int) -> dict[str, str]:
        """Why a system has fewer than `repeat` runs of this work, or none; the first reason of each."""
        runs = self._runs[work]
        return {
            system: reason
            for system, reason in self._left_out.get(work, {}).items()
            if len(runs.get(system, ())) < repeat
        }

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
            "ttft_ratio": median_ratio(
                [a["ttft_ms"]["p50"] for a, _ in pairs], [b["ttft_ms"]["p50"] for _, b in pairs]
            ),
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
