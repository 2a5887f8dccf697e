"""What a field may be is told from its type, in the sentence that refuses what it is."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from novainfer import InvalidParameter
from novainfer.allowed import rule_of
from novainfer.fsm.parsing.formats import Formats
from novainfer.offer import called_in, offered
from novainfer.server.openai.decode import decode
from novainfer.server.openai.protocol import ChatCompletionRequest

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CHOICE = 'must be "auto", "none", "required" or an object with function'


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"tool_choice": "sometimes"}, f"tool_choice {CHOICE}, not 'sometimes'"),
        ({"tool_choice": 5}, f"tool_choice {CHOICE}, not a number"),
        ({"tool_choice": []}, f"tool_choice {CHOICE}, not a list"),
        (
            {"tool_choice": {"type": "any", "function": {"name": "f"}}},
            "tool_choice.type must be \"function\", not 'any'",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function is required"),
        (
            {"response_format": {"type": "xml"}},
            'response_format.type must be "json_object", "json_schema", "structural_tag" or "text", not \'xml\'',
        ),
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type must be \"function\", not 'web'"),
        ({"tool_choice": "x" * 500}, f"tool_choice {CHOICE}, not '{'x' * 39}"),
        ({"temperature": "hot"}, "temperature: expected `float | null`, got `str`"),
    ],
)
def test_a_refusal_says_what_would_be_right(more: dict[str, Any], sentence: str):
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **more}
    with pytest.raises(InvalidParameter) as refused:
        decode(ChatCompletionRequest, json.dumps(body).encode())
    assert str(refused.value) == sentence
    assert sentence.startswith(refused.value.param or "?")


def test_so_does_one_of_plain_data():
    with pytest.raises(InvalidParameter, match="^tool_choice " + CHOICE.replace('"', '"') + ", not 'sometimes'$"):
        offered(TOOLS, "sometimes", None, Formats(tool_calls="hermes"))
    with pytest.raises(InvalidParameter, match=r'^messages\[1\].tool_calls\[0\].type must be "function", not \'x\'$'):
        called_in([{}, {"tool_calls": [{"type": "x", "function": {"name": "f"}}]}])


def test_the_values_of_a_dictionary_are_looked_at_as_well():
    class Kind(msgspec.Struct):
        by_name: dict[str, ChatCompletionRequest]

    with pytest.raises(msgspec.ValidationError) as wrong:
        msgspec.convert({"by_name": {"a": {"messages": [], "tool_choice": "x"}}}, Kind)
    said, _, path = str(wrong.value).partition(" - at `$.")
    assert rule_of(Kind, path.rstrip("`"), said) == f"{CHOICE}, not 'x'"
