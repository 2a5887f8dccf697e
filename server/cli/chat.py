"""`novainfer chat`: a conversation in the terminal, with a model of our own or with a running server."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import click

from novainfer import (
    Chat,
    ContextLengthExceeded,
    EngineConfig,
    FinishReason,
    InvalidParameter,
    NovaInferError,
    SamplingParams,
)
from novainfer.fsm.messages.params import is_unicode
from novainfer.fsm.parsing.pieces import Content, Reasoning
from novainfer.offer import Offered
from novainfer.reading import Reading, asked_for
from novainfer.server.cli.flags import Grouped, flag
from novainfer.server.cli.options import API_KEY_VARIABLES, engine_config, engine_options, set_up_logs
from novainfer.server.cli.serve import make_engine
from novainfer.server.loop import loop_factory

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."
FULL = "/reset forgets the conversation and makes room."
PROMPT = "> "
TALK = "Conversation"

TEMPERATURE = 0.7  # of a model that has no wishes of its own: at 1, small ones ramble

Messages = list[dict[str, str]]
Given = dict[str, Any]  # sampling fields that were asked for; the rest is the model's, or the server's


Said = Reasoning | Content


class Partner(Protocol):
    """What answers: `answer` yields what it thinks and says as it comes; closing it stops the answer.

    It raises `NovaInferError`. `finish_reason` is that of the last answer, None when it was stopped.
    """

    finish_reason: str | None

    @property
    def name(self) -> str: ...
    def answer(self, messages: Messages, given: Given) -> Iterator[Said]: ...


class LocalModel:
    """An engine in this process; its loop turns while it loads and while it answers."""

    def __init__(self, config: EngineConfig) -> None:
        self._runner = asyncio.Runner(loop_factory=loop_factory())
        self._engine = make_engine(config)
        self.finish_reason: str | None = None

    def __enter__(self) -> Self:
        try:
            self._runner.run(self._engine.start())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        self._runner.run(self._engine.aclose())
        self._runner.close()

    @property
    def name(self) -> str:
        return self._engine.model_info.name

    def answer(self, messages: Messages, given: Given) -> Iterator[Said]:
        info = self._engine.model_info
        own = info.sampling_defaults or {"temperature": TEMPERATURE}
        params, wanted, _ = asked_for(SamplingParams(**{"max_tokens": None, **own, **given}), Offered(), info.formats)
        reading = Reading(wanted, self._engine.vocabulary, 1) if wanted is not None else None
        deltas = self._engine.generate(Chat(messages=list(messages)), params)
        self.finish_reason = None

        async def next_said() -> list[Said] | None:
            delta = await anext(deltas, None)
            if delta is None:
                return None
            self.finish_reason = delta.finish_reason
            if reading is None:
                return [Content(delta.text)]
            pieces = [piece for _, pieces in reading.read(delta) for piece in pieces]
            return [piece for piece in pieces if isinstance(piece, Said)]  # no tool is on offer

        try:
            while (said := self._runner.run(next_said())) is not None:
                yield from said
        finally:
            self._runner.run(deltas.aclose())


class RemoteServer:
    """A server that speaks OpenAI's API; the connection is closed to stop an answer."""

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidParameter(f"url must look like http://127.0.0.1:8000, not {url!r}", param="url")
        self._parts = parts
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self.finish_reason: str | None = None
        self.name = model or self._first_model()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port)

    def _request(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> Any:
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, f"{self._base}{path}", data, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise NovaInferError(f"{self._parts.geturl()} does not answer: {error}") from None
        if response.status != 200:
            raise _error_of(response.status, response.read())
        return response

    def _first_model(self) -> str:
        connection = self._connect()
        try:
            return str(json.load(self._request(connection, "GET", "/v1/models"))["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise NovaInferError(f"{self._parts.geturl()} lists no model") from None
        finally:
            connection.close()

    def answer(self, messages: Messages, given: Given) -> Iterator[Said]:
        body: dict[str, Any] = {"model": self.name, "messages": messages, "stream": True, **given}
        connection = self._connect()
        self.finish_reason = None
        try:
            for line in self._request(connection, "POST", "/v1/chat/completions", body):
                if not line.startswith(b"data: "):
                    continue
                data = line[len(b"data: ") :].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if event.get("error"):
                    raise _error_of(200, data)
                for choice in event["choices"]:
                    self.finish_reason, delta = choice.get("finish_reason"), choice["delta"]
                    yield Reasoning(delta.get("reasoning_content") or delta.get("reasoning") or "")
                    yield Content(delta.get("content") or "")
            raise NovaInferError("the server ended the answer before it was complete")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NovaInferError(f"the answer broke off: {error}") from None
        finally:
            connection.close()


def _error_of(status: int, body: bytes) -> NovaInferError:
    """The error in a server's answer."""
    try:
        detail = json.loads(body)["error"]
        kind = ContextLengthExceeded if detail.get("code") == ContextLengthExceeded.code else NovaInferError
        return kind(str(detail["message"]))
    except (ValueError, LookupError, TypeError, AttributeError):
        return NovaInferError(f"the server answered {status}")


def converse(partner: Partner, system: str | None, given: Given, *, shows_thoughts: bool = True) -> int:
    """Read questions and write answers until the end of input, /exit, or Ctrl-C at an empty prompt.

    Returns the exit code: 1 when a question that was not typed at a terminal has no answer.
    """
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no text is told, with its line
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # gives input() its history and line editing
        click.echo(f"{partner.name}. {HELP}", err=True)
    beginning: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    num_lines = num_failed = 0
    while True:
        try:
            question = input(PROMPT if is_terminal else "").strip()
            num_lines += 1
        except EOFError:
            break
        except KeyboardInterrupt:
            click.echo(err=True)
            break
        if question in ("/exit", "/quit"):
            break
        if not is_unicode(question):
            click.echo(f"Error: line {num_lines} of the input is not valid UTF-8, and was left out", err=True)
            num_failed += 1
        elif question == "/reset":
            messages = list(beginning)
            click.echo("(forgotten)", err=True)
        elif question.startswith("/"):
            click.echo(HELP, err=True)
        elif question:
            messages.append({"role": "user", "content": question})
            answer = _say(partner, messages, given, shows_thoughts=shows_thoughts)
            if answer is None:
                messages.pop()  # it was refused: the conversation goes on without it
                num_failed += 1
            else:
                messages.append({"role": "assistant", "content": answer})
    return 1 if num_failed and not is_terminal else 0


def _say(partner: Partner, messages: Messages, given: Given, *, shows_thoughts: bool) -> str | None:
    """Print the answer as it comes; returns what was said, or None when there was an error instead.

    Thoughts are dimmed, and no part of the output: they go where errors go, and are not said again to the model.
    """
    said: list[str] = []
    pieces = partner.answer(messages, given)
    is_thinking = False
    try:
        for piece in pieces:
            if isinstance(piece, Reasoning):
                if shows_thoughts and piece.text:
                    is_thinking = True
                    click.secho(piece.text, nl=False, err=True, dim=True)
                continue
            if is_thinking and piece.text:
                is_thinking = False
                click.echo("\n", err=True)
            said.append(piece.text)
            click.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        click.echo(" (stopped)", nl=False, err=True)
    except ContextLengthExceeded as error:
        click.echo(f"Error: {error.message.rstrip('.')}. {FULL}", err=True)
        return None
    except NovaInferError as error:
        click.echo(f"Error: {error.message}", err=True)
        return None
    finally:
        pieces.close()  # type: ignore[attr-defined]
    click.echo()
    if partner.finish_reason == FinishReason.LENGTH:
        why = "the answer has reached --max-tokens" if "max_tokens" in given else f"the context is full. {FULL}"
        click.echo(f"({why})", err=True)
    return "".join(said)


@click.command(cls=Grouped)
@engine_options
@flag(TALK, "--url", help="Talk to the server at this address instead of loading a model.")
@flag(TALK, "--api-key", envvar=API_KEY_VARIABLES, help="The key for --url. [env: NOVAINFER_API_KEY]")
@flag(TALK, "--system", help="What the model is told before the conversation.")
@flag(
    TALK,
    "--temperature",
    type=float,
    help=f"0 takes the likeliest token always. [default: the model's, or {TEMPERATURE}]",
)
@flag(
    TALK,
    "--top-p",
    type=float,
    help="Draw from the likeliest tokens that have this probability together. [default: the model's, or 1]",
)
@flag(TALK, "--max-tokens", type=int, help="Longest answer in tokens. [default: what the context holds]")
@flag(TALK, "--thoughts/--no-thoughts", default=True, help="Show what the model thinks, dimmed, before its answer.")
@click.pass_context
def chat(ctx: click.Context, /, **options: Any) -> int:
    """Talk to MODEL (a folder, a hub name, or the demo model), or to a running server with --url."""
    given = {name: options[name] for name in ("temperature", "top_p", "max_tokens") if options[name] is not None}
    SamplingParams(**given)  # says what is wrong before anything is loaded
    if not is_unicode(options["system"] or ""):
        raise InvalidParameter("system must be valid UTF-8", param="system")
    set_up_logs(ctx, level="warning")  # a conversation is no place for more log lines
    config = engine_config(ctx, options)
    if options["url"]:
        model = options["served_model_name"] or options["model_argument"] or options["model"]
        server = RemoteServer(options["url"], options["api_key"], model)
        return converse(server, options["system"], given, shows_thoughts=options["thoughts"])
    with LocalModel(config) as partner:
        return converse(partner, options["system"], given, shows_thoughts=options["thoughts"])
