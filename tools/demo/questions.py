"""The held-out questions: operand pairs, wordings, names, words and ranges that training never draws.

Each question is a conversation so far and the exact reply that counts as right; `unseen` names what about it is new.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo import arithmetic, corpus, lessons, memory
from tools.demo.morefacts import ALL_RELATIONS
from tools.demo.wordings import FRAMES, HELD_OUT_FRAMES, fill, frame, sentence
from tools.demo.words import UNSEEN_WORDS, made_up_word

__all__ = ["GROUPS", "Question"]


@dataclass(frozen=True)
class Question:
    """Messages as (role, content) pairs, the last one the user's, and the reply that is right."""

    messages: tuple[tuple[str, str], ...]
    reply: str
    unseen: str


def _single(user: str, reply: str, unseen: str) -> Question:
    return Question((("user", user),), reply, unseen)


def _sum(rng: random.Random, asks: dict[str, tuple[str, ...]]) -> Question:
    operator = rng.choice("+-")
    a, b = arithmetic.sum_pair(rng, operator, unseen=True)
    user = fill(rng.choice(asks[operator]), a=a, b=b)
    return _single(user, f"{arithmetic.equation(operator, a, b)}.", "plus" if operator == "+" else "minus")


def sums(rng: random.Random) -> Question:
    """A sum or difference of a pair of numbers that was never trained, in a trained wording."""
    return _sum(rng, arithmetic.SUM_ASKS)


def sums_reworded(rng: random.Random) -> Question:
    """The same in a wording that was never trained either."""
    return _sum(rng, arithmetic.UNSEEN_SUM_ASKS)


def products(rng: random.Random) -> Question:
    """A product of the small table; all of its pairs are trained, only the wording is new."""
    a, b = arithmetic.sum_pair(rng, "*")
    return _single(
        fill(rng.choice(arithmetic.UNSEEN_SUM_ASKS["*"]), a=a, b=b), f"{arithmetic.equation('*', a, b)}.", "wording"
    )


def facts(rng: random.Random) -> Question:
    """A fact asked in a wording that was never trained: an unseen frame, noun phrase or question."""
    relation = rng.choice(ALL_RELATIONS)
    x, y = rng.choice(relation.pairs)
    kind = rng.choice(("frame", "noun phrase", "question"))
    if kind == "frame":
        template = frame(rng.choice(HELD_OUT_FRAMES), rng.choice(relation.nouns))
    elif kind == "noun phrase":
        template = frame(rng.choice(FRAMES), rng.choice(relation.held_out_nouns))
    else:
        template = rng.choice(relation.held_out_asks)
    return _single(sentence(fill(template, x=x)), lessons.fact_answer(relation, x, y), kind)


def _told_before(
    rng: random.Random, attribute: memory.Attribute, num_between: int, *, asks: tuple[str, ...]
) -> Question:
    value = memory.value_of(rng, attribute.name, unseen=True)
    kind = rng.choice(("dog", "cat", "rabbit"))
    tells = attribute.tells + attribute.held_out_tells if attribute.name == "name" else attribute.tells
    told = fill(rng.choice(tells), v=value, k=kind)
    reply = fill(attribute.reply, v=value, k=kind)
    # What lies between may not tell the same thing again.
    known = {attribute.name: value, "kind": kind}
    between: list[tuple[str, str]] = []
    while len(between) < num_between:
        trial = dict(known)
        turns = corpus.turns_of(rng, 1, trial)
        if trial[attribute.name] == value and trial["kind"] == kind:
            known = trial
            between += turns
    messages = [("user", told), ("assistant", reply[:1].upper() + reply[1:])]
    for user, assistant in between:
        messages += [("user", user), ("assistant", assistant)]
    messages.append(("user", fill(rng.choice(asks), k=kind)))
    distance = "next turn" if not num_between else "1-4 turns later" if num_between < 5 else "25-35 turns later"
    return Question(tuple(messages), fill(attribute.answer, v=value, k=kind), distance)


def names(rng: random.Random) -> Question:
    """A name that no training text has, told 0 to 4 turns before, asked for in a wording never trained."""
    attribute = memory.ATTRIBUTES[0]
    return _told_before(rng, attribute, rng.choice((0, 1, 2, 4)), asks=attribute.held_out_asks)


def names_far(rng: random.Random) -> Question:
    """The same with 25 to 35 turns in between, some 800 to 1,800 tokens."""
    attribute = memory.ATTRIBUTES[0]
    return _told_before(rng, attribute, rng.randint(25, 35), asks=attribute.held_out_asks)


def facts_far(rng: random.Random) -> Question:
    """A fact in an unseen wording at the end of a chat of 25 to 35 turns."""
    question = facts(rng)
    before = corpus.turns_of(rng, rng.randint(25, 35), {})
    messages = [(role, content) for turn in before for role, content in zip(("user", "assistant"), turn, strict=True)]
    return Question((*messages, *question.messages), question.reply, question.unseen)


def details(rng: random.Random) -> Question:
    """Colour, age, pet, word and the like told 0 to 4 turns before; the wording of the question is new."""
    attribute = rng.choice(memory.ATTRIBUTES[1:])
    return _told_before(rng, attribute, rng.choice((0, 1, 2, 4)), asks=attribute.held_out_asks)


def spelling(rng: random.Random) -> Question:
    """A word that was never spelt in training, half of them made up; spelt, counted or taken apart."""
    made_up = rng.random() < 0.5
    word = made_up_word(rng, unseen=True) if made_up else rng.choice(UNSEEN_WORDS)
    if rng.random() < 0.5:
        return _single(fill(rng.choice(lessons.UNSEEN_SPELL), q=word), lessons.spell_answer(word, "spell"), "spell")
    return _single(f"How many letters does the word {word} have?", lessons.spell_answer(word, "count"), "count letters")


def counting(rng: random.Random) -> Question:
    """Counting between two numbers whose pair was never trained."""
    first, last = lessons.count_range(rng, unseen=True)
    step = 1 if first < last else -1
    numbers = ", ".join(str(n) for n in range(first, last + step, step))
    return _single(f"Count from {first} to {last}.", f"{numbers}.", "up" if step == 1 else "down")


def json_objects(rng: random.Random) -> Question:
    """A JSON object with values drawn anew and an unseen name if it has one."""
    record = lessons.json_record(rng, unseen=True)
    user, _ = lessons.json_object(rng, record)
    return _single(user, json.dumps(record, ensure_ascii=False), f"{len(record)} fields")


GROUPS: dict[str, Callable[[random.Random], Question]] = {
    "sums": sums,
    "sums_reworded": sums_reworded,
    "products": products,
    "facts": facts,
    "names": names,
    "names_far": names_far,
    "facts_far": facts_far,
    "details": details,
    "spelling": spelling,
    "counting": counting,
    "json": json_objects,
}
