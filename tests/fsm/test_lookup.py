"""Prompt lookup against its definition, searched for from the start each time."""

from __future__ import annotations

import random

import pytest

from novainfer.fsm.schedule.lookup import LOOKS_MAX, PromptLookup


def naive(tokens: list[int], num_tokens: int, least: int, most: int) -> list[int]:
    """For n from `most` down: the most recent earlier place of the last n tokens, among the last ones of `least`."""
    size = len(tokens)
    places = [p for p in range(least, size) if tokens[p - least : p] == tokens[size - least :]][-LOOKS_MAX:]
    for n in range(most, least - 1, -1):
        for place in reversed(places):
            if place >= n and tokens[place - n : place] == tokens[size - n :]:
                drafts = tokens[place : place + num_tokens]
                while len(drafts) < num_tokens:  # the repetition goes on
                    drafts.append((tokens + drafts)[place + len(drafts)])
                return drafts
    return []


@pytest.mark.parametrize("seed", range(60))
def test_it_is_its_definition(seed: int) -> None:
    chance = random.Random(seed)
    least = chance.randint(1, 4)
    most = least + chance.randint(0, 4)
    vocabulary = chance.choice([1, 2, 3, 10])
    lookup, tokens = PromptLookup(least, most), []
    for _ in range(120):
        tokens += [chance.randrange(vocabulary) for _ in range(chance.choice([1, 1, 1, 4]))]
        if len(tokens) > 8 and chance.random() < 0.2:
            tokens += tokens[: chance.randint(1, 8)]
        wanted = chance.randint(1, 6)
        assert lookup.propose(tokens, wanted) == naive(tokens, wanted, least, most)
    assert PromptLookup(least, most).propose(tokens, 5) == lookup.propose(tokens, 5), "it can be built again"


def test_examples() -> None:
    assert PromptLookup(2, 3).propose([1, 2, 3, 4, 2, 3], 3) == [4, 2, 3]  # vLLM's own
    assert PromptLookup(2, 2).propose([1, 2, 9, 1, 2, 8, 1, 2], 1) == [8]  # the most recent of two
    assert PromptLookup(1, 3).propose([5, 1, 2, 9, 1, 2, 7, 5, 1, 2], 1) == [9]  # the longest of two
    assert PromptLookup(1, 2).propose([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert PromptLookup(1, 1).propose([], 3) == []
    assert PromptLookup(3, 5).propose([1, 1], 3) == []
    assert PromptLookup(1, 5).propose([1, 2, 3], 3) == []
    assert PromptLookup(1, 2).propose([7], 0) == []


def test_a_text_of_one_token_costs_no_more_than_others() -> None:
    """Each of its places is one of the same tokens: a look must not walk them all."""

    class Counting(list[int]):
        reads = 0

        def __getitem__(self, at):  # type: ignore[no-untyped-def, override]
            self.reads += 1
            return super().__getitem__(at)

    for tokens in (Counting([3] * 5000), Counting([i % 2 and i for i in range(5000)])):
        lookup = PromptLookup(1, 8)
        lookup.propose(tokens, 4)
        tokens.reads = 0
        tokens.append(0)
        lookup.propose(tokens, 4)
        assert 0 < tokens.reads <= 2 + 2 * 8 * LOOKS_MAX
