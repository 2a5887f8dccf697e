"""Masks behind drafts: those that would be made if the drafts had come, and afterwards it is as if none had been."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from novainfer.actors.grammar.compiler import Compiler
from novainfer.actors.grammar.masking import Advanced, Constrained, MaskMaker
from novainfer.fsm.messages.events import Constrain
from novainfer.fsm.messages.structured import StructuredOutputsParams, Thoughts
from tests.actors.test_grammar_properties import EOS, VOCAB, Schema, compiler, schemas

__all__ = ["compiler"]

OPEN, CLOSE = 1273, 1274  # of the demo model
TOKENS_MAX = 40
THOUGHTS = Thoughts(open_id=OPEN, close_id=CLOSE, budget=3)


@pytest.fixture(scope="module")
def maker(compiler: Compiler) -> MaskMaker:
    found = MaskMaker(1)
    found.compiler = compiler
    return found


def begun(maker: MaskMaker, grammar: StructuredOutputsParams | None, thoughts: Thoughts | None = None) -> Constrained:
    held = Constrained(Constrain(0, grammar, [], thoughts))
    held.compiled = None if grammar is None else maker.compiler.compile(grammar)
    assert maker.work(held).failed == []
    return held


def masks(held: Constrained) -> list[list[int]]:
    """The tokens that each of its masks allows."""
    rows = held.words[held.row : held.row + held.num_masks]
    return [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB]).tolist() for row in rows]


def check(maker: MaskMaker, make: Callable[[], Constrained], chance: int) -> None:
    """Walk through an answer, with drafts at each token, of which some are wrong."""
    rng = Random(chance)
    guessing, so_far = make(), list[int]()
    for _ in range(TOKENS_MAX):
        token_id = rng.choice(masks(guessing)[0])
        if token_id == EOS:
            break
        so_far.append(token_id)
        plain, drafts = make(), list[int]()
        maker.work([Advanced(plain, so_far)])
        expected = masks(plain)
        for _ in range(rng.randrange(5)):
            is_wrong = rng.random() < 0.2
            drafts.append(rng.randrange(VOCAB) if is_wrong else rng.choice(expected[-1]))
            if drafts[-1] not in expected[-1] or drafts[-1] == EOS:
                drafts.append(rng.randrange(VOCAB))
                break
            maker.work([Advanced(plain, drafts[-1:])])
            expected += masks(plain)
        assert maker.work([Advanced(guessing, [token_id], drafts)]).failed == []
        found = masks(guessing)
        assert found[: len(expected)] == expected
        assert len(found) == 1 + len(drafts)
        if EOS not in drafts:
            assert not any(found[len(expected) :])


@seed(3)
@settings(max_examples=40, deadline=None, database=None)
@given(schemas(), st.booleans(), st.integers(0, 2**32))
def test_masks_behind_drafts_are_those_behind_as_many_tokens(
    maker: MaskMaker, schema: Schema, has_thoughts: bool, chance: int
) -> None:
    grammar = StructuredOutputsParams(json=schema)
    check(maker, lambda: begun(maker, grammar, THOUGHTS if has_thoughts else None), chance)


@pytest.mark.parametrize("chance", range(4))
def test_masks_behind_drafts_of_thoughts_alone(maker: MaskMaker, chance: int) -> None:
    check(maker, lambda: begun(maker, None, THOUGHTS), chance)


def test_a_draft_at_which_a_matcher_fails_costs_its_request_nothing(maker: MaskMaker) -> None:
    """A grammar may come to a limit behind a draft that never comes; so does what is no token of its vocabulary."""
    grammar = StructuredOutputsParams(regex="[ab][cd][ef][gh][ij]")
    plain, guessing = begun(maker, grammar), begun(maker, grammar)
    for _ in range(3):
        token_ids = masks(plain)[0][:1]
        maker.work([Advanced(plain, token_ids)])
        drafts = [*masks(plain)[0][:1], 2 * VOCAB]
        assert maker.work([Advanced(guessing, token_ids, drafts)]).failed == []
        assert masks(guessing) == [masks(plain)[0], [], []]


def test_several_tokens_at_once_are_as_good_as_one_after_the_other(maker: MaskMaker) -> None:
    grammar = StructuredOutputsParams(json={"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 3})
    rng, token_ids = Random(1), list[int]()
    one_by_one = begun(maker, grammar)
    for _ in range(6):
        token_ids.append(rng.choice(masks(one_by_one)[0]))
        maker.work([Advanced(one_by_one, token_ids[-1:])])
    together = [begun(maker, grammar) for _ in range(3)]
    maker.work([Advanced(held, token_ids) for held in together])
    assert [masks(held) for held in together] == [masks(one_by_one)] * 3
    assert [held.num_tokens for held in together] == [6] * 3


def test_what_must_follow_is_told_where_it_is_wanted(maker: MaskMaker) -> None:
    grammar = StructuredOutputsParams(choice=["a very long choice", "another very long choice"])
    allowed = masks(begun(maker, grammar))[0]
    for chosen in allowed:  # some token decides which of them it is
        held = begun(maker, grammar)
        assert maker.work([Advanced(held, [chosen])]).forced == []
        if len(masks(held)[0]) == 1:
            break
    held = begun(maker, grammar)
    ((request_id, forced),) = maker.work([Advanced(held, [chosen], wants_forced=True)]).forced
    assert request_id == 0
    for token_id in forced:
        assert masks(held) == [[token_id]]
        maker.work([Advanced(held, [token_id])])
