"""The corpus follows from its seed, and what is held out never appears in it."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import cache

import pytest

from tools.demo import (
    arithmetic,
    chatter,
    corpus,
    drills,
    lessons,
    memory,
    questions,
    thoughts,
    tooling,
    toolkits,
    words,
)
from tools.demo.batches import CALLS, DRILLS, SKILLS
from tools.demo.facts import Relation
from tools.demo.morefacts import ALL_RELATIONS
from tools.demo.wordings import FRAMES, HELD_OUT_FRAMES, expand, fill, frame, normalised

_NUM_DOCUMENTS = 4_000


@cache
def _drawn() -> list[corpus.Document]:
    return [
        document
        for mixes, count in ((DRILLS, _NUM_DOCUMENTS), (CALLS, _NUM_DOCUMENTS // 4), (SKILLS, _NUM_DOCUMENTS // 4))
        for document in itertools.islice(corpus.documents(1_000_003, share_long=0.04, drill_mix=mixes[-1][1]), count)
    ]


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
    "group",
    [
        *("sums", "products", "facts", "names", "names_far", "details", "spelling", "counting"),
        *("tools", "tools_reworded", "tools_renamed"),
    ],
)
def test_no_held_out_question_is_asked_in_the_corpus(group: str) -> None:
    asked = {normalised(turn) for turn in _user_turns()}
    rng = random.Random(f"1 {group}")
    drawn = [questions.GROUPS[group](rng) for _ in range(300)]
    assert not [question for question in drawn if normalised(_last_of_user(question)) in asked]


def _last_of_user(question: questions.Question) -> str:
    return [content for role, content in question.messages if role == "user"][-1]


def test_wordings_for_tools_are_split() -> None:
    rng = random.Random(9)
    for kind in (*toolkits.KINDS, *(toolkits.own_kind(rng) for _ in range(20))):
        assert not {*map(normalised, kind.asks)} & {*map(normalised, kind.unseen_asks)}


def test_a_chat_calls_only_what_it_offers_and_answers_every_call() -> None:
    rng = random.Random(6)
    num_calls = num_without = 0
    for _ in range(300):
        messages, tools = tooling.chat(rng, is_thinking=False)
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        assert 1 <= len(offered) == len(tools) <= 3
        for at, (role, content) in enumerate(messages):
            if role != "assistant":
                continue
            calls = [json.loads(call) for call in re.findall(r"<tool_call>\n(.*)\n</tool_call>", content)]
            for call in calls:
                assert list(call["arguments"]) == offered[call["name"]]["required"]
            assert [role for role, _ in messages[at + 1 : at + 1 + len(calls)]] == ["tool"] * len(calls)
            num_calls += len(calls)
            num_without += not calls and messages[at - 1][0] == "user"
    assert num_calls > 300
    assert num_without > 80


def test_a_drill_asks_once_for_each_tool_and_sometimes_for_one_that_it_has_not() -> None:
    rng = random.Random(7)
    num_without = 0
    for _ in range(100):
        messages, tools = tooling.drill(rng)
        replies = [messages[at + 1][1] for at, (role, _) in enumerate(messages) if role == "user"]
        called = [json.loads(call)["name"] for reply in replies for call in re.findall(r"<tool_call>\n(.*)\n", reply)]
        assert sorted(called) == sorted(tool["function"]["name"] for tool in tools)
        assert 1 <= len(tools) <= 4
        num_without += len(replies) - len(called)
        assert {reply for reply in replies if "<tool_call>" not in reply} <= {chatter.FALLBACK}
    assert num_without > 50


def test_which_tool_is_called_weighs_more_than_the_rest_of_the_call() -> None:
    call = '<tool_call>\n{"name": "%s", "arguments": {"city": "Oslo"}}\n</tool_call>'
    chat = [("user", "?"), ("assistant", f"{call % 'weather'}\n{call % 'clock'}"), ("tool", "rain"), ("tool", "8:00")]
    chat += [("assistant", "Rain."), ("user", "!"), ("assistant", chatter.FALLBACK)]
    tools = [toolkits.offer(random.Random(1), toolkits.KINDS[0]).as_openai()]
    document = corpus.render_chat(chat, None, tools)
    [weight] = {weight for _, weight in document.pieces} - {0, 1}
    heavy = [piece for piece, each in document.pieces if each == weight]
    assert heavy == ["<tool_call>", "weather", "<tool_call>", "clock", "Sorry"]
    trained = "".join(piece for piece, weight in document.pieces if weight)
    assert trained == "".join(f"{content}{corpus.END}" for role, content in chat if role == "assistant")
    assert {weight for _, weight in corpus.render_chat(chat, None).pieces} == {0, 1}


def test_of_a_beginning_only_the_choice_is_trained() -> None:
    rng = random.Random(10)
    num_calls = num_without = 0
    for _ in range(100):
        turns, tools = tooling.beginnings(rng)
        names = {tool["function"]["name"] for tool in tools}
        for _, begun in turns:
            num_without += begun == "Sorry"
            num_calls += begun.removeprefix('<tool_call>\n{"name": "') in names
        chat = [message for turn in turns for message in zip(("user", "assistant"), turn, strict=True)]
        document = corpus.render_chat(chat, None, tools, ends=False)
        assert "".join(piece for piece, weight in document.pieces if weight) == "".join(begun for _, begun in turns)
    assert num_without > 120
    assert num_calls > 120


def test_more_words_are_spelt_where_a_mix_wants_them_and_none_of_the_held_out_ones() -> None:
    def spelt(weights: tuple[int, int, int, int]) -> set[str]:
        rng = random.Random(11)
        texts = ("".join(piece for piece, _ in drills.plain_drill(rng, weights)) for _ in range(300))
        return {word for text in texts for word in re.findall(r"(\w+): \w-\w", text)}

    known = set(words.LETTER_WORDS)
    more = {word.lower() for word in (*words.CITIES, *words.NAMES)} - known
    assert len(spelt((0, 0, 0, 1)) & more) > 20
    assert not spelt((0, 1, 0, 0)) & more
    assert not spelt((0, 0, 0, 1)) & set(words.UNSEEN_WORDS)


def test_a_thought_has_a_few_words() -> None:
    rng = random.Random(8)
    for _ in range(500):
        _, thought, reply = thoughts.lesson(rng, {})
        assert 2 <= len(thought.split()) <= 12
        assert reply


def test_what_lies_between_telling_a_name_and_asking_for_it_does_not_tell_another() -> None:
    rng = random.Random(3)
    for _ in range(50):
        question = questions.names_far(rng)
        told = [content for role, content in question.messages if role == "assistant" and "Nice to meet you" in content]
        assert len(told) == 1
        assert told[0] == f"Nice to meet you, {question.reply.removeprefix('Your name is ').removesuffix('.')}!"
