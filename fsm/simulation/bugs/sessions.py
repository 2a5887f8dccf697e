"""Bugs planted in what conversations keep: for whom it makes room, when it goes to the host, and when it ends."""

from __future__ import annotations

from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.kv.blocks import BlockPool
from novainfer.fsm.kv.host import HostPool
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.schedule.session import Session
from novainfer.fsm.simulation.bugs.mutants import Mutant

SESSION_MUTANTS = [
    # ---- at nobody's cost
    Mutant(
        "nobody has the room that conversations keep",
        BlockPool,
        "num_available",
        "len(self._free) + len(self._cached) + len(self._kept)",
        "len(self._free) + len(self._cached)",
    ),
    Mutant(
        "conversations are evicted first",
        BlockPool,
        "allocate",
        "not self._cached or len(self._kept) > self.num_kept_max",
        "bool(self._kept)",
        first=100,
    ),
    Mutant(
        "conversations keep more than their share",
        BlockPool,
        "allocate",
        "not self._cached or len(self._kept) > self.num_kept_max",
        "not self._cached",
    ),
    Mutant(
        "what is kept on the host makes no room for what is preempted",
        HostPool,
        "allocate",
        "[self.take()[0] for _ in range(count)]",
        "[self._free.pop() for _ in range(count)]",
        first=284,
    ),
    # ---- to the host, and back
    Mutant(
        "what is kept is dropped, and not copied to the host",
        BlockCache,
        "_allocate",
        "self._save(block, name)",
        "pass",
    ),
    Mutant(
        "copies on the host make no room for newer ones",
        BlockCache,
        "_save",
        "not host.num_available",
        "not host.num_free",
    ),
    Mutant(
        "what was copied to the host is not found there",
        BlockCache,
        "_end_saves",
        "host.keep(saved.name, saved.host_block)",
        "host.release([saved.host_block])",
    ),
    Mutant(
        "a copy that a failed step was to make is believed",
        BlockCache,
        "_end_saves",
        "if was_copied and saved.name in keeps",
        "if saved.name in keeps",
        seeds=1000,
    ),
    Mutant(
        "a copy is kept of what nobody keeps any more",
        BlockCache,
        "_end_saves",
        "if was_copied and saved.name in keeps and host.find(saved.name) is None:",
        "if was_copied and host.find(saved.name) is None:",
        seeds=1000,
        first=372,
    ),
    Mutant(
        "the host is not asked for what follows",
        BlockCache,
        "find_prefix",
        "elif self.host.find(name) is not None:",
        "elif False:",
    ),
    Mutant(
        "a block is filled with the first copy of all",
        BlockCache,
        "_copy_back",
        "plan.swap_in_hosts.append(host_block)",
        "plan.swap_in_hosts.append(journal.read[0][1] if journal.read else host_block)",
    ),
    Mutant(
        "what was copied back is read for ever",
        BlockCache,
        "_end_saves",
        "host.end_read(name, block, was_used=was_copied)",
        "pass",
    ),
    # ---- what is lost
    Mutant("the host of a worker that died is believed", Planner, "refit", "self.cache.forget_copies()", "pass"),
    Mutant(
        "copies of another mode are believed",
        BlockCache,
        "distrust_all",
        "self.host.drop_all()",
        "pass",
        first=284,
    ),
    # ---- when it ends
    Mutant(
        "a conversation keeps what it had before as well",
        Scheduler,
        "_leave",
        "cache.unkeep(session.names)",
        "pass",
    ),
    Mutant(
        "what an ended conversation kept is kept for ever",
        Scheduler,
        "_forget",
        "self.planner.cache.unkeep(session.names)",
        "pass",
    ),
    Mutant(
        "copies of an ended conversation stay on the host",
        BlockCache,
        "unkeep",
        "self.host.drop(self.pool.unkeep(names))",
        "self.pool.unkeep(names)",
    ),
    Mutant(
        "a conversation that goes on may be the next to end",
        Scheduler,
        "_join",
        "self.kept.pop(session.number, None)",
        "pass",
    ),
    Mutant(
        "no conversation is one too many", Scheduler, "_leave", "while len(self.kept) >", "while len(self.kept) > 9 +"
    ),
    Mutant(
        "what is kept is kept for ever",
        Session,
        "_leave",
        "self._until_left(self.ttl_s, SessionOver(self.number))",
        "pass",
    ),
    Mutant("a second request of a conversation does not count", Session, "_join", "self.num_requests += 1", "pass"),
]
