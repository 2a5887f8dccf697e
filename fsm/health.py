"""Whether everything moves: how long each state may last, and a watch that tells who has outstayed it.

Health is progress, not a flag. Every state of every machine has a deadline here, or a reason why it has none; and every
actor that is asked for a turn must take it within `TURN_LIMIT_S`, whatever its state. The watch is looked at every
`PERIOD_S` and is told the time: a look that comes late (the loop was blocked, the machine was suspended, a debugger
held it) counts for `LOOK_S_MAX` at most, so that nobody is blamed for time in which nobody could move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from novainfer.fsm.engine import EngineState
from novainfer.fsm.gate import GateState
from novainfer.fsm.ladder import Rung
from novainfer.fsm.process import ProcessState
from novainfer.fsm.request import RequestState
from novainfer.fsm.roster import RosterState
from novainfer.fsm.scheduler import SchedulerState
from novainfer.fsm.stream import StreamState
from novainfer.fsm.worker import WorkerState

PERIOD_S = 0.25  # between two looks: a quarter of the second in which a frozen actor must be reported
LOOK_S_MAX = 2 * PERIOD_S
TURN_LIMIT_S = 2.0  # from asking for a turn to the turn; the longest ones (planning for 1000 requests) take 0.05 s
ANSWER_LIMIT_S = 5.0  # for a message between two actors of one loop, and the turns that it causes
RECLAIM_LIMIT_S = 30.0  # collecting garbage, and giving cached memory back to the driver
SWITCH_LIMIT_S = 300.0  # packing the weights of a large model anew
MEMORY_LIMIT_S = 600.0  # allocating a KV cache; compiling and running every kernel once, on a machine that swaps
LOAD_STALL_LIMIT_S = (
    120.0  # without another tensor read: the largest one is 2.5 GB, and a slow disk gives 20 MB a second
)
# Importing torch from a cold disk holds the interpreter, and with it the beat, for many seconds.
LOAD_SILENCE_S = 60.0
DYING_LIMIT_S = 10.0  # for a process that was killed: it takes the system 0.5 s to take back 1 GiB
# For which a server that replaces its worker is ready all the same: every other one behind its balancer would get its
# load. Within them a worker of a small model is back; a longer outage is for the balancer to know.
RECOVERY_READY_S = 10.0
BACKOFF_LIMIT_S = 60.0  # longer than any pause between two restarts
ENCODE_LIMIT_S = 60.0  # one batch at the tokenizer: 64 prompts of the largest body took 9 s


class TokenizerState(StrEnum):
    """What the tokenizer's thread does; it is no machine, but it may be stuck like one."""

    LOADING = "LOADING"
    IDLE = "IDLE"
    ENCODING = "ENCODING"


class Dwell(msgspec.Struct, frozen=True):
    """How long a state may last, and why: `limit_s` seconds, those of a step beside if `and_step`; None: any time.

    `by_signs`: from one sign that it gets on to the next; an actor that gives no such signs has any time.
    """

    limit_s: float | None
    why: str
    and_step: bool = False
    by_signs: bool = False

    def seconds(self, step_timeout_s: float) -> float | None:
        """The limit in seconds."""
        if self.limit_s is None:
            return None
        return self.limit_s + (step_timeout_s if self.and_step else 0.0)


def _any(why: str) -> Dwell:
    return Dwell(None, why)


ENDED = _any("it has ended")
E, W, P, R = EngineState, WorkerState, ProcessState, RequestState

DWELLS: Mapping[type[StrEnum], Mapping[StrEnum, Dwell]] = {
    GateState: {
        GateState.STARTING: _any("as long as the worker comes up, which has deadlines of its own"),
        GateState.OPEN: _any("it waits for clients"),
        GateState.DRAINING: _any("the requests here have as long as whoever drains gives them"),
        GateState.CLOSED: ENDED,
    },
    EngineState: {
        E.STARTING: _any("as long as the worker comes up, which has deadlines of its own"),
        E.IDLE: _any("it waits for clients"),
        E.SCHEDULING: Dwell(ANSWER_LIMIT_S, "the scheduler answers within a turn"),
        E.WAITING_WORKER: Dwell(
            SWITCH_LIMIT_S + RECLAIM_LIMIT_S + ANSWER_LIMIT_S, "a switch, a step and a reclaim at the worker", True
        ),
        E.ROLLBACK: Dwell(ANSWER_LIMIT_S, "the scheduler answers within a turn"),
        E.RECOVERING: _any("as long as the worker comes up again, which has deadlines of its own"),
        E.STOPPED: ENDED,
    },
    SchedulerState: {
        SchedulerState.STARTING: _any("as long as the worker comes up, which has deadlines of its own"),
        SchedulerState.EMPTY: _any("nothing is to be run"),
        SchedulerState.FULL: _any("steps follow each other; the engine's states say how long each may take"),
        SchedulerState.RECOVERING: _any("as long as the worker comes up again, which has deadlines of its own"),
    },
    WorkerState: {
        W.LOADING: Dwell(LOAD_STALL_LIMIT_S, "a large model may be read for hours, but it is read on", by_signs=True),
        W.FITTING: Dwell(MEMORY_LIMIT_S, "allocating the KV cache"),
        W.WARMING: Dwell(MEMORY_LIMIT_S, "compiling and running the kernels once"),
        W.READY: _any("it waits for a step"),
        W.RUNNING: Dwell(0.0, "the step's own deadline", True),
        W.SWITCHING: Dwell(SWITCH_LIMIT_S, "packing the weights anew"),
        W.OOM: Dwell(RECLAIM_LIMIT_S, "giving back what the step left behind"),
        W.RESTARTING: Dwell(BACKOFF_LIMIT_S, "a pause before the next try"),
        W.FAILED: ENDED,
        W.STOPPED: ENDED,
    },
    RosterState: {
        **dict.fromkeys(RosterState, _any("its processes and the worker have deadlines of their own")),
        **dict.fromkeys((RosterState.PROBING, RosterState.HOLDING), _any("a timer of its own ends it")),
    },
    ProcessState: {
        P.STARTING: _any("it starts within a turn"),
        P.IDLE: _any("it waits for a job"),
        P.AHEAD: Dwell(MEMORY_LIMIT_S, "a spare that gets on, however slowly", by_signs=True),
        P.BUSY: _any("the worker's state has a deadline for its job"),
        P.READY: _any("it waits for a step"),
        P.RUNNING: _any("the worker's state has a deadline for its job"),
        P.CLOSING: _any("a timer of its own ends it"),
        P.DYING: Dwell(DYING_LIMIT_S, "the system takes back what it held"),
        P.GONE: ENDED,
    },
    RequestState: {
        R.WAITING: _any("its turn depends on the others; its own timeout ends it"),
        R.PREFILL: _any("a prompt may take many steps, and each step has a deadline"),
        R.DECODE: _any("an answer may be long, and each step has a deadline"),
        R.PAUSED: _any("its reader's time, which the stall timeout ends"),
        R.PREEMPTED: _any("its turn depends on the others; its own timeout ends it"),
        R.WAITING_FOR_REMOTE_KVS: _any("its blocks come back with a step, and each step has a deadline"),
        R.RECOVERING: _any("as long as the worker comes up again, which has deadlines of its own"),
        **{state: ENDED for state in RequestState if state.startswith("FINISHED")},
    },
    Rung: dict.fromkeys(Rung, _any("it climbs back when it has been quiet for a while")),
    StreamState: {
        StreamState.OPEN: _any("an answer may be long, and each step has a deadline"),
        StreamState.STALLED: _any("its reader's time, which the stall timeout ends"),
        StreamState.CLOSED: ENDED,
    },
    TokenizerState: {
        TokenizerState.LOADING: _any("it may be fetched"),
        TokenizerState.IDLE: _any("it waits for prompts"),
        TokenizerState.ENCODING: Dwell(ENCODE_LIMIT_S, "one batch of prompts"),
    },
}


def dwell_limit_s(state: StrEnum, step_timeout_s: float) -> float | None:
    """How long `state` may last, in seconds; None: any time."""
    return DWELLS[type(state)][state].seconds(step_timeout_s)


class Sighting(msgspec.Struct, frozen=True):
    """One actor at a look: its state, since when (on the watch's clock), and how many turns it has taken.

    `num_turns` is None for what takes none. `silent_s` is how long ago it gave a sign of life, where it gives any, and
    `silence_limit_s` how long ago that may be. `num_signs` grows with each sign that it gets on in its state, where it
    gives any.
    """

    actor: str
    state: StrEnum
    since_s: float
    num_turns: int | None = None
    silent_s: float | None = None
    silence_limit_s: float = 0.0
    num_signs: int | None = None


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """An actor beyond a deadline: `what` is "dwell" (its state), "turn" (it takes none) or "silence"."""

    actor: str
    what: str
    state: str
    for_s: float
    limit_s: float

    def sentence(self) -> str:
        """What is wrong, for people."""
        if self.what == "turn":
            return f"the {self.actor} has taken no turn for {self.for_s:.1f} s (at most {self.limit_s:g} s)"
        if self.what == "silence":
            return f"the {self.actor} has given no sign of life for {self.for_s:.1f} s (at most {self.limit_s:g} s)"
        return f"the {self.actor} has been {self.state} for {self.for_s:.1f} s (at most {self.limit_s:g} s)"


class Silence:
    """How long one process has said nothing while it was listened to, beyond what loading excuses; times in seconds."""

    def __init__(self, now_s: float) -> None:
        self._silent_s = 0.0
        self._looked_s = now_s

    def look(self, heard_s: float, now_s: float, *, is_warm: bool) -> float:
        """Its silence at `now_s`, when it said something last at `heard_s`."""
        # The loop itself may be stopped for a while (Ctrl-Z, a suspended machine): one look counts for so much only.
        if heard_s > self._looked_s:
            self._silent_s = min(now_s - heard_s, LOOK_S_MAX)
        else:
            self._silent_s += min(now_s - self._looked_s, LOOK_S_MAX)
        self._looked_s = now_s
        return self._silent_s if is_warm else max(0.0, self._silent_s - LOAD_SILENCE_S)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a look has found; `lag_s` is how much later than planned it came. `late` is empty when all is well."""

    late: tuple[Late, ...] = ()
    lag_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True when everybody moves."""
        return not self.late


class _Entry:
    """What the watch remembers of one actor; times are watched seconds, which do not count what nobody saw."""

    __slots__ = ("dwell_s", "num_signs", "num_turns", "seen_in", "silent_s", "silent_seen_s", "since_s", "wait_s")

    def __init__(self, seen: Sighting) -> None:
        self.seen_in = seen.state
        self.since_s = seen.since_s
        self.num_turns = seen.num_turns
        self.num_signs = seen.num_signs
        self.dwell_s = self.wait_s = self.silent_s = 0.0
        self.silent_seen_s = seen.silent_s


class Watch:
    """Looks at actors again and again; see the module."""

    def __init__(self, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._last_s: float | None = None
        self._entries: dict[str, _Entry] = {}

    def look(self, now_s: float, sightings: Iterable[Sighting]) -> Verdict:
        """Who is late at `now_s`. Each actor with turns is to be asked for one after every look."""
        elapsed_s = 0.0 if self._last_s is None else max(now_s - self._last_s, 0.0)
        self._last_s = now_s
        watched_s = min(elapsed_s, LOOK_S_MAX)
        before, self._entries = self._entries, {}
        late: list[Late] = []
        for seen in sightings:
            entry = self._entries[seen.actor] = before.get(seen.actor) or _Entry(seen)
            self._update(entry, seen, elapsed_s, watched_s)
            late.extend(self._judge(entry, seen))
        return Verdict(late=tuple(late), lag_s=max(elapsed_s - PERIOD_S, 0.0))

    def wait_s(self, actor: str) -> float:
        """How long `actor` has been waiting for its turn, in watched seconds."""
        entry = self._entries.get(actor)
        return entry.wait_s if entry is not None else 0.0

    def dwell_s(self, actor: str) -> float:
        """How long `actor` has been in its state, in watched seconds."""
        entry = self._entries.get(actor)
        return entry.dwell_s if entry is not None else 0.0

    def _update(self, entry: _Entry, seen: Sighting, elapsed_s: float, watched_s: float) -> None:
        is_same = entry.seen_in is seen.state and entry.since_s == seen.since_s and entry.num_signs == seen.num_signs
        entry.dwell_s = entry.dwell_s + watched_s if is_same else 0.0
        entry.seen_in, entry.since_s, entry.num_signs = seen.state, seen.since_s, seen.num_signs
        entry.wait_s = entry.wait_s + watched_s if entry.num_turns == seen.num_turns else 0.0
        entry.num_turns = seen.num_turns
        if seen.silent_s is None or entry.silent_seen_s is None:
            entry.silent_s = 0.0
        elif seen.silent_s < entry.silent_seen_s + elapsed_s / 2:  # there was a sign since the last look
            entry.silent_s = min(seen.silent_s, watched_s)
        else:
            entry.silent_s += watched_s
        entry.silent_seen_s = seen.silent_s

    def _judge(self, entry: _Entry, seen: Sighting) -> Iterable[Late]:
        name, state = seen.actor, str(seen.state)
        dwell = DWELLS[type(seen.state)][seen.state]
        limit_s = dwell.seconds(self._step_timeout_s)
        if dwell.by_signs and seen.num_signs is None:
            limit_s = None
        if limit_s is not None and entry.dwell_s > limit_s:
            yield Late(actor=name, what="dwell", state=state, for_s=entry.dwell_s, limit_s=limit_s)
        if seen.num_turns is not None and entry.wait_s > TURN_LIMIT_S:
            yield Late(actor=name, what="turn", state=state, for_s=entry.wait_s, limit_s=TURN_LIMIT_S)
        if seen.silent_s is not None and entry.silent_s > seen.silence_limit_s:
            yield Late(actor=name, what="silence", state=state, for_s=entry.silent_s, limit_s=seen.silence_limit_s)
