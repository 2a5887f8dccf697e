"""A bounded mailbox with two lanes, and the shell that gives a machine its turns.

`tell` never waits: it says whether there was room. A turn handles what was in the mailbox when it began, control
messages (cancel, stop) first, so that a full data lane never delays a cancel. One wake-up (`call_soon`) is pending at
most, however many messages come. An asyncio queue would cost twice, an anyio stream thirteen times as much a message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from novainfer.fsm.health import Sighting
from novainfer.fsm.machine import After, Effect, Machine, Send

# Messages, where nobody says how many can be in flight.
MAILBOX_LIMIT = 65_536


class ActorStatistics(msgspec.Struct, frozen=True):
    """One actor at one moment: its state, seconds in it, and messages waiting."""

    name: str
    state: str
    dwell_s: float
    mailbox_depth: int
    handled_total: int


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
        self._is_awake = False
        self._is_dead = False
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_frozen = False
        self._state_since_s = 0.0
        self._handled = 0
        self._turns = 0
        self.on_transition: Callable[[str, str, str, str], None] | None = None  # actor, from, to, event; for listeners

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to take turns on `loop`; what was told before is waiting."""
        self._loop = loop
        self._state_since_s = loop.time()
        self._wake()

    def close(self) -> None:
        """Take no more turns, and forget timers and messages."""
        self._is_dead = True
        self._data.clear()
        self._control.clear()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

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
            self._is_awake = True
            self._loop.call_soon(self._turn)

    def freeze(self) -> None:
        """Take no turns until `thaw`: a fault for tests and drills. What its owner lets it handle, it handles."""
        self._is_frozen = True

    def thaw(self) -> None:
        """Take turns again, beginning with what has waited."""
        if self._is_frozen and self._loop is not None and self._is_awake:
            self._loop.call_soon(self._turn)
        self._is_frozen = False

    def sighting(self) -> Sighting | None:
        """What the watchdog sees; None before it has been opened, and once it is dead."""
        if self._loop is None or self._is_dead or self.machine is None:
            return None
        return Sighting(self.name, self.machine.state, self._state_since_s, self._turns)

    def statistics(self) -> ActorStatistics:
        """An immutable record of the moment."""
        now_s = self._loop.time() if self._loop else self._state_since_s
        depth = len(self._data) + len(self._control)
        state = "DEAD" if self._is_dead else str(self.machine.state) if self.machine else "RUNNING"
        return ActorStatistics(self.name, state, now_s - self._state_since_s, depth, self._handled)

    def handle(self, event: Any) -> None:
        """Let the machine take `event` now, and perform its effects; only its owner may call this from outside."""
        machine = self.machine
        assert machine is not None
        state = machine.state
        effects = machine.handle(event)
        self._handled += 1
        if machine.state is not state and self._loop is not None:
            self._state_since_s = self._loop.time()
            if self.on_transition is not None:
                self.on_transition(self.name, str(state), str(machine.state), type(event).__name__)
        self.perform(effects)

    def perform(self, effects: Sequence[Effect]) -> None:
        """Send, start, and set timers."""
        for effect in effects:
            if type(effect) is Send:
                self._route(effect.to, effect.event, effect.urgent)
            elif type(effect) is After:
                self._set_timer(effect)
            else:
                self._start(effect.job)  # type: ignore[union-attr]

    def _wake(self) -> None:
        if self._loop is not None and (self._data or self._control):
            self._is_awake = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        # The actor stays awake for the turn: what comes meanwhile waits for the next one, which is asked for once.
        if self._is_frozen:
            return
        self._turns += 1
        lanes = ((self._control, len(self._control)), (self._data, len(self._data)))
        try:
            for lane, count in lanes:
                for _ in range(count):
                    self.handle(lane.popleft())
                    if self._is_dead:
                        return
        except Exception as error:
            self.close()
            self._died(self.name, error)
        finally:
            self._is_awake = False
            self._wake()

    def _set_timer(self, effect: After) -> None:
        assert self._loop is not None

        def fire() -> None:
            self._timers.discard(timer)
            self.tell(effect.event, urgent=True)

        timer = self._loop.call_later(effect.delay_s, fire)
        self._timers.add(timer)
