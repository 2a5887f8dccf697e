"""Grammars of answers that must call a tool, or whose arguments must fit their schema, in llguidance's Lark.

Only the envelope of a call is spelled out, as templates write it; arguments of a tool are held to its schema where it
is `strict`, and are any JSON object where it is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.parsing.formats import CLOSE_CALL, OPEN_CALL, QWEN3_CODER, Formats
from novainfer.fsm.parsing.qwen_xml import SAY_NOTHING, STRING, is_name, types_of

# Between the tokens of arguments: as templates write it, or indented.
SPACES = r"( |\n[ \t]{0,32})?"
ANY_TEXT = r"/(.|\n)*/"
NO_TAG = r"~/(.|\n)*<\/parameter>(.|\n)*/"


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
        function = tool["function"]
        kind = (function.get("parameters") or {}).get("type", "object")
        if function.get("strict") and kind != "object":
            what = f"parameters of the tool {function['name']!r} that are no object but {str(kind)[:64]!r}"
            raise _cannot_say(what)
        rules += make(at, function, formats)
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
    given, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(given, Mapping) or not isinstance(required, list):
        raise _cannot_say(f"properties and required of the tool {function['name']!r}")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    is_strict, rules, parts = bool(function.get("strict")), list[str](), list[str]()
    for nth, (name, kind) in enumerate(given.items()):
        if not is_name(name):
            if is_strict:
                raise _cannot_say(f"the name of the parameter {name[:64]!r}")
            continue
        rule = f"parameter_{at}_{nth}"
        parts.append(rule + ("" if is_strict and name in required else "?" if is_strict else ""))
        rules += _xml_parameter(rule, name, kind if is_strict else {}, shared)
    if not is_strict and parts:
        parts = [f"({' | '.join(parts)})*"]
    elif not is_strict:
        parts = [f"any_parameter_{at}*"]
        rules += [
            f'any_parameter_{at}: "<parameter=" PARAMETER_{at} ">\\n" any_value_{at}',
            f"PARAMETER_{at}: /[A-Za-z0-9_.-]{{1,64}}/",
            _xml_text(f"any_value_{at}"),
        ]
    begin, end = json.dumps(f"\n<function={function['name']}>\n"), json.dumps("</function>\n")
    return [f"call_{at}: {begin} {' '.join(parts)} {end} {closed}", *rules]


def _xml_parameter(rule: str, name: str, kind: Any, shared: Mapping[str, Any]) -> list[str]:
    """One parameter: text as it is, up to its tag, where its reader takes text, and anything else as JSON."""
    begin = json.dumps(f"<parameter={name}>\n")
    if _takes_any_text(kind):
        return [f"{rule}: {begin} {rule}_value", _xml_text(f"{rule}_value")]
    if types_of(kind) == STRING:
        return [f"{rule}: {begin} {rule}_value", _xml_text(f"{rule}_value", _text_of(kind, name))]
    value = {**shared, **kind, "x-guidance": {"whitespace_pattern": SPACES}}
    end = json.dumps("\n</parameter>\n")
    return [f"{rule}: {begin} {rule}_value {end}", f"{rule}_value: %json {json.dumps(value)}"]


def _takes_any_text(kind: Any) -> bool:
    """Whether whatever is written there becomes a value that fits: what is of no other type is a string."""
    if not isinstance(kind, Mapping):
        return True
    said = {key: value for key, value in kind.items() if key not in SAY_NOTHING}
    if not said:
        return True
    if said.keys() == {"anyOf"} and isinstance(said["anyOf"], list):
        others = [one for one in said["anyOf"] if not _takes_any_text(one)]
        return len(others) < len(said["anyOf"]) and all(_is_bare(one) for one in others)
    return said.keys() == {"type"} and "string" in types_of(kind)


def _is_bare(kind: Any) -> bool:
    """Whether a type is all that it says."""
    return isinstance(kind, Mapping) and kind.keys() - SAY_NOTHING == {"type"}


def _text_of(kind: Mapping[str, Any], name: str) -> str:
    """The texts that fit, as what a terminal of Lark may be; raises `InvalidParameter` for what none can say."""
    parts: list[str] = []
    for key, value in kind.items():
        if key in ("enum", "const"):
            texts = value if key == "enum" and isinstance(value, list) else [value]
            each = [json.dumps(text) for text in texts if isinstance(text, str)]
        elif key in ("anyOf", "oneOf", "allOf") and isinstance(value, list) and all(map(_is_text, value)):
            each = [f"({_text_of(one, name)})" for one in value]
        else:
            each = []
        if each:
            parts += each if key == "allOf" else [f"({' | '.join(each)})"]
        elif key in ("minLength", "maxLength") and type(value) is int and value >= 0:
            parts.append(rf"/(.|\n){{{f'{value},' if key == 'minLength' else f'0,{value}'}}}/")
        elif key == "pattern" and isinstance(value, str):
            parts.append(_text_with(value))
        elif key not in SAY_NOTHING and key != "type":
            raise _cannot_say(f"{key} of the parameter {name[:64]!r}")
    return " & ".join(parts or [ANY_TEXT])


def _cannot_say(what: str) -> InvalidParameter:
    return InvalidParameter(f"tools cannot be held to: {what}, in the format in which this model calls", param="tools")


def _is_text(kind: Any) -> bool:
    """Whether it says itself that it is a string, as far as it is looked into."""
    return isinstance(kind, Mapping) and types_of(kind) == STRING and "allOf" not in kind


def _text_with(pattern: str) -> str:
    """The texts in which it is found; at its ends it may say that it is all of one."""
    begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    found = pattern[begin : len(pattern) - end].replace("\n", r"\n")
    found = re.sub(r"(\\.)|/", lambda one: one[1] or r"\/", found)
    around = [r"(.|\n)*" * (not is_there) for is_there in (begin, end)]
    return f"/{around[0]}(?:{found}){around[1]}/"


def _xml_text(rule: str, text: str = ANY_TEXT) -> str:
    """Text that does not hold the tag that ends it."""
    return rf'{rule}[suffix="\n</parameter>\n"]: ({text}) & {NO_TAG}'


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
