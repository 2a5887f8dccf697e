"""Grammars that take too long: who waits for them hears so, who waits for others does not, and few threads are lost."""

from __future__ import annotations

import pytest

from novainfer.fsm.core.machine import After, Drop, Effect, IllegalEvent, Send, Start
from novainfer.fsm.device.compiling import (
    COMPILE_LIMIT_S,
    Compile,
    Compiled,
    CompileOver,
    Compiling,
    CompilingState,
    LeaveBehind,
    Share,
    Unwanted,
    Wanted,
)

A, B, C, D = ("a",), ("b",), ("c",), ("d",)


def begins(thread: int, request_id: int) -> list[Effect]:
    return [Start(Compile(thread, request_id)), After(COMPILE_LIMIT_S, CompileOver(thread))]


def ends(effects: list[Effect]) -> list[tuple[int, str]]:
    """Requests that end, and the codes of their errors."""
    return [(e.event.request_id, e.event.code) for e in effects if isinstance(e, Send)]


def test_one_grammar_is_compiled_at_a_time_and_once_for_all_who_want_it() -> None:
    compiling = Compiling()
    assert compiling.handle(Wanted(1, A)) == begins(0, 1)
    assert [compiling.handle(Wanted(*wanted)) for wanted in ((2, B), (3, A), (4, B), (5, C))] == [[]] * 4
    assert compiling.handle(Unwanted(2)) == compiling.handle(Unwanted(5)) == []
    share = [Drop(CompileOver(0)), Start(Share(A, [1, 3]))]
    assert compiling.handle(Compiled(0)) == [*share, *begins(0, 4)]
    assert compiling.handle(Unwanted(4)) == []
    assert compiling.handle(Compiled(0)) == [Drop(CompileOver(0)), Start(Share(B, []))]
    assert compiling.state is CompilingState.IDLE


def test_a_grammar_that_takes_too_long_ends_its_requests_alone_and_is_not_begun_again() -> None:
    compiling = Compiling()
    for wanted in ((1, A), (2, B), (3, A)):
        compiling.handle(Wanted(*wanted))
    effects = compiling.handle(CompileOver(0))
    assert effects[0] == Start(LeaveBehind(0))
    assert ends(effects) == [(1, "grammar_limit"), (3, "grammar_limit")]
    assert effects[-2:] == begins(1, 2)
    (again,) = compiling.handle(Wanted(4, A))
    assert ends([again]) == [(4, "grammar_limit")]
    assert "compile_limit_s (10)" in again.event.message  # type: ignore[union-attr]
    assert compiling.handle(Compiled(0)) == []
    assert compiling.handle(Wanted(5, A)) == []
    assert compiling.handle(Compiled(1))[-2:] == begins(1, 5)


def test_when_as_many_threads_are_left_behind_as_may_be_nothing_is_begun_until_one_returns() -> None:
    compiling = Compiling()
    for wanted in ((1, A), (2, B), (3, C)):
        compiling.handle(Wanted(*wanted))
    compiling.handle(CompileOver(0))
    assert ends(compiling.handle(CompileOver(1))) == [(2, "grammar_limit"), (3, "server_is_overloaded")]
    assert compiling.state is CompilingState.CROWDED
    assert ends(compiling.handle(Wanted(4, D))) == [(4, "server_is_overloaded")]
    assert ends(compiling.handle(Wanted(5, B))) == [(5, "grammar_limit")]
    with pytest.raises(IllegalEvent):
        compiling.handle(CompileOver(1))
    assert compiling.handle(Compiled(0)) == []
    assert compiling.handle(Wanted(6, D)) == begins(2, 6)
