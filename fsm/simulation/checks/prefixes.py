"""What the prefix cache holds, by an account of its own: from what steps hold and how they end.

A prefix is all tokens up to a block's end. A step that fills a block with a prefix that no other block has makes it
findable, as it is planned or as it ends; so does one that fetches it from the host. It is lost when the block is given
to something else, when its tokens gave no number, when the step that computed it fails, with the worker, and when steps
compute in another mode; without graphs they compute as with them. What was computed in several modes is never findable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from novainfer.fsm.kv.blocks import block_name
from novainfer.fsm.messages.events import Configure, MakeBatch, StepFailed, WorkerLost
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.request import COMING, Request, RequestState
from novainfer.fsm.simulation.checks.masks import without_mask
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.checks.verified import without_number
from novainfer.fsm.simulation.world.shape import is_exact

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.simulation.world.world import World

COMPUTING = (RequestState.PREFILL, RequestState.WAITING_FOR_REMOTE_KVS)


class Step(msgspec.Struct):
    """A step on the device."""

    named: list[int] = []  # prefixes that it makes findable
    evicted: list[tuple[int, int]] = []  # prefixes and blocks that it took, in order
    dropped: set[bytes] = set()  # names that the host kept, and that made room there
    filled: list[tuple[Request, int, int, list[int]]] = []  # from which token to which, in which blocks


class Prefixes:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._size = world.shape.block_size
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}  # prefixes, by the one before and a block of tokens
        self._spaces: dict[tuple[str, str | None], int] = {}
        self._names_of: dict[int, list[bytes]] = {}  # the same in the cache's words
        self._name_of: dict[int, bytes] = {}  # by prefix
        self._prefixes: dict[int, list[int]] = {}  # by request, of its full blocks
        self._block_of: dict[int, int] = {}
        self._prefix_of: dict[int, int] = {}  # by block
        self._mode = world.shape.modes[0]
        self._mixed: set[int] = set()  # requests with blocks of several modes
        self._steps: list[Step] = []  # oldest first
        # Of requests whose tokens gave no number: their blocks, and how many of the requests with guesses come first.
        self._spoilt: list[tuple[int, list[int]]] = []
        self._late: set[int] = set()  # requests whose rows have come to nothing, for want of a mask
        self._touched: set[int] = set()  # prefixes that it makes findable, or would, and those that it takes
        self._promised: dict[int, tuple[int, int]] = {}  # prefix: the request that computes it, and since which step
        self._admitted: dict[int, int] = {}  # in which step, by request
        self._num_steps = 0
        self.is_doubtful = False  # which of two blocks is findable cannot be told

    # ---- questions -----------------------------------------------------------------------------------------------

    def of(self, request: Request) -> list[int]:
        """The prefixes of its full blocks, but for one that holds its last token."""
        found, size = self._prefixes.setdefault(request.request_id, []), self._size
        tokens = request.token_ids
        for at in range(len(found), (len(tokens) - 1) // size):
            key = found[-1] if found else self._space(request), tuple(tokens[at * size : (at + 1) * size])
            found.append(self._ids.setdefault(key, len(self._ids)))
        return found

    def num_held(self, request: Request) -> int:
        """How many of its blocks the cache holds, from the first one on: here, or on the host for a conversation."""
        count, host = 0, self._world.cache.host
        for prefix, name in zip(self.of(request), self._names(request), strict=True):
            if prefix not in self._block_of and host.find(name) is None:
                break
            count += 1
        return count

    def _names(self, request: Request) -> list[bytes]:
        """What the cache calls the prefixes of its full blocks."""
        found, space, size = self._names_of.setdefault(request.request_id, []), request.kv.space, self._size
        for at, prefix in enumerate(self.of(request)[len(found) :], len(found)):
            found.append(block_name(found[-1] if found else space, request.token_ids[at * size : (at + 1) * size]))
            self._name_of[prefix] = found[-1]
        return found

    def promiser(self, prefix: int) -> Request | None:
        """The request that said first that it would compute `prefix`, and is still at that."""
        request_id, step = self._promised.get(prefix, (-1, -1))
        request = self._world.scheduler.planner.running.get(request_id)
        is_at_it = request is not None and request.state in COMPUTING and not self.is_mixed(request)
        return request if is_at_it and self._admitted[request_id] == step else None

    def is_evicted(self, prefix: int) -> bool:
        """Whether the step that was planned last has taken its block for something else."""
        step = self._steps[-1]
        is_dropped = self._name_of.get(prefix) in step.dropped
        return is_dropped or any(prefix == evicted for evicted, _ in step.evicted)

    def is_mixed(self, request: Request) -> bool:
        """Whether what it has computed is not for others."""
        return request.request_id in self._mixed

    # ---- what happens --------------------------------------------------------------------------------------------

    def before(self, event: Any) -> None:
        """The scheduler is about to handle `event`: what gave no number is lost with it."""
        flight = self._world.scheduler.oldest_flight
        self._late.clear()
        if not isinstance(event, MakeBatch) or not isinstance(event.outcome, StepDone) or flight is None:
            return
        self._late.update(request.request_id for request in without_mask(flight, event))
        in_turn = [*flight.samples, *(request for request, _, _ in flight.pooled)]  # what gives vectors comes last
        places = {request.request_id: at for at, request in enumerate(in_turn)}
        assert self._world.audit is not None
        kept = [places[other.request.request_id] for other in self._world.audit.verified.kept]
        for request in without_number(self._world, flight, event.outcome):
            num_before = sum(at <= places[request.request_id] for at in kept)
            self._spoilt.append((num_before, list(request.kv.blocks)))

    def returned(self, event: Any) -> None:
        """The oldest step on the device has ended so; what follows is planned in the mode of the planner."""
        if not isinstance(event, MakeBatch | WorkerLost | Configure):
            return
        if isinstance(event, WorkerLost | Configure):
            self._forget()
            self._steps.clear()
        elif isinstance(event.outcome, StepFailed):
            while self._steps:
                step = self._steps.pop()
                was_launched = event.outcome.launched_behind if self._steps else event.outcome.launched
                for prefix in step.named:
                    del self._prefix_of[self._block_of.pop(prefix)]
                for prefix, block in () if was_launched else reversed(step.evicted):
                    if prefix not in self._block_of:
                        self._block_of[prefix], self._prefix_of[block] = block, prefix
        elif event.outcome is not None:  # the prefix that another block held may be this step's by now
            for request, start, end, blocks in self._steps.pop(0).filled:
                if not self.is_mixed(request) and request.request_id not in self._late:
                    self._fill_blocks(request, start, end, blocks)
        assert self._world.audit is not None
        kept = self._world.audit.verified.kept
        for at in range(len(kept) + 1):  # request by request: what gave no number makes room for the next one's
            for block in (block for num_before, blocks in self._spoilt if num_before == at for block in blocks):
                self._take(block)
            if at < len(kept) and not self.is_mixed(kept[at].request):  # what was guessed, and is known now
                self._fill_blocks(kept[at].request, kept[at].start + 1, kept[at].count, kept[at].blocks)
        self._spoilt.clear()
        mode = self._world.scheduler.planner.mode
        if not is_exact(mode, self._mode):
            self._forget()
            self._mixed = set(self._world.scheduler.requests)
        self._mode = mode

    def planned(self, flight: Flight) -> None:
        """The device is about to compute this step."""
        size = self._size
        step = Step()
        self._steps.append(step)
        self._num_steps += 1
        self._touched = set()
        fetched = {request.request_id for request in flight.fetched}
        admitted = {request.request_id for request in flight.admitted} - fetched
        self._mixed -= admitted
        step.dropped = {one.made_room for one in flight.journal.saved if one.made_room}
        read = {name for name, _ in flight.journal.read}
        for request, _, start in flight.rows if read else ():
            if request.request_id in admitted:
                self._copy_back(request, start // size, read)
        for request, count, start in flight.rows:
            end = start + count - flight.drafts.get(request.request_id, 0)
            own = request.kv.blocks[
                start // size : start // size + 1
            ]  # it goes on in it, or in a copy that is made now
            new = own if start % size and own and own[0] in flight.journal.copies else []
            for block in [*new, *request.kv.blocks[-(-start // size) : -(-end // size)]]:
                self._evict(block)
            if request.mask != COMING:  # else its row may come to nothing
                self._fill(request, start, end)
            step.filled.append((request, start, end, list(request.kv.blocks)))
        by_rows, self._touched = self._touched, set()
        for at, request in enumerate(flight.fetched):  # when, among the rows, is not known
            for block in request.kv.blocks:
                self._evict(block)
            self._fill(request, 0, request.num_planned)
            step.filled.insert(at, (request, 0, request.num_planned, list(request.kv.blocks)))
        self.is_doubtful |= not by_rows.isdisjoint(self._touched)
        for request, count, start in flight.rows:  # drafts come last
            if num_drafts := flight.drafts.get(request.request_id, 0):
                for block in request.kv.blocks[-(-(start + count - num_drafts) // size) :]:
                    self._evict(block)
        for block in flight.canary:
            self._evict(block)
        for request in flight.admitted:
            if request.request_id in admitted:
                self._check_shared(request, flight)
            self._admitted[request.request_id] = self._num_steps
            if not self.is_mixed(request):
                self._promise(request)
        self._check_findable(flight)

    def _copy_back(self, request: Request, num_shared: int, read: set[bytes]) -> None:
        """What it begins with, and a conversation keeps on the host, is in its blocks when the step begins."""
        size = self._size
        for at, (prefix, name) in enumerate(zip(self.of(request)[:num_shared], self._names(request), strict=False)):
            held, block = self._block_of.get(prefix), request.kv.blocks[at]
            if name in read and held != block:
                # What was here and is copied back must have been taken by the step before that: were it here still,
                # the cache would find it by that block, and `_check_findable` would tell.
                if held is not None:
                    self._evict(held)
                self._evict(block)
                self._fill(request, at * size, (at + 1) * size)

    # ---- details -------------------------------------------------------------------------------------------------

    def _check_shared(self, request: Request, flight: Flight) -> None:
        """What it begins with is in the cache."""
        start = next(start for other, _, start in flight.rows if other is request)
        if start % self._size and not any(self._begins_alike(other, request) for other in self._others(request)):
            raise Violation(f"request {request.request_id} shares the end of a prompt that no other one has")
        num_shared = start // self._size
        for prefix, block in zip(self.of(request)[:num_shared], request.kv.blocks, strict=False):
            if self._block_of.get(prefix) != block and not self.is_doubtful:
                raise Violation(f"request {request.request_id} shares block {block}, which is not in the cache")

    def _others(self, request: Request) -> Iterator[Request]:
        """All that may have blocks, but for one."""
        scheduler = self._world.scheduler
        departed = (other for flight in scheduler.flights for other in flight.departed)
        return (other for other in (*scheduler.requests.values(), *departed) if other is not request)

    def _begins_alike(self, other: Request, request: Request) -> bool:
        """Whether its prompt is the same, in the same space."""
        prompt = request.token_ids[: request.num_prompt]
        return self._space(other) == self._space(request) and other.token_ids[: other.num_prompt] == prompt

    def _check_findable(self, flight: Flight) -> None:
        """The blocks that another request can find are those."""
        pool = self._world.cache.pool
        found = {*pool._index.values(), *pool._expected.values()}
        if found != self._prefix_of.keys() and not self.is_doubtful:
            wrongly, lost = sorted(found - self._prefix_of.keys()), sorted(self._prefix_of.keys() - found)
            raise Violation(f"with step {flight.step_id} blocks {wrongly} can be found, and {lost} cannot")

    def _fill(self, request: Request, start: int, end: int) -> None:
        """A step writes its tokens from `start` to `end`, which are known."""
        if not self.is_mixed(request):
            self._fill_blocks(request, start, end, request.kv.blocks, self._steps[-1].named)

    def _fill_blocks(
        self, request: Request, start: int, end: int, blocks: list[int], named: list[int] | None = None
    ) -> None:
        size = self._size
        if start // size == end // size:
            return
        prefixes = self.of(request)
        if end == len(request.token_ids) and end % size == 0:  # the block of its last token is full as well
            prefixes = [*prefixes, self._last(request)]
        for prefix, block in list(zip(prefixes, blocks, strict=False))[start // size : end // size]:
            self._touched.add(prefix)
            if prefix in self._block_of or block in self._prefix_of:
                continue
            self._block_of[prefix], self._prefix_of[block] = block, prefix
            if named is not None:
                named.append(prefix)

    def _last(self, request: Request) -> int:
        prefixes, size = self.of(request), self._size
        key = prefixes[-1] if prefixes else self._space(request), tuple(request.token_ids[-size:])
        return self._ids.setdefault(key, len(self._ids))

    def _space(self, request: Request) -> int:
        """Below all prefixes: what the first ones come after, of its tenant and its salt."""
        tenant = "" if self._world.shape.share_prefix_cache else request.tenant.id
        return -1 - self._spaces.setdefault((tenant, request.params.cache_salt), len(self._spaces))

    def _promise(self, request: Request) -> None:
        """It will compute what the cache does not hold, unless another one has said so before.

        What the cache held before the step, which needed the block, nobody has promised.
        """
        for prefix in self.of(request)[request.num_planned // self._size :]:
            if prefix not in self._block_of and self.promiser(prefix) is None and not self.is_evicted(prefix):
                self._promised[prefix] = request.request_id, self._num_steps

    def _evict(self, block: int) -> None:
        """It is given to something else."""
        if (prefix := self._take(block)) is not None:
            self._touched.add(prefix)
            self._steps[-1].evicted.append((prefix, block))

    def _take(self, block: int) -> int | None:
        prefix = self._prefix_of.pop(block, None)
        if prefix is not None:
            del self._block_of[prefix]
            self._promised.pop(prefix, None)
        return prefix

    def _forget(self) -> None:
        self._block_of.clear()
        self._prefix_of.clear()
        self._promised.clear()
        self.is_doubtful = False
