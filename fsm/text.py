"""From token ids to text that may be sent: whole UTF-8 characters only, and never part of a stop string.

The scheduler assembles text from a table of token bytes, so that a stop string ends a request before the next step
is planned. What cannot be sent yet is held back: bytes of an unfinished character, and text that a stop string may
still begin with.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

import msgspec

from novainfer.fsm.messages.outputs import Mark


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of each token id; special tokens give none unless a request asks for them."""

    token_bytes: list[bytes]
    special_ids: frozenset[int]
    ascii: list[str | None]  # the token's text where it is plain ASCII, else None: the fast path

    @classmethod
    def build(cls, token_bytes: Sequence[bytes], special_ids: frozenset[int]) -> Vocabulary:
        """From the bytes of each token id, `[vocab_size]`; `special_ids` are control tokens such as `<|im_end|>`."""
        ascii_text = [
            t.decode("ascii") if t.isascii() and i not in special_ids else None for i, t in enumerate(token_bytes)
        ]
        return cls(list(token_bytes), special_ids, ascii_text)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of `token_id`; none for ids that the model has and the tokenizer has not."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a tokenizer is, as tokenizer_config.json names it: its special tokens, and the template of chats."""

    tokenizer_class: str
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    additional_special_tokens: list[str] = []
    chat_template: str | None = None


class TextAssembler:
    """The text of one request. `push` gives what may be sent; `stopped_by` is set when a stop string was met."""

    __slots__ = (
        "_decoder",
        "_held",
        "_longest_stop",
        "_plain",
        "_show_special",
        "_stops",
        "_vocabulary",
        "include_stop",
        "stopped_by",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Sequence[str],
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self._stops = list(stops)
        self._longest_stop = max(map(len, stops), default=0)
        self._show_special = not skip_special
        self._plain = vocabulary.ascii  # valid while no bytes are pending
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # text that a stop string may begin in
        self.include_stop = include_stop
        self.stopped_by: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that `token_id` frees; with `may_stop` False a stop string is sent like any other text."""
        plain = self._plain[token_id] if token_id < len(self._plain) else None
        if plain is not None and not self._decoder.getstate()[0]:
            text = plain
        else:
            text = self._decode(token_id)
        if not self._stops:
            return text
        return self._release(text, may_stop)

    def take_marks(self) -> list[Mark]:
        """Where tokens stand that are marked: those that were not taken before."""
        return []

    def flush(self) -> str:
        """What was held back, when the request ends for another reason; an unfinished character becomes U+FFFD."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return text

    def _decode(self, token_id: int) -> str:
        if token_id in self._vocabulary.special_ids and not self._show_special:
            return ""
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))

    def _release(self, text: str, may_stop: bool) -> str:
        held = self._held + text
        if not may_stop:
            self._held = ""
            return held
        first = min(((at, stop) for stop in self._stops if (at := held.find(stop)) >= 0), default=None)
        if first is not None:
            at, self.stopped_by = first
            self._held = ""
            return held[: at + len(self.stopped_by)] if self.include_stop else held[:at]
        keep = self._overlap(held)
        self._held = held[len(held) - keep :] if keep else ""
        return held[: len(held) - keep]

    def _overlap(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._longest_stop - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class MarkingAssembler(TextAssembler):
    """One that notes where tokens of `marked_ids` stand in the text, also while that is held back."""

    __slots__ = ("_marked_ids", "_marks", "_num_chars", "_num_tokens")

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Sequence[str],
        *,
        include_stop: bool,
        skip_special: bool,
        marked_ids: Collection[int],
    ) -> None:
        super().__init__(vocabulary, stops, include_stop=include_stop, skip_special=skip_special)
        self._marked_ids = frozenset(marked_ids)
        self._num_tokens = self._num_chars = 0  # that were pushed, and that were given
        self._marks: list[Mark] = []

    def take_marks(self) -> list[Mark]:
        """As `TextAssembler.take_marks`."""
        marks, self._marks = self._marks, []
        return marks

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """As `TextAssembler.push`; a token that a stop string ends in has no mark, for its text is cut."""
        text = super().push(token_id, may_stop=may_stop)
        self._num_tokens += 1
        self._num_chars += len(text)
        if token_id in self._marked_ids and self.stopped_by is None:
            is_hidden = token_id in self._vocabulary.special_ids and not self._show_special
            shown = "" if is_hidden else self._vocabulary.bytes_of(token_id).decode("utf-8", "replace")
            end = self._num_chars + len(self._held)
            self._marks.append(Mark(token_id, end - len(shown), end, self._num_tokens))
        return text


def text_assembler(
    vocabulary: Vocabulary,
    stops: Sequence[str],
    *,
    include_stop: bool,
    skip_special: bool,
    marked_ids: Collection[int],
) -> TextAssembler:
    """The assembler of a request's text; only one with marked tokens counts characters."""
    if marked_ids:
        return MarkingAssembler(
            vocabulary, stops, include_stop=include_stop, skip_special=skip_special, marked_ids=marked_ids
        )
    return TextAssembler(vocabulary, stops, include_stop=include_stop, skip_special=skip_special)
