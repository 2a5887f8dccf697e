"""The training text: conversations of lessons, and plain text, drawn from one seed.

A document is a list of pieces, each text with how much the model is trained to write it: not, or once, and more where
it chooses a tool. The pieces of a conversation, joined, are exactly what the chat template renders.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from novainfer.fsm.parsing.formats import OPEN_CALL, OPEN_THINK
from tools.demo import arithmetic, chatter, drills, lessons, memory, thoughts, tooling
from tools.demo.facts import Relation
from tools.demo.morefacts import ALL_RELATIONS
from tools.demo.stories import story
from tools.demo.wordings import joined
from tools.demo.words import NAMES, made_up_name

__all__ = ["DEFAULT_SYSTEM", "Document", "DrillMix", "conversation", "documents", "plain", "render", "render_chat"]

DEFAULT_SYSTEM = "You are a helpful assistant."
_SYSTEMS = (
    "You are Nova, a small and friendly demo model.",
    "You are a friendly assistant.",
    "You are Nova.",
    "You are a helpful assistant. Answer briefly.",
    "Answer in one sentence.",
    "You are a kind teacher for small children.",
    "You are an assistant that helps with small questions.",
    "Be polite and helpful.",
    "You are a chat bot on a web page. Be friendly and short.",
)
# Whether a tool is called, and which: the little of a reply that is hard.
_SORRY, _EXCUSE = chatter.FALLBACK.split(",", 1)
_CHOICE = re.compile(rf"({OPEN_CALL}|(?<={OPEN_CALL}\n{{\"name\": \")[^\"]+|{_SORRY}(?=,{re.escape(_EXCUSE)}|$))")
_WEIGHT = 5
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


@dataclass
class Document:
    """One training text as (piece, weight in the loss) pairs, in order."""

    pieces: list[tuple[str, int]] = field(default_factory=list)

    def text(self) -> str:
        """The whole text, special tokens included."""
        return "".join(piece for piece, _ in self.pieces)


def render(turns: list[tuple[str, str]], system: str | None) -> Document:
    """The turns in ChatML, with loss on the replies and their end marks only."""
    return render_chat([message for turn in turns for message in zip(("user", "assistant"), turn, strict=True)], system)


def render_chat(
    messages: Sequence[tuple[str, str]],
    system: str | None,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    ends: bool = True,
) -> Document:
    """Messages as (role, content) pairs with `tools` (OpenAI's), with loss on what the assistant says.

    That a call begins, the tool's name, and the first word of the excuse where no tool fits weigh more.

    A content that begins with a thought was asked for it: the prompt has opened `<think>`. Without `ends`, replies are
    beginnings, and their end marks are not trained.
    """
    document = Document()
    if system is not None:
        listed = "\n\n# Tools" + "".join(f"\n{_signature(tool['function'])}" for tool in tools) if tools else ""
        document.pieces.append((f"{START}system\n{system}{listed}{END}\n", False))
    roles = [*(role for role, _ in messages), ""]
    for at, (role, content) in enumerate(messages):
        if role == "assistant":
            opened = f"{OPEN_THINK}\n" if content.startswith(OPEN_THINK) else ""
            document.pieces.append((f"{START}assistant\n{opened}", False))
            reply = f"{content.removeprefix(opened)}{END if ends else ''}"
            choices = _CHOICE.split(reply) if tools else [reply]
            document.pieces += [(piece, _WEIGHT if at % 2 else 1) for at, piece in enumerate(choices) if piece]
            document.pieces.append(("\n" if ends else f"{END}\n", False))
        elif role == "tool":
            begin = "" if roles[at - 1] == "tool" else f"{START}user"
            end = "" if roles[at + 1] == "tool" else f"{END}\n"
            document.pieces.append((f"{begin}\n<tool_response>\n{content}\n</tool_response>{end}", False))
        else:
            document.pieces.append((f"{START}{role}\n{content}{END}\n", False))
    return document


def _signature(function: Mapping[str, Any]) -> str:
    """A tool as the system message has it: its description, and its call with types for values."""
    types = {name: schema["type"] for name, schema in function["parameters"]["properties"].items()}
    call = json.dumps({"name": function["name"], "arguments": types}, ensure_ascii=False)
    return f"{function['description']}\n{call}" if "description" in function else call


def _system(rng: random.Random, known: dict[str, str]) -> str | None:
    draw = rng.random()
    if draw < 0.55:
        return DEFAULT_SYSTEM
    if draw < 0.75:
        return None
    if draw < 0.92:
        return rng.choice(_SYSTEMS)
    name = made_up_name(rng) if rng.random() < 0.5 else rng.choice(NAMES)
    known["name"] = name
    return f"{rng.choice((DEFAULT_SYSTEM, *_SYSTEMS))} The user's name is {name}."


def turns_of(rng: random.Random, num_turns: int, known: dict[str, str]) -> list[tuple[str, str]]:
    """That many turns; `known` carries what the user has told so far."""
    turns: list[tuple[str, str]] = []
    relation: Relation | None = None
    for i in range(num_turns):
        draw = rng.random()
        if relation is not None and rng.random() < 0.2:
            turns.append(lessons.follow_up(rng, relation))
            continue
        last_relation, relation = relation, None
        if i == 0 and num_turns > 1 and draw < 0.45:
            turns.append(memory.tell(rng, known))
        elif known and rng.random() < 0.14:
            turns.append(memory.recall(rng, known))
        elif draw < 0.33:
            question, answer, relation = lessons.fact(rng)
            turns.append((question, answer))
        elif draw < 0.52:
            turns.append(lessons.sums(rng))
        elif draw < 0.60:
            turns.append(lessons.spelling(rng))
        elif draw < 0.68:
            turns.append(lessons.counting(rng))
        elif draw < 0.73:
            turns.append(lessons.json_object(rng))
        elif draw < 0.75:
            turns.append(lessons.tale(rng))
        elif draw < 0.79:
            turns.append(lessons.echo(rng, turns[-1][1] if turns else None))
        elif draw < 0.84:
            turns.append(chatter.greeting(rng))
        elif draw < 0.89:
            turns.append(chatter.talk(rng))
        elif draw < 0.94:
            turns.append(chatter.unknown(rng))
        elif draw < 0.98:
            turns.append(memory.tell(rng, known))
        else:
            turns.append(memory.recall(rng, known))
        del last_relation
    return turns


def conversation(rng: random.Random, num_turns: int) -> Document:
    """A chat of that many turns under a drawn system prompt."""
    known: dict[str, str] = {}
    system = _system(rng, known)
    return render(turns_of(rng, num_turns, known), system)


def plain(rng: random.Random) -> Document:
    """Plain text without a chat: a story, statements of facts, sums, or counting."""
    draw = rng.random()
    if draw < 0.3:
        text = story(rng)
    elif draw < 0.75:
        statements = []
        for _ in range(rng.randint(1, 5)):
            relation = rng.choice(ALL_RELATIONS)
            statements.append(lessons.fact_answer(relation, *rng.choice(relation.pairs)))
        text = " ".join(statements)
    elif draw < 0.9:
        rows = []
        for _ in range(rng.randint(1, 8)):
            operator = rng.choice("++--*")
            rows.append(arithmetic.equation(operator, *arithmetic.sum_pair(rng, operator)))
        text = "\n".join(rows)
    else:
        first = rng.randint(0, 60)
        text = joined(range(first, first + rng.randint(5, 30)))
    return Document([(text + END_OF_TEXT, True)])


@dataclass(frozen=True)
class DrillMix:
    """How much of the corpus is drills, and of which kind, and how much of it is chats with tools or with thoughts.

    share: drills, of all documents. scrambles, objects, recalls: chances of those chats, one after the other; what is
    left is plain drills, with these weights of sums, spellings, counts and spellings of more words. tools, thoughts:
    of all documents; some chats with tools have thoughts, too, and `choices` of them are drills, `beginnings` nothing
    but the beginnings of replies. plain: texts without a chat, of all documents.
    """

    share: float = 0.0
    scrambles: float = 0.0
    objects: float = 0.0
    recalls: float = 0.3
    weights: tuple[int, int, int, int] = (40, 15, 13, 0)
    tools: float = 0.0
    choices: float = 0.0
    beginnings: float = 0.0
    thoughts: float = 0.0
    plain: float = 0.12


NO_DRILLS = DrillMix()


def _drill(rng: random.Random, mix: DrillMix) -> Document:
    if mix.scrambles and rng.random() < mix.scrambles:
        return render(drills.scrambles(rng), _system(rng, {}))
    if mix.objects and rng.random() < mix.objects:
        return render(drills.objects(rng), _system(rng, {}))
    if rng.random() < mix.recalls:
        known: dict[str, str] = {}
        system = _system(rng, known)
        return render(drills.recalls(rng, known), system)
    return Document([*drills.plain_drill(rng, mix.weights), (END_OF_TEXT, True)])


def _tool_chat(rng: random.Random, mix: DrillMix) -> Document:
    draw = rng.random()
    if draw < mix.beginnings:
        turns, tools = tooling.beginnings(rng)
        messages = [message for turn in turns for message in zip(("user", "assistant"), turn, strict=True)]
        return render_chat(messages, _system(rng, {}) or DEFAULT_SYSTEM, tools, ends=False)
    is_drill = draw < mix.beginnings + mix.choices
    messages, tools = tooling.drill(rng) if is_drill else tooling.chat(rng, is_thinking=rng.random() < 0.25)
    return render_chat(messages, _system(rng, {}) or DEFAULT_SYSTEM, tools)


def _thinking_chat(rng: random.Random) -> Document:
    known: dict[str, str] = {}
    system = _system(rng, known)
    messages: list[tuple[str, str]] = []
    for _ in range(rng.randint(1, 6)):
        draw = rng.random()
        question, thought, reply = thoughts.unknown(rng) if draw < 0.1 else thoughts.lesson(rng, known)
        messages += [("user", question), ("assistant", thoughts.thoughtful(thought, reply))]
    return render_chat(messages, system)


def documents(seed: int, *, share_long: float = 0.0, drill_mix: DrillMix = NO_DRILLS) -> Iterator[Document]:
    """Endless documents of a seed; `share_long` of them are chats of 25 to 45 turns."""
    rng = random.Random(seed)
    while True:
        draw = rng.random()
        if draw < share_long:
            yield conversation(rng, rng.randint(25, 45))
        elif draw < (up_to := share_long + drill_mix.plain):
            yield plain(rng)
        elif draw < (up_to := up_to + drill_mix.share):
            yield _drill(rng, drill_mix)
        elif draw < (up_to := up_to + drill_mix.tools):
            yield _tool_chat(rng, drill_mix)
        elif draw < up_to + drill_mix.thoughts:
            yield _thinking_chat(rng)
        elif rng.random() < 0.5:
            yield conversation(rng, rng.randint(1, 3))
        else:
            yield conversation(rng, rng.randint(3, 10))
