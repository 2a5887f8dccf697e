"""What has changed in the requests that live, since it was told last: most steps only give them tokens and blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from novainfer.actors.inspection.frames import RequestNow
from novainfer.actors.inspection.inspector import ENDED_TOLD_MAX, Inspector
from novainfer.actors.inspection.notes import Choice, Note
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.request import Request, RequestState

LIVE_TOLD_MAX = 2048  # choices, those that came first
WAITING = frozenset({RequestState.WAITING, RequestState.PREEMPTED, RequestState.RECOVERING})


class _Told:
    """What was told of one choice."""

    __slots__ = ("num_blocks", "num_tokens", "state", "waits_for")

    def __init__(self, now: RequestNow) -> None:
        self.state, self.waits_for = now.state, now.waits_for
        self.num_tokens, self.num_blocks = now.output_tokens, now.blocks


class RequestChanges:
    """Of the requests of `inspector`; `states` counts those that live, and `num_running` those that compute."""

    def __init__(self, inspector: Inspector) -> None:
        self._inspector = inspector
        self._told: dict[str, _Told] = {}
        self._ended: dict[str, None] = {}  # keys of those that were told to have ended, the oldest first
        self._num_ended = inspector.num_ended
        self.states: Counter[str] = Counter()
        self.num_running = self.num_waiting = 0
        for now in inspector.ended:
            self._ended[now.key] = None

    def all(self, planner: Planner | None) -> list[RequestNow]:
        """All that are told of: those that have ended, and those that live, the newest last."""
        first_waiting = _first_waiting(planner)
        live = islice(self._inspector.live(), LIVE_TOLD_MAX)
        ended = [now for now in self._inspector.ended if now.key in self._ended]
        return ended + [self._now(note, choice, first_waiting) for note, choice in live]

    def _now(self, note: Note, choice: Choice | None, first_waiting: Request | None) -> RequestNow:
        is_next = choice is not None and choice.request is first_waiting
        return self._inspector.now(note, choice, is_next=is_next)

    def update(self, planner: Planner | None) -> tuple[list[RequestNow], list[tuple[str, int, int]], list[str]]:
        """Those that have come, changed or ended; tokens and blocks of others; keys of those that are told no more."""
        inspector, told, before = self._inspector, dict[str, _Told](), self._told
        changed: list[RequestNow] = []
        progress: list[tuple[str, int, int]] = []
        num_told = num_waiting = num_running = 0
        states: Counter[str] = Counter()
        first_waiting = _first_waiting(planner)
        table_of = planner.cache.table_of if planner is not None else lambda request: []
        for note, choice in inspector.live():
            request = choice.request if choice is not None else None
            state = request.state if request is not None else RequestState.WAITING
            states[state] += 1
            is_waiting = request is None or state in WAITING
            num_waiting += is_waiting
            num_running += not is_waiting and state is not RequestState.PAUSED
            num_told += 1
            if num_told > LIVE_TOLD_MAX:
                continue
            key = note.key if choice is None else choice.key
            known = before.pop(key, None)
            if known is None or known.state != state or is_waiting or request is None:
                now = self._now(note, choice, first_waiting)
                if known is None or (known.state, known.waits_for) != (now.state, now.waits_for):
                    changed.append(now)
                    known = _Told(now)
            else:
                num_tokens, num_blocks = request.num_generated, len(table_of(request))
                if known.num_tokens != num_tokens or known.num_blocks != num_blocks:
                    known.num_tokens, known.num_blocks = num_tokens, num_blocks
                    progress.append((key, num_tokens, num_blocks))
            told[key] = known
        self._told = told
        self.states, self.num_running, self.num_waiting = states, num_running, num_waiting
        return changed + (ended := self._newly_ended()), progress, self._gone(before, ended)

    def _newly_ended(self) -> list[RequestNow]:
        inspector = self._inspector
        num_new = min(inspector.num_ended - self._num_ended, len(inspector.ended))
        self._num_ended = inspector.num_ended
        return list(inspector.ended)[len(inspector.ended) - num_new :]

    def _gone(self, left: Iterable[str], ended: Iterable[RequestNow]) -> list[str]:
        for now in ended:
            self._ended[now.key] = None
        gone = [key for key in left if key not in self._ended]
        while len(self._ended) > ENDED_TOLD_MAX:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            gone.append(oldest)
        return gone


def _first_waiting(planner: Planner | None) -> Request | None:
    return planner.waiting[0] if planner is not None and planner.waiting else None
