"""Where routers are told which prefixes can be found. Fields, defaults and meanings: vLLM's `--kv-events-config`."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from novainfer.fsm.messages.errors import InvalidParameter

PARAM = "kv_events_config"
AT_MOST = 1 << 24  # batches and messages: more are a mistake, and gigabytes
RANKS_MAX = 1 << 12
PORT_MAX = 65535
_TCP = re.compile(r"tcp://.+:(\d{1,5}|\*)")  # ZeroMQ itself reads 5557 of 5557x


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether and where events are published; raises `InvalidParameter` for what cannot be.

    `endpoint` is listened at where it is `tcp://*:5557` or the like, and connected to where it names a host, as with
    vLLM; `bind` says so itself, as for an address of this host. At `replay_endpoint`, which is always listened at, the
    last `buffer_steps` batches can be had again. At most `max_queue_size` batches wait to be sent, and `hwm` messages
    for each subscriber; what is more is left out, and its sequence numbers with it. Each of the three is also bounded
    by bytes (`novainfer.actors.routers.publisher`). Each batch has the `rank`, which tells engines of one server apart;
    `{model}` in the topic is the model's name.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    bind: bool | msgspec.UnsetType = msgspec.UNSET
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    rank: int = 0

    def __post_init__(self) -> None:
        if self.publisher is None:
            msgspec.structs.force_setattr(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None and not _is_address(value):
                raise _wrong(f"{name} must be an address like 'tcp://*:5557' or 'ipc:///run/kv', not {value!r}")
        if self.replay_endpoint == self.endpoint and not self.endpoint.endswith(":0"):
            raise _wrong(f"endpoint and replay_endpoint must be two addresses, not both {self.endpoint!r}")
        if not 0 <= self.rank < RANKS_MAX:
            raise _wrong(f"rank must be between 0 and {RANKS_MAX - 1}, not {self.rank}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if not 1 <= (value := getattr(self, name)) <= AT_MOST:
                raise _wrong(f"{name} must be between 1 and {AT_MOST}, not {value}")

    @classmethod
    def of(cls, given: Any) -> KvEventsConfig:
        """From one of these, an object, or an object as JSON text; raises `InvalidParameter`."""
        if isinstance(given, cls):
            return given
        try:
            return msgspec.json.decode(given, type=cls) if isinstance(given, str) else msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidParameter):
                raise error.__cause__ from None
            raise _wrong(str(error)) from None
        except msgspec.DecodeError as error:
            raise _wrong(f"it must be a JSON object: {error}") from None

    def for_engine(self, place: int) -> KvEventsConfig:
        """That of the engine in this place, of several that have one configuration: a rank, and addresses of its own.

        The ports follow each other, as those of vLLM's ranks do. Raises `InvalidParameter` where there is no such port.
        """
        if not place:
            return self
        replay = self.replay_endpoint
        return msgspec.structs.replace(
            self,
            rank=self.rank + place,
            endpoint=_behind(self.endpoint, place),
            replay_endpoint=None if replay is None else _behind(replay, place),
        )

    def for_model(self, name: str) -> KvEventsConfig:
        """With the model's name in the topic, where that asks for it."""
        return msgspec.structs.replace(self, topic=self.topic.replace("{model}", name))

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def is_bound(self) -> bool:
        """Whether `endpoint` is listened at, by `bind` or else as vLLM tells it: any other one is connected to."""
        if self.bind is not msgspec.UNSET:
            return self.bind
        endpoint = self.endpoint
        return endpoint.startswith(("ipc://", "tcp://0.0.0.0:")) or "*" in endpoint or "::" in endpoint


def _behind(endpoint: str, place: int) -> str:
    """The address that is so many behind this one; a port that is chosen freely stays so."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{place}"
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        raise _wrong(f"endpoint {endpoint!r} needs a port, from which those of several models are counted")
    if not int(port):
        return endpoint
    if int(port) + place > PORT_MAX:
        raise _wrong(f"{endpoint} leaves no port for the model in place {place}: give a lower one")
    return f"{host}:{int(port) + place}"


def _is_address(endpoint: str) -> bool:
    if endpoint.startswith("ipc://"):
        return True
    found = _TCP.fullmatch(endpoint)
    return found is not None and (found[1] == "*" or int(found[1]) <= PORT_MAX)


def _wrong(message: str) -> InvalidParameter:
    return InvalidParameter(f"{PARAM}: {message}", param=PARAM)
