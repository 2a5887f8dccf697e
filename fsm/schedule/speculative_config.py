"""What speculative decoding is asked to do. Fields, defaults and meanings are those of vLLM's `speculative_config`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from novainfer.fsm.messages.errors import InvalidParameter

PARAM = "speculative_config"
PROMPT_LOOKUP_DEFAULT = 5  # vLLM's, for both bounds
PROMPT_LOOKUP_MAX = 32  # tokens compared at each place looked at; matches of more than ten are as good as certain
NUM_SPECULATIVE_TOKENS_MAX = 64  # a draft is verified at the cost of a prompt token, and few runs are as long

NO_METHOD = "Invalid enum value "  # msgspec's words; no other field is a word of a list


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which drafts are proposed, and how many; raises `InvalidParameter` for what cannot be.

    `method` "ngram" looks the last tokens up in the request's own text: `prompt_lookup_max` of them at most,
    `prompt_lookup_min` at least. "draft_model" asks a second model, which must have the target's tokenizer: `model` is
    its folder or hub id. Without a `method` it is the one that `model` says. A step verifies at most
    `num_speculative_tokens` drafts of each request.
    """

    num_speculative_tokens: int
    method: Literal["ngram", "draft_model"] | None = None
    model: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        method = self.method or ("ngram" if self.model in (None, "ngram", "[ngram]") else "draft_model")
        msgspec.structs.force_setattr(self, "method", method)
        _between("num_speculative_tokens", self.num_speculative_tokens, 1, NUM_SPECULATIVE_TOKENS_MAX)
        lookup = self.prompt_lookup_min, self.prompt_lookup_max
        if method == "draft_model":
            if not self.model:
                raise _wrong('method "draft_model" needs a model: a folder or a hub id')
            if lookup != (None, None):
                raise _wrong('prompt_lookup_min and prompt_lookup_max belong to method "ngram"')
            return
        if self.model not in (None, "ngram", "[ngram]"):
            raise _wrong(f'method "ngram" takes no model, not {self.model!r}')
        least, most = lookup
        least, most = least or most or PROMPT_LOOKUP_DEFAULT, most or least or PROMPT_LOOKUP_DEFAULT
        _between("prompt_lookup_max", most if lookup[1] is None else lookup[1], 1, PROMPT_LOOKUP_MAX)
        _between("prompt_lookup_min", least if lookup[0] is None else lookup[0], 1, PROMPT_LOOKUP_MAX)
        if least > most:
            raise _wrong(f"prompt_lookup_min ({least}) must be at most prompt_lookup_max ({most})")
        msgspec.structs.force_setattr(self, "prompt_lookup_min", least)
        msgspec.structs.force_setattr(self, "prompt_lookup_max", most)

    @classmethod
    def of(cls, given: Any) -> SpeculativeConfig:
        """From one of these, an object, or an object as JSON text; raises `InvalidParameter`."""
        if isinstance(given, cls):
            return given
        try:
            return msgspec.json.decode(given, type=cls) if isinstance(given, str) else msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidParameter):
                raise error.__cause__ from None
            what = str(error)
            if what.startswith(NO_METHOD):
                value = what.removeprefix(NO_METHOD).partition(" - at ")[0]
                what = f"method must be 'ngram' or 'draft_model', not {value}"
            raise _wrong(what) from None
        except msgspec.DecodeError as error:
            raise _wrong(f"it must be a JSON object: {error}") from None


def _wrong(message: str) -> InvalidParameter:
    return InvalidParameter(f"{PARAM}: {message}", param=PARAM)


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise _wrong(f"{name} must be between {low} and {high}, not {value}")
