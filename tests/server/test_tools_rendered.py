"""Tools and thoughts through a tokenizer, a template and an engine: a device that says what a test has written."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from importlib.resources import files
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import msgspec
import pytest

from novainfer import Engine, EngineConfig
from novainfer.actors.device.fake import FakeDevice
from novainfer.actors.tokenizer.tokenizer import HFTokenizer
from novainfer.fsm.messages.step import NO_MASK, StepDone, StepMasks, StepPlan
from novainfer.fsm.parsing.formats import MARKERS
from novainfer.server.journal.file import JournalFile
from tests.server.conftest import running

DEMO = Path(str(files("novainfer.kernels"))) / "demo" / "model"
# As Qwen's: tools in the system message, calls in <tool_call>, thoughts opened or closed for the answer.
TEMPLATE = (
    r"{%- if tools %}{{ '<|im_start|>system\nTools:' }}{% for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}"
    r"{{ '<|im_end|>\n' }}{% endif %}"
    r"{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' }}"
    r"{%- if message.reasoning_content %}{{ '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' }}{% endif %}"
    r"{{- message.content }}"
    r"{%- for call in message.tool_calls or [] %}"
    r"{%- if not loop.first or message.content %}{{ '\n' }}{% endif %}"
    r"""{{ '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}"""
    r"{{- (call.function.arguments | tojson) ~ '}\n</tool_call>' }}"
    r"{%- endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    r"{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    r"{%- if enable_thinking is defined %}"
    r"{{- '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [{"role": "user", "content": "What is <think> in Paris </think> and <think>?"}]
ARGUMENTS = {"city": "P\u00e4ris \U0001f600", "n": [1, {"a": None}]}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n</tool_call>'


class ScriptedDevice(FakeDevice):
    """Says `script`, token by token, then ends the answer."""

    def __init__(self, vocab_size: int, eos: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._eos = eos
        self.script: list[int] = []
        self.rather: list[int] = []
        self._given: SimpleQueue[StepMasks] = SimpleQueue()

    def load(self, precision: str | None = None) -> dict[str, Any]:
        return {**super().load(precision), "vocab_size": self._vocab_size, "eos_token_ids": [self._eos]}

    def give(self, masks: StepMasks) -> None:
        """For the step that waits for them."""
        self._given.put(masks)

    def run(self, plan: StepPlan) -> StepDone:
        """One request at a time; where its mask forbids what is written, the first of what it would rather say."""
        if not plan.sample_seqs:
            return StepDone(plan.step_id, plan.epoch, [])
        if plan.masks_to_come:
            given = next(
                masks for masks in iter(partial(self._given.get, timeout=5.0), None) if masks.step_id == plan.step_id
            )
            if not given.masks:
                return StepDone(plan.step_id, plan.epoch, [NO_MASK])
            plan = msgspec.structs.replace(plan, masks=given.masks)
        wish = self.script[0] if self.script else self._eos
        said = next((token_id for token_id in (wish, *self.rather) if is_allowed(plan, token_id)), None)
        if said is None:
            said = next(token_id for token_id in range(self._vocab_size) if is_allowed(plan, token_id))
        if said == wish:
            del self.script[:1]
        return StepDone(plan.step_id, plan.epoch, [said])


def is_allowed(plan: StepPlan, token_id: int) -> bool:
    if not plan.masks:
        return True
    (word,) = struct.unpack_from("<I", plan.masks, 4 * (token_id // 32))
    return bool(word >> token_id % 32 & 1)


Ask = Callable[..., Any]


def scripted(path: Path, *, is_special: bool) -> tuple[HFTokenizer, ScriptedDevice]:
    """A tokenizer with a token for each marker, and the device that goes with it."""
    for part in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / part, path / part)
    found = json.loads((path / "tokenizer.json").read_text())
    markers = [token for token in found["added_tokens"] if token["content"] in MARKERS]
    assert len(markers) == len(MARKERS)
    for token in markers:
        token["special"] = is_special
    [end] = [token["id"] for token in found["added_tokens"] if token["content"] == "<|im_end|>"]
    (path / "tokenizer.json").write_text(json.dumps(found))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    del settings["added_tokens_decoder"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = HFTokenizer(path)
    return tokenizer, ScriptedDevice(max(token["id"] for token in found["added_tokens"]) + 1, end)


def signs(tokenizer: HFTokenizer) -> list[int]:
    return [found for sign in '"}: ' for found in tokenizer._encode([sign], add_special_tokens=False)[0]]


@pytest.fixture(params=[False, True], ids=["added", "special"])
async def ask(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ask]:
    """`await ask(script, …)`: a chat completion in which the model says `script`; markers are tokens, hidden or not."""
    tokenizer, device = scripted(tmp_path, is_special=request.param)
    engine = Engine(EngineConfig(served_model_name="scripted"), device=device, tokenizer=tokenizer)

    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running(engine, shutdown_timeout_s=0.0))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=20.0))

        async def post(script: str, *, path: str = "/v1/chat/completions", **body: Any) -> Any:
            [ids] = tokenizer._encode([script], add_special_tokens=False)
            device.script = list(ids)
            device.rather = signs(tokenizer)
            response = await http.post(path, json={"messages": MESSAGES, "tools": [TOOL], **body})
            if not body.get("stream"):
                return response.json()
            events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
            return [json.loads(event) for event in events]

        yield post


async def test_the_format_of_a_template_is_found(ask: Ask):
    info = await ask("", path="/v1/chat/completions/render")
    assert info["token_ids"][-1] != 0
    reply = await ask("Yes" + CALL)
    message = reply["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    assert message["content"] == "Yes"


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_begin_where_the_template_has_opened_them(ask: Ask, stream: bool):
    wanted = {"on": ("Hm.", "Yes"), "off": ("", "Hm.\n\n\nYes"), "unsaid": ("", "Hm.\n\n\nYes")}
    for switch, (reasoning, content) in wanted.items():
        kwargs = {} if switch == "unsaid" else {"enable_thinking": switch == "on"}
        script = "Hm.\n</think>\n\nYes" if switch == "on" else "Hm.\n\n\nYes"
        reply = await ask(script, chat_template_kwargs=kwargs, stream=stream)
        if stream:
            deltas = [choice["delta"] for event in reply for choice in event["choices"]]
            message = {
                name: "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content")
            }
        else:
            message = reply["choices"][0]["message"]
            assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0 or switch != "on"
        assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content), switch


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}])
async def test_an_answer_that_is_sent_back_is_rendered_as_the_model_has_written_it(ask: Ask, kwargs: dict[str, Any]):
    script = ("Hm, \u00e9.\n</think>\n\n" if kwargs else "") + "Let me see." + f"\n{CALL}\n{CALL}"
    first = await ask("", path="/v1/chat/completions/render", chat_template_kwargs=kwargs)
    reply = await ask(script, chat_template_kwargs=kwargs, return_token_ids=True)
    [choice] = reply["choices"]
    message = {name: value for name, value in choice["message"].items() if name != "reasoning"}
    said = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain"}
    again = await ask("", path="/v1/chat/completions/render", messages=[*MESSAGES, message, said])
    written = first["token_ids"] + choice["token_ids"]
    assert again["token_ids"][: len(written)] == written


async def test_a_stop_string_may_end_in_a_call_which_is_then_none_to_run(ask: Ask):
    reply = await ask("Yes" + CALL, stop=["null"])
    [choice] = reply["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "null")
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments == WRITTEN.partition("null")[0]


# ---- what must come --------------------------------------------------------------------------------------------------

STRICT = {
    "type": "function",
    "function": {
        "name": "forecast",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}},
            "required": ["place"],
            "additionalProperties": False,
            "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
        },
    },
}


@pytest.mark.parametrize("thinks", [None, True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "forecast"}}])
async def test_a_call_that_must_come_comes_whatever_the_model_would_say(ask: Ask, choice: Any, thinks: bool | None):
    kwargs = {} if thinks is None else {"enable_thinking": thinks}
    script = "Hm.</think>I will not." if thinks else "I will not."
    asked = {"tools": [TOOL, STRICT], "tool_choice": choice, "chat_template_kwargs": kwargs, "max_tokens": 200}
    reply = await ask(script, **asked)
    [answer] = reply["choices"]
    assert answer["finish_reason"] == "tool_calls", answer
    message = answer["message"]
    assert message["content"] is None
    assert message.get("reasoning_content") == ("Hm." if thinks else None)
    first = message["tool_calls"][0]["function"]
    arguments = json.loads(first["arguments"])
    if choice == "required":
        assert first["name"] in ("weather", "forecast")
    else:
        assert first["name"] == "forecast"
        assert len(message["tool_calls"]) == 1
    assert list(arguments) == (["place"] if first["name"] == "forecast" else [])


async def test_arguments_of_a_strict_tool_fit_its_schema_where_the_model_calls_it(ask: Ask):
    script = 'Well. <tool_call>\n{"name": "forecast", "arguments": {"town": "Paris"}}\n</tool_call>'
    free = await ask(script)
    assert json.loads(free["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == {"town": "Paris"}
    held = await ask(script, tools=[TOOL, STRICT], max_tokens=300)
    message = held["choices"][0]["message"]
    assert message["content"].startswith("Well.")
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    assert list(arguments) == ["place"]
    assert isinstance(arguments["place"]["city"], str)


async def test_a_strict_schema_that_no_grammar_can_be_made_of_is_refused_by_the_field(ask: Ask):
    wrong = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "objekt"}}}
    reply = await ask("x", tools=[wrong])
    assert reply["error"]["param"] == "tools"
    assert "objekt" in reply["error"]["message"]
    assert "structured_outputs" not in reply["error"]["message"]


# ---- Anthropic's shapes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinks", [None, True, False])
async def test_anthropics_conversations_are_rendered_as_openais_are(ask: Ask, thinks: bool | None):
    kwargs = {} if thinks is None else {"enable_thinking": thinks}
    asked: dict[str, Any] = {"tools": [{"name": "weather", "input_schema": TOOL["function"]["parameters"]}]}
    if thinks is not None:
        asked["thinking"] = {"type": "adaptive" if thinks else "disabled"}
    script = ("Hm.\n</think>\n\n" if thinks else "") + f"Yes\n{CALL}"
    reply = await ask(script, path="/v1/messages", max_tokens=200, **asked)
    assert [block["type"] for block in reply["content"]] == ["thinking"] * bool(thinks) + ["text", "tool_use"]
    assert reply["content"][-1]["input"] == ARGUMENTS
    said = {"type": "tool_result", "tool_use_id": reply["content"][-1]["id"], "content": "Rain"}
    turns = [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [said]}]
    count = await ask("", path="/v1/messages/count_tokens", messages=[*MESSAGES, *turns], **asked)

    [choice] = (await ask(script, chat_template_kwargs=kwargs))["choices"]
    called = {"role": "tool", "tool_call_id": "x", "content": "Rain"}
    messages = [*MESSAGES, choice["message"], called]
    rendered = await ask("", path="/v1/chat/completions/render", messages=messages, chat_template_kwargs=kwargs)
    assert count["input_tokens"] == len(rendered["token_ids"])


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "forecast"}])
async def test_a_tool_that_must_be_used_is_used(ask: Ask, choice: dict[str, str], thinks: bool):
    strict = STRICT["function"]
    tools = [{"name": "forecast", "strict": True, "input_schema": strict["parameters"]}]  # type: ignore[index]
    thinking = {"type": "adaptive" if thinks else "disabled"}
    script = ("Hm.</think>" if thinks else "") + "I will not."
    asked = {"tools": tools, "tool_choice": choice, "thinking": thinking, "max_tokens": 300}
    reply = await ask(script, path="/v1/messages", **asked)
    assert reply["stop_reason"] == "tool_use", reply
    assert [block["type"] for block in reply["content"]] == ["thinking"] * thinks + ["tool_use"]
    assert list(reply["content"][-1]["input"]) == ["place"]


# ---- thoughts, and what is held behind them --------------------------------------------------------------------------

HELD = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": HELD}}


@pytest.mark.parametrize("thinks", [None, True, False])
@pytest.mark.parametrize("script", ["Hm, {.\n</think>\n\nIt is Paris.", "<think>Hm, {.</think>\nIt is Paris."])
async def test_an_answer_that_is_held_to_a_schema_may_be_thought_about_first(
    ask: Ask, thinks: bool | None, script: str
):
    kwargs = {} if thinks is None else {"enable_thinking": thinks}
    reply = await ask(script, response_format=FORMAT, tools=[], chat_template_kwargs=kwargs, max_tokens=80)
    [choice] = reply["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"]) == {"city": "Paris"}
    # Where the template has closed thoughts there are none; where it says nothing, the model may open them itself.
    is_thought = thinks or (thinks is None and script.startswith("<think>"))
    assert choice["message"].get("reasoning_content", "").strip() == ("Hm, {." if is_thought else "")


@pytest.mark.parametrize("budget", [0, 1, 3])
@pytest.mark.parametrize("held", [{}, {"response_format": FORMAT, "tools": []}, {"tool_choice": "required"}])
async def test_thoughts_end_with_their_budget_and_the_answer_follows(ask: Ask, budget: int, held: dict[str, Any]):
    script = "1 2 3 4 5 6 7 8 9</think>\n\nIt is Paris."
    asked = {
        "thinking_token_budget": budget,
        "chat_template_kwargs": {"enable_thinking": True},
        "max_tokens": 200,
        **held,
    }
    reply = await ask(script, **asked)
    [choice] = reply["choices"]
    details = reply["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == budget + 1  # and the marker
    message = choice["message"]
    assert len(message.get("reasoning_content", "")) <= 2 * budget
    if "response_format" in held:
        assert json.loads(message["content"]) == {"city": "Paris"}
    elif held:
        assert message["tool_calls"][0]["function"]["name"] == "weather"
    else:
        assert message["content"].endswith("It is Paris.")


async def test_thoughts_within_their_budget_are_as_they_are(ask: Ask):
    script = "Hm.\n</think>\n\nIt is Paris."
    kwargs = {"enable_thinking": True}
    plain = await ask(script, chat_template_kwargs=kwargs)
    bounded = await ask(script, chat_template_kwargs=kwargs, thinking_token_budget=100)
    assert bounded["choices"][0]["message"] == plain["choices"][0]["message"]
    closed = await ask("It is Paris.", chat_template_kwargs={"enable_thinking": False}, thinking_token_budget=0)
    assert closed["choices"][0]["message"]["content"] == "It is Paris."


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("num_tokens", [1, -4])  # within its thoughts, and within what is held
async def test_an_answer_behind_thoughts_goes_on_in_another_server(tmp_path: Path, num_tokens: int, budget: int | None):
    body = {"messages": MESSAGES, "stream": True, "response_format": FORMAT, "max_tokens": 80}
    body |= {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": budget}
    tokenizer, device = scripted(tmp_path, is_special=False)
    [ids] = tokenizer._encode(["Hm, {.\n</think>\n\nIt is Paris."], add_special_tokens=False)
    journal, config = tmp_path / "journal.db", EngineConfig(served_model_name="scripted")
    device.script, device.rather = list(ids), signs(tokenizer)
    async with (
        running(Engine(config, device=device, tokenizer=tokenizer), journal=journal) as server,
        httpx.AsyncClient(base_url=server.url, timeout=20.0) as http,
    ):
        told = await http.post("/v1/chat/completions", json=body, headers={"x-request-id": "one"})
    file = JournalFile(journal, 1 << 20, 60.0)
    [stored] = file.ended("chatcmpl")
    file.begin()
    file.open(stored.serial, stored.asked, stored.fingerprint)  # once more, with the beginning of its tokens
    file.add(stored.serial, stored.said[:num_tokens])
    file.commit()
    file.close()
    left = device.script
    tokenizer, device = scripted(tmp_path, is_special=False)
    device.script, device.rather = ids[num_tokens:] if num_tokens > 0 else left, signs(tokenizer)
    async with (
        running(Engine(config, device=device, tokenizer=tokenizer), journal=journal, resume=True) as server,
        httpx.AsyncClient(base_url=server.url, timeout=20.0) as http,
    ):
        again = await http.get("/v1/chat/completions/chatcmpl-one")
    assert again.text == told.text
    assert again.text.endswith("data: [DONE]\n\n")


async def test_anthropics_budget_bounds_thoughts(ask: Ask):
    script = "1 2 3 4 5 6 7 8 9</think>\n\nIt is Paris."
    thinking = {"type": "enabled", "budget_tokens": 2}
    reply = await ask(script, path="/v1/messages", thinking=thinking, max_tokens=100, tools=[])
    assert [block["type"] for block in reply["content"]] == ["thinking", "text"]
    assert len(reply["content"][0]["thinking"]) <= 4
    assert reply["content"][1]["text"].endswith("It is Paris.")


async def test_a_budget_is_a_number_of_tokens(ask: Ask):
    reply = await ask("x", thinking_token_budget=-1)
    assert reply["error"]["param"] == "thinking_token_budget"
