"""Who has which block and which slot, by an account of its own: from plans, outcomes and ends, as they pass the links.

    a slot         is given by an admission, to one request at a time
    a block        is given by a table entry; it has one owner, or several whose tokens are equal up to its end
    a written one  has one writer, and no other owner had it before the step
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
from novainfer.fsm.simulation.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.simulation.world import World

CANARY = -1  # whose blocks and slot belong to no request
MOVING = (MakeBatch, CancelRequest, WorkerLost, KeepOver, Configure)


class Held(msgspec.Struct):
    """A step on the device."""

    admitted: list[int]  # requests
    before: dict[int, int]  # blocks that each request in it had before it
    departed: list[int] = []  # have ended, and return with the step


class Ledger:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._slots: dict[int, int] = {}  # whose it is
        self._tables: dict[int, list[int]] = {}  # blocks, by request
        self._owners: dict[int, set[int]] = {}  # requests, by block
        self._tokens: dict[int, list[int]] = {}  # of requests that have blocks: a list that only grows
        self._steps: list[Held] = []  # oldest first
        self._preempted: list[int] = []  # while the event was handled

    # ---- what happens --------------------------------------------------------------------------------------------

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
            for request_id, num_blocks in step.before.items():
                self._cut(request_id, num_blocks)
        gone = [request_id for step in self._steps for request_id in (*step.departed, *step.admitted)]
        for request_id in (*gone, CANARY):
            self._free(request_id)
        self._steps.clear()

    def _returned(self) -> None:
        """The oldest step is no longer on the device, and went well."""
        assert self._world.audit is not None
        for kept in self._world.audit.verified.kept:
            self._cut(kept.request.request_id, -(-kept.count // self._world.shape.block_size))
        for request_id in (*self._steps.pop(0).departed, CANARY):
            self._free(request_id)

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
        self._tokens.pop(request_id, None)
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
        self._steps.append(Held(admitted, {i: len(self._tables[i]) for i in (*admitted, *touched)}))
        given: set[int] = set()
        for slot, index, block in zip(plan.table_slots, plan.table_indexes, plan.table_blocks, strict=True):
            self._give(step, self._slots[slot], index, block)
            given.add(block)
        self._check_writes(plan, given)

    def _give(self, step: str, request_id: int, index: int, block: int) -> None:
        table = self._tables[request_id]
        owners = self._owners.setdefault(block, set())
        if index != len(table):
            raise Violation(f"{step} sets entry {index} of request {request_id}, which has {len(table)} blocks")
        if request_id in owners:
            raise Violation(f"{step} gives block {block} to request {request_id}, which has it")
        end = (index + 1) * self._world.shape.block_size
        for other in owners:
            same = self._tables[other][index : index + 1] == [block] and other != CANARY and request_id != CANARY
            if not same or self._tokens[other][:end] != self._tokens[request_id][:end]:
                raise Violation(f"{step} gives block {block} to request {request_id}, and request {other} has it")
        table.append(block)
        owners.add(request_id)

    def _check_writes(self, plan: StepPlan, given: set[int]) -> None:
        """Each block that is written has one writer, and whoever else has it got it in this step."""
        size = self._world.shape.block_size
        writers: dict[int, int] = {}
        for slot, count, end in zip(plan.slots, plan.query_lens, plan.context_lens, strict=True):
            request_id = self._slots[slot]
            table = self._tables[request_id]
            if end > len(table) * size:
                raise Violation(f"step {plan.step_id} computes {end} tokens of request {request_id} in {table}")
            for block in table[(end - count) // size : -(-end // size)]:
                if block in writers:
                    raise Violation(f"requests {writers[block]} and {request_id} write block {block} in one step")
                writers[block] = request_id
                if len(self._owners[block]) > 1 and block not in given:
                    raise Violation(f"step {plan.step_id} writes block {block} of {sorted(self._owners[block])}")

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
        available = [*pool._free, *pool._cached]
        owned = [block for block, owners in self._owners.items() if owners]
        if sorted([*available, *owned]) != list(range(pool.num_blocks)):
            raise Violation(f"blocks {sorted(owned)} were given, and {sorted(available)} are thought to be free")
