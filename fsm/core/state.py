"""What the state of an object is, for all who walk machines: recordings, replays, the explorer, checks of leftovers.

Each of them leaves out more, for reasons of its own; which attributes there are, and which are no state of any machine,
is said here once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from novainfer.fsm.core.machine import Machine

# What a machine has just said, and what is for onlookers; each with what it is in a machine that was read back.
NO_STATE: Mapping[str, Callable[[], Any]] = {"_effects": list, "num_renewals": int, "observer": lambda: None}


def attributes_of(thing: Any) -> list[str]:
    """The names of what `thing` holds: a Struct's fields; else slots of all its classes, and what else it has now."""
    fields = getattr(thing, "__struct_fields__", None)
    if fields is not None:
        return list(fields)
    kind: Any = type(thing)
    names = dict.fromkeys((*slots_of(kind), *getattr(thing, "__dict__", ())))
    return [name for name in names if name not in NO_STATE] if issubclass(kind, Machine) else list(names)


@cache
def slots_of(kind: Any) -> tuple[str, ...]:
    """The slots of `kind` and of all it inherits from, in one order."""
    return tuple(sorted({name for base in kind.__mro__ for name in getattr(base, "__slots__", ())}))
