"""What conversations and users may still use, and to which of them a request belongs."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

from starlette.requests import Request

from novainfer import InvalidParameter
from novainfer.fsm.client.budget import Budgets, Hold, Spent
from novainfer.fsm.messages.params import SESSION_ID, SESSION_ID_IS
from novainfer.server.http.errors import BudgetSpent
from novainfer.server.keys.counted import Counted, Keep, keep_nothing
from novainfer.server.keys.quotas import NANOSECONDS, Headers, duration, unix_clock

if TYPE_CHECKING:
    from novainfer.server.settings import ServerSettings

SESSION_HEADER = "x-session-id"
PURSES_MAX = 100_000  # some 50 MB, with the longest names; beyond, who has used his least recently begins anew
IDLE_NS = 24 * 3600 * NANOSECONDS  # longer than conversations are kept mostly: their budgets outlast their KV
USER_CHARS_MAX = 512
SHORT_BYTES = 128  # of a name: as long as those of conversations are at most


class Spending:
    """The budgets of all conversations and users of one server."""

    def __init__(self, settings: ServerSettings) -> None:
        self.clock = unix_clock()
        keep = {"keep_ns": IDLE_NS, "num_max": PURSES_MAX}
        self.sessions = Budgets(settings.session_token_budget, **keep, is_daily=False)
        self.users = Budgets(settings.user_token_budget, **keep, is_daily=True)
        self.keep: Keep = keep_nothing

    def restore(self, counted: Counted) -> None:
        """What a server before this one has counted; where there is such a budget still."""
        budgets = self.sessions if counted.kind == "session" else self.users
        if budgets.most is not None:
            key = (counted.owner, counted.name)
            budgets.restore(key, counted.num_tokens, counted.began_ns, counted.at_ns)

    def end_session(self, owner: str, session_id: str) -> bool:
        """Forget what a conversation has used; False if nothing is known of it."""
        self.keep(Counted("session", owner, session_id, 0, 0, 0))
        return self.sessions.end((owner, session_id))

    def told(self, budgets: Budgets, key: tuple[str, str]) -> None:
        """What is used of a budget has changed."""
        purse = None if budgets.most is None else budgets.find(key, self.clock())
        if purse is not None:
            kind: Literal["session", "user"] = "session" if budgets is self.sessions else "user"
            self.keep(Counted(kind, *key, purse.began_ns, purse.used_at_ns, purse.used))

    def admit(self, owner: str, session_id: str | None, user: str | None, num_tokens: int) -> Held:
        """Let a request of this key in, which may take so many tokens; raises `BudgetSpent`."""
        now_ns = self.clock()
        held = Held(self)
        for budgets, what, name in self._counted(session_id, user):
            found = budgets.admit((owner, name), num_tokens, now_ns)
            if isinstance(found, Spent):
                held.settle(0)
                raise _error(what, name, found)
            held.shares.append((budgets, (owner, name), found))
        return held

    def admit_again(self, owner: str, session_id: str | None, user: str | None) -> Held:
        """A request goes on that another server let in, whose counts are gone: all of its tokens count here."""
        held = Held(self)
        for budgets, _, name in self._counted(session_id, user):
            held.shares.append((budgets, (owner, name), budgets.admit_again((owner, name), self.clock())))
        return held

    def _counted(self, session_id: str | None, user: str | None) -> Iterator[tuple[Budgets, str, str]]:
        """Conversations are counted always, users where they have a budget."""
        if session_id is not None:
            yield self.sessions, "session", session_id
        if user is not None and self.users.most is not None:
            yield self.users, "user", _short(user)

    def headers(self, owner: str, session_id: str | None, user: str | None) -> Headers:
        """What is left of both, as things stand now; none where there is no such limit."""
        now_ns, found = self.clock(), []
        for budgets, what, name in ((self.sessions, b"session", session_id), (self.users, b"user", user)):
            if name is None or budgets.most is None:
                continue
            purse = budgets.find((owner, _short(name)), now_ns)
            gone = 0 if purse is None else purse.used + purse.reserved
            found.append((b"x-ratelimit-limit-" + what + b"-tokens", b"%d" % budgets.most))
            found.append((b"x-ratelimit-remaining-" + what + b"-tokens", b"%d" % max(budgets.most - gone, 0)))
        return found


class Held:
    """What one request has reserved; `settle` once, when it has ended, however it did."""

    def __init__(self, spending: Spending) -> None:
        self._spending = spending
        self.shares: list[tuple[Budgets, tuple[str, str], Hold]] = []

    def settle(self, num_tokens: int) -> None:
        """It has used so many tokens."""
        shares, self.shares = self.shares, []
        for budgets, key, hold in shares:
            budgets.settle(key, hold, num_tokens, self._spending.clock())
            self._spending.told(budgets, key)


def _short(name: str) -> str:
    """`name`, or a digest of one that is long: a hundred thousand of these would take 200 MB."""
    data = name.encode("utf-8", "surrogatepass")
    return name if len(data) <= SHORT_BYTES else f"blake2b {blake2b(data, digest_size=16).hexdigest()}"


def _error(what: str, name: str, spent: Spent) -> BudgetSpent:
    figures = f"Limit {spent.most}, Used {spent.used}, Requested {spent.wanted}"
    advice = "End the session, or begin another one."
    if what == "user":
        wait_ns = spent.wait_ns
        advice = "Try again when a request has ended." if wait_ns is None else f"Try again in {duration(wait_ns)}."
    wait_s = None if spent.wait_ns is None else spent.wait_ns / NANOSECONDS
    message = f"The token budget of the {what} {name!r} has no room for this request: {figures}. {advice}"
    return BudgetSpent(message, retry_after_s=wait_s)


def session_of(request: Request, body_id: str | None) -> str | None:
    """The conversation that a request belongs to: the body's `session_id`, else the header's."""
    if body_id is not None or (value := request.headers.get(SESSION_HEADER)) is None:
        return body_id
    if SESSION_ID.fullmatch(value) is None:
        raise InvalidParameter(f"{SESSION_HEADER} must be {SESSION_ID_IS}", param=SESSION_HEADER)
    return value


def user_of(body: object) -> str | None:
    """Whom a body names as its user, in OpenAI's way or in Anthropic's; "" is nobody."""
    metadata = getattr(body, "metadata", None)
    user: str | None = getattr(body, "user", None) or getattr(metadata, "user_id", None)
    if user is not None and len(user) > USER_CHARS_MAX:
        raise InvalidParameter(f"user must have at most {USER_CHARS_MAX} characters", param="user")
    return user or None
