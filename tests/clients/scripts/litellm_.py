"""LiteLLM: as OpenAI's provider and as Anthropic's, with its mapping of errors."""

import sys
from typing import Any

import litellm

DEMO, TOOLS = sys.argv[1:]
SUM: Any = [{"role": "user", "content": "What is 7 + 5?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
OPENAI: dict[str, Any] = {"model": "openai/demo", "api_base": f"{DEMO}/v1", "api_key": "none", "max_retries": 0}
ANTHROPIC: dict[str, Any] = {"model": "anthropic/demo", "api_base": DEMO, "api_key": "none", "max_tokens": 60}

for where in (OPENAI, ANTHROPIC):
    whole: Any = litellm.completion(messages=SUM, temperature=0, **where)
    text = whole.choices[0].message.content
    assert "12" in text, text
    assert whole.usage.completion_tokens > 3
    stream: Any = litellm.completion(messages=SUM, temperature=0, stream=True, **where)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text

provider: Any = {"model": "text-completion-openai/demo", "api_base": f"{DEMO}/v1", "api_key": "none"}
assert litellm.text_completion(prompt="Once upon", max_tokens=4, **provider).choices[0].text

for model, base in (("openai/fake", f"{TOOLS}/v1"), ("anthropic/fake", TOOLS)):
    there: dict[str, Any] = {"model": model, "api_base": base, "api_key": "none", "max_tokens": 50}
    messages: Any = [{"role": "user", "content": "Paris?"}]
    message: Any = litellm.completion(messages=messages, tools=[TOOL], **there).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "weather", call
    assert "Paris" in call.function.arguments, call
    assert message.reasoning_content == "I see.", message
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "Rain"}]
    last: Any = litellm.completion(messages=messages, tools=[TOOL], **there).choices[0].message
    assert last.content == "It rains in Paris.", last

for kind, more in (
    (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "a b " * 3000}]}),
    (litellm.BadRequestError, {"messages": SUM, "temperature": -1}),
    (litellm.NotFoundError, {"messages": SUM, "model": "openai/gpt"}),
):
    try:
        litellm.completion(**{**OPENAI, **more})
    except kind:
        continue
    raise AssertionError(kind)
print("ok")
