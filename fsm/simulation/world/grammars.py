"""Grammars for a world: what may follow is a digest of all that came before, so that no wrong mask goes unseen.

They are compiled by threads that may never return, hear of committed tokens, and answer each request by itself, when
whoever drives the world says so; what a step on the device lacks goes there then, as in the real ones. A grammar is a
regular expression that no one reads but this: a number, and then perhaps what goes wrong with it, and behind how many
tokens. `allowed` is what a request may be given behind tokens; the client's oracle asks it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from zlib import crc32

import msgspec

from novainfer.fsm.core.machine import Effect, Send, Start
from novainfer.fsm.device.compiling import (
    LEFT_BEHIND_MAX,
    LIMIT,
    OVERLOADED,
    Compile,
    Compiling,
    Share,
    Unwanted,
    Wanted,
)
from novainfer.fsm.device.masks import Delivery, Give, Gone, Held, Landed, Launched, Made, MaskName
from novainfer.fsm.messages.events import Advance, Constrain, GrammarFailed, Masked, Release
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepMasks, StepPlan
from novainfer.fsm.messages.structured import StructuredOutputsParams
from novainfer.fsm.simulation.world.device import EOS, VOCAB_SIZE

FAILS, NOTHING = "fails", "nothing"  # an error in the place of a mask, and a mask that allows no token
FAILURES = {0: "invalid_value", 1: "grammar_limit"}  # by whether a token has come: the code of the error
CONSTRAINED_EVERY = 5  # one seed of so many has grammars


def allowed(grammar: StructuredOutputsParams, token_ids: Sequence[int]) -> frozenset[int] | None:
    """The tokens that may follow `token_ids`; None: no mask can be made."""
    return _allowed(grammar.source, bytes(token_ids))


@cache
def _allowed(source: str, token_ids: bytes) -> frozenset[int] | None:
    salt, *fault = source.split()
    if fault and int(fault[1]) == len(token_ids):
        return None if fault[0] == FAILS else frozenset()
    digest = crc32(token_ids, int(salt))
    if digest % 16 == 0:
        return frozenset([EOS])
    if digest % 4 == 1:
        return frozenset([1 + digest // 16 % (VOCAB_SIZE - 1)])
    found = {token for token in range(1, VOCAB_SIZE) if crc32(bytes([token]), digest) % 3}
    return frozenset(found | ({EOS} if digest % 4 == 0 else set()))


def forced(grammar: StructuredOutputsParams, token_ids: bytes) -> list[int]:
    """The tokens that must follow `token_ids`, an end not among them."""
    found: list[int] = []
    while len(may_be := allowed(grammar, token_ids + bytes(found)) or ()) == 1 and EOS not in may_be:
        found += may_be
    return found


def error_code(token_ids: Sequence[int]) -> str:
    """The code of the error that ends a request whose mask cannot be made."""
    return FAILURES[bool(token_ids)]


def check_refused(grammars: Grammars, event: GrammarFailed) -> None:
    """A request may end before its grammar is compiled: that takes too long, or as many do as may."""
    others = set(grammars.at_work) - {grammars.compiling.thread}
    sources = [grammars.at_work[thread] for thread in (*others, *grammars.compiling.left_behind)]
    is_too_long = grammars.held[event.request_id][0].source in sources
    assert event.code == (LIMIT if is_too_long else OVERLOADED), f"{event}, and threads are left behind at {sources}"
    assert is_too_long or len(others) == LEFT_BEHIND_MAX, f"{event}, and only {others} are left behind"


class Grammars:
    """What each request has got, as it was told, and the mask that was made for it last."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[StructuredOutputsParams, bytes]] = {}
        self.due: list[int] = []  # requests that wait for a mask
        self.masks: dict[int, bytes] = {}  # the tokens behind which the mask of each request stands
        self.drafts: dict[int, bytes] = {}  # what is guessed to follow those that each request has got
        self.wants_forced: set[int] = set()  # of `due`, those of which it is wanted what must follow
        self.compiling = Compiling()
        self.at_work: dict[int, str] = {}  # threads, and the grammar that each compiles
        self.delivery = Delivery()
        self.given: list[StepMasks] = []  # on their way to the device, until they are taken from here

    def take(self, event: Constrain | Advance | Release) -> tuple[list[int], list[Effect]]:
        """The requests that want a mask from now on, and what its compiler does about who has come or gone."""
        if isinstance(event, Constrain):
            assert event.grammar is not None, "no model of a world thinks"
            self.held[event.request_id] = event.grammar, bytes(event.token_ids)
            self.delivery.handle(Held(event.request_id))
            return [], self.compiling.handle(Wanted(event.request_id, event.grammar.key))
        if isinstance(event, Advance):
            for request_id, token_id in event.tokens:
                grammar, token_ids = self.held[request_id]
                self.held[request_id] = grammar, token_ids + bytes([token_id])
            wanted = list(dict(event.tokens))
            self.wants_forced.difference_update(wanted)
            if event.wants_forced:
                self.wants_forced.update(wanted)
            for request_id in wanted:
                self.drafts.pop(request_id, None)
            for request_id, drafts in event.drafts:
                assert request_id in wanted, f"{drafts} are guessed behind tokens that a mask was made for"
                self.drafts[request_id] = bytes(drafts)
        else:
            del self.held[event.request_id]
            self.masks.pop(event.request_id, None)
            self.drafts.pop(event.request_id, None)
            self._give(self.delivery.handle(Gone(event.request_id)))
            self.due = [i for i in self.due if i != event.request_id]
            return [], self.compiling.handle(Unwanted(event.request_id))
        assert not set(wanted) & set(self.due), "a request that waits for a mask has got a token"
        self.due += wanted
        return wanted, []

    def compiled(self, effect: Effect) -> list[int]:
        """The compiler has decided this: the requests that want a mask from now on."""
        if isinstance(effect, Send):
            assert isinstance(effect.event, GrammarFailed)
            check_refused(self, effect.event)
            self._give(self.delivery.handle(Gone(effect.event.request_id)))
        elif isinstance(effect, Start) and isinstance(effect.job, Compile):
            assert effect.job.thread not in self.at_work, "a thread is given a grammar while it is at one"
            self.at_work[effect.job.thread] = self.held[effect.job.request_id][0].source
        elif isinstance(effect, Start) and isinstance(effect.job, Share):
            self.due += effect.job.request_ids
            return effect.job.request_ids
        return []

    @property
    def awaited(self) -> set[int]:
        """The requests whose mask is to come: it is being made, or their grammar is compiled before."""
        return {*self.due, *(i for request_ids in self.compiling.wanted.values() for i in request_ids)}

    def answer(self, request_id: int) -> Masked | GrammarFailed:
        """The mask that this request waits for."""
        self.due.remove(request_id)
        grammar, token_ids = self.held[request_id]
        if allowed(grammar, token_ids) is None:
            self._give(self.delivery.handle(Gone(request_id)))
            return GrammarFailed(request_id, "a scripted error", error_code(token_ids))
        self.masks[request_id] = token_ids
        self._give(self.delivery.handle(Made([(request_id, len(token_ids))])))
        must = forced(grammar, token_ids) if request_id in self.wants_forced else []
        return Masked([(request_id, len(token_ids))], [(request_id, must)] if len(must) > 1 else [])

    def launched(self, plan: StepPlan) -> StepPlan:
        """`plan` with the bits of those masks that are there."""
        effect, *others = self.delivery.handle(Launched(plan.step_id, plan.epoch, plan.mask_ids))
        self._give(others)
        assert isinstance(effect, Start)
        masks = b"".join(self._bits(plan.mask_ids[place]) for place in effect.job.here)
        return msgspec.structs.replace(plan, mask_ids=[], masks=masks, masks_to_come=list(effect.job.to_come))

    def landed(self, step_id: int, epoch: int) -> None:
        """A step has ended."""
        if self.delivery.lacks(step_id, epoch):
            self.delivery.handle(Landed(step_id, epoch))

    def _give(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect, Start)
            job: Give = effect.job
            if job.is_none:
                made = {(request_id, len(token_ids)) for request_id, token_ids in self.masks.items()}
                names = [name[:2] for name in job.names]
                assert made.isdisjoint(names), f"masks of {job.names} are said to be none, and there are {made}"
            masks = b"" if job.is_none else b"".join(map(self._bits, job.names))
            self.given.append(StepMasks(job.step_id, job.epoch, job.places, masks))

    def _bits(self, name: MaskName) -> bytes:
        request_id, num_tokens, num_drafts = name
        grammar, token_ids = self.held[request_id][0], self.masks[request_id]
        assert len(token_ids) == num_tokens, f"the mask behind {num_tokens} tokens is not that behind {token_ids!r}"
        drafts = self.drafts.get(request_id, b"")[:num_drafts]
        assert len(drafts) == num_drafts, f"the mask behind {num_drafts} drafts is not that behind {drafts!r}"
        for draft in drafts:
            if draft not in (allowed(grammar, token_ids) or ()):
                return bytes(VOCAB_SIZE // 8)
            token_ids += bytes([draft])
        may_be = allowed(grammar, token_ids)
        return sum(1 << token for token in may_be or ()).to_bytes(VOCAB_SIZE // 8, "little")


def constrained(own: Random, params: SamplingParams) -> SamplingParams | None:
    """`params` with a grammar, or None: most of them are held to one, and some of those fail."""
    if own.random() < 0.4:
        return None
    fault = own.choice(["", "", "", f" {FAILS} {own.choice([0, 1, 4])}", f" {NOTHING} {own.choice([0, 2])}"])
    return replaced(params, f"{own.randrange(4)}{fault}")


def replaced(params: SamplingParams, regex: str) -> SamplingParams:
    """`params`, held to a grammar."""

    grammar = StructuredOutputsParams(regex=regex)
    return msgspec.structs.replace(params, structured_outputs=grammar, ignore_eos=False)
