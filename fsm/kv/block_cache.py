"""The KV cache in blocks: a pool of them, a table of blocks a request, prefixes shared by name, copies on the host.

A prefix that a request is going to compute is promised by name from its admission on, so that no other computes it
too. Within the step that computes it, and in those planned before that one has ended, its block can be shared already.

A prompt mostly ends inside a block. That of a running request with the same prompt serves as well, but for the last
token, whose logits are the point. In the step that computes it, it is shared: both write the last token's cell, and
the same into it. Later its first owner has gone on to write into it, and it is copied. A request that shares it gets a
copy before it writes what is its own, unless it is the last owner. All copies of a step come before its first write;
what is copied keeps an owner until the step has ended.

What conversations keep is a set of names. Their blocks are evicted last, and the step that evicts one copies it to the
host first, if there is room or something older is kept there. Who begins with those names has them copied back, between
what the device still holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from novainfer.fsm.kv.blocks import (
    NEVER,
    BlockPool,
    BlockTable,
    Journal,
    PoolStatistics,
    Saved,
    _Did,
    block_name,
    blocks_for,
    tokens_in,
)
from novainfer.fsm.kv.cache import Kept, Prefix
from novainfer.fsm.kv.changes import Changes
from novainfer.fsm.kv.host import HostPool

if TYPE_CHECKING:
    from novainfer.fsm.messages.events import IndexChanged
    from novainfer.fsm.messages.step import StepPlan
    from novainfer.fsm.schedule.request import Request

HASH_UNITS = 8  # of looking, for a name that has to be worked out first: 0.8 us; a lookup is one


class BlockCache:
    """See `novainfer.fsm.kv.cache.KVCache`; its unit is a block of `block_size` tokens."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        enable_prefix_caching: bool = True,
        tells_changes: bool = False,
        kept_share: float = 0.0,
    ) -> None:
        self._kept_share = kept_share
        self.pool = BlockPool(num_blocks, block_size)
        self.pool.num_kept_max = int(kept_share * num_blocks)
        self.host = HostPool(num_host_blocks)
        self.producers: dict[bytes, int] = {}  # block name -> the running request that will compute it
        self.leaving: dict[int, tuple[BlockTable, list[int]]] = {}  # what the next step copies out, by request
        self.tails: dict[bytes, dict[int, BlockTable]] = {}  # name -> the running requests that have computed it
        self._sources: dict[int, int] = {}  # blocks that steps copy, planned and not ended: how many times
        self._size = block_size
        self._is_sharing = enable_prefix_caching
        self._saving: set[int] = set()  # blocks on the host that steps in flight fill with what is kept
        self._promises: dict[int, set[bytes]] = {}  # by request: the names that it is the producer of
        self._plan: StepPlan | None = None
        self._changes = Changes(block_size) if tells_changes else None

    # ---- questions -----------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Blocks that could be given now."""
        return self.pool.num_available

    @property
    def num_tokens_free(self) -> int:
        """Tokens that the free and cached blocks could hold."""
        return tokens_in(self.pool.num_available, self._size)

    @property
    def num_tokens_max(self) -> int:
        """Tokens that one request could have, if it had every block."""
        return tokens_in(self.pool.num_blocks, self._size)

    @property
    def num_host_blocks(self) -> int:
        """Blocks that the host has room for."""
        return self.host.num_blocks

    @property
    def num_host_blocks_free(self) -> int:
        """Those of them that hold nothing."""
        return self.host.num_free

    def room_for(self, request: Request, num_tokens: int, prefix: Prefix | None = None) -> int:
        """Blocks that `reserve(request, num_tokens)` takes from what is available, if it shares `prefix` first."""
        needed = max(blocks_for(num_tokens, self._size) - len(request.kv.blocks), 0)
        if request.kv.is_tail_shared and num_tokens > request.kv.capacity:
            needed += not self._is_writable(request.kv.blocks[-1])
        if prefix is not None:
            needed += sum(map(self.pool.is_cached, prefix.blocks)) - len(prefix.blocks)
        return needed

    def end_of_chunk(self, request: Request, start: int, end: int) -> int:
        """Where a chunk ends that begins at `start` and wants to reach `end`: as far as there is room.

        A chunk that does not reach the end of the prompt ends with a block, if it is longer than one.
        """
        size, table = self._size, request.kv
        end = min(end, table.capacity + self.pool.num_available * size)
        if end < len(request.token_ids) and end - start > size:
            end -= end % size
        return end

    def find_prefix(self, request: Request, num_units: int) -> Prefix:
        """What the cache holds of the beginning of `request`, its last token apart: its logits are the point.

        A block that is found takes a unit of looking, and a name that has to be worked out first `HASH_UNITS`; once
        `num_units` have run out, no more names are worked out.
        """
        prefix = Prefix([])
        if not self._is_sharing:
            return prefix
        names, find, size = request.kv.names, self.pool.find, self._size
        for at in range((len(request.token_ids) - 1) // size):
            if at == len(names):
                if prefix.num_units >= num_units:
                    prefix.is_cut = True
                    return prefix
                prefix.num_units += HASH_UNITS
                self._name_next(request)
            name = names[at]
            block = find(name)
            if block is not None:
                prefix.blocks.append(block)
            elif self.host.find(name) is not None:
                prefix.copies[at] = name
            else:
                if (producer_id := self.producers.get(name)) is not None:
                    prefix.awaited, prefix.producer_id = name, producer_id
                break
        num_blocks = len(prefix.blocks) + len(prefix.copies)
        prefix.num_tokens = num_blocks * size
        prefix.num_units += num_blocks + 1
        if num_blocks == len(prefix.blocks) == (request.num_prompt - 1) // size and self.tails:
            self._find_tail(request, prefix)
        return prefix

    def _find_tail(self, request: Request, prefix: Prefix) -> None:
        """Let `prefix`, which has all full blocks of the prompt, go on to its last token, if another one has that."""
        num_tokens = (request.num_prompt - 1) % self._size
        if not num_tokens:
            return
        prefix.num_units += 0 if request.kv.tail_name else HASH_UNITS
        holders = self.tails.get(self._tail_name(request))
        if not holders:
            return
        journal = self._journal
        holder_id, table = next(iter(holders.items()))
        is_new = holder_id in journal.tails
        if is_new and len(request.token_ids) > request.num_prompt:
            return  # it would go on to write what is its own at once
        block = table.blocks[len(prefix.blocks)]
        prefix.tail, prefix.is_tail_new = journal.copies.get(block, block), is_new
        prefix.num_tokens += num_tokens

    def is_promised(self, name: bytes) -> bool:
        """Whether a running request is still going to compute the block of this name."""
        return name in self.producers

    # ---- while a step is planned ---------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> Journal:
        """Write what follows into a journal, and the tables' new entries into `plan`."""
        self._plan = plan
        journal = Journal()
        self.pool.open(journal)
        return journal

    def close(self, journal: Journal, *, is_step: bool) -> None:
        """Nothing more is planned; if it `is_step`, it copies out what was swapped out before."""
        plan, self._plan = self._plan, None
        assert plan is not None, "no step is being planned"
        self.pool.close()
        if self._changes is not None:
            self._changes.planned(journal)
        if is_step and self.leaving:
            journal.leaving, self.leaving = self.leaving, {}
            for table, blocks in journal.leaving.values():
                plan.swap_out_blocks += blocks
                plan.swap_out_hosts += table.host_blocks

    def share(self, request: Request, prefix: Prefix) -> None:
        """Give `request`, which has a slot and nothing else, the blocks of its prefix; it promises the rest of it."""
        table = request.kv
        assert not table.blocks, "what is admitted owns nothing"
        self._admit(request, prefix.num_tokens)
        table.is_mixed = False
        for block in prefix.blocks:  # all at first, as with the copies: a block that is taken may need room on the host
            self.pool.share(block)
        copies = {at: self.host.read(name) for at, name in prefix.copies.items()}
        blocks = iter(prefix.blocks)
        for at in range(len(prefix.blocks) + len(copies)):
            if at in copies:
                self._copy_back(request, prefix.copies[at], copies[at])
            else:
                self._append(request, next(blocks))
        if prefix.tail >= 0:
            self.pool.share(prefix.tail)
            if not prefix.is_tail_new:
                self._append(request, self._copy(prefix.tail))
            else:
                self._append(request, prefix.tail)
                if request.num_prompt % self._size:
                    table.is_tail_shared, table.capacity = True, request.num_prompt
        self._promise(request, prefix.num_tokens)

    def _copy_back(self, request: Request, name: bytes, host_block: int) -> None:
        """Have the step fill the next block of `request` with what the host keeps by this name."""
        plan, journal, block = self._plan, self._journal, self._allocate()
        assert plan is not None
        self._append(request, block)
        plan.swap_in_hosts.append(host_block)
        plan.swap_in_blocks.append(block)
        journal.read.append((name, host_block))
        journal.num_blocks_in += 1
        self.pool.expect(block, name)
        if self._changes is not None:
            journal.filled.append((request, len(request.kv.blocks) - 1))

    def fetch(self, request: Request) -> None:
        """Have the step copy the blocks of `request` back from the host; it promises what they do not hold."""
        table, plan = request.kv, self._plan
        assert plan is not None
        self._admit(request, 0)
        for host_block in table.host_blocks:
            block = self._allocate()
            self._append(request, block)
            plan.swap_in_hosts.append(host_block)
            plan.swap_in_blocks.append(block)
        self._journal.num_blocks_in += len(table.host_blocks)
        self.expect(request, 0, table.num_swapped)
        self._promise(request, table.num_swapped)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Give `request` blocks for so many tokens; False, and none, when there are not so many."""
        table, pool = request.kv, self.pool
        if num_tokens <= table.capacity:
            return True
        if self.room_for(request, num_tokens) > pool.num_available:
            return False
        self._journal.grown.append((table, len(table.blocks), table.capacity))
        if table.is_tail_shared:
            self._own_tail(request)
        while table.capacity < num_tokens:
            self._append(request, self._allocate())
        return True

    def _own_tail(self, request: Request) -> None:
        """Have the last block of `request`, which others have too, for itself: it is about to write into it."""
        table, plan = request.kv, self._plan
        assert plan is not None
        at, block = len(table.blocks) - 1, table.blocks[-1]
        self._journal.unshared.append((table, block))
        table.is_tail_shared, table.capacity = False, len(table.blocks) * self._size
        if not self._is_writable(block):
            table.blocks[at] = self._copy(block)
        # If the same is as well: a step that was taken back may have told the device of a copy.
        plan.table_slots.append(request.slot)
        plan.table_indexes.append(at)
        plan.table_blocks.append(table.blocks[at])

    def _is_writable(self, block: int) -> bool:
        return self.pool.is_writable(block, self._sources.get(block, 0))

    def _copy(self, source: int) -> int:
        """A new block into which the step copies `source`, of which the caller has a share: the copy takes it over."""
        plan, block = self._plan, self._allocate()
        assert plan is not None
        self._journal.copies[block] = source
        self._sources[source] = self._sources.get(source, 0) + 1
        plan.copy_from_blocks.append(source)
        plan.copy_to_blocks.append(block)
        return block

    def _end_copies(self, journal: Journal) -> None:
        for source in journal.copies.values():
            self._sources[source] -= 1
            if not self._sources[source]:
                del self._sources[source]

    def expect(self, request: Request, start: int, end: int) -> None:
        """The step fills these blocks with tokens that are known: others may share them from now on."""
        size, table, journal = self._size, request.kv, self._journal
        if not self._is_sharing or table.is_mixed:
            return
        if start < request.num_prompt <= end and (request.num_prompt - 1) % size:
            journal.tails[request.request_id] = table
            self.tails.setdefault(self._tail_name(request), {})[request.request_id] = table
        names = self._names(request, end // size)
        for at in range(start // size, end // size):
            name = names[at]
            self.pool.expect(table.blocks[at], name)
            if self._changes is not None:
                journal.filled.append((request, at))
            producer_id = self.producers.pop(name, None)
            if producer_id is not None:
                self._promises[producer_id].remove(name)
                journal.fulfilled.append((name, producer_id))

    def borrow(self, slot: int, num_tokens: int) -> list[int]:
        """Blocks for `num_tokens` tokens of no request, in the table of a free slot, until the step is undone."""
        plan = self._plan
        assert plan is not None
        blocks = [self._allocate() for _ in range(blocks_for(num_tokens, self._size))]
        plan.table_slots += [slot] * len(blocks)
        plan.table_indexes += range(len(blocks))
        plan.table_blocks += blocks
        return blocks

    def save_kept(self) -> None:
        """Have the step copy to the host what is kept and nobody owns, the latest first, as far as there is room."""
        for block, name in self.pool.kept_blocks():
            if not self.host.num_free:
                break
            self._save(block, name)

    def _allocate(self) -> int:
        """A block for one owner; what is kept of it goes to the host."""
        block = self.pool.allocate()
        did, _, name = self._journal.entries[-1]
        if did is _Did.EVICTED and name in self.pool.keeps:
            self._save(block, name)
        return block

    def _save(self, block: int, name: bytes) -> None:
        plan, host = self._plan, self.host
        assert plan is not None
        if host.find(name) is not None or not host.num_available:
            return
        host_block, made_room, used_at = host.take()
        self._saving.add(host_block)
        self._journal.saved.append(Saved(name, host_block, made_room, used_at))
        plan.swap_out_blocks.append(block)
        plan.swap_out_hosts.append(host_block)

    def _end_saves(self, journal: Journal, *, was_copied: bool, launched: bool = True) -> None:
        """What the step was to copy to the host is there, or is not; what had made room for it may be there again."""
        keeps, host = self.pool.keeps, self.host
        for name, block in journal.read:
            host.end_read(name, block, was_used=was_copied)
        for saved in journal.saved if was_copied else reversed(journal.saved):
            self._saving.remove(saved.host_block)
            if was_copied and saved.name in keeps and host.find(saved.name) is None:
                host.keep(saved.name, saved.host_block)
            elif not launched and saved.made_room in keeps and host.find(saved.made_room) is None:
                host.put_back(saved.made_room, saved.host_block, saved.used_at)
            else:
                host.release([saved.host_block])

    @property
    def _journal(self) -> Journal:
        journal = self.pool.journal
        assert journal is not None, "no step is being planned"
        return journal

    def _admit(self, request: Request, num_shared: int) -> None:
        table, journal = request.kv, self._journal
        journal.admitted[request.request_id] = table
        journal.grown.append((table, 0, 0))
        table.commits_at = (num_shared // self._size + 1) * self._size if self._is_sharing else NEVER

    def _append(self, request: Request, block: int) -> None:
        plan, table = self._plan, request.kv
        assert plan is not None
        plan.table_slots.append(request.slot)
        plan.table_indexes.append(len(table.blocks))
        plan.table_blocks.append(block)
        table.blocks.append(block)
        table.capacity += self._size

    # ---- how the step ends ---------------------------------------------------------------------------------------

    def commit(self, journal: Journal) -> None:
        """The step ran to its end: what was expected of it can be found for good, and rows are committed one by one."""
        self.pool.commit(journal)
        if self._changes is not None:
            self._changes.ended(journal)
            for request, at in journal.filled:  # a row that is not counted to its end has filled them all the same
                self._changes.filled(request, at)
        if journal.saved or journal.read:
            self._end_saves(journal, was_copied=True)
        if journal.copies:
            self._end_copies(journal)
            self.pool.release(journal.copies.values())

    def commit_row(self, request: Request, end: int) -> None:
        """The first `end` tokens of `request` are computed: name the blocks that they fill.

        It has something to do when `end` is `request.kv.commits_at` or more. What a step has computed of a token that
        never came (its row was planned ahead) is not counted.
        """
        size, table = self._size, request.kv
        if table.is_mixed:
            table.commits_at = NEVER
            return
        num_full = min(end, len(request.token_ids)) // size
        names = self._names(request, num_full)
        for at in range(table.commits_at // size - 1, num_full):
            self.pool.name(table.blocks[at], names[at])
            if self._changes is not None:
                self._changes.filled(request, at)
        table.commits_at = (num_full + 1) * size

    def take_back(self, journal: Journal) -> None:
        """The step ran to its end, and the blocks that it borrowed are free again."""
        self.pool.undo(journal, launched=True)
        if self._changes is not None:
            self._changes.ended(journal)
        self._end_saves(journal, was_copied=True)

    def undo(self, journal: Journal, *, launched: bool) -> None:
        """Take back what `journal` holds: exactly, if the step was never launched."""
        for table, num_blocks, capacity in reversed(journal.grown):
            del table.blocks[num_blocks:]
            table.capacity = capacity
        for table, block in journal.unshared:
            table.blocks[-1], table.is_tail_shared = block, True
        for table in journal.admitted.values():
            table.is_tail_shared = False
        for request_id, table in journal.tails.items():
            self._drop_tail(request_id, table)
        self._end_copies(journal)
        self.pool.undo(journal, launched=launched)
        if self._changes is not None:
            self._changes.ended(journal)
        self._end_saves(journal, was_copied=False, launched=launched)
        for request_id in reversed(journal.admitted):
            self._break_promises(request_id)
        for name, request_id in reversed(journal.fulfilled):
            promises = self._promises.get(request_id)
            if promises is not None:  # else it has left, or was admitted by this step
                self.producers[name] = request_id
                promises.add(name)
        for table in journal.admitted.values():
            if launched and table.num_swapped:  # what cannot be fetched is computed again
                self._drop(table)
        for request_id, (table, blocks) in journal.leaving.items():
            if launched:  # what was copied may have been overwritten first
                self._drop(table)
            elif table.host_blocks:  # it has not ended meanwhile
                self.leaving[request_id] = table, blocks

    # ---- between steps -------------------------------------------------------------------------------------------

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Give back the blocks of `request` beyond so many tokens."""
        table = request.kv
        assert not table.is_tail_shared, "it has written into its last block, which is its own since"
        num_blocks = blocks_for(num_tokens, self._size)
        self.pool.release(reversed(table.blocks[num_blocks:]))
        del table.blocks[num_blocks:]
        table.capacity = num_blocks * self._size

    def swap_out(self, request: Request) -> bool:
        """Have the next step copy what `request` has computed to the host; False when there is no room for it."""
        table = request.kv
        num_blocks = blocks_for(request.num_computed, self._size)
        if not 0 < num_blocks <= self.host.num_available:
            return False
        table.host_blocks = self.host.allocate(num_blocks)
        table.num_swapped = request.num_computed
        self.leaving[request.request_id] = table, table.blocks[:num_blocks]
        return True

    def release(self, request: Request) -> None:
        """Take back the blocks and the promises of `request`; its copy on the host stays."""
        table = request.kv
        self.pool.release(reversed(table.blocks))
        table.blocks.clear()
        table.capacity, table.commits_at, table.is_tail_shared = 0, NEVER, False
        self._drop_tail(request.request_id, table)
        self._break_promises(request.request_id)

    def abandon(self, request: Request) -> None:
        """`request` has ended in a step that is in flight: what it has promised is for others to compute."""
        self._break_promises(request.request_id)

    def drop_copy(self, request: Request) -> None:
        """Take back what `request` has on the host: it is here again, has ended, or its copy cannot be trusted."""
        self._drop(request.kv)
        self.leaving.pop(request.request_id, None)

    def _drop(self, table: BlockTable) -> None:
        self.host.release(table.host_blocks)
        table.host_blocks = []
        table.num_swapped = 0

    def distrust(self, request: Request) -> None:
        """What `request` has computed is of use to no other, nor what others have shared with it."""
        if self._changes is not None:
            self._changes.lost(self.pool.names_of(request.kv.blocks))
        self.pool.unname(request.kv.blocks)
        self.host.drop(request.kv.names)
        self.tails.pop(request.kv.tail_name, None)

    def distrust_all(self, running: Iterable[Request], others: Iterable[Request]) -> None:
        """What was computed until now is not to be shared: not that of the `running`, nor copies of the `others`."""
        self.pool.unname_all()
        if self._changes is not None:
            self._changes.cleared()
        self.host.drop_all()
        self.tails.clear()
        for request in running:
            self._break_promises(request.request_id)
            request.kv.is_mixed = True
        for request in others:
            request.kv.is_mixed = request.kv.num_swapped > 0

    def forget(self) -> None:
        """What the blocks held is gone; no request owns any."""
        self.pool.forget()
        if self._changes is not None:
            self._changes.cleared()

    def forget_copies(self) -> None:
        """What the host held of conversations is gone."""
        self.host.drop_all()

    def keep_back(self, request: Request) -> None:
        """What `request` was going to have on the host will not be there."""
        if request.request_id in self.leaving:
            self.drop_copy(request)

    def refit(self, num_blocks: int, num_host_blocks: int) -> None:
        """Another pool, if it has another size; no request owns any block, and those on the host stay as they are."""
        if num_blocks != self.pool.num_blocks:
            keeps = self.pool.keeps
            self.pool = BlockPool(num_blocks, self._size)
            self.pool.keeps, self.pool.num_kept_max = keeps, int(self._kept_share * num_blocks)
        if num_host_blocks != self.host.num_blocks:
            self.host.drop_all()
            assert self.host.num_free == self.host.num_blocks, "another pool on the host holds nothing of this one"
            self.host = HostPool(num_host_blocks)

    def changed(self) -> IndexChanged | None:
        """What routers have to be told since it was asked last, if anything."""
        return self._changes.take(self.pool.is_named) if self._changes is not None else None

    # ---- what conversations keep ---------------------------------------------------------------------------------

    def names_of(self, request: Request) -> tuple[bytes, ...]:
        """What `request` has computed by now, by names that can be kept; none if it is not for others."""
        if not self._is_sharing or request.kv.is_mixed:
            return ()
        num_full = min(request.num_computed, len(request.token_ids)) // self._size
        return tuple(self._names(request, num_full)[:num_full])

    def keep(self, names: Sequence[bytes]) -> None:
        """Evict what is called so last, and copy it to the host then."""
        self.pool.keep(names)

    def unkeep(self, names: Sequence[bytes]) -> None:
        """The same, once less: what nobody keeps goes first, and its copies at once."""
        self.host.drop(self.pool.unkeep(names))

    def kept(self, names: Sequence[bytes]) -> Kept:
        """Where what is called so is now."""
        pool, host, size = self.pool, self.host, self._size
        on_device = [pool.holds(name) for name in names]
        on_host = [host.find(name) is not None for name in names]
        found = [here or there for here, there in zip(on_device, on_host, strict=True)]
        num_found = found.index(False) if False in found else len(found)
        num_here = sum(on_device[:num_found])
        return Kept(num_found * size, num_here * size, (num_found - num_here) * size)

    def table_of(self, request: Request) -> list[int]:
        """The blocks of `request`, in the order of its tokens."""
        return request.kv.blocks

    def look(self, unit: int) -> tuple[int, bytes]:
        """How many own this block, steps that copy it among them, and the name of what it holds; b"": none."""
        return self.pool.look(unit)

    def num_copied(self, request: Request) -> int:
        """Blocks on the host that hold a copy of `request`."""
        return len(request.kv.host_blocks)

    def statistics(self) -> PoolStatistics:
        """Blocks by place."""
        return self.pool.statistics()

    # ---- names ---------------------------------------------------------------------------------------------------

    def _name_next(self, request: Request) -> None:
        table, size = request.kv, self._size
        names, at = table.names, len(table.names) * size
        names.append(block_name(names[-1] if names else table.space, request.token_ids[at : at + size]))

    def _names(self, request: Request, num_full: int) -> list[bytes]:
        """The names of the first `num_full` blocks of `request`, which its tokens must fill, at least."""
        names = request.kv.names
        while len(names) < num_full:
            self._name_next(request)
        return names

    def _tail_name(self, request: Request) -> bytes:
        """The name of the whole prompt, by which others with the same one find where its last block is."""
        table = request.kv
        if not table.tail_name:
            num_full = (request.num_prompt - 1) // self._size
            names = self._names(request, num_full)
            parent = names[num_full - 1] if num_full else table.space
            table.tail_name = block_name(parent, request.token_ids[num_full * self._size : request.num_prompt])
        return table.tail_name

    def _drop_tail(self, request_id: int, table: BlockTable) -> None:
        """What the table's last block of the prompt holds is not to be shared from there."""
        holders = self.tails.get(table.tail_name)
        if holders is not None:
            holders.pop(request_id, None)
            if not holders:
                del self.tails[table.tail_name]

    def _promise(self, request: Request, num_tokens: int) -> None:
        """`request` will compute the full blocks after its first `num_tokens` tokens, unless another one does."""
        promised = self._promises[request.request_id] = set()
        if not self._is_sharing or request.kv.is_mixed:
            return
        worth_sharing = (len(request.token_ids) - 1) // self._size  # as `find_prefix` looks no further
        for name in self._names(request, worth_sharing)[num_tokens // self._size : worth_sharing]:
            if name not in self.producers and self.pool.find(name) is None:
                self.producers[name] = request.request_id
                promised.add(name)

    def _break_promises(self, request_id: int) -> None:
        for name in sorted(self._promises.pop(request_id, ())):
            del self.producers[name]

    # ---- for checkers --------------------------------------------------------------------------------------------

    def fingerprint(self) -> tuple[object, ...]:
        """Everything that decides what this cache will do, comparable: what its blocks hold, and what is promised."""
        held = self.pool.fingerprint(), self.host.fingerprint(), tuple(self.leaving)
        tails = sorted((name, *holders) for name, holders in self.tails.items())
        return held, tuple(sorted(self.producers.items())), tuple(tails), tuple(sorted(self._sources.items()))

    def check(self, owners: Iterable[Request], borrowed: Iterable[int]) -> None:
        """Assert that every block, here and on the host, has exactly the owners it should have."""
        owners = list(owners)
        sources = [block for block, count in self._sources.items() for _ in range(count)]
        self.pool.check([*(block for r in owners for block in r.kv.blocks), *sources, *borrowed])
        self.host.check([*(block for r in owners for block in r.kv.host_blocks), *self._saving])
        promised = {name: request_id for request_id, names in self._promises.items() for name in names}
        assert promised == self.producers, "a promised prefix has no producer"
        assert self._promises.keys() <= {r.request_id for r in owners}, "a request that is gone has promises"
        tables = {r.request_id: r.kv for r in owners if r.kv.blocks}
        for holders in self.tails.values():
            assert all(tables.get(i) is table for i, table in holders.items()), "a shared prompt has no owner"
        for request in owners:
            num_blocks, table = len(request.kv.blocks), request.kv
            assert table.capacity == (request.num_prompt if table.is_tail_shared else num_blocks * self._size)
            assert num_blocks == -(-table.capacity // self._size)
            assert request.num_planned <= request.kv.capacity, f"request {request.request_id} has too few blocks"
