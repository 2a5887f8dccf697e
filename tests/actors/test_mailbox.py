"""A mailbox is bounded, has two lanes, wakes its actor once, and gives turns that end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar

import msgspec
import pytest

from novainfer.actors.core.mailbox import Actor
from novainfer.actors.core.turns import MESSAGES_MAX, Turns
from novainfer.fsm.core.machine import Effect, Machine, Table, on, table


class Say(msgspec.Struct, frozen=True):
    """A message of these tests."""

    word: str


class State(StrEnum):
    """Of the machine of these tests."""

    CALM = "CALM"
    LOUD = "LOUD"


class Listener(Machine):
    """Writes down what it hears; `on_word` may answer with effects by `send` and `after`."""

    TABLE: ClassVar[Table] = table(State, (Say,), on(State, Say, "_hear", *State))

    def __init__(self) -> None:
        super().__init__(State.CALM)
        self.heard: list[str] = []
        self.on_word: Callable[[str], None] = lambda word: None

    def _hear(self, event: Say) -> State:
        self.heard.append(event.word)
        self.on_word(event.word)
        return State.LOUD if event.word == "loud" else State.CALM

    def send(self, to: str, word: str, *, urgent: bool = False) -> None:
        self._send(to, Say(word), urgent=urgent)

    def start(self, job: str) -> None:
        self._start(job)

    def after(self, delay_s: float, word: str) -> None:
        self._after(delay_s, Say(word))

    def drop(self, word: str) -> None:
        self._drop(Say(word))


class World:
    """One actor that can write to itself, and what it asked of the world."""

    def __init__(self, limit: int = 100) -> None:
        self.machine = Listener()
        self.deaths: list[tuple[str, BaseException]] = []
        self.jobs: list[Any] = []
        self.routed: list[tuple[str, str]] = []
        self.actor = Actor(
            "listener", self.machine, route=self._route, start=self.jobs.append, died=self._died, limit=limit
        )

    def _route(self, to: str, event: Any, urgent: bool) -> None:
        self.routed.append((to, event.word))
        if to == "self":
            self.actor.tell(event, urgent)

    def _died(self, name: str, error: BaseException) -> None:
        self.deaths.append((name, error))

    def say(self, *words: str, urgent: bool = False) -> list[bool]:
        return [self.actor.tell(Say(word), urgent) for word in words]


class Apart(Turns):
    """Each turn in a callback of its own, to look at what one does."""

    def ask(self, turn: Callable[[], int]) -> None:
        self.loop.call_soon(turn)


async def a_turn() -> None:
    """Let the loop go round once."""
    await asyncio.sleep(0)


async def test_messages_are_handled_in_order_on_the_next_turn_of_the_loop() -> None:
    world = World()
    world.actor.open(Turns(asyncio.get_running_loop()))
    world.say("a", "b", "c")
    assert world.machine.heard == []
    await a_turn()
    assert world.machine.heard == ["a", "b", "c"]


@pytest.mark.parametrize("urgent", [False, True])
async def test_what_was_told_before_the_actor_opened_waits_for_it(urgent: bool) -> None:
    world = World()
    world.say("early", urgent=urgent)
    await a_turn()
    assert world.machine.heard == []
    world.actor.open(Turns(asyncio.get_running_loop()))
    await a_turn()
    assert world.machine.heard == ["early"]


async def test_a_full_lane_says_no_and_keeps_what_it_has() -> None:
    world = World(limit=2)
    world.actor.open(Turns(asyncio.get_running_loop()))
    assert world.say("a", "b", "c") == [True, True, False]
    await a_turn()
    assert world.machine.heard == ["a", "b"]
    assert world.say("d") == [True]
    await a_turn()


async def test_a_control_message_overtakes_a_full_data_lane() -> None:
    world = World(limit=2)
    world.actor.open(Turns(asyncio.get_running_loop()))
    assert world.say("a", "b", "c") == [True, True, False]
    assert world.say("stop", urgent=True) == [True]
    await a_turn()
    assert world.machine.heard == ["stop", "a", "b"]


async def test_the_control_lane_is_bounded_too() -> None:
    world = World(limit=1)
    assert world.say("a", "b", urgent=True) == [True, False]


async def test_a_turn_handles_only_what_was_there_when_it_began() -> None:
    world = World()
    machine = world.machine
    machine.on_word = lambda word: machine.send("self", "echo") if word == "data" else None
    world.actor.open(Apart(asyncio.get_running_loop()))
    world.say("data")
    await a_turn()
    assert machine.heard == ["data"]
    await a_turn()
    assert machine.heard == ["data", "echo"]


async def test_a_turn_takes_so_many_messages_and_no_more_control_first_and_the_next_one_goes_on() -> None:
    world = World(limit=10 * MESSAGES_MAX)
    world.actor.open(Turns(asyncio.get_running_loop()))
    world.say(*["data"] * 2 * MESSAGES_MAX)
    world.say(*["control"] * (MESSAGES_MAX - 1), urgent=True)
    await a_turn()
    assert world.machine.heard == ["control"] * (MESSAGES_MAX - 1) + ["data"]
    for turns in (1, 2):
        await a_turn()
        assert len(world.machine.heard) == min((1 + turns) * MESSAGES_MAX, 3 * MESSAGES_MAX - 1)


async def test_more_control_messages_than_a_turn_takes_have_the_next_one_and_data_waits_for_them() -> None:
    world = World(limit=10 * MESSAGES_MAX)
    world.actor.open(Turns(asyncio.get_running_loop()))
    for num_data in (0, 1):
        world.say(*["data"] * num_data)
        world.say(*["control"] * (MESSAGES_MAX + 3), urgent=True)
        await a_turn()
        assert world.machine.heard == ["control"] * MESSAGES_MAX
        await a_turn()
        assert world.machine.heard == ["control"] * (MESSAGES_MAX + 3) + ["data"] * num_data
        world.machine.heard.clear()


async def test_data_written_while_the_control_lane_is_read_waits_for_the_next_turn() -> None:
    world = World()
    machine = world.machine
    machine.on_word = lambda word: machine.send("self", "echo") if word == "control" else None
    world.actor.open(Apart(asyncio.get_running_loop()))
    world.say("control", urgent=True)
    await a_turn()
    assert machine.heard == ["control"]
    await a_turn()
    assert machine.heard == ["control", "echo"]


async def test_one_wake_up_is_pending_however_many_messages_come(monkeypatch: Any) -> None:
    world = World()
    machine = world.machine
    loop = asyncio.get_running_loop()
    turns = 0
    take_turn = world.actor._turn

    def counted() -> int:
        nonlocal turns
        turns += 1
        return take_turn()

    monkeypatch.setattr(world.actor, "_turn", counted)
    # Each of the first ten answers itself, in its turn: one more turn is due, not eleven.
    machine.on_word = lambda word: machine.send("self", "echo") if word != "echo" else None
    world.actor.open(Turns(loop))
    world.say(*(f"word {i}" for i in range(10)))
    for _ in range(10):
        await a_turn()
    assert len(machine.heard) == 20
    assert turns == 2


async def test_a_machine_that_raises_is_dead_and_reported_once() -> None:
    world = World()

    def fall(word: str) -> None:
        if word == "bad":
            raise ValueError("a bug")

    world.machine.on_word = fall
    world.actor.open(Turns(asyncio.get_running_loop()))
    world.say("good", "bad", "never", "bad")
    for _ in range(3):
        await a_turn()
    assert world.machine.heard == ["good", "bad"]
    assert [(name, str(error)) for name, error in world.deaths] == [("listener", "a bug")]
    assert world.actor.statistics().state == "DEAD"
    assert world.actor.statistics().mailbox_depth == 0
    assert world.say("anyone?") == [False]


@pytest.mark.parametrize("urgent", [False, True])
async def test_closing_in_the_middle_of_a_turn_ends_the_turn(urgent: bool) -> None:
    world = World()
    world.machine.on_word = lambda word: world.actor.close()
    world.actor.open(Turns(asyncio.get_running_loop()))
    world.say("a", "b", urgent=urgent)
    world.say("c")
    await a_turn()
    assert world.machine.heard == ["a"]
    assert world.deaths == []


async def test_a_job_starts_and_a_message_goes_out_in_the_order_of_the_effects() -> None:
    world = World()
    machine = world.machine

    def answer(word: str) -> None:
        machine.send("north", "first")
        machine.start("work")
        machine.send("south", "second")

    machine.on_word = answer
    world.actor.open(Turns(asyncio.get_running_loop()))
    world.say("go")
    await a_turn()
    assert world.routed == [("north", "first"), ("south", "second")]
    assert world.jobs == ["work"]


async def test_a_timer_brings_its_event_back_on_the_control_lane() -> None:
    world = World()
    machine = world.machine
    rang = asyncio.Event()

    def answer(word: str) -> None:
        if word == "go":
            machine.after(0.0, "ring")
        if word == "ring":
            rang.set()

    machine.on_word = answer
    world.actor.open(Turns(asyncio.get_running_loop()))
    world.say("go")
    await asyncio.wait_for(rang.wait(), 5)
    assert machine.heard == ["go", "ring"]


async def test_closing_an_actor_cancels_its_timers() -> None:
    world = World()
    machine = world.machine
    machine.on_word = lambda word: machine.after(3600.0, "ring")
    world.actor.open(Turns(asyncio.get_running_loop()))
    world.say("go")
    await a_turn()
    (timer,) = world.actor._timers.values()
    world.actor.close()
    assert timer.cancelled()  # else the loop would hold the actor for an hour


async def test_statistics_tell_state_depth_and_how_long_it_has_been_so() -> None:
    world = World()
    loop = asyncio.get_running_loop()
    world.actor.open(Turns(loop))
    world.say("loud", "loud")
    before = world.actor.statistics()
    assert (before.state, before.mailbox_depth, before.handled_total) == ("CALM", 2, 0)
    await a_turn()
    after = world.actor.statistics()
    assert (after.name, after.state, after.mailbox_depth, after.handled_total) == ("listener", "LOUD", 0, 2)
    assert 0 <= after.dwell_s <= loop.time()


def test_effects_of_a_machine_are_known_to_the_shell() -> None:
    kinds = {kind.__name__ for kind in Effect.__args__}
    assert kinds == {"Send", "Start", "After", "Drop"}


class Again(msgspec.Struct, frozen=True):
    """Begins the state anew."""


class Renewing(Listener):
    """A listener whose state begins anew by Again, and not by a word."""

    TABLE: ClassVar[Table] = table(
        State, (Say, Again), on(State, Say, "_hear", *State), on(State, Again, "_again", *State, renews=True)
    )

    def _again(self, _: Again) -> StrEnum:
        return self.state


async def test_a_state_that_is_renewed_has_its_whole_time_again() -> None:
    now_s = 10.0
    loop = asyncio.get_running_loop()
    actor = Actor("a", Renewing(), route=lambda *_: None, start=lambda _: None, died=lambda *_: None)
    actor.open(Turns(loop))
    loop.time, real_time = lambda: now_s, loop.time  # type: ignore[method-assign]
    try:
        actor.handle(Again())
        now_s = 20.0
        actor.handle(Say("calm"))
        before = actor.sighting()
        actor.handle(Again())
        after = actor.sighting()
    finally:
        loop.time = real_time  # type: ignore[method-assign]
    assert before is not None
    assert after is not None
    assert (before.since_s, after.since_s) == (10.0, 20.0)


def ringing(world: World) -> None:
    """Its machine rings at once after "go", not at all after "hush", and "later" an hour later."""
    machine = world.machine

    def on_word(word: str) -> None:
        if word == "hush":
            machine.drop("ring")
        elif word in ("go", "later"):
            machine.after(0.0 if word == "go" else 3600.0, "ring")

    machine.on_word = on_word
    world.actor.open(Turns(asyncio.get_running_loop()))


async def let_run_out(world: World) -> None:
    """The timer runs out, and its event waits: the actor has no turn."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.actor.waiting() == ([], [Say("ring")], [])


@pytest.mark.parametrize("word", ["hush", "later"])
async def test_a_timer_that_is_dropped_or_set_anew_does_not_ring_when_it_was_due(word: str) -> None:
    world = World()
    ringing(world)
    world.actor.handle(Say("go"))
    world.actor.handle(Say(word))
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.machine.heard == ["go", word]
    assert world.actor.waiting() == ([], [], [Say("ring")] if word == "later" else [])
    world.actor.close()


@pytest.mark.parametrize("word", ["hush", "later"])
async def test_what_a_dropped_timer_has_brought_already_is_taken_away(word: str) -> None:
    world = World()
    ringing(world)
    world.actor.freeze()
    world.actor.handle(Say("go"))
    await let_run_out(world)
    world.actor.handle(Say(word))
    world.actor.thaw()
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.machine.heard == ["go", word]
    world.actor.close()


async def test_a_timer_may_be_dropped_in_the_turn_that_would_have_taken_it() -> None:
    world = World()
    ringing(world)
    world.actor.freeze()
    world.actor.tell(Say("hush"), urgent=True)
    world.actor.handle(Say("go"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.actor.waiting() == ([], [Say("hush"), Say("ring")], [])
    world.actor.thaw()
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.machine.heard == ["go", "hush"]
    assert not world.deaths
