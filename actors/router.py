"""The router as an actor: it owns the engines of several models, and gives each request the one that it needs.

It exists because models come and go while requests are answered: what a machine decides of them at one moment takes
engines seconds to do, and each of them may fail alone. An engine is made by `make`, and is told four things only: to
start, to drain, to close, and whether it takes requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from novainfer.actors.core.mailbox import Actor
from novainfer.actors.core.turns import Turns
from novainfer.fsm.core.machine import Machine, Observer
from novainfer.fsm.messages.errors import (
    EngineDead,
    EngineDraining,
    EngineOverloaded,
    ModelUnavailable,
    NovaInferError,
    RequestTimeout,
)
from novainfer.fsm.messages.params import DURATION_S_MAX
from novainfer.fsm.models.model import (
    LOADED,
    TAKING,
    Checked,
    CheckFailed,
    CheckFiles,
    Died,
    Loaded,
    LoadEngine,
    LoadFailed,
    Model,
    ModelState,
    Patience,
    StopEngine,
    Stopped,
)
from novainfer.fsm.models.router import Ask, DrainAll, Gone, Granted, Refused, Router, RouterState, Unload

logger = logging.getLogger(__name__)

ALIVE_CHECK_S = 0.5  # between looks at whether engines live


class Loadable(Protocol):
    """An engine, as the router needs it; each method is as in `novainfer.Engine`."""

    @property
    def is_ready(self) -> bool: ...
    async def start(self) -> None: ...
    async def drain(self, timeout_s: float) -> None: ...
    async def aclose(self) -> None: ...


EngineT = TypeVar("EngineT", bound=Loadable)


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One model at one moment: its state, its place (a share of memory), and counts that only grow.

    `num_live` requests have it, and `num_waiting` wait for it; `failure` is what its last load or its engine died of.
    """

    name: str
    state: ModelState
    place: int | None
    num_live: int
    num_waiting: int
    failure: str
    loads_total: int
    failures_total: int
    unloads_total: int


class Lease(Generic[EngineT]):
    """A model that a request has: its engine stays as long as anything holds this."""

    def __init__(self, name: str, engine: EngineT, end: Callable[[], None]) -> None:
        self.name = name
        self.engine = engine
        self._end = end
        self._num_holders = 1

    def hold(self) -> None:
        """One more holds it."""
        self._num_holders += 1

    def release(self) -> None:
        """One less does; the last one gives it back."""
        self._num_holders -= 1
        if not self._num_holders:
            self._end()


class ModelRouter(Generic[EngineT]):
    """Models by name, and their engines, on the loop that `open` runs on. `make` and `check` are called in a thread.

    `check` raises what is wrong with a model's files; it is called before another model has to make room for this one.
    """

    def __init__(
        self,
        names: Iterable[str],
        make: Callable[[str], EngineT],
        *,
        max_loaded: int,
        max_waiting: int,
        patience: Patience,
        check: Callable[[str], None] = lambda name: None,
        unloaded: Callable[[], None] = lambda: None,
    ) -> None:
        self._router = Router(names, max_loaded=max_loaded, max_waiting=max_waiting, patience=patience)
        self._make = make
        self._check = check
        self._unloaded = unloaded  # hears that nothing is left of an engine
        self._actor = Actor("router", self._router, route=self._to_client, start=self._start, died=self._died)
        self._engines: dict[tuple[str, int], EngineT] = {}  # by model and serial
        self._loading: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._checking: set[asyncio.Task[None]] = set()
        self._answers: dict[int, tuple[str, asyncio.Future[EngineT]]] = {}  # what each request waits for
        self._told: set[tuple[str, int]] = set()  # engines that are known to have died
        self._num_asked = 0
        self._closed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self.coming: Callable[[str, EngineT], Awaitable[None]] = _nothing  # has each engine before requests do
        self.going: Callable[[str, EngineT], None] = lambda name, engine: (
            None
        )  # hears of each engine before it is closed
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in self._router.models}
        self._error: str | None = None  # what the actor died of
        observer = _Changes(self._changed)
        for machine in (self._router, *self._router.models.values()):
            machine.observer = observer

    # ---- life ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take requests, on the running loop."""
        loop = asyncio.get_running_loop()
        self._actor.open(Turns(loop))
        self._watch = loop.create_task(self._watch_engines())

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests; those that have a model may finish for `timeout_s` seconds; then all engines close."""
        if self._watch is None:
            return
        if not self.is_dead:
            self._tell(DrainAll(min(timeout_s, DURATION_S_MAX)))
        await self._closed.wait()
        for task in (self._watch, *self._checking):
            task.cancel()
        await asyncio.gather(self._watch, *self._checking, *self._stopping, return_exceptions=True)
        self._actor.close()

    async def aclose(self) -> None:
        """End everything now."""
        await self.drain(0.0)

    @property
    def is_dead(self) -> bool:
        """True when a bug has ended it: it gives nobody a model any more."""
        return self._error is not None

    # ---- requests ------------------------------------------------------------------------------------------------

    async def acquire(self, name: str, timeout_s: float, *, by_hand: bool = False) -> Lease[EngineT]:
        """`name`, whose engine takes requests, loaded if need be; give it back with `release`.

        Raises `ModelUnavailable` with the reason, `RequestTimeout` after `timeout_s`, `EngineOverloaded` or
        `EngineDraining`. One that is cancelled waits no more.
        """
        request_id, answer = self._ask(name)
        try:
            self._tell(Ask(request_id, name, timeout_s, by_hand))
            engine = await answer
        except asyncio.CancelledError:
            self._give_back(request_id)
            raise
        finally:
            del self._answers[request_id]
        return self._leased(name, engine, request_id)

    def acquire_nowait(self, name: str) -> Lease[EngineT] | None:
        """`name`, if its engine takes requests now; None where it is not loaded, or goes."""
        if self._router.models[name].state not in TAKING or self._router.state is not RouterState.OPEN:
            return None
        request_id, answer = self._ask(name)
        try:
            self._tell(Ask(request_id, name, 0.0))  # answered at once
            return self._leased(name, answer.result(), request_id)
        finally:
            del self._answers[request_id]

    def _ask(self, name: str) -> tuple[int, asyncio.Future[EngineT]]:
        """A number for one more request of `name`, and what will hold the answer to it."""
        self._num_asked += 1
        answer: asyncio.Future[EngineT] = asyncio.get_running_loop().create_future()
        self._answers[self._num_asked] = (name, answer)
        return self._num_asked, answer

    def _leased(self, name: str, engine: EngineT, request_id: int) -> Lease[EngineT]:
        return Lease(name, engine, lambda: self._give_back(request_id))

    def unload(self, name: str, timeout_s: float) -> None:
        """Let a model go, when the requests that have it have ended, after `timeout_s` at the latest."""
        self._tell(Unload(name, min(timeout_s, DURATION_S_MAX)))

    def _tell(self, event: Any) -> None:
        """The router takes it at once: a request of a model that is there waits for no turn."""
        if self._error is None:
            try:
                self._actor.handle(event)
                return
            except Exception as error:
                self._died("router", error)
        raise EngineDead(self._error or "")

    def _give_back(self, request_id: int) -> None:
        if self._error is None:
            self._tell(Gone(request_id))

    def _to_client(self, to: str, event: Granted | Refused, urgent: bool) -> None:
        name, answer = self._answers[event.request_id]
        if answer.done():  # cancelled, of which its task has not heard yet
            return
        if isinstance(event, Granted):
            answer.set_result(self._engines[name, event.serial])
        else:
            answer.set_exception(_error_of(event))

    # ---- engines -------------------------------------------------------------------------------------------------

    def _start(self, job: CheckFiles | LoadEngine | StopEngine) -> None:
        if isinstance(job, LoadEngine):
            self._loading[job.model, job.serial] = asyncio.create_task(self._load(job))
            return
        if isinstance(job, CheckFiles):
            task, tasks = asyncio.create_task(self._look(job)), self._checking
        else:
            task, tasks = asyncio.create_task(self._stop(job)), self._stopping
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _look(self, job: CheckFiles) -> None:
        try:
            await asyncio.to_thread(self._check, job.model)
        except Exception as error:
            _log_failure(job.model, error)
            self._actor.tell(CheckFailed(job.model, job.serial, _sentence(error)))
        else:
            self._actor.tell(Checked(job.model, job.serial))

    async def _load(self, job: LoadEngine) -> None:
        key, loop = (job.model, job.serial), asyncio.get_running_loop()
        began_s = loop.time()
        logger.info("model %s: loading", job.model)
        try:
            engine = self._engines[key] = await asyncio.to_thread(self._make, job.model)
            await engine.start()
            await self.coming(job.model, engine)
        except Exception as error:
            _log_failure(job.model, error)
            if key in self._engines:
                await self._close(job.model, self._engines.pop(key))
            self._actor.tell(LoadFailed(job.model, job.serial, _sentence(error)))
        else:
            took_s = loop.time() - began_s
            logger.info("model %s: loaded in %.1f s", job.model, took_s)
            self._actor.tell(Loaded(job.model, job.serial, took_s))
        finally:
            self._loading.pop(key, None)

    async def _stop(self, job: StopEngine) -> None:
        key = (job.model, job.serial)
        if (loading := self._loading.pop(key, None)) is not None:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        if key in self._engines:
            await self._close(job.model, self._engines.pop(key))
        self._told.discard(key)
        logger.info("model %s: unloaded", job.model)
        self._unloaded()
        self._actor.tell(Stopped(job.model, job.serial))

    async def _close(self, name: str, engine: EngineT) -> None:
        """End `engine` and what it still does; whatever is wrong with it, it is not kept."""
        try:
            self.going(name, engine)
            if engine.is_ready:
                await engine.drain(0.0)
            await engine.aclose()
        except Exception:
            logger.exception("model %s: its engine could not be closed", name)

    async def _watch_engines(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_CHECK_S)
            for (name, serial), engine in list(self._engines.items()):
                model = self._router.models[name]
                is_loaded = model.state in LOADED and model.serial == serial
                if is_loaded and not engine.is_ready and (name, serial) not in self._told:
                    self._told.add((name, serial))
                    logger.error("model %s: its engine died", name)
                    self._actor.tell(Died(name, serial, "its engine died; the log says why"))

    # ---- looking in ----------------------------------------------------------------------------------------------

    def engines(self) -> dict[str, EngineT]:
        """The engines that are loaded, by their models, also of those that go."""
        found = {}
        for name, model in self._router.models.items():
            engine = self._engines.get((name, model.serial))
            if engine is not None and model.state in LOADED:
                found[name] = engine
        return found

    def models(self) -> list[ModelRecord]:
        """All models, in their order."""
        return [
            ModelRecord(
                name=name,
                state=ModelState(model.state),
                place=model.place,
                num_live=model.num_live,
                num_waiting=len(self._router.waiting(name)),
                failure=model.failure,
                loads_total=self._counts[name]["loads"],
                failures_total=self._counts[name]["failures"],
                unloads_total=self._counts[name]["unloads"],
            )
            for name, model in self._router.models.items()
        ]

    def _changed(self, machine: Machine, before: Any) -> None:
        if isinstance(machine, Model):
            counts, after = self._counts[machine.name], machine.state
            counts["loads"] += after is ModelState.LOADING
            counts["failures"] += after is ModelState.FAILED
            counts["unloads"] += before is ModelState.STOPPING and after is ModelState.ABSENT
        elif machine.state is RouterState.CLOSED:
            self._closed.set()

    def _died(self, name: str, error: BaseException) -> None:
        logger.critical("the router died", exc_info=error)
        self._error = f"the router of models died: {error}"
        for _, answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDead(self._error))
        for engine in self._engines.values():
            task = asyncio.create_task(engine.aclose())
            self._stopping.add(task)
        self._closed.set()


class _Changes(Observer):
    """Hears of each state that is left."""

    def __init__(self, changed: Callable[[Machine, Any], None]) -> None:
        self._changed = changed

    def took(self, machine: Machine, before: Any, event: Any) -> None:
        if machine.state is not before:
            self._changed(machine, before)


def _error_of(event: Refused) -> NovaInferError:
    message = event.message
    if event.reason == "full":
        return EngineOverloaded(f"The queue for this model is full: {message}", retry_after_s=event.retry_after_s)
    if event.reason == "draining":
        return EngineDraining("The server is shutting down: send the request to another one, or try again later")
    if event.reason == "timeout":
        return RequestTimeout(f"The model could not be had in time: {message}")
    if event.reason == "failed":
        told = "The model could not be loaded; the log says why"
        return ModelUnavailable(
            f"The model could not be loaded: {message}", retry_after_s=event.retry_after_s, told=told
        )
    return ModelUnavailable(f"The model is not loaded: {message}", retry_after_s=event.retry_after_s)


async def _nothing(name: str, engine: object) -> None:
    """What nobody wants to hear of."""


def _log_failure(name: str, error: Exception) -> None:
    """Tell the operator all of it; where it is none of ours, with where it came from."""
    logger.error("model %s could not be loaded: %s", name, error, exc_info=not isinstance(error, NovaInferError))


def _sentence(error: Exception) -> str:
    """What clients may read of it: of an error that is not ours its name only."""
    return error.message if isinstance(error, NovaInferError) else f"{type(error).__name__}; the log says why"
