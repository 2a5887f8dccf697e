"""The event feed: transitions and incidents as they happen, for listeners, and free where there are none.

Each listener has a bounded queue of its own. One that is slow loses events and is told how many it has lost: the
engine never waits for it, and never keeps more for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

import msgspec

from novainfer.actors.inspection.incidents import IncidentRecord

FEED_EVENTS_MAX = 4096  # a listener's queue: about 1 MB, and more than a second of a busy engine


class ActorEvent(msgspec.Struct, frozen=True, kw_only=True, tag="actor", tag_field="type", gc=False):
    """An actor's machine went from one state to another; `time` is in seconds since 1970."""

    time: float
    actor: str
    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    event: str


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True, tag="request", tag_field="type", gc=False):
    """One choice of a request went from one state to another; `source` is None for one that has just come."""

    time: float
    id: str
    choice: int
    source: str | None = msgspec.field(name="from")
    target: str = msgspec.field(name="to")


class IncidentEvent(msgspec.Struct, frozen=True, kw_only=True, tag="incident", tag_field="type"):
    """Something went wrong."""

    time: float
    incident: IncidentRecord


class LostEvent(msgspec.Struct, frozen=True, kw_only=True, tag="lost", tag_field="type", gc=False):
    """`count` events were dropped here, because the listener was slow."""

    count: int


FeedEvent = ActorEvent | RequestEvent | IncidentEvent | LostEvent


class Feed:
    """Passes events on to listeners. `on_listened(bool)` hears when there is a first one, and when there is none."""

    def __init__(self, on_listened: Callable[[bool], None]) -> None:
        self._on_listened = on_listened
        self._subscriptions: list[Subscription] = []
        self.is_listened = False
        self.is_closed = False

    def subscribe(
        self, view: Callable[[FeedEvent, str], FeedEvent | None], *, limit: int = FEED_EVENTS_MAX
    ) -> Subscription:
        """A new listener. `view(event, owner)` gives what it may see of an event, or None."""
        subscription = Subscription(self, view, limit)
        self._subscriptions.append(subscription)
        self._update()
        return subscription

    def publish(self, event: FeedEvent, owner: str = "") -> None:
        """Tell all listeners; `owner` is whose request it is about."""
        for subscription in self._subscriptions:
            subscription.push(event, owner)

    def close(self) -> None:
        """There will be no more events: listeners get what is there, and then their end."""
        self.is_closed = True
        for subscription in self._subscriptions:
            subscription.wake()

    def leave(self, subscription: Subscription) -> None:
        """This one listens no more."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._update()

    def _update(self) -> None:
        if bool(self._subscriptions) is not self.is_listened:
            self.is_listened = not self.is_listened
            self._on_listened(self.is_listened)


class Subscription:
    """One listener's queue; an async iterator over batches of events, to be closed (or used in `with`)."""

    def __init__(self, feed: Feed, view: Callable[[FeedEvent, str], FeedEvent | None], limit: int) -> None:
        self._feed = feed
        self._view = view
        self._limit = limit
        self._events: deque[FeedEvent] = deque()
        self._num_lost = 0
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None

    def push(self, event: FeedEvent, owner: str) -> None:
        """Keep `event` until it is taken; the oldest one goes when there are too many."""
        seen = self._view(event, owner)
        if seen is None:
            return
        if len(self._events) >= self._limit:
            self._events.popleft()
            self._num_lost += 1
        self._events.append(seen)
        if self._waiter is not None:
            self.wake()

    def wake(self) -> None:
        """Wake the listener, if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> list[FeedEvent]:
        """All there is now, the number of lost ones first."""
        events: list[FeedEvent] = [LostEvent(count=self._num_lost)] if self._num_lost else []
        events.extend(self._events)
        self._events.clear()
        self._num_lost = 0
        return events

    def close(self) -> None:
        """Listen no more."""
        self._feed.leave(self)

    def end(self) -> None:
        """Listen no more, and let the iteration end with what is there."""
        self._is_ended = True
        self.close()
        self.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[FeedEvent]:
        while not self._events:
            if self._is_ended or self._feed.is_closed:
                raise StopAsyncIteration
            assert self._waiter is None, "a subscription has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()
