"""Grammars for a world: what may follow is a digest of all that came before, so that no wrong mask goes unseen.

They hear of committed tokens, and answer each request by itself, when whoever drives the world says so. A grammar is a
regular expression that no one reads but this: a number, and then perhaps what goes wrong with it, and behind how many
tokens. `allowed` is what a request may be given behind tokens; the client's oracle asks it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from zlib import crc32

import msgspec

from novainfer.fsm.messages.events import Advance, Constrain, GrammarFailed, Mask, Masked, Release
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepPlan
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
    found = {token for token in range(1, VOCAB_SIZE) if crc32(bytes([token]), digest) % 3}
    return frozenset(found | ({EOS} if digest % 4 == 0 else set()))


def error_code(token_ids: Sequence[int]) -> str:
    """The code of the error that ends a request whose mask cannot be made."""
    return FAILURES[bool(token_ids)]


class Grammars:
    """What each request has got, as it was told; and the masks that were made, by number."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[StructuredOutputsParams, bytes]] = {}
        self.due: list[int] = []  # requests that wait for a mask
        self.masks: dict[int, tuple[int, bytes]] = {}  # whose it is, and behind which tokens
        self._num_masks = 0

    def take(self, event: Constrain | Advance | Release) -> list[int]:
        """The requests that want a mask from now on."""
        if isinstance(event, Constrain):
            self.held[event.request_id] = event.grammar, b""
            wanted = [event.request_id]
        elif isinstance(event, Advance):
            for request_id, token_id in event.tokens:
                grammar, token_ids = self.held[request_id]
                self.held[request_id] = grammar, token_ids + bytes([token_id])
            wanted = [request_id for request_id, _ in event.tokens]
        else:
            del self.held[event.request_id]
            self.masks = {i: mask for i, mask in self.masks.items() if mask[0] != event.request_id}
            self.due = [i for i in self.due if i != event.request_id]
            wanted = []
        assert not set(wanted) & set(self.due), "a request that waits for a mask has got a token"
        self.due += wanted
        return wanted

    def answer(self, request_id: int) -> Masked | GrammarFailed:
        """The mask that this request waits for."""
        self.due.remove(request_id)
        grammar, token_ids = self.held[request_id]
        if allowed(grammar, token_ids) is None:
            return GrammarFailed(request_id, "a scripted error", error_code(token_ids))
        self.masks = {i: mask for i, mask in self.masks.items() if mask[0] != request_id}
        self._num_masks += 1
        self.masks[self._num_masks] = request_id, token_ids
        return Masked([Mask(request_id, len(token_ids), self._num_masks)])

    def filled(self, plan: StepPlan) -> bytes:
        """The bits of the masks that `plan` names; none where a request has ended since."""
        found = b""
        for mask_id in plan.mask_ids:
            request_id, token_ids = self.masks.get(mask_id, (-1, b""))
            may_be = allowed(self.held[request_id][0], token_ids) if request_id in self.held else ()
            found += sum(1 << token for token in may_be or ()).to_bytes(VOCAB_SIZE // 8, "little")
        return found


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
