"""LangChain's ChatOpenAI: answers, streams, tools and structured output."""

import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

DEMO, TOOLS = sys.argv[1:]


class Found(BaseModel):
    """What was found."""

    answer: int
    is_even: bool


class weather(BaseModel):  # noqa: N801
    """The weather of a city."""

    city: str


@tool("weather")
def weather_tool(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}"


demo = ChatOpenAI(
    base_url=f"{DEMO}/v1",
    api_key="none",
    model="demo",
    temperature=0,
    max_retries=0,
    stream_usage=True,
)
answer = demo.invoke("What is 7 + 5?")
assert "12" in answer.content
assert answer.usage_metadata is not None
assert answer.usage_metadata["output_tokens"] > 3
assert answer.response_metadata["finish_reason"] == "stop"
chunks = list(demo.stream("What is 7 + 5?"))
assert "".join(str(chunk.content) for chunk in chunks) == answer.content
assert sum(bool(chunk.usage_metadata) for chunk in chunks) == 1
assert [len(str(reply.content)) > 0 for reply in demo.batch(["Hi", "Hello"])] == [True, True]
assert isinstance(demo.with_structured_output(Found, method="json_schema").invoke("What is 7 + 5?"), Found)

caller = ChatOpenAI(base_url=f"{TOOLS}/v1", api_key="none", model="fake", max_retries=0)
bound = caller.bind_tools([weather_tool])
messages: list[Any] = [HumanMessage("Paris?")]
called: Any = bound.invoke(messages)
assert [(call["name"], call["args"]) for call in called.tool_calls] == [("weather", {"city": "Paris"})]
streamed: Any = None
for chunk in bound.stream(messages):
    streamed = chunk if streamed is None else streamed + chunk
assert [call["args"] for call in streamed.tool_calls] == [{"city": "Paris"}]
messages += [
    called,
    ToolMessage(weather_tool.invoke(called.tool_calls[0]["args"]), tool_call_id=called.tool_calls[0]["id"]),
]
assert bound.invoke(messages).content == "It rains in Paris."
assert caller.with_structured_output(weather, method="function_calling").invoke("Paris?") == weather(city="Paris")
print("ok")
