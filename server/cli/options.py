"""Flags that several commands share, and how they become an `EngineConfig`. Names are vLLM's where vLLM has one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml
from click.core import ParameterSource

from novainfer import EngineConfig
from novainfer.config import MODEL
from novainfer.server.cli.flags import GENERAL, flag, flag_of_setting
from novainfer.setting import settings_of

Command = TypeVar("Command", bound=Callable[..., Any])

API_KEY_VARIABLES = ["NOVAINFER_API_KEY", "NOVA_API_KEY"]  # the first one that is set; the second is its old name
MODEL_SOURCES = {
    "model_argument": "MODEL",
    "model": "--model",
    "model_path": "--model-path",
    "hf_checkpoint": "--hf-checkpoint",
    "checkpoint_path": "--checkpoint-path",
}
# What a flag has beside what the setting says of it (see `flag_of_setting`).
MORE: dict[str, dict[str, Any]] = {
    "device": {"type": click.Choice(["cpu", "cuda", "nvidia"]), "more": "nvidia is another word for cuda."},
    "dtype": {"metavar": "NAME"},
    "recorder_dir": {"type": click.Path(file_okay=False)},
    "weight_cache_dir": {"type": click.Path(file_okay=False)},
    "worker": {"shown": "process for serve, else thread"},
}
TAKE_OBJECTS = {setting.name for setting in settings_of(EngineConfig) if setting.takes_object}


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
        elif isinstance(item, dict) and option.name in TAKE_OBJECTS:
            item = json.dumps(item, default=str)
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
    own = [setting for setting in settings_of(EngineConfig) if setting.flag]
    return [
        click.argument("model_argument", metavar="[MODEL]", required=False),
        *(flag_of_setting(one, **MORE.get(one.name, {})) for one in own),
        *_model_options(),
        *_general_options(),
    ]


def _model_options() -> list[Callable[[Command], Command]]:
    return [
        flag(MODEL, "--model-path", help="The same as --model."),
        flag(MODEL, "--hf-checkpoint", help="The same as --model; excludes --checkpoint-path."),
        flag(
            MODEL,
            "--checkpoint-path",
            type=click.Path(exists=True, path_type=str),
            help="A checkpoint's folder; excludes --hf-checkpoint.",
        ),
    ]


def _general_options() -> list[Callable[[Command], Command]]:
    return [
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
    fields = defaults | {
        setting.name: options[setting.name]
        for setting in settings_of(EngineConfig)
        if setting.flag and options[setting.name] is not None
    }
    model = _model(ctx, options)
    if model is not None:
        fields["model"] = model
    if fields.get("device") == "nvidia":
        fields["device"] = "cuda"
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
    """Our loggers to stderr at the level asked for; all others from warnings on."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    level = "DEBUG" if options["verbose"] else str(options["log_level"]).upper()
    logging.getLogger("novainfer").setLevel(level)
    if level == "INFO":
        logging.getLogger("novainfer.http").setLevel(logging.WARNING)  # Hypercorn tells where it runs; so do we
    if access_log:
        logging.getLogger("novainfer.access").setLevel(logging.INFO)
