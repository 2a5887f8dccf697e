"""From token ids to text that may be sent: whole UTF-8 characters only, and never part of a stop string.

The scheduler assembles text from a table of token bytes, so that a stop string ends a request before the next step
is planned. What cannot be sent yet is held back: bytes of an unfinished character, and text that a stop string may
still begin with.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import msgspec

from novainfer.fsm.messages.outputs import Mark


class TokenTable(msgspec.Struct, frozen=True):
    """The bytes of each token id, one behind the other: of a list of them the objects would be nine tenths."""

    data: bytes
    ends: array[int]  # 0, and where each token ends

    @classmethod
    def of(cls, token_bytes: Iterable[bytes]) -> TokenTable:
        """From the bytes of each token id, `[vocab_size]`."""
        found = list(token_bytes)
        return cls(b"".join(found), array("I", accumulate(map(len, found), initial=0)))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[bytes]:
        return (self.data[begin:end] for begin, end in pairwise(self.ends))

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token id, at least 0; IndexError where the table has none."""
        ends = self.ends
        return self.data[ends[token_id] : ends[token_id + 1]]


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of each token id; special tokens give none unless a request asks for them."""

    token_bytes: TokenTable
    special_ids: frozenset[int]
    plain: dict[
        int, str
    ] = {}  # texts of tokens that are all ASCII and not special, of those that `plain_text` was asked

    @classmethod
    def build(cls, token_bytes: Iterable[bytes], special_ids: frozenset[int]) -> Vocabulary:
        """From the bytes of each token id, `[vocab_size]`; `special_ids` are control tokens such as `<|im_end|>`."""
        return cls(TokenTable.of(token_bytes), special_ids)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of `token_id`; none for ids that the model has and the tokenizer has not."""
        try:
            return self.token_bytes[token_id]
        except IndexError:
            return b""

    def plain_text(self, token_id: int) -> str | None:
        """The text of `token_id` if that is the same behind whatever whole characters; `plain` has it from now on."""
        found = self.bytes_of(token_id)
        if token_id in self.special_ids or not found.isascii():
            return None
        text = self.plain[token_id] = found.decode()
        return text


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
        "_show_special",
        "_stops",
        "_vocabulary",
        "include_stop",
        "is_whole",
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
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # text that a stop string may begin in
        self.is_whole = True  # the decoder holds no bytes of an unfinished character
        self.include_stop = include_stop
        self.stopped_by: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that `token_id` frees; with `may_stop` False a stop string is sent like any other text."""
        text = self._vocabulary.plain.get(token_id)
        if text is None or not self.is_whole:
            text = self._decoded(token_id)
        if not self._stops:
            return text
        return self._release(text, may_stop)

    def take_marks(self) -> list[Mark]:
        """Where tokens stand that are marked: those that were not taken before."""
        return []

    def flush(self) -> str:
        """What was held back, when the request ends for another reason; an unfinished character becomes U+FFFD."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held, self.is_whole = "", True
        return text

    def _decoded(self, token_id: int) -> str:
        """The text of `token_id` behind what the decoder holds."""
        vocabulary = self._vocabulary
        if token_id in vocabulary.special_ids and not self._show_special:
            return ""
        if self.is_whole and (plain := vocabulary.plain_text(token_id)) is not None:
            return plain
        text = self._decoder.decode(vocabulary.bytes_of(token_id))
        self.is_whole = not self._decoder.getstate()[0]
        return text

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
