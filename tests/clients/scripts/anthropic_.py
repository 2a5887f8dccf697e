"""anthropic-python: messages, streams, structured output, and its own loop over tools."""

import asyncio
import sys
from typing import Any

import anthropic
from pydantic import BaseModel

DEMO, TOOLS = sys.argv[1:]
STRICT: dict[str, Any] = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}
GREEDY = {"temperature": 0}
SUM: Any = [{"role": "user", "content": "What is 7 + 5?"}]


class Found(BaseModel):
    answer: int
    is_even: bool


@anthropic.beta_tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    assert city == "Paris"
    return "Rain"


def plain() -> None:
    with anthropic.Anthropic(base_url=DEMO, **STRICT) as client:
        whole = client.messages.create(model="demo", max_tokens=60, messages=SUM, extra_body=GREEDY)
        [block] = whole.content
        assert block.type == "text"
        assert "12" in block.text
        with client.messages.stream(model="demo", max_tokens=60, messages=SUM, extra_body=GREEDY) as stream:
            assert "".join(stream.text_stream) == block.text
            final = stream.get_final_message()
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
        count = client.messages.count_tokens(model="demo", messages=SUM)
        assert count.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        parsed = client.messages.parse(
            model="demo", max_tokens=60, messages=SUM, extra_body=GREEDY, output_format=Found
        )
        assert isinstance(parsed.parsed_output, Found)
        assert [model.id for model in client.models.list()] == ["demo"]


def tools() -> None:
    with anthropic.Anthropic(base_url=TOOLS, **STRICT) as client:
        for stream in (False, True):
            runner: Any = client.beta.messages.tool_runner(
                model="fake",
                max_tokens=50,
                tools=[weather],
                messages=[{"role": "user", "content": "Paris?"}],
                stream=stream,
            )
            last = runner.until_done()
            assert [block.type for block in last.content] == ["thinking", "text"]
            assert last.content[-1].text == "It rains in Paris."


async def at_once() -> None:
    async with anthropic.AsyncAnthropic(base_url=DEMO, **STRICT) as client:

        async def text_of(number: int) -> str:
            async with client.messages.stream(
                model="demo",
                max_tokens=60,
                messages=[{"role": "user", "content": f"What is 7 + {number}?"}],
                extra_body=GREEDY,
            ) as stream:
                return await stream.get_final_text()

        found = await asyncio.gather(*map(text_of, range(8)))
        assert all(str(7 + number) in text for number, text in enumerate(found)), found


plain()
tools()
asyncio.run(at_once())
print("ok")
