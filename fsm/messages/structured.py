"""What an answer has to be: a grammar in one of the forms that clients know. Field names are vLLM's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from novainfer.fsm.messages.errors import InvalidParameter

GRAMMAR_BYTES_MAX = 256 << 10  # of its text: above any schema in use, and what a compiler's stack is sure to hold
CHOICES_MAX = 4096
# Kinds of grammars; of the fields below exactly one of these is given.
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

_encode = msgspec.json.Encoder().encode


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer is held to, token by token; raises `InvalidParameter` when it is none, or two, of these:

    `json` a JSON schema, as an object or as text; `regex` a regular expression (Rust's syntax), for the whole answer;
    `choice` one of these strings; `grammar` a grammar in Lark's or llama.cpp's notation; `json_object` any JSON object;
    `structural_tag` text with parts that begin at a trigger and are held to a schema each:
    `{"structures": [{"begin": …, "schema": …, "end": …}], "triggers": […]}`.

    Between the tokens of JSON a model may write so much whitespace as `whitespace_pattern` says (a regular expression;
    by default some, not without end), or none at all with `disable_any_whitespace`.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            what = f"not {' and '.join(given)}" if given else "and none is given"
            raise _invalid(f"must hold exactly one of {', '.join(KINDS)}, {what}")
        (kind,) = given
        value = getattr(self, kind)
        text = value if isinstance(value, str) else self._encoded(kind, value)
        if not text:
            raise _invalid(f"{kind} must not be empty", kind)
        num_bytes = len(_utf8(text, kind)) if isinstance(text, str) else len(text)
        if num_bytes > GRAMMAR_BYTES_MAX:
            raise _invalid(f"{kind} takes at most {GRAMMAR_BYTES_MAX} bytes, not {num_bytes}", kind)
        if kind == "choice" and not 0 < len(value) <= CHOICES_MAX:
            raise _invalid(f"choice must hold between 1 and {CHOICES_MAX} strings, not {len(value)}", kind)
        if kind == "choice" and not all(isinstance(one, str) and one for one in value):
            raise _invalid("choice must hold strings that are not empty", kind)
        _utf8(self.whitespace_pattern or "", "whitespace_pattern")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _invalid("disable_any_whitespace and whitespace_pattern exclude each other", "whitespace_pattern")

    @staticmethod
    def _encoded(kind: str, value: Any) -> bytes:
        try:
            return _encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise _invalid(f"{kind} cannot be written as JSON: {error}", kind) from None

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def source(self) -> str:
        """The grammar as one text."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else _encode(value).decode()

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for equal grammars."""
        return self.kind, self.source, str(self.disable_any_whitespace), self.whitespace_pattern or ""


class Thoughts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's thoughts, between tokens of its vocabulary: what is said of an answer holds behind them only.

    The model may open them itself, with its first token; with `budget` they end after so many tokens.
    """

    open_id: int | None = None
    close_id: int
    budget: int | None = None

    def __post_init__(self) -> None:
        if not all(0 <= (number or 0) < 2**31 for number in (self.close_id, self.open_id, self.budget)):
            raise InvalidParameter("thoughts must hold token ids, and a budget that is not below 0", param="thoughts")

    def are_open(self, prompt_token_ids: Sequence[int], special_ids: Collection[int]) -> bool | None:
        """Whether a prompt has opened them for the answer; None: it has closed them, and there are none.

        What a user or a tool says of the markers stands before the last control token, which begins the answer.
        """
        for token_id in reversed(prompt_token_ids):
            if token_id == self.open_id:
                return True
            if token_id == self.close_id:
                return None
            if token_id in special_ids:
                break
        return False


def _utf8(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _invalid(f"{field} holds half of a surrogate pair, which is no character", field) from None


def _invalid(what: str, field: str = "") -> InvalidParameter:
    param = f"structured_outputs.{field}" if field else "structured_outputs"
    return InvalidParameter(f"structured_outputs{'.' if field else ' '}{what}", param=param)
