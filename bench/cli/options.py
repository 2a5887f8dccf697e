"""What the commands of `novainfer bench` share: options, how their values are read, and what is said meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from novainfer.bench import machine
from novainfer.bench.ideal import Roof
from novainfer.bench.peers.launch import ServerError
from novainfer.bench.worker import ChildError
from novainfer.bench.workload import WORKLOADS, Workload, scaled

Command = TypeVar("Command", bound=Callable[..., Any])
LIKE = "qwen2.5-0.5b"  # the shape that the targets are written for
NAMES = [workload.name for workload in WORKLOADS]

as_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
like_option = click.option("--like", default=LIKE, show_default=True, help="Shape of the random checkpoint.")
model_option = click.option(
    "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A folder instead of --like."
)
picture_option = click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), help="Write bars of all rates, as SVG."
)
roofline_option = click.option(
    "--roofline/--no-roofline", "with_roof", default=True, help="Measure it before and between."
)
scale_option = click.option(
    "--scale", type=click.IntRange(1), default=1, help="Divide all sizes by this: a quick look."
)


def repeat_option(default: int) -> Callable[[Command], Command]:
    """How many repetitions; each command has a default of its own."""
    return click.option("--repeat", type=click.IntRange(1), default=default, show_default=True, help="Repetitions.")


def told(part: Callable[[], tuple[dict[str, Any], str]]) -> tuple[dict[str, Any], str]:
    """What `part` gives; a system that ends on the way becomes a sentence, and exit code 1."""
    try:
        return part()
    except (ChildError, ServerError) as error:
        raise click.ClickException(f"a system under test ended: {error}") from None


def progress(line: str) -> None:
    """Say it on stderr: stdout is for tables and JSON."""
    click.echo(line, err=True)


def roof_measure(wanted: bool) -> Callable[[], Roof] | None:
    """What measures the roofline, where that is wanted."""
    return machine.measure_roof if wanted else None


def among(text: str, known: Sequence[str], what: str) -> list[str]:
    """Names with commas between them; raises BadParameter for one that is not known."""
    found = text.split(",")
    if unknown := [name for name in found if name not in known]:
        raise click.BadParameter(f"there is no {what} {unknown[0]!r}; there are {', '.join(known)}")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """Numbers with commas between them, two or more; raises BadParameter for anything else."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers like 64,256") from None
    if len(set(found)) < 2 or min(found) < 1:
        raise click.BadParameter(f"{text!r} must hold two different numbers or more, each at least 1")
    return found


def chosen_works(names: str, scale: int) -> list[Workload]:
    """Of W1 to W4 those that are named, their sizes divided by `scale`."""
    wanted = among(names, NAMES, "workload")
    return [scaled(workload, scale) for workload in WORKLOADS if workload.name in wanted]


def fields_of(options: Sequence[str]) -> dict[str, Any]:
    """`FIELD=VALUE` pairs; a value that is JSON is taken as such, any other as text."""
    import msgspec

    found: dict[str, Any] = {}
    for option in options:
        name, _, value = option.partition("=")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name] = value
    return found


def draw(report: dict[str, Any], picture: Path | None) -> None:
    """Write the picture of a report of `bench peers` where one is wanted."""
    from novainfer.bench.peers.picture import picture as drawn

    if picture is not None:
        picture.write_text(drawn(report), encoding="utf-8")
