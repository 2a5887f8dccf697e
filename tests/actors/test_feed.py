"""The feed passes events on, loses the oldest for who is slow, says how many, and costs nothing when nobody listens."""

from __future__ import annotations

import asyncio

from novainfer.actors.inspection.feed import Feed, FeedEvent, LostEvent, RequestEvent, Subscription


def event(number: int, owner_id: str = "r") -> RequestEvent:
    return RequestEvent(time=float(number), id=owner_id, choice=0, source="WAITING", target="PREFILL")


def see_all(seen: FeedEvent, owner: str) -> FeedEvent | None:
    return seen


class World:
    """A feed, and what it says about being listened to."""

    def __init__(self) -> None:
        self.listened: list[bool] = []
        self.feed = Feed(self.listened.append)

    def join(self, limit: int = 100) -> Subscription:
        return self.feed.subscribe(see_all, limit=limit)


async def test_a_listener_gets_what_happens_while_it_listens() -> None:
    world = World()
    world.feed.publish(event(0))
    with world.join() as subscription:
        world.feed.publish(event(1))
        world.feed.publish(event(2))
        assert await anext(subscription) == [event(1), event(2)]
    world.feed.publish(event(3))
    assert subscription.take() == []


async def test_a_listener_that_waits_is_woken() -> None:
    world = World()
    with world.join() as subscription:
        task = asyncio.ensure_future(anext(subscription))
        await asyncio.sleep(0)
        assert not task.done()
        world.feed.publish(event(1))
        assert await task == [event(1)]


async def test_a_slow_listener_loses_the_oldest_and_is_told_how_many() -> None:
    world = World()
    with world.join(limit=3) as slow, world.join() as fast:
        for number in range(10):
            world.feed.publish(event(number))
        assert await anext(slow) == [LostEvent(count=7), event(7), event(8), event(9)]
        assert len(await anext(fast)) == 10
        world.feed.publish(event(10))
        assert await anext(slow) == [event(10)]


async def test_each_sees_only_what_its_view_lets_through() -> None:
    world = World()
    subscription = world.feed.subscribe(lambda seen, owner: seen if owner == "alice" else None)
    world.feed.publish(event(1), "bob")
    world.feed.publish(event(2), "alice")
    assert subscription.take() == [event(2)]


async def test_the_engine_is_told_when_somebody_begins_and_when_nobody_is_left() -> None:
    world = World()
    assert world.feed.is_listened is False
    one, two = world.join(), world.join()
    assert world.listened == [True]
    one.close()
    one.close()
    assert world.feed.is_listened
    two.close()
    assert world.listened == [True, False]


async def test_the_end_of_the_feed_comes_after_what_is_there() -> None:
    world = World()
    with world.join() as subscription:
        world.feed.publish(event(1))
        world.feed.close()
        assert [batch async for batch in subscription] == [[event(1)]]


async def test_the_end_of_the_feed_wakes_who_waits() -> None:
    world = World()
    with world.join() as subscription:
        task = asyncio.ensure_future(anext(subscription, None))
        await asyncio.sleep(0)
        world.feed.close()
        assert await task is None
