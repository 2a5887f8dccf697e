"""A field of `EngineConfig` as people meet it: one sentence, a group and a flag, for help, reference and schema."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

__all__ = ["Setting", "says", "schema_of", "settings_of"]


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
    )


def schema_of(record: type[msgspec.Struct], title: str) -> dict[str, Any]:
    """A JSON schema of a YAML file that holds flags of this record: flags are its keys, without their hyphens."""
    properties = {one.flag.lstrip("-"): _schema(one) for one in settings_of(record) if one.flag}
    records: dict[str, Any] = {}  # that properties refer to, from the root of the document
    for found in properties.values():
        records |= found.pop("$defs", {})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "properties": properties,
        "$defs": records,
    }


def _schema(setting: Setting) -> dict[str, Any]:
    kind: Any = setting.kind
    if setting.choices:
        kind = Literal[setting.choices] | None if setting.default is None else Literal[setting.choices]
    elif Path in get_args(kind):  # it is written as a string
        kind = str | None if setting.default is None else str
    return {"description": setting.text, **msgspec.json.schema(kind), "default": setting.default}
