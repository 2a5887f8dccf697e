"""What all handlers share: the engine once it is there, settings, metrics, the directory of live requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence, Sized
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Protocol

import msgspec

from novainfer import (
    EngineClosed,
    EngineDraining,
    InvalidParameter,
    ModelLoadError,
    ModelNotFound,
    ModelUnavailable,
    RequestTimeout,
)
from novainfer.fsm.parsing.formats import REASONING_PARSERS, TOOL_CALL_PARSERS, Formats
from novainfer.inspection import Subscription, Watcher
from novainfer.models import Lease, Models
from novainfer.server.directory import RequestDirectory
from novainfer.server.engine import ServedEngine
from novainfer.server.http.clients import Clients, Unread
from novainfer.server.http.errors import RETRY_AFTER_S, ModelLoading, PermissionDenied, one_of
from novainfer.server.http.exchange import Viewer
from novainfer.server.http.front import Front
from novainfer.server.http.origins import Origins
from novainfer.server.http.turns import BodyTurns
from novainfer.server.journal.journal import Journal
from novainfer.server.journal.records import Stored
from novainfer.server.keys.quotas import Quotas
from novainfer.server.keys.ring import KeyRing
from novainfer.server.keys.spending import Spending
from novainfer.server.left_open import LeftOpen
from novainfer.server.lost import LostSessions
from novainfer.server.metrics import Metrics
from novainfer.server.request_log import log_generation
from novainfer.server.served import ServedModel, ServedTokens
from novainfer.server.settings import ServerSettings
from novainfer.server.store import ResponseStore
from novainfer.server.tracing import Tracing
from novainfer.server.waiting import ModelWaits, Returning, Waiter
from novainfer.server.work import Work

if TYPE_CHECKING:
    from novainfer.server.openai.kept import Kept
    from novainfer.server.operate.profile import Profile

log = logging.getLogger("novainfer.server")


def package_version() -> str:
    """The installed version of NovaInfer."""
    try:
        return version("novainfer")
    except PackageNotFoundError:  # run from a source tree
        return "0+unknown"


class OfViewer(Protocol):
    """What is for a model: an exchange, or what is left of one."""

    @property
    def viewer(self) -> Viewer: ...
    def take(self, model: ServedModel) -> None: ...


class Service:
    """State of one app; `engine` is None until its configuration was accepted, and not ready until it is warm.

    A server of several models has `models` instead, and requests take theirs by `model_for`.
    """

    def __init__(self, engine: ServedEngine | None, settings: ServerSettings) -> None:
        self.engine = engine
        self.models: Models[ServedEngine] | None = None  # where there are several
        self.settings = settings
        self.keys = KeyRing(settings)
        self.quotas = Quotas(self.keys)
        self.spending = Spending(settings)
        self.lost = LostSessions()
        self.origins = Origins(settings.allowed_origins)
        self.metrics = Metrics()
        self.live = RequestDirectory()
        self.clients = Clients(settings)
        self.waits = ModelWaits(self.clients, self.quotas, self.live)
        self.turns = BodyTurns()
        self.tracing: Tracing | None = None
        self.profile: Profile | None = None  # that is being made
        self.address = (settings.host, settings.port)  # where requests are taken
        self.front: Front | None = None  # where HTTP is spoken
        self.is_draining = False
        self.store = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes, settings.stored_ttl_s)
        self.background: set[asyncio.Task[None]] = set()  # responses that are made without their client
        self.journal: Journal | None = None  # what is asked and answered, on a disk
        self.kept: dict[tuple[str, str], Kept] = {}  # answers that go into it, by id and owner, while they are made
        self.beginning: dict[tuple[str, str], asyncio.Event] = {}  # those whose request may be repeated, until then
        self.is_resuming = settings.journal is not None  # until what the journal holds is known
        self.returning: dict[tuple[str, str], Returning] = {}  # answers that go on when their model is there
        self.left_open = LeftOpen(settings.journal_ttl_s)  # answers that go on when their client comes back
        self.go_on: Callable[[Stored], None] | None = None  # lets one of those do so, or end
        self.feeds: set[Subscription | Watcher] | None = set()  # clients that listen or watch; None: no more are taken
        self.was_ready = False
        self.began_at = datetime.now(UTC).replace(microsecond=0)
        self._longest = 0  # context of a model that was loaded
        self.version = package_version()

    def use_journal(self, journal: Journal) -> None:
        """Let what is asked, answered and used outlast the server."""
        self.journal = journal
        self.quotas.keep = self.spending.keep = journal.count

    async def has_returned(self, name: tuple[str, str]) -> None:
        """Return when the answer of this id and owner does not wait for its model any more, if it ever did."""
        if (returning := self.returning.get(name)) is not None:
            await returning.is_over.wait()

    def has_begun(self, name: tuple[str, str]) -> None:
        """The answer of this id and owner is found from now on, if it ever is: who waits for that goes on."""
        if (begun := self.beginning.pop(name, None)) is not None:
            begun.set()

    @property
    def is_ready(self) -> bool:
        """True when a request sent now would be taken."""
        host = self.models if self.models is not None else self.engine
        return host is not None and host.is_ready and not self.is_draining and not self.is_resuming

    def tell_of(self, work: Work, owner: str) -> None:
        """Tell of a generation of `owner`'s that has ended behind its request."""
        if self.settings.access_log:
            record = self.keys.record(owner)
            log_generation(work, record.name if record is not None else None)
        if self.tracing is not None:
            self.tracing.tell_generation(work)

    @property
    def connections(self) -> Sized:
        """Those that are open."""
        return self.front.connections if self.front is not None else ()

    def ready_engine(self, name: str | None = None) -> ServedEngine:
        """The engine of the model `name`, which may be left out where there is one.

        Raises `EngineDraining`, `ModelLoading` or `ModelUnavailable` when it takes no requests, and `ModelNotFound`.
        """
        self.check_open()
        if self.models is not None:
            return self._engine_of(self.models, name)
        engine = self.engine
        assert engine is not None, "it is open without an engine"
        if name is not None and name != engine.model_info.name:
            raise not_found(name, [engine.model_info.name])
        return engine

    def any_engine(self, name: str | None = None) -> ServedEngine | None:
        """As `ready_engine`, whatever state the engine is in: it is looked at most when it is not well."""
        return self.engine if self.models is None else self._engine_of(self.models, name)

    def engines(self) -> dict[str, ServedEngine]:
        """The engines that are there, by their models; "" is the only one of a server."""
        if self.models is not None:
            return self.models.engines()
        return {} if self.engine is None else {"": self.engine}

    def check_open(self) -> None:
        """Raise `EngineDraining`, `EngineClosed` or `ModelLoading` when no requests are taken."""
        if self.is_draining:
            raise EngineDraining("The server is shutting down: send the request to another one, or try again later")
        if self.is_ready:
            return
        if self.was_ready:
            raise EngineClosed("The engine has stopped; the log of the server says why")
        raise ModelLoading("The model is still loading: try again in a moment")

    def _engine_of(self, models: Models[ServedEngine], name: str | None) -> ServedEngine:
        assert name is not None, "where there are several, a question is about one of them"
        if name not in models.names:
            raise not_found(name, models.names)
        if (engine := models.engines().get(name)) is None:
            raise ModelUnavailable(f"The model {name!r} is not loaded now", retry_after_s=RETRY_AFTER_S)
        return engine

    async def note_coming(self, name: str, engine: ServedEngine) -> None:
        """A model has come up: what its answers depend on is known before the first of them is written down."""
        if self.journal is not None:
            self.journal.fingerprints[name] = await engine.fingerprint()

    def note_going(self, name: str, engine: ServedEngine) -> None:
        """One of several models is unloaded, with what it keeps of conversations."""
        if engine.is_ready:
            self.lost.note(name, [(record.tenant, record.session_id) for record in engine.sessions()])

    def unread(self, client: str) -> Unread:
        """A watch of one answer's sends to `client`."""
        return Unread(self.clients, client, self.settings.stall_timeout_s + self.settings.stall_grace_s)

    async def end_background(self, timeout_s: float) -> None:
        """Let responses in the background end by themselves for a while, and then end them."""
        if self.background:
            await asyncio.wait(self.background, timeout=timeout_s)
        tasks = list(self.background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def end_feeds(self) -> None:
        """Let the event feeds end: they would keep their connections open for ever."""
        feeds, self.feeds = self.feeds or set(), None
        for subscription in feeds:
            subscription.end()

    def may_use(self, viewer: Viewer, model: str) -> bool:
        """Whether the requests of this key may name `model`."""
        record = self.keys.record(viewer.owner)
        return record is None or record.may_use(model)

    def model_now(self, exchange: OfViewer, name: str | None) -> ServedModel | None:
        """The model that `exchange` is for from now on: `name`, or the only one where that is left out.

        None where it is one of several, and would have to be loaded. Raises `ModelNotFound`; `PermissionDenied` where
        this key may not use it; and what `check_open` raises.
        """
        self.check_model(name, exchange.viewer)
        if self.models is None:
            return self._served(exchange, self.ready_engine(), None)
        lease = self.models.acquire_nowait(self._named(self.models, name))
        return None if lease is None else self._served(exchange, lease.engine, lease)

    def loaded_model(self, exchange: OfViewer, name: str | None) -> ServedModel:
        """As `model_now`; raises `ModelUnavailable` where it would have to be loaded."""
        if (model := self.model_now(exchange, name)) is None:
            raise ModelUnavailable(f"The model {name!r} is not loaded now", retry_after_s=RETRY_AFTER_S)
        return model

    async def model_for(
        self, exchange: OfViewer, name: str | None, waiter: Waiter, within_s: float | None = None
    ) -> ServedModel:
        """As `model_now`; one of several is loaded if need be, and meanwhile it is `waiter` that waits.

        Raises also `RequestTimeout` where that takes longer than `within_s`, and `ModelUnavailable` where it cannot be
        had now; what `ModelWaits.until` raises.
        """
        if (model := self.model_now(exchange, name)) is not None:
            return model
        assert self.models is not None, "the only model is there, or nothing is"
        name = self._named(self.models, name)
        acquire = partial(self._lease, self.models, name, within_s)
        try:
            lease = await self.waits.until(acquire, name, waiter)
        except ModelUnavailable as error:
            if exchange.viewer.is_admin:
                raise
            raise ModelUnavailable(error.told, retry_after_s=error.retry_after_s) from None
        return self._served(exchange, lease.engine, lease)

    async def model_again(self, exchange: OfViewer, name: str, waiter: Waiter, within_s: float) -> ServedModel:
        """As `model_for`, of one of several models, for what another server has let in: it waits for as long as it may.

        `EngineOverloaded` says that too many wait for this model.
        """
        if (model := self.model_now(exchange, name)) is not None:
            return model
        assert self.models is not None, "the only model is there, or nothing is"
        try:
            lease = await self.waits.until(partial(self.models.acquire, name, within_s), name, waiter)
        except ModelUnavailable as error:
            raise ModelUnavailable(error.told, retry_after_s=error.retry_after_s) from None
        return self._served(exchange, lease.engine, lease)

    @asynccontextmanager
    async def tokens_for(self, exchange: OfViewer, name: str | None) -> AsyncIterator[ServedTokens]:
        """What makes tokens for this model: its engine, or, of one that is not loaded, its tokenizer alone.

        No model is loaded for it, and none makes room. Raises as `model_now`; `ModelUnavailable` where there is no such
        tokenizer; `EngineOverloaded` where those of too many models are in use.
        """
        if (model := self.model_now(exchange, name)) is not None:
            yield self.tokens_of(model.engine)
            return
        assert self.models is not None, "the only model is there, or nothing is"
        async with self.tokenizer_of(self.models, self._named(self.models, name)) as found:
            yield found

    def tokens_of(self, engine: ServedEngine) -> ServedTokens:
        """What an engine makes tokens with."""
        return ServedTokens(engine, self.formats_of(engine), engine.vocabulary, engine.model_info.max_model_len)

    @asynccontextmanager
    async def tokenizer_of(self, models: Models[ServedEngine], name: str) -> AsyncIterator[ServedTokens]:
        """The tokenizer of one of several models alone; raises as `tokens_for`."""
        async with AsyncExitStack() as stack:
            try:
                found = await stack.enter_async_context(models.tokens(name))
            except ModelLoadError as error:
                log.error("the tokenizer of the model %s could not be loaded: %s", name, error.message)
                message = f"The tokenizer of the model {name!r} could not be loaded; the log says why"
                raise ModelUnavailable(message, retry_after_s=RETRY_AFTER_S) from None
            yield ServedTokens(found, self._told(found.formats), found.vocabulary, found.max_model_len)

    @staticmethod
    def _named(models: Models[ServedEngine], name: str | None) -> str:
        return name if name is not None else models.names[0]

    def _served(self, exchange: OfViewer, engine: ServedEngine, lease: Lease[ServedEngine] | None) -> ServedModel:
        model = ServedModel(engine, self.formats_of(engine), self.metrics.of(engine.model_info.name), lease)
        exchange.take(model)
        return model

    async def _lease(self, models: Models[ServedEngine], name: str, within_s: float | None) -> Lease[ServedEngine]:
        most_s = self.settings.model_wait_timeout_s
        try:
            return await models.acquire(name, most_s if within_s is None else min(within_s, most_s))
        except RequestTimeout as error:
            if within_s is not None and within_s <= most_s:
                raise
            raise ModelUnavailable(error.message, retry_after_s=RETRY_AFTER_S) from None

    def check_model(self, name: str | None, viewer: Viewer) -> None:
        """Raise `ModelNotFound` unless `name` is a served model (or left out, where there is only one).

        Raises `PermissionDenied` where this key may not use it; of other models it hears nothing.
        """
        if self.models is not None:
            if self.is_draining or self.is_resuming:
                self.check_open()
            served = self.models.names
        else:
            served = (self.ready_engine().model_info.name,)
        if name is None and len(served) > 1:
            allowed = [one for one in served if self.may_use(viewer, one)]
            raise InvalidParameter(
                f"model must be {one_of(allowed)}" if allowed else "model must be given", param="model"
            )
        self.check_named(name if name is not None else served[0], served, viewer)

    @property
    def served(self) -> Sequence[str]:
        """The names of all models; none while the only one is loaded for the first time, which says its name then."""
        if self.models is not None:
            return self.models.names
        return () if self.engine is None or not self.was_ready else (self.engine.model_info.name,)

    def check_named(self, wanted: str, served: Sequence[str], viewer: Viewer) -> None:
        """Raise `PermissionDenied` where this key may not use the model `wanted`, and `ModelNotFound`."""
        if not self.may_use(viewer, wanted):
            message = f"The key {viewer.name} may not use the model {wanted[:80]!r}"
            raise PermissionDenied(f"{message}: GET /v1/models lists those that it may", param="model")
        if wanted not in served:
            raise not_found(wanted, [one for one in served if self.may_use(viewer, one)])

    def formats_of(self, engine: ServedEngine) -> Formats:
        """How its model calls tools and reasons, unless the operator knows better."""
        return self._told(engine.model_info.formats)

    def _told(self, formats: Formats) -> Formats:
        if (asked := self.settings.tool_call_parser) is not None:
            formats = msgspec.structs.replace(formats, tool_calls=TOOL_CALL_PARSERS[asked])
        if (asked := self.settings.reasoning_parser) is not None:
            formats = msgspec.structs.replace(formats, reasoning=REASONING_PARSERS[asked])
        return formats

    @property
    def body_bytes_max(self) -> int:
        """The body limit in bytes, by the longest context that is known; while models load, that of a short one."""
        for engine in self.engines().values() if self.is_ready else ():
            self._longest = max(self._longest, engine.model_info.max_model_len)
        return self.settings.body_bytes_max(self._longest)


def not_found(name: str, served: Sequence[str]) -> ModelNotFound:
    """That `name` is not served, and what is."""
    use = (
        f"use {one_of(map(repr, served))} (GET /v1/models lists it)"
        if len(served) == 1
        else (f"use {one_of(map(repr, served))}" if served else "GET /v1/models lists those that are")
    )
    return ModelNotFound(f"The model {name[:200]!r} is not served here: {use}", param="model")
