"""Which format a chat template stands for."""

from __future__ import annotations

import pytest

from novainfer.fsm.parsing.formats import Formats, formats_of

# What the templates of these models hold, in their own words: the parts that tell them from others.
QWEN25 = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}… return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}'
)
QWEN3 = QWEN25 + "{%- if '</think>' in content %}{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
QWEN3_CODER = "{%- if tools %}<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>"
QWEN35 = QWEN3_CODER + "{{- '<think>\\n' }}{{ '</think>' }}"
R1 = "{% set content = content.split('</think>')[-1] %}{{'<\uff5cAssistant\uff5c><think>\\n'}}"
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "tool_calls", "reasoning"),
    [
        (QWEN25, "hermes", "none"),
        (QWEN3, "hermes", "think"),
        (QWEN3_CODER, "qwen3_coder", "none"),
        (QWEN35, "qwen3_coder", "think"),
        (R1, "none", "think"),
        (PLAIN, "none", "none"),
        (None, "none", "none"),
    ],
)
def test_the_template_says_how_its_model_calls_tools_and_reasons(template: str, tool_calls: str, reasoning: str):
    found = formats_of(template, {"<think>": 7, "</tool_call>": 9}.get)
    ids = {"<think>": 7, "</tool_call>": 9}
    assert found == Formats(tool_calls=tool_calls, reasoning=reasoning, marker_ids=ids)
