"""Texts to tokens and back: as an engine does it, and with a model's tokenizer alone, while the model is not loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from novainfer.actors.tokenizer.threads import TokenizerThreads
from novainfer.actors.tokenizer.tokenizer import Bare
from novainfer.arguments import must_be
from novainfer.assembly import model_sizes, tokenizer_loader
from novainfer.config import EngineConfig
from novainfer.ends import error_of
from novainfer.fsm.messages.errors import EngineClosed, EngineOverloaded, InvalidParameter
from novainfer.fsm.messages.events import Chat, Encoded, EncodeFailed, End
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.parsing.formats import Formats
from novainfer.fsm.text import TokenizerInfo, Vocabulary
from novainfer.prompt import PromptLike, checked_ids, to_prompt
from novainfer.room import check_room

__all__ = ["ModelTokens", "Tokenizers", "bytes_of", "token_ids_of"]

TOKENIZERS_MAX = 2  # of models that are not loaded; that of a large vocabulary has a hundred megabytes
TOKENIZER_IDLE_S = 60.0  # without a prompt; then it goes
RETRY_S = 1.0  # when somebody else may have done with one of them


async def token_ids_of(
    ask: Callable[[str | Chat], Awaitable[Encoded | EncodeFailed]],
    prompt: PromptLike,
    vocab_size: int,
    *,
    add_special_tokens: bool,
    retry_after_s: Callable[[], float],
) -> list[int]:
    """As `Engine.tokenize`, of what `ask` gives."""
    wanted = to_prompt(prompt, vocab_size)
    if isinstance(wanted, list):
        return wanted
    if isinstance(wanted, str) and not add_special_tokens:
        wanted = Bare(wanted)
    found = await ask(wanted)
    if isinstance(found, Encoded):
        return found.token_ids
    raise error_of(End(error=found.message, code=found.code, param=found.param), retry_after_s())


async def bytes_of(vocabulary: Vocabulary, token_ids: list[int], vocab_size: int, *, has_texts: bool) -> list[bytes]:
    """As `Engine.detokenize`."""
    must_be("token_ids", token_ids, list, "a list of integers")
    ids = checked_ids(token_ids, vocab_size, "token_ids", param="token_ids")
    if not has_texts:
        raise InvalidParameter("token_ids have no text: this model has no tokenizer", param="token_ids")
    return await asyncio.to_thread(lambda: list(map(vocabulary.bytes_of, ids)))


class ModelTokens:
    """The tokenizer of a configured model, on the running loop from `start` to `aclose`; methods are as in `Engine`.

    `max_model_len` is what is asked for, or what the model was made for: its engine may have less memory than that.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._threads = TokenizerThreads(tokenizer_loader(config), loaded=self._loaded, deliver=_of_no_request)
        self._found: asyncio.Future[Vocabulary] | None = None
        self._running: asyncio.Task[None] | None = None
        self._vocabulary = Vocabulary.build([], frozenset())
        self._vocab_size = 0
        self.max_model_len = 0
        self._is_closed = False

    async def start(self) -> None:
        """Load it, off the loop; raises `ModelLoadError`."""
        self._found = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._threads.run())
        self._threads.begin()
        try:
            sizes = await asyncio.to_thread(model_sizes, self._config)
            self._vocabulary = await self._found
        except BaseException:
            await self.aclose()
            raise
        most = self._config.max_model_len
        self._vocab_size = sizes.vocab_size
        self.max_model_len = sizes.max_model_len if most is None else min(most, sizes.max_model_len)
        self._threads.limit(num_ids=self._vocab_size, max_tokens=self.max_model_len)

    async def aclose(self) -> None:
        """Let go of it; who waits for tokens hears `EngineClosed`."""
        self._is_closed = True
        if self._running is not None:
            self._threads.stop()
            await asyncio.gather(self._running, return_exceptions=True)

    @property
    def vocabulary(self) -> Vocabulary:
        """As `Engine.vocabulary`."""
        return self._vocabulary

    @property
    def formats(self) -> Formats:
        """How the model calls tools and reasons."""
        return self._threads.formats

    def check_room(self, prompts: Sequence[PromptLike], params: SamplingParams) -> list[int]:
        """As of the engine that this model would have."""
        return check_room(self._config, prompts, params)

    async def tokenize(self, prompt: PromptLike, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `prompt`."""
        return await token_ids_of(
            self._ask,
            prompt,
            self._vocab_size,
            add_special_tokens=add_special_tokens,
            retry_after_s=lambda: RETRY_S,
        )

    async def detokenize(self, token_ids: list[int]) -> list[bytes]:
        """The bytes of each token."""
        has_texts = self._threads.prompt_kind != "token_ids"
        return await bytes_of(self._vocabulary, token_ids, self._vocab_size, has_texts=has_texts)

    def tokenizer_info(self) -> TokenizerInfo:
        """What the tokenizer is."""
        return self._threads.info()

    async def _ask(self, prompt: str | Chat) -> Encoded | EncodeFailed:
        if self._is_closed:
            raise EngineClosed("the tokenizer was closed")
        return await self._threads.ask(prompt)

    def _loaded(self, found: Vocabulary | Exception) -> None:
        assert self._found is not None
        if self._found.done():
            return
        if isinstance(found, Vocabulary):
            self._found.set_result(found)
        else:
            self._found.set_exception(found)
            self._found.exception()  # seen: the model's own files may be what is told of


class Tokenizers:
    """Tokenizers of models that are not loaded, `TOKENIZERS_MAX` of them, each until it was idle for `idle_s`."""

    def __init__(self, make: Callable[[str], ModelTokens], idle_s: float = TOKENIZER_IDLE_S) -> None:
        self._make = make
        self._idle_s = idle_s
        self._entries: dict[str, _Entry] = {}  # by model, the one that was used longest ago first
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ModelTokens]:
        """That of the model `name`, loaded if need be.

        Raises `ModelLoadError`, and `EngineOverloaded` where as many others are in use.
        """
        entry = self._entries.pop(name, None) or self._new(name)
        self._entries[name] = entry
        entry.num_users += 1
        if entry.timer is not None:
            entry.timer.cancel()
        try:
            await asyncio.shield(entry.starting)
            yield entry.tokens
        finally:
            entry.num_users -= 1
            if entry.starting.done() and (entry.starting.cancelled() or entry.starting.exception()):
                if self._entries.get(name) is entry:
                    del self._entries[name]
            elif not entry.num_users:
                entry.timer = asyncio.get_running_loop().call_later(self._idle_s, self._let_go, name)

    async def aclose(self) -> None:
        """Let go of all of them."""
        for name in list(self._entries):
            self._let_go(name)
        await asyncio.gather(*self._closing)

    def _new(self, name: str) -> _Entry:
        idle = next((one for one, entry in self._entries.items() if not entry.num_users), None)
        if len(self._entries) >= TOKENIZERS_MAX:
            if idle is None:
                what = f"The tokenizers of {TOKENIZERS_MAX} other models that are not loaded are in use"
                raise EngineOverloaded(f"{what}: try again in {RETRY_S:g} s", retry_after_s=RETRY_S)
            self._let_go(idle)
        return _Entry(self._make(name))

    def _let_go(self, name: str) -> None:
        entry = self._entries.pop(name)
        if entry.timer is not None:
            entry.timer.cancel()
        task = asyncio.create_task(entry.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _Entry:
    """One of them: it is loaded once, however many ask for it meanwhile."""

    def __init__(self, tokens: ModelTokens) -> None:
        self.tokens = tokens
        self.starting = asyncio.create_task(tokens.start())
        self.num_users = 0
        self.timer: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        self.starting.cancel()
        await asyncio.gather(self.starting, return_exceptions=True)
        await self.tokens.aclose()


def _of_no_request(answer: Encoded | EncodeFailed) -> None:
    raise AssertionError("no request has its prompt encoded here")
