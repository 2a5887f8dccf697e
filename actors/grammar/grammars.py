"""The grammars' actor exists because compiling a grammar takes milliseconds, and masks of many requests do too.

    Constrain ──▶ compiler's thread ──▶ the first mask ─┐
                                                        ├──▶ Masked, GrammarFailed ──▶ engine
    Advance ────▶ the masks' thread ──▶ the next ones ──┘

A matcher is given committed tokens only, so nothing of it is ever taken back, and it lives here: a worker that is lost,
a step that fails and a request that is preempted change nothing. The bits of masks stay here too; a plan names them,
and gets them (`filled`) when it goes to the device.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec

from novainfer.actors.core.thread import JobThread
from novainfer.fsm.health import GrammarState, Sighting
from novainfer.fsm.messages.events import Advance, Constrain, GrammarFailed, Mask, Masked, Release
from novainfer.fsm.messages.step import StepPlan
from novainfer.fsm.messages.structured import StructuredOutputsParams

logger = logging.getLogger(__name__)

NO_TOKENIZER = "this model has no tokenizer, which structured outputs need"
LAST_WORD_S = 1.0  # for what is at work when the engine ends; then its thread is left behind
MASK_THREADS_MAX = 4
# llguidance recurses over rules that name each other: 30,000 of them in 260 KB of text need half a gigabyte of stack
# (measured), and less would end this process. The memory is address space: ordinary grammars touch some kilobytes.
COMPILER_STACK_BYTES = 1 << 30
MASK_THREADS = max(1, min((os.cpu_count() or 1) // 2, MASK_THREADS_MAX))  # the rest computes steps


class _Held:
    """A request that is held to a grammar."""

    __slots__ = ("grammar", "mask_id", "matcher", "num_tokens", "request_id", "row", "words")

    def __init__(self, request_id: int, grammar: StructuredOutputsParams) -> None:
        self.request_id = request_id
        self.grammar = grammar
        self.matcher: Any = None  # from when the grammar is compiled
        self.num_tokens = 0
        self.mask_id = 0
        self.words: Any = None  # [num_rows, num_words] int32, and which of the rows is its mask
        self.row = 0


_Failed = tuple[_Held, str, str]  # the message, and its code
_Answer = tuple[list[_Held], list[_Failed]]


class Grammars:
    """`source` gives the text of a tokenizer.json, or None; `tell` takes each answer for the engine. On the loop."""

    def __init__(self, source: Callable[[], str | None], tell: Callable[[Masked | GrammarFailed], None]) -> None:
        self._source = source
        self._tell = tell
        self._vocab_size = 0
        self._eos_token_ids: Sequence[int] = ()
        self._held: dict[int, _Held] = {}
        self._by_mask: dict[int, _Held] = {}
        self._num_masks = 0
        self._compiler: Any = None  # made in its thread, with the first grammar
        self._masks: Any = None
        self._begun = anyio.Event()
        self._is_stopped = False
        self._compiling = JobThread(
            "novainfer-grammar-compiler", self._compile, self._take, stack_bytes=COMPILER_STACK_BYTES
        )
        self._masking = JobThread("novainfer-grammar-masks", self._advance, self._take)
        self._giving_up: asyncio.TimerHandle | None = None

    # ---- life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live from now until `stop`, with threads from the first grammar on; raises what killed one of them."""
        await self._begun.wait()
        if self._is_stopped:
            return
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._compiling.run)
                group.start_soon(self._masking.run)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if self._giving_up is not None:
                self._giving_up.cancel()

    def stop(self) -> None:
        """Drop what waits, and end after what is at work, or without it after `LAST_WORD_S` seconds."""
        self._is_stopped, is_idle = True, not self._begun.is_set()
        self._begun.set()
        if is_idle:
            return
        for thread in (self._compiling, self._masking):
            thread.stop(drop_waiting=True)
        self._giving_up = asyncio.get_running_loop().call_later(LAST_WORD_S, self._give_up)

    def _give_up(self) -> None:
        for thread in (self._compiling, self._masking):
            if thread.num_waiting:
                logger.warning("the thread %s is left behind: its grammar takes too long", thread.name)
            thread.abandon()

    def limit(self, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """What the model draws from, and the tokens that end an answer; before the first request."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    # ---- requests ------------------------------------------------------------------------------------------------

    def put(self, event: Constrain | Advance | Release) -> None:
        """What the scheduler says; the answers come later, to the engine."""
        if isinstance(event, Advance):
            self._masking.put([(self._held[request_id], token_id) for request_id, token_id in event.tokens])
        elif isinstance(event, Constrain):
            held = self._held[event.request_id] = _Held(event.request_id, event.grammar)
            self._compiling.put(held)
            self._begun.set()
        else:
            held = self._held.pop(event.request_id)
            self._by_mask.pop(held.mask_id, None)

    def filled(self, plan: StepPlan) -> StepPlan:
        """`plan` with the bits of the masks that it names, as the device takes it.

        A request may have ended since it was planned: its row is computed all the same, with an empty mask.
        """
        none = bytes(4 * -(-self._vocab_size // 32))
        found = [self._by_mask.get(mask_id) for mask_id in plan.mask_ids]
        masks = b"".join([none if held is None else held.words[held.row].tobytes() for held in found])
        return msgspec.structs.replace(plan, mask_ids=[], masks=masks)

    @property
    def num_held(self) -> int:
        """Requests that are held to a grammar."""
        return len(self._held)

    def sightings(self) -> list[Sighting]:
        """What the watchdog sees of the threads."""
        return [
            Sighting(name, GrammarState.WORKING if thread.num_waiting else GrammarState.IDLE, thread.since_s)
            for name, thread in (("grammar compiler", self._compiling), ("grammar masks", self._masking))
        ]

    # ---- in the threads ------------------------------------------------------------------------------------------

    def _compile(self, held: _Held) -> _Answer:
        from novainfer.actors.grammar.compiler import Compiler, GrammarError

        try:
            if self._compiler is None:
                if (source := self._source()) is None:
                    raise GrammarError(NO_TOKENIZER)
                self._compiler = Compiler(source, self._vocab_size, self._eos_token_ids)
            compiled = self._compiler.compile(held.grammar)
        except GrammarError as error:
            return [], [(held, error.message, error.code)]
        held.matcher, held.words, held.row = compiled.matcher(), compiled.words, 0
        return [held], []

    def _advance(self, rows: list[tuple[_Held, int]]) -> _Answer:
        from novainfer.actors.grammar.compiler import Masks

        if self._masks is None:
            self._masks = Masks(MASK_THREADS)
        num_words = self._compiler.num_words
        words, errors = self._masks.advance([(held.matcher, token_id) for held, token_id in rows], num_words)
        ready: list[_Held] = []
        failed: list[_Failed] = []
        for at, ((held, _), error) in enumerate(zip(rows, errors, strict=True)):
            held.num_tokens += 1
            if error is not None:
                failed.append((held, error.message, error.code))
            else:
                held.words, held.row = words, at
                ready.append(held)
        return ready, failed

    # ---- on the loop ---------------------------------------------------------------------------------------------

    def _take(self, answer: _Answer) -> None:
        ready, failed = answer
        masks: list[Mask] = []
        for held in ready:
            if held.request_id not in self._held:
                continue
            self._by_mask.pop(held.mask_id, None)
            self._num_masks += 1
            held.mask_id = self._num_masks
            self._by_mask[held.mask_id] = held
            masks.append(Mask(held.request_id, held.num_tokens, held.mask_id))
        if masks:
            self._tell(Masked(masks))
        for held, message, code in failed:
            if held.request_id in self._held:
                self._tell(GrammarFailed(held.request_id, message, code))
