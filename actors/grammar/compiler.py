"""From what a client asks for to llguidance's matcher of it, within limits; only this module knows llguidance.

A request begins with a copy of its compiled grammar, which others may have, too. What a grammar may cost is bounded by
llguidance's own limits, and by a few more where those do not reach: the text is short enough for the stack of the
thread that compiles it, and a `multipleOf` is one that can be compiled at all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from decimal import Decimal
from typing import Any, NamedTuple

import llguidance
import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, StructTag

from novainfer.fsm.messages.events import Constrain
from novainfer.fsm.messages.structured import StructuredOutputsParams, Thoughts
from novainfer.fsm.parsing.thoughts import CLOSED, OPENED, SPACE, WRITTEN, Thinking, ThoughtState

Words = npt.NDArray[np.int32]

# Of the default limits, this one bounds memory and the longest mask: 20 MB and 0.3 s, a tenth of the default.
LEXER_STATES_MAX = 20_000
MULTIPLE_MAX = 10_000  # of multipleOf, without its point: compiled in 0.1 s, and 1,000,003 in 17 s
SPACES_BEHIND_THOUGHTS = ("\n", "\n\n")  # one of them may stand there, if it is one token
# Between the tokens of JSON: without a bound a model may write whitespace until its tokens are spent.
WHITESPACE = r"[ ]?|\r?\n[ \t]{0,32}"  # a space, or a new line and what it is indented by
SENTENCE_CHARS_MAX = 300
UNSAID = {"NoExtensionBias": "a rule of it is made of itself alone, so that no text fits it"}  # by llguidance
LIMITS = LLParserLimits(max_lexer_states=LEXER_STATES_MAX, verbose_errors=False)
NAMES_OF_LIMITS = {  # what llguidance says, and the limit of which it says so
    "too many states": f"max_lexer_states ({LEXER_STATES_MAX})",
    "too many expressions": f"step_lexer_fuel ({LIMITS.step_lexer_fuel})",
    "too big": f"initial_lexer_fuel ({LIMITS.initial_lexer_fuel})",
    "too many items": f"step_max_items ({LIMITS.step_max_items})",
    "row": f"max_items_in_row ({LIMITS.max_items_in_row})",
    "size": f"max_grammar_size ({LIMITS.max_grammar_size})",
}
NAMES = {
    "json": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the choices",
    "grammar": "the grammar",
    "json_object": "JSON",
    "structural_tag": "the structural tag",
}
INVALID, LIMIT = "invalid_value", "grammar_limit"

_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.0-9eE]+)')


class GrammarError(Exception):
    """A grammar cannot be used; `code` says whether it is wrong (`INVALID`) or beyond a limit (`LIMIT`)."""

    def __init__(self, message: str, code: str = INVALID) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Compiled:
    """A matcher that no token has been given, and its first mask."""

    def __init__(self, matcher: LLMatcher, words: Words) -> None:
        self._matcher = matcher
        self.words = words

    def matcher(self) -> LLMatcher:
        """A copy, to be advanced."""
        return self._matcher.deep_copy()


class Compiler:
    """Compiles grammars for one tokenizer, given as the text of a tokenizer.json; several threads may do so at once."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise GrammarError("this model has no end-of-text token, which structured outputs need to end")
        self.num_words = -(-vocab_size // 32)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        alone = [self._tokenizer.tokenize_str(space) for space in SPACES_BEHIND_THOUGHTS]
        self._spaces = frozenset(token_ids[0] for token_ids in alone if len(token_ids) == 1)

    def compile(self, params: StructuredOutputsParams) -> Compiled:
        """Raises `GrammarError` with one sentence that names the field, or the limit."""
        kind = params.kind
        try:
            matcher = LLMatcher(self._tokenizer, _grammar_of(params), limits=LIMITS, log_level=0)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise GrammarError(f"{NAMES[kind]} cannot be used: {_sentence(str(error))}") from None
        _check(matcher, kind)
        words = np.empty((1, self.num_words), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        _check(matcher, kind)
        return Compiled(matcher, words)

    def gate(self, asked: Constrain, compiled: Compiled | None) -> Gated | None:
        """Its thoughts, before an answer in this grammar (None: in none); None where it may have none."""
        if (thoughts := asked.thoughts) is None:
            return None
        if max(thoughts.close_id, thoughts.open_id or 0) >= self._vocab_size:
            raise GrammarError(f"thoughts must hold ids of this model's {self._vocab_size} tokens")
        anything = np.full((1, self.num_words), -1, dtype=np.int32)
        answer = compiled.words if compiled is not None else anything
        closed = [thoughts.close_id]
        opened = [] if thoughts.open_id is None else [thoughts.open_id]
        words = {
            ThoughtState.MAYBE: _without(_with(answer, opened), closed),
            ThoughtState.THINKING: _without(anything, self._eos_token_ids),
            ThoughtState.CLOSING: _with(np.zeros_like(anything), closed),
            ThoughtState.BEHIND: _without(_with(answer, self._spaces), [*opened, *closed]),
            ThoughtState.ANSWER: answer,
        }
        gated = Gated(thoughts, words, self._spaces, is_thinking=asked.is_thinking)
        gated.is_free = compiled is None
        return gated


class Gated:
    """What one choice may be given while it may think, and what of it is its answer."""

    def __init__(
        self, thoughts: Thoughts, words: Mapping[ThoughtState, Words], spaces: Collection[int], *, is_thinking: bool
    ) -> None:
        self._thoughts = thoughts
        self._words = words
        self._spaces = spaces
        self.is_free = False  # the answer is held to nothing
        self._thinking = Thinking(thoughts.budget, is_thinking=is_thinking)

    @property
    def words(self) -> Words:
        """The mask of the next token, [1, num_words]: behind thoughts, that of the first token of an answer."""
        return self._words[self._thinking.state]

    def behind(self, drafts: Sequence[int]) -> tuple[list[Words], int]:
        """The masks of the next token and of those behind `drafts`, as far as they are known here, and how many drafts.

        The draft behind those, if there is one, begins an answer in a grammar, or is not allowed.
        """
        ahead, found = copy(self), [self.words]
        ahead._thinking = copy(self._thinking)
        for count, token_id in enumerate(drafts):
            if not _allows(found[-1], token_id) or (ahead.passes(token_id) and not self.is_free):
                return found, count
            found.append(ahead.words)
        return found, len(drafts)

    def passes(self, token_id: int) -> bool:
        """Take a token; whether the answer has begun, so that the grammar is to know this one."""
        if token_id == self._thoughts.close_id:
            self._thinking.handle(CLOSED)
        elif token_id == self._thoughts.open_id:
            self._thinking.handle(OPENED)
        else:
            self._thinking.handle(SPACE if token_id in self._spaces else WRITTEN)
        return self._thinking.is_answer


class MaskRow(NamedTuple):
    """A matcher, the tokens that it is to know, those that may follow, and where its first mask is to be written."""

    matcher: LLMatcher
    token_ids: Sequence[int]
    drafts: Sequence[int]
    at: int


class Masks:
    """Makes masks in one call for many matchers; called from one thread."""

    def __init__(self, num_threads: int) -> None:
        self._executor = LLExecutor(num_threads=num_threads)

    def advance(self, rows: Sequence[MaskRow], words: Words) -> list[GrammarError | None]:
        """Give each matcher its tokens, and write what it may be given next to its place in `words`; what is wrong.

        Behind that come the masks behind each draft, as far as the grammar allows them: what follows stays as it is. No
        draft is kept, but a matcher that fails at one is of no use any more. The interpreter is let go of meanwhile.
        """
        tokens = [(row.matcher, row.token_ids) for row in rows]
        while together := [(matcher, token_ids[0]) for matcher, token_ids in tokens if token_ids]:
            self._executor.consume_token_par(together)
            tokens = [(matcher, token_ids[1:]) for matcher, token_ids in tokens if token_ids[1:]]
        assert all(row.at + len(row.drafts) < len(words) for row in rows), "llguidance writes without looking"
        target = words.ctypes.data, words.strides[0], len(words)
        able = [row for row in rows if not row.matcher.is_error()]
        if plain := [(row.matcher, row.at) for row in able if not row.drafts]:
            self._executor.unsafe_compute_mask_ptr(plain, *target)
        if guessed := [(row.matcher, row.at, list(row.drafts)) for row in able if row.drafts]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(guessed, *target)
        return [_error_of(row.matcher, "") for row in rows]


def _allows(words: Words, token_id: int) -> bool:
    return bool(words[0, token_id // 32] >> token_id % 32 & 1)


def _with(words: Words, token_ids: Iterable[int]) -> Words:
    found = words.copy()
    for token_id in token_ids:
        found[0, token_id // 32] |= np.uint32(1 << token_id % 32).view(np.int32)
    return found


def _without(words: Words, token_ids: Iterable[int]) -> Words:
    return ~_with(~words, token_ids)


def _grammar_of(params: StructuredOutputsParams) -> str:
    """llguidance's own form of a grammar."""
    kind, source = params.kind, params.source
    if kind in ("json", "json_object"):
        if kind == "json_object":
            source = '{"type": "object"}'
        else:
            _check_schema(source)
        pattern = params.whitespace_pattern or WHITESPACE
        options: Any = {"whitespace_flexible": False}
        if not params.disable_any_whitespace:
            options = {"whitespace_pattern": pattern}
        return LLMatcher.grammar_from_json_schema(source, overrides=options)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        return llguidance.grammar_from("choice", source)
    for number in _MULTIPLE.findall(source):  # of a schema within
        _check_multiple(number)
    if kind == "grammar":
        return llguidance.grammar_from("grammar", source)
    return _structural_tag(source)


class _Structure(msgspec.Struct):
    begin: str
    schema: dict[str, Any]
    end: str


class _Tag(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


def _structural_tag(source: str) -> str:
    """Text with tags in it: each begins with a trigger, and what follows is held to its schema."""
    found = msgspec.json.decode(source, type=_Tag)
    if not found.structures:
        raise ValueError("structures must hold at least one")
    tags = []
    for structure in found.structures:
        trigger = next((one for one in found.triggers if one and structure.begin.startswith(one)), None)
        if trigger is None:
            raise ValueError(f"no trigger is the beginning of {structure.begin!r}")
        schema = {**structure.schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        tags.append(StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end))
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


def _check_schema(source: str) -> None:
    """What llguidance has no limit for, wherever in the schema it is."""
    parts = [msgspec.json.decode(source)]
    if not isinstance(parts[0], dict):
        raise ValueError("a JSON schema must be an object")
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if isinstance(number := part.get("multipleOf"), int | float) and not isinstance(number, bool):
                _check_multiple(str(number))
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _check_multiple(number: str) -> None:
    digits = Decimal(number).normalize().as_tuple()
    most = int("".join(map(str, digits.digits))) * 10 ** min(max(int(digits.exponent), 0), 9)
    if most > MULTIPLE_MAX:
        raise GrammarError(f"multipleOf {number} is beyond the limit of {MULTIPLE_MAX}", LIMIT)


def _check(matcher: LLMatcher, kind: str) -> None:
    if (error := _error_of(matcher, kind)) is not None:
        raise error


def _error_of(matcher: LLMatcher, kind: str) -> GrammarError | None:
    """What is wrong with a matcher, if anything is."""
    if not matcher.is_error():
        return None
    said = matcher.get_error()
    limit = next((name for words, name in NAMES_OF_LIMITS.items() if words in said.split("\n")[0]), None)
    if limit is not None and ("lexer" in said or "limit" in said or "too" in said):
        return GrammarError(f"the grammar takes more than it may, by {limit}: {_sentence(said)}", LIMIT)
    if kind:
        return GrammarError(f"{NAMES[kind]} cannot be used: {_sentence(said)}")
    return GrammarError(f"the grammar could not be followed any further: {_sentence(said)}", LIMIT)


def _sentence(said: str) -> str:
    """The first lines of what llguidance says, as one sentence."""
    text = " ".join(said.replace("<non-verbose/>", "").split())
    text = UNSAID.get(text, text)
    return text if len(text) <= SENTENCE_CHARS_MAX else text[:SENTENCE_CHARS_MAX] + "…"
