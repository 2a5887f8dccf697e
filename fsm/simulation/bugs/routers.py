"""Bugs planted in what routers are told of the prefixes that can be found here."""

from __future__ import annotations

from novainfer.fsm.kv import changes
from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.kv.changes import Changes
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant

ROUTERS_MUTANTS = [
    Mutant("routers are not told what was evicted", Changes, "ended", "self.lost(journal.evicted)", "pass"),
    Mutant(
        "routers are told of an eviction before its step has ended",
        Changes,
        "take",
        "if is_known(name) or name in self._taken:",
        "if is_known(name):",
    ),
    Mutant(
        "routers are told of a block when its step is planned",
        BlockCache,
        "expect",
        "self.pool.expect(table.blocks[at], name)",
        "self.pool.expect(table.blocks[at], name); self._changes.filled(request, at); self._changes._taken[name] = 1",
    ),
    Mutant(
        "routers are not told of blocks of a row that is not counted to its end",
        BlockCache,
        "commit",
        "self._changes.filled(request, at)",
        "pass",
        first=42,
    ),
    Mutant("routers are told of nothing", BlockCache, "commit_row", "self._changes.filled(request, at)", "pass"),
    Mutant("routers believe in a lost worker's blocks", BlockCache, "forget", "self._changes.cleared()", "pass"),
    Mutant(
        "routers believe in what another mode computed", BlockCache, "distrust_all", "self._changes.cleared()", "pass"
    ),
    Mutant(
        "routers believe in what is no number",
        BlockCache,
        "distrust",
        "self._changes.lost(self.pool.names_of(request.kv.blocks))",
        "pass",
        seeds=1000,
    ),
    Mutant(
        "what a canary has taken is never told",
        BlockCache,
        "take_back",
        "self._changes.ended(journal)",
        "pass",
        seeds=1000,
    ),
    Mutant(
        "a step that is taken back keeps what it had taken in the mirror",
        BlockCache,
        "undo",
        "self._changes.ended(journal)",
        "pass",
    ),
    Mutant("a block is told with the tokens before it", Changes, "_stored", "at * size :", "(at - 1) * size :"),
    Mutant("a block is told behind itself", Changes, "_stored", "names[at - 1]", "names[at]"),
    Mutant("a tenant's blocks are told as everybody's", changes, "_salt", "else space.hex()", 'else ""'),
    Mutant("a salt is not told", changes, "_salt", "return salt if", 'return "" if'),
    Mutant("what is told is forgotten at once", Changes, "take", "self._told[name] = None", "pass"),
    Mutant(
        "routers hear of a loss with the next worker's first step", Scheduler, "_lost", "self._tell_routers()", "pass"
    ),
]
