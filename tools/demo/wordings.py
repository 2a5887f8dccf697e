"""Many ways of saying the same thing, and which of them are held out of training.

A small model that sees six wordings of a question learns six strings; one that sees hundreds learns the question.
Patterns are written with alternatives, `[What is|What's] the capital of {x}?`, and expanded once.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterable, Sequence

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_SPACES = re.compile(r" {2,}")
_VOWELS = tuple("aeiou")
_NOT_WORD = re.compile(r"[^\w+*/=-]+")


def expand(pattern: str) -> list[str]:
    """Every reading of a pattern in which `[a|b|]` stands for one of its alternatives."""
    match = _GROUP.search(pattern)
    if match is None:
        return [_SPACES.sub(" ", pattern).strip()]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [text for option in match.group(1).split("|") for text in expand(head + option + tail)]


def lines(block: str) -> tuple[str, ...]:
    """The expanded patterns of a block of text, one pattern a line."""
    return tuple(dict.fromkeys(text for line in block.strip().splitlines() for text in expand(line.strip())))


def is_held_out(key: str, one_in: int) -> bool:
    """Whether a key belongs to the held-out part; a fixed hash, so that no seed can move it into training."""
    return zlib.crc32(key.encode()) % one_in == 0


def normalised(text: str) -> str:
    """The text without case, punctuation and spacing, for comparing wordings."""
    return _NOT_WORD.sub(" ", text.lower()).strip()


def sentence(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


# Frames take a noun phrase at @. Held-out frames are never used in training, with any relation.
FRAMES = lines("""
[What is|What's|Whats|what is] @?
[Please|Nova, please|] [tell me|give me|name] @.
[Can you|Could you|Will you|Would you] [please|] [tell me|give me|name] @?
[Do|Don't] you [know|happen to know] @?
[Do you know|Can you tell me|Could you tell me|Tell me|Please tell me|Can you say|Please say] what @ is[?|.]
[I want to|I would like to|I'd like to|I need to|I have to|I must] [know|find out|learn] @.
[I want to|I would like to|I'd like to|I need to|] [know|learn] what @ is.
[I forgot|I can't remember|I don't know|I am looking for|I'm looking for|I need] @.
[I forgot|I can't remember|I don't know|Not sure|I am not sure|I'm curious|I am curious] what @ is.
@?
@[,|] please[.|?]
@ [is|is what|would be|is called]?
@ is ...
[Say|Write|Write down|State|Answer|Find|Show me] @.
[What|And what|So what|Now what|But what|Then what] is @?
[What|Which] [one|] would [be|you say is] @?
[Any idea|Do you have any idea|Have you any idea] what @ [is|could be|might be]?
[Question|My question|Quiz|Test|Trivia|Homework]: [what is|] @[?|.]
Answer this: what is @?
[Complete|Finish] [this|the sentence]: @ is
Help me with @[, please|].
[My son|My teacher|My friend|Someone|A kid] [asks|asked me|wants to know] what @ is.
[Let me|May I|Can I] ask you [something|a question]: what is @?
[Do you think you know|Are you able to tell me|Is it true that you know] @?
[What|What exactly] do [people|we|you|they] call @?
""")

HELD_OUT_FRAMES = lines("""
Would you mind telling me @?
I was wondering what @ is.
I wonder what @ might be.
Let us see if you know @.
Could you remind me what @ is?
What do you think @ is?
Give me your answer for @.
Be so kind and tell me what @ is.
@, what is it?
@ - do you know it?
How about telling me @?
""")

_OPENERS = lines("""
[Hi|Hello|Hey|Good morning|Good evening|Hi there][!|.|,]
[Hi|Hello|Hey|Okay|Dear] Nova[,|!|.]
Nova[,|:|]
[Okay|Ok|Right|Good|Great|Nice|Cool|Fine|Thanks|Thank you|Well|Alright|Yes|No|Sure|Wow|Interesting][,|.|!]
[Now|So|And|Then|Next|But|First|Also|Next question|Another question|Another one|One more|One more question|Last \
one][:|,|.]
[Quick|Easy|Simple|Short|Small|Silly] question[:|.]
[Please answer|Answer me|Help me|Listen|Tell me something|Try this|Here is a question][:|.]
""")
_CLOSERS = lines("""
[Thanks|Thank you|Please|Be brief|Keep it short|Answer briefly|One sentence please|Just the answer|Thanks a lot][.|!]
[I forgot|I need to know|It is for school|I am curious|My son asked me|It is important|I want to learn|I'm not sure].
""")
_PEOPLE = "I|We|My brother|My sister|My friend|A friend|My mother|My dad|My teacher|Our neighbour|The kids|Someone"
_CHATTER = lines(f"""
[{_PEOPLE}] [talked about|read a book about|had a question about|was thinking about|saw a film about|likes] {{n}}.
[{_PEOPLE}] went to the {{n}} [today|yesterday|last week|with my dog].
[Today|Yesterday|Last week|This morning|At school|At home|At work] we [saw|found|bought|lost|talked about] a {{n}}.
It [is|was] a [nice|cold|hot|rainy|long|busy|quiet] day [today|] and I [like|saw|need] the {{n}}.
[I am|We are] [doing a quiz|learning|playing a game|bored|doing homework] about the {{n}}.
""")
_DROPPABLE = frozenset(
    ["the", "is", "a", "an", "of", "me", "you", "please", "to", "that", "do", "can", "could", "what's", "i"]
)


def frame(template: str, noun: str) -> str:
    """The frame with its noun phrase; capitalised, since a frame may begin with it."""
    return sentence(template.replace("@", noun))


def misspell(rng: random.Random, text: str) -> str:
    """The text with one typing slip in a word of at least four letters that holds no slot or digit."""
    words = text.split(" ")
    places = [i for i, word in enumerate(words) if len(word) >= 4 and word.isalpha()]
    if not places:
        return text
    i = rng.choice(places)
    word = words[i]
    at = rng.randrange(1, len(word) - 1)
    slips = (
        word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
    )
    words[i] = rng.choice(slips)
    return " ".join(words)


def drop_word(rng: random.Random, text: str) -> str:
    """The text without one small word, as people type in a hurry."""
    words = text.split(" ")
    places = [i for i, word in enumerate(words) if word.lower() in _DROPPABLE]
    if places and len(words) > 3:
        del words[rng.choice(places)]
    return " ".join(words)


def lower_first(text: str) -> str:
    """The text with its first letter lowered unless it is the word I or an abbreviation."""
    if text[:2] in ("I ", "I'") or text[1:2].isupper():
        return text
    return text[:1].lower() + text[1:]


def roughen(rng: random.Random, template: str) -> str:
    """One template with the noise of real typing; slots (`{x}`, `@`) stay whole."""
    text = template
    if rng.random() < 0.06:
        text = misspell(rng, text)
    if rng.random() < 0.06:
        text = drop_word(rng, text)
    if rng.random() < 0.10:
        text = lower_first(text)
    if rng.random() < 0.10 and len(text) > 4:
        text = text.rstrip("?.! ")
    return text


def surround(rng: random.Random, core: str, nouns: Sequence[str]) -> str:
    """The request with the small talk that people put before and after it."""
    text = core
    if rng.random() < 0.22:
        opener = rng.choice(_OPENERS)
        text = f"{opener} {lower_first(text) if opener[-1] not in '.!:' or rng.random() < 0.3 else text}"
    if rng.random() < 0.10:
        text = f"{fill(rng.choice(_CHATTER), n=rng.choice(nouns))} {text}"
    if rng.random() < 0.08:
        text = f"{text} {rng.choice(_CLOSERS)}"
    return text


def say(rng: random.Random, templates: Sequence[str], nouns: Sequence[str], **slots: object) -> str:
    """One roughened, surrounded reading of the templates with its slots filled."""
    return surround(rng, fill(roughen(rng, rng.choice(templates)), **slots), nouns)


def fill(template: str, **slots: object) -> str:
    """The template with `{slot}` replaced; unlike `str.format` it leaves every other brace alone.

    The article right before a slot becomes `an` where the value asks for it.
    """
    text = template
    for name, value in slots.items():
        slot = "{" + name + "}"
        if str(value)[:1] in _VOWELS:
            text = text.replace("a " + slot, "an " + slot).replace("A " + slot, "An " + slot)
        text = text.replace(slot, str(value))
    return text


def joined(items: Iterable[object]) -> str:
    """The items as a list in a sentence: `a, b, c`."""
    return ", ".join(str(item) for item in items)
