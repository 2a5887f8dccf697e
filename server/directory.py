"""Which generations are in progress, by the names a client may know them by; what was, is remembered for a while.

Inside the engine a request has an id of the server's own, `SERIAL.NAME`: the serial makes it unique whatever names the
clients choose, and the name, which is what every answer shows, is only there to be read. Clients' names are looked up
under their own key.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict

FINISHED_MAX = 10_000  # names; a cancel that comes later than so many requests gets 404 instead of 200


def engine_ids_of(engine_id: str, num_prompts: int) -> list[str]:
    """What the engine calls each prompt of a generation."""
    return [engine_id] if num_prompts == 1 else [f"{engine_id}-{i}" for i in range(num_prompts)]


class LiveRequest:
    """One HTTP generation: its public id, the engine's id of each of its prompts, and whose it is."""

    __slots__ = ("engine_id", "engine_ids", "id", "names", "owner")

    def __init__(self, request_id: str, names: tuple[str, ...], engine_id: str, num_prompts: int, owner: str) -> None:
        self.id = request_id
        self.names = names
        self.engine_id = engine_id
        self.engine_ids = engine_ids_of(engine_id, num_prompts)
        self.owner = owner


class RequestDirectory:
    """A directory of generations by public id (`chatcmpl-…`) and by the client's own id, apart for each owner.

    `sees` is the owner whose generations are found, or None for all owners'.
    """

    def __init__(self) -> None:
        self._live: dict[tuple[str, str], set[LiveRequest]] = {}  # by name and owner
        # By name and owner, what makes the engine's ids: a request has up to 2,048, which no count of names bounds.
        self._finished: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        self._owners: set[str] = set()  # as many as there are keys
        self._num_opened = 0
        self.num_live = 0

    def open(
        self, prefix: str, wanted: str, num_prompts: int, owner: str = "", request_id: str | None = None
    ) -> LiveRequest:
        """Register a generation, as `prefix`-`wanted`, or as `request_id` where that is given.

        An id in use gets a suffix, because a retry must not hit its twin.
        """
        request_id = f"{prefix}-{wanted}" if request_id is None else request_id
        while (request_id, owner) in self._live:
            request_id = f"{prefix}-{wanted}-{secrets.token_hex(4)}"
        engine_id = f"{self._num_opened}.{request_id}"
        self._num_opened += 1
        names = tuple(dict.fromkeys((request_id, wanted)))  # a response that goes on has one
        live = LiveRequest(request_id, names, engine_id, num_prompts, owner)
        self._owners.add(owner)
        for name in live.names:
            self._live.setdefault((name, owner), set()).add(live)
        self.num_live += 1
        return live

    def close(self, live: LiveRequest) -> None:
        """Forget a generation that has ended, but for its names."""
        for name in live.names:
            key = (name, live.owner)
            group = self._live[key]
            group.discard(live)
            if not group:
                del self._live[key]
            self._finished[key] = live.engine_id, len(live.engine_ids)
            self._finished.move_to_end(key)
        while len(self._finished) > FINISHED_MAX:
            self._finished.popitem(last=False)
        self.num_live -= 1

    def ids(self) -> list[str]:
        """The public ids of all that are in progress."""
        return list(dict.fromkeys(one.id for group in self._live.values() for one in group))

    def engine_ids(self, name: str, sees: str | None = None) -> set[str]:
        """What the engine calls the generations under `name`, in progress and ended.

        `name` may be that of one of several prompts, as it is shown: `NAME-1`.
        """
        found = self._ids(name, sees)
        whole, _, _ = name.rpartition("-")
        return found or {one for one in self._ids(whole, sees) if shown_id(one) == name}

    def _ids(self, name: str, sees: str | None) -> set[str]:
        keys = [(name, owner) for owner in (self._owners if sees is None else {sees})]
        ended = [self._finished[key] for key in keys if key in self._finished]
        ids = {engine_id for one in ended for engine_id in engine_ids_of(*one)}
        return ids.union(*(one.engine_ids for key in keys for one in self._live.get(key, ())))


def shown_id(engine_id: str) -> str:
    """What clients see of an id of the engine's: without the serial."""
    return engine_id.partition(".")[2] or engine_id
