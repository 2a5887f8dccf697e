"""Flags that several commands share, and how they become an `EngineConfig`. Names are vLLM's where vLLM has one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import yaml
from click.core import ParameterSource

from novainfer import EngineConfig
from novainfer.config import MODEL
from novainfer.server.cli.flags import CONFIG_FILE, OF_KUBERNETES, flag, flag_of_setting, given
from novainfer.server.logs import set_up_logging
from novainfer.server.settings import GENERAL, LOGS, LogSettings, ServerSettings
from novainfer.setting import VARIABLE_PREFIX, settings_of, variable_of

Command = TypeVar("Command", bound=Callable[..., Any])

API_KEY_VARIABLES = ["NOVAINFER_API_KEY", "NOVA_API_KEY"]  # the first one that is set; the second is its old name
CONFIG_VARIABLE = variable_of("--config")
# Variables that are no setting of a command: those of the kernels.
OTHER_VARIABLES = ("NOVAINFER_ISA",)
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
    "chat_template": {"type": click.Path(dir_okay=False)},
    "recorder_dir": {"type": click.Path(file_okay=False)},
    "weight_cache_dir": {"type": click.Path(file_okay=False)},
    "worker": {"shown": "process for serve, else thread"},
    "log_level": {"type": click.Choice(["debug", "info", "warning", "error"], case_sensitive=False)},
}
TAKE_OBJECTS = {setting.name for setting in settings_of(EngineConfig) if setting.takes_object}


class _Loader(yaml.SafeLoader):
    """YAML in which no key stands twice: the first value would vanish without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, number in keys.items():
            if number > 1:
                raise yaml.YAMLError(f"{key} stands there {number} times")
        return super().construct_mapping(node, deep)


def _load_config(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    """Make the file's values the defaults of the other flags; raises `BadParameter` naming what is wrong."""
    if value is None:
        return
    try:
        found = yaml.load(value.read_text(encoding="utf-8"), _Loader) or {}
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
        if option.name in defaults:
            raise click.BadParameter(f"{value} sets {option.opts[0]} twice", ctx=ctx, param=param)
        if item is None:
            continue
        if isinstance(option, click.Option) and option.multiple:
            items = item if isinstance(item, list) else [item]
            if any(isinstance(one, dict | list) for one in items):
                raise click.BadParameter(f"{value}: {key} must be one value, or a list of them", ctx=ctx, param=param)
            item = list(map(_as_typed, items))
        elif isinstance(item, dict) and option.name in TAKE_OBJECTS:
            item = json.dumps(item, default=str)
        elif isinstance(item, dict | list):
            raise click.BadParameter(f"{value}: {key} must be one value", ctx=ctx, param=param)
        elif not (isinstance(option, click.Option) and option.is_flag):
            item = _as_typed(item)
        if not is_positive:
            if not isinstance(item, bool):
                raise click.BadParameter(f"{value}: {key} must be true or false", ctx=ctx, param=param)
            item = not item
        defaults[option.name] = item
    ctx.meta[CONFIG_FILE] = value
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _as_typed(item: Any) -> str:
    """A value as it would be typed: neither 3.5 nor true is an integer, and neither must become one."""
    return str(item).lower() if isinstance(item, bool) else str(item)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables that look like settings and are none: they were mistyped, or are of another version."""
    records = (EngineConfig, ServerSettings, LogSettings)
    known = {setting.variable for record in records for setting in settings_of(record)}
    known |= {CONFIG_VARIABLE, *API_KEY_VARIABLES, *OTHER_VARIABLES}
    return sorted(
        name
        for name, value in environ.items()
        if name.startswith(VARIABLE_PREFIX) and name not in known and not _is_of_kubernetes(name, value)
    )


def _is_of_kubernetes(name: str, value: str) -> bool:
    """True for what a Service called novainfer, or novainfer-…, leaves in the environment of every container."""
    parts = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT_")
    return value.startswith(OF_KUBERNETES) or any(part in name for part in parts)


def engine_options(command: Command, **more: dict[str, Any]) -> Command:
    """Give `command` the flags of an engine and its model; `more` is what only its flags have, by field."""
    for option in reversed(_engine_options(more)):
        command = option(command)
    return command


def _engine_options(more: dict[str, dict[str, Any]]) -> list[Callable[[Command], Command]]:
    return [
        click.argument("model_argument", metavar="[MODEL]", required=False),
        *options_of(EngineConfig, MORE | more),
        *_model_options(),
        *_general_options(),
    ]


def options_of(record: type[msgspec.Struct], more: dict[str, dict[str, Any]]) -> list[Callable[[Command], Command]]:
    """The flags of a record's settings; `more` is what they have beside what the settings say, by field."""
    return [flag_of_setting(one, **more.get(one.name, {})) for one in settings_of(record) if one.flag]


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
            envvar=CONFIG_VARIABLE,
            help="A YAML file of flags; those on the command line and in the environment win.",
        ),
        *options_of(LogSettings, MORE),
        flag(LOGS, "--verbose", "-v", is_flag=True, help="The same as --log-level debug."),
    ]


_PRECEDENCE = (
    ParameterSource.COMMANDLINE,
    ParameterSource.ENVIRONMENT,
    ParameterSource.DEFAULT_MAP,
    ParameterSource.DEFAULT,
)


def engine_config(ctx: click.Context, options: dict[str, Any], **defaults: Any) -> EngineConfig:
    """The engine that the flags ask for; raises `UsageError` or `InvalidParameter` naming the flag.

    `defaults` are the command's own, where they differ from the library's.
    """
    fields = defaults | given(ctx, settings_of(EngineConfig))
    model = _model(ctx, options)
    if model is not None:
        fields["model"] = model
    if fields.get("device") == "nvidia":
        fields["device"] = "cuda"
    return EngineConfig(**fields)


def _model(ctx: click.Context, options: dict[str, Any]) -> str | None:
    """The one model that was named: on the command line, else in the environment, else in the configuration file."""
    named = {name: options[name] for name in MODEL_SOURCES if options.get(name)}
    if not named:
        return None
    sources = {name: ctx.get_parameter_source(name) or ParameterSource.DEFAULT for name in named}
    best = min(sources.values(), key=_PRECEDENCE.index)
    chosen = {name: value for name, value in named.items() if sources[name] is best}
    ctx.set_parameter_source("model", best)  # whichever of its names it has
    if "hf_checkpoint" in chosen and "checkpoint_path" in chosen:
        raise click.UsageError("--hf-checkpoint and --checkpoint-path exclude each other: give one of them")
    if len(set(chosen.values())) > 1:
        names = " and ".join(MODEL_SOURCES[name] for name in chosen)
        raise click.UsageError(f"the model is named twice, by {names}: give one of them")
    return next(iter(chosen.values()), None)


def set_up_logs(ctx: click.Context, *, access_log: bool = False, level: str | None = None) -> None:
    """Write log lines as the flags have it; `level` is the least one where none of them says so."""
    fields = given(ctx, settings_of(LogSettings))
    if ctx.params["verbose"]:
        fields["log_level"] = "debug"
    elif level is not None:
        fields.setdefault("log_level", level)
    set_up_logging(LogSettings(**fields), access_log=access_log)
