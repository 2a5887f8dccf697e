"""`novainfer generate`: its two formats, and files that the next run goes on with."""

import fcntl
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from novainfer import EngineConfig, EngineDead, StepFailedError
from novainfer.fsm.parsing.formats import Formats
from novainfer.server.cli import generate as cli_generate
from novainfer.server.cli.main import main
from tests.server.fakes import FakeEngine, FakeModelInfo


@pytest.fixture
def fake_generate(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """The engines that `novainfer generate` makes, fake ones."""
    engines: list[FakeEngine] = []

    def make_engine(config: EngineConfig) -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    monkeypatch.setattr(cli_generate, "make_engine", make_engine)
    return engines


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_record_is_answered_in_order(
    fake_generate: list[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        '{"prompt": "a", "id": "first", "note": 1}',
        '{"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_completion_tokens": 9}',
        "",
        '{"prompt_token_ids": [1, 2], "logprobs": 1, "return_token_ids": true}',
        "nonsense",
        '{"prompt": "b", "tools": [1], "id": 5}',
        '{"prompt": "b", "messages": []}',
        '{"prompt": "a", "temperature": 99999}',
        '{"prompt": ["a", "b"]}',
        '{"prompt": "a", "stream": true}',
        '{"prompt": "' + "x" * 65 + '"}',
        '{"prompt": "last"}',
    ]
    source.write_text("\n".join(lines))
    argv = ["generate", "-i", str(source), "-o", str(sink), "--max-tokens", "7", "--temperature", "0.5"]
    assert main(argv) == 1
    said = capsys.readouterr().err
    assert "7 of 11 records got an error instead of an answer; the same command tries them again" in said
    results = read(sink)
    assert [result["index"] for result in results] == list(range(11))
    assert [result["id"] for result in results] == ["first", None, None, None, 5] + [None] * 6
    assert results[0]["choices"] == [{"index": 0, "text": "Hello, world!", "finish_reason": "stop"}]
    assert results[0]["ignored_fields"] == ["note"]
    assert len(results[1]["choices"]) == 2
    assert results[2]["choices"][0]["token_ids"] == [0, 1, 2, 3, 4]
    assert results[2]["choices"][0]["logprobs"]["tokens"][0] == "Hello"
    params = [None, "tools", "prompt", "temperature", "prompt", "stream", "prompt"]
    assert [result["error"]["param"] for result in results[3:10]] == params
    assert results[9]["error"]["code"] == "context_length_exceeded"
    assert "choices" in results[10]
    sent = {request_id: params for _, params, request_id in fake_generate[0].seen}
    assert (sent["batch-0"].max_tokens, sent["batch-0"].temperature) == (7, 0.5)
    assert sent["batch-1"].max_tokens == 9
    assert fake_generate[0].is_closed


def test_it_goes_on_where_it_stopped(
    fake_generate: list[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(5)))
    argv = ["generate", "-i", str(source), "-o", str(sink)]
    assert main(argv) == 0
    complete = sink.read_bytes()
    cut = complete.splitlines(keepends=True)
    sink.write_bytes(b"".join(cut[:2]) + cut[2][:20])  # as a crash leaves it
    assert main(argv) == 0
    assert sink.read_bytes() == complete
    assert [prompt for prompt, _, _ in fake_generate[1].seen] == ["2", "3", "4"]
    assert main(argv) == 0
    assert len(fake_generate) == 2  # nothing to do: no model
    assert "all 5 records have their answers" in capsys.readouterr().err
    assert sink.read_bytes() == complete


def test_it_does_not_touch_a_file_of_another_kind(
    fake_generate: list[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    assert main(["generate", "-i", str(source), "-o", str(source)]) == 2
    assert "--output" in capsys.readouterr().err
    assert source.read_text() == '{"prompt": "x"}\n'
    assert not fake_generate


def test_it_reads_and_writes_standard_streams(
    fake_generate: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "x"}\n')))
    with os.fdopen(os.dup(1), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["generate"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["choices"][0]["text"] == "Hello, world!"


def prompts(*texts: str) -> str:
    return "".join(json.dumps({"prompt": text}) + "\n" for text in texts)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, list[str]]:
    """An input, an output, and the command that takes both."""
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    return source, sink, ["generate", "-i", str(source), "-o", str(sink)]


Files = tuple[Path, Path, list[str]]


def test_records_that_came_to_it_are_answered_and_those_that_moved_are_known_again(
    fake_generate: list[FakeEngine], files: Files
) -> None:
    source, sink, argv = files
    source.write_text(prompts("a", "b", "b"))
    assert main(argv) == 0
    digests = [line["digest"] for line in read(sink)]
    source.write_text(prompts("new", "b", "a", "b", "b"))
    assert main(argv) == 0
    assert [prompt for prompt, _, _ in fake_generate[1].seen] == ["new", "b"]
    found = read(sink)
    assert [line["index"] for line in found] == [0, 1, 2, 3, 4]
    assert [line["digest"] for line in found[1:]] == [digests[1], digests[0], digests[1], digests[1]]


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (prompts("a", "other"), []),
        (prompts("a"), []),
        (prompts("a", "b"), ["--max-tokens", "9"]),
        (prompts("a", "b"), ["--model", "another"]),
        ("", []),
    ],
)
def test_answers_to_other_records_are_neither_kept_nor_thrown_away(
    fake_generate: list[FakeEngine], files: Files, text: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source, sink, argv = files
    source.write_text(prompts("a", "b"))
    assert main(argv) == 0
    written = sink.read_bytes()
    source.write_text(text)
    assert main([*argv, *more]) == 2
    assert "answers that are not for these records" in capsys.readouterr().err
    assert sink.read_bytes() == written
    assert len(fake_generate) == 1


def test_errors_are_tried_again_and_their_lines_replaced(
    fake_generate: list[FakeEngine], files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sink, argv = files
    source.write_text(prompts("a", "b", "c"))
    make = cli_generate.make_engine

    def failing(config: EngineConfig) -> Any:
        engine: Any = make(config)
        engine.fail_at, engine.failure = 2, StepFailedError("the step failed")
        return engine

    with monkeypatch.context() as patch:
        patch.setattr(cli_generate, "make_engine", failing)
        assert main(argv) == 1
    assert [line["error"]["code"] for line in read(sink)] == ["step_failed"] * 3
    source.write_text(prompts("z", "a", "b", "c"))
    assert main(argv) == 0
    found = read(sink)
    assert [line["index"] for line in found] == [0, 1, 2, 3]
    assert all("choices" in line for line in found)


def test_an_engine_that_dies_leaves_the_rest_undone(
    fake_generate: list[FakeEngine], files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, sink, argv = files
    source.write_text(prompts("a", "b"))
    make = cli_generate.make_engine

    def dying(config: EngineConfig) -> Any:
        engine: Any = make(config)
        engine.fail_at, engine.failure = 2, EngineDead("the worker died")
        return engine

    monkeypatch.setattr(cli_generate, "make_engine", dying)
    assert main(argv) == 1
    assert capsys.readouterr().err == "Error: the worker died\n"
    assert read(sink) == []


def test_an_openai_batch_is_answered_as_openai_answers_it(fake_generate: list[FakeEngine], files: Files) -> None:
    source, sink, argv = files
    ids = {"return_token_ids": True}
    chat = {"model": "gpt-x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5} | ids
    lines: list[dict[str, Any]] = [
        {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "two", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "logprobs": 1} | ids},
        {"custom_id": "three", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}},
        {"custom_id": "four", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}},
        {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}},
        {"custom_id": "six", "method": "GET", "url": "/v1/completions", "body": {"prompt": "x"}},
        {"custom_id": "seven", "method": "POST", "url": "/v1/completions"},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(argv) == 1
    found = read(sink)
    assert all(set(line) == {"id", "custom_id", "response", "error"} for line in found)
    assert [line["custom_id"] for line in found] == ["one", "two", "three", "four", None, "six", "seven"]
    assert [line["response"]["status_code"] for line in found] == [200, 200, 400, 400, 400, 400, 400]
    assert all(line["error"] is None for line in found)
    one, two, *wrong = [line["response"]["body"] for line in found]
    assert (one["object"], one["model"]) == ("chat.completion", "fake")
    assert one["choices"][0]["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
    assert one["choices"][0]["finish_reason"] == "stop"
    assert one["usage"]["completion_tokens"] == 5
    assert (two["object"], two["choices"][0]["text"]) == ("text_completion", "Hello, world!")
    assert two["choices"][0]["logprobs"]["tokens"][0] == "Hello"
    assert one["prompt_token_ids"] == two["choices"][0]["prompt_token_ids"] == [1, 2, 3]
    assert [body["error"]["param"] for body in wrong] == ["messages", "url", "custom_id", "method", "body"]
    source.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines[:2])))
    written = sink.read_text().splitlines()
    assert main(argv) == 0  # the errors of records that are gone go, too
    assert sink.read_text().splitlines() == [written[1], written[0]]
    assert len(fake_generate) == 1


def test_standard_input_is_known_again_too(
    fake_generate: list[FakeEngine], files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sink, argv = files

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    for text in (prompts("a", "b"), prompts("b", "c", "a")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Pipe(text.encode())))
        assert main(["generate", "-o", str(sink)]) == 0
    assert [prompt for prompt, _, _ in fake_generate[1].seen] == ["c"]
    source.write_text(prompts("b", "c", "a"))
    assert main(argv) == 0
    assert len(fake_generate) == 2


def test_a_file_that_cannot_be_written_is_one_sentence(
    fake_generate: list[FakeEngine], files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    source, sink, argv = files
    source.write_text(prompts("a"))
    for output, reason in [
        ("/no/such/folder/x", "No such file or directory"),
        ("/dev/full", "No space left on device"),
    ]:
        assert main([*argv[:-1], output]) == 2
        assert capsys.readouterr().err == f"Error: --output {output} cannot be written: {reason}\n"
    with sink.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(argv) == 2
        assert capsys.readouterr().err == f"Error: --output {sink} is being written by another run\n"
    assert main([*argv[:-1], "/dev/null"]) == 0
    assert main(["generate", "-i", str(sink), "-o", str(sink)]) == 2
    assert "is the input" in capsys.readouterr().err


def test_an_input_without_records_loads_no_model(
    fake_generate: list[FakeEngine], files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _, argv = files
    source.write_text("\n\n")
    assert main(argv) == 0
    assert capsys.readouterr().err == "Nothing to do: the input holds no record\n"
    assert not fake_generate


def test_the_records_of_the_page_are_taken(fake_generate: list[FakeEngine], files: Files) -> None:
    source, sink, argv = files
    page = (Path(__file__).parents[2] / "docs" / "generate.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```jsonl\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    source.write_text("".join(blocks))
    assert main(argv) == 0
    fields = set().union(*read(sink)) - {"response", "custom_id"}
    assert all(f"`{field}`" in page for field in fields)


def test_answers_to_chats_are_read_for_thoughts_and_calls_of_tools(
    fake_generate: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = Formats(tool_calls="hermes", reasoning="think")
    said = ("<think>", "hm", "</think>", "<tool_call>\n", '{"name": "add", "arguments": {"a": 1}}', "\n</tool_call>")

    def make_engine(config: EngineConfig) -> FakeEngine:
        fake_generate.append(FakeEngine(answer=said))
        fake_generate[-1].model_info = FakeModelInfo(formats=formats)
        return fake_generate[-1]

    monkeypatch.setattr(cli_generate, "make_engine", make_engine)
    tool = {"type": "function", "function": {"name": "add"}}
    body = {"messages": [{"role": "user", "content": "1"}], "tools": [tool]}
    openai = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", **body}}
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in (body, openai, {**body, "tool_choice": "required"})))
    assert main(["generate", "-i", str(source), "-o", str(sink)]) == 0
    ours, theirs, must = read(sink)
    (choice,) = ours["choices"]
    assert (choice["text"], choice["reasoning_content"], choice["finish_reason"]) == ("", "hm", "tool_calls")
    assert choice["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    message = theirs["response"]["body"]["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "hm")
    assert message["tool_calls"][0]["function"]["name"] == "add"
    assert "choices" in must
    held = [params.structured_outputs is not None for _, params, _ in fake_generate[-1].seen]
    assert held == [False, False, True]
