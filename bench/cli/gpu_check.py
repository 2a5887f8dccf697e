"""`novainfer bench gpu-check`: everything that needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click


@click.command("gpu-check")
@click.option("--only", "sections", multiple=True, help="A section, as often as wanted; all if none is given.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("docs/benchmarks"),
    show_default=True,
    help="The folder for gpu-<name>-<date>.json.",
)
@click.option("--rehearse", is_flag=True, help="Go through it on a CPU, with tiny sizes.")
def gpu_check(sections: Sequence[str], out: Path, rehearse: bool) -> None:
    """Everything that needs a GPU: what is right, then how fast it is; ends with 1 where something is wrong."""
    from novainfer.bench.gpu.check import SECTIONS, GpuCheck

    unknown = [name for name in sections if name not in SECTIONS]
    if unknown:
        raise click.BadParameter(f"must be one of {', '.join(SECTIONS)}, not {unknown[0]!r}", param_hint="--only")
    try:
        check = GpuCheck(out, checkout=Path.cwd(), rehearse=rehearse, say=click.echo)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
    wanted = sections or tuple(SECTIONS)
    if not (check.run(wanted) if len(wanted) == 1 else check.run_apart(wanted)):
        raise SystemExit(1)
