"""Where two things that should be equal first differ, in words for people."""

from __future__ import annotations

from collections import deque
from typing import Any

from novainfer.fsm.core.state import attributes_of

DEPTH_MAX = 30
CHARS_MAX = 200


def first_difference(now: Any, was: Any, path: str = "", depth: int = 0) -> str:
    """Where `now` and `was` first differ, and how; in words."""
    if now is was:
        return ""
    if type(now) is not type(was):
        return f"{path or 'it'} was {short(was)}, and is {short(now)}"
    if isinstance(was, dict):
        if list(now) != list(was):
            return f"{path} had the keys {short(list(was))}, and has {short(list(now))}"
        pairs = [(f"{path}[{short(key)}]", now[key], was[key]) for key in was]
    elif isinstance(was, list | tuple | deque):
        if len(now) != len(was):
            return f"{path} held {short(was)}, and holds {short(now)}"
        pairs = [_item(path, at, a, b) for at, (a, b) in enumerate(zip(now, was, strict=True))]
    else:
        names = attributes_of(was)
        if not names or depth > DEPTH_MAX:
            kind: Any = type(was)
            is_equal = now == was or kind.__eq__ is object.__eq__  # it holds nothing that could differ
            return "" if is_equal else f"{path} was {short(was)}, and is {short(now)}"
        pairs = [(f"{path}.{name}", getattr(now, name, None), getattr(was, name, None)) for name in names]
    for where, a, b in pairs:
        if found := first_difference(a, b, where, depth + 1):
            return found
    return ""


def _item(path: str, at: int, now: Any, was: Any) -> tuple[str, Any, Any]:
    """What to call the item, and its two values; named things go by their names."""
    if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now) == 2 and now[0] == was[0]:
        return f"{path} {was[0]}".strip(), now[1], was[1]
    return f"{path}[{at}]", now, was


def short(thing: Any) -> str:
    """`thing` in no more than a line or two."""
    text = repr(thing)
    return text if len(text) < CHARS_MAX else f"{text[:CHARS_MAX]}…"
