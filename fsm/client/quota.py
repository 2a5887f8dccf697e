"""What a key may use: requests and tokens a minute, tokens a day, and choices at a time; each call is told the time.

    admit ──every limit has room──▶ held ──settle, with what was really used──▶ gone
      └────one has none──▶ Refused, with how long to wait

A request reserves an estimate when it is let in. At its end, whatever that was, what it used takes the place of the
estimate: less comes back, more is a debt that later requests wait for. So nothing that ends leaves anything behind.

Time is in nanoseconds since 1970, and never goes back. A bucket holds what a minute brings, and counts in parts of
which each nanosecond brings a whole number: nothing is rounded, and a request that waits as long as it was told is let
in.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

MINUTE_NS = 60_000_000_000
DAY_NS = 24 * 60 * MINUTE_NS  # days are UTC's


class Limit(StrEnum):
    """What there may be only so much of."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    DAY = "day"
    CONCURRENT = "concurrent"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one key may use; None is no limit. `max_concurrent` are choices at a time, as clients have them live."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    tokens_per_day: int | None = None
    max_concurrent: int | None = None


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Which limit has no room: `most` there may be, `used` there is, `wanted` was asked for.

    After `wait_ns` there is room, if nothing else is let in until then; None: as soon as enough of what is held ends.
    """

    limit: Limit
    most: int
    used: int
    wanted: int
    wait_ns: int | None


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of `most` now, and how long until it is whole again if nothing is used."""

    most: int
    remaining: int
    reset_ns: int


class _Hold(msgspec.Struct, frozen=True, kw_only=True):
    """What one request has reserved, in each limit that there was; `day` is the one in which it was let in."""

    num_choices: int
    num_tokens: int
    num_day_tokens: int
    day: int


class Account:
    """What one key has used, and what its requests have reserved."""

    def __init__(self, limits: Limits, now_ns: int) -> None:
        self.limits = limits
        self.num_live = 0
        self._requests = _Bucket.of(limits.requests_per_min, now_ns)
        self._tokens = _Bucket.of(limits.tokens_per_min, now_ns)
        self._day = now_ns // DAY_NS
        self._day_used = self._day_reserved = 0
        self._held: dict[int, _Hold] = {}
        self._num_let_in = 0

    def admit(self, num_choices: int, num_tokens: int, now_ns: int) -> int | Refused:
        """Let one request in, which reserves so many tokens; returns what `settle` wants.

        A limit that is whole lets any request in: one that asks for more than there may ever be waits until then.
        """
        self._turn_day(now_ns)
        refused = [found for found in self._refusals(num_choices, num_tokens, now_ns) if found is not None]
        if refused:
            return max(refused, key=lambda found: found.wait_ns or 0)
        if self._requests is not None:
            self._requests.take(1)
        tokens, budget = self.limits.tokens_per_min, self.limits.tokens_per_day
        hold = _Hold(
            num_choices=num_choices,
            num_tokens=0 if tokens is None else min(num_tokens, tokens),
            num_day_tokens=0 if budget is None else min(num_tokens, budget),
            day=self._day,
        )
        if self._tokens is not None:
            self._tokens.take(hold.num_tokens)
        self._day_reserved += hold.num_day_tokens
        self.num_live += num_choices
        hold_id = self._num_let_in
        self._num_let_in += 1
        self._held[hold_id] = hold
        return hold_id

    def settle(self, hold_id: int, num_tokens: int, now_ns: int, *, has_begun: bool = True) -> None:
        """A request has ended, and has used so many tokens; they count for the day in which it was let in.

        One that has not begun, because something else refused it, is no request of its minute.
        """
        hold = self._held.pop(hold_id)
        self._turn_day(now_ns)
        self.num_live -= hold.num_choices
        if self._requests is not None and not has_begun:
            self._requests.fill(now_ns)
            self._requests.take(-1)
        if self._tokens is not None:
            self._tokens.fill(now_ns)
            self._tokens.take(num_tokens - hold.num_tokens)
        if hold.day == self._day:
            self._day_reserved -= hold.num_day_tokens
            self._day_used += num_tokens

    def spend(self, num_tokens: int, now_ns: int) -> None:
        """A request has used so many tokens of the day that was let in by a server before this one."""
        self._turn_day(now_ns)
        self._day_used += num_tokens

    def used_today(self, now_ns: int) -> int:
        """Tokens of requests that have ended."""
        self._turn_day(now_ns)
        return self._day_used

    def update(self, limits: Limits, now_ns: int) -> None:
        """Other limits from now on: a bucket stays as full as it is, in its share; what is held stays held."""
        self._requests = _Bucket.resized(self._requests, limits.requests_per_min, now_ns)
        self._tokens = _Bucket.resized(self._tokens, limits.tokens_per_min, now_ns)
        self.limits = limits

    def requests(self, now_ns: int) -> Room | None:
        """What is left of the requests a minute, where they are limited."""
        return None if self._requests is None else self._requests.room(now_ns)

    def tokens(self, now_ns: int) -> Room | None:
        """What is left of the tokens a minute, where they are limited."""
        return None if self._tokens is None else self._tokens.room(now_ns)

    def tokens_today(self, now_ns: int) -> Room | None:
        """What is left of the tokens of this day, where they are limited."""
        self._turn_day(now_ns)
        if (most := self.limits.tokens_per_day) is None:
            return None
        gone = self._day_used + self._day_reserved
        return Room(most=most, remaining=max(most - gone, 0), reset_ns=DAY_NS - now_ns % DAY_NS if gone else 0)

    def _refusals(self, num_choices: int, num_tokens: int, now_ns: int) -> list[Refused | None]:
        return [
            self._refuse_concurrent(num_choices),
            self._refuse_day(num_tokens, now_ns),
            None if self._requests is None else self._requests.refuse(Limit.REQUESTS, 1, now_ns),
            None if self._tokens is None else self._tokens.refuse(Limit.TOKENS, num_tokens, now_ns),
        ]

    def _refuse_concurrent(self, num_choices: int) -> Refused | None:
        most = self.limits.max_concurrent
        if most is None or self.num_live + num_choices <= most:
            return None
        return Refused(limit=Limit.CONCURRENT, most=most, used=self.num_live, wanted=num_choices, wait_ns=None)

    def _refuse_day(self, num_tokens: int, now_ns: int) -> Refused | None:
        most = self.limits.tokens_per_day
        used = self._day_used + self._day_reserved
        if most is None or used + min(num_tokens, most) <= most:
            return None
        is_spent = self._day_used + min(num_tokens, most) > most
        wait_ns = DAY_NS - now_ns % DAY_NS if is_spent else None
        return Refused(limit=Limit.DAY, most=most, used=used, wanted=num_tokens, wait_ns=wait_ns)

    def _turn_day(self, now_ns: int) -> None:
        if (day := now_ns // DAY_NS) > self._day:
            self._day = day
            self._day_used = self._day_reserved = 0


class _Bucket:
    """Holds what a minute brings, in parts of one `MINUTE_NS`th; below zero it owes."""

    __slots__ = ("_at_ns", "_level", "_most")

    def __init__(self, most: int, now_ns: int) -> None:
        self._most = most
        self._level = most * MINUTE_NS
        self._at_ns = now_ns

    @classmethod
    def of(cls, most: int | None, now_ns: int) -> _Bucket | None:
        return None if most is None else cls(most, now_ns)

    @classmethod
    def resized(cls, old: _Bucket | None, most: int | None, now_ns: int) -> _Bucket | None:
        new = cls.of(most, now_ns)
        if old is not None and new is not None:
            old.fill(now_ns)
            new._level = old._level * new._most // old._most
        return new

    def fill(self, now_ns: int) -> None:
        if now_ns > self._at_ns:
            self._level = min(self._level + (now_ns - self._at_ns) * self._most, self._most * MINUTE_NS)
            self._at_ns = now_ns

    def take(self, number: int) -> None:
        """So many less; a negative number comes back, up to what the bucket holds."""
        self._level = min(self._level - number * MINUTE_NS, self._most * MINUTE_NS)

    def refuse(self, limit: Limit, wanted: int, now_ns: int) -> Refused | None:
        self.fill(now_ns)
        missing = min(wanted, self._most) * MINUTE_NS - self._level
        if missing <= 0:
            return None
        used = self._most - self._level // MINUTE_NS
        return Refused(limit=limit, most=self._most, used=used, wanted=wanted, wait_ns=-(-missing // self._most))

    def room(self, now_ns: int) -> Room:
        self.fill(now_ns)
        missing = self._most * MINUTE_NS - self._level
        remaining = max(self._level // MINUTE_NS, 0)
        return Room(most=self._most, remaining=remaining, reset_ns=-(-missing // self._most))
