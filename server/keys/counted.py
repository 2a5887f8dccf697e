"""What a key has used of its day, and a conversation or a user of its budget: as it is kept beyond the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec


class Counted(msgspec.Struct, frozen=True):
    """`num_tokens` in all, as of `at_ns`, since `began_ns`; `name` is that of a conversation or a user."""

    kind: Literal["key", "session", "user"]
    owner: str
    name: str
    began_ns: int
    at_ns: int
    num_tokens: int


Keep = Callable[[Counted], None]


def keep_nothing(counted: Counted) -> None:
    """What is counted ends with the server."""
