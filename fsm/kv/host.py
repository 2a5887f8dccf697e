"""Room on the host for copies of KV blocks: of what was preempted, and of what conversations keep."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class HostPool:
    """Room for copies of `num_blocks` blocks in the host's memory.

    Each block is free, owned by one request, or holds what a kept name stands for: that makes room for requests, and
    for other kept names, the least recently used first. What steps in flight copy back from there stays until they have
    ended.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # by name, least recently used first
        self._used_at: dict[bytes, int] = {}  # the recency that undo sorts by
        self._uses = 0
        self._readers: dict[int, int] = {}  # blocks that steps in flight read: how many steps

    @property
    def num_available(self) -> int:
        """Blocks that `take` could give now."""
        if not self._kept:
            return len(self._free)
        return len(self._free) + sum(block not in self._readers for block in self._kept.values())

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, which must be available, for a request, between steps."""
        assert count <= self.num_available, "the caller has looked at num_available"
        return [self.take()[0] for _ in range(count)]

    def take(self) -> tuple[int, bytes, int]:
        """A block, and the kept name that it held until now, with its recency; b"" for none."""
        if self._free:
            return self._free.pop(), b"", 0
        name = next(name for name, block in self._kept.items() if block not in self._readers)
        return self._kept.pop(name), name, self._used_at.pop(name)

    def put_back(self, name: bytes, block: int, used_at: int) -> None:
        """Undo the `take` of a block that held `name`."""
        self._kept[name], self._used_at[name] = block, used_at
        self._kept = OrderedDict(sorted(self._kept.items(), key=lambda item: self._used_at[item[0]]))

    def release(self, blocks: Iterable[int]) -> None:
        """Give them back."""
        self._free.extend(blocks)

    # ---- what conversations keep ---------------------------------------------------------------------------------

    def find(self, name: bytes) -> int | None:
        """The block that holds a copy of what is called so."""
        return self._kept.get(name)

    def keep(self, name: bytes, block: int) -> None:
        """`block`, which was taken, holds what is called `name`."""
        assert name not in self._kept, "one copy is enough"
        self._kept[name] = block
        self._use(name)

    def read(self, name: bytes) -> int:
        """The block that holds `name`, which a step will copy back: it stays until `end_read`."""
        block = self._kept[name]
        self._readers[block] = self._readers.get(block, 0) + 1
        return block

    def end_read(self, name: bytes, block: int, *, was_used: bool) -> None:
        """A step that was to copy `block` back has ended: it has, or it was taken back."""
        self._readers[block] -= 1
        if not self._readers[block]:
            del self._readers[block]
            if block not in self._kept.values():
                self._free.append(block)
        if was_used and self._kept.get(name) == block:
            self._use(name)

    def drop(self, names: Iterable[bytes]) -> None:
        """What is called so is not kept any more, or not to be trusted."""
        for name in names:
            block = self._kept.pop(name, None)
            if block is not None:
                del self._used_at[name]
                if block not in self._readers:
                    self._free.append(block)

    def drop_all(self) -> None:
        """Nothing of what is kept here is of use any more."""
        self.drop(list(self._kept))

    def _use(self, name: bytes) -> None:
        self._uses += 1
        self._used_at[name] = self._uses
        self._kept.move_to_end(name)

    # ---- for checkers --------------------------------------------------------------------------------------------

    def fingerprint(self) -> tuple[object, ...]:
        """Everything that decides what this pool will do, comparable."""
        return tuple(self._free), tuple(self._kept.items()), tuple(sorted(self._readers.items()))

    def check(self, owned: Iterable[int]) -> None:
        """Assert that every block has one owner, or is kept, or is free; a step that is to fill it is one."""
        kept = {*self._kept.values(), *self._readers}
        places = sorted([*self._free, *kept, *owned])
        assert places == list(range(self.num_blocks)), "a host block has two owners, or none"
        assert self._used_at.keys() == self._kept.keys(), "a kept copy has no recency"
