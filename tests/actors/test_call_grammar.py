"""Grammars of calls, compiled as they are used: what templates write is taken, and what breaks a schema is not."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from novainfer.actors.grammar.compiler import LIMITS, Compiler
from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.structured import StructuredOutputsParams
from novainfer.fsm.parsing.call_grammar import grammar_of_calls
from novainfer.fsm.parsing.formats import HERMES, MARKERS, QWEN3_CODER, Formats
from novainfer.fsm.parsing.qwen_xml import XmlCall, types_of_tools

DEMO = Path(str(files("novainfer.kernels"))) / "demo" / "model"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "where"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
WEATHER = {"function": {"name": "weather", "strict": True, "parameters": PARAMETERS}}
FREE = {"function": {"name": "note", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}}
ANY = {"function": {"name": "ping"}}


@pytest.fixture(scope="module", params=["tokens", "spelled"])
def tokenizer(request: pytest.FixtureRequest) -> tuple[LLTokenizer, dict[str, int]]:
    found = json.loads((DEMO / "tokenizer.json").read_text())
    markers = [token for token in found["added_tokens"] if token["content"] in MARKERS]
    ids: dict[str, int] = {token["content"]: token["id"] for token in markers}
    assert len(ids) == len(MARKERS)
    if request.param == "spelled":
        ids = {}
        for at, token in enumerate(markers):
            token["content"] = f"<|unused {at}|>"
    text = json.dumps(found)
    Compiler(text, 1300, [0])  # as the engine makes it
    return LLTokenizer(text, n_vocab=1300, eos_token=[0]), ids


def taken(tokenizer: tuple[LLTokenizer, dict[str, int]], text: str, tools: list[Any], **how: Any) -> bool:
    """Whether all of `text` may be written, and be the end."""
    known, ids = tokenizer
    formats = Formats(tool_calls=how.pop("format"), marker_ids=ids)
    grammar = grammar_of_calls(tools, formats, must_call=how.pop("must_call", True), **how)
    StructuredOutputsParams(grammar=grammar)
    matcher = LLMatcher(known, LLMatcher.grammar_from_lark(grammar), limits=LIMITS, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids: list[int] = []
    for at, part in enumerate(text.split("\x00")):  # markers stand between
        token_ids += [ids[part]] if at % 2 and part in ids else known.tokenize_str(part)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def json_call(name: str, arguments: Any) -> str:
    written = json.dumps(arguments) if not isinstance(arguments, str) else arguments
    return f'\x00<tool_call>\x00\n{{"name": "{name}", "arguments": {written}}}\n\x00</tool_call>\x00'


def xml_call(name: str, **parameters: str) -> str:
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items()]
    return f"\x00<tool_call>\x00\n<function={name}>\n{''.join(parts)}</function>\n\x00</tool_call>\x00"


RIGHT = {"city": 'Paris, "the" <b>', "unit": "C", "days": 3, "where": {"x": 1.5}}


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        (RIGHT, True),
        ({"city": "x", "where": {"x": 1}}, True),
        ({"city": "x"}, False),
        ({"city": "x", "where": {"y": 1}}, False),
        ({**RIGHT, "days": 10}, False),
        ({**RIGHT, "unit": "K"}, False),
        ({**RIGHT, "more": 1}, False),
    ],
)
def test_json_calls_of_a_strict_tool_fit_its_schema(tokenizer: Any, arguments: Any, is_right: bool) -> None:
    assert taken(tokenizer, json_call("weather", arguments), [WEATHER, FREE], format=HERMES) is is_right


PLACE = '{"x": 1.5}'


@pytest.mark.parametrize(
    ("parameters", "is_right"),
    [
        ({"city": "Paris", "unit": "C", "days": "3", "where": PLACE}, True),
        ({"city": 'two\nlines, <b> "quoted" </parameter', "where": PLACE}, True),
        ({"city": "Paris"}, False),
        ({"city": "Paris", "where": "here"}, False),
        ({"city": "Paris", "days": "10", "where": PLACE}, False),
        ({"city": "Paris", "unit": "K", "where": PLACE}, False),
        ({"city": "Paris", "more": "1", "where": PLACE}, False),
    ],
)
def test_xml_calls_of_a_strict_tool_fit_its_schema(tokenizer: Any, parameters: Any, is_right: bool) -> None:
    assert taken(tokenizer, xml_call("weather", **parameters), [FREE, WEATHER], format=QWEN3_CODER) is is_right


LETTERS = {"type": "string", "minLength": 2, "maxLength": 4}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (LETTERS, ("ab", "a\nb", "abcd"), ("a", "abcde", "ab\n</parameter>\n<parameter=")),
        ({"type": "string", "pattern": "^[0-9]{2}$"}, ("12",), ("1", "123", "a12")),
        ({"type": "string", "pattern": "a/b"}, ("a/b", "xa/by\n"), ("a", "ab")),
        ({"type": "string", "pattern": "^x", "maxLength": 3}, ("x", "x\ny"), ("yx", "x123")),
        ({"const": "on"}, ("on",), ("off", '"on"')),
        ({"type": "string", "const": "on"}, ("on",), ("off", '"on"')),
        ({"const": 5}, ("5",), ("6", '"5"')),
        ({"enum": ["a", 1, None]}, ('"a"', "1", "null"), ("a", "2")),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ("5", "null"), ("soon", '"5"')),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "T"}, ("null", "a b", "5"), ()),
        ({"anyOf": [{"const": "a"}, LETTERS]}, ("a", "bc"), ("b", "bcdef")),
        ({"anyOf": [LETTERS, {"type": "null"}]}, ('"ab"', "null"), ("ab", '"a"')),
        (
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
            ('"a"', "[1]"),
            ("a", "[true]"),
        ),
        ({"type": ["string", "null"]}, ("null", "a b"), ()),
        ({"type": ["string"], "allOf": [LETTERS, {"type": "string", "pattern": "b"}]}, ("ab",), ("b", "cd")),
        ({"properties": {"x": {"type": "integer"}}, "required": ["x"], "type": "object"}, ('{"x": 1}',), ("{}", "x")),
        ({"type": "string", "format": "date", "description": "When."}, ("soon", ""), ()),
        ({}, ("a", "1", "{"), ()),
        (True, ("a", "1"), ()),
    ],
)
def test_a_text_of_a_strict_tools_xml_call_fits_its_schema(
    tokenizer: Any, schema: Any, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    parameters = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    tool = {"function": {"name": "set", "strict": True, "parameters": parameters}}
    types = types_of_tools([tool])

    def arguments(value: str) -> Any:
        call = XmlCall(types)
        call.feed(xml_call("set", value=value).split("\x00")[2])
        assert call.is_whole
        return json.loads(call.take_arguments())

    for value in right:
        assert taken(tokenizer, xml_call("set", value=value), [tool], format=QWEN3_CODER), value
        jsonschema.validate(arguments(value), parameters)
    for value in wrong:
        assert not taken(tokenizer, xml_call("set", value=value), [tool], format=QWEN3_CODER), value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "not": {"const": "x"}},
        {"type": "string", "anyOf": [{"type": "integer"}]},
        {"type": "string", "minLength": -1},
        {"type": "string", "maxLength": 1.5},
        {"type": "string", "pattern": 5},
        {"type": "string", "allOf": [{"allOf": []}]},
        {"type": "string", "anyOf": {}},
        {"type": "string", "oneOf": []},
        {"type": "string", "enum": [5]},
        {"type": "string", "enum": 5},
    ],
)
def test_what_no_grammar_of_xml_calls_can_say_is_refused(schema: Any) -> None:
    tool = {"function": {"name": "set", "strict": True, "parameters": {"properties": {"value": schema}}}}
    with pytest.raises(InvalidParameter, match="of the parameter 'value'") as refused:
        grammar_of_calls([tool], Formats(tool_calls=QWEN3_CODER, marker_ids={}), must_call=True)
    assert refused.value.param == "tools"


@pytest.mark.parametrize("format", [HERMES, QWEN3_CODER])
@pytest.mark.parametrize(
    "parameters", [{"type": "array"}, {"type": ["object"]}, {"properties": ["a"]}, {"required": 5}]
)
def test_parameters_that_no_call_can_have_are_the_clients_fault(tokenizer: Any, format: str, parameters: Any) -> None:
    tool = {"function": {"name": "set", "strict": True, "parameters": parameters}}
    with pytest.raises((InvalidParameter, AssertionError)) as refused:  # or what makes grammars of schemas says so
        taken(tokenizer, xml_call("set"), [tool], format=format)
    assert format == HERMES or refused.type is InvalidParameter


@pytest.mark.parametrize("name", ["", " a", "a>b", "<a", "a\nb", "a" * 257])
def test_a_parameter_of_a_name_that_no_xml_call_can_have_is_refused_or_left_out(tokenizer: Any, name: str) -> None:
    function = {"name": "set", "parameters": {"properties": {name: {}, "b c": {}}}}
    with pytest.raises(InvalidParameter, match="the name of the parameter"):
        taken(tokenizer, xml_call("set"), [{"function": {**function, "strict": True}}], format=QWEN3_CODER)
    assert taken(tokenizer, xml_call("set", **{"b c": "1"}), [{"function": function}], format=QWEN3_CODER)
    assert not taken(tokenizer, xml_call("set", **{name: "1"}), [{"function": function}], format=QWEN3_CODER)
    function["parameters"] = {"properties": {name: {}}}
    assert taken(tokenizer, xml_call("set"), [{"function": function}], format=QWEN3_CODER)


def test_xml_calls_of_other_tools_have_their_envelope(tokenizer: Any) -> None:
    tools = [FREE, ANY]
    assert taken(tokenizer, xml_call("note", text="a\nb"), tools, format=QWEN3_CODER)
    assert taken(tokenizer, xml_call("note"), tools, format=QWEN3_CODER)
    assert not taken(tokenizer, xml_call("note", words="a"), tools, format=QWEN3_CODER)
    assert taken(tokenizer, xml_call("ping", host="a", port="1"), tools, format=QWEN3_CODER)
    assert not taken(tokenizer, xml_call("pong"), tools, format=QWEN3_CODER)
    assert not taken(tokenizer, xml_call("note", text="x").replace("</function>\n", ""), tools, format=QWEN3_CODER)


@pytest.mark.parametrize(("format", "call"), [(HERMES, json_call("ping", {})), (QWEN3_CODER, xml_call("ping"))])
def test_what_may_stand_around_calls(tokenizer: Any, format: str, call: str) -> None:
    tools = [ANY]
    assert taken(tokenizer, call, tools, format=format)
    assert taken(tokenizer, f"{call}\n{call}", tools, format=format)
    assert not taken(tokenizer, f"{call}\n{call}", tools, format=format, has_one_call=True)
    assert not taken(tokenizer, f"Well. {call}", tools, format=format)
    assert not taken(tokenizer, "Well.", tools, format=format)
    assert taken(tokenizer, f"Well. {call}", tools, format=format, must_call=False)
    assert taken(tokenizer, "Well, <tool.", tools, format=format, must_call=False)
    broken = call.replace("ping", "pong")
    assert not taken(tokenizer, f"Well. {broken}", tools, format=format, must_call=False)
