"""The grammars' actor exists because compiling a grammar takes milliseconds, and masks of many requests do too.

    Constrain ──▶ compilers ──┐
                              ├──▶ the masks' threads ──▶ Masked, GrammarFailed ──▶ engine
    Advance ──────────────────┘

A matcher keeps committed tokens only (it takes drafts for as long as their masks are made), so nothing of it is ever
taken back later, and it lives here: a worker that is lost, a step that fails and a request that is preempted change
nothing. The bits of masks stay here too; a plan names them, and gets those that are there when it goes to the device
(`launched`), and the others while it is computed (fsm/device/masks.py).
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
from novainfer.actors.grammar.compilers import Compilers
from novainfer.actors.grammar.masking import Advanced, Constrained, Made, MaskMaker
from novainfer.fsm.core.machine import Effect, Machine, Start
from novainfer.fsm.device import masks as delivering
from novainfer.fsm.device.masks import Delivery, Give, Gone, Held, Landed, Launched, LaunchWith, MaskName
from novainfer.fsm.health import GrammarState, Sighting
from novainfer.fsm.messages.events import Advance, Constrain, GrammarFailed, Masked, Release, StepFailed
from novainfer.fsm.messages.step import StepDone, StepMasks, StepPlan

logger = logging.getLogger(__name__)

LAST_WORD_S = 1.0  # for what is at work when the engine ends; then its thread is left behind
MASK_THREADS_MAX = 4
MASK_THREADS = max(1, min((os.cpu_count() or 1) // 2, MASK_THREADS_MAX))  # the rest computes steps


class Grammars:
    """On the loop. `source` gives the text of a tokenizer.json, or None.

    `tell` takes each answer for the engine, and `give` masks for a step that was launched without them.
    """

    def __init__(
        self,
        source: Callable[[], str | None],
        tell: Callable[[Masked | GrammarFailed], None],
        give: Callable[[StepMasks], None],
    ) -> None:
        self._tell = tell
        self._give = give
        self._delivery = Delivery()
        self._held: dict[int, Constrained] = {}
        self._begun = anyio.Event()
        self._is_stopped = False
        self._compilers = Compilers(source, self._begin, self._fail)
        self._together, self._alone = MaskMaker(MASK_THREADS), MaskMaker(1)
        self._masking = JobThread("novainfer-grammar-masks", self._together.work, self._take)
        self._slow = JobThread("novainfer-grammar-slow-masks", self._alone.work, self._take)
        self._giving_up: asyncio.TimerHandle | None = None

    def machines(self) -> tuple[Machine, ...]:
        """Those that live here."""
        return self._delivery, self._compilers.compiling

    # ---- life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live from now until `stop`, with threads from the first grammar on; raises what killed one of them."""
        await self._begun.wait()
        if self._is_stopped:
            return
        try:
            async with anyio.create_task_group() as group:
                for part in (self._compilers, self._masking, self._slow):
                    group.start_soon(part.run)
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
        self._compilers.stop()
        for thread in (self._masking, self._slow):
            thread.stop(drop_waiting=True)
        self._giving_up = asyncio.get_running_loop().call_later(LAST_WORD_S, self._give_up)

    def _give_up(self) -> None:
        self._compilers.give_up()
        for thread in (self._masking, self._slow):
            if thread.num_waiting:
                logger.warning("the thread %s is left behind: its grammar takes too long", thread.name)
            thread.abandon()

    def limit(self, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """What the model draws from, and the tokens that end an answer; before the first request."""
        self._compilers.vocab_size = vocab_size
        self._compilers.eos_token_ids = eos_token_ids

    # ---- requests ------------------------------------------------------------------------------------------------

    def put(self, event: Constrain | Advance | Release) -> None:
        """What the scheduler says; the answers come later, to the engine."""
        if isinstance(event, Advance):
            tokens, drafts = dict[int, list[int]](), dict(event.drafts)
            for request_id, token_id in event.tokens:
                tokens.setdefault(request_id, []).append(token_id)
            rows = [
                Advanced(self._held[i], found, drafts.get(i, ()), event.wants_forced) for i, found in tokens.items()
            ]
            if quick := [row for row in rows if not row.held.is_slow]:
                self._masking.put(quick)
            for row in rows:
                if row.held.is_slow:
                    self._slow.put([row])
        elif isinstance(event, Constrain):
            self._held[event.request_id] = Constrained(event)
            self._delivery.handle(Held(event.request_id))
            self._compilers.want(event)
            self._begun.set()
        else:
            del self._held[event.request_id]
            self._compilers.unwant(event.request_id)
            self._perform(self._delivery.handle(Gone(event.request_id)))

    def launched(self, plan: StepPlan) -> StepPlan:
        """`plan` as the device takes it: with the bits of those masks that are there; the others are given to it later.

        A request may have ended since it was planned: its row is computed all the same, and told that its mask is none.
        """
        effect, *others = self._delivery.handle(Launched(plan.step_id, plan.epoch, plan.mask_ids))
        self._perform(others)
        assert isinstance(effect, Start)
        job: LaunchWith = effect.job
        masks = self._bits([plan.mask_ids[place] for place in job.here])
        return msgspec.structs.replace(plan, mask_ids=[], masks=masks, masks_to_come=job.to_come)

    def landed(self, answer: StepDone | StepFailed) -> None:
        """A step has ended, and needs no masks any more."""
        if self._delivery.lacks(answer.step_id, answer.epoch):
            self._delivery.handle(Landed(answer.step_id, answer.epoch))

    def _bits(self, names: Sequence[MaskName]) -> bytes:
        """Their masks, one after the other; copied once, since 32 of them are 600 kB where the vocabulary is large."""
        held = [(self._held[request_id], behind) for request_id, _, behind in names]
        assert all(behind < one.num_masks for one, behind in held), "each mask is asked for with its drafts"
        return b"".join([one.words[one.row + behind] for one, behind in held])

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect, Start)
            job: Give = effect.job
            masks = b"" if job.is_none else self._bits(job.names)
            self._give(StepMasks(job.step_id, job.epoch, job.places, masks))

    @property
    def num_held(self) -> int:
        """Requests that are held to a grammar."""
        return len(self._held)

    def threads(self) -> list[tuple[str, GrammarState, JobThread]]:
        """Each thread with its name, and whether it works; none before the first grammar."""
        if not self._begun.is_set():
            return []
        return self._compilers.threads() + [
            (name, GrammarState.WORKING if thread.num_waiting else GrammarState.IDLE, thread)
            for name, thread in (("grammar masks", self._masking), ("grammar slow masks", self._slow))
        ]

    def sightings(self) -> list[Sighting]:
        """What the watchdog sees of the threads."""
        return [Sighting(name, state, thread.since_s) for name, state, thread in self.threads()]

    # ---- on the loop ---------------------------------------------------------------------------------------------

    def _begin(self, request_id: int, compiled: Any) -> None:
        """Its grammar is there. What comes with tokens may be long at them, and holds up no others."""
        held = self._held[request_id]
        held.compiled = compiled
        self._together.compiler = self._alone.compiler = self._compilers.compiler
        (self._slow if held.asked.token_ids else self._masking).put(held)

    def _fail(self, request_id: int, message: str, code: str) -> None:
        self._perform(self._delivery.handle(Gone(request_id)))
        self._tell(GrammarFailed(request_id, message, code))

    def _take(self, answer: Made) -> None:
        ready, failed, forced = answer
        prefixes = [(held.request_id, held.num_tokens) for held in ready if held.request_id in self._held]
        if prefixes:
            self._perform(self._delivery.handle(delivering.Made(prefixes)))  # first: a step may wait for them
            self._tell(Masked(prefixes, [(i, found) for i, found in forced if i in self._held]))
        for held, message, code in failed:
            if held.request_id in self._held:
                self._fail(held.request_id, message, code)
