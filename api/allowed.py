"""What a field of a Struct may be, where there is a choice: for sentences that say what would be right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")  # of msgspec's paths, such as tools[0].function.name


_WRONG = re.compile(r"Invalid enum value (?P<value>.*)|Expected `.*`, got `(?P<kind>.*)`", re.DOTALL)
_KINDS = {"int": "a number", "float": "a number", "bool": "a boolean", "str": "a string", "array": "a list"}
_KINDS |= {"object": "an object", "null": "null"}
VALUE_CHARS_MAX = 40


def rule_of(kind: Any, path: str, said: str) -> str:
    """ "must be …, not …": what the field at `path` of `kind` may be, of which msgspec has `said` that it is wrong.

    `path` is as msgspec has it, without `$.`. "" where `said` is something else, or the field is no choice.
    """
    wrong = _WRONG.fullmatch(said)
    if wrong is None or not (allowed := _allowed_at(kind, path)):
        return ""
    given = wrong["kind"]
    return f"must be {allowed}, not {wrong['value'][:VALUE_CHARS_MAX] if given is None else _KINDS.get(given, given)}"


def _allowed_at(kind: Any, path: str) -> str:
    found = [*_members(inspect.type_info(kind))]
    for step in _STEP.findall(path):
        found = [inner for one in found for inside in _at(one, step) for inner in _members(inside)]
    values = sorted(
        {json.dumps(value) for one in found if isinstance(one, inspect.LiteralType) for value in one.values}
    )
    if not values:
        return ""
    *head, last = values + sorted({_object(one) for one in found if isinstance(one, inspect.StructType)})
    return f"{', '.join(head)} or {last}" if head else last


def _members(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _members(one)
    elif isinstance(kind, inspect.Metadata):
        yield from _members(kind.type)
    else:
        yield kind


def _at(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
    elif isinstance(kind, inspect.ListType) and step.startswith("["):
        yield kind.item_type
    elif isinstance(kind, inspect.DictType) and step == "[...]":
        yield kind.value_type


def _object(kind: inspect.StructType) -> str:
    required = [field.encode_name for field in kind.fields if field.required]
    return f"an object with {' and '.join(required)}" if required else "an object"
