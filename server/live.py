"""Which generations are in progress, by the names a client may know them by; what was, is remembered for a while."""

from __future__ import annotations

import secrets
from collections import OrderedDict

FINISHED_MAX = 10_000  # names; a cancel that comes later than so many requests gets 404 instead of 200


class LiveRequest:
    """One HTTP generation: its public id, and the engine's id of each of its prompts."""

    __slots__ = ("cancelled", "engine_ids", "id", "names")

    def __init__(self, request_id: str, names: tuple[str, ...], engine_ids: list[str]) -> None:
        self.id = request_id
        self.names = names
        self.engine_ids = engine_ids
        self.cancelled = False


class LiveRequests:
    """A directory of generations by public id (`chatcmpl-…`) and by the client's own id."""

    def __init__(self) -> None:
        self._live: dict[str, set[LiveRequest]] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self.num_live = 0

    def open(self, prefix: str, wanted: str, num_prompts: int) -> LiveRequest:
        """Register a generation; an id in use gets a suffix, because a retry must not hit its twin."""
        request_id = f"{prefix}-{wanted}"
        while request_id in self._live:
            request_id = f"{prefix}-{wanted}-{secrets.token_hex(4)}"
        engine_ids = [request_id] if num_prompts == 1 else [f"{request_id}-{i}" for i in range(num_prompts)]
        live = LiveRequest(request_id, (request_id, wanted), engine_ids)
        for name in live.names:
            self._live.setdefault(name, set()).add(live)
        self.num_live += 1
        return live

    def close(self, live: LiveRequest) -> None:
        """Forget a generation that has ended, but for its names."""
        for name in live.names:
            group = self._live[name]
            group.discard(live)
            if not group:
                del self._live[name]
            self._finished[name] = None
            self._finished.move_to_end(name)
        while len(self._finished) > FINISHED_MAX:
            self._finished.popitem(last=False)
        self.num_live -= 1

    def find(self, name: str) -> list[LiveRequest] | None:
        """The generations in progress under `name`: none when they have ended, None when there never were any."""
        if (live := self._live.get(name)) is not None:
            return list(live)
        return [] if name in self._finished else None
