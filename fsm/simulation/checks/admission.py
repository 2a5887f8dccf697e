"""What must hold at the gate, and of slow readers, after every event: worked out from what the clients asked for.

credits      one for each choice and each prompt token of who was let in and has not departed; within the limits
overflow     within its own limits, empty unless the gate is open; who is first does not fit, or would be in
order        nobody is let in before one that waits
cancels      end who waits for room there and then, and reach the engine for all others
timeouts     end who has not run, and nobody else
stalls       every one has a timer
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from novainfer.fsm.client.gate import GateState
from novainfer.fsm.client.stream import StreamState
from novainfer.fsm.core.machine import After, Effect, Send
from novainfer.fsm.messages.events import (
    Arrive,
    Cancel,
    CancelAll,
    Departed,
    Output,
    QueueOver,
    Read,
    Settled,
    StallOver,
)
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World

MAILBOXES = ("gate", "engine", "scheduler", "worker")
MAILBOX_FEW = 32  # messages of one sender, which no mailbox is too small for
MAILBOX_SPARE = 32  # that belong to no stream, or come twice
CHOICES_MAX = 3  # of one stream, as they are drawn
PARKED_PER_SLOT = 2


def check_gate(world: World, before: AbstractSet[int], event: Any, effects: Sequence[Effect]) -> None:
    """The gate has handled `event`; the streams `before` held credits."""
    gate, shape = world.gate, world.shape
    queued, overflow = gate._queue.held, gate.overflow
    num_queued, num_overflow = _choices(world, queued), _choices(world, overflow)
    num_tokens = sum(tokens for _, tokens in queued.values())
    if (gate.num_queued, gate.num_queued_tokens, gate.num_overflow) != (num_queued, num_tokens, num_overflow):
        raise Violation(f"the gate counts {gate.num_queued} choices queued, and {gate.num_overflow} that wait for room")
    if num_overflow > shape.max_num_overflow_reqs and len(overflow) > 1:
        raise Violation(f"{num_overflow} choices are on the overflow list")
    if overflow and gate.state is not GateState.OPEN:
        raise Violation(f"the gate is {gate.state}, and {overflow} wait for room")
    sent = [effect for effect in effects if type(effect) is Send]
    let_in = [effect.event.stream_id for effect in sent if isinstance(effect.event, Arrive)]
    departed = event.stream_ids if isinstance(event, Departed) else before if gate.state is GateState.CLOSED else ()
    if queued.keys() != (before - set(departed)) | set(let_in):
        raise Violation(f"{event}: {sorted(before)} held credits, and {sorted(queued)} do")
    is_within = num_queued <= shape.max_num_queued_reqs and num_tokens <= shape.max_num_queued_tokens
    if let_in and not is_within and len(queued) > 1:
        raise Violation(f"{let_in} were let in, and {num_queued} choices of {num_tokens} tokens are queued")
    if let_in and overflow and let_in[-1] > overflow[0]:
        raise Violation(f"{let_in} were let in before {overflow}")
    if overflow and _has_room(world, overflow[0], num_queued, num_tokens):
        raise Violation(f"stream {overflow[0]} waits for room, and there is room")
    if isinstance(event, Settled) and event.stream_id in queued and queued[event.stream_id][1] != event.num_tokens:
        raise Violation(f"{event}, and the gate still counts {queued[event.stream_id][1]} tokens")
    _check_ends(world, event, sent)


def check_mailbox(world: World, to: str, is_urgent: bool) -> None:
    """The lane of a mailbox holds no more than its actor has room for: what admission lets in bounds it."""
    depth = sum(len(queue) for (_, other, lane), queue in world.links.items() if (other, lane) == (to, is_urgent))
    num_requests = world.shape.max_num_queued_reqs + (2 + PARKED_PER_SLOT) * world.shape.max_num_seqs
    if to in MAILBOXES and depth > MAILBOX_SPARE + 2 * CHOICES_MAX * num_requests:
        raise Violation(f"the mailbox of the {to} is full: {depth} messages")


def _choices(world: World, stream_ids: Collection[int]) -> int:
    return sum(world.clients[stream_id].arrive.params.n for stream_id in stream_ids)


def _has_room(world: World, stream_id: int, num_queued: int, num_tokens: int) -> bool:
    shape, arrive = world.shape, world.clients[stream_id].arrive
    if num_queued == 0:
        return True
    is_one_too_many = num_queued + arrive.params.n > shape.max_num_queued_reqs
    return not is_one_too_many and num_tokens + arrive.num_tokens <= shape.max_num_queued_tokens


def _check_ends(world: World, event: Any, sent: Sequence[Send]) -> None:
    """Cancels and timeouts reach whom they concern."""
    gate = world.gate
    if gate.state not in (GateState.OPEN, GateState.DRAINING):
        return
    to_engine = [effect.event for effect in sent if effect.to == "engine" and isinstance(effect.event, Cancel)]
    passed_on = [effect.event for effect in sent if isinstance(effect.event, Cancel | CancelAll)]
    if any(cancel.arrived != gate._num_arrived for cancel in passed_on):
        raise Violation(f"{passed_on} were passed on after {gate._num_arrived} had been let in")
    ended = [output.stream_id for effect in sent if effect.to == "streams" for output in effect.event.outputs]
    if isinstance(event, Cancel):
        told = [cancel.stream_id for cancel in to_engine] + ended
        if event.stream_id in gate.overflow or told != [event.stream_id]:
            raise Violation(f"{event} concerns nobody else: {told} were told")
    elif isinstance(event, QueueOver):
        told = [cancel.stream_id for cancel in to_engine] + ended
        if event.stream_id in gate.overflow or told != [event.stream_id]:
            raise Violation(f"{event}: told the engine {to_engine}, ended {ended}")
    elif isinstance(event, CancelAll) and (gate.overflow or not passed_on):
        raise Violation(f"all were cancelled, and {gate.overflow} wait for room; the engine was told {passed_on}")


def check_stall(before: StreamState, after: StreamState, event: Any, effects: Sequence[Effect]) -> None:
    """A stream has handled `event`: a stall begins, and goes on after a read, with a timer."""
    if after is not StreamState.STALLED or not isinstance(event, Output | Read):
        return
    if before is StreamState.STALLED and isinstance(event, Output):
        return
    if not any(type(effect) is After and isinstance(effect.event, StallOver) for effect in effects):
        raise Violation("a stream stalls, and nobody will look whether it still does")
