"""`novainfer bench`: a file a command, which prints a table, and with `--json` one JSON object last."""

from __future__ import annotations

import click

from novainfer.bench.cli.all import run_all
from novainfer.bench.cli.control import control
from novainfer.bench.cli.cuda_compile import cuda_compile
from novainfer.bench.cli.fairness import fairness
from novainfer.bench.cli.gpu_check import gpu_check
from novainfer.bench.cli.grammar import grammar
from novainfer.bench.cli.http import http
from novainfer.bench.cli.idle import idle
from novainfer.bench.cli.make_checkpoint import make_checkpoint
from novainfer.bench.cli.offline import offline
from novainfer.bench.cli.peers import peers
from novainfer.bench.cli.peers_table import peers_table
from novainfer.bench.cli.recorder import recorder
from novainfer.bench.cli.roofline import roofline
from novainfer.bench.cli.serve import serve
from novainfer.bench.cli.speculative import speculative
from novainfer.bench.cli.startup import startup

__all__ = ["bench"]


@click.group()
def bench() -> None:
    """Measure speed, beside the roofline and transformers; what is noisy is interleaved, and medians are reported."""


for command in (
    run_all,
    control,
    cuda_compile,
    fairness,
    gpu_check,
    grammar,
    http,
    idle,
    make_checkpoint,
    offline,
    peers,
    peers_table,
    recorder,
    roofline,
    serve,
    speculative,
    startup,
):
    bench.add_command(command)
