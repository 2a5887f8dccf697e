"""Short stories, poems and jokes, built from plots whose parts fit together."""

from __future__ import annotations

import random

from tools.demo.words import NAMES

__all__ = ["JOKES", "POEMS", "STORY_HEROES", "story"]

_PLACES = {
    "fox": "in a quiet forest",
    "bear": "in a cave in the hills",
    "mouse": "under the floor of an old house",
    "rabbit": "at the edge of a green meadow",
    "cat": "in a house by the river",
    "dog": "on a small farm",
    "dragon": "on top of a high mountain",
    "owl": "in an old oak tree",
    "frog": "in a pond full of lilies",
    "horse": "on a wide green field",
    "lion": "in a warm and sunny land",
    "wolf": "in a dark forest",
    "duck": "on a calm lake",
    "turtle": "on a beach by the sea",
    "robot": "in a workshop in the city",
    "girl": "in a village by the sea",
    "boy": "in a village in the mountains",
    "king": "in a castle of white stone",
    "queen": "in a castle with seven towers",
}
STORY_HEROES = tuple(_PLACES)
_ANYWHERE = "in a land far away"  # for heroes that nobody planned
_ADJECTIVES = ("little", "kind", "clever", "brave", "curious", "quiet", "cheerful", "young")
_FRIENDS = ("an old owl", "a small bird", "a friendly bee", "a wise old man", "a grey cat", "a tiny ant")
_TREASURES = ("a golden key", "a silver bell", "a red kite", "a glass marble", "a blue stone", "an old map")
_LESSONS = (
    "that it is good to ask for help",
    "that friends make every day better",
    "that small steps lead far",
    "that being kind is never wasted",
)


def _the(phrase: str) -> str:
    """The phrase with its article made definite."""
    return "the " + phrase.split(" ", 1)[1]


def _lost(rng: random.Random, hero: str, name: str) -> list[str]:
    thing, friend = rng.choice(_TREASURES), rng.choice(_FRIENDS)
    short = thing.split(" ", 1)[1]
    the_friend = _the(friend)
    return [
        f"{name} loved one thing more than all others, and that was {thing}.",
        f"One morning the {short.split()[-1]} was gone.",
        f"{name} looked under the bed, behind the door and in the garden, but it was not there.",
        f"Then {name} met {friend}.",
        f'"Do not be sad," said {the_friend}. "I will help you look."',
        f"Together they searched until the sun went down, and at last they found the {short} in the grass.",
        f"{name} was so happy that they danced all the way home.",
    ]


def _storm(rng: random.Random, hero: str, name: str) -> list[str]:
    friend = rng.choice(_FRIENDS)
    the_friend = _the(friend)
    return [
        "One evening a big storm came, and the wind blew so hard that the trees bent low.",
        f"{name} heard a soft knock at the door.",
        f"Outside stood {friend}, cold and wet.",
        f'"Please come in," said {name}, and made a warm fire.',
        "They drank hot milk and told each other stories until the storm was over.",
        f"In the morning the sky was blue again, and {the_friend} said thank you.",
        "From that day on they were the best of friends.",
    ]


def _journey(rng: random.Random, hero: str, name: str) -> list[str]:
    thing, goal = (
        rng.choice(_TREASURES),
        rng.choice(("the sea", "the big city", "the highest hill", "the end of the road")),
    )
    short = thing.split(" ", 1)[1]
    return [
        f"Every night {name} dreamed of {goal}.",
        f"So one day {name} packed some bread and an apple and set out.",
        "The way was long, and the sun was hot.",
        "On the first day there was a river, and on the second day there was a hill.",
        f"On the third day {name} came to {goal} and found {thing}.",
        f'"How wonderful the world is," said {name}.',
        f"Then {name} went home with the {short} and told everyone about it.",
    ]


def _star(rng: random.Random, hero: str, name: str) -> list[str]:
    place = rng.choice(("the garden", "the pond", "the snow", "the tall grass"))
    return [
        f"One night a small star fell from the sky and landed in {place}.",
        f"{name} ran outside to look.",
        '"I am lost," said the star. "I want to go home."',
        f'"I will take you to the highest place I know," said {name}.',
        f"All night they climbed, and {name} carried the star in both arms.",
        "At the top the star began to shine, and it rose back up into the sky.",
        f"Since then one star has always winked at {name} before sleep.",
    ]


def _cake(rng: random.Random, hero: str, name: str) -> list[str]:
    fruit = rng.choice(("apple", "cherry", "lemon", "berry", "carrot"))
    a_fruit = f"{'an' if fruit == 'apple' else 'a'} {fruit}"
    guest = rng.choice(_FRIENDS)
    the_guest = _the(guest)
    return [
        f"One day {name} wanted to bake {a_fruit} cake, but there was no flour in the house.",
        f"{name} asked {guest} for help.",
        f'"I have flour," said {the_guest}, "but I have no sugar."',
        f'"I have sugar," said {name}. "Let us bake together."',
        "They mixed, they stirred and they waited, and soon the whole house smelled sweet.",
        f"They cut the {fruit} cake into pieces and shared it with everyone.",
        "It was the best cake that anyone had ever tasted.",
    ]


_PLOTS = (_lost, _storm, _journey, _star, _cake)


def story(rng: random.Random, hero: str | None = None, name: str | None = None) -> str:
    """A story of eight to ten sentences about a hero, opening with the usual words."""
    hero = hero or rng.choice(STORY_HEROES)
    name = name or rng.choice(NAMES)
    adjective = rng.choice(_ADJECTIVES)
    opening = f"Once upon a time, there was a {adjective} {hero} named {name} who lived {_PLACES.get(hero, _ANYWHERE)}."
    told = [opening, *rng.choice(_PLOTS)(rng, hero, name)]
    if rng.random() < 0.6:
        told.append(f"And {name} learned {rng.choice(_LESSONS)}.")
    told.append("The end.")
    return " ".join(told)


POEMS = (
    "The moon is a lamp in the sky,\nit watches the clouds floating by.\nThe river sings low,\nthe stars are aglow,\n"
    "and so, little world, goodbye.",
    "A token came, a token went,\nand each one said just what it meant.\nThey formed a line, a word, a rhyme,\n"
    "and reached your screen one at a time.",
    "Spring brings flowers, soft and bright,\nsummer brings the long warm light,\nautumn paints the trees with gold,\n"
    "winter makes the evenings cold.",
)
JOKES = (
    "Why did the computer go to the doctor? Because it had a virus.",
    "What do you call a bear with no teeth? A gummy bear.",
    "Why was the math book sad? Because it had too many problems.",
    "What do clouds wear under their clothes? Thunderwear.",
    "Why did the bicycle fall over? Because it was two-tired.",
)
