"""What became of the guesses in a step, by an account of its own: from its plan, its outcome, and what clients expect.

A row that verifies k guesses gives between one and k + 1 tokens. Its request keeps those before its own end, so many
more tokens are computed for good, and what its step has computed behind them is given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isnan
from struct import unpack_from
from typing import TYPE_CHECKING, Any

import msgspec

from novainfer.fsm.core.machine import Effect, Send
from novainfer.fsm.messages.events import Batch, MakeBatch
from novainfer.fsm.messages.step import NO_MASK, NO_TOKEN, StepDone, StepPlan
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.simulation.world.world import World


class Kept(msgspec.Struct):
    """A live request whose guesses a step has verified; `blocks` are those it had before anything was given back."""

    request: Request
    start: int  # tokens computed before the step
    count: int  # and with it
    blocks: list[int]


def without_number(world: World, flight: Flight, outcome: StepDone) -> list[Request]:
    """The requests that a step gives no number, before they have ended with one of its tokens."""
    counts = outcome.num_tokens or [1] * len(flight.samples)
    found = []
    for request, count, end in zip(flight.samples, counts, accumulate(counts), strict=False):
        if outcome.token_ids[end - 1] == NO_TOKEN and not request.ended:
            expected = world.clients[request.stream_id].expected(request.choice).token_ids
            if count <= len(expected) - request.num_generated:
                found.append(request)
    for (request, first, count), sums in zip(flight.pooled, outcome.pooled, strict=True):
        if not request.ended and first + count == len(request.token_ids) and isnan(unpack_from("<d", sums)[0]):
            found.append(request)
    return found


class Verified:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._drafts: dict[int, int] = {}  # by request, in the step on the device
        self.kept: list[Kept] = []  # of the step that has just ended
        self._counts = [0, 0, 0]  # rows with guesses, guesses, and those that were right

    def before(self, event: Any) -> None:
        """The scheduler is about to handle `event`."""
        self.kept = []
        flight = self._world.scheduler.oldest_flight
        outcome = event.outcome if isinstance(event, MakeBatch) else None
        if flight is None or not isinstance(outcome, StepDone) or not self._drafts:
            return
        if len(outcome.num_tokens) != len(flight.samples):
            raise Violation(f"step {flight.step_id} samples {len(flight.samples)} rows, and gives {outcome.num_tokens}")
        begins = accumulate(outcome.num_tokens, initial=0)
        for request, num_tokens, begin in zip(flight.samples, outcome.num_tokens, begins, strict=False):
            if outcome.token_ids[begin] == NO_MASK:  # its mask came too late: nothing is known of its guesses
                continue
            if (num_drafts := self._drafts.get(request.request_id)) is None:
                if num_tokens != 1:
                    raise Violation(f"step {flight.step_id} gives {num_tokens} tokens of a row without guesses")
            elif not request.ended:
                if num_tokens > num_drafts + 1:
                    raise Violation(f"step {flight.step_id} gives {num_tokens} tokens for {num_drafts} guesses")
                client = self._world.clients[request.stream_id]
                left = len(client.expected(request.choice).token_ids) - request.num_generated
                count = min(num_tokens, left)
                start = len(request.token_ids) - 1
                self._world.counts["drafts verified"] += num_drafts
                self._world.counts["drafts kept"] += count - 1
                self.kept.append(Kept(request, start, start + count, list(request.kv.blocks)))
                self._counts = [a + b for a, b in zip(self._counts, (1, num_drafts, num_tokens - 1), strict=True)]

    def after(self, event: Any, effects: Sequence[Effect]) -> None:
        """The scheduler has handled `event`."""
        for kept in self.kept:
            request, num_blocks = kept.request, -(-kept.count // self._world.shape.block_size)
            has_ended = request.ended
            if has_ended or request.slot < 0:
                continue
            if request.num_computed != kept.count or len(request.token_ids) != kept.count + 1:
                raise Violation(
                    f"request {request.request_id} has {request.num_computed} tokens of {kept.count} computed"
                )
            if request.num_planned == request.num_computed and len(request.kv.blocks) != num_blocks:
                raise Violation(f"request {request.request_id} keeps room for guesses that were wrong")
        if isinstance(event, MakeBatch) or not self._world.scheduler.flights:
            self._drafts = {}
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.event, Batch) and effect.event.plan is not None:
                self._planned(effect.event.plan)

    def _planned(self, plan: StepPlan) -> None:
        flight, shape = self._world.planned, self._world.shape
        assert flight is not None
        at = 0
        ends = []
        for count in plan.query_lens:
            at += count
            ends.append(at)
        for request, seq, num_drafts in zip(flight.samples, plan.sample_seqs, plan.num_drafts, strict=False):
            if not num_drafts:
                continue
            length = len(request.token_ids)
            if num_drafts > shape.num_speculative_tokens or plan.query_lens[seq] != 1 + num_drafts:
                raise Violation(f"step {plan.step_id} has {num_drafts} guesses in {plan.query_lens[seq]} tokens")
            if plan.input_ids[ends[seq] - num_drafts - 1] != request.token_ids[-1]:
                raise Violation(f"step {plan.step_id} guesses what follows another token than the request's last")
            if plan.context_lens[seq] != length + num_drafts or length + num_drafts >= shape.context_len:
                raise Violation(f"step {plan.step_id} guesses {num_drafts} tokens behind {length}")
            self._drafts[request.request_id] = num_drafts

    def quiet(self) -> None:
        """No step is on the device: what is said of all guesses is what came of them."""
        speculation = self._world.scheduler.planner.speculation
        if speculation is None:
            return
        said = speculation.statistics()
        counts = [said.num_drafts_total, said.num_draft_tokens_total, said.num_accepted_tokens_total]
        if counts != self._counts or sum(said.accepted_per_position) != counts[2]:
            raise Violation(f"guesses are said to be {said}, and were {self._counts}")
