"""The order in which requests have their turn at tokens, slots and blocks.

    what has waited for so long that none may go before it any more    (policy "priority")
    then by priority, the lower number first                           (policy "priority")
    then by tenant, the one first that was given least, by its weight
    then by age

What tenants were given is counted in virtual tokens while requests wait: one for each token that a step computes, and
one more for each that it samples (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024). A tenant that
had nothing in the queue begins with the least of those that have: time in which it asked for nothing is not owed to it.
Where nothing waits, nothing is owed to any, and counting begins anew. In the order, each request that waits or is in
prefill counts as given already to those of its tenant that come after it: so tenants alternate within one step, too.

With one tenant and one priority this is the order of age, and costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from operator import attrgetter
from typing import TYPE_CHECKING

from novainfer.fsm.messages.params import INTEGER_MAX

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.schedule.request import Request

AGED = -INTEGER_MAX - 2  # the rank before every priority
TURNS = 96  # requests put in order for one step; it looks at no more, and what is behind them comes by age
TENANTS_MAX = 4096  # whose counts are kept apart: beyond, those that were given least begin with the least again

arrival = attrgetter("request_id")  # the key of age: first come, first served

Line = tuple[int, str]  # requests of one rank and one tenant


class Order:
    """Who waits, by rank and tenant, and what each tenant was given since requests wait."""

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._aged = -1  # requests up to this one are aged
        self._lines: dict[Line, list[Request]] = {}  # what waits, each by age
        self._num_waiting: dict[str, int] = {}  # by tenant
        self._num_here: dict[str, int] = {}  # those that run or are paused included
        self._given: dict[str, float] = {}  # virtual tokens by tenant, over its weight, or as many as this:
        self._floor = 0.0

    # ---- questions -----------------------------------------------------------------------------------------------

    @property
    def is_by_age(self) -> bool:
        """Whether nothing but age tells the requests here apart."""
        return not self._by_priority and len(self._num_here) < 2

    @property
    def first(self) -> Request | None:
        """What waits and is the first in turn."""
        return min((requests[0] for requests in self._lines.values()), key=self.turn, default=None)

    def rank(self, request: Request) -> int:
        """What comes before everything else; less is earlier."""
        if not self._by_priority:
            return 0
        return AGED if request.request_id <= self._aged else request.params.priority

    def given(self, request: Request) -> float:
        """What the tenant of `request` was given, in virtual tokens over its weight."""
        return self._given.get(request.tenant.id, self._floor)

    def turn(self, request: Request) -> tuple[int, float, int]:
        """The key by which `request` comes before or after another one."""
        return self.rank(request), self.given(request), request.request_id

    def by_work(self, request: Request) -> tuple[int, float, int, int]:
        """The same where, within a tenant, the least work goes first."""
        return self.rank(request), self.given(request), request.work, request.request_id

    def loss(self, request: Request) -> tuple[int, float]:
        """The key by which `request` has to go before another one: the other way round, and age apart."""
        return -self.rank(request), -self.given(request)

    def in_turn(self, running: Sequence[Request], waiting: list[Request]) -> list[Request]:
        """The `running`, whose prompts are not computed, and what is `waiting`, in order."""
        lines: dict[Line, list[Request]] = {}
        for request in sorted(running, key=arrival):
            lines.setdefault(self._line(request), []).append(request)
        for line, requests in self._lines.items():
            own = lines.get(line)
            lines[line] = requests if own is None else sorted([*own, *requests[:TURNS]], key=arrival)
        first = self._merged(lines, TURNS + len(running))
        if len(first) == len(running) + len(waiting):
            return first
        seen = set(map(arrival, first))
        return [*first, *(request for request in waiting if request.request_id not in seen)]

    def _merged(self, lines: dict[Line, list[Request]], most: int) -> list[Request]:
        """The first `most` of all `lines`: from the one whose turn it is, then with that counted, and so on."""
        heap = [(line[0], self.given(requests[0]), requests[0].request_id, line, 0) for line, requests in lines.items()]
        heapify(heap)
        found: list[Request] = []
        while heap and len(found) < most:
            rank, given, _, line, at = heap[0]
            request = lines[line][at]
            found.append(request)
            if at + 1 < len(lines[line]):
                given += request.num_remaining / request.tenant.weight
                heapreplace(heap, (rank, given, lines[line][at + 1].request_id, line, at + 1))
            else:
                heappop(heap)
        return found

    def places(self, requests: Iterable[Request]) -> Callable[[Request], int]:
        """The key of `requests`, which are in order."""
        places = {request.request_id: at for at, request in enumerate(requests)}
        return lambda request: places[request.request_id]

    # ---- what happens --------------------------------------------------------------------------------------------

    def arrives(self, request: Request) -> None:
        """`request` is new, and about to be put into the queue."""
        tenant, waiting = request.tenant.id, self._num_waiting
        if not waiting:
            self.forget()
        elif tenant not in waiting:
            least = min(self._given.get(other, self._floor) for other in waiting)
            if len(self._given) >= TENANTS_MAX:
                self._floor = least
                self._given = {other: given for other, given in self._given.items() if given > least}
            self._given[tenant] = max(self.given(request), least)
        self._given.setdefault(tenant, self._floor)
        self._num_here[tenant] = self._num_here.get(tenant, 0) + 1

    def leaves(self, request: Request) -> None:
        """`request` has ended."""
        _count_down(self._num_here, request.tenant.id)
        if not self._num_here:
            self.forget()

    def enqueue(self, request: Request) -> None:
        """`request` is in the queue from now on."""
        insort(self._lines.setdefault(self._line(request), []), request, key=arrival)
        tenant = request.tenant.id
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1

    def dequeue(self, request: Request) -> None:
        """`request` has left the queue."""
        line = self._line(request)
        requests = self._lines[line]
        del requests[bisect_left(requests, request.request_id, key=arrival)]
        if not requests:
            del self._lines[line]
        _count_down(self._num_waiting, request.tenant.id)

    def charge(self, flight: Flight) -> None:
        """The step has run to its end: what it has computed and sampled was given to the tenants of its requests."""
        if len(self._given) < 2 and len(self._num_here) < 2:
            return
        for request, count, _ in flight.rows:
            self._given[request.tenant.id] = self.given(request) + count / request.tenant.weight
        for request in flight.samples:
            self._given[request.tenant.id] += 1 / request.tenant.weight

    def age(self, request_id: int) -> None:
        """Requests up to this one have waited for as long as others may go before them."""
        moved: list[Request] = []
        for line, requests in list(self._lines.items()):
            if line[0] == AGED:
                continue
            end = bisect_left(requests, request_id + 1, key=arrival)
            moved += requests[:end]
            del requests[:end]
            if not requests:
                del self._lines[line]
        self._aged = request_id
        for request in moved:
            insort(self._lines.setdefault(self._line(request), []), request, key=arrival)

    def forget(self) -> None:
        """Nothing is owed to any tenant."""
        self._given.clear()
        self._floor = 0.0

    def _line(self, request: Request) -> Line:
        return self.rank(request), request.tenant.id

    # ---- for checkers --------------------------------------------------------------------------------------------

    def fingerprint(self) -> tuple[object, ...]:
        """Everything that decides what the order will be, comparable."""
        lines = sorted((line, tuple(map(arrival, requests))) for line, requests in self._lines.items())
        return tuple(lines), tuple(sorted(self._given.items())), self._floor, self._aged

    def check(self, waiting: Collection[Request]) -> None:
        """Assert that what is in the queue is in a line, and nothing else; for tests, slow."""
        in_lines = sorted((r for requests in self._lines.values() for r in requests), key=arrival)
        assert in_lines == list(waiting), "the queue and its lines hold different requests"
        assert all(map(self._lines.__getitem__, self._lines)), "a line is empty"
        assert self._num_waiting.keys() <= self._num_here.keys(), "a tenant waits that is not here"
        assert set(self._num_waiting) == {request.tenant.id for request in waiting}, "a tenant waits with nothing"


def _count_down(counts: dict[str, int], tenant: str) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]
