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
from novainfer.fsm.mode import QUANTIZATIONS
from novainfer.server.flags import (
    BATCHING,
    GENERAL,
    MEMORY,
    MODEL,
    QUEUE,
    READERS,
    RECORDER,
    WORKER,
    flag,
)

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
    *(
        "tokenizer",
        "served_model_name",
        "quantization",
        "generation_config",
        "seed",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
    ),
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
    return [
        click.argument("model_argument", metavar="[MODEL]", required=False),
        *_model_options(),
        *_memory_options(),
        *_work_options(),
        *_waiting_options(),
        *_worker_options(),
        *_general_options(),
    ]


def _model_options() -> list[Callable[[Command], Command]]:
    dtypes = ["auto", "float32", "bfloat16", "float16", *DTYPES]
    return [
        flag(MODEL, "--model", field="model", help="A folder, or a name on the Hugging Face hub."),
        flag(MODEL, "--model-path", help="The same as --model."),
        flag(MODEL, "--hf-checkpoint", help="The same as --model; excludes --checkpoint-path."),
        flag(
            MODEL,
            "--checkpoint-path",
            type=click.Path(exists=True, path_type=str),
            help="A checkpoint's folder; excludes --hf-checkpoint.",
        ),
        flag(MODEL, "--tokenizer", help="The tokenizer's folder or hub name. [default: the model's]"),
        flag(MODEL, "--served-model-name", help="The name that clients use. [default: as the model was given]"),
        flag(
            MODEL,
            "--device",
            type=click.Choice(["cpu", "cuda", "nvidia"]),
            default="cpu",
            show_default=True,
            help="Where the model runs; nvidia is another word for cuda.",
        ),
        flag(
            MODEL,
            "--dtype",
            type=click.Choice(dtypes),
            metavar="NAME",
            default="auto",
            show_default=True,
            help="float32, bfloat16 or float16 (also half, fp16, bf16, float, fp32); auto: as in the checkpoint.",
        ),
        flag(
            MODEL,
            "--quantization",
            type=click.Choice(QUANTIZATIONS),
            help="Round weights while they are loaded: half the memory of bfloat16. [default: as in the checkpoint]",
        ),
        flag(MODEL, "--max-model-len", type=int, help="Longest context in tokens. [default: the model's]"),
        flag(
            MODEL,
            "--generation-config",
            type=click.Choice(["auto", "none"]),
            field="generation_config",
            help="auto: requests that say nothing else are sampled as generation_config.json wants it.",
        ),
        flag(MODEL, "--seed", type=int, help="Seeds of requests that bring none begin here. [default: by chance]"),
    ]


def _memory_options() -> list[Callable[[Command], Command]]:
    return [
        flag(
            MEMORY,
            "--kv-cache-capacity-mode",
            type=click.Choice(["auto", "fixed"]),
            field="kv_cache_capacity_mode",
            help="auto: by the free memory; fixed: --num-kv-blocks.",
        ),
        flag(MEMORY, "--num-kv-blocks", type=int, help="Blocks of the KV cache; only with fixed."),
        flag(
            MEMORY,
            "--kv-cache-memory-utilization",
            "--gpu-memory-utilization",
            "kv_cache_memory_utilization",
            type=float,
            field="kv_cache_memory_utilization",
            help="Largest share of the free memory that the KV cache may take.",
        ),
        flag(MEMORY, "--block-size", type=int, field="block_size", help="Tokens in a KV block."),
        flag(
            MEMORY,
            "--enable-prefix-caching/--no-enable-prefix-caching",
            default=None,
            field="enable_prefix_caching",
            help="Keep the KV of finished requests for prompts that begin alike.",
        ),
        flag(
            MEMORY,
            "--swap-space-gib",
            type=float,
            field="swap_space_gib",
            help="Host memory in GiB for the KV of paused and preempted requests.",
        ),
    ]


def _work_options() -> list[Callable[[Command], Command]]:
    return [
        flag(BATCHING, "--max-num-seqs", type=int, field="max_num_seqs", help="Most requests in a step."),
        flag(
            BATCHING,
            "--max-num-batched-tokens",
            type=int,
            field="max_num_batched_tokens",
            help="Most tokens in a step.",
        ),
        flag(
            BATCHING,
            "--prefill-chunk-tokens",
            type=int,
            field="prefill_chunk_tokens",
            help="Most tokens of one prompt in a step.",
        ),
        flag(BATCHING, "--num-threads", type=int, help="CPU threads of the kernels. [default: by cores and quota]"),
        flag(
            BATCHING,
            "--native",
            type=click.Choice(["0", "1", "require"]),
            help="C++ kernels: 0 never, 1 where they can be had, require: or no start. [default: 1]",
        ),
        flag(
            BATCHING,
            "--batch-invariant",
            is_flag=True,
            default=None,
            field="batch_invariant",
            help="Only kernels that compute a row alike in every batch.",
        ),
    ]


def _waiting_options() -> list[Callable[[Command], Command]]:
    return [
        flag(
            QUEUE,
            "--max-num-queued-reqs",
            type=int,
            field="max_num_queued_reqs",
            help="Requests that may wait; more are refused with 503.",
        ),
        flag(
            QUEUE,
            "--max-num-queued-tokens",
            type=int,
            field="max_num_queued_tokens",
            help="Prompt tokens that may wait; more are refused with 503.",
        ),
        flag(
            QUEUE,
            "--max-num-overflow-reqs",
            type=int,
            field="max_num_overflow_reqs",
            help="Requests beyond the queue that may wait if they asked to.",
        ),
        flag(
            READERS,
            "--stall-keep-s",
            type=float,
            field="stall_keep_s",
            help="Seconds that a slow reader's request keeps its KV on the device.",
        ),
        flag(
            READERS,
            "--stall-timeout",
            type=float,
            field="stall_timeout_s",
            help="Seconds after which a slow reader's request is ended.",
        ),
    ]


def _worker_options() -> list[Callable[[Command], Command]]:
    return [
        flag(
            WORKER,
            "--worker",
            type=click.Choice(["process", "thread"]),
            help="A process is restarted when it is lost. [default: process for serve, else thread]",
        ),
        flag(
            WORKER,
            "--warm-spare",
            is_flag=True,
            default=None,
            field="warm_spare",
            help="Keep a second worker loaded, to take over at once.",
        ),
        flag(
            WORKER,
            "--step-timeout",
            type=float,
            field="step_timeout_s",
            help="Seconds after which a step counts as hung, and its worker as lost.",
        ),
        flag(
            WORKER,
            "--heartbeat-timeout",
            type=float,
            field="heartbeat_timeout_s",
            help="Seconds of silence after which a worker counts as lost.",
        ),
        flag(
            WORKER,
            "--max-restarts",
            type=int,
            field="max_restarts",
            help="Losses without a step between them, within --restart-window, before the engine gives up.",
        ),
        flag(
            WORKER,
            "--restart-window",
            type=float,
            field="restart_window_s",
            help="Seconds in which losses are counted.",
        ),
        flag(
            WORKER,
            "--ladder-quiet-s",
            type=float,
            field="ladder_quiet_s",
            help="Seconds without trouble before a degraded mode is left again.",
        ),
    ]


def _general_options() -> list[Callable[[Command], Command]]:
    return [
        flag(
            RECORDER,
            "--recorder/--no-recorder",
            default=None,
            field="recorder",
            help="Keep the last minutes, to be written when something goes wrong.",
        ),
        flag(
            RECORDER,
            "--recorder-dir",
            type=click.Path(file_okay=False),
            help="Folder of the recordings, which hold prompts. [default: for serve the user's state folder]",
        ),
        flag(
            GENERAL,
            "--config",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            callback=_load_config,
            is_eager=True,
            expose_value=False,
            help="A YAML file of flags; those on the command line win.",
        ),
        flag(
            GENERAL,
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
            default="info",
            show_default=True,
            help="Least level of log lines on standard error.",
        ),
        flag(GENERAL, "--verbose", "-v", is_flag=True, help="The same as --log-level debug."),
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
