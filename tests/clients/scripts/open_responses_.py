"""What Open Responses' acceptance tests ask of a server, with every body and event read by the types of that standard.

Their own suite is published with its sources only; these are the same requests in fewer words, and what it looks for.
Models here see neither images nor files, so these must be refused by name. Thoughts are streamed by OpenAI's names.
"""

import json
import sys
from typing import Any

import httpx
from openresponses_types import types
from pydantic import BaseModel, ValidationError

DEMO, TOOLS = sys.argv[1:]
ENDINGS = {"response.completed", "response.failed", "response.incomplete"}
# Of the same events as OpenAI's, those of thoughts have other names in this standard.
OPENAIS_OWN = {"response.reasoning_text.delta", "response.reasoning_text.done"}
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
EVENTS: dict[str, type[BaseModel]] = {}
for name, kind in vars(types).items():
    if name.endswith("StreamingEvent"):
        [told] = kind.model_fields["type"].annotation
        EVENTS[told.value] = kind

http = httpx.Client(timeout=60)


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


def whole(url: str, **body: Any) -> types.ResponseResource:
    answer = http.post(f"{url}/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    response = types.ResponseResource.model_validate_json(answer.content)
    assert response.output, response
    assert response.status == "completed", response
    return response


def streamed(url: str, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(f"{url}/v1/responses", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events: list[dict[str, Any]] = []
    for block in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if not lines:
            continue
        event = json.loads(lines["data"])
        assert lines["event"] == event["type"], lines
        if event["type"] not in OPENAIS_OWN:
            EVENTS[event["type"]].model_validate_json(lines["data"])
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events if event["type"] in ENDINGS] == ["response.completed"]
    assert events[-1]["type"] == "response.completed"
    types.ResponseResource.model_validate(events[-1]["response"])
    return events


def refused(field: str, part: dict[str, Any]) -> None:
    content = [{"type": "input_text", "text": "What do you see?"}, part]
    answer = http.post(f"{DEMO}/v1/responses", json={"model": "demo", "input": [message("user", content)]})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert field in error["message"], error


# A response that is not one is seen.
for lacking in ({"object": "response"}, {"object": "response", "status": 3}):
    try:
        types.ResponseResource.model_validate(lacking)
    except ValidationError:
        continue
    raise AssertionError(lacking)

whole(DEMO, model="demo", input=[message("user", "Say hello in exactly 3 words.")])
kinds = [event["type"] for event in streamed(DEMO, model="demo", input=[message("user", "Count from 1 to 5.")])]
assert kinds.count("response.output_text.delta") > 1
whole(DEMO, model="demo", input=[message("system", "You are a pirate."), message("user", "Say hello.")])
turns = [
    message("user", "My name is Alice."),
    message("assistant", "Hello Alice!"),
    message("user", "What is my name?"),
]
whole(DEMO, model="demo", input=turns)
first = whole(DEMO, model="demo", input="Remember this word: papaya.")
second = whole(DEMO, model="demo", previous_response_id=first.id, input="Which word?")
assert second.previous_response_id == first.id
refused("input_image", {"type": "input_image", "image_url": "data:image/png;base64,AAAA"})
refused("input_file", {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"})

question = [message("user", "What is the weather in Paris?")]
called = whole(TOOLS, model="fake", input=question, tools=[TOOL])
[call] = [item for item in called.output if isinstance(item, types.FunctionCall)]
assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
said = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
last = whole(TOOLS, model="fake", input=[*question, call.model_dump(mode="json"), said], tools=[TOOL])
assert [item for item in last.output if isinstance(item, types.Message)], last
kinds = [event["type"] for event in streamed(TOOLS, model="fake", input=question, tools=[TOOL])]
for kind in ("response.function_call_arguments.delta", "response.function_call_arguments.done"):
    assert kind in kinds, kinds
forced = {"type": "function", "name": "weather"}
whole(TOOLS, model="fake", input=question, tools=[TOOL], tool_choice=forced)
print("ok")
