"""The mirror that a router keeps of which prefixes can be found here: after every step it is the index.

It is made of what the scheduler tells routers, and of nothing else. Each block that is told must be named by the tokens
it is told with, behind the block that it is told to follow; none is told twice, or taken back that was not told. What
steps in flight have taken from the cache can come back with its name, and counts as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from novainfer.fsm.core.machine import Effect, Send
from novainfer.fsm.kv.blocks import BLOCK_NAME_BYTES, block_name, space_name
from novainfer.fsm.messages.events import IndexChanged, StoredBlock
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World


class Mirror:
    """One router's."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()

    def told(self, effects: Sequence[Effect]) -> int:
        """The scheduler has handled something; gives the number of blocks that it told of."""
        num_told = 0
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.event, IndexChanged):
                self._take(effect.event)
                num_told += len(effect.event.stored) + len(effect.event.removed)
        return num_told

    def _take(self, changed: IndexChanged) -> None:
        if changed.is_cleared:
            self.names.clear()
        for name in changed.removed:
            if name not in self.names:
                raise Violation(f"routers are told that {name.hex()} is gone, which they were never told of")
            self.names.remove(name)
        for block in changed.stored:
            if block.name in self.names:
                raise Violation(f"routers are told twice of {block.name.hex()}")
            if block_name(block.parent or _space(block), block.token_ids) != block.name:
                raise Violation(f"routers are told of {block}, and its tokens have another name")
            self.names.add(block.name)

    def check(self, world: World) -> None:
        """Nothing is missing from it, and nothing in it cannot be found."""
        index = set(world.cache.pool._index)
        index.update(name for flight in world.scheduler.flights for name in flight.journal.evicted)
        if missing := index - self.names:
            raise Violation(f"routers were never told of {[name.hex() for name in sorted(missing)]}")
        if gone := self.names - index:
            raise Violation(f"routers believe in {[name.hex() for name in sorted(gone)]}, which cannot be found")


def _space(block: StoredBlock) -> bytes:
    """What the chain of names begins with: nothing, a salt's space, or the one of a tenant, which is told as it is."""
    if len(block.salt) == 2 * BLOCK_NAME_BYTES:
        return bytes.fromhex(block.salt)
    return space_name("", block.salt)
