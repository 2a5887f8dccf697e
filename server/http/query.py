"""What stands behind the `?` of a path."""

from __future__ import annotations

from novainfer import InvalidParameter


def whole_number(given: str, name: str, least: int, most: int) -> int:
    """`given` for the parameter `name`; raises `InvalidParameter` unless it is a whole number in these bounds."""
    if not (given.isascii() and given.isdigit() and least <= int(given[:18]) <= most):
        raise InvalidParameter(f"{name} must be a whole number from {least} to {most}, not {given[:40]!r}", param=name)
    return int(given)
