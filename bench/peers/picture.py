"""The picture of `novainfer bench peers`: a row a work, a column a precision, a bar a system."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any
from xml.sax.saxutils import escape

from novainfer.bench.peers.http import LIBRARY
from novainfer.bench.peers.known import OURS
from novainfer.bench.peers.report import label
from novainfer.bench.report import number

__all__ = ["picture"]

GUTTER, NAME, TRACK, RATE = 168, 120, 104, 100  # widths: of a work's title; of a system's name, bar and number
COLUMN = NAME + TRACK + RATE
MARGIN, LINE, BAR, GAP = 16, 16, 10, 20
CHARACTER = 6  # how wide one is, about
STYLE = """
text{font:11px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#1f2328}
.title{font-size:16px;font-weight:600}.head{font-size:13px;font-weight:600}.quiet{fill:#59636e}
.ours{font-weight:600;fill:#0550ae}.track{fill:#818b98;fill-opacity:.16}.bar{fill:#9aa4af}.bar.own{fill:#0969da}
.rule{stroke:#818b98;stroke-opacity:.3}.page{fill:#fff}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.quiet{fill:#9198a1}.ours{fill:#79c0ff}.bar{fill:#6e7681}
.bar.own{fill:#4493f8}.page{fill:#0d1117}}
"""
LEGEND = (
    "A full bar is the most that the machine could do in that precision: its roof. Numbers are output tokens a second,"
    " and in bold NovaInfer's rate over the best peer's."
)


def picture(report: Mapping[str, Any]) -> str:
    """An SVG for light and dark pages."""
    groups = report["precisions"]
    works = sorted({name for group in groups.values() for name in group["workloads"]})
    width = 2 * MARGIN + GUTTER + COLUMN * len(groups)
    machine = report["machine"]
    title = f"{report['model']}: NovaInfer beside its peers"
    place = f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}. {LEGEND}"
    lines = textwrap.wrap(place, (width - 2 * MARGIN) // CHARACTER)
    parts = [_text(MARGIN, 30, title, "title")]
    parts += [_text(MARGIN, 48 + LINE * at, line, "quiet") for at, line in enumerate(lines)]
    y = 64 + LINE * len(lines)
    parts += [_text(MARGIN + GUTTER + NAME + COLUMN * at, y - 8, name, "head") for at, name in enumerate(groups)]
    for name in works:
        cells = [group["workloads"].get(name) for group in groups.values()]
        known = [work for work in cells if work is not None]
        told = textwrap.wrap(known[0]["title"], GUTTER // CHARACTER)
        parts.append(f'<line x1="{MARGIN}" x2="{width - MARGIN}" y1="{y}" y2="{y}" class="rule"/>')
        parts.append(_text(MARGIN, y + LINE, name, "head"))
        parts += [_text(MARGIN, y + LINE * (2 + at), line, "quiet") for at, line in enumerate(told)]
        for at, work in enumerate(cells):
            if work is not None:
                parts += _cell(MARGIN + GUTTER + COLUMN * at, y + LINE, work)
        y += LINE * (1 + max(len(told), *(len(work["systems"]) for work in known))) + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}" role="img">'
        f'<title>{escape(title)}</title><style>{STYLE}</style><rect class="page" width="{width}" height="{y}"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _cell(x: int, y: int, work: Mapping[str, Any]) -> Iterator[str]:
    """Of one work in one precision: our ratio, then the systems, the fastest first."""
    systems = work["systems"]
    others = [found["ratio"] for name, found in systems.items() if not name.startswith(OURS)]
    if others:
        yield _text(x + NAME, y, f"{number(min(others))}x the best peer", "ours")
    fastest = max(found["output_tok_s"] for found in systems.values())
    for at, (name, found) in enumerate(sorted(systems.items(), key=lambda item: -item[1]["output_tok_s"]), start=1):
        middle = y + LINE * at
        share = found.get("share_of_roofline") or found["output_tok_s"] / fastest  # of traffic no roof is known
        filled = TRACK * min(1.0, share)
        own = " own" if name in (OURS, LIBRARY) else ""
        yield _text(x + NAME - 6, middle, label(name, found, work), "ours" if own else "", "end")
        yield _bar(x + NAME, middle, TRACK, "track")
        yield _bar(x + NAME, middle, filled, f"bar{own}")
        yield _text(x + NAME + TRACK + 6, middle, _rate(found), "ours" if own else "")


def _rate(found: Mapping[str, Any]) -> str:
    rate = number(float(found["output_tok_s"]))
    if "share_of_roofline" in found:
        return f"{rate} ({100 * found['share_of_roofline']:.0f} %)"
    return f"{rate} ({number(found['requests_per_s'])} req/s)"


def _bar(x: float, middle: float, width: float, kind: str) -> str:
    return f'<rect x="{x}" y="{middle - BAR + 1}" width="{width:.1f}" height="{BAR}" rx="2" class="{kind}"/>'


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
