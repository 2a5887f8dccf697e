"""`novainfer bench`: each command prints a table, and with `--json` one JSON object last."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from novainfer.bench import machine
from novainfer.bench.ideal import Roof
from novainfer.bench.peers.launch import ServerError
from novainfer.bench.report import emit
from novainfer.bench.worker import ChildError
from novainfer.bench.workload import PREFIX, WORKLOADS, Workload, scaled
from novainfer.fsm.messages.mode import QUANTIZATIONS, UNQUANTIZED
from novainfer.server.cli.options import API_KEY_VARIABLES

Command = TypeVar("Command", bound=Callable[..., Any])
LIKE = "qwen2.5-0.5b"  # the shape that the targets are written for
NAMES = [workload.name for workload in WORKLOADS]

_json = click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
_like = click.option("--like", default=LIKE, show_default=True, help="Shape of the random checkpoint.")
_model = click.option(
    "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A folder instead of --like."
)
_picture = click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), help="Write bars of all rates, as SVG."
)
_roof = click.option("--roofline/--no-roofline", "with_roof", default=True, help="Measure it before and between.")
_scale = click.option("--scale", type=click.IntRange(1), default=1, help="Divide all sizes by this: a quick look.")


def _repeat(default: int) -> Callable[[Command], Command]:
    return click.option("--repeat", type=click.IntRange(1), default=default, show_default=True, help="Repetitions.")


@click.group()
def bench() -> None:
    """Measure speed, beside the roofline and transformers; what is noisy is interleaved, and medians are reported."""


@bench.command("make-checkpoint")
@_like
@click.option("--seed", type=int, default=0, show_default=True)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@_json
def make_checkpoint(like: str, seed: int, folder: Path, as_json: bool) -> None:
    """Write a random checkpoint with exactly the shape of a known model to FOLDER."""
    machine.make_checkpoint(like, folder, seed)
    size = sum(file.stat().st_size for file in folder.iterdir())
    report = {"benchmark": "make-checkpoint", "like": like, "seed": seed, "folder": str(folder), "bytes": size}
    emit(report, f"{folder}: a random checkpoint of {like}'s shape, {size / 1e6:.0f} MB", as_json)


@bench.command("cuda-compile")
@click.option(
    "--arch", "arches", multiple=True, help="Such as sm_90, as often as wanted; all that are known if none is."
)
@click.option("--only", default="", help="Part of the names that are wanted.")
@click.option("--sample", is_flag=True, help="One variant of each function.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Compilers at once.")
@_json
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


@bench.command("gpu-check")
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


@bench.command()
@_repeat(3)
@_json
def roofline(repeat: int, as_json: bool) -> None:
    """Measure the machine: read bandwidth and the peak of matrix products."""
    report, text = machine.roofline_report(repeat)
    emit(report, text, as_json)


@bench.command()
@_repeat(5)
@click.option("--steps", type=click.IntRange(1), default=400, show_default=True, help="Steps measured each time.")
@click.option("--batches", default="16,64,128,256", show_default=True, help="Numbers of running requests.")
@click.option("--device-ms", type=click.FloatRange(0), default=0.0, show_default=True, help="Time that a step takes.")
@click.option("--worker", type=click.Choice(["thread", "process"]), default="thread", show_default=True)
@_json
def control(
    repeat: int, steps: int, batches: str, device_ms: float, worker: Literal["thread", "process"], as_json: bool
) -> None:
    """CPU of the event loop per token and per step, over a device that computes nothing."""
    from novainfer.bench import control as run

    emit(*run.run(_numbers(batches), steps, repeat, device_ms, worker), as_json)


@bench.command()
@_repeat(5)
@click.option("--steps", type=click.IntRange(10), default=300, show_default=True, help="Steps measured each time.")
@click.option("--requests", type=click.IntRange(1), default=256, show_default=True, help="Running requests.")
@click.option("--device-ms", type=click.FloatRange(0), default=10.0, show_default=True, help="Time that a step takes.")
@click.option("--worker", type=click.Choice(["thread", "process"]), default="process", show_default=True)
@click.option("--async-scheduling/--no-async-scheduling", default=None, help="Only so. [default: both, in turns]")
@_json
def idle(
    repeat: int,
    steps: int,
    requests: int,
    device_ms: float,
    worker: Literal["thread", "process"],
    async_scheduling: bool | None,
    as_json: bool,
) -> None:
    """What share of its time the device waits for the next step, over a device that only sleeps."""
    from novainfer.bench import idle as run

    ways = (False, True) if async_scheduling is None else (async_scheduling,)
    emit(*run.run(requests, steps, repeat, device_ms, worker, ways), as_json)


@bench.command()
@_repeat(7)
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="Steps measured each time.")
@click.option("--batches", default="1,32,256", show_default=True, help="Numbers of running requests.")
@click.option("--device-ms", type=click.FloatRange(0), default=10.0, show_default=True, help="Time that a step takes.")
@_json
def recorder(repeat: int, steps: int, batches: str, device_ms: float, as_json: bool) -> None:
    """What the flight recorder costs the event loop, per step and per token."""
    from novainfer.bench import recorder as run

    emit(*run.run(_numbers(batches), steps, repeat, device_ms), as_json)


@bench.command()
@_repeat(3)
@click.option("--model", default="demo", show_default=True)
@click.option("--quantizations", default="none", show_default=True, help="Of the weights, in turns: none,int8,int4.")
@click.option("--cached", is_flag=True, help="From packed weights that a start before, not counted, has kept.")
@click.option("--option", "options", multiple=True, metavar="FIELD=VALUE", help="A field of EngineConfig.")
@_json
def startup(repeat: int, model: str, quantizations: str, cached: bool, options: Sequence[str], as_json: bool) -> None:
    """Seconds from a new process to a warm model, imports told apart."""
    from novainfer.bench import startup as run

    wanted = _among(quantizations, (UNQUANTIZED, *QUANTIZATIONS), "quantization")
    fields = _fields(options)
    measure = lambda: run.run(  # noqa: E731
        model, repeat, quantizations=wanted, cached=cached, options=fields, progress=_progress
    )
    emit(*_told(measure), as_json)


@bench.command()
@_like
@_model
@_repeat(3)
@click.option("--workloads", default=",".join(NAMES), show_default=True, help="Which of them.")
@click.option("--peers/--no-peers", default=True, help="transformers' generate in between.")
@click.option("--peer", "extra", multiple=True, metavar="NAME=COMMAND", help="Another system; {model} is its folder.")
@click.option("--option", "options", multiple=True, metavar="FIELD=VALUE", help="A field of EngineConfig.")
@click.option("--against", multiple=True, metavar="FIELD=VALUE", help="A second NovaInfer with this field, in turns.")
@click.option("--sampling", is_flag=True, help="Only what drawing costs: five ways to sample, beside greedy.")
@click.option("--beside-busy", is_flag=True, help="Only the workloads alone and beside a process that spins, in turns.")
@_roof
@_scale
@_json
def offline(
    like: str,
    model: Path | None,
    repeat: int,
    workloads: str,
    peers: bool,
    extra: Sequence[str],
    options: Sequence[str],
    against: Sequence[str],
    sampling: bool,
    beside_busy: bool,
    with_roof: bool,
    scale: int,
    as_json: bool,
) -> None:
    """The library beside transformers: four workloads, the prefix cache, memory.

    W1 one request; W2 32 requests; W3 eight long prompts; W4 sixteen with one long beginning.
    """
    from novainfer.bench import offline as run

    folder = model or machine.find_checkpoint(like)
    commands = {run.OURS: run.ours(str(folder), _fields(options))}
    if sampling:
        from novainfer.bench import sampling as drawing

        work = scaled(drawing.BATCH, scale)
        emit(*_told(lambda: drawing.run(commands[run.OURS], workload=work, repeat=repeat, progress=_progress)), as_json)
        return
    if beside_busy:
        from novainfer.bench import busy

        chosen = _chosen(workloads, scale)
        emit(*_told(lambda: busy.run(commands[run.OURS], workloads=chosen, repeat=repeat, progress=_progress)), as_json)
        return
    if against:
        commands[" ".join((run.OURS, *against))] = run.ours(str(folder), _fields(options) | _fields(against))
    if peers:
        commands[run.TRANSFORMERS] = run.transformers(str(folder))
    for item in extra:
        name, _, command = item.partition("=")
        commands[name] = shlex.split(command.replace("{model}", shlex.quote(str(folder))))
    report, text = _told(
        lambda: run.run(
            folder,
            commands,
            measure_roof=_measure(with_roof),
            workloads=_chosen(workloads, scale),
            prefix=scaled(PREFIX, scale),
            repeat=repeat,
            progress=_progress,
        )
    )
    emit(report, text, as_json)


@bench.command()
@_like
@_model
@_repeat(3)
@click.option("--batches", default="1,4,16", show_default=True, help="Numbers of requests at once.")
@click.option("--num-speculative-tokens", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--draft-model",
    metavar="FOLDER",
    help='Drafts of this model, or hub id, instead of prompt lookup; "demo-draft" asks the demo model questions.',
)
@click.option("--max-tokens", type=click.IntRange(2), default=96, show_default=True, help="Tokens of each answer.")
@click.option("--option", "options", multiple=True, metavar="FIELD=VALUE", help="A field of EngineConfig.")
@_json
def speculative(
    like: str,
    model: Path | None,
    repeat: int,
    batches: str,
    num_speculative_tokens: int,
    draft_model: str | None,
    max_tokens: int,
    options: Sequence[str],
    as_json: bool,
) -> None:
    """Guesses beside plain decoding: text that repeats, guesses that are wrong, and nothing to guess."""
    from novainfer.bench import offline
    from novainfer.bench import speculative as run

    is_demo = draft_model == "demo-draft"
    folder = str(model or ("demo" if is_demo else machine.find_checkpoint(like)))
    fields = _fields(options)
    config: dict[str, Any] = {"num_speculative_tokens": num_speculative_tokens}
    if draft_model is None:
        config |= {"method": "ngram", "prompt_lookup_min": 2}
    else:
        config |= {"method": "draft_model", "model": draft_model}
    drafted = run.QUESTIONS if is_demo else run.WITH_A_DRAFT_MODEL
    workloads = run.WORKLOADS if draft_model is None else drafted
    commands = offline.ours(folder, fields), offline.ours(folder, {"speculative_config": config, **fields})
    measure = lambda: run.run(  # noqa: E731
        *commands,
        batches=_numbers(batches),
        repeat=repeat,
        max_tokens=max_tokens,
        workloads=workloads,
        progress=_progress,
    )
    emit(*_told(measure), as_json)


@bench.command()
@click.argument("target")
@click.option("--api-key", envvar=API_KEY_VARIABLES)
@click.option("--http", type=click.Choice(["h1", "h2", "both"]), default="both", show_default=True)
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True)
@click.option("--clients", type=click.IntRange(1), default=16, show_default=True, help="Requests open at a time.")
@click.option("--prompt-len", type=click.IntRange(1), default=128, show_default=True, help="Tokens of each prompt.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each answer.")
@_repeat(3)
@_json
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
            progress=_progress,
        )
    else:
        report, text = _told(lambda: _serve_folder(Path(target), versions, work, clients, repeat))
    emit(report, text, as_json)


def _serve_folder(
    folder: Path, versions: Sequence[Any], work: Workload, clients: int, repeat: int
) -> tuple[dict[str, Any], str]:
    from novainfer.bench import serve as run

    if not (folder / "config.json").exists():
        raise click.BadParameter(f"{folder} is neither an http:// address nor a model's folder", param_hint="TARGET")
    with run.started(folder) as url, run.peer_of(folder, machine.measure_roof) as peer:
        return run.run(
            url, versions=versions, workload=work, clients=clients, repeat=repeat, peer=peer, progress=_progress
        )


@bench.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False)
@_like
@_repeat(3)
@click.option("--peer", "given", multiple=True, metavar="NAME=PATH", help="A peer's Python; of llama.cpp its server.")
@click.option("--no-peer", "left_out", multiple=True, metavar="NAME", help="Not this one, though it is installed here.")
@click.option("--precisions", default="bf16,int8,int4", show_default=True, help="Which of them, one after the other.")
@click.option("--workloads", default="W1,W2,W3,W4,W5,W6,W7", show_default=True, help="Which of them.")
@_picture
@_scale
@_json
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
    wanted = _among(workloads, (*NAMES, served.name, LONG.name, TRAFFIC.name), "workload")
    chosen = _among(precisions, known.PRECISIONS, "precision")
    try:
        places = {name: path for name, _, path in (item.partition("=") for item in given)}
        found = {name: at for name, at in known.find_peers(places).items() if name not in left_out}
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--peer") from None
    report, text = _told(
        lambda: compare.run(
            model or machine.find_checkpoint(like),
            found,
            precisions=chosen,
            workloads=[scaled(work, scale) for work in (*WORKLOADS, LONG) if work.name in wanted],
            traffic=TRAFFIC.scaled(scale) if TRAFFIC.name in wanted else None,
            http_work=served if served.name in wanted else None,
            repeat=repeat,
            progress=_progress,
        )
    )
    _draw(report, picture)
    emit(report, text, as_json)


@bench.command("peers-table")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_picture
@_json
def peers_table(files: Sequence[Path], picture: Path | None, as_json: bool) -> None:
    """One table of several runs of `bench peers`: FILES end with the line that --json wrote, the newest last."""
    from novainfer.bench.peers.report import MergeError, merged, render, targets
    from novainfer.bench.report import targets_json

    reports = []
    for file in files:
        try:
            reports.append(json.loads(file.read_text(encoding="utf-8").strip().splitlines()[-1]))
        except (ValueError, IndexError):
            raise click.BadParameter(
                f"the last line of {file} must be the JSON of a report", param_hint="FILES"
            ) from None
    try:
        report = merged(reports)
    except MergeError as error:
        raise click.BadParameter(str(error), param_hint="FILES") from None
    promised = targets(report)
    report["targets"] = targets_json(promised)
    _draw(report, picture)
    emit(report, render(report, promised), as_json)


def _draw(report: dict[str, Any], picture: Path | None) -> None:
    from novainfer.bench.peers.picture import picture as drawn

    if picture is not None:
        picture.write_text(drawn(report), encoding="utf-8")


def _among(text: str, known: Sequence[str], what: str) -> list[str]:
    found = text.split(",")
    if unknown := [name for name in found if name not in known]:
        raise click.BadParameter(f"there is no {what} {unknown[0]!r}; there are {', '.join(known)}")
    return found


@bench.command("all")
@_like
@_repeat(3)
@_json
def run_all(like: str, repeat: int, as_json: bool) -> None:
    """Everything, one after the other; about a quarter of an hour on two cores."""
    from novainfer.bench import control, offline, startup
    from novainfer.bench import serve as served

    folder = machine.find_checkpoint(like)
    commands = {offline.OURS: offline.ours(str(folder)), offline.TRANSFORMERS: offline.transformers(str(folder))}
    work = served.W5
    parts: dict[str, Callable[[], tuple[dict[str, Any], str]]] = {
        "roofline": lambda: machine.roofline_report(repeat),
        "control": lambda: control.run(repeat=repeat),
        "startup": lambda: startup.run(repeat=repeat),
        "offline": lambda: offline.run(
            folder, commands, measure_roof=machine.measure_roof, repeat=repeat, progress=_progress
        ),
        "serve": lambda: _serve_folder(folder, served.VERSIONS, work, served.CLIENTS, repeat),
    }
    report: dict[str, Any] = {"benchmark": "all", "machine": machine.describe()}
    for name, part in parts.items():
        _progress(f"---- {name}")
        report[name], text = _told(part)
        click.echo(text + "\n")
    emit(report, "", as_json)


def _told(part: Callable[[], tuple[dict[str, Any], str]]) -> tuple[dict[str, Any], str]:
    try:
        return part()
    except (ChildError, ServerError) as error:
        raise click.ClickException(f"a system under test ended: {error}") from None


def _progress(line: str) -> None:
    click.echo(line, err=True)


def _measure(wanted: bool) -> Callable[[], Roof] | None:
    return machine.measure_roof if wanted else None


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers like 64,256") from None
    if len(set(found)) < 2 or min(found) < 1:
        raise click.BadParameter(f"{text!r} must hold two different numbers or more, each at least 1")
    return found


def _chosen(names: str, scale: int) -> list[Workload]:
    wanted = _among(names, NAMES, "workload")
    return [scaled(workload, scale) for workload in WORKLOADS if workload.name in wanted]


def _fields(options: Sequence[str]) -> dict[str, Any]:
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
