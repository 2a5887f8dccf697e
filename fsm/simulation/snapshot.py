"""A world as bytes: to go back to (`save`, `load`), and to recognise (`fingerprint`)."""

from __future__ import annotations

import copyreg
import io
import marshal
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from hashlib import blake2b
from typing import Any

import msgspec

from novainfer.fsm.blocks import BlockPool
from novainfer.fsm.engine import EngineState
from novainfer.fsm.events import Arrive
from novainfer.fsm.gate import GateState
from novainfer.fsm.ladder import Rung
from novainfer.fsm.params import SamplingParams
from novainfer.fsm.planner import Limits
from novainfer.fsm.request import Request, RequestState
from novainfer.fsm.scheduler import Scheduler, SchedulerState
from novainfer.fsm.simulation.shape import Shape
from novainfer.fsm.simulation.world import Rows, World
from novainfer.fsm.stream import StreamState
from novainfer.fsm.text import Vocabulary
from novainfer.fsm.worker import WorkerState

# What no decision depends on: counters for people, caches of what follows from the rest, and constants. All else is
# part of the fingerprint, so a new attribute makes more states, and never a state overlooked.
SKIPPED: dict[str, frozenset[str]] = {
    "Arrive": frozenset(["num_tokens", "params", "prompt", "seed"]),
    "BlockPool": frozenset(["_released_at", "_releases", "block_size", "num_blocks"]),
    "Checks": frozenset(
        ["_gate_heard", "_leaving", "_oldest", "_sampled", "_to_be_told", "at_once", "world"]
    ),  # within one event, or told by the gate's state
    "Client": frozenset(["_expected", "_max_len", "arrive", "prompt"]),
    "Engine": frozenset(["_effects"]),
    "Flight": frozenset(["before"]),
    "Gate": frozenset(["_effects"]),
    "Incident": frozenset(["action", "message"]),
    "_WatchedLadder": frozenset(["_effects", "_quiet_s", "_taken"]),
    "Planner": frozenset(["limits", "num_preemptions", "num_swapped_in", "num_swapped_out", "probe"]),
    "SamplingSpec": frozenset(["num_prompt_tokens", "params", "stop_ids"]),
    "ScriptedDevice": frozenset(["block_size"]),
    "Stream": frozenset(["_effects", "_stall_high", "_stall_low", "name"]),
    "Submit": frozenset(["params", "seed", "token_ids"]),
    "TextAssembler": frozenset(["_longest_stop", "_plain", "_show_special", "_stops", "_vocabulary", "include_stop"]),
    "Trouble": frozenset(["limits", "planner"]),
    "Worker": frozenset(["_effects", "_found", "_policy"]),
    "World": frozenset(["_driver", "_trace", "busy", "counts", "machines", "now_s", "shape", "taken"]),
    "_Room": frozenset(["_max_reqs", "_max_tokens"]),
    "_WatchedRequest": frozenset(
        ["_effects", "_taken", "max_len", "names", "num_prompt", "params", "seed", "stop_ids"]
    ),
    "_WatchedScheduler": frozenset(
        ["_effects", "_eos_token_ids", "_failures", "_finished", "_generated", "_hit", "_limits"]
    )
    | frozenset(["_ladder_quiet_s", "_losses", "_max_len", "_prompt_tokens", "_queried", "_stall_keep_s", "_steps"])
    | frozenset(["_taken", "_vocabulary", "request_type"]),
}
# Dictionaries whose order says who comes first; of all others only the content counts.
ORDERED = frozenset(["_cached", "_overflow", "_pending", "parked", "running"])

_constants: list[Any] = []  # objects that never change, by their number in snapshots
_numbers: dict[int, int] = {}


def _constant(at: int) -> Any:
    return _constants[at]


def _by_number(constant: Any) -> tuple[Callable[[int], Any], tuple[int]]:
    at = _numbers.get(id(constant))
    if at is None:
        at = _numbers[id(constant)] = len(_constants)
        _constants.append(constant)
    return _constant, (at,)


_STATES = (EngineState, GateState, RequestState, Rung, SchedulerState, StreamState, WorkerState)
_REDUCERS: dict[type, Any] = {
    **copyreg.dispatch_table,
    **dict.fromkeys((Arrive, Limits, Rows, SamplingParams, Shape, Vocabulary, *_STATES), _by_number),
}


def save(world: World) -> bytes:
    """The world as it is; parameters, the vocabulary and the count of rows are shared with all its copies."""
    for link in [link for link, queue in world.links.items() if not queue]:
        del world.links[link]
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(world)
    return buffer.getvalue()


def load(data: bytes) -> World:
    """A world as it was."""
    world: World = pickle.loads(data)
    return world


def fingerprint(world: World) -> bytes:
    """Equal for worlds that will behave the same; all that decides what can come is in it."""
    return blake2b(marshal.dumps(plain(world), 2), digest_size=16).digest()


def plain(thing: Any) -> Any:
    """`thing` as nested tuples of numbers, strings and bytes."""
    kind = type(thing)
    if kind in _ATOMS:
        return thing
    if kind is list or kind is tuple or kind is deque:
        return tuple([x if type(x) in _ATOMS else plain(x) for x in thing])
    if kind is OrderedDict:
        return tuple(thing)
    if issubclass(kind, dict):
        return tuple(sorted([(plain(k), plain(v)) for k, v in thing.items()]))
    if issubclass(kind, Enum):
        return thing.value
    if issubclass(kind, set | frozenset):
        return tuple(sorted(map(plain, thing)))
    if issubclass(kind, Request):
        return thing.request_id  # it is written once, by the scheduler
    return _object(thing)


def _object(thing: Any) -> tuple[Any, ...]:
    kind = type(thing)
    names = _attributes.get(kind)
    if names is None:
        names = _attributes[kind] = _attributes_of(thing)
    found: list[Any] = [kind.__name__]
    for name in names:
        value = getattr(thing, name)
        if name == "links":
            found.append(tuple(sorted((link, plain(queue)) for link, queue in value.items() if queue)))
        elif name in ORDERED:
            found.append(tuple(value))
            found.append(plain(value))
        else:
            found.append(value if type(value) in _ATOMS else plain(value))
    if kind is BlockPool:  # of the times of release only the order matters
        found.append(tuple(sorted(range(thing.num_blocks), key=thing._released_at.__getitem__)))
    elif isinstance(thing, Scheduler):
        flight = thing.flight
        known = [*thing.requests.values(), *(flight.departed if flight else ())]
        found.append(tuple(_object(request) for request in known))
    return tuple(found)


_ATOMS = frozenset([int, str, bytes, bool, float, type(None)])
_attributes: dict[type, tuple[str, ...]] = {}


def _attributes_of(thing: Any) -> tuple[str, ...]:
    kind = type(thing)
    names: set[str] = set()
    if isinstance(thing, msgspec.Struct):
        names.update(thing.__struct_fields__)
    else:
        names.update(getattr(thing, "__dict__", ()))
        for base in kind.__mro__:
            names.update(getattr(base, "__slots__", ()))
    return tuple(sorted(names - SKIPPED.get(kind.__name__, frozenset())))
