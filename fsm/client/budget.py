"""How many tokens a conversation or a user may have in all; each call is told the time.

    admit ──there is room──▶ held ──settle, with what was really used──▶ gone
      └────there is none──▶ Spent

As in `quota`, a request reserves an estimate and settles what it used. Time is in nanoseconds, and never goes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import msgspec

from novainfer.fsm.client.quota import DAY_NS


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """`used` of `most` tokens are gone or reserved, and `wanted` were asked for; `wait_ns`: until a new day, if any."""

    most: int
    used: int
    wanted: int
    wait_ns: int | None


class Purse:
    """What one conversation or user has used, since when, and what its requests have reserved."""

    __slots__ = ("began_ns", "day", "num_live", "reserved", "used", "used_at_ns")

    def __init__(self, now_ns: int) -> None:
        self.began_ns = self.used_at_ns = now_ns
        self.day = now_ns // DAY_NS
        self.used = self.reserved = self.num_live = 0


class Hold(NamedTuple):
    """What one request has reserved, and in which purse: one that is ended may have a successor of its name."""

    purse: Purse
    num_tokens: int


class Budgets:
    """The purses of all conversations, or of all users; `most` tokens for each, None: they are counted only.

    Those of users are full again with each day (`is_daily`, UTC). One of which nothing is here is forgotten `keep_ns`
    after its last request, and before that where there are more than `num_max`, the least recently used first.
    """

    def __init__(self, most: int | None, *, keep_ns: int, num_max: int, is_daily: bool) -> None:
        self.most = most
        self._keep_ns, self._num_max, self._is_daily = keep_ns, num_max, is_daily
        self._purses: OrderedDict[Hashable, Purse] = OrderedDict()  # least recently used first

    def admit(self, key: Hashable, num_tokens: int, now_ns: int) -> Hold | Spent:
        """Let a request in that may take so many tokens: what it has reserved, which `settle` wants.

        Where nothing is used, any request is let in: one that asks for more than there may ever be ends in a debt.
        """
        purse = self._touched(key, now_ns)
        most = num_tokens if self.most is None else self.most
        reserved, used = min(num_tokens, most), purse.used + purse.reserved
        if self.most is not None and used + reserved > most:
            is_spent = purse.used + reserved > most
            wait_ns = DAY_NS - now_ns % DAY_NS if self._is_daily and is_spent else None
            self._forget(now_ns)
            return Spent(most=most, used=used, wanted=num_tokens, wait_ns=wait_ns)
        purse.reserved += reserved
        purse.num_live += 1
        self._forget(now_ns)
        return Hold(purse, reserved)

    def admit_again(self, key: Hashable, now_ns: int) -> Hold:
        """A request goes on that was let in elsewhere: it is counted as it ends, and reserves nothing."""
        purse = self._touched(key, now_ns)
        purse.num_live += 1
        self._forget(now_ns)
        return Hold(purse, 0)

    def restore(self, key: Hashable, num_tokens: int, began_ns: int, used_at_ns: int) -> None:
        """One that was known to a server before this one; those that were used least recently come first."""
        purse = self._touched(key, used_at_ns)
        purse.began_ns, purse.used = began_ns, num_tokens

    def settle(self, key: Hashable, hold: Hold, num_tokens: int, now_ns: int) -> None:
        """A request has ended, and has used so many tokens."""
        purse = hold.purse
        if self._purses.get(key) is not purse:  # it was ended meanwhile
            return
        self._touched(key, now_ns)
        purse.num_live -= 1
        purse.reserved -= hold.num_tokens
        purse.used += num_tokens

    def find(self, key: Hashable, now_ns: int) -> Purse | None:
        """What is known of one."""
        purse = self._purses.get(key)
        if purse is not None:
            self._turn_day(purse, now_ns)
        return purse

    def end(self, key: Hashable) -> bool:
        """Forget one; False if there is none."""
        return self._purses.pop(key, None) is not None

    def items(self, now_ns: int) -> dict[Hashable, Purse]:
        """All that are known."""
        self._forget(now_ns)
        return dict(self._purses)

    def _touched(self, key: Hashable, now_ns: int) -> Purse:
        purse = self._purses.setdefault(key, Purse(now_ns))
        self._purses.move_to_end(key)
        purse.used_at_ns = now_ns
        self._turn_day(purse, now_ns)
        return purse

    def _turn_day(self, purse: Purse, now_ns: int) -> None:
        if self._is_daily and purse.day < now_ns // DAY_NS:
            purse.day, purse.used = now_ns // DAY_NS, 0

    def _forget(self, now_ns: int) -> None:
        """Looks no further than at the first that stays: with each request, of which there may be very many purses."""
        gone, num_over = list[Hashable](), len(self._purses) - self._num_max
        for key, purse in self._purses.items():
            if purse.num_live:
                continue
            if len(gone) >= num_over and purse.used_at_ns + self._keep_ns > now_ns:
                break
            gone.append(key)
        for key in gone:
            del self._purses[key]
