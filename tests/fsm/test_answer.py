"""Answers with thoughts and calls: what each of them says, however it is cut into deltas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from novainfer.fsm.core.machine import Observer, each_row
from novainfer.fsm.messages.outputs import Mark
from novainfer.fsm.parsing.answer import Answer
from novainfer.fsm.parsing.formats import MARKERS
from novainfer.fsm.parsing.pieces import CallArguments, CallBegun, Content, Reasoning
from novainfer.fsm.parsing.qwen_xml import json_of, types_of, types_of_tools
from novainfer.fsm.parsing.reader import AnswerReader, Wanted, opens_thoughts
from novainfer.fsm.text import Vocabulary, text_assembler

# A vocabulary in which each character of a test is a token, and each marker one.
CHARS = [chr(code) for code in range(0x20, 0x7F)] + ["\n", "\t"]
IM_START, IM_END = len(CHARS) + 4, len(CHARS) + 5
VOCABULARY = Vocabulary.build(
    [char.encode() for char in (*CHARS, *MARKERS, "<|im_start|>", "<|im_end|>")], frozenset([IM_START, IM_END])
)
IDS = {marker: len(CHARS) + at for at, marker in enumerate(MARKERS)}
# The same, in which markers are control tokens.
HIDDEN = Vocabulary.build(VOCABULARY.token_bytes, VOCABULARY.special_ids | set(IDS.values()))
TOKENS = {text: at for at, text in enumerate((*CHARS, *MARKERS, "<|im_start|>", "<|im_end|>"))}
SPLIT = re.compile("|".join(map(re.escape, (*MARKERS, "<|im_start|>", "<|im_end|>"))) + "|(?s:.)")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"enum": ["C", "F"]},
                    "at": {"type": ["object", "null"]},
                    "loud": {"type": "boolean"},
                    "any": {},
                },
            },
        },
    }
]
HERMES = Wanted(tool_calls="hermes", reasoning=True, marker_ids=IDS)
XML = Wanted(tool_calls="qwen3_coder", reasoning=True, marker_ids=IDS, schemas=types_of_tools(TOOLS))
SPELLED = Wanted(tool_calls="hermes", reasoning=True)
MIXED = Wanted(tool_calls="hermes", reasoning=True, marker_ids={"<tool_call>": IDS["<tool_call>"]})

Said = tuple[str, str, list[tuple[str, str]]]


def ids_of(text: str) -> list[int]:
    return [TOKENS[token] for token in SPLIT.findall(text)]


def deltas(text: str, cuts: Iterable[int], stops: Sequence[str] = ()) -> list[tuple[str, list[Mark], int]]:
    """What a client reads of an answer: the tokens between two of `cuts` as one delta, as slow readers get them."""
    assembler = text_assembler(VOCABULARY, stops, include_stop=False, skip_special=True, marked_ids=list(IDS.values()))
    ids = ids_of(text)
    wanted = {cut for cut in cuts if cut < len(ids)}
    found: list[tuple[str, list[Mark], int]] = [("", [], 0)]
    for count, token_id in enumerate(ids, 1):
        piece = assembler.push(token_id)
        said, marks, _ = found[-1]
        found[-1] = (said + piece, marks + assembler.take_marks(), count)
        if assembler.stopped_by is not None:
            return found
        if count in wanted:
            found.append(("", [], count))
    said, marks, count = found[-1]
    found[-1] = (said + assembler.flush(), marks, count)
    return found


def read(
    text: str,
    wanted: Wanted = HERMES,
    *,
    cuts: Iterable[int] = (),
    stops: Sequence[str] = (),
    is_thinking: bool = False,
    observer: Observer | None = None,
) -> tuple[Said, AnswerReader]:
    """Thoughts, content and calls of an answer."""
    reader = AnswerReader(wanted, is_thinking=is_thinking)
    reader.answer.observer = observer
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    pieces = []
    num_tokens = 0
    for said, marks, num_tokens in deltas(text, cuts, stops):
        pieces += reader.read(said, marks, num_tokens)
    for piece in pieces + reader.finish(num_tokens):
        match piece:
            case Reasoning(said):
                reasoning += said
            case Content(said):
                content += said
            case CallBegun(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, said):
                assert index == len(calls) - 1, "arguments come behind their call's name, and one call at a time"
                calls[index] = (calls[index][0], calls[index][1] + said)
    return (reasoning, content, calls), reader


def said(text: str, wanted: Wanted = HERMES, *, is_thinking: bool = False) -> Said:
    return read(text, wanted, is_thinking=is_thinking)[0]


PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "at": {"lat": [41.9, {}]}}}\n</tool_call>'
XML_PARIS = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
CALL_PARIS, CALL_ROME = ("weather", '{"city": "Paris"}'), ("weather", '{"city": "Rome", "at": {"lat": [41.9, {}]}}')

# An answer, and what it says. Numbers are those of the peers' bugs that it was taken from.
CASES: dict[str, tuple[str, Said]] = {
    "plain": (" Hello\n", ("", " Hello\n", [])),
    "a call alone": (PARIS, ("", "", [CALL_PARIS])),
    "content, then a call": ("Let me see.\n\n" + PARIS, ("", "Let me see.", [CALL_PARIS])),
    # vLLM #19056: calls in a row are merged, or have each other's ids
    "19056": (PARIS + "\n" + ROME, ("", "", [CALL_PARIS, CALL_ROME])),
    "content around calls": ("A" + PARIS + "\nB\n" + ROME + "\n", ("", "A\nB", [CALL_PARIS, CALL_ROME])),
    "thoughts": ("<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.", [])),
    "thoughts and a call": ("<think>\nHm.\n</think>\n\n" + PARIS, ("Hm.", "", [CALL_PARIS])),
    "a call within thoughts ends them": ("<think>Hm. " + PARIS + "Yes.", ("Hm.", "Yes.", [CALL_PARIS])),
    "no thought": ("<think>\n\n</think>\n\nYes.", ("", "Yes.", [])),
    "cut thoughts": ("<think>\nHm. ", ("Hm. ", "", [])),
    "thoughts between calls": (PARIS + "<think>Now Rome.</think>" + ROME, ("Now Rome.", "", [CALL_PARIS, CALL_ROME])),
    "a word about the marker": ("It is <think> and </think>.", ("", "It is <think> and </think>.", [])),
    "a stray end": ("</think>Yes </tool_call>", ("", "</think>Yes </tool_call>", [])),
    "thoughts of thoughts": ("<think>A <think> tag, </tool_call></think>B", ("A <think> tag, </tool_call>", "B", [])),
    # vLLM #22885: the last brace of the arguments is lost
    "22885": (
        '<tool_call>{"name": "f", "arguments": {"a": {"b": {}}}}</tool_call>',
        ("", "", [("f", '{"a": {"b": {}}}')]),
    ),
    # vLLM #20824: nested objects come out flat
    "20824": (
        '<tool_call>{"name": "f", "arguments": {"a": {"b": [1, {"c": "}"}]}, "d": "\\"{"}}</tool_call>',
        ("", "", [("f", '{"a": {"b": [1, {"c": "}"}]}, "d": "\\"{"}')]),
    ),
    # vLLM #20678: arguments are cut at what looks like their end
    "20678": (
        '<tool_call>{"name": "f", "arguments": {"code": "if (a) { b(\\"}}\\"); }\\n</tool_call>"}}</tool_call>',
        ("", "", [("f", '{"code": "if (a) { b(\\"}}\\"); }\\n</tool_call>"}')]),
    ),
    # vLLM #10398: completing partial JSON gives other arguments
    "10398": ('<tool_call>{"name": "f", "arguments": {"n": 1.50, "t": tru', ("", "", [("f", '{"n": 1.50, "t": tru')])),
    # vLLM #28806: a call without arguments never comes
    "28806": ('<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    "28806, null": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", "", [("f", "{}")])),
    "arguments first": (
        '<tool_call>{"arguments": {"name": "x"}, "id": 7, "name": "f"}</tool_call>',
        ("", "", [("f", '{"name": "x"}')]),
    ),
    "an argument called name": (
        '<tool_call>{"arguments": {"name": "x", "arguments": {}}, "name": "f"}</tool_call>',
        ("", "", [("f", '{"name": "x", "arguments": {}}')]),
    ),
    "arguments in a string": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", "", [("f", '{"a": 1}')]),
    ),
    "one bad call among good ones": (
        PARIS + "<tool_call>{'name': 'f'}</tool_call>" + ROME,
        ("", "<tool_call>{'name': 'f'}</tool_call>", [CALL_PARIS, CALL_ROME]),
    ),
    "a call without its name": ('<tool_call>{"arguments": {}}</tool_call>', None),
    "a name that is none": ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', None),
    "a nested name": ('<tool_call>{"name": {"a": 1}}</tool_call>', None),
    "a bad escape in the name": ('<tool_call>{"name": "\\x"}</tool_call>', None),
    "a bad escape in a key": ('<tool_call>{"\\x": 1}</tool_call>', None),
    "no value": ('<tool_call>{"name": , "arguments": {}}</tool_call>', None),
    "arguments that are a list": ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
    "arguments that are a number": ('<tool_call>{"name": "f", "arguments": 1}</tool_call>', None),
    "arguments that begin as null does": ('<tool_call>{"name": "f", "arguments": nil}</tool_call>', None),
    "arguments that are words": ('<tool_call>{"name": "f", "arguments": "words"}</tool_call>', None),
    "cut before its name": ('Hm. <tool_call>\n{"na', None),
    "cut in its name": ('<tool_call>{"name": "weath', None),
    "the end of no thought": ("<tool_call></think>", None),
    "empty": ("<tool_call></tool_call>", None),
    "another one within": ("<tool_call>x<tool_call>", None),
    "two in one": (
        "A <tool_call> \n" + PARIS,
        ("", "A <tool_call>", [CALL_PARIS]),
    ),
    "a marker in a name": (
        '<tool_call>{"name": "</tool_call><tool_call>", "x": "<think>"}</tool_call>',
        ("", "", [("</tool_call><tool_call>", "{}")]),
    ),
    "an early end": (
        '<tool_call>{"name": "f", "arguments": {"a": </tool_call>B',
        ("", "B", [("f", '{"a": ')]),
    ),
    "a call in thoughts, within another one": (
        "<think>a <tool_call> <tool_call> x</think>B",
        ("a <tool_call> <tool_call> x", "B", []),
    ),
    "half a marker before one": ("</thin" + PARIS, ("", "</thin", [CALL_PARIS])),
    "no end": ('<tool_call>{"name": "f", "arguments": {"a": ' + PARIS, ("", "", [("f", '{"a": '), CALL_PARIS])),
    "junk in the envelope": (
        '<tool_call>{"name": "f", "arguments": {} junk}</tool_call>B',
        ("", "junk}B", [("f", "{}")]),
    ),
    "a brace too many": ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', ("", "}", [("f", "{}")])),
    "no end marker": (PARIS.removesuffix("</tool_call>") + ROME, ("", "", [CALL_PARIS, CALL_ROME])),
    "an end that is cut": (PARIS.removesuffix("\n</tool_call>"), ("", "", [CALL_PARIS])),
    "twice": (
        '<tool_call>{"name": "f", "arguments": {}, "name": "g", "arguments": {"a": 1}, "s": "{"}</tool_call>',
        ("", "", [("f", "{}")]),
    ),
    "a comma too many": ('<tool_call>{"name": "f",}</tool_call>', ("", "", [("f", "{}")])),
    "a call in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "<tool_call></tool_call>"}}</tool_call>',
        ("", "", [("f", '{"a": "<tool_call></tool_call>"}')]),
    ),
    "thoughts in arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": "<think>", <think> </think>}}</tool_call>',
        ("", "", [("f", '{"a": "<think>", <think> </think>}')]),
    ),
    "a thought of a call": (
        "<think>I write <tool_call> and stop.</think>Hi",
        ("I write <tool_call> and stop.", "Hi", []),
    ),
    "content behind a call, then a stray end of thoughts": (PARIS + "B </think>", ("", "B </think>", [CALL_PARIS])),
    "a thought behind a call without its end": (
        PARIS.removesuffix("</tool_call>") + "<think>C</think>D",
        ("C", "D", [CALL_PARIS]),
    ),
    "words of a thought behind a call": (
        "A" + PARIS.removesuffix("</tool_call>") + "<think></think>",
        ("", "A\n<think></think>", [CALL_PARIS]),
    ),
}
XML_CASES: dict[str, tuple[str, Said]] = {
    "a call": ("Well.\n" + XML_PARIS, ("", "Well.", [("weather", '{"city": "Paris", "days": 3}')])),
    "calls": (
        XML_PARIS + "\n" + XML_PARIS,
        ("", "", [("weather", '{"city": "Paris", "days": 3}')] * 2),
    ),
    "none": ("<tool_call><function=f></function></tool_call>", ("", "", [("f", "{}")])),
    "none, and no end": ("<tool_call>\n<function=f>\n</tool_call>", ("", "", [("f", "{}")])),
    "lines": (
        '<tool_call><function=f><parameter=x>\n\n{"a\\": 1}\n\n</parameter></function></tool_call>',
        ("", "", [("f", '{"x": "\\n{\\"a\\\\\\": 1}\\n"}')]),
    ),
    "kinds": (
        '<tool_call><function=weather><parameter=units>C</parameter><parameter=at>\n{"a": [1.0]}\n</parameter>'
        "<parameter=loud>True</parameter><parameter=any>[1]</parameter><parameter=days>three</parameter>"
        "</function></tool_call>",
        (
            "",
            "",
            [("weather", '{"units": "C", "at": {"a": [1.0]}, "loud": true, "any": [1], "days": "three"}')],
        ),
    ),
    "an empty value": (
        "<tool_call><function=f><parameter=x>\n</parameter><parameter=y></parameter></function></tool_call>",
        ("", "", [("f", '{"x": "", "y": ""}')]),
    ),
    "no end of the value": (
        "<tool_call><function=f><parameter=x>\nabc\n</tool_call>B",
        ("", "B", [("f", '{"x": "abc"}')]),
    ),
    "no end of the function": (
        "<tool_call><function=f><parameter=x>\nabc\n</parameter></tool_call>",
        ("", "", [("f", '{"x": "abc"}')]),
    ),
    "no end of a number": (
        "<tool_call><function=weather><parameter=days>3</tool_call>",
        ("", "", [("weather", '{"days": 3}')]),
    ),
    "cut in a text": ("<tool_call><function=f><parameter=x>\nabc</par", ("", "", [("f", '{"x": "abc</par')])),
    "cut in a number": ("<tool_call><function=weather><parameter=days>\n3", ("", "", [("weather", '{"days": 3')])),
    "words in the body": (
        "<tool_call><function=f><parameter=x>1</parameter> so </function></tool_call>",
        ("", "so </function>", [("f", '{"x": "1"')]),
    ),
    "no function": ("<tool_call><functions=f></tool_call>", ("", "<tool_call><functions=f></tool_call>", [])),
    "no name": ("<tool_call><function= ></tool_call>", ("", "<tool_call><function= ></tool_call>", [])),
    "a name of two lines": ("<tool_call><function=a\nb>", ("", "<tool_call><function=a\nb>", [])),
    "half a tag": (
        "<tool_call><function=f><parameter=x>1</parameter><para</tool_call>",
        ("", "<para", [("f", '{"x": "1"}')]),
    ),
    "cut in a tag": (
        "<tool_call><function=f><parameter=x>1</parameter><para",
        ("", "<para", [("f", '{"x": "1"')]),
    ),
    "no call": ("<tool_call> \n<fun", ("", "<tool_call> \n<fun", [])),
}


def expected(case: tuple[str, Said | None]) -> Said:
    return case[1] if case[1] is not None else ("", case[0], [])


@pytest.mark.parametrize("wanted", [HERMES, SPELLED, MIXED], ids=["tokens", "spelled", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_an_answer_of_hermes_says(name: str, wanted: Wanted):
    assert said(CASES[name][0], wanted) == expected(CASES[name])
    assert read(CASES[name][0], wanted, cuts=range(1000))[0] == expected(CASES[name])


@pytest.mark.parametrize("name", XML_CASES)
def test_an_answer_of_qwen3_coder_says(name: str):
    assert said(XML_CASES[name][0], XML) == expected(XML_CASES[name])
    assert read(XML_CASES[name][0], XML, cuts=range(1000))[0] == expected(XML_CASES[name])


# ---- however it is cut -----------------------------------------------------------------------------------------------

WORDS = st.integers(0, 99).map("w{}x".format)
FRAGMENTS = st.one_of(
    st.sampled_from([*MARKERS, " ", "\n\n", "<", "</", "<tool", "think>", '"', "\\", "{", "}", PARIS, ROME, XML_PARIS]),
    st.sampled_from([PARIS, ROME, XML_PARIS]).flatmap(lambda call: st.integers(1, len(call)).map(lambda n: call[:n])),
    WORDS,
)
ANSWERS = st.lists(FRAGMENTS, max_size=12).map("".join)
CUTS = st.lists(st.integers(1, 400), max_size=8) | st.just(range(1000))
STOPS = st.lists(st.sampled_from(["w1", "</tool_call>w", "call>\n<", "}}", "x<think>w"]), max_size=2)


@settings(max_examples=600, deadline=None)
@given(ANSWERS, CUTS, STOPS, st.sampled_from([HERMES, XML, SPELLED, MIXED]), st.booleans())
@example("<think>a</think>" + PARIS, range(1000), [], SPELLED, False)
@example(XML_PARIS + "\n" + XML_PARIS, range(1000), ["</tool_call>w"], XML, False)
@example(PARIS, [11, 12], ["call>x"], HERMES, False)
def test_an_answer_says_the_same_however_it_is_cut_into_deltas(
    text: str, cuts: Iterable[int], stops: list[str], wanted: Wanted, is_thinking: bool
):
    whole, at_once = read(text, wanted, stops=stops, is_thinking=is_thinking)
    pieces, cut = read(text, wanted, cuts=cuts, stops=stops, is_thinking=is_thinking)
    assert pieces == whole
    if wanted not in (SPELLED, MIXED):  # whose markers are known with their delta only
        assert cut.answer.num_reasoning_tokens == at_once.answer.num_reasoning_tokens


@settings(max_examples=400, deadline=None)
@given(st.lists(FRAGMENTS, max_size=12), st.sampled_from([HERMES, XML, SPELLED, MIXED]), st.booleans())
def test_no_word_of_an_answer_is_lost_or_said_twice(fragments: list[str], wanted: Wanted, is_thinking: bool):
    text = "".join(f"{fragment}w{100 + at}x" for at, fragment in enumerate(fragments))
    reasoning, content, calls = said(text, wanted, is_thinking=is_thinking)
    found = "".join([reasoning, content, *(part for call in calls for part in call)])
    for at in range(len(fragments)):
        assert found.count(f"w{100 + at}x") == 1


@settings(max_examples=200, deadline=None)
@given(ANSWERS, st.sampled_from([HERMES, XML, SPELLED]))
def test_little_is_held_back_whatever_is_written(text: str, wanted: Wanted):
    reader = AnswerReader(wanted)
    for piece, marks, count in deltas(text, range(1000)):
        reader.read(piece, marks, count)
        spelled = reader._spelled._held if reader._spelled is not None else ""
        assert len(reader._text) + len(spelled) < len("</tool_call>")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(CHARS_OF := "".join(CHARS)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(CHARS_OF, max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(CHARS_OF, max_size=8), VALUES, max_size=4)
NAMES = st.from_regex(r"[a-zA-Z0-9_.-]{1,20}", fullmatch=True)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3),
    CUTS,
    st.booleans(),
    st.sampled_from([HERMES, SPELLED]),
)
def test_calls_as_templates_write_them_are_read_as_they_were(
    calls: list[tuple[str, dict[str, object]]], cuts: Iterable[int], is_indented: bool, wanted: Wanted
):
    text = "\n".join(
        "<tool_call>\n"
        + json.dumps({"name": name, "arguments": arguments}, indent=2 if is_indented else None)
        + "\n</tool_call>"
        for name, arguments in calls
    )
    (reasoning, content, found), _ = read(text, wanted, cuts=cuts)
    assert (reasoning, content) == ("", "")
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


XML_TEXT = st.text(CHARS_OF).filter(lambda text: "</parameter>" not in text)


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "city": XML_TEXT,
            "days": st.integers(),
            "at": st.none() | st.dictionaries(st.text(CHARS_OF, max_size=5), VALUES, max_size=3),
            "loud": st.booleans(),
            "other": XML_TEXT,
        },
    ),
    CUTS,
)
def test_values_as_qwen3_coders_template_writes_them_have_the_types_of_the_schema(
    arguments: dict[str, object], cuts: Iterable[int]
):
    def written(value: object) -> str:
        return json.dumps(value) if isinstance(value, dict) else str(value)

    if "</parameter>" in json.dumps(arguments):
        return
    body = "".join(f"<parameter={name}>\n{written(value)}\n</parameter>\n" for name, value in arguments.items())
    text = f"<tool_call>\n<function=weather>\n{body}</function>\n</tool_call>"
    (_, content, calls), _ = read(text, XML, cuts=cuts)
    assert content == ""
    [(name, found)] = calls
    assert (name, json.loads(found)) == ("weather", arguments)


def test_choices_within_choices_without_an_end_are_any_type():
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(900):
        schema = {"anyOf": [schema]}
    assert types_of(schema) == frozenset()


@pytest.mark.parametrize(
    ("text", "schema", "wanted"),
    [
        ("5", {"type": "string"}, '"5"'),
        ("5", {"type": "number"}, "5"),
        (" 5.0 ", {"type": "number"}, "5.0"),
        ("5.5", {"type": "integer"}, '"5.5"'),
        ("None", {"type": ["integer", "null"]}, "null"),
        ("null", {"type": "integer"}, '"null"'),
        ("False", {"type": "boolean"}, "false"),
        ("maybe", {"type": "boolean"}, '"maybe"'),
        ("[1, {}]", {"type": "array"}, "[1, {}]"),
        ("[1", {"type": "array"}, '"[1"'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ('"a"', {}, '"\\"a\\""'),
        ('"a"', {"type": "integer"}, '"\\"a\\""'),
        ('"a"', {"type": ["string", "null"]}, '"a"'),  # as grammars want it, where it may be something else
        ('"a"', {"$ref": "#/$defs/colour"}, '"a"'),
        ("a", {"$ref": "#/$defs/colour"}, '"a"'),
        ("true", {}, "true"),
        ("5", {"enum": [1, 5]}, "5"),
        ("5", {"enum": ["5"]}, '"5"'),
        ("5", {"const": 5}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5"),
        ("x", {"oneOf": [{"type": "integer"}, {"$ref": "#"}]}, '"x"'),
        ("{}", True, "{}"),
    ],
)
def test_a_value_is_json_of_its_type_or_a_string(text: str, schema: object, wanted: str):
    types = types_of(schema)
    assert (json.dumps(text) if types == {"string"} else json_of(text, types)) == wanted


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_every_row_of_the_table_is_taken():
    taken = set()

    class Notes(Observer):
        def takes(self, machine, event, row):
            taken.add((machine.state, type(event), row.of))

    for cases, wanted in ((CASES, HERMES), (XML_CASES, XML)):
        for text, _ in cases.values():
            read(text, wanted, cuts=range(1000), observer=Notes())
    read("<think>again", is_thinking=True, observer=Notes())
    one = Wanted(tool_calls="hermes", reasoning=True, has_one_call=True, marker_ids=IDS)
    read(PARIS + "<think></think>" + PARIS, one, observer=Notes())
    missing = {(state, event.__name__, row.of) for state, event, row in each_row(Answer.TABLE)}
    assert missing - {(state, event.__name__, of) for state, event, of in taken} == set()


@pytest.mark.parametrize("tail", ["", "\n</tool_call>", " </tool_call>" + ROME, ROME, "B", "<think>"])
def test_where_one_call_is_wanted_the_answer_is_over_behind_it(tail: str):
    one = Wanted(tool_calls="hermes", reasoning=True, has_one_call=True, marker_ids=IDS)
    text = "A " + PARIS.removesuffix("\n</tool_call>")
    reader = AnswerReader(one)
    for piece, marks, count in deltas(text, range(1000)):
        assert not reader.is_over
        reader.read(piece, marks, count)
    assert reader.is_over
    assert said(text + tail, one) == ("", "A", [CALL_PARIS])


@pytest.mark.parametrize("written", ['{"name": "f", "arguments": {"a": ', '{"name": "f", "arguments": {}'])
def test_one_call_that_is_broken_is_all_there_is_too(written: str):
    one = Wanted(tool_calls="hermes", has_one_call=True, marker_ids=IDS)
    for end in ("</tool_call>", PARIS):
        reasoning, content, calls = said(f"<tool_call>{written}{end}", one)
        assert (reasoning, content, len(calls)) == ("", "", 1)


def test_what_is_not_asked_for_is_text():
    assert said("<think>a</think>" + PARIS, Wanted(tool_calls="hermes", marker_ids=IDS)) == (
        "",
        "<think>a</think>",
        [CALL_PARIS],
    )
    assert said("<think>a</think>" + PARIS, Wanted(reasoning=True, marker_ids=IDS)) == ("a", PARIS, [])


def test_a_marker_that_is_a_token_is_text_where_it_is_spelled_out():
    reader = AnswerReader(HERMES)
    pieces = reader.read("<think>a</think>" + PARIS, [], 99) + reader.finish(99)
    assert pieces == [Content("<think>a</think>" + PARIS)]


@pytest.mark.parametrize(
    ("text", "is_thinking", "wanted"),
    [
        ("<think>ab</think>c", False, 4),
        ("ab</think>c", True, 3),
        ("ab", True, 2),
        ("<think>ab" + PARIS, False, 3),
        ("ab<tool_call>x", True, 4),
        ("ab<tool_call>{}</think>c", True, 6),
        ("abc", False, 0),
        ("<think>a</think><think>b</think>", False, 6),
    ],
)
def test_tokens_of_thoughts_are_counted_with_their_markers(text: str, is_thinking: bool, wanted: int):
    _, reader = read(text, is_thinking=is_thinking)
    assert reader.answer.num_reasoning_tokens == wanted


def test_markers_that_are_not_shown_are_read_all_the_same():
    assembler = text_assembler(HIDDEN, [], include_stop=False, skip_special=True, marked_ids=list(IDS.values()))
    reader = AnswerReader(HERMES)
    pieces = []
    for count, token_id in enumerate(ids_of("<think>Hm.</think>Yes " + PARIS), 1):
        text = assembler.push(token_id)
        pieces += reader.read(text, assembler.take_marks(), count)
    pieces += reader.finish(count)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == "Hm."
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == "Yes"
    assert "".join(piece.text for piece in pieces if isinstance(piece, CallArguments)) == CALL_PARIS[1]


@pytest.mark.parametrize(
    ("tail", "wanted"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n<think>\nHm, so", True),  # it goes on with what it has begun
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\nWhat is </think>?<|im_end|>\n<|im_start|>assistant\n<think>", True),
        ("no control token <think>", True),
        ("", False),
    ],
)
def test_a_prompt_has_opened_thoughts_when_its_last_turn_has(tail: str, wanted: bool):
    assert opens_thoughts(ids_of(tail), VOCABULARY, IDS) is wanted
    assert opens_thoughts(ids_of(tail), HIDDEN, IDS) is wanted
