"""The tables of `novainfer bench offline`, and what was promised."""

from __future__ import annotations

from typing import Any

from novainfer.bench.report import Target, speed_table, table, targets_table

RATIOS_WANTED = {"W1": 2.2, "W2": 1.7, "W3": 1.3, "W4": 8.0}  # to transformers' generate, output tok/s
CACHED_TTFT_MAX = 0.15  # of the first request's
REST_MB_MAX = 350.0  # resident beside weights and KV cache


def targets(report: dict[str, Any]) -> list[Target]:
    """The promises that this report can say something about."""
    found = []
    for name, wanted in RATIOS_WANTED.items():
        peer = report["workloads"].get(name, {}).get("transformers")
        found.append(
            Target(
                name=f"{name}: output tok/s over transformers",
                wanted=wanted,
                measured=peer and peer["ratio"],
                unit="x",
            )
        )
    prefix = report["prefix"]
    found.append(
        Target(
            name="time to first token with 768 cached, of the first's",
            wanted=CACHED_TTFT_MAX,
            measured=prefix and prefix["ratio"],
            at_most=True,
        )
    )
    found.append(
        Target(
            name="resident beside weights and KV, MB",
            wanted=REST_MB_MAX,
            measured=report["memory"]["novainfer"]["rest_mb"],
            at_most=True,
        )
    )
    return found


def render(report: dict[str, Any], promised: list[Target]) -> str:
    """Speed, memory, targets."""
    parts = [_speed(report), _memory(report)]
    if report["prefix"]:
        prefix = report["prefix"]
        parts.append(
            f"Prefix cache: first token after {prefix['first_ttft_ms']:.0f} ms cold, {prefix['cached_ttft_ms']:.0f} ms "
            f"with 768 of 800 tokens cached: {100 * prefix['ratio']:.1f} %"
        )
    parts += [f"{name} was left out: {reason}" for name, reason in report["skipped"].items()]
    if promised:
        parts.append(targets_table(promised))
    return "\n\n".join(parts)


def _speed(report: dict[str, Any]) -> str:
    titles = "; ".join(f"{name} {w['title']}" for name, w in report["workloads"].items())
    place = f"{report['model']} on {report['machine']['cpu']}"
    title = f"{place}, {report['repeat']} interleaved repetitions, medians (from-to)\n{titles}"
    works = report["workloads"].items()
    return speed_table(title, ((name, system, work[system]) for name, work in works for system in report["systems"]))


def _memory(report: dict[str, Any]) -> str:
    rows = [
        (name, m["peak_mb"], m["weights_mb"], m["kv_mb"], m["rest_mb"], m["after_load_mb"], m["load_peak_mb"])
        for name, m in report["memory"].items()
    ]
    header = ("", "peak", "weights", "KV in use", "rest", "after load", "load peak")
    return table("Memory, MB", header, rows)
