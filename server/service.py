"""What all handlers share: the engine once it is there, settings, metrics, the directory of live requests."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import msgspec

from novainfer import EngineClosed, EngineDraining, ModelNotFound
from novainfer.fsm.parsing.formats import REASONING_PARSERS, TOOL_CALL_PARSERS, Formats
from novainfer.inspection import Subscription
from novainfer.server.directory import RequestDirectory
from novainfer.server.engine import ServedEngine
from novainfer.server.http.clients import Clients, Unread
from novainfer.server.http.errors import ModelLoading, PermissionDenied
from novainfer.server.http.exchange import Viewer
from novainfer.server.http.origins import Origins
from novainfer.server.http.turns import BodyTurns
from novainfer.server.keys.quotas import Quotas
from novainfer.server.keys.ring import KeyRing
from novainfer.server.metrics import Metrics
from novainfer.server.settings import ServerSettings
from novainfer.server.store import ResponseStore
from novainfer.server.tracing import Tracing

if TYPE_CHECKING:
    from novainfer.server.operate.profile import Profile


def package_version() -> str:
    """The installed version of NovaInfer."""
    try:
        return version("novainfer")
    except PackageNotFoundError:  # run from a source tree
        return "0+unknown"


class Service:
    """State of one app; `engine` is None until its configuration was accepted, and not ready until it is warm."""

    def __init__(self, engine: ServedEngine | None, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.keys = KeyRing(settings)
        self.quotas = Quotas(self.keys)
        self.origins = Origins(settings.allowed_origins)
        self.metrics = Metrics()
        self.live = RequestDirectory()
        self.clients = Clients(settings)
        self.turns = BodyTurns()
        self.tracing: Tracing | None = None
        self.profile: Profile | None = None  # that is being made
        self.address = (settings.host, settings.port)  # where requests are taken
        self.connections: Collection[object] = ()  # those that are open
        self.is_draining = False
        self.store = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes, settings.stored_ttl_s)
        self.background: set[asyncio.Task[None]] = set()  # responses that are made without their client
        self.feeds: set[Subscription] | None = set()  # clients that listen to events; None: no more are taken
        self.was_ready = False
        self.version = package_version()

    @property
    def is_ready(self) -> bool:
        """True when a request sent now would be taken."""
        return self.engine is not None and self.engine.is_ready and not self.is_draining

    def ready_engine(self) -> ServedEngine:
        """The engine; raises `EngineDraining` or `ModelLoading` when it takes no requests."""
        if self.is_draining:
            raise EngineDraining("The server is shutting down: send the request to another one, or try again later")
        if self.engine is not None and self.engine.is_ready:
            return self.engine
        if self.was_ready:
            raise EngineClosed("The engine has stopped; the log of the server says why")
        raise ModelLoading("The model is still loading: try again in a moment")

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

    def check_model(self, name: str | None, viewer: Viewer) -> None:
        """Raise `ModelNotFound` unless `name` is the served model (or left out, as there is only one).

        Raises `PermissionDenied` where this key may not use it; of other models it hears nothing.
        """
        served = self.ready_engine().model_info.name
        if not self.may_use(viewer, name if name is not None else served):
            message = f"The key {viewer.name} may not use the model {name if name is not None else served!r}"
            raise PermissionDenied(f"{message}: GET /v1/models lists those that it may", param="model")
        if name is not None and name != served:
            raise ModelNotFound(
                f"The model {name!r} is not served here: use {served!r} (GET /v1/models lists it)", param="model"
            )

    @property
    def formats(self) -> Formats:
        """How the model calls tools and reasons, unless the operator knows better."""
        formats = self.ready_engine().model_info.formats
        if (asked := self.settings.tool_call_parser) is not None:
            formats = msgspec.structs.replace(formats, tool_calls=TOOL_CALL_PARSERS[asked])
        if (asked := self.settings.reasoning_parser) is not None:
            formats = msgspec.structs.replace(formats, reasoning=REASONING_PARSERS[asked])
        return formats

    @property
    def body_bytes_max(self) -> int:
        """The body limit in bytes; while the model loads, that of a short context."""
        max_model_len = self.engine.model_info.max_model_len if self.is_ready and self.engine is not None else 0
        return self.settings.body_bytes_max(max_model_len)
