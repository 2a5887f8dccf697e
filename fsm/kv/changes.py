"""What has changed in the prefixes that can be found: for routers, which keep a mirror of the index.

A prefix is told when the step that computed its last block has ended well, and taken back when no block can be found by
its name any more. A block that a step takes from the cache comes back with its name if the step is taken back before it
was launched; so its prefix counts as there until the step has ended, and nothing is ever told of a step that may come
to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from novainfer.fsm.kv.blocks import Journal, space_name
from novainfer.fsm.messages.events import IndexChanged, StoredBlock

if TYPE_CHECKING:
    from novainfer.fsm.schedule.request import Request


class Changes:
    """What changed since it was last told; the index begins empty, and that is the first thing told."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._told: dict[bytes, None] = {}  # names that the mirror has
        self._touched: dict[bytes, tuple[Request, int] | None] = {}  # by name: whose block it is, and which of them
        self._taken: dict[bytes, int] = {}  # names of blocks that steps planned or in flight take: how often
        self._is_cleared = True

    def filled(self, request: Request, at: int) -> None:
        """Block `at` of `request` holds what its tokens say, for good."""
        self._touched[request.kv.names[at]] = request, at

    def lost(self, names: Iterable[bytes]) -> None:
        """No block may be found by these names any more; b"" is none."""
        for name in names:
            if name:
                self._touched.setdefault(name, None)

    def planned(self, journal: Journal) -> None:
        """A step will take these blocks from the cache."""
        for name in journal.evicted:
            self._taken[name] = self._taken.get(name, 0) + 1

    def ended(self, journal: Journal) -> None:
        """It has, or will not."""
        for name in journal.evicted:
            self._taken[name] -= 1
            if not self._taken[name]:
                del self._taken[name]
        self.lost(journal.evicted)

    def cleared(self) -> None:
        """Nothing of all that was told can be found any more; no step is planned or in flight."""
        assert not self._taken, "a step is in flight"
        self._told.clear()
        self._touched.clear()
        self._is_cleared = True

    def take(self, is_known: Callable[[bytes], bool]) -> IndexChanged | None:
        """What has to be told, if anything; `is_known` says whether a block can be found by a name."""
        if not self._touched and not self._is_cleared:
            return None
        stored: list[StoredBlock] = []
        removed: list[bytes] = []
        for name, found in self._touched.items():
            if is_known(name) or name in self._taken:
                if name not in self._told:
                    assert found is not None, "what can be found was filled since the mirror was told last"
                    self._told[name] = None
                    stored.append(self._stored(name, *found))
            elif name in self._told:
                del self._told[name]
                removed.append(name)
        self._touched.clear()
        is_cleared, self._is_cleared = self._is_cleared, False
        return IndexChanged(stored, removed, is_cleared) if stored or removed or is_cleared else None

    def _stored(self, name: bytes, request: Request, at: int) -> StoredBlock:
        size = self._size
        token_ids = request.token_ids[at * size : (at + 1) * size]
        if at:
            return StoredBlock(name, request.kv.names[at - 1], token_ids)
        return StoredBlock(name, b"", token_ids, _salt(request))


def _salt(request: Request) -> str:
    """What the first block of `request` is told with, where not everybody can find it: its salt, if that is all."""
    space, salt = request.kv.space, request.params.cache_salt or ""
    return salt if space == space_name("", salt) else space.hex()
