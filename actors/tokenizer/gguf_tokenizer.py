"""The tokenizer in a GGUF file, as transformers' own object: what tokenizer.json would make of the same vocabulary.

Byte-level BPE is read only where the file names a way to split text that is known here exactly (`tokenizer.ggml.pre`,
llama.cpp's names): another one would give other tokens than the model was trained with. SentencePiece's BPE (Llama 2,
Mistral 7B) has no such choice: the best pair of pieces is joined first, by the score of what they make.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

from novainfer.fsm.messages.errors import ModelLoadError
from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.gguf import Gguf
from novainfer.kernels.models.gguf_config import EMBEDDING

__all__ = ["gguf_tokenizer", "has_tokenizer", "is_library_error"]

KEYS = "tokenizer.ggml."
ANOTHER = "; another tokenizer can be given with the setting tokenizer"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens
SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
ROLES = ("bos", "eos", "unknown", "padding")
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Splitting(NamedTuple):
    """What becomes of a text before its pieces are encoded."""

    pattern: str | None  # of the pieces; None: GPT-2's own
    is_composed: bool = False  # characters are composed first (NFC)
    takes_whole_tokens: bool = False  # a piece that is a token is it, whatever merges say
    begins: bool = False  # with the control token that a model begins with, where the file says nothing


SPLITTINGS = {
    "qwen2": Splitting(WORDS % r"\p{N}", is_composed=True),
    "deepseek-r1-qwen": Splitting(WORDS % r"\p{N}", is_composed=True),  # R1-Distill-Qwen: Qwen2.5's, with other roles
    "llama-bpe": Splitting(WORDS % r"\p{N}{1,3}", takes_whole_tokens=True, begins=True),
    "gpt-2": Splitting(None),
}


def has_tokenizer(gguf: Gguf) -> bool:
    """Whether the file says anything of one."""
    return f"{KEYS}model" in gguf.values


def gguf_tokenizer(gguf: Gguf) -> Any:
    """transformers' tokenizer object, with the chat template; raises `ModelLoadError` naming the key at fault."""
    try:
        return _build(gguf)
    except LoadError as error:
        raise ModelLoadError(str(error), param="tokenizer") from None
    except ModelLoadError:
        raise
    except BaseException as error:
        if not is_library_error(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"{gguf.path}: its tokenizer cannot be built: {reason}", param="tokenizer") from error


def is_library_error(error: BaseException) -> bool:
    """Whether it says what is wrong with a tokenizer: a panic of the tokenizers package is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _build(gguf: Gguf) -> Any:
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    model = gguf.text(f"{KEYS}model")
    if model not in MODELS:
        supported = " and ".join(f"{name!r} ({what})" for name, (what, _) in MODELS.items())
        raise LoadError(f"{gguf.path}: {KEYS}model {model!r} is not supported, only {supported}{ANOTHER}")
    if gguf.boolean(f"{KEYS}add_eos_token", False):
        raise LoadError(f"{gguf.path}: {KEYS}add_eos_token true is not supported: a prompt goes on")
    tokens = gguf.items(f"{KEYS}tokens", str)
    embedding = gguf.tensors.get(EMBEDDING)
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise LoadError(
            f"{gguf.path}: {KEYS}tokens must have at most {embedding.shape[0]} entries, the rows of {EMBEDDING}, not "
            f"{len(tokens)}{ANOTHER}"
        )
    types = gguf.items(f"{KEYS}token_type", int, [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise LoadError(f"{gguf.path}: {KEYS}token_type must have one entry for each of {len(tokens)} tokens")
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    if len(vocabulary) != len(tokens) - types.count(UNUSED):
        raise LoadError(f"{gguf.path}: {KEYS}tokens names a token twice")
    made, begins = MODELS[model][1](gguf, vocabulary)
    for kind in (UNKNOWN, CONTROL, USER_DEFINED):
        added = [token for token, found in zip(tokens, types, strict=True) if found == kind]
        made.add_tokens([AddedToken(token, special=kind != USER_DEFINED, normalized=False) for token in added])
    roles = {role: _role(gguf, role, tokens) for role in ROLES}
    if gguf.boolean(f"{KEYS}add_bos_token", begins) and roles["bos"] is not None:
        begin = roles["bos"]
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
        )
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=gguf.text("tokenizer.chat_template", "") or None,
        clean_up_tokenization_spaces=False,
        **{names[role]: token for role, token in roles.items() if token is not None},
    )


def _byte_level(gguf: Gguf, vocabulary: dict[str, int]) -> tuple[Any, bool]:
    """Tokens in bytes, and whether a prompt begins with a control token where the file says nothing."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    splitting = _splitting(gguf)
    merges = [_pair(gguf, vocabulary, merge) for merge in gguf.items(f"{KEYS}merges", str)]
    whole = splitting.takes_whole_tokens
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=whole))
    if splitting.is_composed:
        made.normalizer = normalizers.NFC()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None)
    made.pre_tokenizer = bytes_only
    if splitting.pattern is not None:
        split = pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated", invert=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    made.decoder = decoders.ByteLevel()
    return made, splitting.begins


def _sentencepiece(gguf: Gguf, vocabulary: dict[str, int]) -> tuple[Any, bool]:
    """As `_byte_level`: pieces of text in which a space is a letter, and a token for each byte of what has none.

    The space before each text is put there behind control tokens, too, as llama.cpp and Llama 2's tokenizer.json do.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    lacking = next((byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary), None)
    if lacking is not None:
        raise LoadError(f"{gguf.path}: {KEYS}tokens holds no <0x{lacking:02X}>, but must hold all 256 bytes")
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(gguf, vocabulary), fuse_unk=True, byte_fallback=True))
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    text: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.boolean(f"{KEYS}add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))
        text.append(decoders.Strip(" ", left=1, right=0))
    made.normalizer = normalizers.Sequence(spaces)
    made.decoder = decoders.Sequence(text)
    return made, True


MODELS: dict[str, tuple[str, Callable[[Gguf, dict[str, int]], tuple[Any, bool]]]] = {
    "gpt2": ("byte-level BPE", _byte_level),
    "llama": ("SentencePiece's BPE", _sentencepiece),
}


def _merges(gguf: Gguf, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that make another one, the best first: by its score, then as transformers orders them."""
    tokens = gguf.items(f"{KEYS}tokens", str)
    scores = gguf.items(f"{KEYS}scores", float)
    if len(scores) != len(tokens):
        raise LoadError(f"{gguf.path}: {KEYS}scores must have one entry for each of {len(tokens)} tokens")
    if not all(map(math.isfinite, scores)):
        raise LoadError(f"{gguf.path}: {KEYS}scores must be finite")
    lengths = sorted(set(map(len, vocabulary)))  # where alone a token can be cut, however long it is
    found = [
        (-scores[token_id], -cut, token[:cut], token[cut:])
        for token, token_id in vocabulary.items()
        for cut in takewhile(len(token).__gt__, lengths)
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    found.sort(key=lambda merge: (*merge[:2], -len(merge[3])))
    return [(first, second) for _, _, first, second in found]


def _splitting(gguf: Gguf) -> Splitting:
    pre = gguf.text(f"{KEYS}pre", "")
    if pre not in SPLITTINGS:
        supported = ", ".join(map(repr, SPLITTINGS))
        raise LoadError(f"{gguf.path}: {KEYS}pre {pre!r} is not supported, only {supported}{ANOTHER}")
    return SPLITTINGS[pre]


def _pair(gguf: Gguf, vocabulary: dict[str, int], merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    if not first or not second:
        raise LoadError(f"{gguf.path}: {KEYS}merges must hold two parts with a space between, not {merge!r:.100}")
    for token in (first, second, first + second):
        if token not in vocabulary:
            raise LoadError(f"{gguf.path}: {KEYS}merges holds {merge!r:.100}, but {KEYS}tokens holds no {token!r:.100}")
    return first, second


def _role(gguf: Gguf, role: str, tokens: list[str]) -> str | None:
    key = f"{KEYS}{role}_token_id"
    if key not in gguf.values:
        return None
    token_id = gguf.integer(key, minimum=0)
    if token_id >= len(tokens):
        raise LoadError(f"{gguf.path}: {key} {token_id} is none of {len(tokens)} tokens")
    return tokens[token_id]
