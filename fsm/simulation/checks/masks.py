"""Masks in plans: each sampled position of a constrained request has the mask of exactly its committed prefix.

No other position has one. What a request may be given next depends on all that it has got, so none is sampled ahead of
a token that is not known yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from novainfer.fsm.core.machine import Effect, Send
from novainfer.fsm.engine import EngineState
from novainfer.fsm.messages.events import Batch
from novainfer.fsm.messages.step import StepPlan
from novainfer.fsm.schedule.request import Request, RequestState
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.simulation.world.world import World


def check_masks(world: World, plan: StepPlan, flight: Flight) -> None:
    """`plan` was planned as `flight`, behind those that are in flight."""
    counts = [1 + num for num in plan.num_drafts or [0] * len(plan.sample_seqs)]
    begins = [0, *accumulate(counts)]
    if len(plan.mask_ids) != len(plan.mask_positions) or plan.masks:
        raise Violation(f"step {plan.step_id} has {len(plan.mask_ids)} masks at {plan.mask_positions}")
    masks = dict(zip(plan.mask_positions, plan.mask_ids, strict=True))
    others = [request for other in world.scheduler.flights if other is not flight for request in other.samples]
    for request, begin, count in zip(flight.samples, begins, counts, strict=False):
        if request.params.structured_outputs is None:
            continue
        name = f"request {request.request_id} in step {plan.step_id}"
        if count > 1:
            raise Violation(f"{name} has drafts, which its grammar has not seen")
        if request in others:
            raise Violation(f"{name} is sampled behind a token that is not known")
        _check_mask(world, name, request, masks.pop(begin, 0))
    if masks:
        raise Violation(f"step {plan.step_id} has masks at {list(masks)}, where no request is held to a grammar")


def _check_mask(world: World, name: str, request: Request, mask_id: int) -> None:
    """By the grammars' own account of whose mask this is, and behind which tokens."""
    found = world.grammars.masks.get(mask_id)
    prefix = bytes(request.token_ids[request.num_prompt :])
    world.counts["masks checked"] += 1
    if found != (request.request_id, prefix):
        raise Violation(f"{name} follows {list(prefix)}, and its mask is that of {found}")


def holds_for_masks(scheduler: Scheduler, effects: Sequence[Effect]) -> bool:
    """Whether the scheduler has planned nothing because masks are about to come: only where one of its decodes is."""
    batches = [e.event for e in effects if isinstance(e, Send) and isinstance(e.event, Batch)]
    is_held = any(batch.awaits_masks for batch in batches)
    if is_held and not any(r.state is RequestState.DECODE for r in scheduler.planner.awaited.values()):
        raise Violation("all is held up for masks, and no request that decodes waits for one")
    is_empty = bool(batches) and all(batch.plan is None for batch in batches)
    return is_held or (is_empty and scheduler.planner.has_awaited)


def check_still(world: World) -> None:
    """All messages have arrived: who waits for a mask is who has one coming."""
    if world.engine.state is EngineState.STOPPED:
        return
    awaited, due = set(world.scheduler.planner.awaited), set(world.grammars.due)
    if awaited != due:
        raise Violation(f"requests {awaited} wait for masks, and those of {due} are being made")
    held = {i for i, r in world.scheduler.requests.items() if r.params.structured_outputs is not None}
    if held != set(world.grammars.held) or len(held) != world.scheduler.planner.num_constrained:
        raise Violation(f"requests {held} are held to grammars, and the grammars know {set(world.grammars.held)}")


def is_waited_for(world: World, request: Request) -> bool:
    """Whether `request` rests because a mask is being made: its own, or one of a request that has slot and blocks.

    Those are not taken from a request that goes on in a moment.
    """
    due = world.grammars.due
    is_held_up = any(request_id in world.scheduler.planner.running for request_id in due)
    return request.request_id in due or is_held_up
