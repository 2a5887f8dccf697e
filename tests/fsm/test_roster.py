"""The roster: when a cache waits for the memory of a process that was ended."""

from __future__ import annotations

from typing import Any

from novainfer.fsm.core.machine import After, Drop, Send, Start
from novainfer.fsm.device.process import Answered, Ask, Ended, Started, Tell
from novainfer.fsm.device.roster import MEMORY_S, Alive, Found, HoldOver, Roster, RosterState
from novainfer.fsm.messages.events import DeviceLost, Fit, JobDone, Kill, Load, Spawn, Warm

FIT = Fit(1, 8)


def _effects(roster: Roster, *events: Any) -> list[Any]:
    return [effect for event in events for effect in roster.handle(event)]


def _restarted(*, kv_is_lazy: bool) -> Roster:
    """The process of epoch 1 has loaded, and that of epoch 0 was ended and is not gone."""
    roster = Roster()
    _effects(roster, Spawn(0), Started(0, 100), Found(None, 0.0), Ask(Load(0)))
    loaded = {"kv_is_lazy": kv_is_lazy}
    _effects(roster, Answered(0, 0, JobDone("Load", loaded, 0)), Kill(0))
    _effects(roster, Spawn(1), Started(1, 101), Ask(Load(1)), Answered(1, 1, JobDone("Load", loaded, 1)))
    return roster


def _told(effects: list[Any]) -> list[Any]:
    return [e.job.job for e in effects if isinstance(e, Start) and isinstance(e.job, Tell)]


def _probing() -> Roster:
    """The first spare (1) has died, and the one that took its place (2) is asked for a sign of life."""
    roster = Roster(warm_spare=True)
    _effects(roster, Spawn(0), Started(0, 100), Found(None, 0.0), Ask(Load(0)))
    _effects(roster, Answered(0, 0, JobDone("Load", {"kv_is_lazy": True}, 0)), Ask(Fit(0, 8)))
    _effects(roster, Answered(0, 0, JobDone("Fit", {"num_blocks": 8}, 0)), Ask(Warm(0)))
    _effects(roster, Answered(0, 0, JobDone("Warm", None, 0)), Started(1, 101), Ended(1, "it was killed", 1.0))
    _effects(roster, Started(2, 102), Ended(0, "it was killed", 2.0), Spawn(1))
    assert roster.state is RosterState.PROBING
    return roster


def test_a_sign_of_life_of_a_spare_that_is_gone_lets_no_other_one_take_over() -> None:
    roster = _probing()
    assert _effects(roster, Alive(1)) == []
    assert roster.state is RosterState.PROBING
    taking_over = _effects(roster, Alive(2))
    assert roster.state is RosterState.SINGLE
    assert [effect.event.job for effect in taking_over if isinstance(effect, Send)] == ["Spawn"]


def test_a_cache_waits_until_the_process_before_is_gone() -> None:
    roster = _restarted(kv_is_lazy=False)
    assert _effects(roster, Ask(FIT)) == [After(MEMORY_S, HoldOver())]
    assert roster.state is RosterState.HOLDING
    effects = _effects(roster, Ended(0, "it was killed", 3.0))
    assert _told(effects) == [FIT]
    assert effects[-1] == Drop(HoldOver())
    assert roster.state is RosterState.SINGLE


def test_a_process_that_does_not_end_is_waited_for_a_while() -> None:
    roster = _restarted(kv_is_lazy=False)
    _effects(roster, Ask(FIT))
    assert _told(_effects(roster, HoldOver())) == [FIT]
    assert _effects(roster, Ended(0, "it was killed", 300.0)) == []


def test_a_cache_that_takes_memory_when_it_is_written_waits_for_nothing() -> None:
    assert _told(_effects(_restarted(kv_is_lazy=True), Ask(FIT))) == [FIT]


def test_a_process_that_dies_while_its_cache_waits_is_lost() -> None:
    roster = _restarted(kv_is_lazy=False)
    _effects(roster, Ask(FIT))
    lost, dropped = _effects(roster, Ended(1, "it was killed", 3.0))
    assert dropped == Drop(HoldOver())
    assert lost == Send("worker", DeviceLost(1, "it was killed", 3.0))
    assert roster.state is RosterState.EMPTY


def test_a_process_that_is_ended_while_its_cache_waits_is_gone_with_it() -> None:
    roster = _restarted(kv_is_lazy=False)
    assert _effects(roster, Ask(FIT), Kill(1))[-1] == Drop(HoldOver())
    assert roster.state is RosterState.EMPTY
    assert _effects(roster, Ended(0, "it was killed", 3.0)) == []
