"""What is left of requests that have ended: every container that a machine can reach is looked at, known or not.

Nothing here knows the machines: their attributes are walked. So a container that is added tomorrow is looked at too,
and one that may hold something for longer than a request lives has to be named here, with the reason.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from enum import Enum
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from novainfer.fsm.core.state import attributes_of
from novainfer.fsm.engine import EngineState
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepPlan
from novainfer.fsm.schedule.request import ENDED, Request
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.text import Vocabulary

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World

CONTAINERS = (dict, list, set, deque, OrderedDict, bytearray)
# What may hold something when everybody has left, by class and attribute.
KEPT = {
    "BlockPool": frozenset(["_cached", "_free", "_index", "_name", "_refs", "_released_at"]),  # its size, and prefixes
    "Changes": frozenset(["_told"]),  # prefixes
    "HostPool": frozenset(["_free"]),  # its size
    "Planner": frozenset(["free_slots"]),  # its size
    "Speculation": frozenset(["_accepted", "_stretches"]),  # counts; what steps took
    "StepCosts": frozenset(["_ms", "_tokens"]),  # as measured
    "Scheduler": frozenset(["_eos_token_ids", "_finished", "_rollbacks"]),  # a constant; counts by end and by cause
    "Ladder": frozenset(["_modes"]),  # those that the device has
    "Worker": frozenset(["_found", "_losses", "_fatal"]),  # the model; a restart budget of times; counts by mode
}
_OPAQUE = (StepPlan, Enum, SamplingParams, Vocabulary, FunctionType, MethodType, type)
_ATOMS = frozenset([int, str, bytes, bool, float, type(None)])
_names: dict[type, tuple[str, ...]] = {}


def attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of `thing`, by name, and what they are."""
    kind = type(thing)
    names = _names.get(kind)
    if names is None:
        names = _names[kind] = tuple(attributes_of(thing))
    for name in names:
        value = getattr(thing, name, None)
        if type(value) not in _ATOMS:
            yield name, value


def walk(root: Any) -> Iterator[tuple[Any, str, Any]]:
    """Everything that can be reached from `root`: the object, the name of its attribute, and what that is."""
    todo, seen = [root], {id(root)}
    while todo:
        owner = todo.pop()
        for name, value in attributes(owner):
            yield owner, name, value
            for part in _parts(value):
                if id(part) not in seen:
                    seen.add(id(part))
                    todo.append(part)


def _parts(value: Any) -> Iterator[Any]:
    """The objects in `value`, however deep in containers; what begins with a plain value holds nothing else."""
    if isinstance(value, dict | list | set | frozenset | deque):
        items: Any = value.values() if isinstance(value, dict) else value
        for item in items:
            if type(item) in _ATOMS:
                return
            yield from _parts(item)
    elif isinstance(value, tuple):
        for item in value:
            if type(item) not in _ATOMS:
                yield from _parts(item)
    elif not isinstance(value, (*_OPAQUE, bytearray)) and hasattr(type(value), "__module__"):
        yield value


def _kept(owner: Any) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for base in type(owner).__mro__:
        found |= KEPT.get(base.__name__, frozenset())
    return found


def check_known(world: World) -> None:
    """Nothing holds a request that has ended, while nobody is being computed."""
    for machine in world.machines.values() if not world.scheduler.flights else ():
        for owner, name, value in walk(machine):
            for part in _parts(value):
                if isinstance(part, Request) and part.state in ENDED:
                    raise Violation(f"request {part.request_id} has ended, and {type(owner).__name__}.{name} holds it")
    for machine in (world.gate, world.engine):
        for name, value in attributes(machine):
            for key in value if isinstance(value, dict) else ():
                client = world.clients.get(key)
                if client is not None and client.end is not None and key not in world.streams:
                    raise Violation(f"stream {key} has ended, and {type(machine).__name__}.{name} holds it")


def check_empty(world: World) -> None:
    """Everybody has left: nothing holds anything. An engine that was stopped need not tidy up its requests."""
    machines: list[Any] = [world.gate, world.engine]
    if world.engine.state is EngineState.IDLE:
        machines += [world.scheduler, world.worker]
    for machine in machines:
        for owner, name, value in walk(machine):
            if isinstance(value, CONTAINERS) and value and name not in _kept(owner):
                raise Violation(f"everybody has left, and {type(owner).__name__}.{name} holds {value}")
            if isinstance(value, Request):
                raise Violation(f"everybody has left, and {type(owner).__name__}.{name} is request {value.request_id}")
    planner, shape = world.scheduler.planner, world.shape
    pool, host = world.cache.pool, world.cache.host
    if pool.num_blocks and world.engine.state is EngineState.IDLE:
        for what, free, total in (
            ("block", [*pool._free, *pool._cached], world.num_blocks),
            ("block on the host", host._free, shape.num_host_blocks),
            ("slot", planner.free_slots, shape.max_num_seqs),
        ):
            if sorted(free) != list(range(total)):
                raise Violation(f"everybody has left, and not every {what} is free, once: {sorted(free)} of {total}")
        if world.scheduler.recovery.ladder.state == "FULL" and planner.max_running != shape.max_num_seqs:
            raise Violation(f"the engine is at its full size, and takes {planner.max_running} requests a step")
