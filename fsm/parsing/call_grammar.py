"""Grammars of answers that must call a tool, or whose arguments must fit their schema, in llguidance's Lark.

Only the envelope of a call is spelled out, as templates write it; arguments of a tool are held to its schema where it
is `strict`, and are any JSON object where it is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from novainfer.fsm.parsing.formats import CLOSE_CALL, OPEN_CALL, QWEN3_CODER, Formats

# Between the tokens of arguments: as templates write it, or indented.
SPACES = r"( |\n[ \t]{0,32})?"


def grammar_of_calls(
    tools: Sequence[Mapping[str, Any]],
    formats: Formats,
    *,
    must_call: bool,
    has_one_call: bool = False,
) -> str:
    """What an answer with calls of `tools` (OpenAI's) may be behind its thoughts; with `must_call` only calls."""
    make = _xml_call if formats.tool_calls == QWEN3_CODER else _json_call
    rules = [
        f"call: {_marker(OPEN_CALL, formats)} opened",
        f"opened: {' | '.join(f'call_{at}' for at in range(len(tools)))}",
        r"SPACE: /[ \n]{1,4}/",
    ]
    for at, tool in enumerate(tools):
        rules += make(at, tool["function"], formats)
    if must_call:
        start = "SPACE? call" if has_one_call else "SPACE? call (SPACE? call)*"
    elif OPEN_CALL in formats.marker_ids:
        start = "TEXT call?" if has_one_call else "TEXT (call TEXT)*"
        rules.append(r"TEXT: /(.|\n)*/")  # which cannot spell a marker that is a token
    else:  # wherever it is written, it begins a call
        start = "begun opened | TEXT" if has_one_call else "(begun opened)* TEXT"
        rules.append(rf'begun[suffix="{OPEN_CALL}"]: /(.|\n)*/')
        rules.append(rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{OPEN_CALL}(.|\n)*/")
    return "\n".join([f"start: {start}", *rules])


def _xml_call(at: int, function: Mapping[str, Any], formats: Formats) -> list[str]:
    """Its parameters in the order of the schema where the tool is `strict`, and else any of them in any order."""
    closed = _marker(CLOSE_CALL, formats)
    schema: Mapping[str, Any] = function.get("parameters") or {}
    given, required = schema.get("properties") or {}, schema.get("required") or ()
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    is_strict, rules, parts = bool(function.get("strict")), list[str](), list[str]()
    for nth, (name, kind) in enumerate(given.items()):
        rule = f"parameter_{at}_{nth}"
        parts.append(rule + ("" if is_strict and name in required else "?" if is_strict else ""))
        rules += _xml_parameter(rule, name, kind if is_strict else {}, shared)
    if not is_strict:
        parts = [f"({' | '.join(parts)})*"] if parts else [f"any_parameter_{at}*"]
    if not is_strict and not given:
        rules += [
            f'any_parameter_{at}: "<parameter=" PARAMETER_{at} ">\\n" any_value_{at}',
            f"PARAMETER_{at}: /[A-Za-z0-9_.-]{{1,64}}/",
            _xml_text(f"any_value_{at}"),
        ]
    begin, end = json.dumps(f"\n<function={function['name']}>\n"), json.dumps("</function>\n")
    return [f"call_{at}: {begin} {' '.join(parts)} {end} {closed}", *rules]


def _xml_parameter(rule: str, name: str, kind: Any, shared: Mapping[str, Any]) -> list[str]:
    """One parameter: text as it is, up to its tag, and anything else as JSON."""
    begin = json.dumps(f"<parameter={name}>\n")
    texts = kind.get("enum") if isinstance(kind, Mapping) else None
    if not isinstance(kind, Mapping) or (
        kind.get("type", "string") == "string" and texts is None and "$ref" not in kind
    ):
        return [f"{rule}: {begin} {rule}_value", _xml_text(f"{rule}_value")]
    end = json.dumps("\n</parameter>\n")
    if texts and all(isinstance(text, str) for text in texts):
        return [f"{rule}: {begin} ({' | '.join(map(json.dumps, texts))}) {end}"]
    value = {**shared, **kind, "x-guidance": {"whitespace_pattern": SPACES}}
    return [f"{rule}: {begin} {rule}_value {end}", f"{rule}_value: %json {json.dumps(value)}"]


def _xml_text(rule: str) -> str:
    return rf'{rule}[suffix="\n</parameter>\n"]: /(.|\n)*/'


def _json_call(at: int, function: Mapping[str, Any], formats: Formats) -> list[str]:
    closed = _marker(CLOSE_CALL, formats)
    schema = function.get("parameters") if function.get("strict") else None
    arguments = {**(schema or {"type": "object"}), "x-guidance": {"whitespace_pattern": SPACES}}
    begin = json.dumps('\n{"name": "' + function["name"] + '", "arguments": ')
    end = json.dumps("}\n")
    return [
        f"call_{at}: {begin} arguments_{at} {end} {closed}",
        f"arguments_{at}: %json {json.dumps(arguments)}",
    ]


def _marker(marker: str, formats: Formats) -> str:
    """As a token, where it is one."""
    token_id = formats.marker_ids.get(marker)
    return json.dumps(marker) if token_id is None else f"<[{token_id}]>"
