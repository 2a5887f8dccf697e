"""What went wrong, and what was done about it: the bounded error queue behind `Engine.errors()` and `GET /v1/errors`.

Machines say it with the effect `Send("incidents", Incident(...))`. Here it gets the time of day and the client's
request ids, a line in the log, a count, and listeners (the flight recorder dumps itself, the event feed passes it on).
Nothing is decided here, and nothing waits: a listener that raises is reported and dropped, never the engine's problem.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from novainfer.fsm.messages.events import Incident

logger = logging.getLogger(__name__)

INCIDENTS_MAX = 1000  # the newest are kept: about 300 kB, and hours of a server that limps
LOGGED_REQUESTS_MAX = 8  # request ids in a line of the log; the record holds all

Listener = Callable[["IncidentRecord"], None]


class IncidentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One failure: when (seconds since 1970), what, whose requests it touched, and what was done about it.

    `kind` is "oom", "exception", "timeout", "lost", "not_a_number", "ladder", "stall", "gave_up", "spare" or "frozen".
    `requests` are the ids that the clients know; `step_id` is -1 when no step was at fault. `number` only grows: one
    that is missing between two was dropped from the queue.
    """

    number: int
    time: float
    kind: str
    message: str
    action: str
    step_id: int = -1
    epoch: int = 0
    requests: list[str] = []


class Incidents:
    """The newest `limit` incidents. `who` gives a stream's request id and owner, or None when it is gone."""

    def __init__(
        self,
        who: Callable[[int], tuple[str, str] | None],
        *,
        limit: int = INCIDENTS_MAX,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._who = who
        self._clock = clock
        self._records: deque[IncidentRecord] = deque(maxlen=limit)
        self._owners: deque[list[str]] = deque(maxlen=limit)  # of the requests of each
        self._listeners: list[Listener] = []
        self.counts: Counter[str] = Counter()  # by kind, since the start

    def take(self, event: Incident, *, is_logged: bool = True) -> None:
        """Keep, count and log `event`, and tell the listeners."""
        known = [found for i in event.stream_ids if (found := self._who(i)) is not None]
        record = IncidentRecord(
            number=self.counts.total(),
            time=self._clock(),
            kind=event.kind,
            message=event.message,
            action=event.action,
            step_id=event.step_id,
            epoch=event.epoch,
            requests=[name for name, _ in known],
        )
        self._records.append(record)
        self._owners.append([owner for _, owner in known])
        self.counts[event.kind] += 1
        if is_logged:
            logger.warning("%s", _sentence(record))
        for listen in tuple(self._listeners):
            try:
                listen(record)
            except Exception:
                logger.exception("a listener of incidents failed, and hears of no more")
                self._listeners.remove(listen)

    def subscribe(self, listen: Listener) -> Callable[[], None]:
        """Call `listen(record)` for each incident from now on; the answer ends that. Called on the loop."""
        self._listeners.append(listen)

        def leave() -> None:
            if listen in self._listeners:
                self._listeners.remove(listen)

        return leave

    def records(self, owner: str | None = None) -> list[IncidentRecord]:
        """Those that are kept, the newest last; only what `owner` may see of them, unless that is None."""
        if owner is None:
            return list(self._records)
        pairs = zip(self._records, self._owners, strict=True)
        return [seen for pair in pairs if (seen := _seen_by(owner, *pair)) is not None]

    def seen_by(self, owner: str, record: IncidentRecord) -> IncidentRecord | None:
        """What `owner` may see of the record that was kept last; None if it is only about others."""
        return _seen_by(owner, record, self._owners[-1])


def _seen_by(owner: str, record: IncidentRecord, owners: list[str]) -> IncidentRecord | None:
    """An incident that touched no request is told to all owners."""
    if not record.requests:
        return record
    own = [name for name, whose in zip(record.requests, owners, strict=True) if whose == owner]
    return msgspec.structs.replace(record, requests=own) if own else None


def _sentence(record: IncidentRecord) -> str:
    where = f" in step {record.step_id}" if record.step_id >= 0 else ""
    names = ", ".join(record.requests[:LOGGED_REQUESTS_MAX])
    more = (
        f" and {len(record.requests) - LOGGED_REQUESTS_MAX} more" if len(record.requests) > LOGGED_REQUESTS_MAX else ""
    )
    whose = f" (requests {names}{more})" if names else ""
    return f"{record.kind}{where}: {record.message}{whose}; {record.action}"
