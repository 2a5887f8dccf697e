"""What a key may use: what is told is true, what is refused costs nothing, and what ends leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from novainfer.fsm.client.quota import DAY_NS, MINUTE_NS, Account, Limit, Limits, Refused, Room

NOON_NS = 20_000 * DAY_NS + DAY_NS // 2

limits = st.builds(
    Limits,
    requests_per_min=st.none() | st.integers(1, 20),
    tokens_per_min=st.none() | st.integers(1, 2000),
    tokens_per_day=st.none() | st.integers(1, 20_000),
    max_concurrent=st.none() | st.integers(1, 8),
)
# One move: so many nanoseconds later, either a request of so many choices and tokens, or the end of one of those here.
moves = st.lists(
    st.tuples(
        st.integers(0, 2 * MINUTE_NS) | st.integers(0, 1000),
        st.booleans(),
        st.integers(1, 4),
        st.integers(0, 3000),
    ),
    max_size=60,
)


def let_in(account: Account, num_tokens: int, now_ns: int, num_choices: int = 1) -> int:
    answer = account.admit(num_choices, num_tokens, now_ns)
    assert not isinstance(answer, Refused), answer
    return answer


def refused(account: Account, num_tokens: int, now_ns: int, num_choices: int = 1) -> Refused:
    answer = account.admit(num_choices, num_tokens, now_ns)
    assert isinstance(answer, Refused)
    return answer


def rooms(account: Account, now_ns: int) -> list[Room | None]:
    return [account.requests(now_ns), account.tokens(now_ns), account.tokens_today(now_ns)]


def held(account: Account) -> Any:
    return account._held, account.num_live


@given(limits, moves)
def test_a_refusal_changes_nothing_and_what_it_tells_of_the_time_is_exact(limit: Limits, script: list[Any]) -> None:
    account, now_ns = Account(limit, NOON_NS), NOON_NS
    for wait_ns, ends, num_choices, num_tokens in script:
        now_ns += wait_ns
        open_holds = list(account._held)
        if ends and open_holds:
            account.settle(open_holds[num_tokens % len(open_holds)], num_tokens, now_ns)
            continue
        before, kept = rooms(account, now_ns), (dict(account._held), account.num_live)
        answer = account.admit(num_choices, num_tokens, now_ns)
        if not isinstance(answer, Refused):
            continue
        assert rooms(account, now_ns) == before
        assert held(account) == kept
        if answer.wait_ns is None:
            continue
        assert answer.wait_ns > 0
        early = account.admit(num_choices, num_tokens, now_ns + answer.wait_ns - 1)
        assert isinstance(early, Refused)
        later = account.admit(num_choices, num_tokens, now_ns + answer.wait_ns)
        now_ns += answer.wait_ns
        if isinstance(later, Refused):  # only what nothing can be told of: other requests have to end
            assert later.wait_ns is None


@given(limits, moves)
def test_when_all_have_ended_and_their_debts_are_paid_nothing_is_left(limit: Limits, script: list[Any]) -> None:
    account, now_ns, used_today, day = Account(limit, NOON_NS), NOON_NS, 0, NOON_NS // DAY_NS
    most_used = 0
    for wait_ns, ends, num_choices, num_tokens in script:
        now_ns += wait_ns
        open_holds = list(account._held)
        if ends and open_holds:
            hold_id = open_holds[num_tokens % len(open_holds)]
            if account._held[hold_id].day == now_ns // DAY_NS == day:
                used_today += num_tokens
            account.settle(hold_id, num_tokens, now_ns)
            most_used += num_tokens
        else:
            account.admit(num_choices, num_tokens, now_ns)
    for hold_id in list(account._held):
        account.settle(hold_id, 0, now_ns)
    assert held(account) == ({}, 0)
    if limit.tokens_per_day is not None and now_ns // DAY_NS == day:
        found = account.tokens_today(now_ns)
        assert found is not None
        assert found.remaining == max(limit.tokens_per_day - used_today, 0)
    debt_ns = most_used * MINUTE_NS // (limit.tokens_per_min or 1)
    for found in rooms(account, now_ns + MINUTE_NS + debt_ns + DAY_NS):
        assert found is None or (found.remaining == found.most and found.reset_ns == 0)


@given(st.integers(1, 500), moves)
def test_no_more_is_let_in_than_a_full_bucket_and_what_the_time_brings(most: int, script: list[Any]) -> None:
    """Between any two moments, of requests that use what they reserved or less."""
    account, now_ns = Account(Limits(tokens_per_min=most), NOON_NS), NOON_NS
    spent: list[tuple[int, int]] = []  # when, and how many
    for wait_ns, ends, num_choices, num_tokens in script:
        now_ns += wait_ns
        open_holds = list(account._held)
        if ends and open_holds:
            hold = account._held[open_holds[0]]
            unused = hold.num_tokens - min(num_tokens, hold.num_tokens)
            account.settle(open_holds[0], hold.num_tokens - unused, now_ns)
            spent.append((now_ns, -unused))
        elif not isinstance(account.admit(num_choices, num_tokens, now_ns), Refused):
            spent.append((now_ns, min(num_tokens, most)))
    for begin in range(len(spent)):
        total = 0
        for at_ns, number in spent[begin:]:
            total += number
            assert total * MINUTE_NS <= most * MINUTE_NS + most * (at_ns - spent[begin][0])


@given(limits, limits, moves)
def test_other_limits_hold_from_then_on_and_lose_no_request(old: Limits, new: Limits, script: list[Any]) -> None:
    account, now_ns = Account(old, NOON_NS), NOON_NS
    for at, (wait_ns, ends, num_choices, num_tokens) in enumerate(script):
        now_ns += wait_ns
        if at == len(script) // 2:
            account.update(new, now_ns)
        open_holds = list(account._held)
        if ends and open_holds:
            account.settle(open_holds[0], 0, now_ns)
        else:
            account.admit(num_choices, num_tokens, now_ns)
    for hold_id in list(account._held):
        account.settle(hold_id, 0, now_ns)
    account.update(new, now_ns)
    assert held(account) == ({}, 0)
    assert [found and found.most for found in rooms(account, now_ns)] == [
        new.requests_per_min,
        new.tokens_per_min,
        new.tokens_per_day,
    ]
    for found in rooms(account, now_ns + 2 * DAY_NS):
        assert found is None or found.remaining == found.most


def test_requests_come_back_one_by_one() -> None:
    account = Account(Limits(requests_per_min=3), NOON_NS)
    for _ in range(3):
        let_in(account, 0, NOON_NS)
    found = refused(account, 0, NOON_NS)
    assert (found.limit, found.most, found.used, found.wanted) == (Limit.REQUESTS, 3, 3, 1)
    assert found.wait_ns == MINUTE_NS // 3
    assert account.requests(NOON_NS + MINUTE_NS // 3) == Room(most=3, remaining=1, reset_ns=2 * MINUTE_NS // 3)


def test_a_request_that_something_else_refused_is_none_of_its_minute() -> None:
    account = Account(Limits(requests_per_min=2, tokens_per_min=100), NOON_NS)
    account.settle(let_in(account, 50, NOON_NS), 0, NOON_NS, has_begun=False)
    assert account.requests(NOON_NS) == Room(most=2, remaining=2, reset_ns=0)
    account.settle(let_in(account, 50, NOON_NS), 0, NOON_NS)
    assert account.requests(NOON_NS) == Room(most=2, remaining=1, reset_ns=MINUTE_NS // 2)


def test_an_estimate_is_reserved_and_what_was_used_takes_its_place() -> None:
    account = Account(Limits(tokens_per_min=1000, tokens_per_day=5000), NOON_NS)
    hold_id = let_in(account, 900, NOON_NS)
    assert [found and found.remaining for found in rooms(account, NOON_NS)] == [None, 100, 4100]
    account.settle(hold_id, 50, NOON_NS)
    assert [found and found.remaining for found in rooms(account, NOON_NS)] == [None, 950, 4950]
    hold_id = let_in(account, 900, NOON_NS)
    account.settle(hold_id, 2950, NOON_NS)
    assert [found and found.remaining for found in rooms(account, NOON_NS)] == [None, 0, 2000]
    found = refused(account, 100, NOON_NS)
    assert (found.limit, found.used, found.wait_ns) == (Limit.TOKENS, 3000, 2 * MINUTE_NS + MINUTE_NS // 10)


def test_a_request_that_is_larger_than_a_limit_waits_until_that_is_whole() -> None:
    account = Account(Limits(tokens_per_min=100), NOON_NS)
    account.settle(let_in(account, 60, NOON_NS), 60, NOON_NS)
    assert refused(account, 5000, NOON_NS).wait_ns == 60 * MINUTE_NS // 100
    let_in(account, 5000, NOON_NS + 60 * MINUTE_NS // 100)


def test_of_several_limits_the_one_that_takes_longest_is_told() -> None:
    account = Account(Limits(requests_per_min=1, tokens_per_min=100, max_concurrent=1), NOON_NS)
    hold_id = let_in(account, 10, NOON_NS)
    assert refused(account, 95, NOON_NS).limit is Limit.REQUESTS
    account.settle(hold_id, 400, NOON_NS)
    assert refused(account, 95, NOON_NS).limit is Limit.TOKENS
    let_in(account, 0, NOON_NS + 10 * MINUTE_NS)
    assert refused(account, 0, NOON_NS + 11 * MINUTE_NS) == Refused(
        limit=Limit.CONCURRENT, most=1, used=1, wanted=1, wait_ns=None
    )


def test_a_day_ends_at_midnight_and_takes_what_began_in_it_along() -> None:
    account = Account(Limits(tokens_per_day=100), NOON_NS)
    over = let_in(account, 80, NOON_NS)
    found = refused(account, 30, NOON_NS)
    assert (found.limit, found.used, found.wait_ns) == (Limit.DAY, 80, None), "the first may use less"
    account.settle(let_in(account, 20, NOON_NS), 20, NOON_NS)
    midnight_ns = NOON_NS + DAY_NS // 2
    assert account.tokens_today(NOON_NS) == Room(most=100, remaining=0, reset_ns=DAY_NS // 2)
    assert refused(account, 90, midnight_ns - 1).wait_ns == 1
    let_in(account, 90, midnight_ns)
    account.settle(over, 5, midnight_ns)
    assert account.tokens_today(midnight_ns) == Room(most=100, remaining=10, reset_ns=DAY_NS)


@pytest.mark.parametrize(("new", "remaining"), [(10, 2), (1000, 250), (100, 25), (None, None)])
def test_a_bucket_of_another_size_is_as_full_as_it_was(new: int | None, remaining: int | None) -> None:
    account = Account(Limits(tokens_per_min=100), NOON_NS)
    let_in(account, 75, NOON_NS)
    account.update(Limits(tokens_per_min=new), NOON_NS)
    found = account.tokens(NOON_NS)
    assert (None if found is None else found.remaining) == remaining


def test_a_clock_that_stands_still_or_goes_back_brings_nothing() -> None:
    account = Account(Limits(requests_per_min=1), NOON_NS)
    let_in(account, 0, NOON_NS)
    assert refused(account, 0, NOON_NS - 10 * MINUTE_NS).wait_ns == MINUTE_NS
    assert refused(account, 0, NOON_NS).wait_ns == MINUTE_NS
