"""The tokenizer actor exists because tokenising takes milliseconds that the loop does not have.

It renders chats and tokenises prompts in a thread of its own, all that wait as one batch. transformers is imported
here and nowhere else outside the kernels.
"""

from __future__ import annotations

import functools
import json
import logging
import mmap
import re
import resource
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from novainfer.actors.device.location import VOCABULARY_FILES, check_vocabulary
from novainfer.actors.tokenizer.gguf_tokenizer import gguf_tokenizer, has_tokenizer, is_library_error
from novainfer.actors.tokenizer.renderer import Renderer, RenderError, RendererUnavailable
from novainfer.fsm.messages.errors import ModelLoadError
from novainfer.fsm.messages.events import Chat, Encode, Encoded, EncodeFailed, PromptKind
from novainfer.fsm.parsing.formats import Formats, formats_of
from novainfer.fsm.text import TokenizerInfo, Vocabulary
from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.gguf import Gguf, is_gguf, read_gguf

logger = logging.getLogger(__name__)

_LOADING = threading.Lock()  # transformers imports its parts as they are asked for, and not for two threads at once

NFC_SHRINK = 3  # bytes of UTF-8 that become one at most, when characters are composed (U+0390 from its parts)
SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
BYTE = re.compile("<0x([0-9A-F]{2})>")  # and this for a byte
CHARS_PER_TOKEN = 128  # of the longest tokens of large vocabularies
# Of the address space: a server grows from 100 to 415 MiB while it loads the demo model's tokenizer, and one of 151,000
# tokens takes another 19 bytes a byte of its file.
ROOM_BYTES = 384 << 20
ROOM_PER_BYTE = 24


class Bare(str):
    """A text that is tokenised as it is: no special token is put before or behind it, whatever the model's way is."""

    __slots__ = ()


class Tokenizer(Protocol):
    """Text to token ids, and the bytes of each token id. Called from one thread."""

    @property
    def prompt_kind(self) -> PromptKind:
        """The most that it makes a prompt of: conversations (and text), text, or no more than token ids."""

    @property
    def formats(self) -> Formats:
        """How its model calls tools and reasons."""

    def encode_batch(self, prompts: Sequence[str | Chat]) -> list[list[int] | str]:
        """The token ids of each prompt, or a sentence saying why it has none."""

    def vocabulary(self) -> Vocabulary:
        """The bytes of each token id, and which ids are control tokens."""

    def tokens_min(self, text: str) -> int:
        """A number of tokens that `text` has at least, found without tokenising it; called on the loop."""

    def info(self) -> TokenizerInfo:
        """What it is; called on the loop."""

    def limit_tokens(self, max_tokens: int) -> None:
        """A prompt of more tokens than this will be refused: a chat that is longer need not be rendered to its end."""

    def grammar_source(self) -> str | None:
        """What grammars need to know of it, as the text of a tokenizer.json; None: it has none. From any thread."""

    def close(self) -> None:
        """Let go of what it holds beside memory; it may be used again."""


class TooLong(str):
    """A sentence saying why a prompt has no token ids: it has more than the context holds."""

    __slots__ = ()


class NotNow(str):
    """A sentence saying why a prompt has no token ids, which is not its own fault: it may be sent again."""

    __slots__ = ()


def encode_jobs(tokenizer: Tokenizer, jobs: list[Any]) -> list[Encoded | EncodeFailed]:
    """The tokenizer thread's work: all waiting Encodes in one batch."""
    encodes: list[Encode] = jobs
    prompts = [job.prompt for job in encodes if not isinstance(job.prompt, list)]
    ways = [Bare(way) for job in encodes for way in _ways_of(job.bad_words)]
    results, words = (iter(tokenizer.encode_batch(texts) if texts else []) for texts in (prompts, ways))
    answers: list[Encoded | EncodeFailed] = []
    for job in encodes:
        result = job.prompt if isinstance(job.prompt, list) else next(results)
        found = [next(words) for _ in _ways_of(job.bad_words)]
        if isinstance(result, str):
            answers.append(_failed(job, result))
        elif (wrong := next((one for one in found if isinstance(one, str)), None)) is not None:
            answers.append(EncodeFailed(job.stream_id, str(wrong).replace("the prompt", "bad_words"), "bad_words"))
        else:
            sequences = [one for one in found if isinstance(one, list) and one]
            answers.append(Encoded(job.stream_id, result, sequences))
    return answers


def _ways_of(words: Sequence[str]) -> list[str]:
    """How each word may stand in a text: where one begins, and behind a space."""
    return [way for word in words for way in (word.lstrip(), f" {word.lstrip()}")]


def _failed(job: Encode, why: str) -> EncodeFailed:
    if isinstance(why, NotNow):
        return EncodeFailed(job.stream_id, str(why), code="server_is_overloaded")
    param = "messages" if isinstance(job.prompt, Chat) else "prompt"
    code = "context_length_exceeded" if isinstance(why, TooLong) else "invalid_value"
    return EncodeFailed(job.stream_id, str(why), param, code)


def load_tokenizer(path: Path, *, is_asked_for: bool = False, template: str | None = None) -> Tokenizer:
    """The tokenizer in a folder or a GGUF file; of a model that has none, one that takes token ids only.

    `template` renders chats in the place of the model's own.
    Raises `ModelLoadError` when it is damaged, or when there is none though it `is_asked_for`.
    """
    if is_gguf(path):
        has_one = has_tokenizer(_read_gguf(path))
    else:
        has_one = any((path / name).exists() for name in (*VOCABULARY_FILES, "tokenizer_config.json"))
    if is_asked_for or has_one:
        return HFTokenizer(path, template)
    logger.warning("%s holds no tokenizer: prompts must be token ids, and answers have no text", path)
    return NoTokenizer()


def load_for_caller(path: Path) -> Any:
    """transformers' own tokenizer object: another one than the engine's, which belongs to a thread.

    Raises `ModelLoadError` when the folder holds none.
    """
    check_vocabulary(path)
    return _from_transformers(path)


def _from_transformers(path: Path) -> Any:
    """What tokenizer.json says, whatever class it is for: AutoTokenizer imports torch to look for that."""
    with _LOADING:
        return _loaded(path)


def _check_room(path: Path) -> None:
    """Raise `ModelLoadError` where the address space is limited and has no room for a tokenizer.

    The library that makes it ends the process where an allocation fails: nobody would say why.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    file = path / "tokenizer.json"
    num_bytes = ROOM_BYTES + (ROOM_PER_BYTE * file.stat().st_size if file.exists() else 0)
    try:
        mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
    except OSError:
        has = f"the address space is limited to {limit >> 20:,} MiB (ulimit -v)"
        message = f"no memory for the tokenizer of {path}: it takes {num_bytes >> 20:,} MiB, and {has}"
        raise ModelLoadError(message, param="tokenizer") from None


def _loaded(path: Path) -> Any:
    _check_room(path)
    if is_gguf(path):
        return gguf_tokenizer(_read_gguf(path))
    try:
        return _class_for(path).from_pretrained(str(path))
    except BaseException as error:
        if not is_library_error(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"cannot load a tokenizer from {path}: {reason}", param="tokenizer") from error


def _class_for(path: Path) -> Any:
    """A model's own for vocab.json and merges.txt: importing one, transformers looks through all models it knows."""
    if (path / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer


def _read_gguf(path: Path) -> Gguf:
    try:
        return read_gguf(path)
    except LoadError as error:
        raise ModelLoadError(str(error), param="tokenizer") from None


class NoTokenizer:
    """For a checkpoint that is only weights: prompts are token ids, and no token has text."""

    prompt_kind: PromptKind = "token_ids"
    formats = Formats()

    def encode_batch(self, prompts: Sequence[str | Chat]) -> list[list[int] | str]:
        """A refusal for each."""
        return ["this model has no tokenizer: its prompts must be token ids"] * len(prompts)

    def vocabulary(self) -> Vocabulary:
        """Nothing."""
        return Vocabulary.build([], frozenset())

    def tokens_min(self, text: str) -> int:
        """None: it will be refused for another reason."""
        return 0

    def info(self) -> TokenizerInfo:
        """Nothing but its name."""
        return TokenizerInfo(tokenizer_class=type(self).__name__)

    def limit_tokens(self, max_tokens: int) -> None:
        """It makes no tokens."""

    def grammar_source(self) -> str | None:
        """None: no token has text that a grammar could look at."""
        return None

    def close(self) -> None:
        """It holds nothing."""


class HFTokenizer:
    """A Hugging Face tokenizer from a directory: of tokens in bytes (Qwen, Llama 3), or SentencePiece's (Llama 2)."""

    def __init__(self, path: Path, template: str | None = None) -> None:
        check_vocabulary(path)
        self._tokenizer = _from_transformers(path)
        if template is not None:
            self._tokenizer.chat_template = template
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        ids = self._backend.get_vocab()
        self._vocabulary = self._build_vocabulary(ids, _bytes_by(_settings_of(self._backend.decoder), path))
        self._bytes_per_token = self._longest_token(ids)
        self._max_tokens = 1 << 32
        self._template = self._default_template()
        self._renderer = None if self._template is None else self._make_renderer(self._template)

    @property
    def prompt_kind(self) -> PromptKind:
        """Conversations where there is a template."""
        return "text" if self._renderer is None else "chat"

    @property
    def formats(self) -> Formats:
        """By what the chat template writes."""
        return formats_of(self._template, self._backend.token_to_id)

    def encode_batch(self, prompts: Sequence[str | Chat]) -> list[list[int] | str]:
        """Render the chats, then tokenise everything in one call."""
        texts: dict[int, str] = {}
        results: list[list[int] | str] = [""] * len(prompts)
        for at, prompt in enumerate(prompts):
            try:
                texts[at] = prompt if isinstance(prompt, str) else self._render(prompt)
            except RenderError as error:
                results[at] = self._refusal(error)
            except RendererUnavailable as error:
                results[at] = NotNow(f"{error}: try again")
        # Templates write the control tokens themselves; a model that begins with one has it put before plain text.
        adds = {at: isinstance(prompts[at], str) and not isinstance(prompts[at], Bare) for at in texts}
        for add_special_tokens in (False, True):
            places = [at for at in texts if adds[at] is add_special_tokens]
            encoded = self._encode([texts[at] for at in places], add_special_tokens=add_special_tokens)
            for at, ids in zip(places, encoded, strict=True):
                results[at] = ids
        return results

    def vocabulary(self) -> Vocabulary:
        """The bytes of each id, what its decoder makes of it; added tokens stand for their own text."""
        return self._vocabulary

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int] | str]:
        """The ids of each text; one that cannot be encoded (half a surrogate pair) spoils only itself."""
        try:
            found = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in found]
        except Exception as error:
            if len(texts) == 1:
                if any("\ud800" <= char <= "\udfff" for char in texts[0]):
                    return ["the prompt is not valid Unicode: it holds half of a surrogate pair"]
                return [f"the prompt is not text that can be tokenised: {error}"]
            return [self._encode([text], add_special_tokens=add_special_tokens)[0] for text in texts]

    def tokens_min(self, text: str) -> int:
        """Its bytes over those of the longest token."""
        if not self._bytes_per_token:
            return 0
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) // NFC_SHRINK
        return -(-num_bytes // self._bytes_per_token)

    def info(self) -> TokenizerInfo:
        """What it was read with, and the default template where there are several."""
        tokenizer = self._tokenizer
        named = {
            name: str(token)
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (token := getattr(tokenizer, name, None)) is not None
        }
        return TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            additional_special_tokens=[token for token in tokenizer.all_special_tokens if token not in named.values()],
            chat_template=tokenizer.get_chat_template() if self._renderer is not None else None,
            **named,
        )

    def limit_tokens(self, max_tokens: int) -> None:
        """Chats of more tokens are not rendered to their end."""
        self._max_tokens = max_tokens

    def grammar_source(self) -> str | None:
        """All of it, tokens that were added included."""
        source: str = self._backend.to_str()
        return source

    def close(self) -> None:
        """End the processes that render chats."""
        if self._renderer is not None:
            self._renderer.close()

    def _render(self, chat: Chat) -> str:
        if self._renderer is None:
            raise RenderError("this model's tokenizer has no chat template; use a plain prompt")
        chars_max = (self._bytes_per_token or CHARS_PER_TOKEN) * NFC_SHRINK * self._max_tokens
        text = self._renderer.render(chat, chars_max)
        if self.tokens_min(text) > self._max_tokens:
            raise RenderError("it is too long", is_too_long=True)
        return text

    def _default_template(self) -> str | None:
        if not self._tokenizer.chat_template:
            return None
        try:
            return str(self._tokenizer.get_chat_template())
        except ValueError:  # it has several, by name
            logger.warning("none of the model's chat templates is called default: it takes plain prompts only")
            return None

    def _make_renderer(self, template: str) -> Renderer:
        return Renderer(template, {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()})

    def _refusal(self, error: RenderError) -> str:
        if error.is_too_long:
            limit = f"This model's maximum context length is {self._max_tokens} tokens"
            return TooLong(f"{limit}, and these messages have more; shorten them.")
        return f"the chat template cannot render these messages: {error}"

    def _build_vocabulary(self, ids: dict[str, int], bytes_of: Callable[[str], bytes]) -> Vocabulary:
        added = self._tokenizer.added_tokens_decoder
        table: list[bytes] = [b""] * (max([*ids.values(), *added]) + 1)
        for token, token_id in ids.items():
            if token_id in added:
                table[token_id] = added[token_id].content.encode()
            else:
                table[token_id] = bytes_of(token)
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        return Vocabulary.build(table, special)

    def _longest_token(self, tokens: Iterable[str]) -> int:
        """The bytes of the longest token; 0 when a text may have fewer tokens than its bytes over these."""
        if not _is_byte_level(_settings_of(self._backend.decoder)):
            return 0  # it may make one token of all that it does not know
        if _settings_of(self._backend.normalizer).get("type") not in (None, "NFC"):
            return 0
        added = self._backend.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):
            return 0  # it takes the spaces around it along, however many
        longest = max([1, *(len(token.content.encode()) for token in added)])
        # A character of its alphabet is a byte. Tokens with others are found in no text.
        return max(longest, *map(len, tokens))


def _settings_of(part: Any) -> dict[str, Any]:
    """What tokenizer.json says of a part of a tokenizer; nothing of one that is not there."""
    found: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return found


def _is_byte_level(decoder: dict[str, Any]) -> bool:
    return [step.get("type") for step in decoder.get("decoders", [decoder])] == ["ByteLevel"]


def _bytes_by(decoder: dict[str, Any], path: Path) -> Callable[[str], bytes]:
    """What a decoder makes of a token, wherever in a text it stands; raises `ModelLoadError` for one not known here."""
    if _is_byte_level(decoder):
        return _bytes_of_byte_level
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    spaces = [step for step in steps if step.get("type") in ("Replace", "Metaspace")]
    is_space = [
        step.get("replacement") == SPACE or (step.get("pattern") == {"String": SPACE} and step.get("content") == " ")
        for step in spaces
    ]
    if is_space == [True] and set(kinds) <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        return _bytes_of_sentencepiece if "ByteFallback" in kinds else _bytes_of_pieces
    raise ModelLoadError(
        f"the tokenizer in {path} is not byte-level ({', '.join(map(str, kinds))}), nor SentencePiece's: only these "
        "kinds are supported",
        param="tokenizer",
    )


def _bytes_of_byte_level(token: str) -> bytes:
    """A character is a byte; a token with one that is of another alphabet stands for its own text."""
    try:
        return token.translate(_byte_alphabet()).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _bytes_of_pieces(token: str) -> bytes:
    return token.replace(SPACE, " ").encode()


def _bytes_of_sentencepiece(token: str) -> bytes:
    """As `_bytes_of_pieces`, with a token for each byte of what has none."""
    byte = BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _bytes_of_pieces(token)


@functools.cache
def _byte_alphabet() -> dict[int, str]:
    """What `str.translate` makes bytes of, in Latin-1: the characters of a byte-level vocabulary (GPT-2's).

    Printable bytes stand for themselves there, and the others are shifted behind them, in order. A character that is of
    another alphabet, though its code is small enough for a byte, becomes one that is none.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) if byte in printable else "\uffff" for byte in range(256)}
    return alphabet | {256 + place: chr(byte) for place, byte in enumerate(shifted)}
