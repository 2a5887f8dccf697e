"""The second half of the table of facts: numbers, words, places and greetings."""

from __future__ import annotations

from tools.demo.facts import RELATIONS, Relation, relation

__all__ = ["ALL_RELATIONS"]

_MORE: tuple[Relation, ...] = (
    relation(
        "month_number",
        "January=1, February=2, March=3, April=4, May=5, June=6, July=7, August=8, September=9, October=10,"
        "November=11, December=12",
        "{x} is month number {y}.",
        nouns="the number of the month {x}\nthe month number [of|for] {x}",
        asks="""
[What|Which] [month number|number] is {x}?
{x} is [which|what] month [number|of the year]?
[Which|What] number does [the month|] {x} have?
[What|Which] month of the year is {x}?""",
        unseen_nouns="the number that the month {x} has",
        unseen="Which number has the month {x}?\nOf the twelve months, which number is {x}?",
    ),
    relation(
        "month_days",
        "January=31, February=28, March=31, April=30, May=31, June=30, July=31, August=31, September=30, October=31,"
        "November=30, December=31",
        "{x} has {y} days.",
        nouns="the number of days in {x}\nthe length of {x} in days",
        asks="""
How many days [does {x} have|are in {x}|are there in {x}|has {x}]?
{x} has how many days?
How long is {x}?
In {x} there are how many days?""",
        unseen_nouns="the number of days that {x} has",
        unseen="How many days are in the month of {x}?\nHow many days long is {x}?",
    ),
    relation(
        "plural",
        "mouse=mice, child=children, foot=feet, tooth=teeth, man=men, woman=women, goose=geese, leaf=leaves,"
        "knife=knives, city=cities, box=boxes, baby=babies, wolf=wolves, sheep=sheep, fish=fish, person=people,"
        "cat=cats, dog=dogs, house=houses, berry=berries, glass=glasses, potato=potatoes",
        "The plural of {x} is {y}.",
        nouns="the plural [form|] [of|for] {x}\nthe plural of the word {x}\n{x} in [the|] plural",
        asks="""
One {x}, two [what?|...]
How do you [say|write|form] {x} in [the|] plural?
[What|Which] plural does [the word|] {x} have?
{x} - plural?
plural {x}
How do you [say|write] more than one {x}?""",
        unseen_nouns="the plural that the word {x} has",
        unseen="""
How is the plural of {x} written?
I have one {x}, you have two of them. What is the plural?
Put {x} in the plural.
""",
    ),
    relation(
        "past",
        "go=went, see=saw, eat=ate, run=ran, sing=sang, write=wrote, take=took, give=gave, come=came, buy=bought,"
        "think=thought, swim=swam, fly=flew, drink=drank, sleep=slept, find=found, make=made, speak=spoke, know=knew,"
        "bring=brought, fall=fell, play=played, walk=walked",
        "The past tense of {x} is {y}.",
        nouns="the past [tense|form|] [of|for] {x}\nthe past [tense|] of the verb {x}\n{x} in the past [tense|]",
        asks="""
How do you [say|write|form] {x} in the past [tense|]?
[What|Which] past [tense|form] does [the verb|] {x} have?
{x} - past tense?
Today I {x}, yesterday I [what?|...]
past tense {x}""",
        unseen_nouns="the past tense that the verb {x} has",
        unseen="Put {x} in the past tense.\nHow is the past tense of {x} written?",
    ),
    relation(
        "sides",
        "triangle=3, square=4, rectangle=4, pentagon=5, hexagon=6, octagon=8",
        "A {x} has {y} sides.",
        nouns="the number of sides [of|in|on] a {x}\nthe number of sides a {x} has",
        asks="""
How many sides [does a {x} have|are in a {x}|are there in a {x}|has a {x}]?
A {x} has how many sides?
[What|Which] number of sides does a {x} have?
Count the sides of a {x}.
A {x} has""",
        unseen_nouns="the number of the sides that a {x} has",
        unseen="I draw a {x}. How many sides do I see?\nHow many sides do we find on a {x}?",
    ),
    relation(
        "legs",
        "spider=8, dog=4, cat=4, bird=2, horse=4, ant=6, bee=6, snake=0, fish=0, cow=4, butterfly=6, chicken=2,"
        "table=4, person=2, octopus=0, crab=10",
        "A {x} has {y} legs.",
        nouns="the number of legs [of|on] a {x}\nthe number of legs a {x} has",
        asks="""
How many legs [does a {x} have|are on a {x}|has a {x}]?
A {x} has how many legs?
[What|Which] number of legs does a {x} have?
Count the legs of a {x}.
On how many legs does a {x} [stand|walk]?""",
        unseen_nouns="the number of the legs that a {x} has",
        unseen="I see a {x}. How many legs does it have?\nHow many legs do we find on a {x}?",
    ),
    relation(
        "currency",
        "Japan=yen, England=pound, the United States=dollar, India=rupee, Russia=ruble, Switzerland=franc,"
        "Mexico=peso, Germany=euro, France=euro, Poland=zloty, Brazil=real, Turkey=lira, Thailand=baht,"
        "Canada=dollar, South Korea=won",
        "The currency of {x} is the {y}.",
        nouns="the [currency|money] [of|in|used in] {x}\n{x}'s [currency|money]",
        asks="""
[What|Which] [currency|money] [does {x} use|does {x} have|is used in {x}|do people use in {x}]?
With [which|what] [currency|money] do people pay in {x}?
How do people pay in {x}?
{x} - currency?
{x} uses [which|what] [currency|money]?""",
        unseen_nouns="the money that people use in {x}",
        unseen="I travel to {x}. Which money do I need?\nWhich currency do I need in {x}?",
    ),
    relation(
        "greeting",
        "French=bonjour, German=guten Tag, Spanish=hola, Italian=ciao, Portuguese=olá, Japanese=こんにちは,"
        "Chinese=你好, Korean=안녕하세요, Russian=привет, Greek=γεια σου, Arabic=مرحبا, Hindi=नमस्ते,"
        "Swedish=hej, Turkish=merhaba, Polish=cześć, Dutch=hallo, Hebrew=שלום, Thai=สวัสดี",
        "In {x}, hello is {y}.",
        nouns="hello in {x}\nthe {x} [word|greeting] for hello\nthe word hello in {x}\nthe {x} hello",
        asks="""
How do [you|I|people|they] say hello in {x}?
[Say|Write] hello in {x}.
[Translate|Put] hello [to|into|in] {x}.
What do [people|they] say for hello in {x}?
Greet me in {x}.
Hello in {x}?""",
        unseen_nouns="the way to say hello in {x}",
        unseen="""
How does one say hello in {x}?
I want to greet someone in {x}. How do I say hello?
Which word means hello in {x}?
""",
    ),
    relation(
        "emoji",
        "cat=🐱, dog=🐶, heart=❤️, star=⭐, sun=☀️, moon=🌙, fish=🐟, apple=🍎, pizza=🍕, rocket=🚀, tree=🌳, fire=🔥,"
        "smile=😀, cake=🎂, flower=🌸, house=🏠",
        "Here is a {x}: {y}",
        nouns="the {x} emoji\nthe emoji [for|of] [a|] {x}",
        asks="""
[Send|Give|Show] [me|] [a|the] {x} emoji.
[Send|Give|Show] [me|] [an|the] emoji of a {x}.
[Draw|Make] a {x} [emoji|as an emoji].
[What|Which] emoji is [a|the] {x}?
{x} emoji[ please|]""",
        unseen_nouns="the emoji that shows a {x}",
        unseen="Can I have a {x} emoji?\nI want an emoji of a {x}.\nWhich emoji stands for a {x}?",
    ),
    relation(
        "home",
        "a bird=nest, a bee=hive, a dog=kennel, a horse=stable, a spider=web, a bear=cave, a fish=aquarium,"
        "a rabbit=burrow, a king=castle, a cow=barn, a pig=sty, an ant=hill",
        "The home of {x} is a {y}.",
        nouns="the home of {x}\n{x}'s home\nthe place where {x} lives",
        asks="""
Where does {x} [live|sleep|stay]?
In what does {x} live?
What does {x} live in?
{x} lives in [what?|which place?|a]
What kind of home does {x} have?""",
        unseen_nouns="the home in which {x} lives",
        unseen="Where is {x} at home?\nWhich home does {x} have?",
    ),
    relation(
        "how_many",
        "days in a week=7, hours in a day=24, minutes in an hour=60, seconds in a minute=60, months in a year=12,"
        "weeks in a year=52, letters in the alphabet=26, planets in the solar system=8, continents on Earth=7,"
        "fingers on a hand=5, wheels on a bicycle=2, wheels on a car=4, days in a year=365, eggs in a dozen=12,"
        "strings on a guitar=6, strings on a violin=4, colours in a rainbow=7, years in a century=100,"
        "cents in a dollar=100, seasons in a year=4, days in a weekend=2, toes on a foot=5, keys on a piano=88",
        "There are {y} {x}.",
        nouns="the [number|count] of {x}",
        asks="""
How many {x} [are there|do we have|can you count|]?
[What|Which] number of {x} is [there|right|correct]?
Count the {x}.
How many are the {x}?
number of {x}""",
        unseen_nouns="the number of all {x}",
        unseen="How many {x} do you know of?\nHow many {x} would I count?",
    ),
    relation(
        "most",
        "largest planet=Jupiter, largest ocean=the Pacific, tallest animal=the giraffe,"
        "fastest land animal=the cheetah, largest animal=the blue whale, highest mountain=Mount Everest,"
        "largest country=Russia, coldest continent=Antarctica, closest star to Earth=the Sun, red planet=Mars,"
        "smallest planet=Mercury, largest continent=Asia, longest month name=September, shortest month=February,"
        "king of animals=the lion, first day of the week=Monday, last month of the year=December,"
        "first month of the year=January, first letter of the alphabet=A, last letter of the alphabet=Z,"
        "planet with rings=Saturn, planet we live on=Earth, coldest season=winter, hottest season=summer,"
        "largest land animal=the elephant, season after winter=spring, season after summer=autumn",
        "The {x} is {y}.",
        nouns="the {x}",
        asks="""
[What|Which] [one|] is the {x}?
[What|Which] [one|] do we call the {x}?
the {x}
Which is called the {x}?""",
        unseen_nouns="the name of the {x}",
        unseen="What has the title of the {x}?\nHow is the {x} called?",
    ),
)

ALL_RELATIONS: tuple[Relation, ...] = RELATIONS + _MORE
