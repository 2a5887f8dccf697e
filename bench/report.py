"""Tables for people and one JSON object for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
