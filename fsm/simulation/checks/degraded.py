"""What is called degraded: all that was computed otherwise than in the mode of the start, and nothing else.

The device marks what it computes. A token is degraded when its context holds a mark, however that came there: by its
own prompt, through the host, or from blocks that another request had computed. So are all later tokens of its request.
What no step of such a mode has held is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from novainfer.fsm.messages.events import MakeBatch, Output
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.world.device import ScriptedDevice
from novainfer.fsm.simulation.world.shape import is_exact

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World

STEPS_MAX = 2  # that have been computed, and whose outcomes are on their way


class Degraded:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps: dict[tuple[int, int], list[bool]] = {}  # by step and epoch: what its samples are
        self._marked: set[int] = set()  # requests that have such a token
        self._held: set[int] = set()  # requests that a step of such a mode has computed

    def computed(self, plan: StepPlan, device: ScriptedDevice) -> None:
        """The device has done a step well."""
        for step in list(self._steps)[: 1 - STEPS_MAX]:  # an answer of an older one is no outcome any more
            del self._steps[step]
        self._steps[plan.step_id, plan.epoch] = [*device.degraded, *device.degraded_pools]

    def before(self, event: Any) -> None:
        """The scheduler is about to handle `event`."""
        flight = self._world.scheduler.oldest_flight
        if not isinstance(event, MakeBatch) or not isinstance(event.outcome, StepDone) or flight is None:
            return
        marks = self._steps.get((event.outcome.step_id, event.outcome.epoch), ())
        held = [*flight.samples, *(request for request, _, _ in flight.pooled)]
        self._marked.update(r.request_id for r, is_marked in zip(held, marks, strict=False) if is_marked)
        if not is_exact(flight.mode, self._world.modes[0]):
            self._held.update(request.request_id for request, _, _ in flight.rows)

    def given(self, output: Output) -> None:
        """A stream is about to be given `output`."""
        request_id = output.request_id
        is_computed = bool(output.token_ids) or output.embedding is not None
        if is_computed and output.is_degraded is not (request_id in self._held):
            raise Violation(f"request {request_id}: is_degraded={output.is_degraded}, and its steps say otherwise")
        if is_computed and request_id in self._marked and not output.is_degraded:
            raise Violation(f"request {request_id} has something of degraded blocks, and is not called degraded")
        if output.end is not None:
            self._marked.discard(request_id)
            self._held.discard(request_id)
