"""What steps cost by their tokens: one table, measured when the device was warm, for all that is decided by time.

    speculation    how many guesses a step verifies: as many as bring more tokens a second (`speculation`)
    chunking       how many prompt tokens a step holds beside requests that decode, and so wait for it (`Chunks`)
    admission      when a client that is refused should come again, while nothing has left the queue (`wait_s`)

The table comes with the event that a worker is ready, so a recording holds it, and a replay decides as it was decided.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

CORRECT = 0.1  # of the difference between what a step took and what it was thought to, by which that is corrected
OTHERS = 0.75  # of that for steps of other sizes

# Beside requests that decode, a step holds as few prompt tokens as cost the prompts no more than this share of their
# speed, by a table that other programs may have disturbed: on a CPU 320 to 384 of 512, at a true loss of 1 to 3 %
# (docs/decisions/2026-11-24-cpu.md).
LOSS_MAX = 0.025
CHUNK_BLOCKS = 4  # such chunks are multiples of so many blocks: 64 tokens of the usual blocks of 16
LARGER = 4  # sizes count as the larger ones down to such a part of the largest: 128, 64 and 32 are three tries at least
UNNOTICED_MS = 25.0  # 40 tokens a second: nobody who reads sees a shorter step, so none is made shorter than that
PACE_WEIGHT = 0.25  # of the latest step with a prompt in what those take, as a multiple of what the table says
PACE_MOST = 4.0  # of that multiple, as which a step counts that took longer

ANSWER_TOKENS = 128.0  # what is thought of an answer's length before any has ended
ANSWER_WEIGHT = 1 / 32  # of the latest answer in that


class StepCosts:
    """Milliseconds of a step by its tokens: straight lines through what was measured, corrected by what steps take."""

    def __init__(self, measured: Sequence[tuple[int, float]] = ()) -> None:
        """`measured` are (tokens, milliseconds), by tokens; nothing of it: a step costs the same whatever it holds."""
        self._tokens = [tokens for tokens, _ in measured]
        self._ms = [ms for _, ms in measured]
        for place in reversed(range(len(measured) - 1)):  # fewer tokens never take more time: that was the machine
            self._ms[place] = min(self._ms[place], self._ms[place + 1])

    @property
    def is_measured(self) -> bool:
        """Whether it is of milliseconds at all."""
        return bool(self._tokens)

    def of(self, num_tokens: int) -> float:
        """What a step of so many tokens takes."""
        tokens, ms = self._tokens, self._ms
        if not tokens:
            return 1.0
        at = self._place(num_tokens)
        if at == 0:
            return ms[0]
        slope = (ms[at] - ms[at - 1]) / (tokens[at] - tokens[at - 1])
        return ms[at - 1] + slope * (num_tokens - tokens[at - 1])

    def line(self) -> tuple[float, float]:
        """Milliseconds of the first token, and of each more by the flattest line from it to one of the larger sizes.

        Another program only ever makes a try slower, and so its line steeper: the flattest is of the size that was
        disturbed least.
        """
        first, largest = self._tokens[0], self._tokens[-1]
        points = [(n, ms) for n, ms in zip(self._tokens, self._ms, strict=True) if n > first and n * LARGER >= largest]
        return self._ms[0], min(((ms - self._ms[0]) / (n - first) for n, ms in points), default=0.0)

    def took(self, num_tokens: int, ms: float) -> None:
        """A step of so many tokens took so long."""
        if not self._tokens or num_tokens > self._tokens[-1] or ms <= 0:
            return
        at = self._place(num_tokens)
        share = min(CORRECT * (ms / self.of(num_tokens) - 1), 1.0)
        near = {at, at if self._tokens[at] == num_tokens else max(at - 1, 0)}
        here, elsewhere = 1 + share, 1 + OTHERS * share  # the machine may be slower or faster than it was
        found = [now * (here if place in near else elsewhere) for place, now in enumerate(self._ms)]
        self._ms = list(accumulate(found, max))  # more tokens never take less time

    def _place(self, num_tokens: int) -> int:
        """Which of the measured sizes is the first that is no smaller; the last one for all beyond."""
        return min(bisect_left(self._tokens, num_tokens), len(self._tokens) - 1)


class Chunks:
    """How many prompt tokens a step may hold beside requests that decode: they have no token before it ends.

    Without a target, as few as lose the prompts next to nothing (`LOSS_MAX`), by the table as it was measured. With
    one, as many as keep the step within so many milliseconds, and a block at least; then the table counts by the
    multiple of it that steps with prompts take lately: some go over long contexts, or are computed in another mode.
    """

    def __init__(self, most: int, block_size: int, target_ms: float | None = None) -> None:
        """`most` prompt tokens are in a step in which no request decodes."""
        self._most = most
        self._block_size = block_size
        self._target_ms = target_ms
        self._costs = StepCosts()
        self._beside = most  # without a target
        self._pace = 1.0

    def measured(self, measured: Sequence[tuple[int, float]]) -> None:
        """A worker is warm, and these are the costs of its steps; nothing when it has measured none."""
        self._costs, self._pace = StepCosts(measured), 1.0
        self._beside = self._cheapest() if measured else self._most

    def beside(self, num_decodes: int) -> int:
        """Prompt tokens for a step in which so many requests decode."""
        if not num_decodes or not self._costs.is_measured:
            return self._most
        if self._target_ms is None:
            return self._beside
        left, size = self._most // self._block_size, self._block_size
        within = bisect_right(
            range(1, left + 1), self._target_ms, key=lambda n: self._pace * self._costs.of(num_decodes + n * size)
        )
        return self._most if within == left else min(max(within, 1) * size, self._most)

    def room_for_drafts(self, num_tokens: int, most: int) -> int:
        """How many tokens more, of `most`, a target leaves to a step of so many, prompts among them."""
        if self._target_ms is None or not self._costs.is_measured:
            return most
        return bisect_right(
            range(1, most + 1), self._target_ms, key=lambda n: self._pace * self._costs.of(num_tokens + n)
        )

    def took(self, num_tokens: int, ms: float) -> None:
        """A step with prompts, of so many tokens in all, took so long."""
        if self._target_ms is not None and self._costs.is_measured and ms > 0:
            found = min(ms / self._costs.of(num_tokens), PACE_MOST * self._pace)
            self._pace += PACE_WEIGHT * (found - self._pace)

    def _cheapest(self) -> int:
        """The fewest tokens that cost little more each than in a whole chunk, or that nobody waits for.

        What a step costs beside its tokens is thought to be what its first one costs: more than it is, mostly.
        """
        most, grid = self._most, CHUNK_BLOCKS * self._block_size
        first_ms, each_ms = self._costs.line()
        enough_ms = (1 + LOSS_MAX) * (first_ms / most + each_ms)  # a token
        for num_tokens in range(grid, most, grid):
            is_noticed = self._costs.of(num_tokens + grid) > UNNOTICED_MS
            if is_noticed and first_ms / num_tokens + each_ms <= enough_ms:
                return num_tokens
        return most


def wait_s(
    costs: StepCosts,
    *,
    num_waiting: int,
    num_prompt_tokens: int,
    num_running: int,
    num_slots: int,
    answer_tokens: float,
    chunk: int,
) -> float:
    """Seconds until all `num_waiting` requests run, which bring so many prompt tokens, beside those that run already.

    Their prompts are computed, in chunks; and those for whom no slot is free wait for as many answers to end, which
    come one after the other: `num_slots` in the time of `answer_tokens` steps.
    """
    prompts_ms = num_prompt_tokens / chunk * costs.of(chunk)
    num_behind = max(num_waiting + num_running - num_slots, 0)
    answers_ms = num_behind / num_slots * answer_tokens * costs.of(num_slots)
    return (prompts_ms + answers_ms) / 1e3
