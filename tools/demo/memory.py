"""What a user says about themselves, and the questions that ask for it later."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.demo.wordings import fill, lines, say
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
    UNSEEN_NAMES,
    made_up_name,
    made_up_word,
)

__all__ = ["ATTRIBUTES", "Attribute", "recall", "tell", "value_of"]


@dataclass(frozen=True)
class Attribute:
    """One thing a user may tell about themselves; `{v}` is its value."""

    name: str
    tells: tuple[str, ...]
    reply: str
    asks: tuple[str, ...]
    answer: str
    unknown: str
    held_out_tells: tuple[str, ...] = ()
    held_out_asks: tuple[str, ...] = ()


ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "name",
        tells=lines("""
My name is {v}[.|!|]
my name's {v}[.|]
I'm {v}[.|!|]
I am {v}[.|!|]
[Call me|You can call me|Please call me|People call me|My friends call me|Everyone calls me] {v}.
[Hi|Hello|Hey|Good morning|Hi there|Hello Nova|Hi Nova][,|!] [my name is|I'm|I am|this is|it's] {v}[.|!]
[This is|It's|it is] {v}[.| here.| speaking.]
[I have a name:|My name:|Name:] {v}
[Remember|Please remember|Don't forget|Do not forget]: my name is {v}.
[Remember|Please remember] that [I am|my name is|I'm called] {v}.
I am called {v}.
My name is {v} and I [like you|am new here|have a question|need help|want to chat]."""),
        reply="Nice to meet you, {v}!",
        asks=lines("""
[What is|What's|whats|what is|Tell me|Say|Please tell me|Repeat|Write] my name[?|.]
[Do you|Can you|Do you still] [remember|know|tell me|say] [my name|what my name is|who I am]?
Who am I?
What did I [say|tell you] my name [is|was]?
What am I called?
[What was|And what was|And what is|So what is|Now what is] my name[?| again?]
[Have you forgotten|Did you forget|You forgot] my name?
[Which|What] name did I [tell you|say|mention]?
My name is [what?|...]
How do [people|my friends|you] call me?"""),
        answer="Your name is {v}.",
        unknown="You have not told me your name yet.",
        held_out_tells=(
            "The name is {v}.",
            "You are talking to {v}.",
            "I go by {v}.",
            "Hello there, I am {v} and I just arrived.",
            "Let me introduce myself: my name is {v}.",
        ),
        held_out_asks=(
            "Can you recall my name?",
            "Remind me, what is my name?",
            "Which name did I give you?",
            "Tell me who I am.",
            "What did I tell you about my name?",
            "I would like to hear my name.",
        ),
    ),
    Attribute(
        "colour",
        tells=lines("""
My [favourite|favorite] [colour|color] is {v}.
I [like|love] the [colour|color] {v} [best|most|more than others].
{v} is my [favourite|favorite] [colour|color].
Remember: my [favourite|favorite] [colour|color] is {v}.
Of all [colours|colors] I like {v} best."""),
        reply="{v} is a lovely colour. I will remember it.",
        asks=lines("""
[What is|What's|Tell me|Do you remember|Do you know] my [favourite|favorite] [colour|color]?
[What|Which] [colour|color] [do I like|do I love|is my favourite|did I say I like] [best|most|]?
What did I say my favourite colour is?"""),
        answer="Your favourite colour is {v}.",
        unknown="You have not told me your favourite colour yet.",
        held_out_asks=("Can you recall my favourite colour?", "Which colour did I tell you about?"),
    ),
    Attribute(
        "age",
        tells=lines(
            "I am {v} years old.\nI'm {v} years old.\nMy age is {v}.\nI [am|turned] {v} years old [today|now]."
        ),
        reply="Okay, you are {v} years old.",
        asks=lines("[How old am I|What is my age|What's my age|Do you know how old I am|How old did I say I am]?"),
        answer="You are {v} years old.",
        unknown="You have not told me your age yet.",
        held_out_asks=("Can you recall my age?",),
    ),
    Attribute(
        "city",
        tells=lines("""
I live in {v}.
I'm from {v}.
I come from {v}.
My home is in {v}.
[I live|We live|My home is] in the city of {v}."""),
        reply="{v} sounds like a nice place.",
        asks=lines("""
Where do I [live|come from]?
Where am I from?
[What|Which] city [do I live in|am I from|is my home]?
[Do you remember|Do you know|Tell me] where I [live|am from|come from][?|.]"""),
        answer="You live in {v}.",
        unknown="You have not told me where you live yet.",
        held_out_asks=("Can you recall where I live?",),
    ),
    Attribute(
        "pet",
        tells=lines(
            """
[I have|I've got|At home I have|We have] a {k} [named|called] {v}.
My {k} is [named|called] {v}.
My {k}'s name is {v}.
"""
        ),
        reply="{v} is a nice name for a {k}.",
        asks=lines("""
[What is|What's|Tell me|Do you remember|Do you know] [the name of my {k}|my {k}'s name][?|.]
What is my {k} called?
How is my {k} called?"""),
        answer="Your {k} is called {v}.",
        unknown="You have not told me about your {k} yet.",
        held_out_asks=("Can you recall the name of my {k}?",),
    ),
    Attribute(
        "food",
        tells=lines(
            "My [favourite|favorite] food is {v}.\nI [love|like] to eat {v}.\nI [love|like] eating {v} [best|most]."
        ),
        reply="Okay, I will remember that you like {v}.",
        asks=lines("""
[What is|What's|Tell me|Do you remember|Do you know] my [favourite|favorite] food[?|.]
What do I [like|love] to eat?
[What|Which] food do I [like|love]?"""),
        answer="Your favourite food is {v}.",
        unknown="You have not told me your favourite food yet.",
        held_out_asks=("Can you recall my favourite food?",),
    ),
    Attribute(
        "hobby",
        tells=lines(
            """
My [hobby|favourite hobby] is {v}.
In my free time I [do|enjoy|like] {v}.
I enjoy {v} [a lot|on weekends|].
"""
        ),
        reply="{v} is a great hobby.",
        asks=lines(
            """
[What is|What's|Tell me|Do you remember|Do you know] my hobby[?|.]
What do I do in my free time?
What do I enjoy?
"""
        ),
        answer="Your hobby is {v}.",
        unknown="You have not told me your hobby yet.",
        held_out_asks=("Can you recall my hobby?",),
    ),
    Attribute(
        "job",
        tells=lines("I am a {v}.\nI work as a {v}.\nMy job is {v}.\nI'm a {v} by profession."),
        reply="It must be interesting to be a {v}.",
        asks=lines(
            """
What is my job?
What do I work as?
What do I do for a living?
Do you remember my job?
What's my profession?
"""
        ),
        answer="You are a {v}.",
        unknown="You have not told me your job yet.",
        held_out_asks=("Can you recall my job?",),
    ),
    Attribute(
        "word",
        tells=lines("""
[Remember|Please remember|Keep in mind|Store|Note] [the word|this word:|the code word|the secret word] {v}.
The [secret|magic|code] word is {v}.
[The password is|My secret word is|The code is] {v}."""),
        reply="Okay, I will remember the word {v}.",
        asks=lines("""
[What is|What's|What was|Tell me|Repeat|Say] the [secret word|magic word|code word|word|password][?|.]
[What|Which] word [did I tell you|should you remember|did I ask you to remember]?
Do you remember the [word|secret word|password]?"""),
        answer="The word is {v}.",
        unknown="You have not told me a word to remember yet.",
        held_out_asks=("Can you recall the secret word?",),
    ),
)


def value_of(rng: random.Random, attribute: str, *, unseen: bool = False) -> str:
    """A value for an attribute; names and words are made up half of the time, and unseen on request."""
    made_up = rng.random() < 0.5
    if attribute in ("name", "pet"):
        listed = UNSEEN_NAMES if unseen else NAMES
        return made_up_name(rng, unseen=unseen) if made_up else rng.choice(listed)
    if attribute == "word":
        return made_up_word(rng, unseen=unseen) if made_up else rng.choice(LETTER_WORDS)
    if attribute == "city":
        return made_up_name(rng) if rng.random() < 0.2 else rng.choice(CITIES)
    if attribute == "age":
        return str(rng.randint(5, 99))
    return rng.choice({"colour": COLOURS, "food": FOODS, "hobby": HOBBIES, "job": JOBS}[attribute])


def tell(rng: random.Random, memory: dict[str, str]) -> tuple[str, str]:
    """The user tells one thing about themselves, and `memory` keeps it."""
    # The name is what people try first.
    attribute = ATTRIBUTES[0] if rng.random() < 0.4 else rng.choice(ATTRIBUTES[1:])
    value = value_of(rng, attribute.name)
    kind = rng.choice(PETS) if attribute.name == "pet" else ""
    if attribute.name == "name" and rng.random() < 0.05:
        value = value.lower()
    memory[attribute.name] = value
    if kind:
        memory["kind"] = kind
    user = (
        say(rng, attribute.tells, NOUNS, v=value, k=kind)
        if attribute.name != "name"
        else fill(rng.choice(attribute.tells), v=value)
    )
    reply = fill(attribute.reply, v=value, k=kind)
    return user, reply[:1].upper() + reply[1:]


def recall(rng: random.Random, memory: dict[str, str]) -> tuple[str, str]:
    """The user asks for something told before, or, now and then, for something never told."""
    told = [attribute for attribute in ATTRIBUTES if attribute.name in memory]
    untold = [attribute for attribute in ATTRIBUTES if attribute.name not in memory]
    known = bool(told) and (not untold or rng.random() < 0.85)
    attribute = rng.choice(told if known else untold)
    if known and "name" in memory and rng.random() < 0.4:
        attribute = ATTRIBUTES[0]
    kind = memory.get("kind") if known else None
    kind = kind or rng.choice(PETS)
    user = say(rng, attribute.asks, NOUNS, k=kind)
    if not known:
        return user, fill(attribute.unknown, k=kind)
    return user, fill(attribute.answer, v=memory[attribute.name], k=kind)
