"""Tables for people and one JSON object for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
import msgspec


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What was promised and what was measured; `at_most` turns the comparison round. Printed, never asserted."""

    name: str
    wanted: float
    measured: float | None
    unit: str = ""
    at_most: bool = False

    @property
    def is_met(self) -> bool | None:
        """None when it was not measured."""
        if self.measured is None or math.isnan(self.measured):
            return None
        return self.measured <= self.wanted if self.at_most else self.measured >= self.wanted


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    cells = [list(map(str, header)), *([number(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [title]
    for row in cells:
        parts = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def speed_table(title: str, runs: Iterable[tuple[str, str, dict[str, Any]]]) -> str:
    """Rates and times of each (work, system, what came of it); what is known of none is no column."""
    known = [*runs]
    columns = [(name, [tell(found) for _, _, found in known]) for name, tell in SPEED_COLUMNS.items()]
    told = [(name, cells) for name, cells in columns if any(cell is not None for cell in cells)]
    rows = [(work, system, *(cells[at] for _, cells in told)) for at, (work, system, _) in enumerate(known)]
    return table(title, ("", "system", *(name for name, _ in told)), rows)


def between(median: float | None, spread: Sequence[float] | None) -> str | None:
    """A median, and between which numbers the repetitions lie."""
    if median is None or spread is None:
        return None
    return f"{number(median)} ({number(spread[0])}-{number(spread[1])})"


SPEED_COLUMNS: dict[str, Callable[[dict[str, Any]], object]] = {
    "out tok/s": lambda found: found["output_tok_s"],
    "total tok/s": lambda found: found["total_tok_s"],
    "TTFT p50": lambda found: found["ttft_ms"]["p50"],
    "p95 ms": lambda found: found["ttft_ms"]["p95"],
    "ITL p50": lambda found: found["itl_ms"]["p50"],
    "ITL p95 ms": lambda found: found["itl_ms"]["p95"],
    "ours/it": lambda found: between(found["ratio"], found["ratio_spread"]),
    "CPU s": lambda found: found.get("cpu_s"),
    "its/ours": lambda found: found.get("cpu_ratio"),
    "of roof": lambda found: between(found.get("share_of_roofline"), found.get("share_spread")),
    "req/s": lambda found: found.get("requests_per_s"),
    "most MB": lambda found: found.get("peak_mb"),
}


def number(value: object) -> str:
    """Three significant digits, or all digits before the point; "-" for what is not there."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def targets_table(targets: Sequence[Target]) -> str:
    """One line a target."""
    verdicts = {True: "met", False: "missed", None: "not measured"}
    rows = [
        (t.name, f"{'<=' if t.at_most else '>='} {number(float(t.wanted))}{t.unit}", t.measured, verdicts[t.is_met])
        for t in targets
    ]
    return table("Targets", ("", "wanted", "measured", ""), rows)


def targets_json(targets: Sequence[Target]) -> dict[str, Any]:
    """The same for programs."""
    return {
        t.name: {"wanted": t.wanted, "at_most": t.at_most, "measured": t.measured, "met": t.is_met} for t in targets
    }


def emit(report: dict[str, Any], text: str, as_json: bool) -> None:
    """The tables, and with `--json` the object as the last line."""
    click.echo(text)
    if as_json:
        click.echo(msgspec.json.encode(rounded(report)).decode())


def rounded(value: Any) -> Any:
    """Floats to six digits, all the way down: what is measured has no more, and people read these files."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
