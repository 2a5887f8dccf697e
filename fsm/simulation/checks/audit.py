"""Accounts that are kept beside a world with a clock: what should have happened by now, by means of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from novainfer.fsm.core.machine import Effect
from novainfer.fsm.messages.events import KeepOver, PauseRequest
from novainfer.fsm.schedule.request import Preempt, Request, Vacate
from novainfer.fsm.simulation.checks.blame import Blame
from novainfer.fsm.simulation.checks.chunks import Beside
from novainfer.fsm.simulation.checks.counts import Counts
from novainfer.fsm.simulation.checks.deadlines import Deadlines
from novainfer.fsm.simulation.checks.degraded import Degraded
from novainfer.fsm.simulation.checks.ledger import Ledger
from novainfer.fsm.simulation.checks.leftovers import check_empty, check_known
from novainfer.fsm.simulation.checks.masks import check_still
from novainfer.fsm.simulation.checks.order import Order
from novainfer.fsm.simulation.checks.places import Places
from novainfer.fsm.simulation.checks.retry import Retry
from novainfer.fsm.simulation.checks.rungs import Rungs
from novainfer.fsm.simulation.checks.sessions import Sessions
from novainfer.fsm.simulation.checks.sizes import Sizes
from novainfer.fsm.simulation.checks.turns import Turns
from novainfer.fsm.simulation.checks.verified import Verified
from novainfer.fsm.simulation.world.pace import Paces
from novainfer.fsm.simulation.world.shortage import Scarcity

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World


class Audit:
    """All accounts of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.deadlines = Deadlines(world)
        self.blame = Blame(world)
        self.beside = Beside(world)
        self.places = Places(world)
        self.turns = Turns(world, self.beside.tokens, self.places)
        self.retry = Retry(world)
        self.verified = Verified(world)
        self.order = Order(world, self.turns.has_blocks_for_all, self.beside.tokens, self.places)
        self.ledger = Ledger(world)
        self.counts = Counts(world)
        self.degraded = Degraded(world)
        self.rungs = Rungs(world)
        self.sizes = Sizes(world)
        self.sessions = Sessions(world)
        self.scarcity: Scarcity | None = None  # where a shortage is all that goes wrong
        self.paces: Paces | None = None  # where that is time
        self._num_ended = 0  # requests, when leftovers were last looked for

    def before_scheduler(self, event: Any) -> None:
        """The scheduler is about to handle `event`."""
        self.places.before(event)
        self.verified.before(event)
        self.ledger.before(event)
        self.beside.before(event)
        self.blame.before(event)
        self.rungs.before(event)
        self.sizes.before()
        self.sessions.before(event)
        if self.scarcity is not None:
            self.scarcity.before()
        if self.paces is not None:
            self.paces.before()
        self.turns.before(event)
        self.order.before(event)
        self.degraded.before(event)
        if isinstance(event, KeepOver):
            self.deadlines.keep_over(event)

    def scheduled(self, event: Any, effects: Sequence[Effect]) -> None:
        """The scheduler has handled `event`."""
        self.places.after(event, effects)
        self.blame.after(event, effects)
        self.verified.after(event, effects)
        self.ledger.after(event, effects)
        self.rungs.after(event)
        self.sizes.after(event, effects)
        self.sessions.after(event)
        if self.scarcity is not None:
            self.scarcity.scheduled(event, effects)
        if self.paces is not None:
            self.paces.after(event)
        self.beside.after()
        self.turns.after(event, is_restricted=self.blame.is_restricted)
        self.order.after(event, is_restricted=self.blame.is_restricted)
        if isinstance(event, PauseRequest):
            self.deadlines.paused(self._world.scheduler.requests.get(event.request_id))
        elif isinstance(event, KeepOver):
            self.deadlines.kept(event)

    def loses_blocks(self, victim: Request, why: Preempt | Vacate) -> None:
        """A request is about to lose its blocks: for want of them, or all do."""
        self.ledger.preempted(victim.request_id)
        if isinstance(why, Preempt):
            self.turns.preempted(victim, is_restricted=self.blame.is_restricted)

    def still(self) -> None:
        """All messages have arrived, and time goes on."""
        check_still(self._world)
        self.deadlines.still()
        self.counts.still()
        self.rungs.still()
        self.sessions.still()

    def quiet(self) -> None:
        """The device, too, has nothing to do."""
        self.counts.quiet()
        self.verified.quiet()
        num_ended = self._world.checks.num_ended
        if num_ended > self._num_ended and not self._world.is_large:
            self._num_ended = num_ended
            check_known(self._world)

    def end(self) -> None:
        """Everybody has left."""
        check_empty(self._world)
        self.sessions.end()
