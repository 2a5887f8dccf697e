"""The program of a renderer's process: it renders chats by one template, in bounded memory, until it is killed.

A template is a program. It comes from the model's folder, but what it loops over comes from clients, so it runs where
it can be ended whatever it does. Templates see what transformers shows them: the same filters, functions and blocks.

Frames, both ways, are four bytes of length and as much msgpack: the template first, then chats, each answered by
[is_text, text or the reason why there is none]. What takes too much of the processor's time ends the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

OUT_OF_TIME = signal.SIGPROF  # ends it, also below the interpreter, when what it does has used up its time
MEMORY_BYTES = 1 << 30  # address space: the interpreter takes 50 MB, and a rendered chat some MB
REASON_CHARS_MAX = 300
LENGTH = struct.Struct("!I")
MARK = "<the answer goes on here> "  # its space tells whether the template strips what it is given
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # <sys/prctl.h>


class Order(msgspec.Struct, frozen=True):
    """A chat to be rendered with these `tools`, in at most `chars_max` characters."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    chars_max: int
    tools: list[dict[str, Any]]


class TooLongError(Exception):
    """The rendered text is longer than it may be."""


class ChatTemplate:
    """One template; `variables` are the names of the special tokens and their texts."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._template: Template | None = None

    def compile(self, source: str) -> str:
        """Take this template; an empty text, or what jinja raises."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        self._template = environment.from_string(source)
        return ""

    def render(self, data: bytes) -> str:
        """The text of an `Order`; raises `TooLongError`, or whatever the template raises."""
        order = msgspec.msgpack.decode(data, type=Order)
        messages = [{key: value for key, value in one.items() if value is not None} for one in order.messages]
        if not messages:
            raise TemplateError("there are no messages")
        if order.continue_final_message:
            messages[-1] = _marked(messages[-1])
        variables = {"tools": order.tools or None, "documents": None, **self._variables, **order.variables}
        assert self._template is not None, "compile comes first"
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(
            messages=messages, add_generation_prompt=order.add_generation_prompt, **variables
        ):
            num_chars += len(piece)
            if num_chars > order.chars_max + len(MARK):
                raise TooLongError
            pieces.append(piece)
        text = "".join(pieces)
        return _cut(text) if order.continue_final_message else text


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is nothing but its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with the mark at the end of its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + MARK}
    parts = list(content) if isinstance(content, list) else []
    for at in range(len(parts) - 1, -1, -1):
        if isinstance(parts[at], dict) and isinstance(parts[at].get("text"), str):
            parts[at] = {**parts[at], "text": parts[at]["text"] + MARK}
            return {**message, "content": parts}
    raise TemplateError("the final message has no text that could be continued")


def _cut(text: str) -> str:
    """`text` up to the mark; without it, the template left the final message out."""
    at = text.rfind(MARK)
    if at >= 0:
        return text[:at]
    at = text.rfind(MARK.rstrip())
    if at < 0:
        raise TemplateError("the template leaves out the final message, which was to be continued")
    return text[:at].rstrip()


# ---- the process -----------------------------------------------------------------------------------------------------


def _attempt(cpu_s: float, work: Callable[[], str]) -> tuple[bool, str]:
    """What is answered: a text, or the reason why there is none; no reason where it is too long.

    Ends the process when `work` takes more than `cpu_s` seconds of the processor.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        text = work()
        text.encode()
    except TooLongError:
        return False, ""
    except RecursionError:
        return False, "the template calls itself too often"
    except MemoryError:
        return False, f"that takes more than {MEMORY_BYTES >> 20} MB"
    except Exception as error:
        reason = " ".join(str(error).split())[:REASON_CHARS_MAX] or type(error).__name__
        return False, reason.encode("utf-8", "backslashreplace").decode()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return True, text


def _say(out: BinaryIO, is_text: bool, text: str) -> None:
    data = msgspec.msgpack.encode((is_text, text))
    out.write(LENGTH.pack(len(data)) + data)
    out.flush()


def main(parent: int) -> None:
    """Answer what comes in, until nothing more does."""
    _settle(parent)
    # What a template might print must not be taken for an answer.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    frames = _frames(sys.stdin.buffer)
    source, variables, cpu_s = msgspec.msgpack.decode(next(frames), type=tuple[str, dict[str, Any], float])
    template = ChatTemplate(variables)
    _say(out, *_attempt(cpu_s, partial(template.compile, source)))
    for frame in frames:
        _say(out, *_attempt(cpu_s, partial(template.render, frame)))


def _frames(source: BinaryIO) -> Iterator[bytes]:
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        yield source.read(LENGTH.unpack(head)[0])


def _settle(parent: int) -> None:
    """Take no more memory than it may, and end with the engine, also in the middle of a loop without end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the engine decides when its work is done
    signal.signal(OUT_OF_TIME, signal.SIG_DFL)  # the engine's process may ignore or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {OUT_OF_TIME})
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it holds what clients have said
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            prctl = ctypes.CDLL(None).prctl
            prctl(PR_SET_NAME, b"nova-template", 0, 0, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the engine has gone")


if __name__ == "__main__":
    main(int(sys.argv[1]))
