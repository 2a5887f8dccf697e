"""How flags are shown: in groups, each with one sentence and its default; and where a value came from.

A setting is taken from its flag, else from its environment variable, else from the file of `--config`. What is wrong
with it is told with the place that it came from, unless it was typed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click
from click.core import ParameterSource

from novainfer import NovaInferError
from novainfer.config import BATCHING, MEMORY, MODEL, QUEUE, READERS, RECORDER, WORKER, EngineConfig
from novainfer.server.settings import GENERAL, ServerSettings
from novainfer.setting import Setting, variable_of

Command = TypeVar("Command", bound=Callable[..., Any])

_LATE = (MEMORY, BATCHING, QUEUE, READERS, WORKER, RECORDER, GENERAL)  # after what only one command has
_SETTINGS = frozenset((*EngineConfig.__struct_fields__, *ServerSettings.__struct_fields__))
_WORD = re.compile(r"\w+")
CONFIG_FILE = "novainfer.config_file"  # of a context's meta: the path of the file that gave defaults
# Kubernetes gives each container a variable NAME_PORT for each Service of its namespace.
OF_KUBERNETES = "tcp://"


class Flag(click.Option):
    """An option that belongs to a `group` of its command's help."""

    def __init__(self, *args: Any, group: str = GENERAL, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            if error.param_hint is None and (origin := origin_of(ctx, self)) is not None:
                error.param_hint = f"{self.get_error_hint(ctx)} ({origin})"
            raise


def flag(group: str, *names: str, **how: Any) -> Callable[[Command], Command]:
    """A decorator that gives a command this flag, in this group of its help."""
    return click.option(*names, cls=Flag, group=group, **how)


def flag_of_setting(
    setting: Setting, *names: str, more: str = "", shown: str | None = None, variables: tuple[str, ...] = (), **how: Any
) -> Callable[[Command], Command]:
    """The flag of a setting; `names` and `variables` are other ones for it, and `how` is what it has beside its type.

    Its help is the setting's own sentence, which ends with what is `more`, and the default, or what is `shown` of it.
    """
    default, kind = setting.default, setting.kind
    if shown is None and isinstance(default, bool):
        shown = "on" if default else "off"
    elif shown is None:
        shown = setting.unset if default is None or setting.is_list else str(default)
    name = setting.flag
    if bool in (kind, *get_args(kind)):
        name = f"{name}/--no-{name.removeprefix('--')}"
    elif setting.choices:
        how.setdefault("type", click.Choice(setting.choices))
    else:
        how.setdefault("type", next((one for one in (int, float) if one is kind or one in get_args(kind)), str))
    text = f"{setting.text.removesuffix('.')}; {more}" if more else setting.text
    how["help"] = f"{text} [default: {shown}]" if shown else text
    variables = (setting.variable, *variables)
    how.setdefault("multiple", setting.is_list)
    return flag(setting.group, name, *names, setting.name, default=None, envvar=variables, **how)


def given(ctx: click.Context, settings: tuple[Setting, ...]) -> dict[str, Any]:
    """The settings that have a value in `ctx`, by field: what is left out has the record's own default."""
    values = {setting.name: ctx.params[setting.name] for setting in settings if setting.flag}
    return {name: value for name, value in values.items() if value not in (None, ())}


def origin_of(ctx: click.Context, param: click.Parameter) -> str | None:
    """Where the value of this flag came from: a variable or a file; None for what was typed, or left out."""
    source = ctx.get_parameter_source(param.name or "")
    if source is ParameterSource.DEFAULT_MAP and CONFIG_FILE in ctx.meta:
        return f"from {ctx.meta[CONFIG_FILE]}"
    if source is not ParameterSource.ENVIRONMENT or param.envvar is None:
        return None
    names = [param.envvar] if isinstance(param.envvar, str) else param.envvar
    name = next(name for name in names if os.environ.get(name))
    if os.environ[name].startswith(OF_KUBERNETES):
        return f"from {name}, which Kubernetes sets for a Service of that name unless enableServiceLinks is false"
    return f"from {name}"


def setting_in(error: NovaInferError) -> str | None:
    """The field that an error is about, as it says itself, or as its message begins."""
    first = error.message.partition(" ")[0]
    return error.param or (first if first in _SETTINGS else None)


class Grouped(click.Command):
    """A command whose help has a section for each group of flags: the model, what only it has, and the rest.

    An error about a setting that comes out of it is noted with where its value came from.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NovaInferError as error:
            named = setting_in(error)
            mentioned = {word for word in _WORD.findall(error.message) if "_" in word}  # "port" may be just a word
            for param in self.params:
                if param.name == named or param.name in mentioned:
                    origin = origin_of(ctx, param)
                    if origin is not None:
                        error.add_note(origin if param.name == named else f"{param.opts[0]} {origin}")
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        first = next((one for one in self.params if isinstance(one, Flag) and one.envvar is not None), None)
        if first is not None:
            name = first.opts[0]
            formatter.write_paragraph()
            formatter.write_text(
                f"What a flag sets may stand in the file of --config ({name.removeprefix('--')}: VALUE) or in an "
                f"environment variable ({variable_of(name)}) as well: a flag goes before a variable, and a variable "
                "before the file."
            )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(param, "group", GENERAL), []).append(record)
        own = [title for title in groups if title != MODEL and title not in _LATE]
        for title in (MODEL, *own, *_LATE):
            if title in groups:
                with formatter.section(title):
                    formatter.write_dl(groups[title])
