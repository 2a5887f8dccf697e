"""`novainfer bench peers`: the engine beside other engines."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from novainfer.bench import machine
from novainfer.bench.cli.options import (
    NAMES,
    among,
    as_json_option,
    draw,
    like_option,
    picture_option,
    progress,
    repeat_option,
    scale_option,
    told,
)
from novainfer.bench.report import emit
from novainfer.bench.workload import WORKLOADS, scaled


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False)
@like_option
@repeat_option(3)
@click.option(
    "--peer",
    "given",
    multiple=True,
    metavar="NAME=PATH",
    help="The Python of vllm, openvino or transformers, or the server of llama.cpp.",
)
@click.option(
    "--no-peer",
    "left_out",
    multiple=True,
    metavar="NAME",
    help="Leave it out (the same NAMEs), though it is installed.",
)
@click.option("--precisions", default="bf16,int8,int4", show_default=True, help="Which of them, one after the other.")
@click.option("--workloads", default="W1,W2,W3,W4,W5,W6,W7", show_default=True, help="Which of them.")
@picture_option
@scale_option
@as_json_option
def peers(
    model: Path | None,
    like: str,
    repeat: int,
    given: Sequence[str],
    left_out: Sequence[str],
    precisions: str,
    workloads: str,
    picture: Path | None,
    scale: int,
    as_json: bool,
) -> None:
    """The engine beside vLLM, OpenVINO GenAI, llama.cpp and transformers: what is installed, each in its environment.

    MODEL is a folder; without one it is a random checkpoint of --like. W5 is served over HTTP/1.1, W6 has prompts of
    8k, W7 comes by a Poisson clock.
    """
    from novainfer.bench.peers import compare, known
    from novainfer.bench.serve import W5
    from novainfer.bench.workload import LONG, TRAFFIC

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the systems are ended on the way out
    served = scaled(W5, scale)
    wanted = among(workloads, (*NAMES, served.name, LONG.name, TRAFFIC.name), "workload")
    chosen = among(precisions, known.PRECISIONS, "precision")
    try:
        places = {name: path for name, _, path in (item.partition("=") for item in given)}
        found = known.find_peers(places, left_out)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=["--peer", "--no-peer"]) from None
    report, text = told(
        lambda: compare.run(
            model or machine.find_checkpoint(like),
            found,
            precisions=chosen,
            workloads=[scaled(work, scale) for work in (*WORKLOADS, LONG) if work.name in wanted],
            traffic=TRAFFIC.scaled(scale) if TRAFFIC.name in wanted else None,
            http_work=served if served.name in wanted else None,
            repeat=repeat,
            progress=progress,
        )
    )
    draw(report, picture)
    emit(report, text, as_json)
