"""From what a client asks for to llguidance's matcher of it, within limits; only this module knows llguidance.

Compiled grammars are kept: choices of one request, and requests with the same schema, begin with a copy. What a grammar
may cost is bounded by llguidance's own limits, and by a few more where those do not reach: the text is short enough for
the stack of the thread that compiles it, and a `multipleOf` is one that can be compiled at all.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import llguidance
import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, StructTag

from novainfer.fsm.messages.structured import StructuredOutputsParams

Words = npt.NDArray[np.int32]

# Of the default limits, this one bounds memory and the longest mask: 20 MB and 0.3 s, a tenth of the default.
LEXER_STATES_MAX = 20_000
MULTIPLE_MAX = 10_000  # of multipleOf, without its point: compiled in 0.1 s, and 1,000,003 in 17 s
COMPILED_MAX = 64  # grammars that are kept; a megabyte or two each
# Between the tokens of JSON: without a bound a model may write whitespace until its tokens are spent.
WHITESPACE = r"[ ]?|\r?\n[ \t]{0,32}"  # a space, or a new line and what it is indented by
SENTENCE_CHARS_MAX = 300
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
    """Compiles grammars for one tokenizer, given as the text of a tokenizer.json; called from one thread."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise GrammarError("this model has no end-of-text token, which structured outputs need to end")
        self.num_words = -(-vocab_size // 32)
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._compiled: OrderedDict[tuple[str, ...], Compiled] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Compiled:
        """Raises `GrammarError` with one sentence that names the field, or the limit."""
        key = params.kind, params.source, str(params.disable_any_whitespace), params.whitespace_pattern or ""
        found = self._compiled.pop(key, None) or self._compile(params)
        self._compiled[key] = found
        while len(self._compiled) > COMPILED_MAX:
            self._compiled.popitem(last=False)
        return found

    def _compile(self, params: StructuredOutputsParams) -> Compiled:
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


class Masks:
    """Makes masks in one call for many matchers; called from one thread."""

    def __init__(self, num_threads: int) -> None:
        self._executor = LLExecutor(num_threads=num_threads)

    def advance(self, rows: Sequence[tuple[LLMatcher, int]], num_words: int) -> tuple[Words, list[GrammarError | None]]:
        """Give each matcher its token: what each may be given next, [num_rows, num_words], and what is wrong with it.

        The interpreter is let go of while masks are computed.
        """
        words = np.zeros((len(rows), num_words), dtype=np.int32)
        self._executor.consume_token_par(list(rows))
        able = [(matcher, at) for at, (matcher, _) in enumerate(rows) if not matcher.is_error()]
        if able:
            self._executor.unsafe_compute_mask_ptr(able, words.ctypes.data, 4 * num_words, len(rows))
        return words, [_error_of(matcher, "") for matcher, _ in rows]


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
    return text if len(text) <= SENTENCE_CHARS_MAX else text[:SENTENCE_CHARS_MAX] + "…"
