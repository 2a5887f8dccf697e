"""What a caller hands over, checked by type: an error names the argument, and not what went wrong deep inside."""

from __future__ import annotations

from collections.abc import Collection
from types import UnionType
from typing import Any

from novainfer.fsm.messages.errors import InvalidParameter


def must_be(name: str, value: object, kind: type | UnionType, what: str) -> None:
    """Raise `InvalidParameter` when the argument `name` is no `kind`; `what` says it in words."""
    if not isinstance(value, kind):
        raise InvalidParameter(f"{name} must be {what}, not {_short(value)}", param=name)


def must_have(name: str, value: object, methods: Collection[str], what: str) -> None:
    """Raise `InvalidParameter` when the argument `name` lacks one of a protocol's methods."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if missing:
        raise InvalidParameter(f"{name} must be {what}, not {_short(value)}: it has no {missing[0]}", param=name)


def must_be_seconds(name: str, value: Any) -> None:
    """Raise `InvalidParameter` when the argument `name` is no number of seconds, from 0 on; infinity is one."""
    must_be(name, value, int | float, "a number of seconds")
    if not value >= 0:
        raise InvalidParameter(f"{name} must be at least 0 seconds, not {value}", param=name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
