"""Conversations whose KV went with its model: several models make room for each other, and no client asked for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

LOST_MAX = 10_000  # conversations with a model; of more, those that were lost longest ago are not told of


class LostSessions:
    """Of each owner the conversations that a model kept when it was unloaded, until it keeps them again."""

    def __init__(self) -> None:
        self._lost: OrderedDict[tuple[str, str, str], None] = OrderedDict()  # owner, session, model

    def note(self, model: str, kept: Iterable[tuple[str, str]]) -> None:
        """`model` goes, and with it what it kept of these (owner, session)."""
        for owner, session_id in kept:
            self._lost[owner, session_id, model] = None
            self._lost.move_to_end((owner, session_id, model))
        while len(self._lost) > LOST_MAX:
            self._lost.popitem(last=False)

    def of(self, owner: str, kept: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """What `owner` has lost, as (session, model), but for what is `kept` now: that is forgotten here."""
        for session_id, model in kept:
            self._lost.pop((owner, session_id, model), None)
        return [(session_id, model) for whose, session_id, model in self._lost if whose == owner]

    def end(self, owner: str, session_id: str) -> bool:
        """It is over, whichever model it was with; False where nothing of it was lost."""
        found = [key for key in self._lost if key[:2] == (owner, session_id)]
        for key in found:
            del self._lost[key]
        return bool(found)
