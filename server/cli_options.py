"""Flags that several commands share, and how they become an `EngineConfig`. Names are vLLM's where vLLM has one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml
from click.core import ParameterSource

from novainfer import EngineConfig
from novainfer.config import DTYPES

Command = TypeVar("Command", bound=Callable[..., Any])

API_KEY_VARIABLES = ["NOVAINFER_API_KEY", "NOVA_API_KEY"]  # the first one that is set; the second is its old name
MODEL_SOURCES = {
    "model_argument": "MODEL",
    "model": "--model",
    "model_path": "--model-path",
    "hf_checkpoint": "--hf-checkpoint",
    "checkpoint_path": "--checkpoint-path",
}
# flag's parameter -> field of EngineConfig, where they differ in nothing but being passed on
ENGINE_FIELDS = (
    *("tokenizer", "served_model_name", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("prefill_chunk_tokens", "block_size", "enable_prefix_caching", "kv_cache_capacity_mode", "num_kv_blocks"),
    *("kv_cache_memory_utilization", "max_num_queued_reqs", "max_num_queued_tokens", "num_threads", "native"),
    *("batch_invariant", "worker", "warm_spare", "max_restarts", "swap_space_gib", "stall_keep_s", "ladder_quiet_s"),
    *("max_num_overflow_reqs", "recorder", "recorder_dir"),
)
# the same, where the field's name ends with the unit and the flag's does not
ENGINE_DURATIONS = ("step_timeout", "heartbeat_timeout", "restart_window", "stall_timeout")


def _load_config(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    """Make the file's values the defaults of the other flags; raises `BadParameter` naming what is wrong."""
    if value is None:
        return
    try:
        found = yaml.safe_load(value.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise click.BadParameter(f"{value} cannot be read: {reason}", ctx=ctx, param=param) from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{value} must hold `flag: value` lines", ctx=ctx, param=param)
    names: dict[str, tuple[click.Parameter, bool]] = {}
    for option in ctx.command.params:
        for opt in option.opts:
            names[opt.lstrip("-").replace("-", "_").lower()] = (option, True)
        for opt in option.secondary_opts:
            names[opt.lstrip("-").replace("-", "_")] = (option, False)
    defaults: dict[str, Any] = {}
    for key, item in found.items():
        name = str(key).lstrip("-").replace("-", "_")
        if name not in names or name == "config":
            raise click.BadParameter(f"{value} holds {key!r}, which is no flag of this command", ctx=ctx, param=param)
        option, is_positive = names[name]
        assert option.name is not None
        if option.multiple if isinstance(option, click.Option) else False:
            item = item if isinstance(item, list) else [item]
        elif isinstance(item, dict | list):
            raise click.BadParameter(f"{value}: {key} must be one value", ctx=ctx, param=param)
        if not is_positive:
            if not isinstance(item, bool):
                raise click.BadParameter(f"{value}: {key} must be true or false", ctx=ctx, param=param)
            item = not item
        defaults[option.name] = item
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def engine_options(command: Command) -> Command:
    """Give `command` the flags of an engine and its model."""
    for option in reversed(_engine_options()):
        command = option(command)
    return command


def _engine_options() -> list[Callable[[Command], Command]]:
    option = click.option
    return [
        click.argument("model_argument", metavar="[MODEL]", required=False),
        option("--model", help='A folder, a name on the Hugging Face hub, or "demo" (the default).'),
        option("--model-path", help="The same as --model."),
        option("--hf-checkpoint", help="The same; excludes --checkpoint-path."),
        option(
            "--checkpoint-path",
            type=click.Path(exists=True, path_type=str),
            help="A checkpoint's folder; excludes --hf-checkpoint.",
        ),
        option("--model-type", type=click.Choice(["auto", "qwen2"]), default="auto", help="The architecture."),
        option("--tokenizer", help="Where the tokenizer is, if not with the model."),
        option("--served-model-name", help="The name that clients use."),
        option("--device", type=click.Choice(["cpu", "cuda", "nvidia"]), default="cpu", show_default=True),
        option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16", *DTYPES]),
            default="auto",
            show_default=True,
        ),
        option("--seed", type=int, help="Of requests that bring none; default: drawn anew."),
        option("--max-model-len", type=int, help="Longest context in tokens; default: the model's own."),
        option("--max-num-seqs", type=int, help="Most requests in a batch."),
        option("--max-num-batched-tokens", type=int, help="Most tokens in a step."),
        option("--prefill-chunk-tokens", type=int, help="Tokens of a prompt computed in one step."),
        option("--block-size", type=int, help="Tokens in a KV block."),
        option("--enable-prefix-caching/--no-enable-prefix-caching", default=None, help="On by default."),
        option("--kv-cache-capacity-mode", type=click.Choice(["auto", "fixed"]), help="fixed needs --num-kv-blocks."),
        option("--num-kv-blocks", type=int, help="KV blocks when the capacity is fixed."),
        option(
            "--kv-cache-memory-utilization",
            "--gpu-memory-utilization",
            "kv_cache_memory_utilization",
            type=float,
            help="Share of the free memory for the KV cache.",
        ),
        option("--max-num-queued-reqs", type=int, help="Requests that may wait; more get 503."),
        option("--max-num-queued-tokens", type=int, help="Tokens that may wait; more get 503."),
        option("--num-threads", type=int, help="CPU threads for the kernels."),
        option("--native", type=click.Choice(["0", "1", "require"]), help="C++ kernels: never, if possible, or must."),
        option("--batch-invariant", is_flag=True, default=None, help="Only kernels whose rows ignore the batch."),
        *_fault_options(),
        option(
            "--config",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            callback=_load_config,
            is_eager=True,
            expose_value=False,
            help="A YAML file of flags; those on the command line win.",
        ),
        option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
            default="info",
            show_default=True,
        ),
        option("--verbose", "-v", is_flag=True, help="The same as --log-level debug."),
    ]


def _fault_options() -> list[Callable[[Command], Command]]:
    option = click.option
    return [
        option(
            "--worker",
            type=click.Choice(["process", "thread"]),
            help="Where the device works: in a process that is restarted when it is lost (the default of serve), or in "
            "a thread of this one.",
        ),
        option("--warm-spare", is_flag=True, default=None, help="Keep a second worker loaded, to take over at once."),
        option("--step-timeout", type=float, help="Seconds after which a step counts as hung, and its worker as lost."),
        option("--heartbeat-timeout", type=float, help="Seconds of silence after which a worker counts as lost."),
        option("--max-restarts", type=int, help="Restarts without a step between them before the engine gives up, and"),
        option("--restart-window", type=float, help="the seconds in which they are counted."),
        option("--ladder-quiet-s", type=float, help="Seconds without trouble before a degraded mode is left again."),
        option("--swap-space-gib", type=float, help="Host memory for the KV of paused and preempted requests."),
        option("--stall-keep-s", type=float, help="Seconds that a slow reader's request keeps its KV on the device."),
        option("--stall-timeout", type=float, help="Seconds after which a slow reader's request is ended."),
        option("--max-num-overflow-reqs", type=int, help="Requests beyond the queue that may wait if they asked to."),
        option("--recorder/--no-recorder", default=None, help="The flight recorder; on by default."),
        option("--recorder-dir", type=click.Path(file_okay=False), help="Where it writes its files."),
    ]


def engine_config(ctx: click.Context, options: dict[str, Any], **defaults: Any) -> EngineConfig:
    """The engine that the flags ask for; raises `UsageError` or `InvalidParameter` naming the flag.

    `defaults` are the command's own, where they differ from the library's.
    """
    fields = defaults | {name: options[name] for name in ENGINE_FIELDS if options.get(name) is not None}
    fields |= {f"{name}_s": options[name] for name in ENGINE_DURATIONS if options.get(name) is not None}
    model = _model(ctx, options)
    if model is not None:
        fields["model"] = model
    fields["device"] = "cuda" if options["device"] == "nvidia" else options["device"]
    fields["dtype"] = options["dtype"]
    return EngineConfig(**fields)


def _model(ctx: click.Context, options: dict[str, Any]) -> str | None:
    """The one model that was named; what stands on the command line beats what the configuration file says."""
    given = {name: options[name] for name in MODEL_SOURCES if options.get(name)}
    typed = {
        name: value for name, value in given.items() if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
    }
    chosen = typed or given
    if "hf_checkpoint" in chosen and "checkpoint_path" in chosen:
        raise click.UsageError("--hf-checkpoint and --checkpoint-path exclude each other: give one of them")
    if len(set(chosen.values())) > 1:
        names = " and ".join(MODEL_SOURCES[name] for name in chosen)
        raise click.UsageError(f"the model is named twice, by {names}: give one of them")
    return next(iter(chosen.values()), None)


def set_up_logging(options: dict[str, Any], *, access_log: bool = False) -> None:
    """Our loggers to stderr at the level asked for; everybody else's from warnings on."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    level = "DEBUG" if options["verbose"] else str(options["log_level"]).upper()
    logging.getLogger("novainfer").setLevel(level)
    if level == "INFO":
        logging.getLogger("novainfer.http").setLevel(logging.WARNING)  # Hypercorn tells where it runs; so do we
    if access_log:
        logging.getLogger("novainfer.access").setLevel(logging.INFO)
