"""openai-python: sync, async and over HTTP/2, with every answer checked against its types."""

import asyncio
import sys
from typing import Any

import httpx2
import openai
from pydantic import BaseModel

DEMO, TOOLS = sys.argv[1:]
STRICT: dict[str, Any] = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}
SUM: Any = [{"role": "user", "content": "What is 7 + 5?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class Found(BaseModel):
    answer: int
    is_even: bool


def plain() -> None:
    with openai.OpenAI(base_url=f"{DEMO}/v1", **STRICT) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").owned_by
        whole = client.chat.completions.create(model="demo", messages=SUM, temperature=0)
        text = whole.choices[0].message.content
        assert text is not None
        assert "12" in text
        with client.chat.completions.stream(
            model="demo", messages=SUM, temperature=0, stream_options={"include_usage": True}
        ) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.content == text
        assert final.usage is not None
        assert final.usage.completion_tokens == whole.usage.completion_tokens
        parsed = client.chat.completions.parse(
            model="demo", messages=SUM, temperature=0, response_format=Found, max_completion_tokens=60
        )
        assert isinstance(parsed.choices[0].message.parsed, Found)
        continued = client.completions.create(model="demo", prompt=["Once", "The"], max_tokens=4, logprobs=1)
        assert [choice.index for choice in continued.choices] == [0, 1]
        for kind, request in (
            (openai.BadRequestError, {"model": "demo", "messages": SUM, "temperature": -1}),
            (openai.NotFoundError, {"model": "gpt", "messages": SUM}),
        ):
            try:
                client.chat.completions.create(**request)
            except kind:
                continue
            raise AssertionError(request)


def tools() -> None:
    with openai.OpenAI(base_url=f"{TOOLS}/v1", **STRICT) as client:
        messages: Any = [{"role": "user", "content": "Paris?"}]
        with client.chat.completions.stream(model="fake", messages=messages, tools=[TOOL]) as stream:
            kinds = {event.type for event in stream}
            message = stream.get_final_completion().choices[0].message
        assert "tool_calls.function.arguments.done" in kinds
        [call] = message.tool_calls or []
        assert call.function.arguments == '{"city": "Paris"}'
        messages += [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "Rain"},
        ]
        last = client.chat.completions.create(model="fake", messages=messages, tools=[TOOL])
        assert last.choices[0].message.content == "It rains in Paris."
        assert last.choices[0].message.model_extra is not None
        assert last.choices[0].message.model_extra["reasoning_content"] == "I see."


async def at_once(http_client: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{DEMO}/v1", http_client=http_client, **STRICT) as client:

        async def text_of(number: int) -> str:
            stream = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": f"What is 7 + {number}?"}],
                temperature=0,
                stream=True,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        found = await asyncio.gather(*map(text_of, range(8)))
        assert all(str(7 + number) in text for number, text in enumerate(found)), found


plain()
tools()
asyncio.run(at_once(None))
asyncio.run(at_once(httpx2.AsyncClient(http1=False, http2=True)))
print("ok")
