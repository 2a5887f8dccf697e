"""The ladder of degraded modes: when memory stays short, or kernels fail whatever they compute, the engine works worse.

    FULL ⇄ SMALLER_BATCH                      Held: steps hold less than configured; Freed: they may again
    FULL, SMALLER_BATCH ──Broken──▶ PLAIN_KERNELS ──Quiet──▶ FULL, SMALLER_BATCH
    FULL, SMALLER_BATCH, PLAIN_KERNELS ──Pressure──▶ INT8 ──Quiet──▶ FULL, SMALLER_BATCH

Pressure and Broken are what a canary proves, a step that holds nothing of any client (see `trouble`). PLAIN_KERNELS and
INT8 compute in another mode than the full one, and only there answers may change. Both are left after a quiet time, a
timer that finds nothing wrong since it was set. Trouble before the next quiet time is over doubles it, up to 16 times:
once for each way up that came to nothing, and not for each rung on the way down. A quiet time in an exact mode makes it
as long as at first.
A rung that the device cannot switch to is left out from then on; one it cannot switch back from is stayed on until
the next quiet time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.events import Incident, Quiet
from novainfer.fsm.machine import Guard, Machine, Table, ignore, never, on, stay, table


class Rung(StrEnum):
    """How well the engine works."""

    FULL = "FULL"
    SMALLER_BATCH = "SMALLER_BATCH"
    PLAIN_KERNELS = "PLAIN_KERNELS"
    INT8 = "INT8"


S = Rung
MODE_OF_RUNG = {S.FULL: "full", S.SMALLER_BATCH: "full", S.PLAIN_KERNELS: "plain", S.INT8: "int8"}
EXACT = (S.FULL, S.SMALLER_BATCH)  # where answers are those of the model as it was loaded
OTHER = (S.PLAIN_KERNELS, S.INT8)
BACKOFF_MAX = 16  # quiet times in one: a quarter of an hour between two ways up that come to nothing


class Held(msgspec.Struct, frozen=True):
    """Steps hold less than was configured from now on: `message` says why."""

    message: str


class Freed(msgspec.Struct, frozen=True):
    """Steps may hold as much as was configured."""


class Pressure(msgspec.Struct, frozen=True):
    """A canary found no memory: `message` says what is wrong."""

    message: str


class Broken(msgspec.Struct, frozen=True):
    """A canary could not be computed: `message` says what is wrong."""

    message: str


class Steady(msgspec.Struct, frozen=True):
    """The first good step after a quiet time without any, or the last request has ended: the time begins again."""


class Switched(msgspec.Struct, frozen=True):
    """The device computes in this mode: a step in it is done, or it has just come up."""

    mode: str


class SwitchFailed(msgspec.Struct, frozen=True):
    """The device could not change to `mode`, and computes as before: `message` says why."""

    mode: str
    message: str


class OfMode(Guard):
    """The mode is that of the rung."""

    name = "of this rung"
    why = "the engine is on another rung by now"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return bool(event.mode == machine.mode)


class Ladder(Machine):
    """See the module; `quiet_s` is the time without trouble after which the way up is tried."""

    TABLE: ClassVar[Table] = table(
        S,
        (Held, Freed, Pressure, Broken, Steady, Switched, SwitchFailed, Quiet),
        on(S.FULL, Held, "_hold", S.SMALLER_BATCH),
        stay(OTHER, Held, "_still_held"),
        never(S.SMALLER_BATCH, Held, "they are held already, and that is told once"),
        never(S.FULL, Freed, "none are held"),
        on(S.SMALLER_BATCH, Freed, "_free", S.FULL),
        stay(OTHER, Freed, "_note_freed"),
        on((*EXACT, S.PLAIN_KERNELS), Pressure, "_to_int8", *S),
        stay(S.INT8, Pressure, "_bear"),
        on(EXACT, Broken, "_to_plain", *EXACT, S.PLAIN_KERNELS),
        stay(OTHER, Broken, "_bear"),
        stay(OTHER, Steady, "_bear"),
        ignore(EXACT, Steady, "it was left while nothing was there to be computed"),
        stay(S, Switched, "_note"),
        on(S, SwitchFailed, "_back", *S, only=OfMode),
        stay(EXACT, Quiet, "_settle"),
        on(OTHER, Quiet, "_up", *S),
    )
    state: Rung

    def __init__(self, modes: Sequence[str] = ("full",), *, quiet_s: float = 60.0) -> None:
        super().__init__(S.FULL)
        self._rungs = [rung for rung in S if MODE_OF_RUNG[rung] in modes]
        self._quiet_s = quiet_s
        self._backoff = 1  # quiet times until the next way up
        self._is_held = False  # where the way up leads
        self._is_settling = False  # it is up again, and not for a quiet time yet
        self._serial = 0  # of the last trouble: a timer set before it says nothing
        self.device_mode = MODE_OF_RUNG[S.FULL]

    @property
    def mode(self) -> str:
        """The mode that the next step asks of the device."""
        return MODE_OF_RUNG[self.state]

    @property
    def is_exact(self) -> bool:
        """True where answers are those of the model as it was loaded."""
        return self.state in EXACT

    def helps(self, event: type[Pressure | Broken]) -> bool:
        """Whether there is a rung for that."""
        if event is Pressure:
            return self.state is not S.INT8 and S.INT8 in self._rungs
        return self.state in EXACT and S.PLAIN_KERNELS in self._rungs

    # ---- how large steps are -------------------------------------------------------------------------------------

    def _hold(self, event: Held) -> Rung:
        self._is_held = True
        return self._go(S.SMALLER_BATCH, event.message)

    def _still_held(self, _: Held) -> Rung:
        self._is_held = True
        return self.state

    def _free(self, _: Freed) -> Rung:
        self._is_held = False
        return self._go(S.FULL, "steps go well that hold as much as they may")

    def _note_freed(self, _: Freed) -> Rung:
        self._is_held = False
        return self.state

    # ---- modes ---------------------------------------------------------------------------------------------------

    def _to_int8(self, event: Pressure) -> Rung:
        return self._down(S.INT8, event)

    def _to_plain(self, event: Broken) -> Rung:
        return self._down(S.PLAIN_KERNELS, event)

    def _down(self, rung: Rung, event: Pressure | Broken) -> Rung:
        if rung not in self._rungs:
            return self.state
        if self._is_settling:
            self._backoff = min(2 * self._backoff, BACKOFF_MAX)
            self._is_settling = False
        return self._go(rung, event.message)

    def _bear(self, _: Pressure | Broken | Steady) -> Rung:
        self._set_timer()
        return self.state

    def _up(self, event: Quiet) -> Rung:
        if event.serial != self._serial:
            return self.state
        self._is_settling = True
        rung = self._go(S.SMALLER_BATCH if self._is_held else S.FULL, "nothing went wrong for a while")
        self._set_timer()
        return rung

    def _settle(self, event: Quiet) -> Rung:
        if event.serial == self._serial and self._is_settling:
            self._is_settling = False
            self._backoff = 1
        return self.state

    def _note(self, event: Switched) -> Rung:
        self.device_mode = event.mode
        return self.state

    def _back(self, event: SwitchFailed) -> Rung:
        failed = self.state
        if self.device_mode == MODE_OF_RUNG[S.FULL]:
            target = S.SMALLER_BATCH if self._is_held else S.FULL
        else:
            target = next(rung for rung in OTHER if MODE_OF_RUNG[rung] == self.device_mode)
        if self._rungs.index(failed) > self._rungs.index(target):
            self._rungs.remove(failed)
        return self._go(target, event.message)

    def _go(self, rung: Rung, why: str) -> Rung:
        self._send("incidents", Incident(kind="ladder", message=why, action=f"{self.state} -> {rung}"))
        if rung in OTHER:
            self._set_timer()
        return rung

    def _set_timer(self) -> None:
        self._serial += 1
        self._after(self._quiet_s * self._backoff, Quiet(self._serial))
