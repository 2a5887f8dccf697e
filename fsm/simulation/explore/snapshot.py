"""A world as bytes: to go back to, and to recognise."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec

from novainfer.fsm.client.gate import GateState
from novainfer.fsm.client.stream import StreamState
from novainfer.fsm.core.state import attributes_of
from novainfer.fsm.device.compiling import CompilingState
from novainfer.fsm.device.flights import FlightsState
from novainfer.fsm.device.masks import DeliveryState
from novainfer.fsm.device.process import ProcessState
from novainfer.fsm.device.roster import RosterState
from novainfer.fsm.device.worker import WorkerState
from novainfer.fsm.engine import EngineState
from novainfer.fsm.kv.blocks import BlockPool
from novainfer.fsm.messages.events import Arrive
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.recording.pack import Kinds, Writer
from novainfer.fsm.schedule.ladder import Rung
from novainfer.fsm.schedule.planner import Limits
from novainfer.fsm.schedule.request import RequestState
from novainfer.fsm.schedule.scheduler import SchedulerState
from novainfer.fsm.schedule.session import SessionState
from novainfer.fsm.simulation.checks.checks import Checks
from novainfer.fsm.simulation.world.process import Processes
from novainfer.fsm.simulation.world.shape import Shape
from novainfer.fsm.simulation.world.world import Watcher, World
from novainfer.fsm.text import Vocabulary

# What no decision depends on: counters for people, caches of what follows from the rest, and constants. All else is
# part of the fingerprint, so a new attribute makes more states, and never a state overlooked.
SKIPPED: dict[str, frozenset[str]] = {
    "Arrive": frozenset(["num_tokens", "params", "prompt", "seed", "tenant"]),
    "BlockCache": frozenset(["_is_sharing", "_plan", "_size"]),
    "BlockPool": frozenset(["_demotions", "_released_at", "_releases", "block_size"]),
    "BlockTable": frozenset(["names"]),
    "Changes": frozenset(["_size", "_told"]),  # which follows from the index
    "Checks": frozenset(["_before", "_failed", "_gate_heard", "_leaving", "_oldest", "_rung", "_sampled"])
    | frozenset(["_to_be_told", "at_once", "mirror", "world"]),  # within one event, or told by the gate's state
    "Client": frozenset(["_expected", "_max_len", "arrive", "prompt"]),
    "HostPool": frozenset(["_used_at", "_uses"]),
    "Incident": frozenset(["action", "message"]),
    "Ladder": frozenset(["_quiet_s"]),
    "Reconfigurations": frozenset(["_shape", "num_done"]),
    "Order": frozenset(["_by_priority"]),
    "Planner": frozenset(["limits", "num_preemptions"]),
    "Restarts": frozenset(["_epoch", "_shape", "_spawned", "_state"]),
    "Processes": frozenset(["_spare_deaths", "world"]),
    "Process": frozenset(["pid"]),
    "Request": frozenset(["max_len", "num_prompt", "params", "pooling", "seed", "stop_ids", "tenant"]),
    "Roster": frozenset(["_warm_spare"]),
    "Scheduler": frozenset(["_eos_token_ids", "_failures", "_finished", "_generated", "_hit", "_ladder_quiet_s"])
    | frozenset(
        ["_limits", "_losses", "_max_len", "_prompt_tokens", "_queried", "_rollbacks", "_stall_keep_s", "_steps"]
    )
    | frozenset(["_copied", "_step_timeout_s", "_swapped_in", "_swapped_out", "_vocabulary"]),
    "ScriptedDevice": frozenset(["block_size"]),
    "Session": frozenset(["ttl_s"]),
    "Stream": frozenset(["_stall_high", "_stall_low", "name"]),
    "Submit": frozenset(["params", "seed", "tenant", "token_ids"]),
    "TextAssembler": frozenset(["_longest_stop", "_show_special", "_stops", "_vocabulary", "include_stop"]),
    "FailurePolicy": frozenset(["limits", "planner"]),
    "Worker": frozenset(["_policy"]),
    "_Room": frozenset(["_max_reqs", "_max_tokens"]),
}
_kinds = Kinds()
_encode = msgspec.msgpack.Encoder().encode
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


def _new_checks() -> Checks:
    return object.__new__(Checks)


def _new_processes() -> Processes:
    return object.__new__(Processes)


def _but_the_world(thing: Any) -> dict[str, Any]:
    return {name: value for name, value in thing.__dict__.items() if name != "world"}


_STATES = (
    CompilingState,
    DeliveryState,
    EngineState,
    FlightsState,
    GateState,
    ProcessState,
    RequestState,
    RosterState,
    Rung,
    SchedulerState,
    SessionState,
    StreamState,
    WorkerState,
)
_REDUCERS: dict[type, Any] = {
    **copyreg.dispatch_table,
    Checks: lambda checks: (_new_checks, (), _but_the_world(checks)),
    Processes: lambda processes: (_new_processes, (), _but_the_world(processes)),
    **dict.fromkeys((Arrive, Limits, SamplingParams, Shape, Vocabulary, *_STATES), _by_number),
    Watcher: lambda watcher: _by_number(watcher.for_copies),
}


class Saved:
    """A world, part by part; `key` is equal for worlds that will behave the same."""

    __slots__ = ("data", "key")

    def __init__(self, data: tuple[Any, ...], key: tuple[Any, ...]) -> None:
        self.data = data
        self.key = key


# A part that nobody looked at after `load` is not read, and not saved again: most moves concern two or three.
OBJECTS = (
    "gate",
    "engine",
    "scheduler",
    "worker",
    "device",
    "clients",
    "streams",
    "checks",
    "processes",
    "reconfigurations",
    "grammars",
)  # pickled, each by itself
MESSAGES = ("links", "jobs", "late", "encodings", "timers")  # nobody changes a message: all worlds may hold the same
VALUES = ("budget", "is_closed", "is_draining", "is_stopped", "modes", "num_blocks")
PARTS: tuple[tuple[str, ...], ...] = (*((name,) for name in OBJECTS), (*MESSAGES, "busy", *VALUES))
_part_of = {name: at for at, names in enumerate(PARTS) for name in names}
_known: tuple[dict[bytes, int], ...] = tuple({} for _ in OBJECTS)  # of each: its bytes, and the number of its content
_contents: tuple[dict[bytes, int], ...] = tuple({} for _ in OBJECTS)  # the same content may be written in several ways
_messages: dict[int, tuple[Any, bytes]] = {}  # by identity: the message, which stays alive, and its content


class _Copy(World):
    """A world whose parts are read when they are asked for."""

    def __init__(self, saved: Saved, shape: Shape, watcher: Watcher) -> None:
        self.saved = saved
        self.shape = shape
        self.watcher, self.taken = watcher, watcher.taken
        self.now_s = 0.0
        self.counts = Counter()
        self.entered_s = {}
        self._trace = self._driver = None
        _read_rest(self, saved.data[-1])

    def __getattr__(self, name: str) -> Any:
        part = _part_of.get(name)
        if part is None:
            raise AttributeError(name)
        found = self.__dict__[name] = pickle.loads(self.saved.data[part])
        if name == "checks" or (name == "processes" and found is not None):
            found.world = self
        return found


def has_changed(world: World, name: str) -> bool:
    """Whether the attribute may differ from when the world was loaded: somebody has asked for it."""
    return name in world.__dict__


def save(world: World) -> Saved:
    """The world as it is; messages, parameters and the count of rows are shared with all its copies."""
    before = world.saved if isinstance(world, _Copy) else None
    data: list[Any] = []
    key: list[Any] = []
    for part, name in enumerate(OBJECTS):
        if before is not None and name not in world.__dict__:
            data.append(before.data[part])
            key.append(before.key[part])
            continue
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, 5)
        pickler.dispatch_table = _REDUCERS
        pickler.dump(getattr(world, name))
        written = buffer.getvalue()
        known = _known[part]
        number = known.get(written)
        if number is None:
            content = _digest(getattr(world, name))
            number = known[written] = _contents[part].setdefault(content, len(_contents[part]))
        data.append(written)
        key.append(number)
    rest, rest_key = _write_rest(world)
    return Saved((*data, rest), (*key, rest_key))


def load(saved: Saved, like: World) -> World:
    """A world as it was; it has the size of `like`, and counts rows together with it."""
    return _Copy(saved, like.shape, like.watcher.for_copies)


def fingerprint(world: World) -> tuple[Any, ...]:
    """Equal for worlds that will behave the same; all that decides what can come is in it."""
    return save(world).key


def _write_rest(world: World) -> tuple[Any, Any]:
    """Messages on their way, and values; with the key to them."""
    links = [(link, tuple(world.links[link])) for link in world.busy]
    values = tuple(world.budget.items()), *(getattr(world, name) for name in VALUES[1:])
    jobs, late = tuple(world.jobs), tuple(world.late)
    encodings, timers = tuple(world.encodings.items()), tuple(world.timers.items())
    key = (
        tuple(sorted([(link, *map(_content, queue)) for link, queue in links])),
        tuple(map(_content, jobs)),
        tuple([(link, _content(event)) for link, event in late]),
        tuple(sorted([stream_id for stream_id, _ in encodings])),
        frozenset([timer for timer, _ in timers]),
        frozenset(values[0]),
        values[1:],
    )
    return (links, jobs, late, encodings, timers, values), key


def _read_rest(world: World, rest: Any) -> None:
    links, jobs, late, encodings, timers, values = rest
    world.links = {link: deque(queue) for link, queue in links}
    world.busy = [link for link, _ in links]
    world.jobs = deque(jobs)
    world.late = list(late)
    world.encodings = dict(encodings)
    world.timers = dict(timers)
    world.budget = dict(values[0])
    for name, value in zip(VALUES[1:], values[1:], strict=True):
        setattr(world, name, value)


def _content(message: Any) -> bytes:
    """What a message says; worked out once."""
    found = _messages.get(id(message))
    if found is None:
        found = _messages[id(message)] = message, _digest(message)
    return found[1]


def _digest(thing: Any) -> bytes:
    return blake2b(_encode(_Content(_kinds).plain(thing)), digest_size=16).digest()


class _Content(Writer):
    """What decides in a part of a world, written as a recording writes it."""

    def object(self, thing: Any) -> Any:
        """Its class, and its attributes but for those that nothing depends on."""
        kind = type(thing)
        if kind is bytearray:
            return thing
        names = _attributes.get(kind)
        if names is None:
            names = _attributes[kind] = _attributes_of(thing)
        found = [kind.__name__, *[self.plain(getattr(thing, name)) for name in names]]
        if kind is BlockPool:  # of the times of release only the order matters
            found.append(sorted(range(thing.num_blocks), key=thing._released_at.__getitem__))
        return found


_attributes: dict[type, tuple[str, ...]] = {}


def _attributes_of(thing: Any) -> tuple[str, ...]:
    return tuple(sorted(set(attributes_of(thing)) - SKIPPED.get(type(thing).__name__, frozenset())))
