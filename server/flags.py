"""How flags are shown: in groups, each with one sentence and its default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from novainfer import EngineConfig

Command = TypeVar("Command", bound=Callable[..., Any])

MODEL = "Model"
MEMORY, BATCHING, QUEUE, READERS = "KV memory", "Batching and kernels", "Queue", "Slow readers"
WORKER, RECORDER = "Worker and recovery", "Flight recorder"
GENERAL = "General"  # also of click's own, such as --help
_LATE = (MEMORY, BATCHING, QUEUE, READERS, WORKER, RECORDER, GENERAL)  # after what only one command has
_DEFAULTS = dict(zip(EngineConfig.__struct_fields__, EngineConfig.__struct_defaults__, strict=True))


class Flag(click.Option):
    """An option that belongs to a `group` of its command's help.

    With `field`, its default is that of `EngineConfig`, and shown where it is a value.
    """

    def __init__(self, *args: Any, group: str = GENERAL, field: str | None = None, **kwargs: Any) -> None:
        default = _DEFAULTS[field] if field is not None else None
        if default is not None:
            shown = {True: "on", False: "off"}.get(default, default) if isinstance(default, bool) else default
            kwargs["help"] = f"{kwargs['help']} [default: {shown}]"
        super().__init__(*args, **kwargs)
        self.group = group


def flag(group: str, *names: str, **how: Any) -> Callable[[Command], Command]:
    """A decorator that gives a command this flag, in this group of its help."""
    return click.option(*names, cls=Flag, group=group, **how)


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
