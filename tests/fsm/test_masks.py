"""Masks and the steps that lack them: each step is given each of its masks once, or told that it does not come."""

from __future__ import annotations

from novainfer.fsm.core.machine import Effect, Start
from novainfer.fsm.device.masks import (
    Delivery,
    DeliveryState,
    Give,
    Gone,
    Held,
    Landed,
    Launched,
    LaunchWith,
    Made,
)


def jobs(effects: list[Effect]) -> list[object]:
    return [effect.job for effect in effects if isinstance(effect, Start)]


def held(*request_ids: int) -> Delivery:
    delivery = Delivery()
    for request_id in request_ids:
        delivery.handle(Held(request_id))
    return delivery


def test_a_step_is_launched_with_what_is_there_and_given_the_rest_once() -> None:
    delivery = held(1, 2, 3)
    delivery.handle(Made([(1, 0), (2, 0)]))
    began = jobs(delivery.handle(Launched(7, 0, [(1, 0, 0), (9, 4, 0), (2, 1, 0), (3, 0, 0)])))
    assert began == [LaunchWith(7, [0], [1, 2, 3]), Give(7, 0, [1], [(9, 4, 0)], is_none=True)]
    assert delivery.state is DeliveryState.OWING
    assert jobs(delivery.handle(Made([(3, 0), (1, 1)]))) == [Give(7, 0, [3], [(3, 0, 0)])]
    assert jobs(delivery.handle(Made([(2, 1)]))) == [Give(7, 0, [2], [(2, 1, 0)])]
    assert delivery.state is DeliveryState.CLEAR
    delivery.handle(Launched(8, 0, [(2, 2, 0), (1, 1, 0), (3, 1, 0)]))
    assert jobs(delivery.handle(Made([(3, 1), (2, 2)]))) == [Give(8, 0, [0, 2], [(2, 2, 0), (3, 1, 0)])]
    assert jobs(delivery.handle(Made([(2, 2)]))) == []


def test_a_step_that_is_planned_ahead_waits_for_the_mask_behind_the_token_in_flight() -> None:
    delivery = held(1)
    delivery.handle(Made([(1, 0)]))
    assert jobs(delivery.handle(Launched(1, 0, [(1, 0, 0)]))) == [LaunchWith(1, [0], [])]
    assert jobs(delivery.handle(Launched(2, 0, [(1, 1, 0)]))) == [LaunchWith(2, [], [0])]
    assert jobs(delivery.handle(Launched(3, 0, [(1, 2, 0)]))) == [LaunchWith(3, [], [0])]
    assert jobs(delivery.handle(Made([(1, 1)]))) == [Give(2, 0, [0], [(1, 1, 0)])]
    assert delivery.lacks(3, 0)


def test_what_can_no_longer_come_is_said_to_be_none() -> None:
    delivery = held(1, 2)
    delivery.handle(Launched(4, 0, [(1, 0, 0), (2, 0, 0)]))
    assert jobs(delivery.handle(Gone(1))) == [Give(4, 0, [0], [(1, 0, 0)], is_none=True)]
    assert jobs(delivery.handle(Made([(1, 0), (2, 0)]))) == [Give(4, 0, [1], [(2, 0, 0)])]
    none = Give(5, 0, [0], [(1, 0, 0)], is_none=True)
    assert jobs(delivery.handle(Launched(5, 0, [(1, 0, 0)]))) == [LaunchWith(5, [], [0]), none]
    assert delivery.newest.keys() == {2}


def test_a_step_that_has_ended_or_whose_worker_is_lost_lacks_nothing() -> None:
    delivery = held(1)
    delivery.handle(Launched(4, 0, [(1, 0, 0)]))
    delivery.handle(Landed(4, 0))
    assert delivery.state is DeliveryState.CLEAR
    delivery.handle(Launched(5, 0, [(1, 0, 0)]))
    assert jobs(delivery.handle(Launched(6, 1, [(1, 0, 0)]))) == [LaunchWith(6, [], [0])]
    assert not delivery.lacks(5, 0)
    assert jobs(delivery.handle(Made([(1, 0)]))) == [Give(6, 1, [0], [(1, 0, 0)])]


def test_masks_behind_drafts_come_with_the_one_before_them() -> None:
    delivery = held(1, 2)
    delivery.handle(Made([(2, 4)]))
    guessed = [(1, 3, 0), (1, 3, 1), (1, 3, 2), (2, 4, 0), (2, 4, 1)]
    assert jobs(delivery.handle(Launched(7, 0, guessed))) == [LaunchWith(7, [3, 4], [0, 1, 2])]
    assert jobs(delivery.handle(Made([(1, 3)]))) == [Give(7, 0, [0, 1, 2], guessed[:3])]
    assert delivery.state is DeliveryState.CLEAR


def test_a_mask_behind_drafts_is_not_the_one_behind_as_many_tokens() -> None:
    delivery = held(1)
    delivery.handle(Made([(1, 4)]))
    assert jobs(delivery.handle(Launched(7, 0, [(1, 3, 1)])))[0] == LaunchWith(7, [], [0])
    delivery.handle(Made([(1, 3)]))
    assert jobs(delivery.handle(Launched(8, 0, [(1, 4, 0), (1, 3, 1)]))) == [LaunchWith(8, [1], [0])]
