"""The tables of `novainfer bench peers`, what was promised, and the picture of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from novainfer.bench.offline_report import between
from novainfer.bench.peers.known import OURS
from novainfer.bench.report import Target, table, targets_table

__all__ = ["picture", "render", "targets"]

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
HTTP_TTFT_MAX = 0.5  # of vLLM's median

BAR_HEIGHT, BAR_GAP, GROUP_GAP, LEFT, WIDTH = 14, 3, 26, 190, 860
COLOURS = {OURS: "#1f6feb"}
OTHER = "#9aa4b2"


def targets(report: dict[str, Any]) -> list[Target]:
    """The promises that this report can say something about."""
    found: list[Target] = []
    for (work, precision), wanted in SHARES_WANTED.items():
        own = _systems(report, precision, work).get(OURS, {})
        found.append(
            Target(name=f"{work} {precision}: share of the roof", wanted=wanted, measured=own.get("share_of_roof"))
        )
    for (work, precision, peer), wanted in RATIOS_WANTED.items():
        systems = _systems(report, precision, work)
        others = [system["ratio"] for name, system in systems.items() if name != OURS and peer in (name, BEST)]
        measured = min(others) if others else None  # the smallest ratio is to the best
        name = f"{work} {precision}: output tok/s over {peer}"
        found.append(Target(name=name, wanted=wanted, measured=measured, unit="x"))
    served = report["precisions"].get("bf16", {}).get("http", {}).get("systems", {})
    if OURS in served and (peer := served.get("vllm bf16")) is not None:
        ratio = served[OURS]["ttft_ms"]["p50"] / peer["ttft_ms"]["p50"]
        found.append(Target(name="W5 bf16: TTFT p50, of vLLM's", wanted=HTTP_TTFT_MAX, measured=ratio, at_most=True))
    return found


def _systems(report: dict[str, Any], precision: str, work: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = (
        report["precisions"].get(precision, {}).get("workloads", {}).get(work, {}).get("systems", {})
    )
    return found


def render(report: dict[str, Any], promised: Sequence[Target]) -> str:
    """A table for each precision, who was left out, targets."""
    parts = [_table(report, precision, group) for precision, group in report["precisions"].items()]
    parts += [f"{name} was left out: {reason}" for name, reason in report["skipped"].items()]
    if promised:
        parts.append(targets_table(list(promised)))
    return "\n\n".join(parts)


def _table(report: dict[str, Any], precision: str, group: dict[str, Any]) -> str:
    works = dict(group["workloads"])
    if "http" in group:
        works["W5"] = group["http"]
    rows = []
    for name, work in sorted(works.items()):
        for system, found in work["systems"].items():
            rows.append(
                (
                    name,
                    system,
                    found["output_tok_s"],
                    found["total_tok_s"],
                    found["ttft_ms"]["p50"],
                    found["ttft_ms"]["p95"],
                    found["itl_ms"]["p50"],
                    found["itl_ms"]["p95"],
                    between(found["ratio"], found["ratio_spread"]),
                    found.get("cpu_s"),
                    between(found.get("share_of_roof"), found.get("share_spread")),
                    found.get("requests_per_s"),
                )
            )
    header = (
        *("", "system", "out tok/s", "total tok/s", "TTFT p50", "p95 ms", "ITL p50", "p95 ms", "ours/it", "CPU s"),
        *("of roof", "req/s"),
    )
    titles = "; ".join(f"{name} {work['title']}" for name, work in sorted(works.items()))
    place = f"{report['model']} in {precision} on {report['machine']['cpu']}"
    sizes = ", ".join(f"{name} {size:.0f}" for name, size in group["peak_mb"].items())
    turns = f"{report['repeat']} interleaved repetitions, medians (from-to)"
    title = f"{place}, {turns}\n{titles}\nat most resident, MB: {sizes}"
    return table(title, header, rows)


def picture(report: dict[str, Any]) -> str:
    """An SVG: for each workload and precision a bar a system, as long as its output tokens a second of the best."""
    lines: list[str] = []
    y = 46
    for precision, group in report["precisions"].items():
        works = dict(group["workloads"])
        if "http" in group:
            works["W5"] = group["http"]
        for name, work in sorted(works.items()):
            best = max(found["output_tok_s"] for found in work["systems"].values())
            lines.append(f'<text x="0" y="{y}" class="t">{name} {precision}: {escape(work["title"])}</text>')
            y += 8
            for system, found in sorted(work["systems"].items(), key=lambda item: -item[1]["output_tok_s"]):
                rate = found["output_tok_s"]
                length = max(1.0, (WIDTH - LEFT - 130) * rate / best)
                colour = COLOURS.get(system, OTHER)
                share = found.get("share_of_roof")
                told = f"{rate:.3g} tok/s" + (f", {100 * share:.0f} % of the roof" if share is not None else "")
                lines.append(f'<text x="{LEFT - 6}" y="{y + 11}" class="s" text-anchor="end">{escape(system)}</text>')
                lines.append(
                    f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" rx="2" fill="{colour}"/>'
                )
                lines.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 11}" class="s">{told}</text>')
                y += BAR_HEIGHT + BAR_GAP
            y += GROUP_GAP
    machine = report["machine"]
    title = f"{report['model']}, output tokens a second; {machine['cpu']}, {machine['cores']} cores, {machine['date']}"
    style = (
        "text{font-family:system-ui,sans-serif;fill:#24292f}.t{font-size:13px;font-weight:600}.s{font-size:11px}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" role="img">'
        f'<title>{escape(title)}</title><style>{style}</style><text x="0" y="16" class="t">{escape(title)}</text>'
        + "".join(lines)
        + "</svg>\n"
    )
