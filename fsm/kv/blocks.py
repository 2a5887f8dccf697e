"""The KV cache's block pool: who owns which block, which blocks hold a known prefix, and how to take a step back.

A block holds `block_size` tokens of one layer stack. It is in exactly one of three places:

    free ──allocate──▶ owned (refcount ≥ 1) ──release──▶ cached (refcount 0, its prefix known, least recent first)
      ▲                                  └──release──▶ free (its content has no name)
      └───────────────── evict ◀───────────── cached (also: cached ──share──▶ owned)

so `free + cached + owned = total` at every moment. The pool never reclaims on its own account: asked for more than
free + cached, it says no, and the scheduler decides who must wait or go.

Prefixes are named by a chained digest: a block's name covers all tokens up to its end. Names are 128-bit BLAKE2b,
so that two users' prompts do not share a block by accident or on purpose. The chain of a tenant's prompt, or of one
with a salt, begins with the name of its space instead of nothing: it shares blocks with none outside of that.

A block gets its name when the step that fills it has ended well. Until then it is *expected* to hold the prefix: the
rest of the plan, and steps planned behind it, can share it already.

Names that conversations keep are evicted last: their blocks are as free to take as any other that nobody owns, and
while there are more of them than `num_kept_max`, they go first. So no request ever has less room for them.

A journal remembers what a planned step changed. Undoing it gives back exactly the state before the plan; when the
step had been launched, the device may have overwritten what its blocks held, so those that had been taken from the
cache lose their names instead of getting them back.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from novainfer.fsm.schedule.request import Request

BLOCK_NAME_BYTES = 16  # 128 bits: a collision among 2**40 blocks has odds of 2**-49


def block_name(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block: a digest of the name of the block before it and its own token ids."""
    return blake2b(array("I", token_ids).tobytes(), key=parent, digest_size=BLOCK_NAME_BYTES).digest()


def space_name(tenant: str, salt: str) -> bytes:
    """What comes before the first blocks' names of one tenant's prefixes, or of one salt's; b"": of everybody's."""
    if not tenant and not salt:
        return b""
    whose = blake2b(tenant.encode(), digest_size=BLOCK_NAME_BYTES).digest()
    return blake2b(salt.encode(), key=whose, digest_size=BLOCK_NAME_BYTES, person=b"space").digest()


def tokens_in(num_blocks: int, block_size: int) -> int:
    """Tokens that so many blocks hold."""
    return num_blocks * block_size


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens need."""
    return -(-num_tokens // block_size)


class PoolStatistics(msgspec.Struct, frozen=True):
    """Blocks by place; `num_free + num_cached + num_owned = num_blocks`."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_owned: int


class _Did(Enum):
    TOOK = auto()  # a free block became owned
    EVICTED = auto()  # a cached block lost its name and became owned
    SHARED = auto()  # one more reference to an owned block
    REVIVED = auto()  # a cached block became owned, keeping its name


NEVER = 1 << 62  # more tokens than any request has


class BlockTable(msgspec.Struct, gc=False, eq=False):
    """What one request has of the KV cache, here and on the host; for others to read are the numbers only."""

    capacity: int = 0  # tokens that it has room for
    commits_at: int = NEVER  # so many tokens have to be committed before `BlockCache.commit_row` has something to do
    num_swapped: int = 0  # tokens that the host holds a copy of
    is_mixed: bool = False  # its blocks were computed in several modes, and are not to be shared
    is_tail_shared: bool = False  # its last block is another's too, and has room for what both have written only
    blocks: list[int] = []
    host_blocks: list[int] = []
    space: bytes = b""  # what the chain of its names begins with
    names: list[bytes] = []  # of its full blocks, as far as they were needed
    tail_name: bytes = b""  # of the whole prompt, where it was needed


class Saved(msgspec.Struct, gc=False, frozen=True):
    """A block of this name is copied to a block on the host, which held the name `made_room` (b"": none) until then."""

    name: bytes
    host_block: int
    made_room: bytes
    used_at: int


class Journal(msgspec.Struct, gc=False, eq=False):
    """What one planned step did to a cache: `BlockPool.undo` and `BlockCache.undo` take it back."""

    entries: list[tuple[_Did, int, bytes]] = []  # in order
    expected: list[bytes] = []  # names of blocks that the step fills
    grown: list[tuple[BlockTable, int, int]] = []  # tables, how many blocks each had before, and room
    unshared: list[tuple[BlockTable, int]] = []  # of those, the last block, which it shared with others
    copies: dict[int, int] = {}  # blocks that the step copies: to which, from which
    tails: dict[int, BlockTable] = {}  # of requests whose prompt the step completes, by id
    admitted: dict[int, BlockTable] = {}  # of requests that had no block before, by id
    fulfilled: list[tuple[bytes, int]] = []  # promised names that the step computes, and who had promised them
    leaving: dict[int, tuple[BlockTable, list[int]]] = {}  # blocks that it copies to the host, by request
    saved: list[Saved] = []  # what is kept, and copied to the host by it
    read: list[tuple[bytes, int]] = []  # what is kept on the host, and copied back by it: names and blocks
    num_blocks_in: int = 0  # that it copies back

    filled: list[tuple[Request, int]] = []  # blocks that it fills, of which routers are told: whose, and which of them

    @property
    def evicted(self) -> list[bytes]:
        """The names of the blocks that the step takes from the cache."""
        return [name for did, _, name in self.entries if did is _Did.EVICTED]

    @property
    def num_blocks_out(self) -> int:
        """Blocks that the step copies to the host."""
        num_saved = len(self.saved)
        return num_saved + sum(len(blocks) for _, blocks in self.leaving.values()) if self.leaving else num_saved


class BlockPool:
    """Blocks 0 to `num_blocks - 1` of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 goes first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._kept: OrderedDict[int, None] = OrderedDict()  # the same of those whose names are kept
        self.keeps: dict[bytes, int] = {}  # names that are kept, and by how many
        self.num_kept_max = 0  # blocks that nobody owns, and that are evicted last
        self._index: dict[bytes, int] = {}  # name -> the block that holds that prefix
        self._name: list[bytes] = [b""] * num_blocks
        self._refs = [0] * num_blocks
        self._released_at = [0] * num_blocks  # order of release: the recency that eviction and undo sort by
        self._releases = 0
        self._demotions = 0
        self._expected: dict[bytes, int] = {}  # name -> the block that will hold it when its step has ended
        self.journal: Journal | None = None  # of the step that is being planned

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` could give now: free, cached and kept ones."""
        return len(self._free) + len(self._cached) + len(self._kept)

    def statistics(self) -> PoolStatistics:
        """Blocks by place."""
        free, cached = len(self._free), len(self._cached) + len(self._kept)
        return PoolStatistics(self.num_blocks, free, cached, self.num_blocks - free - cached)

    # ---- inside a step: journaled --------------------------------------------------------------------------------

    def open(self, journal: Journal) -> None:
        """Write what follows into `journal`."""
        assert self.journal is None, "a journal is open"
        self.journal = journal

    def close(self) -> None:
        """Stop writing into the journal."""
        self.journal = None

    def allocate(self) -> int:
        """Give one block to one owner; the caller has looked at `num_available`."""
        if self._free:
            block = self._free.pop()
            self._note(_Did.TOOK, block, b"")
        else:
            is_kept = not self._cached or len(self._kept) > self.num_kept_max
            block, _ = (self._kept if is_kept else self._cached).popitem(last=False)
            name = self._name[block]
            del self._index[name]
            self._name[block] = b""
            self._note(_Did.EVICTED, block, name)
        assert self._refs[block] == 0, f"block {block} was given away while it is owned"
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner for a block that `find` gave."""
        if self._refs[block] == 0:
            del self._lru(self._name[block])[block]
            self._note(_Did.REVIVED, block, b"")
        else:
            self._note(_Did.SHARED, block, b"")
        self._refs[block] += 1

    def expect(self, block: int, name: bytes) -> None:
        """The owned `block` will hold the prefix `name` once this step has run; ignored where another does."""
        if name in self._index or name in self._expected or self._name[block]:
            return
        assert self.journal is not None, "a block is expected by the plan that fills it"
        self._expected[name] = block
        self.journal.expected.append(name)

    def unname(self, blocks: Iterable[int]) -> None:
        """What these owned blocks hold is not to be trusted: no later request shall find it."""
        assert self.journal is None, "blocks lose their names between steps only"
        for block in blocks:
            if name := self._name[block]:
                del self._index[name]
                self._name[block] = b""

    def find(self, name: bytes) -> int | None:
        """The block that holds the prefix `name`, or will when a step that is planned has ended."""
        block = self._index.get(name)
        return self._expected.get(name) if block is None else block

    def is_named(self, name: bytes) -> bool:
        """Whether a block holds the prefix `name` for good."""
        return name in self._index

    def names_of(self, blocks: Iterable[int]) -> list[bytes]:
        """By which names these blocks are found; b"": by none."""
        return [self._name[block] for block in blocks]

    def look(self, block: int) -> tuple[int, bytes]:
        """How many own `block`, and by which name it is found; b"": by none."""
        return self._refs[block], self._name[block]

    def is_writable(self, block: int, num_reading: int) -> bool:
        """Whether `block` has one owner, beside `num_reading` that a copy keeps it for, and no name to live up to."""
        return self._refs[block] - num_reading == 1 and not self._name[block]

    def is_cached(self, block: int) -> bool:
        """True when no request owns `block`, so that sharing it takes it from what is available."""
        return self._refs[block] == 0

    # ---- how a step ends -----------------------------------------------------------------------------------------

    def commit(self, journal: Journal) -> None:
        """The step of `journal` ended well: its blocks hold what they were expected to."""
        for name in journal.expected:
            self.name(self._expected.pop(name), name)

    def name(self, block: int, name: bytes) -> None:
        """The owned `block` holds the prefix `name`; ignored where another does, or will when its step has ended."""
        if name in self._index or name in self._expected or self._name[block]:
            return
        self._index[name] = block
        self._name[block] = name

    # ---- between steps: final ------------------------------------------------------------------------------------

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each of `blocks`; give the last block of a request first, so that it is evicted first."""
        assert self.journal is None, "blocks are released between steps only"
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} was released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._put_back(block)

    def undo(self, journal: Journal, *, launched: bool) -> None:
        """Take back what `journal` holds, last first: exactly, if the step was never launched.

        A launched step may have written into its blocks: those that had been evicted for it stay nameless.
        """
        assert self.journal is None, "close the journal before it is undone"
        for name in journal.expected:
            del self._expected[name]
        is_back = False
        overwritten: list[int] = []
        for did, block, name in reversed(journal.entries):
            assert self._refs[block] > 0, f"undo of {did.name} for block {block}, which no request owns"
            self._refs[block] -= 1
            if did is _Did.TOOK:
                assert self._refs[block] == 0, f"block {block} is shared beyond its step"
                self._free.append(block)
            elif did is _Did.EVICTED:
                assert self._refs[block] == 0, f"block {block} is shared beyond its step"
                if launched or name in self._index:
                    overwritten.append(block)
                else:
                    self._index[name] = block
                    self._name[block] = name
                    self._lru(name)[block] = None
                    is_back = True
            elif self._refs[block] == 0:  # SHARED or REVIVED, and no other owner is left
                if name := self._name[block]:
                    self._lru(name)[block] = None
                    is_back = True
                else:
                    self._free.append(block)
        self._free.extend(overwritten)
        if is_back:  # they came out of the middle, or names are kept since that were not: sort by recency again
            self._cached = self._by_recency(self._cached)
            self._kept = self._by_recency(self._kept)

    def forget(self) -> None:
        """What the blocks held is gone; no request owns any: all are free, and none has a name."""
        assert not any(self._refs), "blocks that a request owns cannot be forgotten"
        self.unname_all()

    def unname_all(self) -> None:
        """What the blocks hold is not to be shared: none has a name, and those that were cached are free."""
        self._free.extend((*self._cached, *self._kept))
        self._cached.clear()
        self._kept.clear()
        self._index.clear()
        self._name = [b""] * self.num_blocks

    def _put_back(self, block: int) -> None:
        self._releases += 1
        self._released_at[block] = self._releases
        if name := self._name[block]:
            self._lru(name)[block] = None
        else:
            self._free.append(block)

    def _lru(self, name: bytes) -> OrderedDict[int, None]:
        """Where the block of this name is while nobody owns it."""
        return self._kept if name in self.keeps else self._cached

    def _by_recency(self, blocks: Iterable[int]) -> OrderedDict[int, None]:
        return OrderedDict.fromkeys(sorted(blocks, key=self._released_at.__getitem__))

    # ---- what conversations keep ---------------------------------------------------------------------------------

    def keep(self, names: Sequence[bytes]) -> None:
        """Evict the blocks of these names last, until as many calls of `unkeep` have followed.

        The first name is that of a conversation's beginning, without which what follows is of no use: its block goes
        after those of the others.
        """
        assert self.journal is None, "what is kept changes between steps only"
        for name in reversed(names):
            self.keeps[name] = self.keeps.get(name, 0) + 1
            block = self._index.get(name)
            if block is not None and block in self._cached:
                del self._cached[block]
                self._put_back(block)

    def unkeep(self, names: Sequence[bytes]) -> list[bytes]:
        """These are kept once less; what nobody keeps any more goes before the rest, the end of a conversation first.

        Gives the names that nobody keeps any more.
        """
        assert self.journal is None, "what is kept changes between steps only"
        over: list[bytes] = []
        for name in names:
            self.keeps[name] -= 1
            if self.keeps[name]:
                continue
            del self.keeps[name]
            over.append(name)
            block = self._index.get(name)
            if block is not None and block in self._kept:
                del self._kept[block]
                self._demotions += 1
                self._released_at[block] = -self._demotions
                self._cached[block] = None
                self._cached.move_to_end(block, last=False)
        return over

    def kept_blocks(self) -> list[tuple[int, bytes]]:
        """The blocks that nobody owns and whose names are kept, with those, the most recently released first."""
        return [(block, self._name[block]) for block in reversed(self._kept)]

    def holds(self, name: bytes) -> bool:
        """Whether a block has this name."""
        return name in self._index

    def _note(self, did: _Did, block: int, name: bytes) -> None:
        if self.journal is not None:
            self.journal.entries.append((did, block, name))

    # ---- for checkers --------------------------------------------------------------------------------------------

    def fingerprint(self) -> tuple[object, ...]:
        """Everything that decides what this pool will do, comparable."""
        return (
            tuple(self._free),
            tuple(self._cached),
            tuple(self._kept),
            tuple(sorted(self.keeps.items())),
            tuple(sorted(self._index.items())),
            tuple(self._name),
            tuple(self._refs),
            tuple(self._released_at),
        )

    def check(self, owned: Iterable[int]) -> None:
        """Assert that references match `owned` (each block once per owner) and that every block is in one place."""
        counts, owned = [0] * self.num_blocks, list(owned)
        for block in owned:
            counts[block] += 1
        assert counts == self._refs, f"references {self._refs} do not match the owners {counts}"
        places = [*self._free, *self._cached, *self._kept, *set(owned)]
        assert sorted(places) == list(range(self.num_blocks)), "a block is in no place, or in two"
        names, named = self._name, set(self._index.values())
        assert all(names[block] == name for name, block in self._index.items()), "a name that finds another block"
        assert len(named) == len(names) - names.count(b""), "a block's name that finds none"
        assert self._cached.keys() | self._kept.keys() <= named, "a cached block that no name finds"
        assert all(names[block] in self.keeps for block in self._kept), "a block is kept for nobody"
        assert not any(names[block] in self.keeps for block in self._cached), "a kept block is evicted among the others"
        for lru in (self._cached, self._kept):
            assert list(lru) == list(self._by_recency(lru)), "blocks are not evicted in the order of their release"
        assert named.isdisjoint(self._free), "a free block has a name"
