"""Who has which block and which slot, by an account of its own: from plans, outcomes and ends, as they pass the links.

    a slot         is given by an admission, to one request at a time
    a block        is given by a table entry; it has one owner, or several whose tokens in it are equal
    a copied one   is kept until the step has ended, by a share of its own
    a cell         has one writer in a step, or several whose tokens are equal up to there; and no owner that had its
                   block before the step has come so far
    they return    when their request has ended and is not on the device, with the step if it is, when the request
                   is preempted, when the step that gave them has failed, and all of them when the worker is lost

After each event that moves any, what the machines hold must be the same, and what nobody has must be free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from novainfer.fsm.core.machine import Effect, Send
from novainfer.fsm.messages.events import Batch, CancelRequest, Configure, KeepOver, MakeBatch, Outputs, WorkerLost
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.simulation.checks.masks import without_mask
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.simulation.world.world import World

CANARY = -1  # whose blocks and slot belong to no request
COPY = -2  # minus a block: what keeps the one that is copied to it
MOVING = (MakeBatch, CancelRequest, WorkerLost, KeepOver, Configure)


class Held(msgspec.Struct):
    """A step on the device."""

    admitted: list[int]  # requests
    before: dict[int, int]  # blocks that each request in it had before it
    ends_before: dict[int, int]  # tokens of each request whose cells were written before it
    copied: list[tuple[int, int]] = []  # what keeps a block that it copies, and that block
    replaced: list[tuple[int, int, int]] = []  # requests, their tables' entries, and what stood there before it
    departed: list[int] = []  # have ended, and return with the step


class Ledger:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._slots: dict[int, int] = {}  # whose it is
        self._tables: dict[int, list[int]] = {}  # blocks, by request
        self._owners: dict[int, set[int]] = {}  # requests, by block
        self._tokens: dict[int, list[int]] = {}  # of requests that have blocks: a list that only grows
        self._ends: dict[int, int] = {}  # tokens of each request whose cells were written, by steps on the device too
        self._steps: list[Held] = []  # oldest first
        self._preempted: list[int] = []  # while the event was handled
        self._late: list[int] = []  # requests that get no token of the step that has ended, for want of a mask
        self._set_back: dict[int, int] = {}  # of those, the tokens that count

    # ---- what happens --------------------------------------------------------------------------------------------

    def before(self, event: Any) -> None:
        """The scheduler is about to handle `event`."""
        flight = self._world.scheduler.oldest_flight
        self._late = [r.request_id for r in without_mask(flight, event)] if flight is not None else []

    def preempted(self, request_id: int) -> None:
        """A request is about to lose its blocks."""
        self._preempted.append(request_id)

    def after(self, event: Any, effects: Sequence[Effect]) -> None:
        """The scheduler has handled `event`."""
        if isinstance(event, WorkerLost):
            self._failed()
            for request_id in list(self._tables):
                self._free(request_id)
        elif isinstance(event, MakeBatch) and event.outcome is not None:
            if isinstance(event.outcome, StepDone):
                self._returned()
            else:
                self._failed()
        sent = [effect.event for effect in effects if isinstance(effect, Send)]
        for message in sent:
            for output in message.outputs if isinstance(message, Batch | Outputs) else ():
                if output.end is not None and output.request_id in self._tables:
                    self._ended(output.request_id)
        for request_id in self._preempted:
            if any(request_id in step.before for step in self._steps):
                raise Violation(f"request {request_id} loses its blocks while they are on the device")
            self._free(request_id)
        self._preempted.clear()
        for message in sent:
            if isinstance(message, Batch) and message.plan is not None:
                assert self._world.planned is not None
                self._planned(message.plan, self._world.planned)
        if isinstance(event, MOVING) and self._world.looks_closely:
            self._compare()

    def _failed(self) -> None:
        """Of the steps on the device nothing has come, the oldest one included."""
        for step in reversed(self._steps):
            self._end_copies(step)
            for request_id, index, block in step.replaced:
                table = self._tables[request_id]
                self._owners[table[index]].remove(request_id)
                table[index] = block
                self._owners[block].add(request_id)
            for request_id, num_blocks in step.before.items():
                self._cut(request_id, num_blocks)
            self._ends = step.ends_before
        self._set_back.clear()
        gone = [request_id for step in self._steps for request_id in (*step.departed, *step.admitted)]
        for request_id in (*gone, CANARY):
            self._free(request_id)
        self._steps.clear()

    def _returned(self) -> None:
        """The oldest step is no longer on the device, and went well."""
        assert self._world.audit is not None
        for kept in self._world.audit.verified.kept:
            self._ends[kept.request.request_id] = kept.count
            self._cut(kept.request.request_id, -(-kept.count // self._world.shape.block_size))
        step = self._steps.pop(0)
        self._end_copies(step)
        for request_id in self._late:
            count = self._set_back.setdefault(request_id, step.ends_before.get(request_id, 0))
            if not any(request_id in other.before for other in self._steps):  # else that writes to them yet
                self._ends[request_id] = self._set_back.pop(request_id)
                self._cut(request_id, -(-count // self._world.shape.block_size))
        for request_id in (*step.departed, CANARY):
            self._free(request_id)

    def _end_copies(self, step: Held) -> None:
        for copy, block in step.copied:
            self._owners[block].remove(copy)

    def _cut(self, request_id: int, num_blocks: int) -> None:
        """It gives back all blocks but the first ones."""
        for block in self._tables[request_id][num_blocks:]:
            self._owners[block].remove(request_id)
        del self._tables[request_id][num_blocks:]

    def _ended(self, request_id: int) -> None:
        step = next((step for step in reversed(self._steps) if request_id in step.before), None)
        if step is not None:
            step.departed.append(request_id)
        else:
            self._free(request_id)

    def _free(self, request_id: int) -> None:
        for block in self._tables.pop(request_id, ()):
            self._owners[block].remove(request_id)
        self._set_back.pop(request_id, None)
        self._tokens.pop(request_id, None)
        self._ends.pop(request_id, None)
        for slot in [slot for slot, owner in self._slots.items() if owner == request_id]:
            del self._slots[slot]

    # ---- what is planned -----------------------------------------------------------------------------------------

    def _planned(self, plan: StepPlan, flight: Flight) -> None:
        """The device is about to get `plan`; which request a slot is for is said by the flight."""
        step = f"step {plan.step_id}"
        requests = {request.request_id: request for request in flight.admitted}
        admitted = list(requests) if not flight.canary else [CANARY]
        if len(plan.admissions) != len(admitted):
            raise Violation(f"{step} admits {admitted}, and fills {len(plan.admissions)} slots")
        for spec, request_id in zip(plan.admissions, admitted, strict=True):
            if spec.slot in self._slots or request_id in self._tables:
                raise Violation(f"{step} gives slot {spec.slot} to {request_id}: {self._slots}, {list(self._tables)}")
            self._slots[spec.slot] = request_id
            self._tables[request_id] = []
            if request_id != CANARY:
                self._tokens[request_id] = requests[request_id].token_ids
        held = [self._slots.get(slot, CANARY) for slot in plan.slots]
        if not flight.canary and held != [request.request_id for request, _, _ in flight.rows]:
            raise Violation(f"{step} computes {held} in their slots, and means others")
        touched = [self._slots[slot] for slot in (*plan.slots, *plan.table_slots)]
        held_step = Held(admitted, {i: len(self._tables[i]) for i in (*admitted, *touched)}, dict(self._ends))
        self._steps.append(held_step)
        rows = {
            self._slots[slot]: (end - count, end)
            for slot, count, end in zip(plan.slots, plan.query_lens, plan.context_lens, strict=True)
        }
        self._ends |= {request_id: end for request_id, (_, end) in rows.items()}
        self._ends |= {request.request_id: request.num_planned for request in flight.fetched}
        copies = dict(zip(plan.copy_to_blocks, plan.copy_from_blocks, strict=True))
        self._world.counts["blocks copied"] += len(copies)
        if len(copies) < len(plan.copy_to_blocks) or not copies.keys().isdisjoint(plan.copy_from_blocks):
            raise Violation(f"{step} copies {copies}, and the order would matter")
        for block, source in copies.items():
            if not self._owners.get(source):
                raise Violation(f"{step} copies block {source}, which is nobody's")
            held_step.copied.append((COPY - block, source))
            self._owners[source].add(COPY - block)
        given: set[tuple[int, int]] = set()
        for slot, index, block in zip(plan.table_slots, plan.table_indexes, plan.table_blocks, strict=True):
            request_id = self._slots[slot]
            self._give(step, request_id, index, block, copies.pop(block, None), rows.get(request_id, (0, 0)))
            given.add((request_id, block))
        if copies:
            raise Violation(f"{step} copies blocks that are in no table: {copies}")
        self._check_writes(step, rows, given)

    def _give(
        self, step: str, request_id: int, index: int, block: int, source: int | None, row: tuple[int, int]
    ) -> None:
        """`block` is entry `index` of a table; what `source` holds is copied to it, where there is one."""
        table = self._tables[request_id]
        owners = self._owners.setdefault(block, set())
        if source is not None and table[index : index + 1] == [source] and not owners:
            self._owners[source].remove(request_id)
            self._steps[-1].replaced.append((request_id, index, source))
            table[index] = block
            owners.add(request_id)
            return
        if source is None and table[index : index + 1] == [block]:
            return
        if index != len(table):
            raise Violation(f"{step} sets entry {index} of request {request_id}, which has {len(table)} blocks")
        if request_id in owners:
            raise Violation(f"{step} gives block {block} to request {request_id}, which has it")
        start, end = row
        if source is not None:
            had = {other: self._steps[-1].ends_before.get(other, 0) for other in self._tables}
            held = [i for i, count in had.items() if count >= start and self._had(i, index, source)]
            if not any(self._tokens[i][:start] == self._tokens[request_id][:start] for i in held):
                raise Violation(f"{step} copies block {source} for request {request_id}, which has other tokens")
        end = min(end, (index + 1) * self._world.shape.block_size)
        for other in (other for other in owners if other > COPY):
            same = self._tables[other][index : index + 1] == [block] and other != CANARY and request_id != CANARY
            same = same and self._ends[other] >= min(start, end)
            if not same or self._tokens[other][:end] != self._tokens[request_id][:end] or source is not None:
                raise Violation(f"{step} gives block {block} to request {request_id}, and request {other} has it")
        table.append(block)
        owners.add(request_id)

    def _had(self, request_id: int, index: int, block: int) -> bool:
        """Whether `block` was entry `index` of this request's table before the step."""
        if (request_id, index, block) in self._steps[-1].replaced:
            return True
        return self._tables[request_id][index : index + 1] == [block] and index < self._steps[-1].before.get(
            request_id, 1 << 30
        )

    def _check_writes(self, step: str, rows: dict[int, tuple[int, int]], given: set[tuple[int, int]]) -> None:
        """What several requests have is written by none of them but beyond all others, or by all alike."""
        size = self._world.shape.block_size
        for request_id, (start, end) in rows.items():
            table = self._tables[request_id]
            if end > len(table) * size:
                raise Violation(f"{step} computes {end} tokens of request {request_id} in {table}")
            for index in range(start // size, -(-end // size)):
                block = table[index]
                for other in self._owners[block] - {request_id}:
                    if other <= COPY:
                        continue
                    if (other, block) not in given and self._steps[-1].ends_before.get(other, 0) > max(
                        start, index * size
                    ):
                        raise Violation(f"{step} writes block {block} of {sorted(self._owners[block])}")
                    its_start, its_end = rows.get(other, (0, 0))
                    last = min(end, its_end, (index + 1) * size)
                    both = max(start, its_start, index * size) < last
                    is_known = last <= len(self._tokens[request_id])
                    if both and not (is_known and self._tokens[other][:last] == self._tokens[request_id][:last]):
                        raise Violation(f"requests {other} and {request_id} write block {block} in one step")

    # ---- what the machines hold ----------------------------------------------------------------------------------

    def _compare(self) -> None:
        scheduler = self._world.scheduler
        planner = scheduler.planner
        departed = [request for flight in scheduler.flights for request in flight.departed]
        known = {request.request_id: request for request in (*scheduler.requests.values(), *departed)}
        for request_id, table in self._tables.items():
            if request_id != CANARY and (request_id not in known or known[request_id].kv.blocks != table):
                raise Violation(f"request {request_id} was given {table}, and is thought to have others")
        held = {i for i, request in known.items() if request.kv.blocks or request.slot >= 0}
        if not held <= self._tables.keys():
            raise Violation(f"requests {sorted(held - self._tables.keys())} hold what nothing has given them")
        slots = {request.slot: i for i, request in known.items() if request.slot >= 0}
        if slots != {slot: i for slot, i in self._slots.items() if i != CANARY}:
            raise Violation(f"slots were given so: {self._slots}, and are thought to be so: {slots}")
        taken = {slot for slot, owner in self._slots.items() if owner != CANARY}  # a canary only borrows one
        if sorted(planner.free_slots) != [s for s in range(self._world.shape.max_num_seqs) if s not in taken]:
            raise Violation(
                f"slots {sorted(taken)} were given, and {sorted(planner.free_slots)} are thought to be free"
            )
        pool = self._world.cache.pool
        available = [*pool._free, *pool._cached, *pool._kept]
        owned = [block for block, owners in self._owners.items() if owners]
        if sorted([*available, *owned]) != list(range(pool.num_blocks)):
            raise Violation(f"blocks {sorted(owned)} were given, and {sorted(available)} are thought to be free")
