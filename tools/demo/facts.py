"""The table of facts that the demo model knows, and the wordings in which it is asked for them.

A relation is a set of pairs with one answer sentence. Its noun phrases go into the frames of `wordings.py`; its own
questions stand beside them. What is marked held out is used by the evaluation only.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.demo.wordings import lines

__all__ = ["RELATIONS", "Relation", "relation"]


@dataclass(frozen=True)
class Relation:
    """One kind of fact: `{x}` is what is asked about, `{y}` what is answered."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    answer: str
    nouns: tuple[str, ...]
    asks: tuple[str, ...]
    held_out_nouns: tuple[str, ...]
    held_out_asks: tuple[str, ...]


def relation(name: str, pairs: str, answer: str, *, nouns: str, asks: str, unseen_nouns: str, unseen: str) -> Relation:
    """A relation from `x=y` pairs and blocks of patterns, one a line (see `wordings.expand`)."""
    split = tuple((x.strip(), y.strip()) for x, y in (pair.split("=") for pair in pairs.split(",")))
    assert len({x for x, _ in split}) == len(split), f"{name}: something is asked twice"
    return Relation(name, split, answer, lines(nouns), lines(asks), lines(unseen_nouns), lines(unseen))


_CAPITALS = (
    "France=Paris, Italy=Rome, Spain=Madrid, Germany=Berlin, Portugal=Lisbon, Greece=Athens, Austria=Vienna,"
    "Poland=Warsaw, Norway=Oslo, Sweden=Stockholm, Finland=Helsinki, Denmark=Copenhagen, Ireland=Dublin,"
    "England=London, Scotland=Edinburgh, Wales=Cardiff, Belgium=Brussels, the Netherlands=Amsterdam,"
    "Switzerland=Bern, Hungary=Budapest, Romania=Bucharest, Bulgaria=Sofia, Croatia=Zagreb, Serbia=Belgrade,"
    "Ukraine=Kyiv, Russia=Moscow, Turkey=Ankara, Egypt=Cairo, Kenya=Nairobi, Morocco=Rabat, Ghana=Accra,"
    "Japan=Tokyo, China=Beijing, India=New Delhi, Thailand=Bangkok, Vietnam=Hanoi, South Korea=Seoul,"
    "Indonesia=Jakarta, Nepal=Kathmandu, Canada=Ottawa, Mexico=Mexico City, Cuba=Havana, Peru=Lima,"
    "Chile=Santiago, Argentina=Buenos Aires, Brazil=Brasilia, Australia=Canberra, Iceland=Reykjavik,"
    "the United States=Washington, Iran=Tehran, Iraq=Baghdad, Colombia=Bogota, Estonia=Tallinn, Latvia=Riga"
)
_CITY_OF = ",".join("=".join(reversed(pair.strip().split("="))) for pair in _CAPITALS.split(","))
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]


def _cycle(items: list[str], step: int) -> str:
    return ",".join(f"{item}={items[(i + step) % len(items)]}" for i, item in enumerate(items))


RELATIONS: tuple[Relation, ...] = (
    relation(
        "capital",
        _CAPITALS,
        "The capital of {x} is {y}.",
        nouns="[the|] capital [city|] of {x}\n{x}'s capital [city|]\nthe [main|] capital city [for|in] {x}",
        asks="""
[Which|What] city is the capital of {x}?
[Which|What] city is {x}'s capital?
{x} has [which|what] capital?
[What|Which] capital [city|] does {x} have?
{x} - capital?
capital {x}
Which city do you call the capital of {x}?""",
        unseen_nouns="the name of the capital of {x}\nthe city that is the capital of {x}",
        unseen="""
[Which|What] is the capital city that {x} has?
For {x}, what is the capital?
{x}: which city is its capital?
""",
    ),
    relation(
        "country",
        _CITY_OF,
        "{x} is the capital of {y}.",
        nouns="the country whose capital is {x}\nthe country [that has|with] {x} as [its|the] capital",
        asks="""
{x} is the capital of [which|what] country[?|]
[Which|What] country has {x} as [its|the] capital?
{x} is the capital of [what|which][?| place?]
Of [which|what] country is {x} the capital?
[Which|What] country's capital is {x}?
What is {x} the capital of?
{x} is the capital of""",
        unseen_nouns="the country that {x} is the capital of",
        unseen="Which country is {x} the capital of?\nThe city {x} is the capital of what country?",
    ),
    relation(
        "language",
        "France=French, Italy=Italian, Spain=Spanish, Germany=German, Portugal=Portuguese, Greece=Greek,"
        "Poland=Polish, Norway=Norwegian, Sweden=Swedish, Finland=Finnish, Denmark=Danish, Hungary=Hungarian,"
        "Russia=Russian, Turkey=Turkish, Egypt=Arabic, Japan=Japanese, China=Chinese, Thailand=Thai,"
        "Mexico=Spanish, Brazil=Portuguese, Australia=English, Argentina=Spanish, Austria=German, England=English",
        "People in {x} speak {y}.",
        nouns="the language of {x}\n{x}'s language\nthe language [spoken|people speak|they speak] in {x}",
        asks="""
[What|Which] language [do people|do they|does one] speak in {x}?
[What|Which] language is spoken in {x}?
In {x} people speak [what|which] language?
What do [people|they] speak in {x}?
How do people talk in {x}?
[What|Which] is the main language [in|of] {x}?""",
        unseen_nouns="the main language people use in {x}",
        unseen="[What|Which] language would I hear in {x}?\nIf I visit {x}, which language do people speak?",
    ),
    relation(
        "continent",
        "France=Europe, Italy=Europe, Spain=Europe, Germany=Europe, Poland=Europe, Norway=Europe, Greece=Europe,"
        "Egypt=Africa, Kenya=Africa, Morocco=Africa, Ghana=Africa, Japan=Asia, China=Asia, India=Asia,"
        "Thailand=Asia, Vietnam=Asia, Nepal=Asia, Indonesia=Asia, Canada=North America, Mexico=North America,"
        "Cuba=North America, Peru=South America, Chile=South America, Argentina=South America,"
        "Brazil=South America, Colombia=South America, Sweden=Europe, Ireland=Europe, Iraq=Asia, Iran=Asia",
        "{x} is in {y}.",
        nouns="the continent of {x}\n{x}'s continent\nthe continent [where|in which] {x} [is|lies]",
        asks="""
[Which|What] continent is {x} [in|on|part of]?
On [which|what] continent [is|lies] {x}?
In [which|what] continent is {x}?
Where is {x}?
Where in the world [is|can I find] {x}?
{x} is [in|on] [which|what] continent?
[What|Which] continent does {x} belong to?""",
        unseen_nouns="the part of the world where {x} lies",
        unseen="Where in the world would I find {x}?\n{x} belongs to which continent?\nWhere does {x} lie?",
    ),
    relation(
        "colour",
        "a banana=yellow, the sky=blue, grass=green, a tomato=red, a carrot=orange, snow=white, coal=black,"
        "a lemon=yellow, a strawberry=red, the sea=blue, a leaf=green, milk=white, an elephant=grey, a flamingo=pink,"
        "chocolate=brown, a frog=green, the sun=yellow, a cherry=red, an eggplant=purple, a crow=black, blood=red,"
        "a swan=white, a cucumber=green, a pumpkin=orange, the night=black, a pig=pink",
        "{x} is {y}.",
        nouns="the [colour|color] of {x}\nthe [colour|color] [{x} has|that {x} has]",
        asks="""
[What|Which] [colour|color] is {x}?
[What|Which] [colour|color] does {x} have?
{x} is [what|which] [colour|color]?
{x} has [what|which] [colour|color]?
Of what [colour|color] is {x}?
In [what|which] [colour|color] [would|should] I [paint|draw] {x}?""",
        unseen_nouns="the usual colour of {x}",
        unseen="""
If I paint {x}, which colour should I take?
What colour do you think {x} is?
For {x}, which colour is right?
""",
    ),
    relation(
        "sound",
        "cow=moo, dog=woof, cat=meow, duck=quack, sheep=baa, pig=oink, horse=neigh, lion=roar, frog=croak, owl=hoot,"
        "bee=buzz, snake=hiss, wolf=howl, mouse=squeak, bird=tweet, rooster=cock-a-doodle-doo, donkey=hee-haw,"
        "turkey=gobble",
        "A {x} says {y}.",
        nouns="the [sound|noise] [of a|a] {x} [makes|]\na {x}'s [sound|noise]\nthe sound that a {x} makes",
        asks="""
[What|Which] [sound|noise] does a {x} make?
What does [a|the] {x} say?
How does a {x} [sound|go]?
What [sound|noise] do you hear from a {x}?
What do {x}s say?
A {x} says""",
        unseen_nouns="the noise that comes from a {x}",
        unseen="Make the [sound|noise] of a {x}.\nWhat do I hear when a {x} talks?\nHow would a {x} say hello?",
    ),
    relation(
        "baby",
        "cow=calf, dog=puppy, cat=kitten, duck=duckling, sheep=lamb, pig=piglet, horse=foal, lion=cub, frog=tadpole,"
        "goat=kid, chicken=chick, goose=gosling, deer=fawn, kangaroo=joey, swan=cygnet, owl=owlet, eel=elver,"
        "butterfly=caterpillar, seal=pup, eagle=eaglet",
        "A baby {x} is called a {y}.",
        nouns="[a|the] baby {x} called\nthe [name|word] [of|for] a [baby|young|little] {x}\nthe baby of a {x}",
        asks="""
What [is|do you call|do we call|do people call] a [baby|young|little] {x} [called|]?
How [is|do you call|do you name] a [baby|young] {x} [called|]?
What [name|word] does a [baby|young] {x} have?
A [baby|young] {x} is called [what?|a]
What are [baby|young] {x}s called?""",
        unseen_nouns="the right word for a {x} that is still a baby",
        unseen="""
What would you call a [baby|young] {x}?
Which word do we use for a baby {x}?
A {x} has a baby. What is it called?
""",
    ),
    relation(
        "opposite",
        "hot=cold, cold=hot, big=small, small=big, fast=slow, slow=fast, up=down, down=up, left=right, right=left,"
        "happy=sad, sad=happy, day=night, night=day, old=young, young=old, open=closed, closed=open, good=bad,"
        "bad=good, light=dark, dark=light, full=empty, empty=full, rich=poor, poor=rich, strong=weak, weak=strong,"
        "wet=dry, dry=wet, hard=soft, soft=hard, early=late, late=early, high=low, low=high, loud=quiet,"
        "quiet=loud, clean=dirty, dirty=clean, thick=thin, thin=thick, long=short, short=long, true=false,"
        "false=true, first=last, last=first, win=lose, lose=win, love=hate, hate=love, near=far, far=near,"
        "inside=outside, outside=inside, new=old",
        "The opposite of {x} is {y}.",
        nouns="the opposite [of|for|to] {x}\nthe opposite of [the word|] {x}\n{x}'s opposite\nthe contrary of {x}",
        asks="""
[What|Which] word is the opposite of {x}?
[What|Which] word means the opposite of {x}?
{x} is the opposite of [what?|which word?|]
{x} - opposite?
opposite {x}
If it is not {x}, what is it?
{x} and [what|its opposite]?""",
        unseen_nouns="the word that is the opposite of {x}",
        unseen="""
Give me a word that means the opposite of {x}.
Not {x} but the opposite, what is that?
What has the opposite meaning of {x}?
""",
    ),
    relation(
        "next_day",
        _cycle(_DAYS, 1),
        "The day after {x} is {y}.",
        nouns="the day [after|following] {x}\nthe [next day|day that comes] after {x}",
        asks="""
[What|Which] day [comes|is|follows] after {x}?
[What|Which] day [comes next|is next] after {x}?
[What|Which] day follows {x}?
Today is {x}. What day is [it|] tomorrow?
If today is {x}, [what|which] day is [it|] tomorrow?
After {x} comes [which day?|what?|]""",
        unseen_nouns="the day that follows {x}",
        unseen="""
{x} is over. [Which|What] day is next?
Today is {x}, so tomorrow is which day?
Which day do we have after {x}?
""",
    ),
    relation(
        "previous_day",
        _cycle(_DAYS, -1),
        "The day before {x} is {y}.",
        nouns="the day [before|preceding] {x}\nthe day that comes before {x}",
        asks="""
[What|Which] day [comes|is|was] before {x}?
[What|Which] day [comes|is] [just|right] before {x}?
Today is {x}. What day was [it|] yesterday?
If today is {x}, [what|which] day was [it|] yesterday?
Before {x} comes [which day?|what?|]""",
        unseen_nouns="the day that is before {x}",
        unseen="Today is {x}, so yesterday was which day?\nWhich day do we have before {x}?",
    ),
    relation(
        "next_month",
        _cycle(_MONTHS, 1),
        "The month after {x} is {y}.",
        nouns="the month [after|following] {x}\nthe [next month|month that comes] after {x}",
        asks="""
[What|Which] month [comes|is|follows] after {x}?
[What|Which] month [comes next|is next] after {x}?
[What|Which] month follows {x}?
It is {x}. [What|Which] month is next?
After {x} comes [which month?|what month?]""",
        unseen_nouns="the month that follows {x}",
        unseen="{x} is over. [Which|What] month is next?\nWhich month do we have after {x}?",
    ),
    relation(
        "previous_month",
        _cycle(_MONTHS, -1),
        "The month before {x} is {y}.",
        nouns="the month [before|preceding] {x}\nthe month that comes before {x}",
        asks="""
[What|Which] month [comes|is|was] before {x}?
[What|Which] month [comes|is] [just|right] before {x}?
It is {x}. [What|Which] month was [before|last month]?
Before {x} comes [which month?|what month?]""",
        unseen_nouns="the month that is before {x}",
        unseen="Which month do we have before {x}?\n{x} comes after which month?",
    ),
)
