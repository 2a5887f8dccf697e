"""The corpus follows from its seed, and what is held out never appears in it."""

from __future__ import annotations

import itertools
import random
import re
from functools import cache

import pytest

from tools.demo import arithmetic, corpus, lessons, memory, questions, words
from tools.demo.batches import DRILLS
from tools.demo.facts import Relation
from tools.demo.morefacts import ALL_RELATIONS
from tools.demo.wordings import FRAMES, HELD_OUT_FRAMES, expand, fill, frame, normalised

_NUM_DOCUMENTS = 4_000


@cache
def _drawn() -> list[corpus.Document]:
    source = corpus.documents(1_000_003, share_long=0.04, drill_mix=DRILLS[-1][1])
    return list(itertools.islice(source, _NUM_DOCUMENTS))


@cache
def _user_turns() -> list[str]:
    return [
        part.split(corpus.END)[0]
        for document in _drawn()
        for part in document.text().split(f"{corpus.START}user\n")[1:]
    ]


def _texts(seed: int) -> list[str]:
    return [document.text() for document in itertools.islice(corpus.documents(seed), 200)]


def test_a_seed_gives_the_same_documents_again_and_another_seed_gives_others() -> None:
    assert _texts(5) == _texts(5)
    assert _texts(5) != _texts(6)


def test_expand_gives_every_reading_of_a_pattern() -> None:
    assert expand("[a|b] c[!|]") == ["a c!", "a c", "b c!", "b c"]


def test_fill_chooses_the_article_and_leaves_other_braces_alone() -> None:
    assert fill("a {x} and A {y} {z}", x="owl", y="cat") == "an owl and A cat {z}"


def test_only_replies_and_plain_text_are_trained() -> None:
    document = corpus.render([("hi", "hello"), ("bye", "goodbye")], "Be kind.")
    assert [piece for piece, is_trained in document.pieces if is_trained] == ["hello<|im_end|>", "goodbye<|im_end|>"]


def test_held_out_operand_pairs_are_in_no_trained_equation() -> None:
    pairs = set()
    for document in _drawn():
        for a, operator, b in re.findall(r"(?<![\d.-])(\d{1,2}) ([+-]) (\d{1,2}) =", document.text()):
            pairs.add((int(a), operator, int(b)))
    assert len(pairs) > 1_500
    assert not [pair for pair in pairs if arithmetic.is_held_out_pair(pair[0], pair[2])]


def test_a_tenth_of_the_operand_pairs_is_held_out_in_either_order() -> None:
    held_out = {(a, b) for a in range(100) for b in range(100) if arithmetic.is_held_out_pair(a, b)}
    assert 800 < len(held_out) < 1_200
    assert all((b, a) in held_out for a, b in held_out)


def test_no_unseen_name_or_made_up_name_of_the_held_out_part_is_in_the_corpus() -> None:
    seen = {word.lower() for document in _drawn() for word in re.findall(r"\w+", document.text())}
    assert not {name for name in words.UNSEEN_NAMES if name.lower() in seen}
    rng = random.Random(2)
    assert not [name for _ in range(500) if (name := words.made_up_name(rng, unseen=True)).lower() in seen]


def test_no_unseen_word_is_spelt_in_the_corpus() -> None:
    spelt = {word for document in _drawn() for word in re.findall(r"(\w+): \w-\w", document.text())}
    assert len(spelt) > 300
    assert not spelt & set(words.UNSEEN_WORDS)
    assert not set(words.LETTER_WORDS) & set(words.UNSEEN_WORDS)


def test_no_held_out_range_is_counted_in_the_corpus() -> None:
    ranges = [
        (int(first), int(last))
        for document in _drawn()
        for first, last in re.findall(
            r"(?:[Ff]rom (?=\d+ (?!and))|between )(\d+) (?:to|up to|until|till|and) (\d+)", document.text()
        )
    ]
    assert len(ranges) > 1_000
    assert not [pair for pair in ranges if lessons.is_held_out_range(*pair)]


@pytest.mark.parametrize("relation", ALL_RELATIONS, ids=lambda relation: relation.name)
def test_held_out_wordings_of_a_relation_are_none_of_its_trained_ones(relation: Relation) -> None:
    def key(template: str) -> str:
        return normalised(fill(template, x="xyzzy"))

    trained = {key(frame(each, noun)) for each in FRAMES for noun in relation.nouns} | {*map(key, relation.asks)}
    held_out = {key(frame(each, noun)) for each in HELD_OUT_FRAMES for noun in relation.nouns}
    held_out |= {key(frame(each, noun)) for each in FRAMES for noun in relation.held_out_nouns}
    held_out |= {*map(key, relation.held_out_asks)}
    assert len(trained) > 150
    assert relation.held_out_asks
    assert relation.held_out_nouns
    assert not trained & held_out


def test_wordings_of_recall_questions_are_split() -> None:
    for attribute in memory.ATTRIBUTES:
        assert attribute.held_out_asks
        assert not {*map(normalised, attribute.asks)} & {*map(normalised, attribute.held_out_asks)}
        assert not {*map(normalised, attribute.tells)} & {*map(normalised, attribute.held_out_tells)}


@pytest.mark.parametrize(
    "group", ["sums", "products", "facts", "names", "names_far", "details", "spelling", "counting"]
)
def test_no_held_out_question_is_asked_in_the_corpus(group: str) -> None:
    asked = {normalised(turn) for turn in _user_turns()}
    rng = random.Random(f"1 {group}")
    drawn = [questions.GROUPS[group](rng) for _ in range(300)]
    assert not [question for question in drawn if normalised(question.messages[-1][1]) in asked]


def test_what_lies_between_telling_a_name_and_asking_for_it_does_not_tell_another() -> None:
    rng = random.Random(3)
    for _ in range(50):
        question = questions.names_far(rng)
        told = [content for role, content in question.messages if role == "assistant" and "Nice to meet you" in content]
        assert len(told) == 1
        assert told[0] == f"Nice to meet you, {question.reply.removeprefix('Your name is ').removesuffix('.')}!"
