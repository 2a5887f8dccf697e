"""Machines as data: everything a machine holds, as bytes that can be read back without running anything they say.

    pack(thing) ─▶ msgpack of numbers, strings and nested lists ─▶ unpack ─▶ an equal thing

Recordings are passed from hand to hand, so this is no pickle: a file names classes of this package and their fields,
both are looked up in a list made from the package itself. Records are made of their fields, other objects are filled
without their constructor being called, and no function can be named, nor an attribute that holds one. Two things that
were one object are one object again. What is packed is written in an order that depends on nothing but its content,
so that equal things give equal bytes.
"""

from __future__ import annotations

import codecs
import pkgutil
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from importlib import import_module
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import msgspec

from novainfer.fsm.core.state import NO_STATE, slots_of
from novainfer.fsm.messages.events import Output
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.outputs import Delta, TokenLogprob
from novainfer.fsm.messages.params import LOGPROBS_MAX
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.messages.tenant import Tenant

PACKAGE = __name__.rpartition(".")[0].rpartition(".")[0]
SIMULATOR = f"{PACKAGE}.simulation."
# Classes and attributes as older versions wrote them, and as they are called now.
RENAMED = {
    "kv:Prefix": "cache:Prefix",
    "trouble:Trouble": "recovery:FailurePolicy",
    "scheduler:Scheduler.trouble": "recovery",
    "speculation:Cost": "costs:StepCosts",
}
DEPTH_MAX = 200  # lists within lists; machines nest about ten deep
# What no machine decides by, or what cannot be data: left out, and this when it is read back.
LEFT_OUT: dict[str, Mapping[str, Callable[[], Any]]] = {
    "Machine": NO_STATE,
    "Request": {"draft_state": lambda: None},  # an index of its tokens, which is made again
}
# Log probabilities would be most of what a step brings, and machines only count them: their numbers are written.
COUNTED = "logprobs"
_ATOMS = frozenset([int, str, bytes, bool, float, type(None)])
_DECODER = codecs.getincrementaldecoder("utf-8")
NOTHING: dict[str, Callable[[], Any]] = {}
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)

# Tags of what is no atom: [tag, …].
_SEEN, _KNOWN, _ATOM_LIST, _LIST, _TUPLE, _DEQUE, _SET, _FROZEN_SET = range(8)
_DICT, _ORDERED, _COUNTER, _ENUM, _OBJECT, _TEXT, _BIG, _PLAIN_TUPLE, _PLAIN_SET = range(8, 17)


class PackError(Exception):
    """Something cannot be written as data, or what was read is no machine of this version."""


class Kinds:
    """The classes that something packed is made of, and their fields: written once for many packed things."""

    def __init__(self, names: Sequence[tuple[str, list[str]]] = ()) -> None:
        self.names: list[tuple[str, list[str]]] = list(names)
        found = _kinds_by_name()
        self._places = {(found[_current(name)], tuple(fields)): at for at, (name, fields) in enumerate(names)}

    def place(self, kind: type, fields: tuple[str, ...]) -> int:
        """The number of `kind` with these fields."""
        at = self._places.get((kind, fields))
        if at is None:
            at = self._places[kind, fields] = len(self.names)
            self.names.append((_name_of(kind), list(fields)))
        return at


def pack(thing: Any, kinds: Kinds, known: Mapping[str, Any] | None = None) -> bytes:
    """`thing` as bytes. What `known` holds is written by its name only. Raises `PackError`."""
    writer = Writer(kinds, known or {})
    try:
        return _encode(writer.plain(thing))
    except OverflowError:  # a number that no machine word holds, somewhere in a client's JSON
        return _encode(Writer(kinds, known or {}, has_big=True).plain(thing))


def unpack(data: bytes, kinds: list[tuple[str, list[str]]], known: Mapping[str, Any] | None = None) -> Any:
    """What was packed. Raises `PackError` when it names what this version does not have, or is damaged."""
    try:
        return _Reader(kinds, known or {}).thing(_decode(data))
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, RecursionError, msgspec.MsgspecError) as error:
        raise PackError(f"it holds something that is no machine of this version: {error}") from None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Writer:
    """One way through all that a thing holds, each object once; `object` says what becomes of one."""

    def __init__(self, kinds: Kinds, known: Mapping[str, Any] = NOTHING, *, has_big: bool = False) -> None:
        self._kinds = kinds
        self._known = {id(thing): name for name, thing in known.items()}
        self._seen: dict[int | Mode | Tenant | tuple[Mode, ...], int] = {}
        self._has_big = has_big

    def plain(self, thing: Any) -> Any:
        """`thing` as numbers, strings and nested lists."""
        kind: Any = type(thing)
        if kind in _ATOMS:
            if self._has_big and kind is int and not -(2**63) <= thing < 2**64:
                return [_BIG, str(thing)]
            return thing
        if (name := self._known.get(id(thing))) is not None:
            return [_KNOWN, name]
        if isinstance(thing, Enum):
            return [_ENUM, self._kinds.place(kind, ()), thing.name]
        # A mode is a value, and so is a list of them, and a tenant: whether two are one object says nothing.
        is_value = kind is Mode or kind is Tenant or (kind is tuple and set(map(type, thing)) == {Mode})
        key = thing if is_value else id(thing)
        at = self._seen.get(key)
        if at is not None:
            return [_SEEN, at]
        if (kind is tuple or kind is frozenset) and set(map(type, thing)) <= _ATOMS:
            # Python keeps some of these once, such as (), so that whether two are one object says nothing.
            items = self._list(thing if kind is tuple else _sorted(thing))
            return [_PLAIN_TUPLE if kind is tuple else _PLAIN_SET, items]
        self._seen[key] = len(self._seen)
        if kind is list:
            return self._list(thing)
        if kind is tuple:
            return [_TUPLE, self._list(thing)]
        if kind is deque:
            return [_DEQUE, self._list(thing), thing.maxlen]
        if kind is set or kind is frozenset:
            return [_SET if kind is set else _FROZEN_SET, self._list(_sorted(thing))]
        if kind in _DICTS:
            return [_DICTS[kind], self._list(thing), self._list(thing.values())]
        if kind is _DECODER:
            return [_TEXT, *thing.getstate()]
        return self.object(thing)

    def _list(self, things: Any) -> list[Any]:
        if not self._has_big and set(map(type, things)) <= _ATOMS:
            return [_ATOM_LIST, list(things)]
        return [_LIST, [self.plain(x) for x in things]]

    def object(self, thing: Any) -> Any:
        """What can be made again: its class by name, and its attributes."""
        kind: Any = type(thing)
        if not _is_known(kind):
            raise PackError(f"{kind.__module__}.{kind.__qualname__} is nothing that a machine holds")
        fields = _fields_of(kind)
        if fields is None:
            own: dict[str, Any] = vars(thing)
            left_out = _left_out(kind)
            names = [n for n, x in own.items() if n not in left_out and not isinstance(x, _FUNCTIONS)]
            fields = (*_slots_of(kind), *sorted(names))
        if kind in _WITH_LOGPROBS:
            values = [_counts(thing.logprobs) if n == COUNTED else self.plain(getattr(thing, n)) for n in fields]
        else:
            values = [self.plain(getattr(thing, name)) for name in fields]
        return [_OBJECT, self._kinds.place(kind, fields), values]


class _Reader:
    def __init__(self, kinds: list[tuple[str, list[str]]], known: Mapping[str, Any]) -> None:
        found = _kinds_by_name()
        self._kinds: list[tuple[type, list[str]]] = []
        for name, fields in kinds:
            now = _current(name)
            if now not in found:
                raise PackError(f"this version has no {name.rpartition(':')[2]}")
            self._kinds.append((found[now], _allowed(found[now], [RENAMED.get(f"{now}.{x}", x) for x in fields])))
        self._known = known
        self._seen: list[Any] = []
        self._depth = 0

    def thing(self, plain: Any) -> Any:
        if type(plain) is not list:
            return plain
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise PackError("it is nested too deep")
        found = _READERS[plain[0]](self, *plain[1:])
        self._depth -= 1
        return found

    def _items(self, plain: list[Any]) -> list[Any]:
        tag, items = plain
        if tag not in (_ATOM_LIST, _LIST) or type(items) is not list:
            raise PackError("a list is damaged")
        return items if tag == _ATOM_LIST else [self.thing(x) for x in items]

    def _remember(self, make: Callable[[], Any]) -> Any:
        at = len(self._seen)
        self._seen.append(None)
        found = self._seen[at] = make()
        return found

    def read_seen(self, at: int) -> Any:
        found = self._seen[at]
        if found is None:
            raise PackError("something holds itself")
        return found

    def read_known(self, name: str) -> Any:
        return self._known[name]

    def read_atom_list(self, items: list[Any]) -> Any:
        self._seen.append(items)
        return items

    def read_list(self, items: list[Any]) -> Any:
        found: list[Any] = []
        self._seen.append(found)
        found += [self.thing(x) for x in items]
        return found

    def read_tuple(self, items: list[Any]) -> Any:
        return self._remember(lambda: tuple(self._items(items)))

    def read_plain_tuple(self, items: list[Any]) -> Any:
        return tuple(self._items(items))

    def read_deque(self, items: list[Any], maxlen: int | None) -> Any:
        found: deque[Any] = deque(maxlen=maxlen)
        self._seen.append(found)
        found.extend(self._items(items))
        return found

    def read_set(self, items: list[Any]) -> Any:
        return self._remember(lambda: set(self._items(items)))

    def read_frozen_set(self, items: list[Any]) -> Any:
        return self._remember(lambda: frozenset(self._items(items)))

    def read_plain_set(self, items: list[Any]) -> Any:
        return frozenset(self._items(items))

    def read_dict(self, keys: list[Any], values: list[Any], found: Any = None) -> Any:
        found = {} if found is None else found
        self._seen.append(found)
        for key, value in zip(self._items(keys), self._items(values), strict=True):
            found[key] = value
        return found

    def read_ordered(self, keys: list[Any], values: list[Any]) -> Any:
        return self.read_dict(keys, values, OrderedDict())

    def read_counter(self, keys: list[Any], values: list[Any]) -> Any:
        return self.read_dict(keys, values, Counter())

    def read_enum(self, at: int, name: str) -> Any:
        kind = self._kinds[at][0]
        if not issubclass(kind, Enum):
            raise PackError(f"{kind.__name__} has no members")
        return kind[name]

    def read_text(self, held: bytes, flags: int) -> Any:
        def make() -> Any:
            decoder = _DECODER("replace")
            decoder.setstate((held, flags))
            return decoder

        return self._remember(make)

    def read_big(self, digits: str) -> int:
        return int(digits[:400])

    def read_object(self, at: int, values: list[Any]) -> Any:
        kind: Any
        kind, fields = self._kinds[at]
        if issubclass(kind, Enum):
            raise PackError(f"a {kind.__name__} has no fields")
        if issubclass(kind, msgspec.Struct):
            place = len(self._seen)
            self._seen.append(None)
            counted = COUNTED if kind in _WITH_LOGPROBS else ""
            items = zip(fields, values, strict=True)
            made = kind(**{n: _uncounted(kind, x) if n == counted else self.thing(x) for n, x in items})
            self._seen[place] = made
            return made
        found: Any = object.__new__(kind)
        self._seen.append(found)
        for name, value in zip(fields, values, strict=True):
            setattr(found, name, self.thing(value))
        for name, make in _left_out(kind).items():
            setattr(found, name, make())
        return found


def counts_of(logprobs: Sequence[Any]) -> list[int]:
    """How many log probabilities each token brought; -1 for a token whose request had not asked."""
    return [-1 if found is None else len(found.top if type(found) is TokenLogprob else found[1]) for found in logprobs]


def step_logprobs(counts: Sequence[int]) -> list[tuple[float, list[int], list[float]] | None]:
    """As many log probabilities as a step brought, for a replay that has only their numbers."""
    return [None if n < 0 else (0.0, [0] * min(n, LOGPROBS_MAX), [0.0] * min(n, LOGPROBS_MAX)) for n in counts]


def _counts(logprobs: Sequence[Any] | None) -> list[int] | None:
    return None if logprobs is None else counts_of(logprobs)


def _uncounted(kind: Any, counts: Any) -> Any:
    """What stands for log probabilities that were only counted."""
    if counts is None:
        return None
    if kind is StepDone:
        return step_logprobs(counts)
    return [TokenLogprob(0, b"", 0.0, [(0, b"", 0.0)] * min(n, LOGPROBS_MAX)) for n in counts]


_WITH_LOGPROBS = frozenset([Delta, Output, StepDone])
_DICTS: dict[type, int] = {dict: _DICT, OrderedDict: _ORDERED, Counter: _COUNTER}
_READERS: dict[int, Callable[..., Any]] = {
    _SEEN: _Reader.read_seen,
    _KNOWN: _Reader.read_known,
    _ATOM_LIST: _Reader.read_atom_list,
    _LIST: _Reader.read_list,
    _TUPLE: _Reader.read_tuple,
    _DEQUE: _Reader.read_deque,
    _SET: _Reader.read_set,
    _FROZEN_SET: _Reader.read_frozen_set,
    _DICT: _Reader.read_dict,
    _ORDERED: _Reader.read_ordered,
    _COUNTER: _Reader.read_counter,
    _ENUM: _Reader.read_enum,
    _OBJECT: _Reader.read_object,
    _TEXT: _Reader.read_text,
    _BIG: _Reader.read_big,
    _PLAIN_TUPLE: _Reader.read_plain_tuple,
    _PLAIN_SET: _Reader.read_plain_set,
}


def _sorted(things: Any) -> list[Any]:
    try:
        return sorted(things)
    except TypeError:
        return sorted(things, key=repr)


@cache
def _kinds_by_name() -> dict[str, Any]:
    """Every class that a file may name: those of the machines' package that hold data, the simulator's left out."""
    package = import_module(PACKAGE)
    found: dict[str, type] = {}
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        if module.ispkg or module.name.startswith(SIMULATOR):
            continue
        for thing in vars(import_module(module.name)).values():
            if isinstance(thing, type) and thing.__module__ == module.name and not issubclass(thing, BaseException):
                name = _name_of(thing)
                assert found.get(name, thing) is thing, f"two classes are written as {name}"
                found[name] = thing
    return found


def _name_of(kind: type) -> str:
    """How a file names the class: by file and name, whatever folder it lies in."""
    return _current(f"{kind.__module__}:{kind.__qualname__}")


def _current(name: str) -> str:
    """What a class is called that a file names; older versions wrote the folder too."""
    name = name.rpartition(".")[2] if "." in name.partition(":")[0] else name
    return RENAMED.get(name, name)


@cache
def _is_known(kind: Any) -> bool:
    return _kinds_by_name().get(_name_of(kind)) is kind


@cache
def _left_out(kind: Any) -> Mapping[str, Callable[[], Any]]:
    return {name: make for base in kind.__mro__ for name, make in LEFT_OUT.get(base.__name__, NOTHING).items()}


@cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in slots_of(kind) if name not in _left_out(kind))


@cache
def _fields_of(kind: Any) -> tuple[str, ...] | None:
    """The fields of `kind`, if all its instances have the same."""
    if issubclass(kind, msgspec.Struct):
        return tuple(name for name in kind.__struct_fields__ if name not in _left_out(kind))
    has_dict = any("__dict__" in vars(base) for base in kind.__mro__)
    return None if has_dict else _slots_of(kind)


def _allowed(kind: Any, fields: list[str]) -> list[str]:
    """`fields`, if `kind` may have them: a method or a property cannot be replaced by data."""
    known = _fields_of(kind)
    for name in fields:
        is_known = name in known if known is not None else not hasattr(kind, name) or name in _slots_of(kind)
        if not is_known or name.startswith("__"):
            raise PackError(f"this version's {kind.__name__} has no {name!r}")
    return fields
