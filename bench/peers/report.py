"""The tables of `novainfer bench peers`, what was promised, and one report of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from novainfer.bench.peers.http import LIBRARY
from novainfer.bench.peers.known import OURS
from novainfer.bench.report import Target, speed_table, targets_table

__all__ = ["MergeError", "merged", "render", "targets"]

SHARES_WANTED = {
    ("W1", "bf16"): 0.85,
    ("W2", "bf16"): 0.88,
    ("W3", "bf16"): 0.92,
    ("W4", "bf16"): 0.88,
    ("W1", "int8"): 0.80,
}
BEST = "the best peer"
RATIOS_WANTED = {  # output tok/s, ours over a peer's
    ("W1", "bf16", BEST): 1.3,
    ("W1", "int8", "llama.cpp Q8_0"): 1.5,
    ("W1", "int4", "llama.cpp Q4_K_M"): 1.3,
    ("W2", "int8", "vllm W8A8"): 1.5,
    ("W2", "int8", "openvino Q8_0"): 1.5,
    ("W2", "int4", "llama.cpp Q4_K_M"): 1.5,
    ("W3", "int8", "vllm W8A8"): 1.4,
    ("W4", "int8", "vllm W8A8"): 1.5,
}
HTTP_SHARE_WANTED = 0.95  # of the library's rate
HTTP_TTFT_MAX = 0.5  # of vLLM's median


class MergeError(Exception):
    """Reports that are not of one model on one kind of machine."""


def targets(report: dict[str, Any]) -> list[Target]:
    """What was promised for the shape that the targets are written for; of another model, nothing."""
    if not report["is_reference"]:
        return []
    found: list[Target] = []
    for (work, precision), wanted in SHARES_WANTED.items():
        share = _systems(report, precision, work).get(OURS, {}).get("share_of_roofline")
        found.append(Target(name=f"{work} {precision}: share of the roof", wanted=wanted, measured=share))
    for (work, precision, peer), wanted in RATIOS_WANTED.items():
        systems = _systems(report, precision, work)
        others = [system["ratio"] for name, system in systems.items() if name != OURS and peer in (name, BEST)]
        measured = min(others) if others else None  # the smallest ratio is to the best
        name = f"{work} {precision}: output tok/s over {peer}"
        found.append(Target(name=name, wanted=wanted, measured=measured, unit="x"))
    served = _systems(report, "bf16", "W5")
    share = served[LIBRARY]["ratio"] if LIBRARY in served else None  # ours over the library's
    found.append(Target(name="W5 bf16: output tok/s, of the library's", wanted=HTTP_SHARE_WANTED, measured=share))
    vllm = served.get("vllm bf16")
    ttft = None if vllm is None else served[OURS]["ttft_ms"]["p50"] / vllm["ttft_ms"]["p50"]
    found.append(Target(name="W5 bf16: TTFT p50, of vLLM's", wanted=HTTP_TTFT_MAX, measured=ttft, at_most=True))
    return found


def _systems(report: dict[str, Any], precision: str, work: str) -> dict[str, dict[str, Any]]:
    group = report["precisions"].get(precision, {"workloads": {}})
    found: dict[str, dict[str, Any]] = group["workloads"].get(work, {"systems": {}})["systems"]
    return found


def render(report: dict[str, Any], promised: Sequence[Target]) -> str:
    """A table for each precision, who was left out, targets."""
    parts = [_table(report, precision, group) for precision, group in report["precisions"].items()]
    parts += [f"{name} was left out: {reason}" for name, reason in report["skipped"].items()]
    if promised:
        parts.append(targets_table(list(promised)))
    return "\n\n".join(parts)


def _table(report: dict[str, Any], precision: str, group: dict[str, Any]) -> str:
    works = sorted(group["workloads"].items())
    titles = "; ".join(f"{name} {work['title']} ({work['repeat']} x, {work['date']})" for name, work in works)
    sizes = ", ".join(f"{name} {size:.0f}" for name, size in group["peak_mb"].items())
    place = f"{report['model']} in {precision} on {report['machine']['cpu']}, interleaved, medians (from-to)"
    title = f"{place}\n{titles}\nat most resident, MB: {sizes}"
    return speed_table(
        title, ((name, system, found) for name, work in works for system, found in work["systems"].items())
    )


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several; of a work that is in more than one, the last. Raises `MergeError`.

    A work's ratios and shares stay those of its own run: systems of one run are never set beside another's.
    """
    whole: dict[str, Any] = {**reports[-1], "skipped": {}, "precisions": {}}
    for report in reports:
        for field, value in (("benchmark", "peers"), ("model", whole["model"])):
            if report.get(field) != value:
                raise MergeError(f"{field} must be {value!r} in all reports, not {report.get(field)!r}")
        if report["machine"]["cpu"] != whole["machine"]["cpu"]:
            raise MergeError(f"reports are of two machines: {report['machine']['cpu']} and {whole['machine']['cpu']}")
        whole["skipped"] |= report["skipped"]
        for precision, group in report["precisions"].items():
            into = whole["precisions"].setdefault(precision, {"systems": {}, "workloads": {}, "peak_mb": {}})
            into["systems"] |= group["systems"]
            into["workloads"] |= group["workloads"]
            for name, size in group["peak_mb"].items():
                into["peak_mb"][name] = max(size, into["peak_mb"].get(name, 0.0))
    return whole
