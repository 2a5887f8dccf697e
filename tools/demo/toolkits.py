"""Tools and what they are for: how they are named and described, asked for, called, and what they say.

Some are for what everybody has tools for, others (`own_kind`) for one thing that their name and the question both say.
Many names of tools and of their parameters are made up, so that they have to be copied from the system message, as
cities and persons are from the question. Answers are made from what a tool has said, whatever that is.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from novainfer.fsm.parsing.formats import CLOSE_CALL, OPEN_CALL
from tools.demo import arithmetic
from tools.demo.wordings import fill, lines, roughen, surround
from tools.demo.words import CITIES, COLOURS, LETTER_WORDS, NAMES, NOUNS, made_up_name, made_up_word

__all__ = ["KINDS", "Kind", "Offered", "answer", "offer", "own_kind", "said"]

Values = dict[str, str | int]
_INTEGERS = ("a", "b", "number")  # slots


@dataclass(frozen=True)
class Kind:
    """One purpose of a tool.

    slots: the names that a parameter may have, by what it is.
    asks: wordings with `{slot}`; unseen_asks are never trained. pair_asks: of `{x}` and `{y}`, two values of the first
    slot. subject: what the answer is about. draw: values for a question, unseen ones on request. says: what the tool
    says to values, as text or as an object.
    """

    name: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    slots: dict[str, tuple[str, ...]]
    asks: tuple[str, ...]
    unseen_asks: tuple[str, ...]
    subject: str
    draw: Callable[[random.Random, bool], Values]
    says: Callable[[random.Random, Values], str | dict[str, Any]]
    pair_asks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Offered:
    """A tool as one chat offers it; `parameters` are its own names, by slot, in its order."""

    kind: Kind
    name: str
    description: str | None
    parameters: dict[str, str]

    def as_openai(self) -> dict[str, Any]:
        """The tool as a request has it."""
        types = {slot: "integer" if slot in _INTEGERS else "string" for slot in self.parameters}
        properties = {name: {"type": types[slot]} for slot, name in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": schema}}

    def call(self, values: Values) -> str:
        """The call with these values, as the chat template writes it."""
        arguments = {name: values[slot] for slot, name in self.parameters.items()}
        return (
            f"{OPEN_CALL}\n{json.dumps({'name': self.name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE_CALL}"
        )

    def question(self, rng: random.Random, values: Values, *, unseen: bool = False) -> str:
        """A bare question for these values; in a wording that was never trained, on request."""
        asks = self.kind.unseen_asks if unseen else self.kind.asks
        if "op" in values:
            asks = (arithmetic.UNSEEN_SUM_ASKS if unseen else arithmetic.SUM_ASKS)[str(values["op"])]
        return fill(rng.choice(asks), **values)

    def ask(self, rng: random.Random, values: Values) -> str:
        """A question for these values with slips and small talk."""
        asks = arithmetic.SUM_ASKS[str(values["op"])] if "op" in values else self.kind.asks
        question = fill(roughen(rng, rng.choice(asks)), **values)
        # Where the question ends with words of the user's, more words would belong to them.
        return question if self.kind.name in ("search", "message") else surround(rng, question, NOUNS)


def said(result: str | dict[str, Any]) -> str:
    """What a tool has said, as the content of its message."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def answer(kind: Kind, values: Values, result: str | dict[str, Any]) -> str:
    """The sentence made from what a tool has said."""
    if isinstance(result, str):
        told = result
    elif "op" in values:
        [told] = map(str, result.values())
    else:
        told = ", ".join(
            f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in result.items()
        )
    if "op" in values:
        return f"{values['a']} {values['op']} {values['b']} = {told}."
    return f"{fill(kind.subject, **values)}: {told}."


# Pairs go together; the order is what tells them apart.
_OPERANDS = (("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"))


def offer(rng: random.Random, kind: Kind, *, made_up: bool | None = None, unseen: bool = False) -> Offered:
    """The tool under names that are drawn; `unseen` made-up names are of those that training never has."""
    if made_up is None:
        made_up = rng.random() < 0.4
    name = rng.choice(kind.names)
    if made_up:
        name = rng.choice(("{}", "{}", "get_{}", "{}_tool")).format(made_up_word(rng, unseen=unseen))
    slots = [slot for slot in kind.slots if slot != "unit" or (not made_up and rng.random() < 0.1)]
    if not made_up and rng.random() < 0.1:  # made-up names do not tell which is which: their order must
        rng.shuffle(slots)
    taken: dict[str, str] = {}
    operands = rng.randrange(len(_OPERANDS))
    for slot in slots:
        found = _OPERANDS[operands][slot == "b"] if slot in ("a", "b") else rng.choice(kind.slots[slot])
        if made_up and rng.random() < 0.5:
            found = made_up_word(rng, unseen=unseen)
        taken[slot] = found if found not in taken.values() else slot
    is_described = made_up or rng.random() < 0.8
    return Offered(kind, name, rng.choice(kind.descriptions) if is_described else None, taken)


# ---- values and what tools say ---------------------------------------------------------------------------------------


def _city(rng: random.Random, unseen: bool) -> Values:
    city = made_up_name(rng, unseen=unseen) if unseen or rng.random() < 0.4 else rng.choice(CITIES)
    return {"city": city, "unit": "celsius"}


def _item(rng: random.Random, unseen: bool) -> Values:
    return {"item": made_up_word(rng, unseen=unseen) if unseen or rng.random() < 0.3 else rng.choice(NOUNS)}


def _words(rng: random.Random, num_max: int, unseen: bool) -> str:
    words = [
        made_up_word(rng, unseen=unseen) if rng.random() < 0.3 or (unseen and not at) else rng.choice(LETTER_WORDS)
        for at in range(num_max)
    ]
    return " ".join(words[: rng.randint(1, num_max)])


def _query(rng: random.Random, unseen: bool) -> Values:
    return {"query": _words(rng, 3, unseen)}


def _message(rng: random.Random, unseen: bool) -> Values:
    person = made_up_name(rng, unseen=unseen) if unseen or rng.random() < 0.4 else rng.choice(NAMES)
    return {"person": person, "text": _words(rng, 4, unseen)}


def _nothing(rng: random.Random, unseen: bool) -> Values:
    return {}


def _sum(rng: random.Random, unseen: bool) -> Values:
    op = rng.choice("++--*")
    if rng.random() < 0.5 or (unseen and op == "*"):  # no pair of the small table is unseen
        a, b = rng.randint(100, 999), rng.randint(2, 999)  # what the model cannot do by itself
    else:
        a, b = arithmetic.sum_pair(rng, op, unseen=unseen)
    return {"a": a, "b": b, "op": op, "expression": f"{a} {op} {b}"}


_KEYS = ("sky", "wind", "rain", "note", "level", "state", "kind", "colour", "name", "number")


def _facts(rng: random.Random, num_max: int) -> dict[str, Any]:
    """An object that says anything."""
    found: dict[str, Any] = {}
    for _ in range(rng.randint(1, num_max)):
        key = made_up_word(rng) if rng.random() < 0.25 else rng.choice(_KEYS)
        draw = rng.random()
        found[key] = (
            rng.randint(-9, 99)
            if draw < 0.4
            else rng.choice((True, False))
            if draw < 0.5
            else rng.choice((rng.choice(COLOURS), rng.choice(LETTER_WORDS), made_up_word(rng)))
        )
    return found


def _weather(rng: random.Random, values: Values) -> str | dict[str, Any]:
    degrees = rng.randint(-9, 39)
    sky = rng.choice(("rain", "sun", "clouds", "snow", "fog", "wind", "sunny", "cloudy", "clear sky", "storm"))
    draw = rng.random()
    if draw < 0.3:
        return rng.choice((f"{degrees} degrees and {sky}", f"{sky}, {degrees} degrees", f"{sky}", f"{degrees} C"))
    if draw < 0.5:
        return _facts(rng, 3)
    named = {rng.choice(("temperature", "degrees", "temp", "celsius")): degrees}
    return named | ({rng.choice(("sky", "weather", "condition")): sky} if rng.random() < 0.8 else {})


def _time(rng: random.Random, values: Values) -> str | dict[str, Any]:
    text = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return text if rng.random() < 0.5 else {rng.choice(("time", "now", "clock")): text}


def _price(rng: random.Random, values: Values) -> str | dict[str, Any]:
    count, money = rng.randint(1, 999), rng.choice(("euros", "dollars", "pounds", "EUR", "USD"))
    if rng.random() < 0.5:
        return f"{count} {money}"
    return {"price": count} | ({"currency": money} if rng.random() < 0.5 else {})


def _found(rng: random.Random, values: Values) -> str | dict[str, Any]:
    return _words(rng, 5, False) if rng.random() < 0.6 else _facts(rng, 3)


def _sent(rng: random.Random, values: Values) -> str | dict[str, Any]:
    word = rng.choice(("sent", "done", "ok", "delivered", "failed"))
    return word if rng.random() < 0.5 else rng.choice(({"status": word}, {"sent": word != "failed"}))


def _day(rng: random.Random, values: Values) -> str | dict[str, Any]:
    day = rng.choice(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"))
    date = f"{rng.randint(2020, 2035)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    return rng.choice((day, date, {"day": day}, {"date": date}, {"day": day, "date": date}))


def _result(rng: random.Random, values: Values) -> str | dict[str, Any]:
    a, b = int(values["a"]), int(values["b"])
    result = a + b if values["op"] == "+" else a - b if values["op"] == "-" else a * b
    return str(result) if rng.random() < 0.5 else {rng.choice(("result", "value", "answer")): result}


def _told(rng: random.Random, values: Values) -> str | dict[str, Any]:
    draw = rng.random()
    if draw < 0.3:
        return str(rng.randint(0, 999))
    return _words(rng, 2, False) if draw < 0.7 else _facts(rng, 2)


# ---- the tools -------------------------------------------------------------------------------------------------------

_CALCULATORS = ("calculator", "calculator", "calculate", "calc", "compute", "do_sum")

KINDS: tuple[Kind, ...] = (
    Kind(
        "weather",
        ("get_weather", "weather", "get_current_weather", "current_weather", "weather_now", "get_forecast"),
        (
            *("The weather in a city.", "Get the current weather for a location.", "Tells how the weather is."),
            *("Current weather of a place.", "Get the weather for a city", "Weather now"),
        ),
        {"city": ("city", "city", "location", "place", "town"), "unit": ("unit", "units")},
        lines("""
[What is|What's|whats|How is|Tell me|Show me|Please tell me] the weather [in|for|like in] {city}[?|.|]
[What is|What's|How is|Tell me|I need] the weather in {city} [today|now|right now|please][?|.]
[Is it|Is it going to be] [raining|cold|warm|sunny|windy] in {city}[?| today?| now?]
[weather|Weather|The weather] in {city}[?|.| please|]
[How|How warm|How cold|How hot] is it [today|now|] in {city}?
Do I need [an umbrella|a coat|a hat] in {city}[?| today?]
[I am in|I live in|We fly to|We go to] {city}[, what is|, how is|. What is|. How is] the weather [like|today|]?
[Do you know|Can you tell me|Please check|Look up|I want to know] [what|how] the weather is in {city}[?|.]
{city}[, how is|: how is|: what is] the weather [there|now]?
{city} [forecast|weather now|weather today|rain|sun][?|]
"""),
        ("I travel to {city}, how is the weather there?", "Could you check the weather of {city}?", "{city} weather?"),
        "The weather in {city}",
        _city,
        _weather,
        lines("""
[What is|What's|How is|Tell me] the weather in {x} and [in|] {y}[?|.]
[Compare|Show me|I need] the weather [in|of] {x} and {y}.
Is it [warm|cold|raining] in {x} and in {y}?
"""),
    ),
    Kind(
        "time",
        ("get_time", "time", "current_time", "clock", "get_current_time", "local_time"),
        ("The time in a city.", "Get the local time of a place.", "Tells what time it is somewhere.", "Current time"),
        {"city": ("city", "city", "place", "location", "timezone")},
        lines("""
[What time is it|What's the time|What is the time] [now|] in {city}?
[Tell me|Give me|I need|Show me|Please tell me] the time in {city}[.| now.| please.]
[Time|time|The time] in {city}[?|.|]
How late is it in {city}?
[Do you know|Can you tell me|Please check|Look up|I want to know] [the time|how late it is] in {city}[?|.]
[I am in|I live in|I call|We fly to] {city}[, what time is it|. What time is it|, how late is it] [there|now]?
{city}[, what time is it|: what time is it|: the time please][?|.]
[In|For|Over in] {city}[, what time is it|, how late is it|: the time][?| now?]
What does [a|my|your] clock [in|for] {city} [say|show]?
"""),
        ("In {city}, what does the clock say?", "Do you know what time it is in {city}?"),
        "The time in {city}",
        _city,
        _time,
        lines("""
[What time is it|What is the time] in {x} and in {y}?
[Tell me|Give me] the time in {x} and {y}.
"""),
    ),
    Kind(
        "price",
        ("get_price", "price", "price_of", "lookup_price", "find_price"),
        ("The price of a thing.", "Get what a product costs.", "Looks up a price.", "Price of an item"),
        {"item": ("item", "item", "product", "thing", "article")},
        lines("""
[What does|How much does] a {item} cost[?| today?| now?]
[How much is|What is the price of|What's the price of] a {item}[?|]
[Tell me|Look up|Find|Check|I need|Give me] the price of a {item}[.| please.]
[Price|price] of a {item}[?|]
[I need|I like|I would like|My sister wants] a {item}[, what does it cost|, how much is it|. What is the price][?|]
[Is|Are you sure that] a {item} [is|] [cheap|expensive]?
[Do you know|Can you tell me|I want to know] [what a {item} costs|the price of a {item}][?|.]
How many [euros|dollars|coins] [is|for] a {item}?
A {item}[, how much|: how much is it|: what does it cost]?
How expensive [is|would be] a {item}[?| now?| today?]
[I buy|We buy|I want to sell|He wants to buy] a {item}[, what does it cost|, how much is it|. What is the price][?|]
[How much|What] [do|must|should] [I|we] pay [for|to get] a {item}?
"""),
        ("I want to buy a {item}, how expensive is it?", "What would I pay for a {item}?"),
        "The price of a {item}",
        _item,
        _price,
        lines("[What is|Tell me|Find] the price of a {x} and of a {y}[?|.]\nWhat do a {x} and a {y} cost?"),
    ),
    Kind(
        "search",
        ("search", "web_search", "find", "search_web", "lookup"),
        ("Search the web.", "Searches for words.", "Find something on the internet.", "Web search"),
        {"query": ("query", "query", "q", "text", "words")},
        lines("""
[Search|Please search|Can you search|Look|Please look] for {query}[.|]
[Search|Search the web|Look on the internet] for: {query}
[Find|Please find|Google|Look up] {query}[.| on the web.|]
[Do|Start|Please do|I need|I want] a search for {query}[.|]
[I want to|I need to|We want to|Let us|You should] [find|search for|look for] {query}[.|]
[What does|What can] the [internet|net] [say|tell me|know] about {query}[?|]
[Ask|Tell me what is on|Show me] the [web|internet] [for|about] {query}[.|]
[I would like to|I'd like to|I would like you to|You could|Would you] [look up|google|find] {query}[.|]
[See|Check|Find out|Read] what [is on the net|the internet says|they say] about {query}[.|]
"""),
        ("I would like you to search for {query}", "See what the web has on {query}"),
        "I found for {query}",
        _query,
        _found,
    ),
    Kind(
        "message",
        ("send_message", "message", "send", "notify", "send_text"),
        ("Send a message to a person.", "Sends a text to someone.", "Tell a person something.", "Send a message"),
        {"person": ("to", "person", "name", "receiver"), "text": ("text", "message", "body", "content")},
        lines("""
[Send|Please send|Can you send|Write] {person} [the message|this message|a message]: {text}
[Send|Write] a message to {person}: {text}
[Tell|Text|Message|Notify|Please tell] {person}: {text}
[Say to|Pass on to|Write to|Answer] {person}: {text}
[I have|There is|Here is] a [message|text|note] [for|to] {person}, [it says|please send it]: {text}
{person} [should know|must know|should read|has to hear]: {text}
"""),
        ("Let {person} know: {text}", "A message for {person}: {text}"),
        "The message to {person}",
        _message,
        _sent,
    ),
    Kind(
        "date",
        ("get_date", "date", "today", "current_date", "get_today"),
        ("The date of today.", "Get the current date.", "Tells what day it is.", "Current date"),
        {},
        lines("""
[What is|What's|Tell me|Give me] the date [today|now|of today][?|.]
[What|Which] day is it [today|now|][?|]
[What is|Tell me] today's date[?|.]
"""),
        ("Do you know which day we have?", "I forgot today's date."),
        "Today",
        _nothing,
        _day,
    ),
    Kind(
        "calculator",
        _CALCULATORS,
        (
            "Calculates with two numbers.",
            "Adds, subtracts or multiplies.",
            "A calculator.",
            "Does sums of two numbers.",
        ),
        {
            "a": tuple(a for a, _ in _OPERANDS),
            "b": tuple(b for _, b in _OPERANDS),
            "op": ("op", "op", "operator", "operation"),
        },
        (),
        (),
        "",
        _sum,
        _result,
    ),
    Kind(
        "expression",
        _CALCULATORS,
        ("Calculates an expression.", "Evaluate a sum.", "A calculator for expressions.", "Does a calculation."),
        {"expression": ("expression", "expression", "formula", "input")},
        (),
        (),
        "",
        _sum,
        _result,
    ),
)

_THINGS = ("person", "user", "customer", "order", "product", "city", "country", "team", "room", "car", "company")


def own_kind(rng: random.Random, *, unseen: bool = False) -> Kind:
    """A tool for one thing of another, as a user's own may be: the name of the tool is in the question for it."""
    noun = made_up_word(rng, unseen=unseen) if unseen or rng.random() < 0.5 else rng.choice(NOUNS)
    thing = rng.choice(_THINGS)
    slot = "number" if rng.random() < 0.2 else "value"
    parameters = {"number": (f"{thing}_id", "id", "number"), "value": (thing, thing, "name", f"{thing}_name")}

    def draw(rng: random.Random, unseen: bool) -> Values:
        if slot == "number":
            return {slot: rng.randint(1, 999)}
        named = rng.choice((*CITIES, *NAMES)) if not unseen and rng.random() < 0.4 else made_up_name(rng, unseen=unseen)
        return {slot: named}

    value, x, y = (f"{{{each}}}" if slot == "value" else f"{thing} {{{each}}}" for each in (slot, "x", "y"))
    return Kind(
        f"own {noun}",
        (f"get_{noun}", f"get_{noun}", noun, f"find_{noun}", f"lookup_{noun}", f"{noun}_of", f"get_{thing}_{noun}"),
        (f"The {noun} of a {thing}.", f"Get the {noun} of a {thing}.", f"Looks up the {noun} of a {thing}."),
        {slot: parameters[slot]},
        lines(f"""
[What is|What's|Tell me|Give me|Show me|Find|Look up|I need|Check|Get] the {noun} of {value}[?|.]
[What is|Tell me|Please tell me|Get me|I need to know] the {noun} [of|for] {value}[?|.| please.|]
[Can|Could] you [get|find|look up|tell me] the {noun} [of|for] {value}?
[{noun}|The {noun}] of {value}[?|.|]
[Do you know|I want to know|I am looking for|I forgot] the {noun} of {value}[?|.]
[Does {value} have|Has {value} got] any {noun}?
Is there any {noun} for {value}?
{value}[, what is|: what is|: tell me|: I need] [the|its] {noun}[?|.]
What is {value}'s {noun}?
"""),
        (f"Which {noun} does {value} have?", f"What {noun} has {value}?"),
        f"The {noun} of {value}",
        draw,
        _told,
        lines(f"[What is|Tell me|Find] the {noun} of {x} and of {y}[?|.]"),
    )
