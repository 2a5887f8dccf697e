"""What the scheduler asks of a KV cache: room for tokens, prefixes that it holds already, and to take a step back.

A cache counts its space in *units* of its own (`BlockCache`: blocks). What it knows of a request lies in `request.kv`,
of which others read the numbers only. Between `begin` and `close` a step is planned; what was done in between is
undone by `undo`, or holds from `commit` on. The device learns of it by what the cache writes into the step's plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from novainfer.fsm.kv.blocks import Journal, PoolStatistics

if TYPE_CHECKING:
    from novainfer.fsm.messages.events import IndexChanged
    from novainfer.fsm.messages.step import StepPlan
    from novainfer.fsm.schedule.request import Request


class Prefix(msgspec.Struct, gc=False):
    """What a cache holds of a request's beginning: `num_tokens` of it, in `blocks`, which only the cache reads.

    It may end inside a block: `tail` is where another request has what follows `blocks`. If `is_tail_new`, that is
    computed by the step being planned; else it is there before, and can be copied.

    `copies` are names of what a conversation keeps on the host and no block here holds: by the place in the prefix, of
    which `blocks` fill the rest.

    `awaited` is the name of what comes next, where the request `producer_id` has promised to compute it. Looking has
    taken `num_units`; `is_cut`: there were not enough to look at all of it, and the next look goes on there.
    """

    blocks: list[int]
    num_tokens: int = 0
    tail: int = -1
    is_tail_new: bool = False
    awaited: bytes | None = None
    producer_id: int = -1
    copies: dict[int, bytes] = {}
    num_units: int = 0
    is_cut: bool = False


class Kept(msgspec.Struct, frozen=True):
    """Tokens at the beginning of a conversation that are kept: here or on the host, and in both only counted here."""

    num_tokens: int
    num_on_device: int
    num_on_host: int


class KVCache(Protocol):
    """Keys and values, by request; `room`, and what is compared with it, counts units."""

    # ---- questions -----------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Units that could be given now."""

    @property
    def num_tokens_free(self) -> int:
        """Tokens that the room could hold."""

    @property
    def num_tokens_max(self) -> int:
        """Tokens that one request could have, if it had everything."""

    @property
    def num_host_blocks(self) -> int:
        """Units that the host has room for."""

    @property
    def num_host_blocks_free(self) -> int:
        """Those of them that hold nothing."""

    def room_for(self, request: Request, num_tokens: int, prefix: Prefix | None = None) -> int:
        """Units that `reserve(request, num_tokens)` takes of what is available, if it shares `prefix` first."""

    def end_of_chunk(self, request: Request, start: int, end: int) -> int:
        """Where a chunk ends that begins at token `start` and wants to reach `end`: earlier where room is short."""

    def find_prefix(self, request: Request, num_units: int) -> Prefix:
        """What the cache holds of the beginning of `request`, found with so many units of looking, or cut."""

    def is_promised(self, name: bytes) -> bool:
        """Whether a running request is still going to compute what is called so."""

    # ---- while a step is planned ---------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> Journal:
        """Write what follows into a journal, and for the device into `plan`."""

    def close(self, journal: Journal, *, is_step: bool) -> None:
        """Nothing more is planned; if it `is_step`, it copies out what was swapped out before."""

    def share(self, request: Request, prefix: Prefix) -> None:
        """Give `request`, which has nothing yet, what the cache holds of its beginning; it promises the rest."""

    def fetch(self, request: Request) -> None:
        """Have the step copy back what `swap_out` has kept of `request`."""

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Have room for so many tokens of `request`; False, and nothing has changed, when there is not so much."""

    def save_kept(self) -> None:
        """Have the step copy to the host what conversations keep, as far as there is room."""

    def expect(self, request: Request, start: int, end: int) -> None:
        """The step computes these tokens of `request`, which are known: others may share them from now on."""

    def borrow(self, slot: int, num_tokens: int) -> list[int]:
        """Room for tokens of no request, until the step is undone."""

    # ---- how the step ends ---------------------------------------------------------------------------------------

    def commit(self, journal: Journal) -> None:
        """The step ran to its end; what its rows have computed is committed row by row."""

    def commit_row(self, request: Request, end: int) -> None:
        """The first `end` tokens of `request` are computed for good: from now on they can be found."""

    def undo(self, journal: Journal, *, launched: bool) -> None:
        """Take back what `journal` holds: exactly, if the step was never launched."""

    def take_back(self, journal: Journal) -> None:
        """The step ran to its end, and what it borrowed is free again."""

    # ---- between steps -------------------------------------------------------------------------------------------

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Take back the room of `request` beyond so many tokens."""

    def swap_out(self, request: Request) -> bool:
        """Have the next step copy what `request` has computed to the host; False when there is no room for it."""

    def release(self, request: Request) -> None:
        """Take back the room and the promises of `request`; its copy on the host stays."""

    def abandon(self, request: Request) -> None:
        """`request` has ended in a step that is in flight: it keeps its room until then, and computes nothing more."""

    def drop_copy(self, request: Request) -> None:
        """Take back what `request` has on the host."""

    def distrust(self, request: Request) -> None:
        """What `request` has computed is of use to no other."""

    def distrust_all(self, running: Iterable[Request], others: Iterable[Request]) -> None:
        """What was computed until now is not to be shared: not that of the `running`, nor copies of the `others`."""

    def forget(self) -> None:
        """All that the device held is gone; no request owns any of it."""

    def forget_copies(self) -> None:
        """What the host held of conversations is gone."""

    def keep_back(self, request: Request) -> None:
        """Copy nothing of `request` out any more that no step has copied yet."""

    def refit(self, num_units: int, num_host_units: int) -> None:
        """The device has another cache, of which no request owns anything; copies on the host stay as they are."""

    def changed(self) -> IndexChanged | None:
        """What has changed since it was asked last in the prefixes that can be found; None: nothing is to be told."""

    def names_of(self, request: Request) -> tuple[bytes, ...]:
        """What `request` has computed by now, by names that can be kept."""

    def keep(self, names: Sequence[bytes]) -> None:
        """Give up what is called so last of all that no request has, and for the host if that has room."""

    def unkeep(self, names: Sequence[bytes]) -> None:
        """End what one `keep` of these began."""

    def kept(self, names: Sequence[bytes]) -> Kept:
        """How much of what is called so is there, and where."""

    def table_of(self, request: Request) -> list[int]:
        """The units that `request` has, in the order of its tokens: for people and checkers."""

    def look(self, unit: int) -> tuple[int, bytes]:
        """How many own `unit`, steps that copy it among them, and the name of the prefix that it holds; b"": none."""

    def num_copied(self, request: Request) -> int:
        """Units on the host that hold a copy of `request`."""

    def statistics(self) -> PoolStatistics:
        """Units by place."""

    def fingerprint(self) -> tuple[object, ...]:
        """Everything that decides what the cache will do, comparable: what its units hold, and what is promised."""

    def check(self, owners: Iterable[Request], borrowed: Iterable[int]) -> None:
        """Assert that everything has exactly the owners it should have; for tests, slow."""
