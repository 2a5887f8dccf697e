"""A call as Hermes, Qwen2.5 and Qwen3 write it: `{"name": "…", "arguments": {…}}`.

Arguments are passed on as they were written, from their first brace to the one that closes it: nothing is parsed that
would have to be written again. Keys may come in any order, and only those of the outermost object count. What it holds
beside name and arguments is skipped. Each character is looked at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import ClassVar

_SPACE = re.compile(r"[ \t\r\n]*")
_QUOTED = re.compile(r'[^"\\]*')
_UNQUOTED = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[^,}\]\s]*")
_decode = json.JSONDecoder(strict=False).decode  # line breaks within strings are what models write


class _At(StrEnum):
    """What is read next."""

    OBJECT = "OBJECT"  # the brace that begins it
    KEY = "KEY"  # the quote that begins one, or the closing brace
    IN_KEY = "IN_KEY"
    COLON = "COLON"
    VALUE = "VALUE"  # its first character
    IN_STRING = "IN_STRING"
    IN_NESTED = "IN_NESTED"
    IN_SCALAR = "IN_SCALAR"
    COMMA = "COMMA"  # or the closing brace
    END = "END"
    BROKEN = "BROKEN"


class HermesCall:
    """One call, while it is written; `novainfer.fsm.parsing.answer.Call` says what each part of it means."""

    __slots__ = ("_arguments", "_at", "_depth", "_has_arguments", "_is_escaped", "_key", "_name", "_read", "is_quoting")

    def __init__(self) -> None:
        self._at = _At.OBJECT
        self._key = ""
        self._read: list[str] = []  # of the key, string or scalar that is being read
        self._depth = 0  # of the nested value that is being read
        self._is_escaped = False
        self.is_quoting = False
        self._name: str | None = None
        self._has_arguments = False
        self._arguments: list[str] = []  # that were not taken

    @property
    def name(self) -> str | None:
        """The tool's name, when its arguments have begun as well, or the call is whole without any."""
        return self._name if self._has_arguments else None

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
        """Its arguments are whole, whatever else is missing."""
        return self._has_arguments and not (self._at is _At.IN_NESTED and self._key == "arguments")

    def take_arguments(self) -> str:
        """What was read of the arguments and not taken before."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str) -> str:
        """Read on; gives back what stands behind the call's end, or from where it is broken."""
        at = 0
        while at < len(text) and self._at not in (_At.END, _At.BROKEN):
            at = self._READ[self._at](self, text, at)
        return text[at:]

    def close(self) -> str:
        """The model has ended it before its last brace: it stays as it is."""
        return ""

    def cut(self) -> str:
        """The answer has ended in it: all that was read can be taken already."""
        return ""

    # ---- each takes the text from `at` on, and gives where it has stopped ------------------------------------------

    def _object(self, text: str, at: int) -> int:
        return self._one_of(text, at, {"{": _At.KEY})

    def _key_or_end(self, text: str, at: int) -> int:
        at = self._one_of(text, at, {'"': _At.IN_KEY, "}": _At.END})
        if self._at is _At.IN_KEY:
            self._begin_string()
        elif self._at is _At.END:
            self._end()
        return at

    def _in_key(self, text: str, at: int) -> int:
        begin, at = at, self._quoted(text, at)
        self._read.append(text[begin:at])
        if not self.is_quoting:
            key = self._decoded()
            self._key, self._at = key or "", _At.BROKEN if key is None else _At.COLON
        return at

    def _colon(self, text: str, at: int) -> int:
        return self._one_of(text, at, {":": _At.VALUE})

    def _value(self, text: str, at: int) -> int:
        at = _end_of(_SPACE, text, at)
        if at == len(text):
            return at
        if self._key == "arguments" and not self._has_arguments and text[at] not in '{"n':
            self._at = _At.BROKEN
        elif text[at] == '"':
            self._at = _At.IN_STRING
            self._begin_string()
            at += 1
        elif text[at] in "{[":
            self._at = _At.IN_NESTED
            if self._key == "name" and self._name is None:
                self._at = _At.BROKEN
            elif self._key == "arguments" and not self._has_arguments:
                self._has_arguments = True
            else:
                self._key = ""  # it is skipped
        else:
            self._at = _At.IN_SCALAR
            self._read.clear()
        return at

    def _in_string(self, text: str, at: int) -> int:
        begin, at = at, self._quoted(text, at)
        self._read.append(text[begin:at])
        if not self.is_quoting:
            self._at = _At.COMMA
            if self._key == "name" and self._name is None:
                self._name = self._decoded() or None
                self._at = _At.BROKEN if self._name is None else self._at
            elif self._key == "arguments" and not self._has_arguments:
                self._take_encoded()
        return at

    def _take_encoded(self) -> None:
        """Arguments as a string that holds their JSON, as some models write them."""
        text = self._decoded()
        try:
            is_object = isinstance(_decode(text or ""), dict)
        except (ValueError, RecursionError):
            is_object = False
        if text is None or not is_object:
            self._at = _At.BROKEN
        else:
            self._has_arguments = True
            self._arguments.append(text)

    def _in_nested(self, text: str, at: int) -> int:
        begin = at
        while at < len(text) and self._at is _At.IN_NESTED:
            at = self._quoted(text, at) if self.is_quoting else self._unquoted(text, at)
        if self._key == "arguments":
            self._arguments.append(text[begin:at])
        return at

    def _unquoted(self, text: str, at: int) -> int:
        at = _end_of(_UNQUOTED, text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            self.is_quoting = True
        elif text[at] in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            if not self._depth:
                self._at = _At.COMMA
        return at + 1

    def _in_scalar(self, text: str, at: int) -> int:
        begin, at = at, _end_of(_SCALAR, text, at)
        self._read.append(text[begin:at])
        if at == len(text):
            return at
        scalar = "".join(self._read)
        self._at = _At.COMMA
        if not scalar or (self._key == "name" and self._name is None):
            self._at = _At.BROKEN
        elif self._key == "arguments" and not self._has_arguments:
            self._at = _At.COMMA if scalar == "null" else _At.BROKEN
        return at

    def _comma(self, text: str, at: int) -> int:
        at = self._one_of(text, at, {",": _At.KEY, "}": _At.END})
        if self._at is _At.END:
            self._end()
        return at

    def _end(self) -> None:
        if self._name is None:
            self._at = _At.BROKEN
        elif not self._has_arguments:
            self._has_arguments = True
            self._arguments.append("{}")

    # ---- characters ----------------------------------------------------------------------------------------------

    def _one_of(self, text: str, at: int, follows: Mapping[str, _At]) -> int:
        """Behind spaces, one of these characters; it says what is read next."""
        at = _end_of(_SPACE, text, at)
        if at == len(text):
            return at
        self._at = follows.get(text[at], _At.BROKEN)
        return at if self._at is _At.BROKEN else at + 1

    def _begin_string(self) -> None:
        self.is_quoting = True
        self._read.clear()
        self._read.append('"')

    def _quoted(self, text: str, at: int) -> int:
        """Behind the quote that ends the string, or the end of `text`."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            at = _end_of(_QUOTED, text, at)
            if at < len(text):
                at += 1
                if text[at - 1] == '"':
                    self.is_quoting = False
                    break
                self._is_escaped = True
        return at

    def _decoded(self) -> str | None:
        """The string that was read; None where its escapes are wrong."""
        try:
            return str(_decode("".join(self._read)))
        except ValueError:
            return None

    _READ: ClassVar[Mapping[_At, Callable[[HermesCall, str, int], int]]] = {
        _At.OBJECT: _object,
        _At.KEY: _key_or_end,
        _At.IN_KEY: _in_key,
        _At.COLON: _colon,
        _At.VALUE: _value,
        _At.IN_STRING: _in_string,
        _At.IN_NESTED: _in_nested,
        _At.IN_SCALAR: _in_scalar,
        _At.COMMA: _comma,
    }


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where the match ends that begins at `at`; each pattern matches nothing as well."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()
