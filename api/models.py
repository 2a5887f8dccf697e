"""Several models by name, each with an engine of its own that is loaded when it is asked for, and a share of memory.

    models = Models({"small": EngineConfig(model="a-folder"), "large": EngineConfig(model="another")}, max_loaded=1)
    models.open()
    await models.start()
    lease = await models.acquire("large", timeout_s=60.0)

Of `max_loaded` models that are loaded at once each has as large a share: `EngineConfig.memory_share` is divided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Generic

import msgspec

from novainfer.actors.router import EngineT, Lease, ModelRecord, ModelRouter
from novainfer.actors.routers.config import KvEventsConfig
from novainfer.arguments import must_be_seconds
from novainfer.config import EngineConfig
from novainfer.fsm.messages.errors import InvalidParameter, ModelLoadError, ModelNotFound, NovaInferError
from novainfer.fsm.models.model import Patience

if TYPE_CHECKING:
    from novainfer.tokens import ModelTokens, Tokenizers

__all__ = ["Lease", "ModelRecord", "Models"]


class Models(Generic[EngineT]):
    """Models that are loaded on demand, `max_loaded` at a time; `make_engine` makes the engine of one.

    `check`, called in a thread, raises what is wrong with the files of one: then no other has to make room for it.
    One that no request has had for `idle_unload_s` seconds goes (None: it stays until another needs its room).
    """

    def __init__(
        self,
        configs: Mapping[str, EngineConfig],
        make_engine: Callable[[EngineConfig], EngineT],
        *,
        max_loaded: int | None = None,
        idle_unload_s: float | None = None,
        check: Callable[[EngineConfig], None] = lambda config: None,
        unloaded: Callable[[], None] = lambda: None,
        make_tokens: Callable[[EngineConfig], ModelTokens] | None = None,
    ) -> None:
        if not configs:
            raise InvalidParameter("there must be a model at least", param="model")
        max_loaded = len(configs) if max_loaded is None else min(max_loaded, len(configs))
        if max_loaded < 1:
            raise InvalidParameter(f"max_loaded must be at least 1, not {max_loaded}", param="max_loaded_models")
        if idle_unload_s is not None:
            must_be_seconds("model_idle_unload_s", idle_unload_s)
        self.max_loaded = max_loaded
        self._configs = {
            name: msgspec.structs.replace(
                config,
                served_model_name=name,
                memory_share=config.memory_share / max_loaded,
                kv_events_config=_events_of(config, place, name),
            )
            for place, (name, config) in enumerate(configs.items())
        }
        _check_addresses(self._configs)
        self._router: ModelRouter[EngineT] = ModelRouter(
            self._configs,
            lambda name: make_engine(self._configs[name]),
            max_loaded=max_loaded,
            max_waiting=min(config.max_num_queued_reqs for config in configs.values()),
            patience=Patience(idle_s=idle_unload_s),
            check=lambda name: check(self._configs[name]),
            unloaded=unloaded,
        )
        self._make_tokens = make_tokens
        self._tokenizers: Tokenizers | None = None  # made when the first one is asked for: its imports are not cheap
        self._has_started = False
        self._is_closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in their order."""
        return tuple(self._configs)

    @property
    def is_ready(self) -> bool:
        """True when those that are loaded at the start have come up, or failed to, and requests are taken."""
        return self._has_started and not self._is_closed and not self._router.is_dead

    def open(
        self,
        going: Callable[[str, EngineT], None] | None = None,
        coming: Callable[[str, EngineT], Awaitable[None]] | None = None,
    ) -> None:
        """Take requests, on the running loop: they wait for their models from now on.

        `going` hears of each model that is unloaded, with its engine, before that is closed. `coming` has each that was
        loaded before any request: what it raises is a load that failed.
        """
        if going is not None:
            self._router.going = going
        if coming is not None:
            self._router.coming = coming
        self._router.open()

    async def start(self, timeout_s: float = 3600.0) -> None:
        """Behind `open`: load as many as have room, the first ones; raises `ModelLoadError` if none can be.

        One that fails is tried again when it is asked for, and harms no other.
        """
        first = self.names[: self.max_loaded]
        found = await asyncio.gather(*(self.load(name, timeout_s) for name in first), return_exceptions=True)
        errors = [error for error in found if error is not None]
        for error in errors:
            if not isinstance(error, NovaInferError):
                raise error
        if len(errors) == len(self.names):
            failures = [record.failure for record in self.models() if record.failure]
            raise ModelLoadError(failures[0] if failures else str(errors[0]))
        self._has_started = True

    async def acquire(self, name: str, timeout_s: float) -> Lease[EngineT]:
        """As `ModelRouter.acquire`; raises `ModelNotFound` for a name that is none."""
        return await self._router.acquire(self._known(name), timeout_s)

    def acquire_nowait(self, name: str) -> Lease[EngineT] | None:
        """As `acquire`, of a model that takes requests now; None where a request would have to wait for it."""
        return self._router.acquire_nowait(self._known(name))

    async def load(self, name: str, timeout_s: float) -> None:
        """Have a model loaded, by hand: also one that has just failed to be. Raises as `acquire`."""
        lease = await self._router.acquire(self._known(name), timeout_s, by_hand=True)
        lease.release()

    def tokens(self, name: str) -> AbstractAsyncContextManager[ModelTokens]:
        """The tokenizer of a model alone, for as long as it is used: no model is loaded for it, and none goes.

        Raises `ModelNotFound`, `ModelLoadError`, or `EngineOverloaded` where those of too many others are in use.
        """
        if self._tokenizers is None:
            from novainfer.tokens import ModelTokens, Tokenizers

            make = self._make_tokens or ModelTokens
            self._tokenizers = Tokenizers(lambda wanted: make(self._configs[wanted]))
        return self._tokenizers.use(self._known(name))

    def unload(self, name: str, timeout_s: float) -> None:
        """Let a model go, when the requests that have it have ended, after `timeout_s` at the latest."""
        self._router.unload(self._known(name), timeout_s)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests; those here may finish for `timeout_s` seconds; then all engines close."""
        self._is_closed = True
        await self._router.drain(timeout_s)

    async def aclose(self) -> None:
        """End everything now."""
        self._is_closed = True
        await self._router.aclose()
        if self._tokenizers is not None:
            await self._tokenizers.aclose()

    def engines(self) -> dict[str, EngineT]:
        """The engines that are loaded, by their models."""
        return self._router.engines()

    def kv_event_sources(self) -> dict[int, KvEventsConfig]:
        """Where routers are told, or will be, which prefixes of each model can be found, by rank; empty: nowhere."""
        found = {}
        for config in self._configs.values():
            if isinstance(at := config.kv_events_config, KvEventsConfig) and at.is_on:
                found[at.rank] = at
        return found

    def models(self) -> list[ModelRecord]:
        """All models at this moment."""
        return self._router.models()

    def _known(self, name: str) -> str:
        if name not in self._configs:
            raise ModelNotFound(f"The model {name!r} is not served here: use {' or '.join(self.names)}", param="model")
        return name


def _events_of(config: EngineConfig, place: int, name: str) -> KvEventsConfig | None:
    """Each model tells routers of its prefixes at an address of its own: one's are not another's."""
    if config.kv_events_config is None:
        return None
    return KvEventsConfig.of(config.kv_events_config).for_engine(place).for_model(name)


def _check_addresses(configs: Mapping[str, EngineConfig]) -> None:
    """Raise `InvalidParameter` where two of them would listen at one address: the second could never be loaded."""
    taken: dict[str, str] = {}
    for name, config in configs.items():
        at = config.kv_events_config
        if not isinstance(at, KvEventsConfig) or not at.is_on:
            continue
        for field in ("endpoint", "replay_endpoint"):
            address = getattr(at, field)
            if address is None or address.endswith(":0"):
                continue
            whose = f"{field} of {name!r}"
            if address in taken:
                message = (
                    f"kv_events_config: {address!r} would be the {whose} and the {taken[address]}: leave as many ports "
                    "between endpoint and replay_endpoint as there are models"
                )
                raise InvalidParameter(message, param="kv_events_config")
            taken[address] = whose
