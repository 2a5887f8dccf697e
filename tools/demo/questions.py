"""The held-out questions: operand pairs, wordings, names, words and ranges that training never draws.

Each question is a conversation so far and the exact reply that counts as right; `unseen` names what about it is new.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from novainfer.fsm.parsing.formats import OPEN_THINK
from tools.demo import arithmetic, chatter, corpus, lessons, memory, thoughts, toolkits
from tools.demo.morefacts import ALL_RELATIONS
from tools.demo.wordings import FRAMES, HELD_OUT_FRAMES, fill, frame, sentence
from tools.demo.words import UNSEEN_WORDS, made_up_word

__all__ = ["GROUPS", "Question", "prompt_of"]


@dataclass(frozen=True)
class Question:
    """Messages as (role, content) pairs, the last one the user's or a tool's, and the reply that is right.

    Calls and thoughts of the assistant are written out in contents and reply. tools: in OpenAI's shape. is_thinking:
    the prompt opens the thoughts, so the reply goes on with them.
    """

    messages: tuple[tuple[str, str], ...]
    reply: str
    unseen: str
    tools: tuple[dict[str, Any], ...] = ()
    is_thinking: bool = False


def prompt_of(tokenizer: Any, question: Question) -> str:
    """The prompt as the chat template writes it; the tokenizer is transformers'."""
    text: str = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in question.messages],
        tools=list(question.tools) or None,
        enable_thinking=question.is_thinking,
        tokenize=False,
        add_generation_prompt=True,
    )
    return text


def _single(user: str, reply: str, unseen: str) -> Question:
    return Question((("user", user),), reply, unseen)


def _sum(rng: random.Random, asks: dict[str, tuple[str, ...]]) -> Question:
    operator = rng.choice("+-")
    a, b = arithmetic.sum_pair(rng, operator, unseen=True)
    user = fill(rng.choice(asks[operator]), a=a, b=b)
    return _single(user, f"{arithmetic.equation(operator, a, b)}.", "plus" if operator == "+" else "minus")


def sums(rng: random.Random) -> Question:
    """A sum or difference of a pair of numbers that was never trained, in a trained wording."""
    return _sum(rng, arithmetic.SUM_ASKS)


def sums_reworded(rng: random.Random) -> Question:
    """The same in a wording that was never trained either."""
    return _sum(rng, arithmetic.UNSEEN_SUM_ASKS)


def products(rng: random.Random) -> Question:
    """A product of the small table; all of its pairs are trained, only the wording is new."""
    a, b = arithmetic.sum_pair(rng, "*")
    return _single(
        fill(rng.choice(arithmetic.UNSEEN_SUM_ASKS["*"]), a=a, b=b), f"{arithmetic.equation('*', a, b)}.", "wording"
    )


def facts(rng: random.Random) -> Question:
    """A fact asked in a wording that was never trained: an unseen frame, noun phrase or question."""
    relation = rng.choice(ALL_RELATIONS)
    x, y = rng.choice(relation.pairs)
    kind = rng.choice(("frame", "noun phrase", "question"))
    if kind == "frame":
        template = frame(rng.choice(HELD_OUT_FRAMES), rng.choice(relation.nouns))
    elif kind == "noun phrase":
        template = frame(rng.choice(FRAMES), rng.choice(relation.held_out_nouns))
    else:
        template = rng.choice(relation.held_out_asks)
    return _single(sentence(fill(template, x=x)), lessons.fact_answer(relation, x, y), kind)


def _told_before(
    rng: random.Random, attribute: memory.Attribute, num_between: int, *, asks: tuple[str, ...]
) -> Question:
    value = memory.value_of(rng, attribute.name, unseen=True)
    kind = rng.choice(("dog", "cat", "rabbit"))
    tells = attribute.tells + attribute.held_out_tells if attribute.name == "name" else attribute.tells
    told = fill(rng.choice(tells), v=value, k=kind)
    reply = fill(attribute.reply, v=value, k=kind)
    # What lies between may not tell the same thing again.
    known = {attribute.name: value, "kind": kind}
    between: list[tuple[str, str]] = []
    while len(between) < num_between:
        trial = dict(known)
        turns = corpus.turns_of(rng, 1, trial)
        if trial[attribute.name] == value and trial["kind"] == kind:
            known = trial
            between += turns
    messages = [("user", told), ("assistant", reply[:1].upper() + reply[1:])]
    for user, assistant in between:
        messages += [("user", user), ("assistant", assistant)]
    messages.append(("user", fill(rng.choice(asks), k=kind)))
    distance = "next turn" if not num_between else "1-4 turns later" if num_between < 5 else "25-35 turns later"
    return Question(tuple(messages), fill(attribute.answer, v=value, k=kind), distance)


def names(rng: random.Random) -> Question:
    """A name that no training text has, told 0 to 4 turns before, asked for in a wording never trained."""
    attribute = memory.ATTRIBUTES[0]
    return _told_before(rng, attribute, rng.choice((0, 1, 2, 4)), asks=attribute.held_out_asks)


def names_far(rng: random.Random) -> Question:
    """The same with 25 to 35 turns in between, some 800 to 1,800 tokens."""
    attribute = memory.ATTRIBUTES[0]
    return _told_before(rng, attribute, rng.randint(25, 35), asks=attribute.held_out_asks)


def facts_far(rng: random.Random) -> Question:
    """A fact in an unseen wording at the end of a chat of 25 to 35 turns."""
    question = facts(rng)
    before = corpus.turns_of(rng, rng.randint(25, 35), {})
    messages = [(role, content) for turn in before for role, content in zip(("user", "assistant"), turn, strict=True)]
    return Question((*messages, *question.messages), question.reply, question.unseen)


def details(rng: random.Random) -> Question:
    """Colour, age, pet, word and the like told 0 to 4 turns before; the wording of the question is new."""
    attribute = rng.choice(memory.ATTRIBUTES[1:])
    return _told_before(rng, attribute, rng.choice((0, 1, 2, 4)), asks=attribute.held_out_asks)


def spelling(rng: random.Random) -> Question:
    """A word that was never spelt in training, half of them made up; spelt, counted or taken apart."""
    made_up = rng.random() < 0.5
    word = made_up_word(rng, unseen=True) if made_up else rng.choice(UNSEEN_WORDS)
    if rng.random() < 0.5:
        return _single(fill(rng.choice(lessons.UNSEEN_SPELL), q=word), lessons.spell_answer(word, "spell"), "spell")
    return _single(f"How many letters does the word {word} have?", lessons.spell_answer(word, "count"), "count letters")


def counting(rng: random.Random) -> Question:
    """Counting between two numbers whose pair was never trained."""
    first, last = lessons.count_range(rng, unseen=True)
    step = 1 if first < last else -1
    numbers = ", ".join(str(n) for n in range(first, last + step, step))
    return _single(f"Count from {first} to {last}.", f"{numbers}.", "up" if step == 1 else "down")


def json_objects(rng: random.Random) -> Question:
    """A JSON object with values drawn anew and an unseen name if it has one."""
    record = lessons.json_record(rng, unseen=True)
    user, _ = lessons.json_object(rng, record)
    return _single(user, json.dumps(record, ensure_ascii=False), f"{len(record)} fields")


def _offered(rng: random.Random, *, renamed: bool) -> list[toolkits.Offered]:
    """Two tools of different kinds; the first is the one to be called.

    They have the names that such tools have, or, `renamed`, names that no training text has. What a tool of the user's
    own is for is in no training text either.
    """
    kinds = [kind for kind in toolkits.KINDS if kind.name not in ("date", "expression")]
    kinds = rng.sample([*kinds, toolkits.own_kind(rng, unseen=True)], 2)
    return [toolkits.offer(rng, kind, made_up=renamed, unseen=True) for kind in kinds]


def _with_tools(
    rng: random.Random, offered: list[toolkits.Offered], messages: list[tuple[str, str]], reply: str, unseen: str
) -> Question:
    tools = [tool.as_openai() for tool in offered]
    rng.shuffle(tools)
    return Question(tuple(messages), reply, unseen, tuple(tools))


def _call(rng: random.Random, *, reworded: bool = False, renamed: bool = False) -> Question:
    offered = _offered(rng, renamed=renamed)
    tool, other = offered
    values = tool.kind.draw(rng, True)
    user = tool.question(rng, values, unseen=reworded)
    if rng.random() < 0.2 and tool.kind.name != "calculator":
        return _with_tools(rng, [other], [("user", user)], chatter.FALLBACK, "no tool fits")
    return _with_tools(rng, offered, [("user", user)], tool.call(values), tool.kind.name.split(" ")[0])


def tools(rng: random.Random) -> Question:
    """One of two tools to be called with values that were never trained; or none that fits."""
    return _call(rng)


def tools_reworded(rng: random.Random) -> Question:
    """The same in a wording that was never trained either."""
    return _call(rng, reworded=True)


def tools_renamed(rng: random.Random) -> Question:
    """A trained wording, for tools whose names and parameters were never trained and say nothing."""
    return _call(rng, renamed=True)


def tool_answers(rng: random.Random) -> Question:
    """The answer from what one or two calls have told."""
    offered = _offered(rng, renamed=rng.random() < 0.5)
    tool = offered[0]
    count = 2 if tool.kind.pair_asks and rng.random() < 0.4 else 1
    drawn = [tool.kind.draw(rng, True) for _ in range(count)]
    slot = next(iter(drawn[0]))
    if count == 2:
        user = fill(rng.choice(tool.kind.pair_asks), x=drawn[0][slot], y=drawn[1][slot])
    else:
        user = tool.question(rng, drawn[0])
    messages = [("user", user), ("assistant", "\n".join(tool.call(values) for values in drawn))]
    answers = []
    for values in drawn:
        result = tool.kind.says(rng, values)
        messages.append(("tool", toolkits.said(result)))
        answers.append(toolkits.answer(tool.kind, values, result))
    return _with_tools(rng, offered, messages, " ".join(answers), "one result" if count == 1 else "two results")


def thoughts_before(rng: random.Random) -> Question:
    """A sum or a fact, as in `sums` and `facts`, with a thought before the reply."""
    is_sum = rng.random() < 0.5
    question = sums(rng) if is_sum else facts(rng)
    if is_sum:
        thought = thoughts.of_sum(question.reply)
    else:
        relation, x = next(
            (relation, x)
            for relation in ALL_RELATIONS
            for x, y in relation.pairs
            if lessons.fact_answer(relation, x, y) == question.reply
        )
        thought = thoughts.of_fact(relation, x)
    # The prompt has opened them.
    reply = thoughts.thoughtful(thought, question.reply).removeprefix(f"{OPEN_THINK}\n")
    return Question(question.messages, reply, "sum" if is_sum else "fact", is_thinking=True)


GROUPS: dict[str, Callable[[random.Random], Question]] = {
    "sums": sums,
    "sums_reworded": sums_reworded,
    "products": products,
    "facts": facts,
    "names": names,
    "names_far": names_far,
    "facts_far": facts_far,
    "details": details,
    "spelling": spelling,
    "counting": counting,
    "json": json_objects,
    "tools": tools,
    "tools_reworded": tools_reworded,
    "tools_renamed": tools_renamed,
    "tool_answers": tool_answers,
    "thoughts": thoughts_before,
}
