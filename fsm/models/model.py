"""One model of several: whether its engine is there, and what has to happen before it is, or is not any more.

    ABSENT ──Want──▶ CHECKING ──Checked──▶ WAITING ──Load──▶ LOADING ──Loaded──▶ IDLE ⇄ READY   (IDLE: no live request)
       ▲                 │ CheckFailed                          │                  │      │ ▲
       │                 ▼                               LoadFailed, Died    Yield │ Yield▼ │Resume
       │◀─BackoffOver─ FAILED ◀─────────────────────────────────┤                  │   YIELDING   for another model
       │                                                        │                  ▼      │
       └──────────────────Stopped──────────────────────────── STOPPING ◀───────────┴──────┴── DRAINING   asked for

Its files are looked at before it waits for room: what is wrong with them makes no other model go. A check that has
begun goes on though nobody waits for it any more, as it is short: who comes meanwhile has what it finds.

Every check and every load has a serial: what is said of an older one is dropped. A model that came up is *fresh* for as
long as its load took, and yields to no other meanwhile: so at least half of the time of each place is spent on answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import BACKOFF_LIMIT_S, Dwell, any_time
from novainfer.fsm.core.machine import Guard, Machine, Table, ignore, never, on, stay, table, timer

BACKOFF_FIRST_S = 1.0  # after one load that failed; doubled with each one that follows
BACKOFF_MAX_S = BACKOFF_LIMIT_S / 2


class ModelState(StrEnum):
    """Where a model is."""

    ABSENT = "ABSENT"
    CHECKING = "CHECKING"
    WAITING = "WAITING"
    LOADING = "LOADING"
    IDLE = "IDLE"
    READY = "READY"
    YIELDING = "YIELDING"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    FAILED = "FAILED"


S = ModelState
TAKING = (S.IDLE, S.READY)  # its engine takes requests
LOADED = (*TAKING, S.YIELDING, S.DRAINING)  # or finishes those that it has
RESIDENT = (S.LOADING, *LOADED, S.STOPPING)  # it has a place, and memory
LEAVING = (S.YIELDING, S.DRAINING, S.STOPPING)  # its place will be free
COMING = (S.CHECKING, S.WAITING, S.LOADING)  # requests that want it wait for it, and for nothing to end first


# ---- what the router tells it ----------------------------------------------------------------------------------------


class Want(msgspec.Struct, frozen=True):
    """A request needs it."""


class Forgo(msgspec.Struct, frozen=True):
    """No request needs it any more."""


class Load(msgspec.Struct, frozen=True):
    """There is room for it, in this place."""

    place: int


class Use(msgspec.Struct, frozen=True):
    """One more live request has it."""


class Left(msgspec.Struct, frozen=True):
    """One of the live requests that had it has ended."""

    serial: int


class Yield(msgspec.Struct, frozen=True):
    """Another model needs its place."""


class Resume(msgspec.Struct, frozen=True):
    """No other model needs its place any more."""


class Leave(msgspec.Struct, frozen=True):
    """It is to go; the live requests that have it get `timeout_s`."""

    timeout_s: float


# ---- what is said of its files, and by its engine --------------------------------------------------------------------


class Checked(msgspec.Struct, frozen=True):
    """Nothing is wrong with its files, as far as a look at them tells."""

    model: str
    serial: int


class CheckFailed(msgspec.Struct, frozen=True):
    """It cannot be loaded as its files are."""

    model: str
    serial: int
    message: str


class Loaded(msgspec.Struct, frozen=True):
    """The engine takes requests; it took so many seconds to come up."""

    model: str
    serial: int
    load_s: float


class LoadFailed(msgspec.Struct, frozen=True):
    """The engine did not come up, and nothing is left of it."""

    model: str
    serial: int
    message: str


class Died(msgspec.Struct, frozen=True):
    """The engine has ended by itself; it holds what it has until it is stopped."""

    model: str
    serial: int
    message: str


class Stopped(msgspec.Struct, frozen=True):
    """Nothing is left of the engine."""

    model: str
    serial: int


# ---- timers ----------------------------------------------------------------------------------------------------------


class PatienceOver(msgspec.Struct, frozen=True):
    """It has waited for long for an idle model to make room."""

    model: str


class FreshOver(msgspec.Struct, frozen=True):
    """It has been there for as long as it took to load."""

    model: str
    serial: int


class IdleOver(msgspec.Struct, frozen=True):
    """No request has had it for long."""

    model: str


class DrainOver(msgspec.Struct, frozen=True):
    """The live requests that have it have had their time."""

    model: str


class BackoffOver(msgspec.Struct, frozen=True):
    """It may be tried again."""

    model: str


# ---- jobs ------------------------------------------------------------------------------------------------------------


class CheckFiles(msgspec.Struct, frozen=True):
    """Look at the model's files, which takes no share of memory; answered by `Checked` or `CheckFailed`."""

    model: str
    serial: int


class LoadEngine(msgspec.Struct, frozen=True):
    """Make the model's engine, with the share of memory of this place; answered by `Loaded` or `LoadFailed`."""

    model: str
    serial: int
    place: int


class StopEngine(msgspec.Struct, frozen=True):
    """End the engine, and what it still does, also while it comes up; answered by `Stopped`."""

    model: str
    serial: int


class OfLoad(Guard):
    """It is said of the engine that there is, or that comes up."""

    name = "of this load"
    why = "it is said of an engine that is gone"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return bool(event.serial == machine.serial)


class OfCheck(OfLoad):
    """It is said of the check that is under way."""

    name = "of this check"
    why = "it is said of a check that was given up"


class Patience(msgspec.Struct, frozen=True):
    """For how long a model waits for an idle one, and after how long without a request it goes (None: never)."""

    wait_s: float = 10.0
    idle_s: float | None = None


class Model(Machine):
    """One model. `num_live` counts requests that have it; `failure` says what its last load, or its engine, died of."""

    TABLE: ClassVar[Table] = table(
        S,
        (
            *(Want, Forgo, Load, Use, Left, Yield, Resume, Leave),
            *(Checked, CheckFailed, Loaded, LoadFailed, Died, Stopped),
            *(PatienceOver, FreshOver, IdleOver, DrainOver, BackoffOver),
        ),
        on((S.ABSENT, S.FAILED), Want, "_want", S.CHECKING),
        never((S.CHECKING, S.WAITING, *RESIDENT), Want, "it is there, on its way, or on its way out"),
        on(S.CHECKING, Checked, "_checked", S.WAITING, only=OfCheck),
        ignore((*(s for s in S if s is not S.CHECKING),), Checked, "its check was given up, or is over"),
        on(S.CHECKING, CheckFailed, "_check_failed", S.FAILED, only=OfCheck),
        ignore((*(s for s in S if s is not S.CHECKING),), CheckFailed, "its check was given up, or is over"),
        on(S.WAITING, Forgo, "_forgo", S.ABSENT),
        never(S.CHECKING, Forgo, "its check goes on: it is over soon, and takes no other model's room"),
        never((S.ABSENT, *RESIDENT, S.FAILED), Forgo, "it does not wait"),
        on(S.WAITING, Load, "_load", S.LOADING),
        never((S.ABSENT, S.CHECKING, *RESIDENT, S.FAILED), Load, "it does not wait for room"),
        on(TAKING, Use, "_use", S.READY),
        never(
            (S.ABSENT, *COMING, S.YIELDING, S.DRAINING, S.STOPPING, S.FAILED),
            Use,
            "it takes no new requests",
        ),
        on(S.READY, Left, "_left", S.READY, S.IDLE, only=OfLoad),
        on((S.YIELDING, S.DRAINING), Left, "_left_as_it_goes", S.YIELDING, S.DRAINING, S.STOPPING, only=OfLoad),
        stay(S.STOPPING, Left, "_left_late", only=OfLoad),
        ignore((S.ABSENT, *COMING, S.IDLE, S.FAILED), Left, "the engine that it had is gone"),
        on(S.IDLE, Yield, "_stop", S.STOPPING),
        on(S.READY, Yield, "_yield", S.YIELDING),
        never(
            (S.ABSENT, *COMING, S.YIELDING, S.DRAINING, S.STOPPING, S.FAILED),
            Yield,
            "it has no place that it could give away, or gives it away already",
        ),
        on(S.YIELDING, Resume, "_resume", S.READY),
        never((*(s for s in S if s is not S.YIELDING),), Resume, "it does not make room for another"),
        on((S.LOADING, S.IDLE), Leave, "_stop", S.STOPPING),
        on((S.READY, S.YIELDING, S.DRAINING), Leave, "_leave", S.DRAINING, S.STOPPING),
        on((S.CHECKING, S.WAITING), Leave, "_forgo", S.ABSENT),
        on(S.FAILED, Leave, "_forgive", S.ABSENT),
        ignore((S.ABSENT, S.STOPPING), Leave, "it is gone, or goes"),
        on(S.LOADING, Loaded, "_loaded", S.IDLE, only=OfLoad),
        ignore((*(s for s in S if s is not S.LOADING),), Loaded, "it was told to stop meanwhile"),
        on(S.LOADING, LoadFailed, "_load_failed", S.FAILED, only=OfLoad),
        ignore((*(s for s in S if s is not S.LOADING),), LoadFailed, "it was told to stop meanwhile"),
        on(LOADED, Died, "_died", S.STOPPING, only=OfLoad),
        ignore((*(s for s in S if s not in LOADED),), Died, "it was told to stop meanwhile"),
        on(S.STOPPING, Stopped, "_stopped", S.ABSENT, S.FAILED, only=OfLoad),
        ignore((*(s for s in S if s is not S.STOPPING),), Stopped, "it has stopped before"),
        timer(S.WAITING, PatienceOver, "_patience_over", S.WAITING),
        stay((S.IDLE, S.READY, S.DRAINING), FreshOver, "_fresh_over"),
        never((S.ABSENT, *COMING, S.STOPPING, S.FAILED), FreshOver, "its timer ends when it goes"),
        never(S.YIELDING, FreshOver, "one that is fresh makes no room for another"),
        timer(S.IDLE, IdleOver, "_stop", S.STOPPING),
        timer(S.DRAINING, DrainOver, "_stop", S.STOPPING),
        timer(S.FAILED, BackoffOver, "_backoff_over", S.ABSENT),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.ABSENT: any_time("it waits for requests"),
        S.CHECKING: any_time("the requests that wait for it have deadlines of their own"),
        S.WAITING: any_time("the requests that wait for it have deadlines of their own"),
        S.LOADING: any_time("its engine has deadlines of its own as it comes up"),
        S.IDLE: any_time("it waits for requests; a timer of its own ends it where that is asked for"),
        S.READY: any_time("as long as requests have it"),
        S.YIELDING: any_time("as long as the requests that have it"),
        S.DRAINING: any_time("a timer of its own ends it"),
        S.STOPPING: any_time("its engine has deadlines of its own as it goes down"),
        S.FAILED: any_time("a timer of its own ends it"),
    }

    def __init__(self, name: str, patience: Patience) -> None:
        super().__init__(S.ABSENT)
        self.name = name
        self._patience = patience
        self.serial = 0  # of its last check, or load
        self.place: int | None = None
        self.num_live = 0
        self.is_fresh = False  # it yields to no other yet
        self.is_impatient = False  # one that has live requests should make room for it
        self.failure = ""
        self.num_failures = 0  # one after the other

    @property
    def backoff_s(self) -> float:
        """How long it is left alone after its last failure."""
        return min(BACKOFF_FIRST_S * 2.0 ** min(self.num_failures - 1, 16), BACKOFF_MAX_S)

    # ---- coming --------------------------------------------------------------------------------------------------

    def _want(self, _: Want) -> ModelState:
        self.serial += 1
        self._start(CheckFiles(self.name, self.serial))
        return S.CHECKING

    def _checked(self, _: Checked) -> ModelState:
        self._until_left(self._patience.wait_s, PatienceOver(self.name))
        return S.WAITING

    def _patience_over(self, _: PatienceOver) -> ModelState:
        self.is_impatient = True
        return S.WAITING

    def _forgo(self, _: Forgo | Leave) -> ModelState:
        self.is_impatient = False
        return S.ABSENT

    def _load(self, event: Load) -> ModelState:
        self.is_impatient = False
        self.failure = ""
        self.serial += 1
        self.place = event.place
        self._start(LoadEngine(self.name, self.serial, event.place))
        return S.LOADING

    def _loaded(self, event: Loaded) -> ModelState:
        self.is_fresh = True
        self._after(event.load_s, FreshOver(self.name, self.serial))
        return self._idle()

    def _fresh_over(self, _: FreshOver) -> StrEnum:
        self.is_fresh = False
        self.num_failures = 0
        return self.state

    # ---- being there ---------------------------------------------------------------------------------------------

    def _idle(self) -> ModelState:
        if self._patience.idle_s is not None:
            self._until_left(self._patience.idle_s, IdleOver(self.name))
        return S.IDLE

    def _use(self, _: Use) -> ModelState:
        self.num_live += 1
        return S.READY

    def _left(self, _: Left) -> ModelState:
        self.num_live -= 1
        return S.READY if self.num_live else self._idle()

    # ---- going ---------------------------------------------------------------------------------------------------

    def _yield(self, _: Yield) -> ModelState:
        return S.YIELDING

    def _resume(self, _: Resume) -> ModelState:
        return S.READY

    def _leave(self, event: Leave) -> ModelState:
        if event.timeout_s <= 0:
            return self._stop(event)
        self._until_left(event.timeout_s, DrainOver(self.name))
        return S.DRAINING

    def _left_as_it_goes(self, event: Left) -> StrEnum:
        self.num_live -= 1
        return self.state if self.num_live else self._stop(event)

    def _left_late(self, _: Left) -> ModelState:
        self.num_live -= 1
        return S.STOPPING

    def _stop(self, _: Any) -> ModelState:
        if self.is_fresh:
            self.is_fresh = False
            self._drop(FreshOver(self.name, self.serial))
        self._start(StopEngine(self.name, self.serial))
        return S.STOPPING

    def _died(self, event: Died) -> ModelState:
        self.failure = event.message
        return self._stop(event)

    def _stopped(self, _: Stopped) -> ModelState:
        self._let_go()
        return self._fail() if self.failure else S.ABSENT

    def _load_failed(self, event: LoadFailed) -> ModelState:
        self.failure = event.message
        self._let_go()
        return self._fail()

    def _check_failed(self, event: CheckFailed) -> ModelState:
        self.failure = event.message
        return self._fail()

    def _let_go(self) -> None:
        """Nothing is left of its engine: whoever still has it is told by the engine, and has nothing of the next."""
        self.serial += 1
        self.place = None
        self.num_live = 0

    def _fail(self) -> ModelState:
        self.num_failures += 1
        self._until_left(self.backoff_s, BackoffOver(self.name))
        return S.FAILED

    def _backoff_over(self, _: BackoffOver) -> ModelState:
        return S.ABSENT

    def _forgive(self, _: Leave) -> ModelState:
        self.failure = ""
        self.num_failures = 0
        return S.ABSENT
