"""When a client that is refused is told to come again, by an account of its own: from who comes to the queue and goes.

The words are those of `fsm/client/drain.py` and docs/server.md: the seconds until all who wait now will have left the
queue, at the rate at which they leave now.

    always              between 0.1 and 60 s
    nothing has left    in the last minute: what the device's costs make of all that wait; 1 s where it has told none
    one busy time       no less is said than those that left since the queue began to fill took, for as many as wait
    nothing leaves      the longer that lasts, beyond the longest time between two that left, the more is said
    steady work         (one seed in some: equal requests that come faster than they are computed, in waves, in half of
                        these after some that find nothing before them) those who wait have left when it was said
                        that they would, give or take a third and one burst
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from novainfer.fsm.client.drain import DrainRate
from novainfer.fsm.messages.events import Departed
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.world.shape import Shape

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World

LEAST_S, MOST_S, DEFAULT_S, WINDOW_S = 0.1, 60.0, 1.0, 60.0
FACTOR = 1.35
FEW = 12  # departures, before which a rate is told from too little
FILLED = (
    4  # times the slots, as well: the first that leave find free slots, and tell nothing of how fast these come free
)
FEW_BEFORE = 24  # clients that come one by one, before so many come that they have to wait
TOKENS = range(1, 200)


class Steady:
    """A world of steady work: what it draws."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed * 1_000_003 + 4)  # of its own: every other draw stays what it was
        self.step_s = 10 ** rng.uniform(-1.5, -0.3)
        self._slots = rng.choice([2, 4, 8])
        self._num_tokens = rng.choice([4, 8])
        self._num_choices = 2 if self._slots > 2 and rng.random() < 0.5 else 1
        self._queue = self._slots * 4
        self._overflow = self._queue * rng.choice([0, 2])
        self.burst = 4 * (self._queue + self._overflow)
        self.num_clients = min(self.burst * 3, 240)
        self._gap_s = self._num_tokens * self.step_s / self._slots / 2  # twice as many come as can be computed
        self.burst_gap_s = (
            self._gap_s * (self._queue + self._overflow) * rng.choice([3, 10])
        )  # it is empty between two waves
        self._num_before = (
            FEW_BEFORE if rng.random() < 0.5 else 0
        )  # come one by one before each wave: each runs at once
        self.burst += self._num_before
        self.num_clients += self._num_before

    def gap_s(self, num_arrived: int, draw: float) -> float:
        """From one client of a wave, or of those before it, to the next; `draw` is between 0 and 1."""
        if num_arrived % self.burst <= self._num_before:
            return 2 * (self._num_tokens + 2) * self.step_s
        return self._gap_s * 2 * draw

    def shape(self, shape: Shape) -> Shape:
        """Room for all that run; the queue is what is short."""
        return msgspec.structs.replace(
            shape,
            num_blocks=self._slots * 16,
            block_size=4,
            max_num_seqs=self._slots,
            max_num_batched_tokens=128,
            prefill_chunk_tokens=64,
            max_model_len=40,
            max_num_queued_reqs=self._queue,
            max_num_queued_tokens=1 << 20,
            max_num_overflow_reqs=self._overflow,
            enable_prefix_caching=False,
            stall_high=64,
            num_host_blocks=0,
            processes=False,
            warm_spare=False,
        )

    def prompt(self) -> list[int]:
        """All are alike."""
        return [self._rng.choice(TOKENS) for _ in range(8)]

    def params(self) -> SamplingParams:
        """All ask for as much, and would wait."""
        wait_s = 1e4 if self._overflow else None
        return SamplingParams(
            n=self._num_choices, max_tokens=self._num_tokens, ignore_eos=True, temperature=0.0, max_queue_s=wait_s
        )


class Promise(msgspec.Struct):
    """What a client was told, and when; and the streams that waited then, as far as they still wait."""

    at_s: float
    said_s: float
    burst_s: float
    waiting: set[int]


class Retry:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rate = DrainRate()
        self._left: deque[tuple[float, int]] = deque()  # when choices left the queue, and how many
        self._last_s = 0.0  # when any left, or the queue began to fill
        self._longest: deque[tuple[float, float]] = (
            deque()
        )  # when a time between two that left was over, how long it was
        self._filled_s, self._num_since = 0.0, 0  # since when it has not been empty, and how many left since then
        self._gone: set[int] = set()  # streams that have left it; the gate may have to hear of them yet
        self._promises: list[Promise] = []
        self.is_steady = False

    # ---- what happens --------------------------------------------------------------------------------------------

    def arrives(self) -> None:
        """A client is about to ask the gate."""
        gate, now_s = self._world.gate, self._world.now_s
        self._rate.arrives(gate, now_s)
        if not set(gate.queued) - self._gone:
            self._last_s = self._filled_s = now_s
            self._num_since = 0

    def departs(self, event: Departed) -> None:
        """The engine is telling the gate who has left the queue."""
        world = self._world
        self._rate.departs(world.gate, event, world.now_s)
        gone = (set(event.stream_ids) & set(world.gate.queued)) - self._gone
        if not gone:
            return
        self._gone |= gone
        num_gone = sum(world.clients[i].arrive.params.n for i in gone)
        self._num_since += num_gone
        self._left.append((world.now_s, num_gone))
        self._longest.append((world.now_s, world.now_s - self._last_s))
        self._last_s = world.now_s
        for promise in self._promises:
            promise.waiting -= gone
            if not promise.waiting:
                self._check(promise)
        self._promises = [promise for promise in self._promises if promise.waiting]

    def refused(self) -> None:
        """A client was refused, because the queue is full: it is told when to come again."""
        world, now_s = self._world, self._world.now_s
        gate = world.gate
        said_s = self._rate.wait_s(gate, now_s, world.scheduler.wait_s)
        while self._left and self._left[0][0] < now_s - WINDOW_S:
            self._left.popleft()
            self._longest.popleft()
        num_left = sum(num for _, num in self._left)
        num_waiting = gate.num_queued + gate.num_overflow
        if not LEAST_S <= said_s <= MOST_S:
            raise Violation(f"a client is told to come again after {said_s} s")
        if not num_left or self._rate.per_s(now_s) is None:
            self._check_expected(said_s)
        else:
            longest_s = max(length_s for _, length_s in self._longest)
            idle_s = now_s - self._last_s - longest_s
            if said_s < min(num_waiting * idle_s / num_left, MOST_S) / 1.001:
                raise Violation(
                    f"{num_waiting} wait, {num_left} have left, none for {idle_s:.1f} s longer than ever, and a client "
                    f"is told to come after {said_s:.2f} s"
                )
            if num_left == self._num_since:
                in_s = self._left[-1][0] - self._filled_s
                if said_s < min(num_waiting * in_s / num_left, MOST_S) / 1.001:
                    raise Violation(
                        f"{num_left} left in {in_s:.2f} s, {num_waiting} wait: told to come after {said_s:.2f} s"
                    )
        world.counts["retries told"] += 1
        if self.is_steady and min(num_left, self._num_since) >= max(FEW, FILLED * world.shape.max_num_seqs):
            burst_s = max(length_s for _, length_s in self._longest)
            self._promises.append(Promise(now_s, said_s, burst_s, {*gate.queued, *gate.overflow}))

    def _check_expected(self, said_s: float) -> None:
        """No rate is known: so long take the prompts that wait, and the answers that have to end first."""
        world, gate = self._world, self._world.gate
        scheduler, costs_ms = world.scheduler, world.scheduler.costs.of
        wanted_s = DEFAULT_S
        if scheduler.costs.is_measured:
            chunk, num_slots = world.shape.prefill_chunk_tokens, world.shape.max_num_seqs
            num_tokens = gate.num_queued_tokens + sum(world.clients[i].arrive.num_tokens for i in gate.overflow)
            num_behind = gate.num_queued + gate.num_overflow + len(scheduler.planner.running) - num_slots
            steps = max(num_behind, 0) / num_slots * scheduler.answer_tokens
            wanted_s = (num_tokens / chunk * costs_ms(chunk) + steps * costs_ms(num_slots)) / 1e3
            wanted_s = min(max(wanted_s, LEAST_S), MOST_S)
            world.counts["retries expected"] += 1
        if not wanted_s / 1.001 <= said_s <= wanted_s * 1.001:
            raise Violation(f"no rate is known, and a client is told to come after {said_s:.3f} s, not {wanted_s:.3f}")

    def _check(self, promise: Promise) -> None:
        """All who waited have left."""
        took_s = self._world.now_s - promise.at_s
        least_s, most_s = took_s / FACTOR - promise.burst_s, took_s * FACTOR + promise.burst_s
        if promise.said_s < MOST_S and not least_s <= promise.said_s <= max(most_s, LEAST_S):
            raise Violation(
                f"a client was told that all would have left in {promise.said_s:.2f} s: it took {took_s:.2f} s"
            )
        self._world.counts["retries checked"] += 1
