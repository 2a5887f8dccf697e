"""The router gives each request the model that it names: at once, when that has come up, or not at all, and says why.

    a request   ──its model takes requests──▶ live ──Leave──▶ gone
                ──it does not──▶ waiting ──it has come up──▶ live
                                         ──it failed, or the time is over, or all ends──▶ Refused

A model's files are looked at before room is made for it, so that one which cannot be loaded makes no other go.

At most `max_loaded` models have a place, which stands for a share of memory: from before they load until nothing is
left of their engine. Where there is none for a model that requests wait for, the idle one goes that was used least
recently. While none is idle, the model waits; when it has waited for long, one with live requests takes no more of
them (YIELDING), and goes when the last of them has ended: none is ended for another model. What it is asked for
meanwhile waits in its turn. When the requests that room was made for have left, it goes on as if nothing had been.

A load that fails ends the requests that wait for it, and harms no other model; until a pause is over, which grows with
each failure, requests for it are refused at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from novainfer.fsm.core.dwell import ENDED, Dwell, any_time
from novainfer.fsm.core.machine import Machine, Table, ignore, never, on, stay, table
from novainfer.fsm.models.model import (
    COMING,
    LEAVING,
    RESIDENT,
    TAKING,
    BackoffOver,
    Checked,
    CheckFailed,
    Died,
    DrainOver,
    Forgo,
    FreshOver,
    IdleOver,
    Leave,
    Left,
    Load,
    Loaded,
    LoadFailed,
    Model,
    ModelState,
    Patience,
    PatienceOver,
    Resume,
    Stopped,
    Use,
    Want,
    Yield,
)

RETRY_AFTER_S = 2.0  # for who is refused, where nothing is known of how long it will take
Reason: TypeAlias = Literal["failed", "full", "timeout", "unloaded", "draining"]


class RouterState(StrEnum):
    """Whether requests are taken."""

    OPEN = "OPEN"
    DRAINING = "DRAINING"
    CLOSED = "CLOSED"


S = RouterState


class Ask(msgspec.Struct, frozen=True):
    """A request needs a model, within `timeout_s`. One `by_hand` asks for it though its last load has just failed."""

    request_id: int
    model: str
    timeout_s: float
    by_hand: bool = False


class Gone(msgspec.Struct, frozen=True):
    """A request has ended, or does not wait any more."""

    request_id: int


class AskOver(msgspec.Struct, frozen=True):
    """A request has waited for as long as it may."""

    request_id: int


class Unload(msgspec.Struct, frozen=True):
    """A model is to go; the live requests that have it get `timeout_s`. The next request for it loads it again."""

    model: str
    timeout_s: float


class DrainAll(msgspec.Struct, frozen=True):
    """The server ends: live requests get `timeout_s`, and none is taken any more. Again it may be sooner."""

    timeout_s: float


class Granted(msgspec.Struct, frozen=True):
    """The model takes this request, with the engine of this serial, which stays until it is `Gone`."""

    request_id: int
    serial: int


class Refused(msgspec.Struct, frozen=True):
    """The request does not get its model; it may come again after `retry_after_s`."""

    request_id: int
    reason: Reason
    message: str
    retry_after_s: float = RETRY_AFTER_S


OF_CHECKS = (Checked, CheckFailed)
OF_ENGINES = (Loaded, LoadFailed, Died, Stopped)
TIMERS = (PatienceOver, FreshOver, IdleOver, DrainOver, BackoffOver)


class Router(Machine):
    """All models of one server. For each model at most `max_waiting` requests wait."""

    TABLE: ClassVar[Table] = table(
        S,
        (Ask, Gone, AskOver, Unload, DrainAll, *OF_CHECKS, *OF_ENGINES, *TIMERS),
        on(S.OPEN, Ask, "_ask", S.OPEN),
        stay((S.DRAINING, S.CLOSED), Ask, "_refuse_draining"),
        stay((S.OPEN, S.DRAINING, S.CLOSED), Gone, "_gone"),
        on(S.OPEN, AskOver, "_ask_over", S.OPEN),
        never((S.DRAINING, S.CLOSED), AskOver, "all that waited were refused"),
        on(S.OPEN, Unload, "_unload", S.OPEN),
        ignore((S.DRAINING, S.CLOSED), Unload, "all models go, or are gone"),
        on((S.OPEN, S.DRAINING), DrainAll, "_drain_all", S.DRAINING, S.CLOSED),
        ignore(S.CLOSED, DrainAll, "all models are gone"),
        *(on(S.OPEN, event, "_of_job", S.OPEN) for event in (*OF_CHECKS, *OF_ENGINES)),
        *(ignore((S.DRAINING, S.CLOSED), event, "no model is loaded any more") for event in OF_CHECKS),
        *(on(S.DRAINING, event, "_as_it_ends", S.DRAINING, S.CLOSED) for event in OF_ENGINES),
        *(ignore(S.CLOSED, event, "all models are gone") for event in OF_ENGINES),
        *(on(S.OPEN, event, "_of_timer", S.OPEN) for event in TIMERS),
        *(stay(S.DRAINING, event, "_of_timer") for event in (FreshOver, DrainOver)),
        *(never(S.DRAINING, event, "no model is in a state with such a timer") for event in (PatienceOver, IdleOver)),
        never(S.DRAINING, BackoffOver, "no failure is remembered at the end"),
        *(never(S.CLOSED, event, "all models are gone, and their timers") for event in TIMERS),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.OPEN: any_time("it waits for requests"),
        S.DRAINING: any_time("its models have a deadline"),
        S.CLOSED: ENDED,
    }

    def __init__(self, names: Iterable[str], *, max_loaded: int, max_waiting: int, patience: Patience) -> None:
        super().__init__(S.OPEN)
        self.models = {name: self._nest(Model(name, patience)) for name in names}
        self._max_waiting = max_waiting
        self._free = list(range(max_loaded))  # places, the one that is given next last
        self._waiting: dict[str, dict[int, Ask]] = {name: {} for name in self.models}  # by model, in order
        self._asked: dict[int, str] = {}  # the model that each of them waits for
        self._live: dict[int, tuple[str, int]] = {}  # the model and serial that each live request has
        self._line: dict[str, None] = {}  # models that wait for room, the next one first
        self._used: dict[str, None] = dict.fromkeys(self.models)  # the one first that was not used for longest

    @property
    def num_free(self) -> int:
        """Places that no model has."""
        return len(self._free)

    def waiting(self, name: str) -> list[int]:
        """The requests that wait for this model, the next one first."""
        return list(self._waiting[name])

    @property
    def live(self) -> Mapping[int, tuple[str, int]]:
        """The live requests: which model each has, and the serial of its engine."""
        return self._live

    # ---- requests ------------------------------------------------------------------------------------------------

    def _ask(self, event: Ask) -> RouterState:
        model, waiting = self.models[event.model], self._waiting[event.model]
        if model.state is ModelState.FAILED and not event.by_hand:
            self._refuse(event.request_id, "failed", model.failure, model.backoff_s)
        elif model.state in TAKING:
            self._grant(event.request_id, model)
        elif len(waiting) >= self._max_waiting:
            self._refuse(event.request_id, "full", f"{len(waiting)} requests wait for it to be loaded")
        else:
            waiting[event.request_id] = event
            self._asked[event.request_id] = event.model
            self._after(event.timeout_s, AskOver(event.request_id))
            self._make_room()
        return S.OPEN

    def _refuse_draining(self, event: Ask) -> StrEnum:
        self._refuse(event.request_id, "draining", "the server is shutting down")
        return self.state

    def _gone(self, event: Gone) -> StrEnum:
        request_id = event.request_id
        if request_id in self._live:
            name, serial = self._live.pop(request_id)
            self._tell(self.models[name], Left(serial))
            self._touch(name)
        elif request_id in self._asked:
            self._forget(request_id)
        if self.state is S.OPEN:
            self._make_room()
        return self.state

    def _ask_over(self, event: AskOver) -> RouterState:
        model = self.models[self._asked[event.request_id]]
        self._forget(event.request_id)
        self._send("client", Refused(event.request_id, "timeout", _why_not(model)))
        self._make_room()
        return S.OPEN

    def _grant(self, request_id: int, model: Model) -> None:
        self._live[request_id] = (model.name, model.serial)
        self._tell(model, Use())
        self._touch(model.name)
        self._send("client", Granted(request_id, model.serial))

    def _grant_waiting(self, model: Model) -> None:
        for request_id in list(self._waiting[model.name]):
            self._forget(request_id)
            self._grant(request_id, model)

    def _forget(self, request_id: int) -> None:
        """It does not wait any more."""
        del self._waiting[self._asked.pop(request_id)][request_id]
        self._drop(AskOver(request_id))

    def _refuse(self, request_id: int, reason: Reason, message: str, retry_after_s: float = RETRY_AFTER_S) -> None:
        self._send("client", Refused(request_id, reason, message, retry_after_s))

    def _refuse_waiting(self, name: str, reason: Reason, message: str, retry_after_s: float = RETRY_AFTER_S) -> None:
        for request_id in list(self._waiting[name]):
            self._forget(request_id)
            self._refuse(request_id, reason, message, retry_after_s)

    def _touch(self, name: str) -> None:
        """It was used just now."""
        del self._used[name]
        self._used[name] = None

    # ---- models --------------------------------------------------------------------------------------------------

    def _tell(self, model: Model, event: Any) -> None:
        """Let one model take `event`, and see what came of it: a place that is free, or requests that it takes."""
        place = model.place
        self._effects += model.handle(event)
        if place is not None and model.place is None:
            self._free.append(place)

    def _of_job(self, event: Checked | CheckFailed | Loaded | LoadFailed | Died | Stopped) -> RouterState:
        model = self.models[event.model]
        before = model.state
        self._tell(model, event)
        if model.state is before:
            return S.OPEN  # it was said of an engine that is gone, or of a check that was given up
        if model.state is ModelState.WAITING:
            self._line[model.name] = None
        elif model.state is ModelState.IDLE:
            self._touch(model.name)
            self._grant_waiting(model)
        elif model.state is ModelState.FAILED:
            self._refuse_waiting(model.name, "failed", model.failure, model.backoff_s)
        self._make_room()
        return S.OPEN

    def _of_timer(self, event: Any) -> StrEnum:
        self._tell(self.models[event.model], event)
        if self.state is S.OPEN:
            self._make_room()
        return self.state

    def _unload(self, event: Unload) -> RouterState:
        model = self.models[event.model]
        if model.state in COMING:
            self._refuse_waiting(model.name, "unloaded", "it was unloaded by hand")
        self._line.pop(model.name, None)
        self._tell(model, Leave(event.timeout_s))
        self._make_room()
        return S.OPEN

    def _make_room(self) -> None:
        """Bring models that requests wait for to where they are loaded, as far as there is room, or will be."""
        self._line_up()
        while self._line and self._free:
            model = self.models[next(iter(self._line))]
            del self._line[model.name]
            self._tell(model, Load(self._free.pop()))
        num_leaving = sum(model.state in LEAVING for model in self.models.values())
        for model in self._by_use(ModelState.YIELDING):
            if num_leaving > len(self._line):
                num_leaving -= 1
                self._tell(model, Resume())
                self._grant_waiting(model)
        for model in self._by_use(ModelState.IDLE):
            if num_leaving < len(self._line) and not model.is_fresh:
                num_leaving += 1
                self._tell(model, Yield())
        num_impatient = sum(self.models[name].is_impatient for name in self._line)
        for model in self._by_use(ModelState.READY):
            if num_leaving < num_impatient and not model.is_fresh:
                num_leaving += 1
                self._tell(model, Yield())

    def _line_up(self) -> None:
        """Who waits for room, and who does not any more."""
        for name, waiting in self._waiting.items():
            model = self.models[name]
            if waiting and model.state in (ModelState.ABSENT, ModelState.FAILED):
                self._tell(model, Want())
            elif not waiting and model.state is ModelState.WAITING:
                self._tell(model, Forgo())
                del self._line[name]

    def _by_use(self, state: ModelState) -> list[Model]:
        """The models in this state, the one first that was not used for longest."""
        return [self.models[name] for name in self._used if self.models[name].state is state]

    # ---- the end -------------------------------------------------------------------------------------------------

    def _drain_all(self, event: DrainAll) -> RouterState:
        self._line.clear()
        for model in self.models.values():
            self._refuse_waiting(model.name, "draining", "the server is shutting down")
            self._tell(model, Leave(event.timeout_s))
        return self._ending()

    def _as_it_ends(self, event: Loaded | LoadFailed | Died | Stopped) -> RouterState:
        model = self.models[event.model]
        self._tell(model, event)
        if model.state is ModelState.FAILED:
            self._tell(model, Leave(0.0))
        return self._ending()

    def _ending(self) -> RouterState:
        is_over = all(model.state not in RESIDENT for model in self.models.values())
        return S.CLOSED if is_over else S.DRAINING


def _why_not(model: Model) -> str:
    if model.state is ModelState.CHECKING:
        return "its files are still being looked at"
    if model.state is ModelState.WAITING:
        return "other models have all the room, and requests that they answer"
    if model.state is ModelState.LOADING:
        return "it is still being loaded"
    return "it is being unloaded, to be loaded again"
