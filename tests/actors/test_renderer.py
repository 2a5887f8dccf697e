"""Templates run where they can be ended: in bounded time and memory, with what transformers shows them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import Any

import psutil
import pytest

from novainfer.actors.tokenizer.renderer import Renderer, RenderError, RendererUnavailable
from novainfer.actors.tokenizer.tokenizer import HFTokenizer, TooLong
from novainfer.fsm.messages.events import Chat
from novainfer.prompt import RESERVED_KWARGS

DEMO = Path(str(files("novainfer.kernels"))) / "demo" / "model"
HELLO = Chat(messages=[{"role": "user", "content": "Hello"}])
LONG_S = 60.0  # for what must be answered, however busy the machine
SHORT_S = 0.5  # for what never is


class Made:
    """Renderers that are closed at the end."""

    def __init__(self) -> None:
        self.all: list[Renderer] = []

    def __call__(self, template: str, *, cpu_s: float = LONG_S, render_s: float = LONG_S) -> Renderer:
        self.all.append(Renderer(template, {"bos_token": "<s>"}, cpu_s=cpu_s, render_s=render_s))
        return self.all[-1]


@pytest.fixture
def make() -> Iterator[Made]:
    made = Made()
    yield made
    for renderer in made.all:
        renderer.close()
        assert renderer.pids == []


def user(content: str) -> Chat:
    return Chat(messages=[{"role": "user", "content": content}])


def why_not(renderer: Renderer, chat: Chat = HELLO, chars_max: int = 1000, kind: type[Exception] = RenderError) -> str:
    with pytest.raises(kind) as caught:
        renderer.render(chat, chars_max)
    return str(caught.value)


SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_never_ends_is_ended_and_the_next_chat_is_rendered(make: Made) -> None:
    source = "{% if messages[0].content == 'slow' %}" + SLOW + "{% endif %}{{ messages[0].content }}"
    renderer = make(source, cpu_s=SHORT_S)
    slow = Chat(messages=[{"role": "user", "content": "slow"}])
    assert why_not(renderer, slow) == f"that takes more than {SHORT_S:g} s of the processor's time"
    assert renderer.pids == []
    assert renderer.render(HELLO, 1000) == "Hello"


def test_a_template_that_never_ends_below_the_interpreter_is_ended(make: Made) -> None:
    why = f"that takes more than {SHORT_S:g} s of the processor's time"
    assert why_not(make("{{ 9 ** messages[0].content | int }}", cpu_s=SHORT_S), user("99999999")) == why
    assert why_not(make("{{ 9 ** 99999999 }}", cpu_s=SHORT_S)) == why  # it is computed when the template is compiled


def test_a_process_that_is_stopped_costs_no_chat_its_answer(make: Made) -> None:
    renderer = make("{{ messages[0].content }}", render_s=1.0)
    assert renderer.render(HELLO, 1000) == "Hello"
    (pid,) = renderer.pids
    os.kill(pid, signal.SIGSTOP)
    assert renderer.render(HELLO, 1000) == "Hello"
    assert pid not in renderer.pids
    assert not psutil.pid_exists(pid)


def test_a_process_that_gets_no_time_to_render_is_no_fault_of_the_chat(make: Made) -> None:
    renderer = make(SLOW, render_s=SHORT_S)  # on the clock; it may use LONG_S of the processor
    with pytest.raises(RendererUnavailable, match="the process that renders chats does not answer"):
        renderer.render(HELLO, 1000)
    assert renderer.pids == []


def test_a_process_that_cannot_be_started_is_no_fault_of_the_chat(make: Made) -> None:
    renderer = make("{{ messages[0].content }}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(RendererUnavailable, match="cannot be started: Too many open files"):
            renderer.render(HELLO, 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert renderer.render(HELLO, 1000) == "Hello"


def test_a_template_that_takes_memory_fails_alone(make: Made) -> None:
    renderer = make("{% if messages[0].content == 'big' %}{{ ('x' * 4000000000) | length }}{% endif %}ok")
    big = Chat(messages=[{"role": "user", "content": "big"}])
    assert why_not(renderer, big) == "that takes more than 1024 MB"
    assert renderer.render(HELLO, 1000) == "ok"


@pytest.mark.parametrize("source", ["{{ 'x' * 50000000 }}", "{% for i in range(99999) %}xxxxxxxxxx{% endfor %}"])
def test_what_is_longer_than_a_prompt_may_be_is_given_up(make: Made, source: str) -> None:
    with pytest.raises(RenderError) as caught:
        make(source).render(HELLO, 1000)
    assert caught.value.is_too_long


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "the template calls itself too often"),
        ("{{ raise_exception('only\n two roles') }}", "only two roles"),
        ("{{ messages[0].nothing.at_all }}", "'dict object' has no attribute 'nothing'"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{{ '\\ud800' }}", "'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed"),
        ("{% nonsense %}", "Encountered unknown tag 'nonsense'."),
    ],
)
def test_why_a_chat_cannot_be_rendered_is_one_sentence(make: Made, source: str, why: str) -> None:
    assert why_not(make(source)) == why


def test_a_process_that_is_killed_costs_no_chat_its_answer(make: Made) -> None:
    renderer = make("{{ messages[0].content }}")
    assert renderer.render(HELLO, 1000) == "Hello"
    (pid,) = renderer.pids
    os.kill(pid, 9)
    assert renderer.render(HELLO, 1000) == "Hello"
    assert renderer.pids
    assert renderer.pids != [pid]


def test_a_chat_in_which_a_second_process_ends_is_not_rendered(make: Made) -> None:
    renderer = make(SLOW)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(why_not(renderer, kind=RendererUnavailable)))
    thread.start()
    killed: set[int] = set()
    while thread.is_alive():
        for pid in set(renderer.pids) - killed:
            killed.add(pid)
            with suppress(ProcessLookupError):  # it is reaped between the look and the signal
                os.kill(pid, 9)
    thread.join()
    assert found == ["the process that renders chats has ended"]
    assert len(killed) == 2


def test_closing_ends_what_is_being_rendered(make: Made) -> None:
    renderer = make(SLOW)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(why_not(renderer, kind=RendererUnavailable)))
    thread.start()
    while not renderer.pids:
        pass
    (pid,) = renderer.pids
    renderer.close()
    thread.join()
    assert found == ["the process that renders chats has ended"]
    assert not psutil.pid_exists(pid)


# ---- as transformers has it ------------------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}\n"
    "    {% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}\n"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "the demo's": None,
    "trimmed": CHATML,
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}{{ tools }}{{ documents }}",
    "blocks": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}{{ eos_token }}{{ deep.x[1] }}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
    "{% endfor %}{{ ns.n }}{{ messages[0] is mapping }}{{ messages[0].name is defined }}",
}
TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {"zone": {}}}}}
CHATS = [
    [{"role": "user", "content": "Hello <b>&amp;</b> \u00e9\U0001f600"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "What?\n", "name": None},
        {"role": "assistant", "content": "Well, "},
    ],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "a tool"])
def test_a_chat_is_rendered_as_transformers_renders_it(
    tmp_path: Path, name: str, continued: bool, tools: list[dict[str, Any]]
) -> None:
    for part in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / part, tmp_path / part)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATES[name] or settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = HFTokenizer(tmp_path)
    for messages in CHATS:
        chat = Chat(
            messages=messages,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            template_kwargs={"deep": {"x": [1, 2]}},
            tools=tools,
        )
        wanted = _by_transformers(tokenizer, chat)
        if wanted is None:  # it refuses to continue in a template that does not say "content"
            assert continued
        else:
            assert tokenizer._render(chat) == wanted
    tokenizer.close()


def _by_transformers(tokenizer: HFTokenizer, chat: Chat) -> str | None:
    kwargs: dict[str, Any] = chat.template_kwargs
    try:
        return str(
            tokenizer._tokenizer.apply_chat_template(
                chat.messages,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tools=chat.tools or None,
                **kwargs,
            )
        )
    except ValueError:
        return None


def test_every_argument_of_transformers_renderer_is_reserved() -> None:
    tokenizer = HFTokenizer(DEMO)
    assert set(signature(tokenizer._tokenizer.apply_chat_template).parameters) - {"kwargs"} <= RESERVED_KWARGS


def test_a_chat_longer_than_the_context_is_refused_as_such_before_it_is_tokenised() -> None:
    tokenizer = HFTokenizer(DEMO)
    tokenizer.limit_tokens(100)
    (found,) = tokenizer.encode_batch([Chat(messages=[{"role": "user", "content": "x" * 10_000}])])
    assert isinstance(found, TooLong)
    assert found == "This model's maximum context length is 100 tokens, and these messages have more; shorten them."
    tokenizer.close()
