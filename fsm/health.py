"""Whether everything moves: a watch that tells which actor has outstayed its state, takes no turns or says nothing.

Health is progress, not a flag. Every state of every machine has a deadline beside its table (`DWELLS`), or a reason why
it has none; and every actor that is asked for a turn must take it within `TURN_LIMIT_S`, whatever its state. The watch
is looked at every `PERIOD_S` and is told the time: a look that comes late (the loop was blocked, the machine was
suspended, a debugger held it) counts for `LOOK_S_MAX` at most, so that no actor is blamed for time in which none could
move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from novainfer.fsm.core.dwell import ENCODE_LIMIT_S, GRAMMAR_LIMIT_S, Dwell, any_time
from novainfer.fsm.machines import MACHINES, states

PERIOD_S = 0.25  # between two looks: a quarter of the second in which a frozen actor must be reported
LOOK_S_MAX = 2 * PERIOD_S
TURN_LIMIT_S = 2.0  # from asking for a turn to the turn; the longest ones (planning for 1000 requests) take 0.05 s
# Importing torch from a cold disk holds the interpreter, and with it the beat, for many seconds.
LOAD_SILENCE_S = 60.0
# For which a server that replaces its worker is ready all the same: every other one behind its balancer would get its
# load. Within them a worker of a small model is back; a longer outage is for the balancer to know.
RECOVERY_READY_S = 10.0


class TokenizerState(StrEnum):
    """What the tokenizer's thread does; it is no machine, but it may be stuck like one."""

    LOADING = "LOADING"
    IDLE = "IDLE"
    ENCODING = "ENCODING"


class GrammarState(StrEnum):
    """What a thread that compiles grammars, or makes masks, does; it is no machine either."""

    IDLE = "IDLE"
    WORKING = "WORKING"
    LEFT_BEHIND = "LEFT_BEHIND"


DWELLS: Mapping[type[StrEnum], Mapping[StrEnum, Dwell]] = {
    **{type(states(machine)[0]): machine.DWELLS for machine in MACHINES},
    TokenizerState: {
        TokenizerState.LOADING: any_time("it may be fetched"),
        TokenizerState.IDLE: any_time("it waits for prompts"),
        TokenizerState.ENCODING: Dwell(ENCODE_LIMIT_S, "one batch of prompts"),
    },
    GrammarState: {
        GrammarState.IDLE: any_time("it waits for grammars"),
        GrammarState.WORKING: Dwell(GRAMMAR_LIMIT_S, "one grammar, or the masks of one step"),
        GrammarState.LEFT_BEHIND: any_time("nobody waits for it"),
    },
}


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
        """True when every actor moves."""
        return not self.late


class _Entry:
    """What the watch remembers of one actor; times are watched seconds, which do not count what was not looked at."""

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

    def limit_s(self, state: StrEnum) -> float | None:
        """For how long an actor may be in `state`; None: any time, or it is counted from its signs of life."""
        dwell = DWELLS[type(state)][state]
        return None if dwell.by_signs else dwell.seconds(self._step_timeout_s)

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
