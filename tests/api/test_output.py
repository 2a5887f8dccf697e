"""A chat's answer as scripts get it: thoughts, content and calls apart, whatever pieces it came in."""

from __future__ import annotations

from typing import Any

import pytest

from novainfer import CallerError, Chat, InvalidParameter, SamplingParams, StructuredOutputsParams, UnsupportedParameter
from novainfer.fsm.parsing.formats import Formats
from novainfer.offer import Offered, called_in, offered
from novainfer.output import RequestOutput, answer_to
from tests.server.fakes import FakeEngine, FakeModelInfo

FORMATS = Formats(tool_calls="hermes", reasoning="think")
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = ("<tool", "_call>\n", '{"name": "weather", "argum', 'ents": {"city": "Par', 'is"}}\n</tool_call>')
CHAT = Chat(messages=[{"role": "user", "content": "Paris?"}])


async def asked(
    *answer: str, params: SamplingParams | None = None, formats: Formats = FORMATS, **offer: Any
) -> tuple[RequestOutput, FakeEngine]:
    engine = FakeEngine(answer=answer)
    engine.model_info = FakeModelInfo(formats=formats)
    await engine.start()
    found = offered(offer.get("tools"), offer.get("tool_choice"), offer.get("parallel_tool_calls"), formats)
    return await answer_to(engine, CHAT, params or SamplingParams(max_tokens=64), found), engine  # type: ignore[arg-type]


async def test_thoughts_content_and_calls_are_told_apart() -> None:
    output, _ = await asked("<think>", "hm", "m</think>", "Let me ", "see.", *CALL, tools=[WEATHER])
    (choice,) = output.outputs
    assert (choice.reasoning, choice.content, choice.finish_reason) == ("hmm", "Let me see.", "tool_calls")
    assert [(call.name, call.arguments) for call in choice.tool_calls] == [("weather", '{"city": "Paris"}')]
    assert choice.text == "".join(("<think>", "hm", "m</think>", "Let me ", "see.", *CALL))


async def test_without_tools_a_call_is_content_and_thoughts_are_thoughts() -> None:
    output, _ = await asked("<think>a</think>b", params=SamplingParams(n=2))
    assert [(one.reasoning, one.content, one.tool_calls) for one in output.outputs] == [("a", "b", [])] * 2
    output, _ = await asked(*CALL, formats=Formats())
    assert (output.outputs[0].content, output.outputs[0].tool_calls) == ("".join(CALL), [])


async def test_an_answer_is_over_with_the_one_call_that_is_wanted() -> None:
    output, engine = await asked(*CALL, *CALL, "more", tools=[WEATHER], parallel_tool_calls=False)
    assert len(output.outputs[0].tool_calls) == 1
    assert output.outputs[0].finish_reason == "tool_calls"
    assert engine.left_early, "the rest would be computed for nothing"


async def test_a_call_that_must_come_is_a_grammar_and_its_faults_are_those_of_tools() -> None:
    _, engine = await asked(*CALL, tools=[WEATHER], tool_choice="required")
    held = engine.seen[-1][1].structured_outputs
    assert held is not None
    assert "weather" in str(held.grammar)
    both = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    output, _ = await asked(*CALL, tools=[WEATHER], tool_choice="required", params=both)
    assert isinstance(output.error, UnsupportedParameter)
    engine = FakeEngine(answer=CALL)
    engine.model_info = FakeModelInfo(formats=FORMATS)
    engine.fail_at, engine.failure = (
        0,
        InvalidParameter("structured_outputs.grammar is bad", param="structured_outputs"),
    )
    await engine.start()
    output = await answer_to(engine, CHAT, SamplingParams(), offered([WEATHER], "required", None, FORMATS))  # type: ignore[arg-type]
    assert isinstance(output.error, CallerError)
    assert output.error.param == "tools"


@pytest.mark.parametrize(
    ("offer", "param", "said"),
    [
        (([{"type": "function"}], None, None), "tools[0]", "`function`"),
        (([WEATHER], "perhaps", None), "tool_choice", "perhaps"),
        (([WEATHER], None, 3), "parallel_tool_calls", "bool"),
        ((None, "required", None), "tool_choice", "needs tools"),
        (([WEATHER], {"type": "function", "function": {"name": "other"}}, None), "tool_choice", "other"),
        ((3, None, None), "tools", "array"),
    ],
)
def test_an_offer_that_is_none_is_refused_by_its_field(offer: tuple[Any, Any, Any], param: str, said: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        offered(*offer, FORMATS)
    assert raised.value.param == param
    assert said in raised.value.message


def test_a_model_whose_template_knows_no_tools_is_offered_none() -> None:
    with pytest.raises(UnsupportedParameter, match="tools cannot be used"):
        offered([WEATHER], None, None, Formats())
    assert offered(None, None, None, Formats()) == Offered()


def test_what_a_conversation_has_called_has_its_arguments_as_templates_take_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [*CHAT.messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
    found = called_in(messages)
    assert found[0] == messages[0]
    assert found[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    with pytest.raises(InvalidParameter) as raised:
        called_in([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}])
    assert raised.value.param == "messages[0].tool_calls[0].function"
