"""The ladder of degraded modes: when memory stays short, or kernels fail whatever they compute, the engine works worse.

    FULL ⇄ SMALLER_BATCH                      Held: steps hold less than configured; Freed: they may again
    FULL, SMALLER_BATCH ──Broken──▶ OTHER_MODE: the next kernels                         ──Quiet──▶ FULL, SMALLER_BATCH
    FULL, SMALLER_BATCH ──Pressure──▶ OTHER_MODE: without graphs, or a lower precision  ──Quiet──▶ FULL, SMALLER_BATCH
    OTHER_MODE ──Broken, Pressure──▶ OTHER_MODE: further down on that axis

FULL and SMALLER_BATCH compute in the mode that the device came up in, with the kernels and in the precision that the
engine was started with: there answers are exact. OTHER_MODE is every other mode that the device offers. Only there
answers may change; without graphs they do not, those are the same kernels. Broken keeps the precision and leads to the
kernels that come next: on CUDA without graphs, other attention, torch's own. Pressure keeps the kernels, but for
graphs: they hold memory and are let go first. For people each of these modes is a rung of its own, named by what
differs: NO_GRAPHS, OTHER_ATTENTION, PLAIN_KERNELS, INT8, and the first three with +INT8.

Pressure and Broken are what a canary proves, a step that holds nothing of any client (see `recovery`). OTHER_MODE is
left after a quiet time, a timer that finds nothing wrong since it was set. Trouble before the next quiet time is over
doubles it, up to 16 times: once for each way up that came to nothing, and not for each rung on the way down. A quiet
time in an exact mode makes it as long as at first.
A mode that the device cannot switch to is left out from then on; one it cannot switch back from is stayed in until
the next quiet time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import Dwell, any_time
from novainfer.fsm.core.machine import Guard, Machine, Table, ignore, never, on, stay, table
from novainfer.fsm.messages.events import Incident, Quiet
from novainfer.fsm.messages.mode import EAGER, FAST, PLAIN, SDPA, Mode


class Rung(StrEnum):
    """How well the engine works."""

    FULL = "FULL"
    SMALLER_BATCH = "SMALLER_BATCH"
    OTHER_MODE = "OTHER_MODE"


S = Rung
FIRST_MODE = (S.FULL, S.SMALLER_BATCH)  # where it computes in the mode that the engine was started in
RUNGS = {EAGER: "NO_GRAPHS", SDPA: "OTHER_ATTENTION", PLAIN: "PLAIN_KERNELS"}  # for people, by the kernels
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


class Offered(msgspec.Struct, frozen=True):
    """A device has come up, in the first of these modes; where they are others than before, the engine begins anew."""

    modes: tuple[Mode, ...]


class Switched(msgspec.Struct, frozen=True):
    """The device computes in this mode: a step in it is done."""

    mode: Mode


class SwitchFailed(msgspec.Struct, frozen=True):
    """The device could not change to `mode`, and computes as before: `message` says why."""

    mode: Mode
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
        (Held, Freed, Pressure, Broken, Steady, Offered, Switched, SwitchFailed, Quiet),
        on(S.FULL, Held, "_hold", S.SMALLER_BATCH),
        stay(S.OTHER_MODE, Held, "_still_held"),
        never(S.SMALLER_BATCH, Held, "they are held already, and that is told once"),
        never(S.FULL, Freed, "none are held"),
        on(S.SMALLER_BATCH, Freed, "_free", S.FULL),
        stay(S.OTHER_MODE, Freed, "_note_freed"),
        on(S.FULL, Pressure, "_down", S.FULL, S.OTHER_MODE),
        on(S.FULL, Broken, "_down", S.FULL, S.OTHER_MODE),
        on(S.SMALLER_BATCH, Pressure, "_down", S.SMALLER_BATCH, S.OTHER_MODE),
        on(S.SMALLER_BATCH, Broken, "_down", S.SMALLER_BATCH, S.OTHER_MODE),
        stay(S.OTHER_MODE, Pressure, "_down"),
        stay(S.OTHER_MODE, Broken, "_down"),
        stay(S.OTHER_MODE, Steady, "_bear"),
        ignore(FIRST_MODE, Steady, "it was left while nothing was there to be computed"),
        on(S, Offered, "_offer", *S),
        stay(S, Switched, "_note"),
        on(S, SwitchFailed, "_back", *S, only=OfMode),
        stay(FIRST_MODE, Quiet, "_settle"),
        on(S.OTHER_MODE, Quiet, "_up", *S),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        **dict.fromkeys(S, any_time("it climbs back when it has been quiet for a while")),
    }
    state: Rung

    def __init__(self, modes: Sequence[Mode] = (Mode(),), *, quiet_s: float = 60.0) -> None:
        """`modes` are those that the device offers, best first; it comes up in the first."""
        super().__init__(S.FULL)
        self._offered = tuple(modes)
        self._modes = list(modes)  # those that it can be switched to
        self._quiet_s = quiet_s
        self._backoff = 1  # quiet times until the next way up
        self._is_held = False  # where the way up leads
        self._is_settling = False  # it is up again, and not for a quiet time yet
        self.mode = self.device_mode = self.exact_mode

    @property
    def exact_mode(self) -> Mode:
        """The mode that the engine was started in."""
        return self._offered[0]

    @property
    def is_down(self) -> bool:
        """True where it computes in another mode than the engine was started in."""
        return self.state is S.OTHER_MODE

    @property
    def rung(self) -> str:
        """Where it is, for people."""
        return self._name(self.mode) if self.state is S.OTHER_MODE else str(self.state)

    @property
    def rungs(self) -> tuple[str, ...]:
        """All that `rung` may be with this device, best first."""
        return (*FIRST_MODE, *(self._name(mode) for mode in self._offered[1:]))

    @property
    def depth(self) -> int:
        """How many modes may be tried on one way down, the first among them: one axis after the other."""
        kernels, precisions = {mode.kernels for mode in self._offered}, {mode.precision for mode in self._offered}
        return len(kernels) + len(precisions) - 1

    def helps(self, event: type[Pressure | Broken]) -> bool:
        """Whether there is a rung for that."""
        return self._below(event) is not None

    # ---- how large steps are -------------------------------------------------------------------------------------

    def _hold(self, event: Held) -> Rung:
        self._is_held = True
        return self._go(self.exact_mode, event.message)

    def _still_held(self, _: Held) -> Rung:
        self._is_held = True
        return self.state

    def _free(self, _: Freed) -> Rung:
        self._is_held = False
        return self._go(self.exact_mode, "steps go well that hold as much as they may")

    def _note_freed(self, _: Freed) -> Rung:
        self._is_held = False
        return self.state

    # ---- modes ---------------------------------------------------------------------------------------------------

    def _down(self, event: Pressure | Broken) -> Rung:
        mode = self._below(type(event))
        if mode is None:
            return self._bear(event) if self.is_down else self.state
        if self._is_settling:
            self._backoff = min(2 * self._backoff, BACKOFF_MAX)
            self._is_settling = False
        return self._go(mode, event.message)

    def _below(self, event: type[Pressure | Broken]) -> Mode | None:
        """The next mode that helps."""
        now = self.mode
        for mode in self._modes[self._modes.index(now) + 1 :]:
            if mode.precision == now.precision:
                if event is Broken or (now.kernels, mode.kernels) == (FAST, EAGER):
                    return mode
            elif mode.kernels == now.kernels and event is Pressure:
                return mode
        return None

    def _bear(self, _: Pressure | Broken | Steady) -> Rung:
        self._set_timer()
        return self.state

    def _up(self, _: Quiet) -> Rung:
        self._is_settling = True
        rung = self._go(self.exact_mode, "nothing went wrong for a while")
        self._set_timer()
        return rung

    def _settle(self, _: Quiet) -> Rung:
        if self._is_settling:
            self._is_settling = False
            self._backoff = 1
        return self.state

    def _offer(self, event: Offered) -> Rung:
        if event.modes == self._offered:
            self.device_mode = self.exact_mode
            return self.state
        before = self.rung
        self._offered, self._modes = event.modes, list(event.modes)
        self.mode = self.device_mode = self.exact_mode
        self._backoff, self._is_settling = 1, False
        rung = S.SMALLER_BATCH if self._is_held else S.FULL
        if self.state is S.OTHER_MODE:
            message, action = f"the engine computes with {self.mode} from now on", f"{before} -> {rung}"
            self._send("incidents", Incident(kind="ladder", message=message, action=action))
        return rung

    def _note(self, event: Switched) -> Rung:
        self.device_mode = event.mode
        return self.state

    def _back(self, event: SwitchFailed) -> Rung:
        failed, target = self.mode, self.device_mode
        if self._modes.index(failed) > self._modes.index(target):
            self._modes.remove(failed)
        return self._go(target, event.message)

    def _go(self, mode: Mode, why: str) -> Rung:
        """To `mode`; where that is the exact one, to the rung that says whether steps are held."""
        before, self.mode = self.rung, mode
        rung = S.OTHER_MODE
        if mode == self.exact_mode:
            rung = S.SMALLER_BATCH if self._is_held else S.FULL
        else:
            self._set_timer()
        action = f"{before} -> {self._name(mode) or rung}"
        self._send("incidents", Incident(kind="ladder", message=why, action=action))
        return rung

    def _name(self, mode: Mode) -> str:
        """What differs from the exact mode; empty when nothing does."""
        exact, words = self.exact_mode, []
        if mode.kernels != exact.kernels:
            words.append(RUNGS[mode.kernels])
        if mode.precision != exact.precision:
            words.append(mode.precision.upper())
        return "+".join(words)

    def _set_timer(self) -> None:
        self._after(self._quiet_s * self._backoff, Quiet())
