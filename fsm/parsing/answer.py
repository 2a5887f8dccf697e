"""An answer, read while it is written: what it thinks, what it says, and which tools it calls.

    REASONING ──</think>──▶ CONTENT ──<tool_call>──▶ TOOL_NAME ──its arguments begin──▶ TOOL_ARGUMENTS
                  <think>◀──┘ ▲ ▲ ◀──no call: text──────┘ └──it has none──▶ TOOL_END ◀──they end──┘
                              │ └──────────────────────</tool_call>────────────┘
    all ──Finish──▶ ENDED     └── and with the text of no call back to REASONING, where that was opened

What goes in is cut at its markers (`novainfer.fsm.parsing.reader`); what comes out are pieces, in order. However the
text is split, the pieces put together are the same, and each character is looked at once.

Nothing that the model has written is lost, but for markers, the spaces around them, and what a call's envelope holds
beside name and arguments:

- A call is one when its name and the beginning of its arguments are known. What turns out to be none before that was
  never sent as one, and is text again, with its markers.
- Later it stays a call, with the arguments as they are: where they break off (the answer was cut, or `</tool_call>`
  came too early) they are no whole JSON, as in OpenAI's own answers that were cut. What follows them is content.
- Inside a string of a call's JSON a marker is a part of that string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from novainfer.fsm.core.dwell import Dwell, any_time
from novainfer.fsm.core.machine import Guard, Machine, Table, ignore, on, stay, table
from novainfer.fsm.parsing.pieces import (
    CallArguments,
    CallBegun,
    CloseCall,
    CloseThink,
    Content,
    Finish,
    Marker,
    OpenCall,
    OpenThink,
    Piece,
    Reasoning,
    Text,
)

SPACES = " \t\r\n"  # that models write around markers


class Call(Protocol):
    """One call in the format of its model, while it is being written."""

    @property
    def name(self) -> str | None:
        """The tool's name, once it is sure that this is a call; it may be none as long as there is no name."""

    @property
    def is_whole(self) -> bool:
        """It has ended as it should."""

    @property
    def is_broken(self) -> bool:
        """It goes on as no call does."""

    @property
    def has_all_arguments(self) -> bool:
        """Its arguments are whole, whatever else is missing."""

    @property
    def is_quoting(self) -> bool:
        """It is inside a string, where markers are text."""

    def feed(self, text: str) -> str:
        """Read on; gives back what stands behind the call's end, or from where it is broken."""

    def take_arguments(self) -> str:
        """What was read of the arguments and not taken before."""

    def close(self) -> str:
        """The model has ended the call though it is not whole; gives back what is no part of it."""

    def cut(self) -> str:
        """The answer has ended in the call; gives back what is no part of it."""


class AnswerState(StrEnum):
    """What is being written."""

    REASONING = "REASONING"
    CONTENT = "CONTENT"
    TOOL_NAME = "TOOL_NAME"
    TOOL_ARGUMENTS = "TOOL_ARGUMENTS"
    TOOL_END = "TOOL_END"
    ENDED = "ENDED"


S = AnswerState
IN_CALL = (S.TOOL_NAME, S.TOOL_ARGUMENTS)
AFTER_NAME = (S.TOOL_ARGUMENTS, S.TOOL_END, S.ENDED)  # what follows a name; and where the text is none:
NO_CALL = (S.CONTENT, S.REASONING)
ONE_CALL = "one call was wanted, and it is there"


class NothingSaid(Guard):
    """Nothing but spaces was said, beside thoughts and calls: a model thinks before it speaks."""

    name = "before any content"
    why = "a model that speaks of the marker means its text"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return not machine.has_spoken


class HasThought(Guard):
    """Something but spaces was thought."""

    name = "within thoughts"
    why = "the template has opened it, and the model once more"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return bool(machine.has_thought)


class Quoted(Guard):
    """The call is inside a string."""

    name = "within a string"
    why = "the marker ends the call"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return bool(machine.is_quoting)


class Answer(Machine):
    """One choice; `make_call` makes what reads a call. Pieces are sent to the "client".

    `is_thinking`: the prompt has opened `<think>`. With `has_one_call` it is over when the first call is.
    """

    TABLE: ClassVar[Table] = table(
        S,
        (Text, OpenThink, CloseThink, OpenCall, CloseCall, Finish),
        stay(S.REASONING, Text, "_text"),
        stay(S.REASONING, OpenThink, "_text", only=HasThought),
        on(S.REASONING, CloseThink, "_end_thoughts", S.CONTENT),
        on(S.REASONING, OpenCall, "_open_call", S.TOOL_NAME),
        stay(S.REASONING, CloseCall, "_text"),
        stay(S.CONTENT, Text, "_text"),
        on((S.CONTENT, S.TOOL_END), OpenThink, "_think", S.REASONING, only=NothingSaid),
        stay((S.CONTENT, S.TOOL_END), OpenThink, "_text"),
        stay((S.CONTENT, S.TOOL_END), CloseThink, "_text"),
        on((S.CONTENT, S.TOOL_END), OpenCall, "_open_call", S.TOOL_NAME),
        stay(S.CONTENT, CloseCall, "_text"),
        on(S.TOOL_NAME, Text, "_name", S.TOOL_NAME, *AFTER_NAME, *NO_CALL),
        on(S.TOOL_NAME, OpenThink, "_name", S.TOOL_NAME, *AFTER_NAME, *NO_CALL),
        on(S.TOOL_NAME, CloseThink, "_name", S.TOOL_NAME, *AFTER_NAME, *NO_CALL),
        stay(S.TOOL_NAME, OpenCall, "_name", only=Quoted),
        stay(S.TOOL_NAME, OpenCall, "_open_another"),
        stay(S.TOOL_NAME, CloseCall, "_name", only=Quoted),
        on(S.TOOL_NAME, CloseCall, "_close_name", S.ENDED, *NO_CALL),
        on(S.TOOL_ARGUMENTS, Text, "_arguments", *AFTER_NAME),
        on(S.TOOL_ARGUMENTS, OpenThink, "_arguments", *AFTER_NAME),
        on(S.TOOL_ARGUMENTS, CloseThink, "_arguments", *AFTER_NAME),
        stay(S.TOOL_ARGUMENTS, OpenCall, "_arguments", only=Quoted),
        on(S.TOOL_ARGUMENTS, OpenCall, "_next_call", S.TOOL_NAME, S.ENDED),
        stay(S.TOOL_ARGUMENTS, CloseCall, "_arguments", only=Quoted),
        on(S.TOOL_ARGUMENTS, CloseCall, "_close_call", S.CONTENT, S.ENDED),
        stay(S.TOOL_END, Text, "_text"),
        on(S.TOOL_END, CloseCall, "_end_call", S.CONTENT),
        on((S.REASONING, S.CONTENT, S.TOOL_END), Finish, "_finish", S.ENDED),
        on(S.TOOL_NAME, Finish, "_finish_name", S.ENDED),
        on(S.TOOL_ARGUMENTS, Finish, "_finish_arguments", S.ENDED),
        *(ignore(S.ENDED, event, ONE_CALL) for event in (Text, OpenThink, CloseThink, OpenCall, CloseCall, Finish)),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = dict.fromkeys(S, any_time("it is written as fast as its request runs"))
    __slots__ = (
        "_call",
        "_has_one_call",
        "_is_behind_marker",
        "_make_call",
        "_num_before_call",
        "_num_before_thoughts",
        "_opened_in",
        "_spaces",
        "_written",
        "has_spoken",
        "has_thought",
        "is_cut",
        "num_calls",
        "num_reasoning_tokens",
    )
    state: AnswerState

    def __init__(self, make_call: Callable[[], Call], *, is_thinking: bool = False, has_one_call: bool = False) -> None:
        super().__init__(S.REASONING if is_thinking else S.CONTENT)
        self._make_call = make_call
        self._has_one_call = has_one_call
        self._call: Call | None = None
        self._opened_in = S.CONTENT  # where its marker stood
        self._written: list[str] = []  # all of what may be a call, as long as it may be none
        self._spaces: list[str] = []  # at the end of what was said or thought
        self._is_behind_marker = is_thinking  # with nothing but spaces between
        self._num_before_thoughts = 0  # tokens
        self._num_before_call = 0
        self.has_spoken = self.has_thought = False
        self.is_cut = False  # it has ended within the arguments of a call
        self.num_calls = 0
        self.num_reasoning_tokens = 0  # from `<think>` to `</think>`, with both

    @property
    def is_quoting(self) -> bool:
        """Whether it is inside a string of a call."""
        return self._call is not None and self._call.is_quoting

    def num_thought(self, num_tokens: int) -> int:
        """`num_reasoning_tokens`, when the answer has so many tokens, with those of thoughts that go on."""
        going_on = num_tokens - self._num_before_thoughts if self.state is S.REASONING else 0
        return self.num_reasoning_tokens + going_on

    # ---- thoughts and content -------------------------------------------------------------------------------------

    def _text(self, event: Text | Marker) -> AnswerState:
        self._say(self.state, event.text)
        return self.state

    def _think(self, event: OpenThink) -> AnswerState:
        self._spaces.clear()
        self._is_behind_marker = True
        self._num_before_thoughts = event.num_tokens - 1
        return S.REASONING

    def _end_thoughts(self, event: CloseThink) -> AnswerState:
        self._is_behind_marker = True
        self.num_reasoning_tokens += event.num_tokens - self._num_before_thoughts
        return S.CONTENT

    def _say(self, where: AnswerState, text: str) -> None:
        """Spaces wait for what follows them: before a marker, and between it and what comes next, they are its own."""
        body = text.rstrip(SPACES)
        if body:
            said = body
            if self._spaces:
                said = "".join([*self._spaces, body])
                self._spaces.clear()
            if where is S.REASONING:
                self._give(Reasoning(said if self.has_thought else said.lstrip(SPACES)))
                self.has_thought = True
            else:
                is_first = self._is_behind_marker and not self.has_spoken
                self._give(Content(said.lstrip(SPACES) if is_first else said))
                self.has_spoken = True
            self._is_behind_marker = False
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])

    def _give(self, piece: Piece) -> None:
        self._send("client", piece)

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _open_call(self, event: OpenCall) -> AnswerState:
        self._call = self._make_call()
        self._opened_in = S.REASONING if self.state is S.REASONING else S.CONTENT
        self._num_before_call = event.num_tokens - 1
        self._written = [*self._spaces, event.text]
        self._spaces.clear()
        return S.TOOL_NAME

    def _open_another(self, event: OpenCall) -> AnswerState:
        opened_in = self._take_back()
        self._open_call(event)
        self._opened_in = opened_in
        return S.TOOL_NAME

    def _name(self, event: Text | Marker) -> AnswerState:
        assert self._call is not None
        self._written.append(event.text)
        rest = self._call.feed(event.text)
        if self._call.name is not None:
            return self._begin(rest)
        return self._take_back() if self._call.is_broken else S.TOOL_NAME

    def _begin(self, rest: str) -> AnswerState:
        """It is a call, for good."""
        assert self._call is not None
        assert self._call.name is not None
        if self._opened_in is S.REASONING:
            self.num_reasoning_tokens += self._num_before_call - self._num_before_thoughts
        self._written.clear()
        self._is_behind_marker = True
        self._give(CallBegun(self.num_calls, self._call.name))
        self.num_calls += 1
        return self._go_on(rest)

    def _arguments(self, event: Text | Marker) -> AnswerState:
        assert self._call is not None
        return self._go_on(self._call.feed(event.text))

    def _go_on(self, rest: str) -> AnswerState:
        """Give what there is of the arguments; `rest` is what was written behind the call."""
        assert self._call is not None
        if arguments := self._call.take_arguments():
            self._give(CallArguments(self.num_calls - 1, arguments))
        if not (self._call.is_whole or self._call.is_broken):
            return S.TOOL_ARGUMENTS
        if self._has_one_call:
            return S.ENDED
        self._say(S.CONTENT, rest)
        return S.TOOL_END

    def _take_back(self) -> AnswerState:
        """It is no call: all of it is text, where it began."""
        written = "".join(self._written)
        self._written.clear()
        self._say(self._opened_in, written)
        return self._opened_in

    def _close_name(self, event: CloseCall) -> AnswerState:
        assert self._call is not None
        rest = self._call.close()
        if self._call.name is None:
            self._written.append(event.text)
            return self._take_back()
        self._begin(rest)
        return self._over()

    def _close_call(self, _: CloseCall) -> AnswerState:
        assert self._call is not None
        rest = self._call.close()
        self._go_on(rest)
        return self._over()

    def _next_call(self, event: OpenCall) -> AnswerState:
        return S.ENDED if self._close_call(CloseCall("", 0)) is S.ENDED else self._open_call(event)

    def _end_call(self, _: CloseCall) -> AnswerState:
        self._spaces.clear()
        self._is_behind_marker = True
        return S.CONTENT

    def _over(self) -> AnswerState:
        return S.ENDED if self._has_one_call else S.CONTENT

    # ---- its end -------------------------------------------------------------------------------------------------

    def _finish(self, event: Finish) -> AnswerState:
        self._end_in(self.state, event)
        return S.ENDED

    def _finish_name(self, event: Finish) -> AnswerState:
        self._end_in(self._take_back(), event)
        return S.ENDED

    def _finish_arguments(self, _: Finish) -> AnswerState:
        assert self._call is not None
        self.is_cut = not self._call.has_all_arguments
        rest = self._call.cut()
        if arguments := self._call.take_arguments():
            self._give(CallArguments(self.num_calls - 1, arguments))
        self._say(S.CONTENT, rest)
        return S.ENDED

    def _end_in(self, where: AnswerState, event: Finish) -> None:
        """Spaces at the end are what the model has said, unless they stand alone behind a marker."""
        if self._spaces and not self._is_behind_marker:
            said = "".join(self._spaces)
            self._give(Reasoning(said) if where is S.REASONING else Content(said))
        if where is S.REASONING:
            self.num_reasoning_tokens += event.num_tokens - self._num_before_thoughts
