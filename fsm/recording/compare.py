"""Where two things that should be equal first differ, in words for people."""

from __future__ import annotations

from collections import deque
from typing import Any

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
        names = getattr(was, "__struct_fields__", None) or [
            *(name for base in type(was).__mro__ for name in getattr(base, "__slots__", ())),
            *getattr(was, "__dict__", ()),
        ]
        if not names or depth > DEPTH_MAX:
            return "" if now == was else f"{path} was {short(was)}, and is {short(now)}"
        pairs = [
            (f"{path}.{name}", getattr(now, name, None), getattr(was, name, None))
            for name in names
            if name not in ("_effects", "num_renewals", "observer")
        ]
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
