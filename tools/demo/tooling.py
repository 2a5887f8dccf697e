"""Chats with tools: which to call, with what, in what form, and when to call none.

Each is the messages of a chat, as (role, content) pairs, and the tools that it offers. Calls and thoughts are part of
the contents, as the chat template writes them.
"""

from __future__ import annotations

import random
from typing import Any

from tools.demo import chatter, thoughts
from tools.demo.toolkits import KINDS, Offered, answer, offer, own_kind, said
from tools.demo.wordings import fill, lower_first, surround
from tools.demo.words import NOUNS

__all__ = ["Message", "beginnings", "chat", "drill"]

Message = tuple[str, str]
_SUMS = ("calculator", "expression")
_SHARE_OWN = 0.3  # of the tools
_JOINTS = ("And", "Also,", "Then", "And then")


def drawn_tools(rng: random.Random, count: int) -> list[Offered]:
    """That many tools of different kinds and names, in any order; at most one that calculates."""
    found: list[Offered] = []
    while len(found) < count:
        tool = offer(rng, own_kind(rng) if rng.random() < _SHARE_OWN else rng.choice(KINDS))
        purposes = ["sums" if each.kind.name in _SUMS else each.kind.name for each in (tool, *found)]
        if purposes[0] not in purposes[1:] and tool.name not in [other.name for other in found]:
            found.append(tool)
    return found


def _one(rng: random.Random, tool: Offered) -> tuple[str, list[str], list[str], str]:
    """A question with one call: question, calls, what the tools say, answer."""
    values = tool.kind.draw(rng, False)
    result = tool.kind.says(rng, values)
    return tool.ask(rng, values), [tool.call(values)], [said(result)], answer(tool.kind, values, result)


def _pair(rng: random.Random, tool: Offered) -> tuple[str, list[str], list[str], str]:
    """A question for two values: two calls of one tool."""
    both = [tool.kind.draw(rng, False) for _ in range(2)]
    slot = next(iter(both[0]))
    question = fill(rng.choice(tool.kind.pair_asks), x=both[0][slot], y=both[1][slot])
    results = [tool.kind.says(rng, values) for values in both]
    answers = [answer(tool.kind, values, result) for values, result in zip(both, results, strict=True)]
    return question, [tool.call(values) for values in both], [said(each) for each in results], " ".join(answers)


def _two(rng: random.Random, tools: list[Offered]) -> tuple[str, list[str], list[str], str]:
    """Two questions in one turn, each with a call."""
    asked = [_one(rng, rng.choice(tools)) for _ in range(2)]
    first, second = asked[0][0], asked[1][0]
    end = "" if first[-1:] in ".?!" else "."
    question = f"{first}{end} {rng.choice(_JOINTS)} {lower_first(second)}"
    return (
        question,
        [*asked[0][1], *asked[1][1]],
        [*asked[0][2], *asked[1][2]],
        f"{asked[0][3]} {asked[1][3]}",
    )


def _not_offered(rng: random.Random, tools: list[Offered]) -> tuple[str, str]:
    """A question for a tool that this chat has not, and the reply that says so."""
    offered = {tool.kind.name for tool in tools}
    kinds = [kind for kind in KINDS if kind.name not in offered and kind.asks]
    # As often of each kind as it is offered: else the kind alone would tell, more often than not, that no tool fits.
    own = own_kind(rng)
    kind = own if own.name not in offered and rng.random() < _SHARE_OWN else rng.choice(kinds)
    values = kind.draw(rng, False)
    return surround(rng, fill(rng.choice(kind.asks), **values), NOUNS), chatter.FALLBACK


def chat(rng: random.Random, *, is_thinking: bool) -> tuple[list[Message], list[dict[str, Any]]]:
    """A chat of one to three questions, with its tools in OpenAI's shape."""
    [count] = rng.choices((1, 2, 3), weights=(45, 40, 15))
    tools = drawn_tools(rng, count)
    has_sums = any(tool.kind.name in _SUMS for tool in tools)
    pairing = [tool for tool in tools if tool.kind.pair_asks]
    messages: list[Message] = []
    known: dict[str, str] = {}

    def say(thought: str, reply: str) -> None:
        messages.append(("assistant", thoughts.thoughtful(thought, reply) if is_thinking else reply))

    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        draw = rng.random()
        if draw < 0.62:
            if pairing and draw < 0.14:
                question, calls, results, reply = _pair(rng, rng.choice(pairing))
            elif draw < 0.21:
                question, calls, results, reply = _two(rng, tools)
            else:
                question, calls, results, reply = _one(rng, rng.choice(tools))
            messages.append(("user", question))
            say("I need a tool." if len(calls) == 1 else "I need two calls.", "\n".join(calls))
            messages += [("tool", result) for result in results]
            say("The tool has told me.", reply)
        elif draw < 0.78:
            question, reply = _not_offered(rng, tools)
            messages.append(("user", question))
            say("No tool for that.", reply)
        else:
            question, thought, reply = thoughts.lesson(rng, known, has_sums=not has_sums)
            messages.append(("user", question))
            say(thought, reply)
    return messages, [tool.as_openai() for tool in tools]


def beginnings(rng: random.Random) -> tuple[list[tuple[str, str]], list[dict[str, Any]]]:
    """Questions, half of them for none of the tools, each with the beginning of its reply: which tool, or the excuse.

    That is all of a reply that is chosen; whether any tool fits is harder to learn than which one does.
    """
    [count] = rng.choices((1, 2, 3), weights=(40, 35, 25))
    tools = drawn_tools(rng, count)
    turns: list[tuple[str, str]] = []
    for _ in range(rng.randint(2, 5)):  # of many, the later ones could be told by the earlier ones
        if rng.random() < 0.5:
            question, reply = _not_offered(rng, tools)
            turns.append((question, reply.split(",")[0]))
        else:
            tool = rng.choice(tools)
            values = tool.kind.draw(rng, False)
            turns.append((tool.ask(rng, values), tool.call(values).split('", "arguments"')[0]))
    return turns, [tool.as_openai() for tool in tools]


def drill(rng: random.Random) -> tuple[list[Message], list[dict[str, Any]]]:
    """A chat of choices: a question for each of one to four tools, few of them answered, and for tools that it has not.

    What a call is made of is soon learnt, which tool is called is not: here that is what most turns are about.
    """
    tools = drawn_tools(rng, rng.randint(1, 4))
    wanted: list[Offered | None] = [*tools, *[None] * rng.randint(0, 3)]
    rng.shuffle(wanted)
    messages: list[Message] = []
    for tool in wanted:
        if tool is None:
            question, reply = _not_offered(rng, tools)
            messages += [("user", question), ("assistant", reply)]
            continue
        question, calls, results, reply = _one(rng, tool)
        messages += [("user", question), ("assistant", calls[0])]
        if rng.random() < 0.2:
            messages += [("tool", results[0]), ("assistant", reply)]
    return messages, [tool.as_openai() for tool in tools]
