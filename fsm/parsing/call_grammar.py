"""Grammars of answers that must call a tool, or whose arguments must fit their schema, in llguidance's Lark.

Only the envelope of a call is spelled out, as templates write it; arguments of a tool are held to its schema where it
is `strict`, and are any JSON object where it is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from novainfer.fsm.parsing.formats import CLOSE_CALL, CLOSE_THINK, HERMES, MARKERS, OPEN_CALL, OPEN_THINK, Formats

# Between the tokens of arguments: as templates write it, or indented.
SPACES = r"( |\n[ \t]{0,32})?"


def has_grammar(formats: Formats) -> bool:
    """Whether calls in these formats can be held to one: as JSON, between markers that no text can spell."""
    return formats.tool_calls == HERMES and all(marker in formats.marker_ids for marker in MARKERS)


def grammar_of_calls(
    tools: Sequence[Mapping[str, Any]],
    formats: Formats,
    *,
    must_call: bool,
    has_one_call: bool = False,
    is_thinking: bool = False,
) -> str:
    """What an answer with calls of `tools` (OpenAI's) may be; with `must_call` nothing but thoughts and calls.

    `is_thinking`: the prompt has opened `<think>`. There must be one for these formats (`has_grammar`).
    """
    rules = [f"call: {' | '.join(f'call_{at}' for at in range(len(tools)))}"]
    for at, tool in enumerate(tools):
        rules += _call(at, tool["function"], formats)
    calls = "call" if has_one_call else "call (SPACE? call)*"
    if must_call:
        begin = "TEXT end_think SPACE? " if is_thinking else "(open_think TEXT end_think SPACE?)? "
        rules.insert(0, f"start: {begin}SPACE? {calls}")
    else:
        more = "" if has_one_call else "(call TEXT)*"
        thoughts = "(open_think TEXT | end_think TEXT)*"
        rules.insert(0, f"start: TEXT {thoughts} {'call?' if has_one_call else more}")
    rules += [
        r"TEXT: /(.|\n)*/",
        r"SPACE: /[ \n]{1,4}/",
        f"open_think: {_marker(OPEN_THINK, formats)}",
        f"end_think: {_marker(CLOSE_THINK, formats)}",
    ]
    return "\n".join(rules)


def _call(at: int, function: Mapping[str, Any], formats: Formats) -> list[str]:
    opened, closed = _marker(OPEN_CALL, formats), _marker(CLOSE_CALL, formats)
    schema = function.get("parameters") if function.get("strict") else None
    arguments = {**(schema or {"type": "object"}), "x-guidance": {"whitespace_pattern": SPACES}}
    begin = json.dumps('\n{"name": "' + function["name"] + '", "arguments": ')
    end = json.dumps("}\n")
    return [
        f"call_{at}: {opened} {begin} arguments_{at} {end} {closed}",
        f"arguments_{at}: %json {json.dumps(arguments)}",
    ]


def _marker(marker: str, formats: Formats) -> str:
    return f"<[{formats.marker_ids[marker]}]>"
