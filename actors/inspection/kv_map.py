"""Who has which KV block, kept up with by what requests have: tables that are as they were cost a comparison each.

What no request has is free, cached, or a step's. The pool says which, when a request lets go of a block, and for a part
of all blocks each time: what becomes of blocks that nobody has is seen a little later.
"""

from __future__ import annotations

from collections.abc import Iterable

from novainfer.actors.inspection.frames import KvChange, KvMap
from novainfer.fsm.kv.cache import KVCache
from novainfer.fsm.schedule.request import ENDED, Request, RequestState

FREE, CACHED, STEP = range(3)
STATES = ("FREE", "CACHED", "STEP", *(str(state) for state in RequestState if state not in ENDED), "ENDED")
INDEX = {state: STATES.index(str(state)) for state in RequestState if state not in ENDED}
OF_ENDED = STATES.index("ENDED")
LOOKED_AT_MAX = 128  # blocks of nobody's, each time: 25 us
LOOKED_AT_MORE = 4096  # where the counts say that something has changed


class _Table:
    """The blocks that a request had, and in which state it was."""

    __slots__ = ("blocks", "state")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.state = OF_ENDED


class KvPicture:
    """Of one cache, as long as it has its size."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.total = cache.statistics().num_blocks
        self._owner = bytearray(self.total)
        self._readers = [0] * self.total
        self._names = [b""] * self.total  # of those that are cached
        self._tables: dict[int, _Table] = {}  # by request
        self._looked_at = 0
        self._changed: set[int] = set()
        self._evicted: list[int] = []
        self._host_used = 0
        self._look(range(self.total))

    def is_of(self, cache: KVCache) -> bool:
        """Whether it is of this one, as large as that is now."""
        return self._cache is cache and self.total == cache.statistics().num_blocks

    def map(self, block_size: int) -> KvMap:
        """Everything as it was told last."""
        host_total = self._cache.num_host_blocks
        return KvMap(
            block_size=block_size,
            total=self.total,
            states=list(STATES),
            owner=bytes(self._owner),
            readers=bytes(min(count, 255) for count in self._readers),
            host_total=host_total,
            host_used=host_total - self._cache.num_host_blocks_free,
        )

    def update(self, owners: Iterable[Request]) -> KvChange | None:
        """What has changed; `owners` are all requests that have blocks."""
        tables, left, orphans = dict[int, _Table](), self._tables, set[int]()
        table_of = self._cache.table_of
        for request in owners:
            blocks = table_of(request)
            if not blocks:
                continue
            number = request.request_id
            table = left.pop(number, None) or tables.get(number) or _Table()
            tables[number] = table
            state = INDEX.get(request.state, OF_ENDED)
            if table.state != state:
                table.state = state
                self._own(table.blocks, state)
            if table.blocks != blocks:
                self._replace(table, blocks, orphans)
        for table in left.values():
            self._let_go(table.blocks, orphans)
        self._tables = tables
        self._adopt(orphans)
        self._look_on()
        return self._take()

    # ---- requests' blocks ----------------------------------------------------------------------------------------

    def _replace(self, table: _Table, blocks: list[int], orphans: set[int]) -> None:
        old, num_old = table.blocks, len(table.blocks)
        if blocks[:num_old] == old:  # it has grown, as mostly
            added = blocks[num_old:]
        else:
            self._let_go(old, orphans)
            added = blocks
        table.blocks = blocks[:]
        for block in added:
            self._readers[block] += 1
            if self._owner[block] == CACHED and self._cache.look(block)[1] != self._names[block]:
                self._evicted.append(block)
        self._own(added, table.state)

    def _own(self, blocks: Iterable[int], state: int) -> None:
        for block in blocks:
            self._owner[block] = state
            self._changed.add(block)

    def _let_go(self, blocks: list[int], orphans: set[int]) -> None:
        for block in blocks:
            self._readers[block] -= 1
            orphans.add(block)

    def _adopt(self, orphans: set[int]) -> None:
        """These have an owner less: they show another one's state, or what the pool says."""
        self._changed |= orphans
        nobodys = {block for block in orphans if not self._readers[block]}
        self._look(nobodys)
        shared = orphans - nobodys
        for table in self._tables.values():
            if not shared:
                break
            for block in shared.intersection(table.blocks):
                self._owner[block] = table.state
                shared.discard(block)

    # ---- nobody's blocks -----------------------------------------------------------------------------------------

    def _look(self, blocks: Iterable[int]) -> None:
        """What the pool says of blocks that no request has."""
        for block in blocks:
            if self._readers[block]:
                continue
            owners, name = self._cache.look(block)
            owner = STEP if owners else CACHED if name else FREE
            self._names[block] = name
            if owner != self._owner[block]:
                self._owner[block] = owner
                self._changed.add(block)

    def _look_on(self) -> None:
        pool = self._cache.statistics()
        is_right = self._owner.count(FREE) == pool.num_free and self._owner.count(CACHED) == pool.num_cached
        begin = self._looked_at
        end = min(begin + (LOOKED_AT_MAX if is_right else LOOKED_AT_MORE), self.total)
        self._look(range(begin, end))
        self._looked_at = end if end < self.total else 0  # of no blocks, too: a worker that starts has none yet

    # ---- what is told --------------------------------------------------------------------------------------------

    def _take(self) -> KvChange | None:
        host_used = self._cache.num_host_blocks - self._cache.num_host_blocks_free
        if not self._changed and host_used == self._host_used:
            return None
        owner, readers = self._owner, self._readers
        blocks = [(block, owner[block], min(readers[block], 255)) for block in self._changed]
        evicted = self._evicted
        self._changed, self._evicted, self._host_used = set(), [], host_used
        return KvChange(blocks, evicted, host_used)
