"""Masks in plans: each sampled position of a constrained request names the mask of exactly what is before it.

That is what is committed of the request, and a token more for each step in flight that samples it, or each of the very
drafts that its grammar was told of. No other position has one, and none is launched before its mask but in a row that
decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from novainfer.fsm.core.machine import Effect, Send
from novainfer.fsm.device.compiling import LEFT_BEHIND_MAX, CompileOver, CompilingState
from novainfer.fsm.device.masks import MaskName
from novainfer.fsm.engine import EngineState
from novainfer.fsm.messages.events import Batch, MakeBatch
from novainfer.fsm.messages.step import NO_MASK, StepDone, StepPlan
from novainfer.fsm.schedule.request import AWAITED, Request, RequestState
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.simulation.world.world import World


def check_masks(world: World, plan: StepPlan, flight: Flight, told: dict[int, bytes]) -> None:
    """`plan` was planned as `flight`, behind those that are in flight; grammars are `told` of so many drafts."""
    counts = [1 + num for num in plan.num_drafts or [0] * len(plan.sample_seqs)]
    begins = [0, *accumulate(counts)]
    if len(plan.mask_ids) != len(plan.mask_positions) or plan.masks:
        raise Violation(f"step {plan.step_id} has {len(plan.mask_ids)} masks at {plan.mask_positions}")
    masks = dict(zip(plan.mask_positions, plan.mask_ids, strict=True))
    others = [request for other in world.scheduler.flights if other is not flight for request in other.samples]
    ends = [0, *accumulate(plan.query_lens)]
    for request, seq, begin, count in zip(flight.samples, plan.sample_seqs, begins, counts, strict=False):
        if request.params.structured_outputs is None:
            continue
        name = f"request {request.request_id} in step {plan.step_id}"
        _check_mask(world, name, request, masks.pop(begin, None), others.count(request))
        drafts = bytes(plan.input_ids[ends[seq + 1] - count + 1 : ends[seq + 1]])
        if drafts != told.pop(request.request_id, b""):
            raise Violation(f"{name} has the drafts {list(drafts)}, and its grammar is not told of these in this turn")
        for behind in range(1, count):
            world.counts["masks behind drafts checked"] += 1
            if (mask := masks.pop(begin + behind, None)) != (request.request_id, request.num_generated, behind):
                raise Violation(f"{name} has the mask {mask} behind {behind} drafts")
    if told:
        raise Violation(f"grammars are told of the drafts {told}, which are not those of step {plan.step_id}")
    if masks:
        raise Violation(f"step {plan.step_id} has masks at {list(masks)}, where no request is held to a grammar")


def _check_mask(world: World, name: str, request: Request, mask: MaskName | None, num_in_flight: int) -> None:
    """By what the request has got, and by the grammars' own account of which masks there are."""
    prefix = bytes(request.token_ids[request.num_prompt :])
    world.counts["masks checked"] += 1
    if mask != (request.request_id, len(prefix) + num_in_flight, 0):
        raise Violation(f"{name} follows {list(prefix)} and {num_in_flight} tokens in flight, and its mask is {mask}")
    if num_in_flight:
        world.counts["masks of steps planned ahead"] += 1
    elif world.grammars.masks.get(request.request_id) != prefix:
        world.counts["masks that were to come"] += 1
        if request.state is not RequestState.DECODE or request.mask == AWAITED:
            raise Violation(f"{name} must not be launched before its mask is there")


def without_mask(flight: Flight, event: Any) -> list[Request]:
    """The requests to which a step has given no token, since their masks came too late; `event` says how it ended."""
    if not isinstance(event, MakeBatch) or not isinstance(event.outcome, StepDone):
        return []
    samples, outcome = flight.samples, event.outcome
    if outcome.num_tokens:
        samples = [r for r, count in zip(samples, outcome.num_tokens, strict=True) for _ in range(count)]
    rows = zip(samples, outcome.token_ids, strict=False)  # a canary's token is that of no request
    return [request for request, token_id in rows if token_id == NO_MASK]


def holds_for_masks(scheduler: Scheduler, effects: Sequence[Effect]) -> bool:
    """Whether the scheduler has planned nothing because a mask that came too late for a step is about to come."""
    batches = [e.event for e in effects if isinstance(e, Send) and isinstance(e.event, Batch)]
    is_empty = bool(batches) and all(batch.plan is None for batch in batches)
    return is_empty and scheduler.planner.has_awaited


def check_still(world: World) -> None:
    """All messages have arrived: who waits for a mask is who has one coming."""
    if world.engine.state is EngineState.STOPPED or not world.looks_closely:
        return
    awaited, due = set(world.scheduler.planner.awaited), world.grammars.awaited
    if awaited != due:
        raise Violation(f"requests {awaited} wait for masks, and those of {due} are being made")
    held = {i for i, r in world.scheduler.requests.items() if r.params.structured_outputs is not None}
    if held != set(world.grammars.held) or len(held) != world.scheduler.planner.num_constrained:
        raise Violation(f"requests {held} are held to grammars, and the grammars know {set(world.grammars.held)}")
    _check_threads(world)


def _check_threads(world: World) -> None:
    """Of the threads that compile, one is waited for at most, for a limited time, and few are left behind."""
    grammars = world.grammars
    compiling, at_work = grammars.compiling, grammars.at_work
    is_at_work = compiling.thread in at_work
    if set(at_work) - {compiling.thread} != set(compiling.left_behind) or len(at_work) > LEFT_BEHIND_MAX + is_at_work:
        raise Violation(f"threads {set(at_work)} are at work, and {set(compiling.left_behind)} of them are left behind")
    if len(compiling.left_behind) > LEFT_BEHIND_MAX or len(set(at_work.values())) < len(at_work):
        raise Violation(f"threads are at {list(at_work.values())}: too many, or at the same grammar")
    timed = [event.thread for event in world.timers.values() if isinstance(event, CompileOver)]
    if bool(compiling.wanted) != is_at_work or timed != [compiling.thread] * is_at_work:
        raise Violation(f"{compiling.wanted} are wanted, threads {set(at_work)} are at work, and {timed} have limits")
    is_crowded = len(compiling.left_behind) == LEFT_BEHIND_MAX
    if is_crowded != (compiling.state is CompilingState.CROWDED):
        raise Violation(f"the compiler is {compiling.state}, and {len(compiling.left_behind)} are left behind")


def is_waited_for(world: World, request: Request) -> bool:
    """Whether `request` rests because a mask is being made: its own, or one of a request that has slot and blocks.

    Those are not taken from a request that goes on in a moment.
    """
    grammars = world.grammars
    is_held_up = any(request_id in world.scheduler.planner.running for request_id in grammars.due)
    return request.request_id in grammars.awaited or is_held_up
