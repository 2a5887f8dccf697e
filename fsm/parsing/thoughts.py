"""Thoughts before an answer that is held to a grammar, and how long they may be: what each token of a choice is.

    MAYBE ──Opened──▶ THINKING ──Closed──▶ BEHIND ──Space, Written──▶ ANSWER
      │                  └──Written: the budget is spent──▶ CLOSING ──Closed──▶ BEHIND
      └──Written──▶ ANSWER

Thoughts are free, but that they do not end the answer; at the end of their budget the marker that closes them is all
that may follow. A prompt may have opened them, or have left it to the model. Behind them one white space may stand
before the answer, as templates write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import Dwell, any_time
from novainfer.fsm.core.machine import Machine, Table, never, on, stay, table


class ThoughtState(StrEnum):
    """What may come next."""

    MAYBE = "MAYBE"
    THINKING = "THINKING"
    CLOSING = "CLOSING"
    BEHIND = "BEHIND"
    ANSWER = "ANSWER"


S = ThoughtState
NOTHING_ELSE = "nothing else is allowed there"


class Opened(msgspec.Struct, frozen=True):
    """The marker that opens thoughts."""


class Closed(msgspec.Struct, frozen=True):
    """The marker that closes them."""


class Space(msgspec.Struct, frozen=True):
    """White space that may stand between thoughts and answer."""


class Written(msgspec.Struct, frozen=True):
    """Any other token."""


OPENED, CLOSED, SPACE, WRITTEN = Opened(), Closed(), Space(), Written()


class Thinking(Machine):
    """Of one choice; see the module."""

    TABLE: ClassVar[Table] = table(
        S,
        (Opened, Closed, Space, Written),
        on(S.MAYBE, Opened, "_open", S.THINKING, S.CLOSING),
        on(S.THINKING, Opened, "_think", S.THINKING, S.CLOSING),
        never((S.CLOSING, S.BEHIND), Opened, NOTHING_ELSE),
        stay(S.ANSWER, Opened, "_answer"),
        on((S.THINKING, S.CLOSING), Closed, "_close", S.BEHIND),
        never((S.MAYBE, S.BEHIND), Closed, NOTHING_ELSE),
        stay(S.ANSWER, Closed, "_answer"),
        on(S.MAYBE, Space, "_begin", S.ANSWER),
        on(S.THINKING, Space, "_think", S.THINKING, S.CLOSING),
        never(S.CLOSING, Space, NOTHING_ELSE),
        on(S.BEHIND, Space, "_pass", S.ANSWER),
        stay(S.ANSWER, Space, "_answer"),
        on((S.MAYBE, S.BEHIND), Written, "_begin", S.ANSWER),
        on(S.THINKING, Written, "_think", S.THINKING, S.CLOSING),
        never(S.CLOSING, Written, NOTHING_ELSE),
        stay(S.ANSWER, Written, "_answer"),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = dict.fromkeys(S, any_time("it waits for the next token"))

    state: ThoughtState

    def __init__(self, budget: int | None, *, is_thinking: bool) -> None:
        self._left = budget  # tokens of thoughts that may come yet; None: any number
        self.is_answer = False  # whether the last token is one of the answer
        super().__init__(self._thinking() if is_thinking else S.MAYBE)

    def _thinking(self) -> ThoughtState:
        return S.CLOSING if self._left is not None and self._left <= 0 else S.THINKING

    def _open(self, _: Opened) -> ThoughtState:
        return self._thinking()

    def _think(self, _: Opened | Space | Written) -> ThoughtState:
        if self._left is not None:
            self._left -= 1
        return self._thinking()

    def _close(self, _: Closed) -> ThoughtState:
        return S.BEHIND

    def _pass(self, _: Space) -> ThoughtState:
        return S.ANSWER

    def _begin(self, _: Space | Written) -> ThoughtState:
        self.is_answer = True
        return S.ANSWER

    def _answer(self, _: Any) -> StrEnum:
        self.is_answer = True
        return self.state
