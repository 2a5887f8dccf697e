"""What the owner of a world has asked the engine to be, and what was answered: each wish once, and truly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from novainfer.fsm.messages.events import Configure, Reconfigure, Reconfigured, WorkerReady
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.world.shape import Shape, modes_in

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World


class Reconfigurations:
    """The account of one world: `num_blocks` and `precision` are what the last good answer has said."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._asked: dict[int, Reconfigure] = {}  # that were not answered yet, in order
        self._num_asked = 0
        self._less: dict[int, int] = {}  # blocks for which there was room, by epoch, where those were less
        self.num_done = 0
        self.num_blocks = shape.num_blocks
        self.precision = shape.modes[0].precision

    def ask(self, num_blocks: int | None, precision: str | None) -> Reconfigure:
        """One more wish."""
        wish = Reconfigure(self._num_asked, num_blocks, precision)
        self._num_asked += 1
        self._asked[wish.serial] = wish
        return wish

    def answered(self, answer: Reconfigured) -> None:
        """The engine has said what became of a wish."""
        wish = self._asked.pop(answer.serial, None)
        if wish is None:
            raise Violation(f"{answer}: nothing of the kind was asked, or it was answered before")
        ready = answer.ready
        if answer.error is None:
            if ready is None:
                raise Violation(f"{wish} was done, and no worker has said so")
            least, most = self._shape.num_blocks_least, self._shape.num_blocks_most
            if wish.num_blocks is not None and not least <= wish.num_blocks <= most:
                raise Violation(f"{wish} was done, and cannot be")
            self.num_blocks = self.num_blocks if wish.num_blocks is None else wish.num_blocks
            self.precision = self.precision if wish.precision is None else wish.precision
            self.num_done += 1
        if ready is not None:
            self._check(ready)

    def fitted_less(self, epoch: int, num_blocks: int) -> None:
        """A device had no memory for a step beside its cache, and has a smaller one now."""
        self._less[epoch] = num_blocks

    def is_back(self, ready: WorkerReady) -> None:
        """A worker that was lost is replaced, by one that is what that was."""
        if ready.error is not None:
            raise Violation(f"nothing was asked of {ready}")
        self._check(ready)

    def configured(self, world: World, event: Configure) -> None:
        """The scheduler knows the device: how many blocks it has, and in which mode it is."""
        device, scheduler = world.device, world.scheduler
        if device is None or device.epoch != event.epoch:
            return  # it has died since
        if device.num_blocks != world.cache.pool.num_blocks:
            raise Violation(f"the device has {device.num_blocks} blocks, and the cache {world.cache.pool.num_blocks}")
        if device.mode != scheduler.recovery.ladder.device_mode:
            raise Violation(f"the device is in {device.mode}, and is thought to be in another")

    def _check(self, ready: WorkerReady) -> None:
        modes = modes_in(self.precision, self._shape.modes)
        self.num_blocks = self._less.get(ready.epoch, self.num_blocks)
        if (ready.num_blocks, ready.modes) != (self.num_blocks, modes):
            raise Violation(f"{ready} is not what it should be: of {self.num_blocks} blocks, with {modes}")

    def end(self, world: World) -> None:
        """Nothing can happen any more: every wish has its answer, and the engine is what was said."""
        if self._asked:
            raise Violation(f"{list(self._asked.values())} got no answer")
        if not world.is_stopped and world.cache.pool.num_blocks != self.num_blocks:
            raise Violation(f"the engine has {world.cache.pool.num_blocks} blocks, and was to have {self.num_blocks}")
