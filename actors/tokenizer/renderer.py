"""Renders chats in processes of their own, which end when a template takes too long.

    render ─▶ an idle process, or a new one ─▶ text, or why there is none ─▶ idle
                                        ├─ CPU_S of the processor's time ─▶ it ends: `RenderError`
                                        └─ silent for RENDER_S, or ended ─▶ killed, and once more in a new one,
                                                                            then `RendererUnavailable`

What a chat is to blame for is measured in the time of the processor: a process that is stopped, or waits for its turn
on a busy machine, uses none. A thread could not be ended: templates loop in the interpreter, and multiply strings below
it. A process takes 0.1 s and 25 MB; a chat through it 0.1 ms more than in this one. It is started for the first chat,
one for each thread that renders at the same time.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec

from novainfer.actors.device.child import environment
from novainfer.actors.device.wire import UNENCODABLE
from novainfer.actors.tokenizer.template import LENGTH, OUT_OF_TIME, Order
from novainfer.fsm.messages.events import Chat

CPU_S = 2.0  # of the processor, for one chat; ten thousand messages take 0.1 s
RENDER_S = 10.0  # on the clock, for one chat: a fifth of a core is enough for a template that uses all of CPU_S
START_S = 15.0  # on the clock, for a process to start and to compile its template; two tries fit ENCODE_LIMIT_S
PROGRAM = "novainfer.actors.tokenizer.template"
RECV_BYTES = 1 << 18
_decode = msgspec.msgpack.Decoder(tuple[bool, str]).decode


class RenderError(Exception):
    """This chat cannot be rendered; one sentence says why. `is_too_long`: for the length of what comes out."""

    def __init__(self, message: str, *, is_too_long: bool = False) -> None:
        super().__init__(message)
        self.is_too_long = is_too_long


class RendererUnavailable(Exception):
    """No process renders anything at the moment, whatever the chat: it may be sent again. One sentence says why."""


class Renderer:
    """One template, and the processes that render it; all methods may be called from any thread.

    `cpu_s` bounds the processor's time for one chat, `render_s` the time on the clock in one process.
    """

    def __init__(
        self, template: str, variables: dict[str, Any], *, cpu_s: float = CPU_S, render_s: float = RENDER_S
    ) -> None:
        self._first = msgspec.msgpack.encode((template, variables, cpu_s))
        self._cpu_s = cpu_s
        self._render_s = render_s
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._num_closed = 0
        weakref.finalize(self, _reap_all, self._all)

    def render(self, chat: Chat, chars_max: int) -> str:
        """The text of `chat`; raises `RenderError`, or `RendererUnavailable` where the chat is not to blame."""
        order = Order(
            chat.messages,
            chat.add_generation_prompt,
            chat.continue_final_message,
            chat.template_kwargs,
            chars_max,
            chat.tools,
        )
        try:
            data = msgspec.msgpack.encode(order)
        except UNENCODABLE as error:
            raise RenderError(str(error)) from None
        why = ""
        for process in self._tries():
            is_whole = False
            try:
                if not process.is_started:
                    process.ask(self._first, START_S)
                    process.is_started = True
                text = process.ask(data, self._render_s)
                is_whole = True
                return text
            except RenderError:
                is_whole = process.is_started
                raise
            except TimeoutError:
                why = "does not answer"
            except (OSError, EOFError):
                why = "has ended"
            finally:
                self._give_back(process, is_whole)
            if process.is_out_of_time:
                raise RenderError(f"that takes more than {self._cpu_s:g} s of the processor's time")
        raise RendererUnavailable(f"the process that renders chats {why}")

    def close(self) -> None:
        """End all processes; what is being rendered fails, and what comes later gets a new one."""
        with self._lock:
            self._num_closed += 1
            idle, self._idle = self._idle, []
            for process in self._all - set(idle):
                process.end()  # the thread that waits for it does the rest
            self._all -= set(idle)
        for process in idle:
            process.reap()

    @property
    def pids(self) -> list[int]:
        """The processes that there are."""
        with self._lock:
            return sorted(process.pid for process in self._all)

    def _tries(self) -> Iterator[_Process]:
        """A process; and if it ends, or says nothing, a new one: the chat may not be to blame for that."""
        with self._lock:
            num_closed = self._num_closed
        yield self._take()
        with self._lock:
            if num_closed != self._num_closed:
                return  # it was ended by `close`
        yield self._take(is_new=True)

    def _take(self, *, is_new: bool = False) -> _Process:
        with self._lock:
            if self._idle and not is_new:
                return self._idle.pop()
            try:
                process = _Process()
            except OSError as error:
                why = error.strerror or error
                raise RendererUnavailable(f"the process that renders chats cannot be started: {why}") from None
            self._all.add(process)
            return process

    def _give_back(self, process: _Process, is_whole: bool) -> None:
        with self._lock:
            if is_whole:
                self._idle.append(process)
                return
            self._all.discard(process)
        process.reap()


class _Process:
    """One process; asked by one thread at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C is for the engine
            env=environment(),
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self.is_started = False  # it has compiled its template
        self.is_out_of_time = False  # it has ended because it had used CPU_S; known once it is reaped
        self.pid = self._process.pid

    def ask(self, data: bytes, timeout_s: float) -> str:
        """The text that comes back; raises `RenderError`, TimeoutError, EOFError or OSError."""
        deadline_s = time.monotonic() + timeout_s
        rest = memoryview(LENGTH.pack(len(data)) + data)
        while rest:
            _wait(self._in, select.POLLOUT, deadline_s)
            rest = rest[os.write(self._in, rest) :]
        found = bytearray()
        while len(found) < LENGTH.size or len(found) < LENGTH.size + LENGTH.unpack_from(found)[0]:
            _wait(self._out, select.POLLIN, deadline_s)
            if not (more := os.read(self._out, RECV_BYTES)):
                raise EOFError
            found += more
        is_text, text = _decode(found[LENGTH.size :])
        if not is_text:
            raise RenderError(text or "it is too long", is_too_long=not text)
        return text

    def end(self) -> None:
        """Kill it; any thread may, while another one waits for its answer."""
        self._process.kill()

    def reap(self) -> None:
        """Kill it, and leave nothing of it."""
        self._process.kill()
        self.is_out_of_time = self._process.wait() == -OUT_OF_TIME
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _reap_all(processes: set[_Process]) -> None:
    for process in processes:
        process.reap()


def _wait(fd: int, what: int, deadline_s: float) -> None:
    poll = select.poll()
    poll.register(fd, what)
    if not poll.poll(max(deadline_s - time.monotonic(), 0.0) * 1000):
        raise TimeoutError
