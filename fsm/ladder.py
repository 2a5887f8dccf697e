"""The ladder of degraded modes: when memory stays short, or kernels keep failing, the engine works worse, not less.

    FULL ──Pressure──▶ SMALLER_BATCH ──Pressure──▶ PLAIN_KERNELS ──Pressure──▶ INT8      (rungs the device has)
      ◀────Quiet────────     ◀────Quiet────────         ◀────Quiet──────

Each rung includes those above it. Quiet is a timer that finds nothing wrong since it was set. A rung that the device
cannot switch to is left out from then on; one it cannot switch back from is stayed on until the next quiet time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar

import msgspec

from novainfer.fsm.events import Incident, Quiet
from novainfer.fsm.machine import Machine, Table, ignore, on, stay, table


class Rung(StrEnum):
    """How well the engine works."""

    FULL = "FULL"
    SMALLER_BATCH = "SMALLER_BATCH"
    PLAIN_KERNELS = "PLAIN_KERNELS"
    INT8 = "INT8"


S = Rung
MODE_OF_RUNG = {S.FULL: "full", S.SMALLER_BATCH: "full", S.PLAIN_KERNELS: "plain", S.INT8: "int8"}
LOWER = (S.SMALLER_BATCH, S.PLAIN_KERNELS, S.INT8)


class Pressure(msgspec.Struct, frozen=True):
    """Smaller steps did not help, or do not help for long: `message` says what is wrong."""

    message: str


class Steady(msgspec.Struct, frozen=True):
    """The first good step after a quiet time without any: the time begins again."""


class Switched(msgspec.Struct, frozen=True):
    """The device computes in this mode: a step in it is done, or it has just come up."""

    mode: str


class SwitchFailed(msgspec.Struct, frozen=True):
    """The device could not change to `mode`, and computes as before: `message` says why."""

    mode: str
    message: str


class Ladder(Machine):
    """See the module; `quiet_s` is the time without trouble after which the next rung up is tried."""

    TABLE: ClassVar[Table] = table(
        S,
        (Pressure, Steady, Switched, SwitchFailed, Quiet),
        on(S.FULL, Pressure, "_down", S.FULL, *LOWER),
        on(S.SMALLER_BATCH, Pressure, "_down", *LOWER),
        on(S.PLAIN_KERNELS, Pressure, "_down", S.PLAIN_KERNELS, S.INT8),
        on(S.INT8, Pressure, "_bear", S.INT8),
        stay(LOWER, Steady, "_bear"),
        ignore(S.FULL, Steady, "it was climbed while nobody was there to be computed"),
        stay(S, Switched, "_note"),
        on(S.FULL, SwitchFailed, "_back", S.FULL, S.PLAIN_KERNELS, S.INT8),
        on(S.SMALLER_BATCH, SwitchFailed, "_back", *LOWER),
        on((S.PLAIN_KERNELS, S.INT8), SwitchFailed, "_back", *LOWER),
        ignore(S.FULL, Quiet, "it was set on a lower rung"),
        on(LOWER, Quiet, "_up", S.FULL, *LOWER),
    )
    state: Rung

    def __init__(self, modes: Sequence[str] = ("full",), *, quiet_s: float = 60.0) -> None:
        super().__init__(S.FULL)
        self._rungs = [rung for rung in S if MODE_OF_RUNG[rung] in modes]
        self._quiet_s = quiet_s
        self._serial = 0  # of the last trouble: a timer set before it says nothing
        self.device_mode = MODE_OF_RUNG[S.FULL]

    @property
    def mode(self) -> str:
        """The mode that the next step asks of the device."""
        return MODE_OF_RUNG[self.state]

    def _down(self, event: Pressure) -> Rung:
        lower = self._rungs[self._rungs.index(self.state) + 1 :]
        if not lower:
            return self._bear(event)
        return self._go(lower[0], event.message)

    def _bear(self, _: Pressure | Steady) -> Rung:
        self._set_timer()
        return self.state

    def _up(self, event: Quiet) -> Rung:
        if event.serial != self._serial:
            return self.state
        return self._go(self._rungs[self._rungs.index(self.state) - 1], "nothing went wrong for a while")

    def _note(self, event: Switched) -> Rung:
        self.device_mode = event.mode
        return self.state

    def _back(self, event: SwitchFailed) -> Rung:
        if event.mode != self.mode:  # the engine is on another rung by now
            return self.state
        failed = self.state
        target = next(rung for rung in reversed(self._rungs) if MODE_OF_RUNG[rung] == self.device_mode)
        if self._rungs.index(failed) > self._rungs.index(target):
            self._rungs.remove(failed)
        return self._go(target, event.message)

    def _go(self, rung: Rung, why: str) -> Rung:
        self._send("incidents", Incident(kind="ladder", message=why, action=f"{self.state} -> {rung}"))
        if rung is not S.FULL:
            self._set_timer()
        return rung

    def _set_timer(self) -> None:
        self._serial += 1
        self._after(self._quiet_s, Quiet(self._serial))
