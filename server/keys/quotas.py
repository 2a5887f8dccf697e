"""What the keys of a server have used, as requests are let in and end, and what their answers say of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from novainfer import InvalidParameter
from novainfer.fsm.client.quota import DAY_NS, Account, Limit, Refused, Room
from novainfer.server.http.errors import QuotaSpent, RateLimited, TooManyRequests
from novainfer.server.keys.counted import Counted, Keep, keep_nothing
from novainfer.server.keys.record import KeyRecord
from novainfer.server.keys.ring import KeyRing

# What a request reserves for each of its choices that says nothing of `max_tokens`: as much as the context holds would
# shut a key's other requests out, for an answer that is rarely so long. What it takes above that is a debt.
OPEN_ENDED_TOKENS = 1024
RETRY_AFTER_S = 1.0  # while it is other requests' ends that are waited for
NANOSECONDS = 1_000_000_000

Headers = list[tuple[bytes, bytes]]
_NAMES = {
    Limit.REQUESTS: "requests per min (RPM)",
    Limit.TOKENS: "tokens per min (TPM)",
    Limit.DAY: "tokens per day (TPD)",
    Limit.CONCURRENT: "requests at a time",
}


def unix_clock() -> Callable[[], int]:
    """Nanoseconds since 1970 that never go back: where somebody sets the clock, they go on as if nobody had."""
    origin_ns = time.time_ns() - time.monotonic_ns()
    return lambda: origin_ns + time.monotonic_ns()


class Hold:
    """What one request has reserved with its key; `settle` once, when it has ended, however it did."""

    __slots__ = ("_account", "_clock", "_hold_id", "_tell")

    def __init__(
        self,
        account: Account | None,
        hold_id: int | None,
        clock: Callable[[], int],
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Without a `hold_id` nothing is reserved; `tell` that something was used."""
        self._tell = tell
        self._account = account
        self._hold_id = hold_id
        self._clock = clock

    def settle(self, num_tokens: int, *, has_begun: bool = True) -> None:
        """It has used so many tokens; or it has not begun at all, because something else refused it."""
        account, self._account = self._account, None
        if account is None:
            return
        if self._hold_id is None:
            account.spend(num_tokens, self._clock())
        else:
            account.settle(self._hold_id, num_tokens, self._clock(), has_begun=has_begun)
        self._tell()


class Quotas:
    """The accounts of all keys that have limits."""

    def __init__(self, keys: KeyRing, clock: Callable[[], int] | None = None) -> None:
        self._keys = keys
        self._clock = clock or unix_clock()
        self._accounts: dict[str, Account] = {}
        self._before: dict[str, Counted] = {}  # what a server before this one has counted, by owner
        self.keep: Keep = keep_nothing
        self.num_refused: Counter[str] = Counter()  # by what was over its limit

    def admit(self, owner: str, num_choices: int, num_tokens: int) -> Hold:
        """Let a request of this key in, which may take so many tokens.

        Raises `RateLimited` or `QuotaSpent`, which say when there is room, or `InvalidParameter` when it has more
        choices than the key may ever have.
        """
        now_ns = self._clock()
        found = self._account(owner, now_ns)
        if found is None:
            return Hold(None, None, self._clock)
        record, account = found
        most = record.max_concurrent
        if most is not None and num_choices > most:
            what = f"This is a request of {num_choices} choices, and this key may have {most} at a time"
            raise InvalidParameter(f"{what}: ask for fewer", param="n")
        answer = account.admit(num_choices, num_tokens, now_ns)
        if isinstance(answer, Refused):
            self.num_refused[answer.limit] += 1
            raise _error(record.name, answer)
        return Hold(account, answer, self._clock, lambda: self._tell(owner, account))

    def admit_again(self, owner: str) -> Hold:
        """A request goes on that another server let in, and is no request of this minute.

        That had not counted its tokens: of the day all of them are, when it has ended.
        """
        found = self._account(owner, self._clock())
        if found is None:
            return Hold(None, None, self._clock)
        account = found[1]
        return Hold(account, None, self._clock, lambda: self._tell(owner, account))

    def restore(self, counted: Counted) -> None:
        """What a server before this one has counted."""
        self._before[counted.owner] = counted

    def _tell(self, owner: str, account: Account) -> None:
        if account.limits.tokens_per_day is not None:
            now_ns = self._clock()
            self.keep(Counted("key", owner, "", now_ns, now_ns, account.used_today(now_ns)))

    def headers(self, owner: str) -> Headers:
        """`x-ratelimit-*` of this key, as things stand now; none where it has no such limits."""
        now_ns = self._clock()
        found = self._account(owner, now_ns)
        if found is None:
            return []
        account = found[1]
        return [*_headers(b"requests", account.requests(now_ns)), *_headers(b"tokens", account.tokens(now_ns))]

    def _account(self, owner: str, now_ns: int) -> tuple[KeyRecord, Account] | None:
        record = self._keys.record(owner) if owner else None
        if record is None or not record.is_limited:
            self._accounts.pop(owner, None)
            return None
        limits = record.limits
        account = self._accounts.get(owner)
        if account is None:
            self._accounts = {name: held for name, held in self._accounts.items() if self._keys.record(name)}
            account = self._accounts[owner] = Account(limits, now_ns)
            before = self._before.pop(owner, None)
            if before is not None and before.at_ns // DAY_NS == now_ns // DAY_NS:
                account.spend(before.num_tokens, now_ns)
        elif account.limits != limits:
            account.update(limits, now_ns)
        return record, account


def _error(name: str, refused: Refused) -> TooManyRequests | QuotaSpent:
    """OpenAI's sentence, which clients look for times in; "in 6s" is when there is room at the latest."""
    wait_ns = refused.wait_ns
    wait_s = RETRY_AFTER_S if wait_ns is None else wait_ns / NANOSECONDS
    when = "as soon as one has ended" if wait_ns is None else f"in {duration(wait_ns)}"
    figures = f"Limit {refused.most}, Used {refused.used}, Requested {refused.wanted}"
    message = f"Rate limit reached for the key {name} on {_NAMES[refused.limit]}: {figures}. Please try again {when}."
    kind = QuotaSpent if refused.limit is Limit.DAY and wait_ns is not None else RateLimited
    return kind(message, retry_after_s=wait_s)


def _headers(what: bytes, room: Room | None) -> Headers:
    if room is None:
        return []
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % room.most),
        (b"x-ratelimit-remaining-" + what, b"%d" % room.remaining),
        (b"x-ratelimit-reset-" + what, duration(room.reset_ns).encode("ascii")),
    ]


def duration(nanoseconds: int) -> str:
    """As OpenAI writes it, and rounded up: "120ms", "1.5s", "6m0s", "13h0m2.25s"."""
    milliseconds = -(-nanoseconds // 1_000_000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".")
    return "".join((f"{hours}h" * bool(hours), f"{minutes}m" * bool(hours or minutes), f"{seconds}s"))
