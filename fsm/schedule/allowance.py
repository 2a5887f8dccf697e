"""How much one step may hold: as much as was asked for, and less while steps that hold so much fail, or are too slow.

    too much fails    ▶ at once half of what failed (or an eighth)         a fall
    steps go well     ▶ after `PATIENCE` of them, half-way to what failed  a try
    a try fails       ▶ back to what went well, and twice the patience
    a try goes well   ▶ that is what went well, and the patience is as at first
    that fails yet    ▶ half of it, and twice the patience that led there
    nothing between   ▶ a try beyond what failed: twice as much

Where there is room for k (of N) and stays so, it settles at k. Until then at most log2(N) + 3 steps fail. From then on
one try in `PATIENCE_MAX` good steps may fail, and nothing else. When the shortage is over, the next try goes well,
and after `PATIENCE_MAX` + 2 `PATIENCE` log2(N) steps that hold all they may it is N again. Steps that do not need what
they may hold say nothing about more: after `PATIENCE_MAX` of those in a row it is N all the same, and if that proves
wrong, one failed step leads back.
"""

from __future__ import annotations

PATIENCE = 64  # good steps before the first try of more: about a second of decoding
PATIENCE_MAX = 1024  # between two tries that fail: one step in a thousand is lost
SLOW_START = 128  # prompt tokens: at 10 a second, a very slow machine, they take a fifth of the deadline of 60 s
SLOW_SHARE = 4  # a step may take a quarter of its deadline: the next one may be four times as slow


class Allowance:
    """`full` requests or tokens at most, `least` at least. From `start`, if given, it doubles with each good step."""

    def __init__(self, full: int, least: int = 1, start: int | None = None) -> None:
        self.full = full
        self.least = min(least, full)
        self.limit = full if start is None else max(min(start, full), self.least)
        self.is_short = False  # steps failed, or were slow, and more has not gone well since
        self._safe = self.limit  # what has gone well: where a try that fails leads back to
        self._failed = full + 1  # the least that failed lately
        self._patience_first = PATIENCE if start is None else 1
        self._patience = self._patience_first
        self._tried_after = 0  # good steps, the most that led to a try that went well, since the last fall
        self._num_good = 0  # steps since the limit was set
        self._before: tuple[int, int, int, int, int, bool] | None = None  # all this, before the last falls

    def is_try(self, size: int) -> bool:
        """Whether a step of `size` holds more than what is known to go well."""
        return size > self._safe

    def went_well(self, size: int, most: int | None = None) -> None:
        """A good step held so much; there is a reason, such as time, against more than `most`."""
        if size > self._safe:
            self._safe = size
            self._tried_after = max(self._tried_after, self._patience)
            self._patience = self._patience_first
        self._num_good += 1
        if self._num_good >= PATIENCE:
            self._before = None
        if self.limit == self.full:
            if self._num_good >= PATIENCE:
                self.is_short = False
            if self._num_good >= PATIENCE_MAX:
                self._forget()
        elif 2 * size <= self.limit:  # it did not need so much
            if self.is_short and self._num_good >= PATIENCE_MAX:
                self._grow(self.full, most)
        elif self._num_good >= self._patience:
            self._grow(self._next(), most)

    def was_too_much(self, size: int, divisor: int = 2) -> bool:
        """A step that held so much failed, or was too slow; False if it cannot be made less."""
        if size > self.limit:  # it was planned before the limit was set
            return True
        if size <= self.least:
            return False
        self._before = self._before or self._all()
        self.is_short = True
        self._patience_first = PATIENCE
        if size > self._safe:
            self._patience = min(2 * max(self._patience, PATIENCE // 2), PATIENCE_MAX)
            self._set(self._safe)
        else:
            self._patience = min(max(PATIENCE, 2 * self._tried_after), PATIENCE_MAX)
            self._tried_after = 0
            self._safe = max(size // divisor, self.least)
            self._set(self._safe)
        self._failed = size
        return True

    def excuse(self) -> None:
        """What was too much lately (with fewer than `PATIENCE` good steps since) failed for a reason of its own."""
        if self._before is not None:
            self.limit, self._safe, self._failed, self._patience, self._tried_after, self.is_short = self._before
            self._before = None

    def _all(self) -> tuple[int, int, int, int, int, bool]:
        return self.limit, self._safe, self._failed, self._patience, self._tried_after, self.is_short

    def _next(self) -> int:
        if self.is_short and self._failed - self.limit > 1:
            return (self.limit + self._failed) // 2
        return 2 * self.limit

    def _grow(self, wanted: int, most: int | None) -> None:
        limit = min(wanted, self.full, self.full if most is None else most)
        if limit <= self.limit:
            return
        if limit >= self._failed:
            self._failed = self.full + 1
        self._set(limit)

    def _set(self, limit: int) -> None:
        self.limit = limit
        self._num_good = 0

    def _forget(self) -> None:
        self._safe = self.full
        self._failed = self.full + 1
        self._patience = self._patience_first
        self._tried_after = 0


class Sizes:
    """How many requests and prompt tokens a step may hold; a step that fails, or is slow, says which was too many.

    A step that takes more than a quarter of its deadline was too slow: the next one holds half of what made it so.
    Nothing grows to more than would take an eighth, by the time that a step took with half as much. Prompts begin with
    `SLOW_START` tokens, so that a device of which nothing is known yet meets no deadline.
    """

    def __init__(self, num_requests: int, num_prompt_tokens: int, block_size: int, step_timeout_s: float) -> None:
        self.requests = Allowance(num_requests)
        self.prompt_tokens = Allowance(num_prompt_tokens, block_size, SLOW_START)
        self._slow_s = step_timeout_s / SLOW_SHARE
        self._most_tokens = num_prompt_tokens  # that would take half of that time
        self._most_requests = num_requests

    @property
    def is_short(self) -> bool:
        """True while steps hold less than was asked for, because larger ones failed."""
        return self.requests.is_short or self.prompt_tokens.is_short

    def went_well(self, num_requests: int, num_tokens: int, took_s: float) -> bool:
        """A good step held so many; False if it was too slow."""
        requests, tokens = self.requests, self.prompt_tokens
        if 2 * num_tokens > tokens.limit:
            self._most_tokens = int(num_tokens * self._slow_s / (2 * took_s)) if took_s else tokens.full
        elif 2 * num_requests > requests.limit:
            self._most_requests = int(num_requests * self._slow_s / (2 * took_s)) if took_s else requests.full
        if took_s > self._slow_s and self.was_too_much(num_requests, num_tokens):
            return False
        requests.went_well(num_requests, self._most_requests)
        tokens.went_well(num_tokens, self._most_tokens)
        return True

    def excuse(self) -> None:
        """The steps that failed lately did so for the sake of one request."""
        self.requests.excuse()
        self.prompt_tokens.excuse()

    def is_try(self, num_requests: int, num_tokens: int) -> bool:
        """Whether a step held more of one than is known to go well."""
        return self.requests.is_try(num_requests) or self.prompt_tokens.is_try(num_tokens)

    def was_too_much(self, num_requests: int, num_tokens: int, divisor: int = 2) -> bool:
        """A step held so many, and failed or was slow; False if none can be made less."""
        are_tokens = num_tokens > self.prompt_tokens.least and num_tokens >= num_requests
        if self.requests.is_try(num_requests) is not self.prompt_tokens.is_try(num_tokens):
            are_tokens = self.prompt_tokens.is_try(num_tokens)
        if are_tokens:
            return self.prompt_tokens.was_too_much(num_tokens, divisor)
        return self.requests.was_too_much(num_requests, divisor)
