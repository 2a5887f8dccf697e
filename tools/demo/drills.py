"""Dense practice: many sums, spellings, counts or recalls in one document, with loss on the results only.

A chat carries one sum in some thirty tokens and a drill one in eleven. With chats alone, sums were still guessed after
six million tokens; drills join the corpus when replies have taken shape (see `batches.DRILLS`).
"""

from __future__ import annotations

import random

from tools.demo import arithmetic, lessons, memory
from tools.demo.facts import Relation
from tools.demo.morefacts import ALL_RELATIONS
from tools.demo.wordings import fill, lines, say, sentence
from tools.demo.words import (
    CITIES,
    FOODS,
    HOBBIES,
    JOBS,
    LETTER_WORDS,
    NAMES,
    NOUNS,
    PETS,
    UNSEEN_WORDS,
    made_up_name,
    made_up_word,
    word_list,
)

__all__ = ["objects", "plain_drill", "recalls", "scrambles"]

Pieces = list[tuple[str, bool]]

_MORE_ASKS = lines("""
[Do you recall|Please recall|Recall|Try to recall|Say again|Repeat|Remind me of|Do you still know] {a}[?|.]
[What did I say|What do you know] about {a}?
[I forgot|I'd like to know|Please give me|I need|Give me back] {a}.
[And|So|Now|Then|Okay, now] {a}?
[Once more:|Tell me again,|So,] what [is|was] {a}?
[Say|Write|Show me] {a} [again|once more|, please].
""")
_CALLED = {
    "name": ("my name", "the name I gave you", "my own name"),
    "colour": ("my favourite colour", "the colour I like"),
    "age": ("my age", "how old I am"),
    "city": ("my city", "where I live", "my home"),
    "pet": ("the name of my {k}", "my {k}'s name"),
    "food": ("my favourite food", "the food I like"),
    "hobby": ("my hobby", "my favourite hobby"),
    "job": ("my job", "my profession"),
    "word": ("the secret word", "the word", "the word from before"),
}


# Words of all other lessons: a word never spelt before is spelt by its tokens, and these have more of them.
_WORDS = tuple(
    sorted(
        {
            word
            for text in (
                *(*CITIES, *FOODS, *HOBBIES, *JOBS, *NAMES, *NOUNS, *PETS),
                *(text for relation in ALL_RELATIONS for pair in relation.pairs for text in pair),
            )
            for word in text.lower().split()
            if len(word) > 2 and word.isascii() and word.isalpha()
        }.difference(UNSEEN_WORDS)
    )
)


def _equations(rng: random.Random) -> Pieces:
    pieces: Pieces = []
    for _ in range(rng.randint(15, 45)):
        operator = rng.choice("+++---*")
        question, result = arithmetic.equation(operator, *arithmetic.sum_pair(rng, operator)).split(" =")
        pieces += [(f"{question} =", False), (f"{result}.", True), ("\n", False)]
    return pieces


def _spellings(rng: random.Random) -> Pieces:
    return _spelt(rng, LETTER_WORDS, ("spell", "spell", "count"))


def _more_spellings(rng: random.Random) -> Pieces:
    return _spelt(rng, rng.choice((LETTER_WORDS, _WORDS)), ("spell", "count"))


def _spelt(rng: random.Random, words: tuple[str, ...], kinds: tuple[str, ...]) -> Pieces:
    pieces: Pieces = []
    for _ in range(rng.randint(10, 25)):
        word = made_up_word(rng) if rng.random() < 0.5 else rng.choice(words)
        if rng.random() < 0.15:
            word = made_up_name(rng)
        answer = lessons.spell_answer(word, rng.choice(kinds)).removeprefix(word)
        pieces += [(rng.choice((word, f"Spell {word}.\n{word}", f'"{word}"\n{word}')), False), (answer, True)]
        pieces.append(("\n", False))
    return pieces


def _counts(rng: random.Random) -> Pieces:
    pieces: Pieces = []
    for _ in range(rng.randint(6, 14)):
        first, last = lessons.count_range(rng)
        while abs(first - last) > 15:
            first, last = lessons.count_range(rng)
        step = 1 if first < last else -1
        numbers = ", ".join(str(n) for n in range(first, last + step, step))
        pieces += [(f"{rng.choice(('Count from', 'From', 'Numbers from'))} {first} to {last}:\n", False)]
        pieces += [(f"{numbers}.", True), ("\n", False)]
    return pieces


def recalls(rng: random.Random, known: dict[str, str]) -> list[tuple[str, str]]:
    """Turns in which much is told, and then asked for in more ways than elsewhere."""
    turns = [memory.tell(rng, known) for _ in range(rng.randint(1, 5))]
    for _ in range(rng.randint(1, 6)):
        attribute = rng.choice(memory.ATTRIBUTES)
        if attribute.name not in known and rng.random() < 0.7:
            continue
        kind = known.get("kind") or rng.choice(PETS)
        called = fill(rng.choice(_CALLED[attribute.name]), k=kind)
        user = say(rng, _MORE_ASKS, NOUNS, a=called)
        value = known.get(attribute.name)
        template = attribute.unknown if value is None else attribute.answer
        turns.append((user, fill(template, v=value, k=kind)))
        if rng.random() < 0.4:
            turns.append(rng.choice((lessons.sums, lessons.json_object, lessons.spelling))(rng))
    turns.append(memory.recall(rng, known))
    return turns


_FILLERS = word_list("""
a about actually again all also am and answer any are ask be because but can clear could curious do does ever
exactly find for friend from fun get give go good guess have hear help here how I if in is it just kind know
learn let like look maybe me mean might mind more must my need no now of often ok on one or order other our
own please point possible quick quite rather really remember right said say see should show simple so some
someone something sure talk tell test thank that the then there think this time to too try us very want was we
well what when which who why will with wonder wondering word would write yes you your
""")


def _filler(rng: random.Random, num_max: int) -> str:
    return " ".join(rng.choice(_FILLERS) for _ in range(rng.randint(0, num_max)))


def _scrambled(rng: random.Random, relation: Relation) -> tuple[str, str]:
    """A fact asked among words that mean nothing, so that what is asked and of what must be enough."""
    x, y = rng.choice(relation.pairs)
    if rng.random() < 0.6:
        question = (
            f"{_filler(rng, 5)} {rng.choice(relation.nouns)}{rng.choice(('', ',', ' -', '.', ':'))} {_filler(rng, 4)}"
        )
    else:
        words = rng.choice(relation.asks).split(" ")
        for _ in range(rng.randint(0, 2)):
            words.insert(rng.randint(0, len(words)), rng.choice(_FILLERS))
        question = f"{_filler(rng, 2)} {' '.join(words)} {_filler(rng, 2)}"
    question = sentence(fill(question, x=x).strip(" ,-:.?")) + rng.choice(("?", "?", ".", ""))
    return question, lessons.fact_answer(relation, x, y)


def scrambles(rng: random.Random) -> list[tuple[str, str]]:
    """Turns of facts asked in broken sentences."""
    return [_scrambled(rng, rng.choice(ALL_RELATIONS)) for _ in range(rng.randint(2, 12))]


def objects(rng: random.Random) -> list[tuple[str, str]]:
    """Turns of JSON objects."""
    return [lessons.json_object(rng) for _ in range(rng.randint(2, 6))]


def plain_drill(rng: random.Random, weights: tuple[int, int, int, int]) -> Pieces:
    """Lines of sums, spellings, counts or spellings of more words (drawn so), as (piece, is trained) pairs."""
    return rng.choices((_equations, _spellings, _counts, _more_spellings), weights=weights)[0](rng)
