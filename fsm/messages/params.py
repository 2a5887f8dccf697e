"""How a request wants its tokens chosen and where it wants to stop. Field names are vLLM's."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.pooling import Pooling
from novainfer.fsm.messages.structured import StructuredOutputsParams, Thoughts

INTEGER_MAX = 2**31 - 1  # no vocabulary and no context is larger, and every format and device holds it
TEMPERATURE_GREEDY_MAX = 1e-5  # vLLM's bound too: below it, dividing logits overflows fp32 before it changes a draw
TEMPERATURE_MAX = 100.0
TOP_P_MIN = 2**-126  # the smallest normal fp32 number: devices take smaller ones for 0, and would keep no token
REPETITION_PENALTY_MIN = 0.01  # far below any use; 1e-38 takes logits beyond what fp32 holds, and 0.01 a hundredfold
REPETITION_PENALTY_MAX = 100.0
STOP_STRINGS_MAX = 16  # OpenAI allows 4; each one costs a search per token
STOP_CHARS_MAX = 256  # a text that may be the beginning of one is compared with each of its prefixes, at each token
TOKEN_IDS_MAX = 2**18  # ids in one list: as many as the largest vocabularies hold
BAD_WORDS_MAX = 256  # each is two sequences at most, as a word and behind a space
BANNED_SEQUENCES_MAX = 1024
LOGIT_BIAS_MAX = 1024  # entries; OpenAI documents 300
LOGPROBS_MAX = 20  # OpenAI's limit for top_logprobs
NUM_CHOICES_MAX = 128  # OpenAI's limit for n
SEED_BITS = 64
SHOWN_CHARS_MAX = 40  # of a number in an error
SALT_CHARS_MAX = 512  # of a cache_salt; 43 characters of base64 hold 256 bits
SESSION_ID = re.compile("[!-~]{1,128}")
SESSION_ID_IS = "1 to 128 printable ASCII characters without spaces"
DURATION_S_MAX = 366 * 86_400.0  # a year: loops lose count of timers that are set for centuries

# What else may be said of a request that gives a vector, and no tokens.
BESIDE_POOLING = frozenset(("pooling", "truncate_prompt_tokens", "timeout_s", "max_queue_s", "priority", "cache_salt"))

TokenIds = Annotated[list[int], "token ids of the served model's vocabulary"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling and stopping of one request; raises `InvalidParameter`, naming the field, when a value cannot be used.

    `temperature=0` is greedy. `max_tokens=None` means: as many as the context holds. `top_k` of 0 or -1 and `top_p`
    of 1 switch those filters off. `seed=None` draws one, which the outputs return. `logprobs=k` returns, for each
    token, its log probability and those of the k most likely ones (k may be 0); `prompt_logprobs=k`, for each token of
    the prompt, which is then computed in full, whatever the prefix cache has of it. `timeout_s` is a deadline for the
    whole request, queueing included. With `max_queue_s` it waits for so long when the queue is full, instead of being
    refused at once, and ends if its first token has not come by then. With `structured_outputs` each token is one that
    the grammar allows, and the end comes only where it accepts; in the answer to a chat, behind the thoughts of a model
    that thinks. After `thinking_token_budget` tokens of those they are closed, and the answer follows; `thoughts` says
    what closes them: the engine knows it.
    `Delta.marks` tells where tokens of `mark_token_ids` stand in the text.
    `bad_words` are not written, neither at the beginning of a word nor behind a space, as the tokenizer would write
    them; `banned_sequences` are the same in token ids: a token that would complete one is not drawn.
    `truncate_prompt_tokens=k` keeps the last k tokens of a prompt that has more; -1, as many as leave room for
    `max_tokens` in the context.
    With `pooling` the prompt is computed and nothing is written behind it: the one delta has its vector (`Engine.embed`
    says it in fewer words). Then nothing may be said of tokens.
    A lower `priority` goes first, where the engine schedules by priority. With a `cache_salt` the prefix cache shares
    this prompt with those of the same salt only. What requests of one `session_id` have computed is kept after their
    answers, where the engine keeps sessions.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: TokenIds | None = None
    banned_token_ids: TokenIds = []
    banned_sequences: list[TokenIds] = []
    bad_words: list[str] = []
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    mark_token_ids: TokenIds = []
    timeout_s: float | None = None
    max_queue_s: float | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    thoughts: Thoughts | None = None
    pooling: Pooling | None = None
    priority: int = 0
    cache_salt: str | None = None
    session_id: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check = _Check()
        if self.pooling is not None:
            self._check_pooling(self.pooling)
        check.between("n", self.n, 1, NUM_CHOICES_MAX)
        check.between("temperature", self.temperature, 0.0, TEMPERATURE_MAX)
        check.above_up_to("top_p", self.top_p, 0.0, 1.0)
        check.between("top_p", self.top_p, TOP_P_MIN, 1.0)
        if not -1 <= self.top_k <= INTEGER_MAX:
            message = f"top_k must be between 1 and {INTEGER_MAX}, or 0 for no limit, not {shown(self.top_k)}"
            raise InvalidParameter(message, param="top_k")
        check.between("min_p", self.min_p, 0.0, 1.0)
        low, high = REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX
        check.between("repetition_penalty", self.repetition_penalty, low, high)
        check.between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check.between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None and not -(2 ** (SEED_BITS - 1)) <= self.seed < 2**SEED_BITS:
            raise InvalidParameter(f"seed must fit {SEED_BITS} bits, not {shown(self.seed)}", param="seed")
        if self.max_tokens is not None:
            check.between("max_tokens", self.max_tokens, 1, INTEGER_MAX)
        check.between("min_tokens", self.min_tokens, 0, self.max_tokens if self.max_tokens is not None else INTEGER_MAX)
        self._check_stop()
        grammar: object = self.structured_outputs
        if grammar is not None and not isinstance(grammar, StructuredOutputsParams):  # to msgspec a dict would do
            what = f"StructuredOutputsParams, not {type(grammar).__name__}"
            raise InvalidParameter(f"structured_outputs must be {what}", param="structured_outputs")
        if grammar is not None and self.ignore_eos:
            message = "ignore_eos cannot be combined with structured_outputs: an answer ends where its grammar does"
            raise InvalidParameter(message, param="ignore_eos")
        if self.thinking_token_budget is not None:
            check.between("thinking_token_budget", self.thinking_token_budget, 0, INTEGER_MAX)
        if self.logprobs is not None:
            check.between("logprobs", self.logprobs, 0, LOGPROBS_MAX)
        if self.prompt_logprobs is not None:
            check.between("prompt_logprobs", self.prompt_logprobs, 0, LOGPROBS_MAX)
        for token_id, bias in self.logit_bias.items():
            check.between(f"logit_bias[{shown(token_id)}]", bias, -100.0, 100.0, param="logit_bias")
        check.between("the length of logit_bias", len(self.logit_bias), 0, LOGIT_BIAS_MAX, param="logit_bias")
        for name, ids in self._token_ids().items():
            check.between(f"the length of {name}", len(ids), 0, TOKEN_IDS_MAX, param=name)
            if ids and (min(ids) < 0 or max(ids) > INTEGER_MAX):
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise InvalidParameter(f"{name} must hold token ids, and {shown(wrong)} is none", param=name)
        self._check_bad_words()
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids must hold at least one token id", param="allowed_token_ids")
        if (kept := self.truncate_prompt_tokens) is not None and kept != -1 and not 1 <= kept <= INTEGER_MAX:
            limits = f"between 1 and {INTEGER_MAX}, or -1 for as many as the context holds"
            message = f"truncate_prompt_tokens must be {limits}, not {shown(kept)}"
            raise InvalidParameter(message, param="truncate_prompt_tokens")
        check.duration("timeout_s", self.timeout_s)
        check.duration("max_queue_s", self.max_queue_s)
        check.between("priority", self.priority, -INTEGER_MAX, INTEGER_MAX)
        if self.cache_salt is not None and not (0 < len(self.cache_salt) <= SALT_CHARS_MAX):
            message = f"cache_salt must have 1 to {SALT_CHARS_MAX} characters, not {len(self.cache_salt)}"
            raise InvalidParameter(message, param="cache_salt")
        if self.cache_salt is not None and not is_unicode(self.cache_salt):
            message = "cache_salt is not valid Unicode: it holds half of a surrogate pair"
            raise InvalidParameter(message, param="cache_salt")
        if self.session_id is not None and SESSION_ID.fullmatch(self.session_id) is None:
            message = f"session_id must be {SESSION_ID_IS}, not {self.session_id[:SHOWN_CHARS_MAX]!r}"
            raise InvalidParameter(message, param="session_id")

    def _check_pooling(self, pooling: Pooling) -> None:
        if pooling.dimensions is not None:
            _Check.between("dimensions", pooling.dimensions, 1, INTEGER_MAX)
        for field in msgspec.structs.fields(self):
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            if field.name not in BESIDE_POOLING and getattr(self, field.name) != default:
                message = f"{field.name} cannot be combined with pooling: such a request gives a vector, and no tokens"
                raise InvalidParameter(message, param=field.name)

    def _check_stop(self) -> None:
        strings = self.stop_strings
        if len(strings) > STOP_STRINGS_MAX:
            raise InvalidParameter(f"stop takes at most {STOP_STRINGS_MAX} strings, not {len(strings)}", param="stop")
        for string in strings:
            if not string:
                raise InvalidParameter("stop must not hold an empty string", param="stop")
            if len(string) > STOP_CHARS_MAX:
                message = f"a stop string has at most {STOP_CHARS_MAX} characters, not {len(string)}"
                raise InvalidParameter(message, param="stop")
            if not is_unicode(string):
                raise InvalidParameter("stop is not valid Unicode: it holds half of a surrogate pair", param="stop")

    def _check_bad_words(self) -> None:
        _Check.between("the length of bad_words", len(self.bad_words), 0, BAD_WORDS_MAX, param="bad_words")
        for word in self.bad_words:
            if not word.strip():
                raise InvalidParameter("bad_words must not hold an empty string", param="bad_words")
            if len(word) > STOP_CHARS_MAX:
                message = f"a word of bad_words has at most {STOP_CHARS_MAX} characters, not {len(word)}"
                raise InvalidParameter(message, param="bad_words")
            if not is_unicode(word):
                message = "bad_words is not valid Unicode: it holds half of a surrogate pair"
                raise InvalidParameter(message, param="bad_words")
        _Check.between(
            "the length of banned_sequences",
            len(self.banned_sequences),
            0,
            BANNED_SEQUENCES_MAX,
            param="banned_sequences",
        )
        if not all(1 <= len(sequence) <= STOP_CHARS_MAX for sequence in self.banned_sequences):
            message = f"banned_sequences must hold lists of 1 to {STOP_CHARS_MAX} token ids"
            raise InvalidParameter(message, param="banned_sequences")

    def with_banned(self, sequences: list[list[int]]) -> SamplingParams:
        """These, with what `bad_words` are in token ids: those of one token are banned wherever they stand."""
        if not sequences:
            return self
        alone = {sequence[0] for sequence in sequences if len(sequence) == 1}
        return msgspec.structs.replace(
            self,
            banned_token_ids=sorted(alone | set(self.banned_token_ids)),
            banned_sequences=[*self.banned_sequences, *(one for one in sequences if len(one) > 1)],
        )

    def _token_ids(self) -> dict[str, Collection[int]]:
        """All fields that hold token ids, by name."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or [],
            "banned_token_ids": self.banned_token_ids,
            "banned_sequences": [token_id for sequence in self.banned_sequences for token_id in sequence],
            "mark_token_ids": self.mark_token_ids,
        }

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list, whatever way they were given."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def truncated(self, token_ids: list[int]) -> list[int]:
        """What is kept of a prompt of these tokens, where `truncate_prompt_tokens` is none or a number of them."""
        kept = self.truncate_prompt_tokens
        return token_ids if kept is None else token_ids[-kept:]

    @property
    def num_tokens_needed(self) -> int:
        """Tokens that the context must have room for behind the prompt."""
        return 0 if self.pooling is not None else self.max_tokens or 1

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < TEMPERATURE_GREEDY_MAX

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidParameter` when a token id is outside `[0, vocab_size)`, or no token is left to be drawn."""
        for name, ids in self._token_ids().items():
            if ids and (highest := max(ids)) >= vocab_size:
                message = f"{name} holds {highest}, but token ids run from 0 to {vocab_size - 1}"
                raise InvalidParameter(message, param=name)
        banned = set(self.banned_token_ids)
        if len(banned) >= vocab_size:
            raise InvalidParameter("banned_token_ids bans every token", param="banned_token_ids")
        if self.allowed_token_ids is not None and set(self.allowed_token_ids) <= banned:
            raise InvalidParameter("banned_token_ids bans every allowed token", param="banned_token_ids")


def is_unicode(text: str) -> bool:
    """False when `text` holds half of a surrogate pair: no format can carry it, and no tokenizer takes it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(number: float) -> str:
    """A number in an error: one of a thousand digits says no more than its beginning."""
    try:
        text = str(number)
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}… ({len(text)} digits)"


def check_types(record: msgspec.Struct) -> None:
    """Raise `InvalidParameter`, naming the field, when a field holds a value of another type than it was declared."""
    try:
        msgspec.convert(record, _twin_of(type(record)), from_attributes=True)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        name = re.split(r"[.\[]", path.partition("$.")[2].strip("`"))[0]
        message = f"{name}: {what[:1].lower()}{what[1:]}"
        if "enum value" in what:
            message = f"{name} must be one of {_choices(type(record), name)}, not {getattr(record, name)!r}"
        raise InvalidParameter(message, param=name) from None


def _choices(kind: type[msgspec.Struct], name: str) -> str:
    (declared,) = [field.type for field in msgspec.structs.fields(kind) if field.name == name]
    kinds = [declared, *get_args(declared)]  # an annotated type is the first argument of its annotation
    literals = [one for kind in kinds for one in (kind, *get_args(kind)) if get_origin(one) is Literal]
    return ", ".join(dict.fromkeys(str(choice) for literal in literals for choice in get_args(literal)))


@cache
def _twin_of(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A record with the fields of `kind` and none of its checks, which convert would run again.

    msgspec knows no paths: a field that may hold one is left to `kind` itself.
    """
    fields = [(f.name, Any if "pathlib." in str(f.type) else f.type) for f in msgspec.structs.fields(kind)]
    return msgspec.defstruct(f"{kind.__name__}Types", fields)


class _Check:
    """Range checks that say the field, the range and the value (nan is in no range)."""

    @staticmethod
    def between(name: str, value: float, low: float, high: float, *, param: str | None = None) -> None:
        if not low <= value <= high:
            message = f"{name} must be between {low} and {high}, not {shown(value)}"
            raise InvalidParameter(message, param=param or name)

    @staticmethod
    def above_up_to(name: str, value: float, low: float, high: float) -> None:
        if not low < value <= high:
            raise InvalidParameter(f"{name} must be more than {low} and at most {high}, not {shown(value)}", param=name)

    @staticmethod
    def duration(name: str, value: float | None) -> None:
        if value is not None and not 0 < value <= DURATION_S_MAX:
            limits = f"more than 0 and at most {DURATION_S_MAX:.0f} seconds"
            raise InvalidParameter(f"{name} must be {limits}, not {shown(value)}", param=name)
