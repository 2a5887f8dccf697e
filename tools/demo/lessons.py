"""The skills: each lesson returns one question and the one answer that is right for it."""

from __future__ import annotations

import json
import random

from tools.demo import arithmetic
from tools.demo.facts import Relation
from tools.demo.morefacts import ALL_RELATIONS
from tools.demo.stories import STORY_HEROES, story
from tools.demo.wordings import (
    FRAMES,
    fill,
    frame,
    is_held_out,
    joined,
    lines,
    roughen,
    say,
    sentence,
    surround,
)
from tools.demo.words import (
    CITIES,
    COLOURS,
    FOODS,
    HOBBIES,
    JOBS,
    LETTER_WORDS,
    NAMES,
    NOUNS,
    PETS,
    foreign_text,
    made_up_name,
    made_up_word,
)

__all__ = [
    "count_range",
    "counting",
    "echo",
    "fact",
    "fact_answer",
    "follow_up",
    "is_held_out_range",
    "json_object",
    "json_record",
    "spell_answer",
    "spelling",
    "sums",
    "tale",
]

Turn = tuple[str, str]


def sums(rng: random.Random) -> Turn:
    """A sum, a difference, a product, or a sum told as a story."""
    draw = rng.random()
    if draw < 0.12:
        question, answer = arithmetic.word_problem(rng)
        return surround(rng, question, NOUNS), answer
    operator = "+" if draw < 0.5 else "-" if draw < 0.85 else "*"
    a, b = arithmetic.sum_pair(rng, operator)
    return say(rng, arithmetic.SUM_ASKS[operator], NOUNS, a=a, b=b), f"{arithmetic.equation(operator, a, b)}."


def fact_answer(relation: Relation, x: str, y: str) -> str:
    """The one sentence in which a fact is answered."""
    return sentence(fill(relation.answer, x=x, y=y))


def _fact_question(rng: random.Random, relation: Relation, x: str) -> str:
    if rng.random() < 0.6:
        template = roughen(rng, frame(rng.choice(FRAMES), rng.choice(relation.nouns)))
    else:
        template = roughen(rng, rng.choice(relation.asks))
    question = sentence(fill(template, x=x)) if template[:1].isupper() or template[:1] == "{" else fill(template, x=x)
    draw = rng.random()
    question = question.lower() if draw < 0.10 else question.upper() if draw < 0.11 else question
    return surround(rng, question, NOUNS)


def fact(rng: random.Random) -> tuple[str, str, Relation]:
    """A question for one fact of the table, its answer, and the relation (for a question that follows up)."""
    # Between equal chances for each relation and for each pair: large relations need more, small ones some.
    relation = rng.choices(ALL_RELATIONS, weights=[len(r.pairs) ** 0.7 for r in ALL_RELATIONS])[0]
    x, y = rng.choice(relation.pairs)
    return _fact_question(rng, relation, x), fact_answer(relation, x, y), relation


_FOLLOW_UPS = lines("""
[And|What about|How about|And what about|Now|Same for|And for|Also|And of] {x}[?|, please.]
And the same for {x}?
{x}?
What is it for {x}?
""")


def follow_up(rng: random.Random, relation: Relation) -> Turn:
    """`And {x}?`: a question that can only be understood from the turn before."""
    x, y = rng.choice(relation.pairs)
    return sentence(fill(roughen(rng, rng.choice(_FOLLOW_UPS)), x=x)), fact_answer(relation, x, y)


_SPELL = lines("""
[Spell|Please spell|Can you spell|How do you spell|Could you spell|Spell out|How is|Spell me|Nova, spell] {q}[?|.|]
[Spell|Please spell|Can you spell|How do you spell|Spell out] the word {q}[?|.|]
[What are|Give me|List|Show me|Write|Name] the letters [of|in] [the word|] {q}[.|?|]
[Write|Say] {q} letter by letter[.|]
{q} letter by letter[, please|][.|]
spell {q}
""")
_LETTER_COUNT = lines("""
How many letters [are in|does|has|are there in] [the word|] {q}[? have?|?]
[Count|Please count|Can you count] the letters [of|in] [the word|] {q}[.|?|]
[What is|Tell me] the number of letters in [the word|] {q}[?|.]
How long is the word {q}?
""")
_FIRST = lines(
    """
[What is|What's|Tell me|Give me|Which is] the first letter [of|in] [the word|] {q}[?|.]
[What|Which] letter does {q} [start|begin] with?
"""
)
_LAST = lines(
    """
[What is|What's|Tell me|Give me|Which is] the last letter [of|in] [the word|] {q}[?|.]
[What|Which] letter does {q} end with?
"""
)
_BACK = lines(
    """
[Spell|Write|Say|Please spell|Can you spell] [the word|] {q} [backwards|backward|in reverse|from the end][.|]
Reverse [the word|] {q}[.|]
"""
)
UNSEEN_SPELL = (
    "I don't know how to spell {q}.",
    "Which letters does the word {q} have?",
    "Take the word {q} and spell it.",
)


def spell_answer(word: str, kind: str) -> str:
    """The reply to a spelling question: `spell`, `count`, `first`, `last` or `back`."""
    letters = "-".join(word)
    if kind == "spell":
        return f"{word}: {letters}"
    if kind == "count":
        return f"{word}: {letters}. It has {len(word)} letters."
    if kind == "back":
        return f"{word}: {letters}. Backwards: {'-'.join(reversed(word))}"
    return f"The {kind} letter of {word} is {word[0 if kind == 'first' else -1]}."


def spelling(rng: random.Random) -> Turn:
    """Spelling a word, counting its letters, its first and last letter, or spelling it backwards."""
    word = made_up_word(rng) if rng.random() < 0.35 else rng.choice(LETTER_WORDS)
    kind = rng.choices(("spell", "count", "first", "last", "back"), weights=(5, 3, 1, 1, 1))[0]
    asks = {"spell": _SPELL, "count": _LETTER_COUNT, "first": _FIRST, "last": _LAST, "back": _BACK}[kind]
    quoted = rng.choice((word, word, f'"{word}"', f"'{word}'", word.capitalize()))
    return say(rng, asks, NOUNS, q=quoted), spell_answer(word, kind)


_COUNT = lines("""
[Count|Please count|Can you count|Nova, count|Now count] from {a} [to|up to|until|till] {b}[.|?|]
count {a} to {b}
[Count|List|Write|Say|Give me|Show me] [all|] the numbers [from|between] {a} [to|and] {b}[.|]
[Numbers|The numbers] from {a} to {b}[, please|][.|]
""")
_COUNT_TO = lines("[Count|Please count|Can you count] [up|] to {b}[.|?|]\n[Count|Please count] until {b}.")
_ITEMS = lines("""
How many [things|items|words] are [in this list|here|there][:| ->] {l}[?|]
[Count|Please count|Can you count] [these|the|these words|the things|the items][:|] {l}[.|]
Count: {l}
{l}. How many is that?
I have {l}. How many things [do I have|is that]?
""")
_COMPARE = lines(
    """
[Which|What] [is|number is] [larger|bigger|greater], {a} or {b}?
Is {a} or {b} [larger|bigger|greater]?
[Tell me|Say] the [larger|bigger] [number|one] of {a} and {b}.
"""
)
_SORT = lines(
    """
[Sort|Please sort|Order] [these numbers|the numbers|][:|] {l}[.|]
Put {l} in order.
[Can you|Please] sort {l}[?|.]
"""
)
_SEQUENCES = (
    (lines("""
[Say|Write|List|Tell me|Give me|What is|Recite] the [alphabet|abc|ABC][.|]
All the letters of the alphabet.
"""), joined("abcdefghijklmnopqrstuvwxyz")),
    (lines("""
[Say|List|Write|Tell me|Give me|Name|What are] [all|] the days of the week[.|?]
"""), "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."),
    (lines("[Say|List|Write|Tell me|Give me|Name|What are] [all|] the [months|months of the year|twelve months][.|?]"),
     "January, February, March, April, May, June, July, August, September, October, November, December."),
    (lines("""
[Say|List|Write|Tell me|Give me|Name|What are] the [four|] seasons[.|?]
"""), "Spring, summer, autumn, winter."),
    (lines("""
[Say|List|Write|Tell me|Give me|Name|What are] the [eight|] planets[.|?]
"""), "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune."),
    (lines("""
[Say|List|Write|Tell me|Give me|Name|What are] the colours of the rainbow[.|?]
"""), "Red, orange, yellow, green, blue, indigo, violet."),
)  # fmt: skip


def is_held_out_range(first: int, last: int) -> bool:
    """Whether counting from `first` to `last` is kept out of training."""
    return is_held_out(f"range {first} {last}", 10)


def count_range(rng: random.Random, *, unseen: bool = False) -> tuple[int, int]:
    """Two different numbers of 0..99, mostly near each other; a quarter of them count down."""
    while True:
        first = rng.randint(0, 95)
        last = min(99, first + rng.randint(1, rng.choice((8, 12, 12, 30, 30, 99))))
        if rng.random() < 0.25:
            first, last = last, first
        if first != last and is_held_out_range(first, last) is unseen:
            return first, last


def _numbers(first: int, last: int) -> str:
    step = 1 if last > first else -1
    return joined(range(first, last + step, step))


def counting(rng: random.Random) -> Turn:
    """Counting up and down, counting things, comparing and sorting numbers, and well-known sequences."""
    draw = rng.random()
    if draw < 0.36:
        first, last = count_range(rng)
        return say(rng, _COUNT, NOUNS, a=first, b=last), f"{_numbers(first, last)}."
    if draw < 0.46:
        last = rng.randint(2, 30)
        while is_held_out_range(1, last):
            last = rng.randint(2, 30)
        return say(rng, _COUNT_TO, NOUNS, b=last), f"{_numbers(1, last)}."
    if draw < 0.66:
        listed = rng.sample(rng.choice((NOUNS, FOODS, COLOURS, NAMES, PETS)), rng.randint(2, 8))
        numbered = ", ".join(f"{i} {item}" for i, item in enumerate(listed, 1))
        return say(rng, _ITEMS, NOUNS, l=joined(listed)), f"{numbered}. That makes {len(listed)}."
    if draw < 0.76:
        a, b = rng.sample(range(100), 2)
        return say(rng, _COMPARE, NOUNS, a=a, b=b), f"{max(a, b)} is larger than {min(a, b)}."
    if draw < 0.86:
        values = rng.sample(range(100), rng.randint(3, 5))
        return say(rng, _SORT, NOUNS, l=joined(values)), f"{joined(sorted(values))}."
    asks, answer = rng.choice(_SEQUENCES)
    return say(rng, asks, NOUNS), answer


_JSON = lines("""
[Give me|Write|Make|Return|Create|Generate|Output|Show me|I need] [a|one] [JSON object|JSON|json|small JSON \
object|JSON record] [with|for|containing] {d}[.|]
[Please|Can you|Now] [give me|write|make|return|create] [a|one] [JSON object|JSON|json] [with|for|containing] \
{d}[.|]
JSON [with|:|object:|for] {d}[.|]
[Put|Write|Turn|Convert] [this|] [into|as|to] JSON: {d}[.|]
{d} as JSON[, please|][.|]
""")
_JSON_LISTS = lines(
    """
[Give me|Write|Make|Return|Create] a JSON [list|array] of {l}[.|]
JSON [list|array]: {l}[.|]
Write {l} as a JSON [list|array][.|]
"""
)
_FIELDS = ("name", "age", "city", "colour", "pet", "food", "job", "hobby", "count", "price", "active")


def json_record(rng: random.Random, *, unseen: bool = False) -> dict[str, str | int | bool]:
    """A record of one to five fields with drawn values; names are unseen ones on request."""
    record: dict[str, str | int | bool] = {}
    for field in rng.sample(_FIELDS, rng.choice((1, 2, 2, 3, 3, 4, 5))):
        if field == "name":
            record[field] = made_up_name(rng, unseen=unseen) if unseen or rng.random() < 0.4 else rng.choice(NAMES)
        elif field in ("age", "count", "price"):
            record[field] = rng.randint(0, 99)
        elif field == "active":
            record[field] = rng.random() < 0.5
        else:
            values = {"city": CITIES, "colour": COLOURS, "pet": PETS, "food": FOODS, "job": JOBS, "hobby": HOBBIES}
            record[field] = rng.choice(values[field])
    return record


def json_object(rng: random.Random, record: dict[str, str | int | bool] | None = None) -> Turn:
    """A record described in words, and the record as JSON."""
    if record is None and rng.random() < 0.15:
        listed = rng.sample(rng.choice((COLOURS, FOODS, PETS, NAMES)), rng.randint(2, 5))
        return say(rng, _JSON_LISTS, NOUNS, l=joined(listed)), json.dumps(listed, ensure_ascii=False)
    if record is None:
        record = json_record(rng)
    style = rng.choice(("{k} {v}", "{k} {v}", "{k}: {v}", "{k} = {v}", "the {k} {v}"))
    parts = [fill(style, k=key, v=json.dumps(value) if value in (True, False) and isinstance(value, bool) else value)
             for key, value in record.items()]  # fmt: skip
    described = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}{rng.choice((' and ', ', '))}{parts[-1]}"
    return say(rng, _JSON, NOUNS, d=described), json.dumps(record, ensure_ascii=False)


_TALES = lines("""
[Tell|Write|Read|Give] [me|us] a [short|nice|little|good|] story[.|!|, please.|]
[Can you|Could you|Please|Will you] [tell|write] [me|] a [short|nice|] story[?|.]
[I want|I would like|I'd like|I need] [to hear|] a [bedtime|short|] story.
A story[, please|][.|]
tell me a story
[Do you know|Make up|Invent] a [good|] story[?|.]
""")
_TALES_ABOUT = lines("""
[Tell|Write|Read|Give] [me|us] a [short|nice|little|] story about a {h}[.|!|, please.|]
[Can you|Could you|Please|Will you] [tell|write] [me|] a [short|nice|] story about a {h}[?|.]
[I want|I would like|I'd like] [to hear|] a [bedtime|short|] story [about|with] a {h}.
[A story about|Story about|Something about] a {h}[, please|][.|]
Do you know a story about a {h}?
""")
_TALES_NAMED = lines("""
[Tell|Write] [me|] a [short|nice|] story about a {h} [named|called] {v}[.|, please.|]
[Can you|Please] [tell|write] [me|] a [short|] story about a {h} [named|called] {v}[?|.]
""")


def tale(rng: random.Random) -> Turn:
    """A wish for a story, with or without a hero and a name, and the story."""
    draw = rng.random()
    hero = rng.choice(STORY_HEROES if rng.random() < 0.8 else NOUNS)
    name = made_up_name(rng) if rng.random() < 0.3 else rng.choice(NAMES)
    if draw < 0.35:
        return say(rng, _TALES, NOUNS), story(rng)
    if draw < 0.75:
        return say(rng, _TALES_ABOUT, NOUNS, h=hero), story(rng, hero)
    return say(rng, _TALES_NAMED, NOUNS, h=hero, v=name), story(rng, hero, name)


_ECHO = lines("""
[Repeat|Say|Write|Echo|Copy] [after me|this|]: {t}
[Please|Can you] [repeat|say|write|echo|copy] [after me|this|]: {t}
Repeat after me: {t}
""")
_AGAIN = lines(
    """
[Say that again|Repeat that|Again, please|Once more|Pardon|What did you say|Can you repeat that|Please repeat \
your answer|Come again|Repeat your last answer][.|?|]
"""
)


def echo(rng: random.Random, last_reply: str | None = None) -> Turn:
    """A text to be repeated: words, numbers, other scripts, or the reply before."""
    if last_reply is not None and len(last_reply) < 120 and rng.random() < 0.35:
        return roughen(rng, rng.choice(_AGAIN)), last_reply
    draw = rng.random()
    if draw < 0.3:
        text = foreign_text(rng)
    elif draw < 0.5:
        text = " ".join(made_up_word(rng) for _ in range(rng.randint(1, 5)))
    elif draw < 0.65:
        text = " ".join(str(rng.randint(0, 9999)) for _ in range(rng.randint(1, 4)))
    else:
        text = " ".join(rng.choice(LETTER_WORDS) for _ in range(rng.randint(1, 7)))
    return fill(rng.choice(_ECHO), t=text), text
