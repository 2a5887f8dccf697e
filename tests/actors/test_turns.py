"""Turns follow each other in the order in which they were asked for, and let the loop go on after so many messages."""

import asyncio
from collections.abc import Callable

import pytest

from novainfer.actors.core.turns import MESSAGES_MAX, Turns


class Told:
    """Turns by name, each of which may ask for others; `rounds` are those that the loop took in one go."""

    def __init__(self) -> None:
        self.turns = Turns(asyncio.get_running_loop())
        self.took: list[str] = []

    def ask(self, name: str, *more: str, messages: int = 1) -> None:
        self.turns.ask(self._turn(name, more, messages))

    def _turn(self, name: str, more: tuple[str, ...], messages: int) -> Callable[[], int]:
        def turn() -> int:
            self.took.append(name)
            for other in more:
                self.ask(other, messages=messages)
            return messages

        return turn


async def once_around() -> None:
    await asyncio.sleep(0)


async def test_no_turn_is_taken_by_the_one_who_asks_for_it() -> None:
    told = Told()
    told.ask("a")
    assert told.took == []


async def test_what_a_turn_asks_for_follows_after_those_that_were_asked_for_before_and_the_loop_waits() -> None:
    told = Told()
    told.ask("a", "c", "d")
    told.ask("b", "e")
    asyncio.get_running_loop().call_soon(told.took.append, "the loop")
    await once_around()
    assert told.took == ["a", "b", "c", "d", "e", "the loop"]


async def test_after_so_many_messages_the_loop_is_next_and_the_turns_go_on_after_it() -> None:
    told = Told()
    told.ask("a", "b", "c", messages=MESSAGES_MAX // 2)
    asyncio.get_running_loop().call_soon(told.took.append, "the loop")
    await once_around()
    assert told.took == ["a", "b", "the loop"]
    await once_around()
    assert told.took == ["a", "b", "the loop", "c"]


async def test_turns_that_ask_for_themselves_without_end_never_hold_the_loop() -> None:
    turns, taken = Turns(asyncio.get_running_loop()), 0

    def again() -> int:
        nonlocal taken
        taken += 1
        turns.ask(again)
        return 1

    turns.ask(again)
    await once_around()
    assert taken == MESSAGES_MAX


async def test_one_callback_is_pending_however_many_turns_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, callbacks = asyncio.get_running_loop(), []
    call_soon = loop.call_soon
    told = Told()
    monkeypatch.setattr(loop, "call_soon", lambda call, *a, **k: (callbacks.append(call), call_soon(call, *a, **k))[1])
    told.ask("a", "b")
    told.ask("c", "d")
    told.ask("e")
    assert callbacks == [told.turns._run]
    monkeypatch.undo()
    await once_around()
    assert told.took == ["a", "c", "e", "b", "d"]


async def test_one_callback_is_pending_too_while_turns_wait_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, callbacks = asyncio.get_running_loop(), []
    call_soon = loop.call_soon
    told = Told()
    told.ask("a", "b", messages=MESSAGES_MAX)
    monkeypatch.setattr(loop, "call_soon", lambda call, *a, **k: (callbacks.append(call), call_soon(call, *a, **k))[1])
    await once_around()
    told.ask("d")
    assert callbacks.count(told.turns._run) == 1
    monkeypatch.undo()
    for _ in range(3):
        await once_around()
    assert told.took == ["a", "b", "d"]


async def test_a_turn_that_raises_takes_no_other_along() -> None:
    told, errors = Told(), []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def broken() -> int:
        raise ValueError("no")

    told.turns.ask(broken)
    told.ask("a")
    await once_around()
    await once_around()
    assert told.took == ["a"]
    assert [str(error) for error in errors] == ["no"]
