"""The tables of `novainfer bench peers`, what was promised, and one report of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from novainfer.bench.peers.http import LIBRARY
from novainfer.bench.peers.known import OURS
from novainfer.bench.report import Target, speed_table, targets_table

__all__ = ["FORMAT", "MergeError", "label", "merged", "render", "targets"]

FORMAT = 2  # of the report; 1 had settings, memory and who was left out for all works together

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
    ttft = served["vllm bf16"]["ttft_ratio"] if "vllm bf16" in served else None
    found.append(Target(name="W5 bf16: TTFT p50, of vLLM's", wanted=HTTP_TTFT_MAX, measured=ttft, at_most=True))
    return found


def _systems(report: dict[str, Any], precision: str, work: str) -> dict[str, dict[str, Any]]:
    group = report["precisions"].get(precision, {"workloads": {}})
    found: dict[str, dict[str, Any]] = group["workloads"].get(work, {"systems": {}})["systems"]
    return found


def render(report: dict[str, Any], promised: Sequence[Target]) -> str:
    """A table for each precision, who was left out, targets."""
    parts = [_table(report, precision, group) for precision, group in report["precisions"].items()]
    parts += _left_out(report)
    if promised:
        parts.append(targets_table(list(promised)))
    return "\n\n".join(parts)


def _table(report: dict[str, Any], precision: str, group: dict[str, Any]) -> str:
    works = sorted(group["workloads"].items())
    titles = "; ".join(f"{name} {work['title']} ({work['repeat']} x, {work['date']})" for name, work in works)
    place = f"{report['model']} in {precision} on {report['machine']['cpu']}, interleaved, medians (from-to)"
    return speed_table(
        f"{place}\n{titles}",
        (
            (name, label(system, found, work), found)
            for name, work in works
            for system, found in work["systems"].items()
        ),
    )


def label(system: str, found: Mapping[str, Any], work: Mapping[str, Any]) -> str:
    """Its name, and how often it answered a work before it failed, where that is not as often as the others."""
    number = len(found["runs"])
    return system if number == work["repeat"] else f"{system} ({number} x)"


def _left_out(report: dict[str, Any]) -> list[str]:
    works: dict[tuple[str, str], list[str]] = {}
    for group in report["precisions"].values():
        for name, work in sorted(group["workloads"].items()):
            for system, reason in work["left_out"].items():
                works.setdefault((system, reason), []).append(name)
    return [f"{system} was left out of {', '.join(names)}: {reason}" for (system, reason), names in works.items()]


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several; of a work that is in more than one, the last. Raises `MergeError`.

    A work's ratios and shares stay those of its own run, and so do its settings and who was left out of it: systems of
    one run are never set beside another's.
    """
    whole: dict[str, Any] = {**reports[-1], "precisions": {}}
    for report in reports:
        for field, value in (("benchmark", "peers"), ("format", FORMAT), ("model", whole.get("model"))):
            if report.get(field) != value:
                raise MergeError(f"{field} must be {value!r} in all reports, not {report.get(field)!r}: measure again")
        if report["is_reference"] != whole["is_reference"]:
            raise MergeError("is_reference must be the same in all reports: some are of works of a smaller --scale")
        if report["machine"]["cpu"] != whole["machine"]["cpu"]:
            raise MergeError(f"reports are of two machines: {report['machine']['cpu']} and {whole['machine']['cpu']}")
        for precision, group in report["precisions"].items():
            into = whole["precisions"].setdefault(precision, {"workloads": {}})
            into["workloads"] |= group["workloads"]
    return whole
