"""How flags are shown: in groups, each with one sentence and its default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from novainfer.config import BATCHING, MEMORY, MODEL, QUEUE, READERS, RECORDER, WORKER
from novainfer.setting import Setting

Command = TypeVar("Command", bound=Callable[..., Any])

GENERAL = "General"  # also of click's own, such as --help
_LATE = (MEMORY, BATCHING, QUEUE, READERS, WORKER, RECORDER, GENERAL)  # after what only one command has


class Flag(click.Option):
    """An option that belongs to a `group` of its command's help."""

    def __init__(self, *args: Any, group: str = GENERAL, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def flag(group: str, *names: str, **how: Any) -> Callable[[Command], Command]:
    """A decorator that gives a command this flag, in this group of its help."""
    return click.option(*names, cls=Flag, group=group, **how)


def flag_of_setting(
    setting: Setting, *names: str, more: str = "", shown: str | None = None, **how: Any
) -> Callable[[Command], Command]:
    """The flag of an engine's setting; `names` are other ones for it, and `how` is what it has beside its type.

    Its help is the setting's own sentence, which ends with what is `more`, and the default, or what is `shown` of it.
    """
    default, kind = setting.default, setting.kind
    if shown is None and isinstance(default, bool):
        shown = "on" if default else "off"
    elif shown is None:
        shown = setting.unset if default is None else str(default)
    name = setting.flag
    if default is True or (default is None and bool in get_args(kind)):
        name = f"{name}/--no-{name.removeprefix('--')}"
    elif default is False:
        how["is_flag"] = True
    elif setting.choices:
        how.setdefault("type", click.Choice(setting.choices))
    else:
        how.setdefault("type", next((one for one in (int, float) if one is kind or one in get_args(kind)), str))
    text = f"{setting.text.removesuffix('.')}; {more}" if more else setting.text
    how["help"] = f"{text} [default: {shown}]" if shown else text
    return flag(setting.group, name, *names, setting.name, default=None, **how)


class Grouped(click.Command):
    """A command whose help has a section for each group of flags: the model, what only it has, and the rest."""

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
