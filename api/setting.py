"""A field of a record as people meet it: one sentence, a group and a flag, from which the rest comes.

Its line in a file for `--config`, its environment variable, `--help`, docs/reference.md and the schema of the file are
all made of it, so that none of them can say something else.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

__all__ = ["VARIABLE_PREFIX", "Setting", "says", "schema_of", "settings_of", "variable_of"]

VARIABLE_PREFIX = "NOVAINFER_"  # of the environment variables that set what flags set


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of one field."""

    name: str
    kind: Any  # its type
    default: Any
    text: str  # one sentence
    group: str  # the section of `--help` that it stands in
    flag: str  # "": it has none of its own
    unset: str  # what None leads to, where that is worth a word
    takes_object: bool  # whether it may be an object, which a flag spells as JSON and a file as a mapping
    choices: tuple[str, ...]  # what it may be, where that is a list of words
    is_list: bool  # whether its flag may be given several times

    @property
    def variable(self) -> str:
        """The environment variable that sets it; "" where it has no flag."""
        return variable_of(self.flag) if self.flag else ""


def variable_of(flag: str) -> str:
    """The environment variable of a flag: `--max-num-seqs` has `NOVAINFER_MAX_NUM_SEQS`."""
    return VARIABLE_PREFIX + flag.lstrip("-").replace("-", "_").upper()


def says(group: str, text: str, *, flag: str | None = None, unset: str = "", choices: tuple[str, ...] = ()) -> Any:
    """The annotation of a field; `flag` where it is not its name, `choices` where its type does not say them."""
    return msgspec.Meta(description=text, extra={"group": group, "flag": flag, "unset": unset, "choices": choices})


@cache
def settings_of(record: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """All fields of a record whose every field is annotated by `says`, in order."""
    return tuple(_setting(field) for field in msgspec.structs.fields(record))


def _setting(field: msgspec.structs.FieldInfo) -> Setting:
    kind, meta = get_args(field.type)
    extra = meta.extra
    flag = extra["flag"]
    literals = [one for one in (kind, *get_args(kind)) if get_origin(one) is Literal]
    return Setting(
        name=field.name,
        kind=kind,
        default=field.default,
        text=meta.description,
        group=extra["group"],
        flag=f"--{field.name.replace('_', '-')}" if flag is None else flag,
        unset=extra["unset"],
        takes_object=any(isinstance(one, type) and issubclass(one, msgspec.Struct) for one in get_args(kind)),
        choices=extra["choices"] or tuple(choice for literal in literals for choice in get_args(literal)),
        is_list=get_origin(kind) is tuple,
    )


def schema_of(title: str, *records: type[msgspec.Struct]) -> dict[str, Any]:
    """A JSON schema of a YAML file that holds flags of these records: flags are its keys, without their hyphens."""
    properties = {one.flag.lstrip("-"): _schema(one) for record in records for one in settings_of(record) if one.flag}
    referred: dict[str, Any] = {}  # what properties refer to, from the root of the document
    for found in properties.values():
        referred |= found.pop("$defs", {})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "properties": properties,
        "$defs": referred,
    }


def _schema(setting: Setting) -> dict[str, Any]:
    kind: Any = setting.kind
    if setting.choices:
        kind = Literal[setting.choices] | None if setting.default is None else Literal[setting.choices]
    elif Path in get_args(kind):  # it is written as a string
        kind = str | None if setting.default is None else str
    elif setting.is_list:
        kind = str | list[str]
    return {"description": setting.text, **msgspec.json.schema(kind), "default": setting.default}
