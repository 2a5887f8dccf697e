"""A call as Qwen3-Coder and Qwen3.5 write it: `<function=…>`, a `<parameter=…>` each, values as plain text.

    <function=weather>                            {"city": "Paris", "days": 3}
    <parameter=city>
    Paris
    </parameter>
    <parameter=days>
    3
    </parameter>
    </function>

Arguments are JSON, made of the values by the types in the tool's schema. A string is passed on while it is written,
escaped; a value of another type when it is whole. One that is not of its type is passed on as a string: a client that
checks its arguments then sees what the model has written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NAME_CHARS_MAX = 256  # of a tool or a parameter; longer ones are no names
CHOICE_DEPTH_MAX = 8  # of anyOf in anyOf: deeper ones are any type

Types = frozenset[str]  # of JSON Schema; none: any
ANY: Types = frozenset()
STRING: Types = frozenset(["string"])
_KINDS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
EVERY: Types = frozenset([*_KINDS.values(), "number"])  # that JSON has
SAY_NOTHING = frozenset(  # keywords of a schema, of what fits it
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "format")
)


class _At(StrEnum):
    """What is read next."""

    FUNCTION = "FUNCTION"  # the tag that begins it
    BODY = "BODY"  # a parameter's tag, or the end's
    VALUE = "VALUE"
    END = "END"
    BROKEN = "BROKEN"


class XmlCall:
    """One call, while it is written; `novainfer.fsm.parsing.answer.Call` says what each part of it means.

    `schemas` are the types of each tool's parameters; one that a schema does not name is a string.
    """

    __slots__ = ("_at", "_has_begun", "_held", "_is_fresh", "_name", "_pieces", "_schemas", "_types", "_value")

    is_quoting = False  # nothing is quoted: a control token is one wherever it stands

    def __init__(self, schemas: Mapping[str, Mapping[str, Types]]) -> None:
        self._schemas = schemas
        self._at = _At.FUNCTION
        self._held = ""  # what may be the beginning of a tag
        self._name: str | None = None
        self._has_begun = False  # a parameter, or the end, has followed the name
        self._types: Types | None = None  # of the parameter that is being read
        self._is_fresh = False  # of its value nothing was read
        self._value: list[str] = []  # of one that is no string
        self._pieces: list[str] = []  # of the arguments, that were not taken

    @property
    def name(self) -> str | None:
        """The tool's name, when a parameter has begun as well, or the call is whole without any."""
        return self._name if self._has_begun else None

    @property
    def is_whole(self) -> bool:
        """It has ended as it should."""
        return self._at is _At.END

    @property
    def is_broken(self) -> bool:
        """It goes on as no call does."""
        return self._at is _At.BROKEN

    @property
    def has_all_arguments(self) -> bool:
        """Its arguments are whole: only its last tag says so."""
        return self._at is _At.END

    def take_arguments(self) -> str:
        """What was made of the arguments and not taken before."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def feed(self, text: str) -> str:
        """Read on; gives back what stands behind the call's end, or from where it is broken."""
        self._held += text
        while self._step():
            pass
        if self._at not in (_At.END, _At.BROKEN):
            return ""
        rest, self._held = self._held, ""
        return rest

    def close(self) -> str:
        """The model has ended it without its last tags: what it has written is all. Gives back half a tag."""
        held, self._held = self._held, ""
        if self._at is _At.VALUE:
            self._say(held.removesuffix("\n"))
            self._end_value()
            held = ""
        if self._at is _At.BODY:
            self._end()
        return held

    def cut(self) -> str:
        """The answer has ended in it: what is left of a value is given as it is. Gives back half a tag."""
        held, self._held = self._held, ""
        if self._at is not _At.VALUE:
            return held
        self._say(held)
        self._pieces += self._value
        return ""

    def _step(self) -> bool:
        """Read the next tag, or a value's text; False when more is needed for that."""
        if self._at is _At.FUNCTION:
            if (name := self._tag(FUNCTION)) is not None:
                self._name = name
                self._at = _At.BODY
                return True
        elif self._at is _At.BODY:
            if (name := self._tag(PARAMETER, END_FUNCTION)) is not None:
                self._begin_value(name)
                return True
        elif self._at is _At.VALUE:
            return self._in_value()
        return False

    def _tag(self, tag: str, end: str = "") -> str | None:
        """The name in a `tag` behind spaces; None when it is not whole, is the `end`, or is broken."""
        self._held = self._held.lstrip()
        held = self._held
        if end and held.startswith(end):
            self._held = held[len(end) :]
            self._end()
        elif held.startswith(tag):
            name, closed, rest = held[len(tag) :].partition(">")
            if not _may_be_name(name):
                self._at = _At.BROKEN
            elif closed and name.strip():
                self._held = rest
                return name.strip()
            elif closed:
                self._at = _At.BROKEN
        elif not tag.startswith(held) and not end.startswith(held):
            self._at = _At.BROKEN
        return None

    def _begin_value(self, name: str) -> None:
        assert self._name is not None
        self._types = self._schemas.get(self._name, {}).get(name, STRING)
        self._pieces += [", " if self._has_begun else "{", _quoted(name), ": "]
        if self._types == STRING:
            self._pieces.append('"')
        self._has_begun = self._is_fresh = True
        self._at = _At.VALUE

    def _in_value(self) -> bool:
        if self._is_fresh:
            if not self._held:
                return False
            self._is_fresh = False
            self._held = self._held.removeprefix("\n")
        value, found, rest = self._held.partition(END_PARAMETER)
        if found:
            self._say(value.removesuffix("\n"))
            self._held = rest
            self._end_value()
            return True
        keep = max(_overlap(self._held, "\n" + END_PARAMETER), _overlap(self._held, END_PARAMETER))
        self._say(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _say(self, value: str) -> None:
        if self._types == STRING:
            self._pieces.append(_quoted(value)[1:-1])
        else:
            self._value.append(value)

    def _end_value(self) -> None:
        assert self._types is not None
        self._pieces.append('"' if self._types == STRING else json_of("".join(self._value), self._types))
        self._value.clear()
        self._at = _At.BODY

    def _end(self) -> None:
        self._pieces.append("}" if self._has_begun else "{}")
        self._has_begun = True
        self._at = _At.END


def types_of_tools(tools: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Types]]:
    """The types of each tool's parameters, by its name; `tools` are OpenAI's."""
    found: dict[str, dict[str, Types]] = {}
    for tool in tools:
        function = tool["function"]
        properties = (function.get("parameters") or {}).get("properties")
        named = properties.items() if isinstance(properties, dict) else ()
        found[function["name"]] = {name: types_of(schema) for name, schema in named}
    return found


def types_of(schema: Any, depth: int = 0) -> Types:
    """The types that a value may have by its JSON schema; `depth` is that of its choices, within others.

    `ANY` where nothing is said of it.
    """
    if not isinstance(schema, dict) or depth == CHOICE_DEPTH_MAX:
        return ANY
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset([said])
    if isinstance(said, list):
        return frozenset(name for name in said if isinstance(name, str))
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return frozenset(_KINDS.get(type(value), "string") for value in values)
    for several in ("anyOf", "oneOf"):
        if isinstance(schema.get(several), list):
            each = [types_of(one, depth + 1) for one in schema[several]]
            return frozenset().union(*each) if all(each) else ANY
    return ANY if schema.keys() <= SAY_NOTHING else EVERY


def json_of(text: str, types: Types) -> str:
    """A value as JSON: what it says where that is of one of `types`, else a string of it.

    Where it may be something else than a string, a string may come in quotes, as grammars want it then.
    """
    said = text.strip()
    lower = said.lower()
    if lower in ("true", "false") and (not types or "boolean" in types):
        return lower
    if lower in ("null", "none") and (not types or "null" in types):
        return "null"
    try:
        value = json.loads(said, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _quoted(text)
    kind = _KINDS.get(type(value))
    if not types:
        return _quoted(text) if kind == "string" else said
    return said if kind in types or (kind == "integer" and "number" in types) else _quoted(text)


def _refuse(constant: str) -> float:
    raise ValueError(constant)


def is_name(text: str) -> bool:
    """Whether a parameter of this name is read as one."""
    return _may_be_name(text) and ">" not in text and bool(text) and text == text.strip()


def _may_be_name(text: str) -> bool:
    return len(text) <= NAME_CHARS_MAX and "\n" not in text and "<" not in text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` that `tag` begins with."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
