"""A bounded mailbox with two lanes, and the shell that gives a machine its turns.

`tell` never waits: it says whether there was room. A turn handles what was in the mailbox when it began, but no more
than 64 messages, control messages (cancel, stop) first, so that a full data lane never delays a cancel. One turn is
asked for at most, however many messages come. An asyncio queue would cost twice, an anyio stream thirteen times as much
a message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from novainfer.actors.core.turns import MESSAGES_MAX, Turns
from novainfer.fsm.core.machine import After, Drop, Machine, Send
from novainfer.fsm.health import Sighting

if TYPE_CHECKING:
    from novainfer.actors.inspection.recorder import Recorder
    from novainfer.fsm.recording.log import Codes

# Messages, where it is not said how many can be in flight.
MAILBOX_LIMIT = 65_536


class ActorStatistics(msgspec.Struct, frozen=True):
    """One actor at one moment: its state, seconds in it, and messages waiting, of so many at most on each lane."""

    name: str
    state: str
    dwell_s: float
    mailbox_depth: int
    handled_total: int
    mailbox_max: int = MAILBOX_LIMIT


class Actor:
    """One machine and its mailbox. `route` delivers a Send; `start` begins a job; `died` hears of an exception."""

    def __init__(
        self,
        name: str,
        machine: Machine | None,
        *,
        route: Callable[[str, Any, bool], None],
        start: Callable[[Any], None],
        died: Callable[[str, BaseException], None],
        limit: int = MAILBOX_LIMIT,
    ) -> None:
        self.name = name
        self.machine = machine
        self._route = route
        self._start = start
        self._died = died
        self._limit = limit
        self._data: deque[Any] = deque()
        self._control: deque[Any] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns: Turns
        self._is_awake = False
        self._is_dead = False
        self._is_frozen = False
        self._timers: dict[Any, asyncio.TimerHandle] = {}  # by the events that they bring
        self._timers_of: dict[int, list[Any]] = {}  # those events by stream, where they belong to one
        self._recorder: Recorder | None = None
        self._write_told: Callable[[Codes, Any], None]  # while there are codes
        self._append: Callable[[int], None]
        self._log = bytearray()  # the recorder's; written where there are codes
        self._codes: tuple[Codes | None, Codes | None, Codes | None] = (None, None, None)  # data, control, direct
        self._state_since_s = 0.0
        self._handled = 0
        self._num_turns = 0

    def open(self, turns: Turns) -> None:
        """Begin to take `turns`; what was told before is waiting."""
        self._turns, self._loop = turns, turns.loop
        self._state_since_s = self._loop.time()
        if self._data or self._control:
            self._wake()

    def close(self) -> None:
        """Take no more turns, and forget timers and messages."""
        self._is_dead = True
        self._data.clear()
        self._control.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._timers_of.clear()

    def record(self, recorder: Recorder | None) -> None:
        """Write all that this actor takes to `recorder` from now on; None: no more."""
        self._recorder, name = recorder, self.name
        self._codes = (None, None, None)
        if recorder is not None:
            self._log = recorder.log
            self._append = recorder.log.append
            self._write_told = recorder.recording.told  # type: ignore[union-attr]
            self._codes = (recorder.lane(name, False), recorder.lane(name, True), recorder.lane(name, None))

    def waiting(self) -> tuple[list[Any], list[Any], list[Any]]:
        """The messages on the data lane and on the control lane, and the events of the timers that are set."""
        return list(self._data), list(self._control), list(self._timers)

    def tell(self, event: Any, urgent: bool = False) -> bool:
        """Put `event` into the mailbox; False when it is full (or its actor is dead), and the sender must decide."""
        lane = self._control if urgent else self._data
        if self._is_dead or len(lane) >= self._limit:
            return False
        lane.append(event)
        if not self._is_awake:
            self._wake()
        return True

    def ask_turn(self) -> None:
        """Take a turn even if there is no message: who has taken none when asked again is stuck."""
        if self._loop is not None and not self._is_dead and not self._is_awake:
            self._wake()

    def freeze(self) -> None:
        """Take no turns until `thaw`: a fault for tests and drills. What its owner lets it handle, it handles."""
        self._is_frozen = True

    def thaw(self) -> None:
        """Take turns again, beginning with what has waited."""
        if self._is_frozen and self._loop is not None and self._is_awake:
            self._turns.ask(self._turn)
        self._is_frozen = False

    def sighting(self) -> Sighting | None:
        """What the watchdog sees; None before it has been opened, and once it is dead."""
        if self._loop is None or self._is_dead or self.machine is None:
            return None
        return Sighting(self.name, self.machine.state, self._state_since_s, self._num_turns)

    def told(self, event: Any, urgent: bool = False) -> bool:
        """As `tell`, for what comes from outside the machines: the recorder keeps it in full."""
        codes = self._codes[urgent]
        if codes is not None and not self._is_dead and len(self._control if urgent else self._data) < self._limit:
            try:
                self._write_told(codes, event)
            except Exception as error:
                self._recorder.give_up(error)  # type: ignore[union-attr]
        return self.tell(event, urgent)

    def statistics(self) -> ActorStatistics:
        """An immutable record of the moment."""
        now_s = self._loop.time() if self._loop else self._state_since_s
        depth = len(self._data) + len(self._control)
        state = "DEAD" if self._is_dead else str(self.machine.state) if self.machine else "RUNNING"
        return ActorStatistics(self.name, state, now_s - self._state_since_s, depth, self._handled, self._limit)

    def handle(self, event: Any) -> None:
        """Let the machine take `event` now, and perform its effects; only its owner may call this from outside."""
        codes = self._codes[2]
        if codes is not None:
            self._recorder.called(codes, event)  # type: ignore[union-attr]
        self._take(event, codes)

    def _take(self, event: Any, codes: Codes | None) -> None:
        machine = self.machine
        assert machine is not None
        before, num_renewals = machine.state, machine.num_renewals
        try:
            effects = machine.handle(event)
        except Exception as error:
            if codes is not None:
                self._recorder.raised(codes, before, event, error)  # type: ignore[union-attr]
            raise
        self._handled += 1
        after = machine.state
        if (after is not before or machine.num_renewals != num_renewals) and self._loop is not None:
            self._state_since_s = self._loop.time()
        if codes is not None:
            try:
                self._append(codes.short[type(event)][after])
            except KeyError:  # it happens for the first time, or has a code of two bytes
                self._log += codes[type(event), after]
        for effect in effects:
            if type(effect) is Send:
                self._route(effect.to, effect.event, effect.urgent)
            elif type(effect) is After:
                self._set_timer(effect)
            elif type(effect) is Drop:
                self._drop_timer(effect.event)
            else:
                self._start(effect.job)  # type: ignore[union-attr]

    def _wake(self) -> None:
        """Ask for a turn; there is something to take."""
        if self._loop is not None:
            self._is_awake = True
            self._turns.ask(self._turn)

    def _turn(self) -> int:
        """How many messages it has taken. It stays awake meanwhile: what comes waits for the next, asked for once."""
        if self._is_frozen:
            return 0
        self._num_turns += 1
        control, data, codes = self._control, self._data, self._codes
        num_control, num_data = len(control), len(data)
        try:
            if num_data == 1 and not num_control:  # as mostly
                self._take(data.popleft(), codes[0])
            else:
                self._take_some(control, min(num_control, MESSAGES_MAX), codes[1])
                self._take_some(data, min(num_data, MESSAGES_MAX - num_control), codes[0])
        except Exception as error:
            self.close()
            self._died(self.name, error)
        finally:
            self._is_awake = False
            if data or control:
                self._wake()
        return min(num_control + num_data, MESSAGES_MAX)

    def _take_some(self, lane: deque[Any], count: int, codes: Codes | None) -> None:
        """Take `count` messages of `lane`, if so many are left: a timer that had run out may be dropped, or all die."""
        take, pop = self._take, lane.popleft
        while count > 0 and lane:
            take(pop(), codes)
            count -= 1

    def _set_timer(self, effect: After) -> None:
        assert self._loop is not None
        event = effect.event
        self._drop_timer(event)
        self._timers[event] = self._loop.call_later(effect.delay_s, self._fire, event)
        stream_id = getattr(event, "stream_id", None)
        if stream_id is not None:
            self._timers_of.setdefault(stream_id, []).append(event)

    def left_s(self, event: Any) -> float | None:
        """Seconds until the timer that brings `event` runs out; None where none is set."""
        timer = self._timers.get(event)
        return max(timer.when() - self._loop.time(), 0.0) if timer is not None and self._loop is not None else None

    def _fire(self, event: Any) -> None:
        codes = self._codes[1]
        if codes is not None and not self._is_dead:
            self._recorder.timer(codes, event)  # type: ignore[union-attr]
        del self._timers[event]
        self.tell(event, urgent=True)

    def _drop_timer(self, event: Any) -> None:
        timer = self._timers.pop(event, None)
        if timer is not None:
            timer.cancel()
        elif event in self._control:  # it has run out, and waits
            self._control.remove(event)

    def drop_timers(self, stream_id: int) -> None:
        """The stream is gone: deadlines of ten minutes must not be kept for each request of the last ten minutes."""
        for event in self._timers_of.pop(stream_id, ()):
            if (timer := self._timers.pop(event, None)) is not None:
                timer.cancel()
