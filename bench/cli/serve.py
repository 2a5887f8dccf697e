"""`novainfer bench serve`: streaming clients against a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from novainfer.bench import machine
from novainfer.bench.cli.options import as_json_option, progress, repeat_option, told
from novainfer.bench.report import emit
from novainfer.bench.workload import Workload
from novainfer.server.cli.options import API_KEY_VARIABLES


@click.command()
@click.argument("target")
@click.option("--api-key", envvar=API_KEY_VARIABLES)
@click.option("--http", type=click.Choice(["h1", "h2", "both"]), default="both", show_default=True)
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True)
@click.option("--clients", type=click.IntRange(1), default=16, show_default=True, help="Requests open at a time.")
@click.option("--prompt-len", type=click.IntRange(1), default=128, show_default=True, help="Tokens of each prompt.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each answer.")
@repeat_option(3)
@as_json_option
def serve(
    target: str,
    api_key: str | None,
    http: str,
    requests: int,
    clients: int,
    prompt_len: int,
    max_tokens: int,
    repeat: int,
    as_json: bool,
) -> None:
    """Streaming clients against TARGET: a server's address, or a model's folder, for which one is started.

    With a folder, transformers' `generate` answers the same prompts in between, and the roofline is measured.
    """
    from novainfer.bench import serve as run

    title = f"{requests} requests, {prompt_len} in, {max_tokens} out"
    work = Workload(name="load", title=title, num_requests=requests, prompt_len=prompt_len, max_tokens=max_tokens)
    versions = run.VERSIONS if http == "both" else tuple(v for v in run.VERSIONS if v == http)
    if "://" in target:
        report, text = run.run(
            target,
            api_key=api_key,
            versions=versions,
            workload=work,
            clients=clients,
            repeat=repeat,
            progress=progress,
        )
    else:
        report, text = told(lambda: serve_folder(Path(target), versions, work, clients, repeat))
    emit(report, text, as_json)


def serve_folder(
    folder: Path, versions: Sequence[Any], work: Workload, clients: int, repeat: int
) -> tuple[dict[str, Any], str]:
    from novainfer.bench import serve as run

    if not (folder / "config.json").exists():
        raise click.BadParameter(f"{folder} is neither an http:// address nor a model's folder", param_hint="TARGET")
    with run.started(folder) as url, run.peer_of(folder, machine.measure_roof) as peer:
        return run.run(
            url, versions=versions, workload=work, clients=clients, repeat=repeat, peer=peer, progress=progress
        )
