"""`novainfer bench cuda-compile`: the CUDA kernels, compiled without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import click

from novainfer.bench.cli.options import as_json_option
from novainfer.bench.report import emit


@click.command("cuda-compile")
@click.option(
    "--arch", "arches", multiple=True, help="Such as sm_90, as often as wanted; all that are known if none is."
)
@click.option("--only", default="", help="Part of the names that are wanted.")
@click.option("--sample", is_flag=True, help="One variant of each function.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Compilers at once.")
@as_json_option
def cuda_compile(arches: Sequence[str], only: str, sample: bool, jobs: int, as_json: bool) -> None:
    """Compile the CUDA kernels without a GPU; ends with 1 where one spills registers or misses the tensor cores."""
    from novainfer.bench import cuda_compile as compiling
    from novainfer.kernels.cuda.compile import CAPABILITIES

    known = {f"sm_{capability}": capability for capability in CAPABILITIES}
    for arch in arches:
        if arch not in known:
            raise click.BadParameter(f"must be one of {', '.join(known)}, not {arch!r}", param_hint="--arch")
    report, text = compiling.run([known[arch] for arch in arches or known], jobs, only, sample=sample)
    emit(report, text, as_json)
    if report["faults"]:
        raise SystemExit(1)
