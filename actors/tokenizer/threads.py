"""The tokenizer's two lanes: prompts wait here and are encoded in two threads, so that a large one delays no small one.

    put ─▶ up to LARGE_BYTES ─▶ a batch of BATCH_BYTES at most ─▶ thread ─▶ deliver
       └─▶ larger ───────────▶ one at a time ───────────────────▶ thread ─▶ deliver

Who asks for tokens alone (`ask`) stands behind no request's prompt: each lane takes one batch of asked ones between two
of requests' prompts, and asked ones have numbers below zero, as no stream has.

A thread has one batch, and nothing waits in it: a prompt whose request has left its queue is dropped here and now, so
that what waits is what holds credits, and admission bounds it. A prompt that surely has more tokens than the context
never comes here (`tokens_min`). The tokenizer itself is in `novainfer.actors.tokenizer.tokenizer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import anyio
import msgspec

from novainfer.actors.core.thread import JobThread
from novainfer.actors.tokenizer.tokenizer import Tokenizer, encode_jobs
from novainfer.fsm.health import Sighting, TokenizerState
from novainfer.fsm.messages.errors import ContextLengthExceeded, EngineClosed, EngineOverloaded
from novainfer.fsm.messages.events import Chat, Encode, Encoded, EncodeFailed, Prompt, PromptKind
from novainfer.fsm.parsing.formats import Formats
from novainfer.fsm.text import TokenizerInfo, Vocabulary

logger = logging.getLogger(__name__)

LOAD = "load"  # the first thread's first job
LARGE_BYTES = 16 << 10  # the worst text is tokenised at 0.3 MB a second: 50 ms
BATCH_BYTES = 64 << 10  # what a small prompt may find at work before it: 0.2 s, or one chat's time for its template
BATCH_MAX = 64  # prompts, however small
ASKED_MAX = 64  # prompts that wait because someone asks for their tokens, in both lanes
ASKED_RETRY_S = 1.0  # when someone else may find room there
LAST_WORD_S = 1.0  # for what is at work when the engine ends; then its thread is left behind


class TokenizerThreads:
    """`loaded` hears the vocabulary, or why there is none; `deliver`, each Encoded and EncodeFailed. On the loop."""

    def __init__(
        self,
        load: Callable[[], Tokenizer],
        *,
        loaded: Callable[[Vocabulary | Exception], None],
        deliver: Callable[[Encoded | EncodeFailed], None],
    ) -> None:
        self._load = load
        self._loaded = loaded
        self._deliver = deliver
        self._tokenizer: Tokenizer | None = None
        self._num_ids: int | None = None  # of the model, which may have fewer than the tokenizer
        self._max_tokens: int | None = None  # of its context
        self._small = _Lane("novainfer-tokenizer", self._work, self._take, batch_max=BATCH_MAX)
        self._large = _Lane("novainfer-tokenizer-large", self._work, self._take, batch_max=1)
        self._giving_up: asyncio.TimerHandle | None = None
        self._asked: dict[int, asyncio.Future[Encoded | EncodeFailed]] = {}
        self._num_asked = 0

    # ---- life ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Load the tokenizer."""
        self._small.load()

    async def run(self) -> None:
        """Live from now until `stop`; raises what killed a thread."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._small.thread.run)
                group.start_soon(self._large.thread.run)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if self._giving_up is not None:
                self._giving_up.cancel()
            if self._tokenizer is not None:
                self._tokenizer.close()

    def stop(self) -> None:
        """Drop what waits, and end after what is at work, or without it after `LAST_WORD_S` seconds."""
        for lane in (self._small, self._large):
            lane.stop()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineClosed("the engine was closed meanwhile"))
        self._giving_up = asyncio.get_running_loop().call_later(LAST_WORD_S, self._give_up)

    def _give_up(self) -> None:
        for lane in (self._small, self._large):
            if lane.is_busy:
                logger.warning("the thread %s is left behind: what it does takes too long", lane.thread.name)
            lane.thread.abandon()

    # ---- prompts -------------------------------------------------------------------------------------------------

    def put(self, job: Encode) -> None:
        """Encode this prompt."""
        num_bytes = size_of(job.prompt) + sum(map(len, job.bad_words))
        (self._small if num_bytes <= LARGE_BYTES else self._large).put(job, num_bytes)

    async def ask(self, prompt: str | Chat) -> Encoded | EncodeFailed:
        """Encode this prompt for its own sake; raises `EngineOverloaded`, or `EngineClosed` when that comes first."""
        if len(self._asked) >= ASKED_MAX:
            message = f"{ASKED_MAX} prompts wait to be tokenised already: try again in {ASKED_RETRY_S:g} s"
            raise EngineOverloaded(message, retry_after_s=ASKED_RETRY_S)
        self._num_asked += 1
        asked_id = -self._num_asked
        answer = self._asked[asked_id] = asyncio.get_running_loop().create_future()
        try:
            self.put(Encode(asked_id, prompt))
            found: Encoded | EncodeFailed = await answer
            return found
        finally:
            del self._asked[asked_id]
            self.forget([asked_id])

    def forget(self, stream_ids: Iterable[int]) -> None:
        """These streams have left the queue: their prompts, if they still wait, are tokenised for nothing."""
        for stream_id in stream_ids:
            self._small.forget(stream_id)
            self._large.forget(stream_id)

    def limit(self, *, num_ids: int, max_tokens: int) -> None:
        """What the model takes: ids of its vocabulary, and so many in one prompt."""
        self._num_ids = num_ids
        self._max_tokens = max_tokens
        if self._tokenizer is not None:
            self._tokenizer.limit_tokens(max_tokens)

    def check_length(self, prompt: Prompt) -> None:
        """Raise `ContextLengthExceeded` for a text that need not be tokenised to know that it does not fit."""
        if self._tokenizer is None or self._max_tokens is None or not isinstance(prompt, str):
            return
        if (num_tokens := self._tokenizer.tokens_min(prompt)) > self._max_tokens:
            limit = f"This model's maximum context length is {self._max_tokens} tokens"
            raise ContextLengthExceeded(
                f"{limit}, but the prompt has at least {num_tokens}; shorten it.", param="prompt"
            )

    def info(self) -> TokenizerInfo:
        """What the tokenizer is."""
        assert self._tokenizer is not None, "nothing is let in before it is there"
        return self._tokenizer.info()

    def grammar_source(self) -> str | None:
        """What grammars need to know of the tokenizer, which is loaded; from any thread."""
        assert self._tokenizer is not None, "nothing is let in before it is there"
        return self._tokenizer.grammar_source()

    # ---- looking in ----------------------------------------------------------------------------------------------

    @property
    def prompt_kind(self) -> PromptKind:
        """The most that a prompt can be; known when the tokenizer is loaded."""
        assert self._tokenizer is not None, "nothing is let in before it is there"
        return self._tokenizer.prompt_kind

    @property
    def formats(self) -> Formats:
        """How the model calls tools and reasons; known when the tokenizer is loaded."""
        assert self._tokenizer is not None, "nothing is let in before it is there"
        return self._tokenizer.formats

    @property
    def num_waiting(self) -> int:
        """Prompts that are not encoded yet, those at work included."""
        return self._small.num_waiting + self._large.num_waiting

    @property
    def num_done(self) -> int:
        """Prompts that were encoded, or refused."""
        return self._small.num_done + self._large.num_done

    @property
    def since_s(self) -> float:
        """Since when the lane that has been at work for longest is; or both are idle."""
        busy = [lane.thread.since_s for lane in (self._small, self._large) if lane.is_busy]
        return min(busy) if busy else max(self._small.thread.since_s, self._large.thread.since_s)

    def sighting(self) -> Sighting:
        """What the watchdog sees of the threads."""
        if self._tokenizer is None:
            state = TokenizerState.LOADING
        else:
            state = TokenizerState.ENCODING if self.num_waiting else TokenizerState.IDLE
        return Sighting("tokenizer", state, self.since_s)

    def freeze(self) -> None:
        """Begin nothing until `thaw`: a fault for tests and drills."""
        for lane in (self._small, self._large):
            lane.thread.freeze()

    def thaw(self) -> None:
        """Go on with what has waited."""
        for lane in (self._small, self._large):
            lane.thread.thaw()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _work(self, job: Any) -> Any:
        """In a thread: load the tokenizer, which is the first job, and then encode a batch."""
        if job != LOAD:
            assert self._tokenizer is not None, "nothing is let in before it is there"
            return encode_jobs(self._tokenizer, job)
        try:
            self._tokenizer = self._load()
            return self._tokenizer.vocabulary()
        except Exception as error:
            return error

    def _take(self, result: Any) -> None:
        if isinstance(result, Vocabulary | Exception):
            self._loaded(result)
        else:
            for answer in map(self._checked, result):
                if answer.stream_id >= 0:
                    self._deliver(answer)
                elif (asked := self._asked.get(answer.stream_id)) is not None and not asked.done():
                    asked.set_result(answer)

    def _checked(self, result: Encoded | EncodeFailed) -> Encoded | EncodeFailed:
        """`result`, unless the tokenizer used a token that the model has no row for."""
        if self._num_ids is None or isinstance(result, EncodeFailed):
            return result
        highest = max([0, *result.token_ids, *(max(sequence) for sequence in result.bad_word_ids)])
        if highest < self._num_ids:
            return result
        what = f"the tokenizer's token {highest} is not in the model's vocabulary of {self._num_ids}"
        return EncodeFailed(result.stream_id, f"{what}: this tokenizer belongs to another model", "prompt")


class _Lane:
    """What waits for one thread, in order, and the batch it is at. Requests' prompts and asked ones take turns."""

    def __init__(self, name: str, work: Callable[[Any], Any], take: Callable[[Any], None], *, batch_max: int) -> None:
        self.thread = JobThread(name, work, partial(self._done, take))
        self._batch_max = batch_max
        # Prompts of requests, and asked ones: by stream, and how many bytes. The first have the next batch.
        self._queues: deque[dict[int, tuple[Encode, int]]] = deque(({}, {}))
        self._requested, self._asked = self._queues
        self._num_at_work = 0
        self._is_stopped = False
        self.num_done = 0

    @property
    def is_busy(self) -> bool:
        return self._num_at_work > 0

    @property
    def num_waiting(self) -> int:
        return len(self._requested) + len(self._asked) + self._num_at_work

    def load(self) -> None:
        self.thread.put(LOAD)

    def put(self, job: Encode, num_bytes: int) -> None:
        queue = self._requested if job.stream_id >= 0 else self._asked
        queue[job.stream_id] = (job, num_bytes)
        self._next()

    def forget(self, stream_id: int) -> None:
        for queue in self._queues:
            queue.pop(stream_id, None)

    def stop(self) -> None:
        self._is_stopped = True
        for queue in self._queues:
            queue.clear()
        self.thread.stop(drop_waiting=True)

    def _next(self) -> None:
        """Hand the thread its next batch, unless it has one."""
        if self._num_at_work or not any(self._queues) or self._is_stopped:
            return
        if not self._queues[0]:
            self._queues.rotate()
        waiting = self._queues[0]
        self._queues.rotate()
        batch: list[Encode] = []
        left = BATCH_BYTES
        for job, num_bytes in waiting.values():
            is_chat = isinstance(job.prompt, Chat)  # rendered alone: each may take its template's whole time
            if batch and (is_chat or num_bytes > left or len(batch) == self._batch_max):
                break
            batch.append(job)
            if is_chat:
                break
            left -= num_bytes
        for job in batch:
            del waiting[job.stream_id]
        self._num_at_work = len(batch)
        self.thread.put(batch)

    def _done(self, take: Callable[[Any], None], result: Any) -> None:
        self.num_done += self._num_at_work
        self._num_at_work = 0
        self._next()
        take(result)


def size_of(prompt: Prompt) -> int:
    """The bytes of a text, or of all that a chat's template is given."""
    if isinstance(prompt, str):
        return len(prompt) if prompt.isascii() else len(prompt.encode("utf-8", "surrogatepass"))
    if isinstance(prompt, list):
        return 0  # it comes for the words beside it
    return len(_encode((prompt.messages, prompt.template_kwargs, prompt.tools)))


_encode = msgspec.msgpack.Encoder().encode
