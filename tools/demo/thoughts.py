"""Thoughts of a few words before an answer: what the question is about, never more than the answer needs."""

from __future__ import annotations

import random

from novainfer.fsm.parsing.formats import CLOSE_THINK, OPEN_THINK
from tools.demo import chatter, lessons, memory
from tools.demo.facts import Relation
from tools.demo.wordings import fill, sentence

__all__ = ["lesson", "of_fact", "of_sum", "thoughtful", "unknown"]

Lesson = tuple[str, str, str]
_SUMS = {"+": "A sum", "-": "A difference", "*": "A product"}


def thoughtful(thought: str, reply: str) -> str:
    """The reply of a model that was asked to think, its thought in front, as the chat template writes it."""
    return f"{OPEN_THINK}\n{thought}\n{CLOSE_THINK}\n\n{reply}"


def of_sum(reply: str) -> str:
    """The thought before a reply that is an equation."""
    asked = reply.split(" =")[0]
    return f"{_SUMS[asked.split(' ')[1]]}: {asked}."


def of_fact(relation: Relation, x: str) -> str:
    """The thought before a fact of `x`."""
    return sentence(f"{fill(relation.nouns[0], x=x)}.")


def sums(rng: random.Random) -> Lesson:
    """A sum, and the thought that finds out which."""
    question, reply = lessons.sums(rng)
    return question, of_sum(reply), reply


def fact(rng: random.Random) -> Lesson:
    """A fact, and the thought that names it."""
    question, reply, relation = lessons.fact(rng)
    x = next(x for x, y in relation.pairs if lessons.fact_answer(relation, x, y) == reply)
    return question, of_fact(relation, x), reply


def spelling(rng: random.Random) -> Lesson:
    """Letters of a word, and the thought that finds the word."""
    question, reply = lessons.spelling(rng)
    word = reply.split(" of ")[1].split(" is ")[0] if reply.startswith("The ") else reply.split(":")[0]
    return question, f"Letters of {word}.", reply


def lesson(rng: random.Random, known: dict[str, str], *, has_sums: bool = True) -> Lesson:
    """A question, a thought and the reply; `known` carries what the user has told so far."""
    if known and rng.random() < 0.3:
        question, reply = memory.recall(rng, known)
        told = not reply.startswith("You have not told")
        return question, "The user told me." if told else "The user did not tell me.", reply
    draw = rng.random()
    if draw < 0.30:
        return sums(rng) if has_sums else fact(rng)
    if draw < 0.52:
        return fact(rng)
    if draw < 0.62:
        return spelling(rng)
    if draw < 0.70:
        question, reply = lessons.counting(rng)
        return question, "Things in order.", reply
    if draw < 0.76:
        question, reply = lessons.json_object(rng)
        return question, "A JSON value.", reply
    if draw < 0.84:
        question, reply = memory.tell(rng, known)
        return question, "I will remember it.", reply
    if draw < 0.90:
        question, reply = chatter.greeting(rng)
        return question, "I am polite.", reply
    if draw < 0.97:
        question, reply = chatter.talk(rng)
        return question, "Small talk.", reply
    question, reply = lessons.tale(rng)
    return question, "A story.", reply


def unknown(rng: random.Random) -> Lesson:
    """A question outside everything, and the thought that says so."""
    question, reply = chatter.unknown(rng)
    return question, "I do not know that.", reply
