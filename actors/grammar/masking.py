"""Makes masks in a thread: the first one of a request, and the next ones, behind the tokens that it has got.

Where the next step verifies drafts, those behind each of them are made as well, one after the other: the matcher takes
them, and gives them back. Behind a draft that the grammar forbids nothing is allowed: no such draft is ever drawn.

Masks of many requests are made in one call, which is as slow as the slowest of them. Where one took long, nobody says
which: all of them are then made one at a time, in a thread of their own, until each was quick by itself. So who has a
costly grammar waits for it alone, or with its like.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from novainfer.fsm.core.machine import IllegalEvent
from novainfer.fsm.messages.events import Constrain

NOT_ALLOWED = "the grammar does not allow the tokens that this request comes with"
# For one call. On a quiet machine that of 32 requests takes a millisecond, and the costliest mask that was found 300.
SLOW_S = 0.05
FORCED_MAX = 32  # tokens: more than any step verifies of them


class Constrained:
    """A request that is held to a grammar."""

    __slots__ = (
        "answer",
        "asked",
        "compiled",
        "gated",
        "is_slow",
        "matcher",
        "num_masks",
        "num_tokens",
        "request_id",
        "row",
        "words",
    )

    def __init__(self, asked: Constrain) -> None:
        self.request_id = asked.request_id
        self.asked = asked
        self.compiled: Any = None  # from when the grammar is there; None then: there is none
        self.matcher: Any = None
        self.gated: Any = None  # its thoughts, until they are over
        self.num_tokens = 0
        self.answer: list[int] = []  # what the matcher knows of them
        self.words: Any = None  # [num_rows, num_words] int32, and from which of the rows on its masks are there:
        self.row = 0
        self.num_masks = 1  # behind its tokens, and behind each of the drafts that were guessed to follow
        self.is_slow = False  # its last mask may have taken longer than `SLOW_S`

    @property
    def forced(self) -> list[int]:
        """The tokens that must follow, where they are two or more: then the newest mask allows one alone."""
        mask = self.words[self.row]
        if self.gated is not None or np.count_nonzero(mask) != 1 or self.matcher.is_stopped():
            return []
        found: list[int] = self.matcher.compute_ff_tokens()
        return found[:FORCED_MAX] if len(found) > 1 else []

    def takes(self, token_ids: Sequence[int]) -> list[int]:
        """It has got these; those of them that its grammar is to know. Raises IllegalEvent for what may not come."""
        self.num_tokens += len(token_ids)
        gated = self.gated
        known = list(token_ids) if gated is None else [i for i in token_ids if gated.passes(i)]
        if known and self.matcher is not None:
            self.gated = None
        return known


class Advanced(NamedTuple):
    """A request has got tokens, and is guessed to get `drafts`; whether it is wanted what must follow."""

    held: Constrained
    token_ids: Sequence[int]
    drafts: Sequence[int] = ()
    wants_forced: bool = False


Failed = tuple[Constrained, str, str]  # the message, and its code


class Made(NamedTuple):
    """What became of a job: masks that are there, requests that have failed, and what must follow in some."""

    ready: Sequence[Constrained]
    failed: Sequence[Failed]
    forced: Sequence[tuple[int, list[int]]] = ()


class MaskMaker:
    """In one thread, with `num_threads` more for calls of many masks. `compiler` is that of `compilers`."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._masks: Any = None
        self.compiler: Any = None  # from the first request on

    def work(self, job: Constrained | list[Advanced]) -> Made:
        """The mask of a request that begins, or those behind the tokens of some."""
        return self._begin(job) if isinstance(job, Constrained) else self._next(job)

    def _begin(self, held: Constrained) -> Made:
        from novainfer.actors.grammar.compiler import GrammarError

        compiled = held.compiled
        try:
            gated = self.compiler.gate(held.asked, compiled)
        except GrammarError as error:
            return Made([], [(held, error.message, error.code)])
        held.matcher = compiled.matcher() if compiled is not None else None
        held.gated = gated
        if gated is not None:
            held.words = gated.words
        elif compiled is not None:
            held.words = compiled.words
        return self._go_on(held) if held.asked.token_ids else Made([held], [])

    def _go_on(self, held: Constrained) -> Made:
        """The mask behind the tokens that it came with, which its grammar has allowed before."""
        *before, last = held.asked.token_ids
        try:
            held.answer = held.takes(before)
            is_allowed = held.matcher is None or held.matcher.consume_tokens(held.answer)
        except IllegalEvent:
            is_allowed = False
        if not is_allowed:
            return Made([], [(held, NOT_ALLOWED, "invalid_value")])
        return self._next([Advanced(held, [last])])

    def _next(self, rows: Sequence[Advanced]) -> Made:
        from novainfer.actors.grammar.compiler import MaskRow

        ready: list[Constrained] = []
        failed: list[Failed] = []
        words = np.zeros((sum(1 + len(row.drafts) for row in rows), self.compiler.num_words), dtype=np.int32)
        asked: list[tuple[Constrained, MaskRow]] = []
        thoughts: list[tuple[int, Any]] = []  # masks that no matcher makes, and where they belong
        at = 0
        for held, token_ids, drafts, _ in rows:
            known = held.takes(token_ids)
            held.words, held.row, held.num_masks = words, at, 1 + len(drafts)
            begin = at
            at += held.num_masks
            if held.gated is not None:
                found, num_thoughts = held.gated.behind(drafts)
                thoughts += enumerate(found, begin)
                drafts, begin = drafts[num_thoughts:], begin + num_thoughts
            if held.matcher is not None and (held.gated is None or drafts):
                held.answer += known
                asked.append((held, MaskRow(held.matcher, known, drafts, begin)))
            else:
                ready.append(held)
        for (held, _), error in zip(asked, self._advance(asked, words), strict=True):
            if error is not None:
                failed.append((held, error.message, error.code))
            else:
                ready.append(held)
        for place, mask in thoughts:
            words[place] = mask[0]
        lost = {held.request_id for held, _, _ in failed}
        wanting = [row.held for row in rows if row.wants_forced and row.held.request_id not in lost]
        return Made(ready, failed, [(held.request_id, found) for held in wanting if (found := held.forced)])

    def _advance(self, asked: Sequence[tuple[Constrained, Any]], words: Any) -> Sequence[Any]:
        """Write the masks of all, on whom none of the others depends; what is wrong with each."""
        from novainfer.actors.grammar.compiler import Masks

        if self._masks is None:
            self._masks = Masks(self._num_threads)
        # One is made in this thread, and what else the machine does is not its fault.
        clock = time.thread_time if len(asked) == 1 else time.perf_counter
        began_s = clock()
        errors: list[Any] = self._masks.advance([row for _, row in asked], words)
        is_slow = clock() - began_s > SLOW_S
        for at, (held, row) in enumerate(asked):
            held.is_slow = is_slow
            if errors[at] is not None and row.drafts:
                errors[at] = self._again(held, row, words)
        return errors

    def _again(self, held: Constrained, row: Any, words: Any) -> Any:
        """The mask without those behind drafts: one of these is what its matcher has failed at, perhaps."""
        held.matcher = held.compiled.matcher()
        held.matcher.consume_tokens(held.answer)
        words[row.at : row.at + 1 + len(row.drafts)] = 0
        (error,) = self._masks.advance([row._replace(matcher=held.matcher, token_ids=[], drafts=[])], words)
        return error
