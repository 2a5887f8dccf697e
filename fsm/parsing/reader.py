"""From the deltas of a choice to what it says: its text is cut at its markers, and read by the machine of an answer.

A marker that is a token of the vocabulary is known by the token's id, from the marks of the deltas: the same
characters, spelled out, are text. One that is none is looked for in the text, of which the end is held back while it
may be the beginning of one.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from novainfer.fsm.core.machine import Send
from novainfer.fsm.messages.outputs import Mark
from novainfer.fsm.parsing.answer import Answer, AnswerState
from novainfer.fsm.parsing.formats import CLOSE_CALL, CLOSE_THINK, MARKERS, OPEN_CALL, OPEN_THINK, QWEN3_CODER
from novainfer.fsm.parsing.hermes import HermesCall
from novainfer.fsm.parsing.pieces import (
    CallBegun,
    CloseCall,
    CloseThink,
    Finish,
    Marker,
    OpenCall,
    OpenThink,
    Piece,
    Text,
)
from novainfer.fsm.parsing.qwen_xml import Types, XmlCall
from novainfer.fsm.text import Vocabulary

_EVENTS: Mapping[str, type[Marker]] = {
    OPEN_THINK: OpenThink,
    CLOSE_THINK: CloseThink,
    OPEN_CALL: OpenCall,
    CLOSE_CALL: CloseCall,
}
assert tuple(_EVENTS) == MARKERS


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is read out of an answer: thoughts, where `reasoning`, and calls, in the format `tool_calls` if any.

    `marker_ids` are those of markers that are tokens; `schemas` the types of each tool's parameters.
    """

    tool_calls: str | None = None
    reasoning: bool = False
    has_one_call: bool = False
    marker_ids: Mapping[str, int] = {}
    schemas: Mapping[str, Mapping[str, Types]] = {}

    @property
    def markers(self) -> list[str]:
        """Those that mean something here."""
        calls = [OPEN_CALL, CLOSE_CALL] if self.tool_calls is not None else []
        return ([OPEN_THINK, CLOSE_THINK] if self.reasoning else []) + calls

    @property
    def mark_token_ids(self) -> list[int]:
        """The tokens whose marks are needed."""
        return [self.marker_ids[marker] for marker in self.markers if marker in self.marker_ids]


class AnswerReader:
    """Reads one choice; `is_thinking` where its prompt has opened `<think>`."""

    def __init__(self, wanted: Wanted, *, is_thinking: bool = False) -> None:
        make_call = (lambda: XmlCall(wanted.schemas)) if wanted.tool_calls == QWEN3_CODER else HermesCall
        self.answer = Answer(make_call, is_thinking=is_thinking, has_one_call=wanted.has_one_call)
        ids = wanted.marker_ids
        self._by_id = {ids[marker]: _EVENTS[marker] for marker in wanted.markers if marker in ids}
        spelled = [marker for marker in wanted.markers if marker not in ids]
        self._spelled = _Spelled(spelled) if spelled else None
        self._marks: deque[Mark] = deque()  # that were not come to yet
        self._text = ""  # that was not read yet: a mark begins in it and has not ended
        self._at = 0  # where that begins, in characters of the choice

    @property
    def is_over(self) -> bool:
        """Whether nothing more of it is wanted, or it has ended."""
        return self.answer.state is AnswerState.ENDED

    def read(self, text: str, marks: Sequence[Mark], num_tokens: int) -> list[Piece]:
        """What a delta brings, behind which the choice has `num_tokens`."""
        if not (marks or self._marks or self._text) and (self._spelled is None or self._spelled.is_plain(text)):
            self._at += len(text)
            return self._pieces([Text(text)]) if text else []
        return self._pieces(self._cut(text, marks, num_tokens))

    def finish(self, num_tokens: int) -> list[Piece]:
        """What was held back, when the choice has ended."""
        text, self._text = self._text, ""
        events = [*self._plain(text, num_tokens)]
        if self._spelled is not None:
            events += self._spelled.flush()
        return self._pieces([*events, Finish(num_tokens)])

    def _pieces(self, events: Iterable[Text | Marker | Finish]) -> list[Piece]:
        """What the machine makes of them; neighbours of a kind are one piece."""
        pieces: list[Piece] = []
        for event in events:
            for effect in self.answer.handle(event):
                assert isinstance(effect, Send)
                if pieces:
                    _append(pieces, effect.event)
                else:
                    pieces.append(effect.event)
        return pieces

    def _cut(self, text: str, marks: Sequence[Mark], num_tokens: int) -> Iterator[Text | Marker]:
        self._marks.extend(mark for mark in marks if mark.token_id in self._by_id)
        self._text += text
        while self._marks and self._marks[0].end <= self._at + len(self._text):
            mark = self._marks.popleft()
            begin, end = mark.start - self._at, mark.end - self._at
            yield from self._plain(self._text[:begin], num_tokens)
            if self._spelled is not None:
                yield from self._spelled.flush()
            yield self._by_id[mark.token_id](self._text[begin:end], mark.num_tokens)
            self._text, self._at = self._text[end:], mark.end
        num_chars = len(self._text)
        if self._marks:
            num_chars = min(num_chars, self._marks[0].start - self._at)
        plain, self._text = self._text[:num_chars], self._text[num_chars:]
        self._at += num_chars
        yield from self._plain(plain, num_tokens)

    def _plain(self, text: str, num_tokens: int) -> Iterable[Text | Marker]:
        """Text in which no token is a marker."""
        if not text:
            return ()
        return [Text(text)] if self._spelled is None else self._spelled.cut(text, num_tokens)


class _Spelled:
    """Markers that are no tokens, looked for in text."""

    def __init__(self, markers: Collection[str]) -> None:
        self._markers = markers
        self._any = re.compile("|".join(map(re.escape, markers)))
        self._longest = max(map(len, markers))
        self._held = ""  # may be the beginning of one

    def is_plain(self, text: str) -> bool:
        """Whether no marker is in `text`, nor may one begin or end there."""
        return not self._held and "<" not in text

    def cut(self, text: str, num_tokens: int) -> Iterator[Text | Marker]:
        """`text`, behind what was held back, cut at its markers."""
        text, at = self._held + text, 0
        for found in self._any.finditer(text):
            if found.start() > at:
                yield Text(text[at : found.start()])
            yield _EVENTS[found[0]](found[0], num_tokens)
            at = found.end()
        keep = self._overlap(text[max(at, len(text) - self._longest + 1) :])
        self._held = text[len(text) - keep :] if keep else ""
        if len(text) - keep > at:
            yield Text(text[at : len(text) - keep])

    def flush(self) -> list[Text | Marker]:
        """What was held back, and is no marker."""
        held, self._held = self._held, ""
        return [Text(held)] if held else []

    def _overlap(self, text: str) -> int:
        """The length of the longest end of `text` that a marker begins with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(marker.startswith(text[-length:]) for marker in self._markers):
                return length
        return 0


def _append(pieces: list[Piece], piece: Piece) -> None:
    last = pieces[-1]
    if isinstance(last, CallBegun) or type(last) is not type(piece):
        pieces.append(piece)
    else:  # two calls have a beginning between them
        pieces[-1] = msgspec.structs.replace(last, text=last.text + piece.text)


def opens_thoughts(prompt_token_ids: Sequence[int], vocabulary: Vocabulary, marker_ids: Mapping[str, int]) -> bool:
    """Whether a rendered prompt has opened `<think>` for the answer: behind its last control token that is no marker.

    What a user or a tool says of the marker stands before that: it is the one that begins the assistant's turn.
    """
    begin, markers = len(prompt_token_ids), frozenset(marker_ids.values())
    while begin:
        token_id = prompt_token_ids[begin - 1]
        if token_id in vocabulary.special_ids and token_id not in markers:
            break
        begin -= 1
    tail = b"".join(map(vocabulary.bytes_of, prompt_token_ids[begin:]))
    return tail.rfind(OPEN_THINK.encode()) > tail.rfind(CLOSE_THINK.encode())
