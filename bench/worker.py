"""A system under test lives in a process of its own, so that its memory is its own; this is the parent's end.

What is said on the pipe, and the other end of it, are `novainfer.bench.peers.child`.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Self, TypeVar

import msgspec

from novainfer.bench.peers.child import Memory, Ready, Result, System, Task, resident, serve
from novainfer.bench.peers.launch import environment_with

__all__ = ["Child", "ChildError", "Memory", "Ready", "Result", "System", "Task", "resident", "serve"]

T = TypeVar("T")
LAST_WORDS_LINES = 5
CLOSE_TIMEOUT_S = 20.0


class ChildError(Exception):
    """A child ended before its answer; the message holds its last words."""


class Child:
    """The parent's end: start it, `run` tasks, `close`. Raises `ChildError` when the child is gone."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str | None] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """What is None in `environment` is unset. A child that is not closed after `timeout_s` seconds is ended."""
        self._timeout_s = timeout_s
        self._is_late = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the child
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment_with(environment or {}),
        )
        self._timer = threading.Timer(timeout_s or 0.0, self._end)
        if timeout_s is not None:
            self._timer.daemon = True
            self._timer.start()
        try:
            self.ready = self._answer(Ready)
        except BaseException:
            self.close()
            raise

    def run(self, task: Task) -> Result:
        """Do one task and wait for its result."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(self._last_words()) from None
        return self._answer(Result)

    def _end(self) -> None:
        self._is_late = True
        self._process.kill()

    def close(self) -> None:
        """End the child; any number of times."""
        self._timer.cancel()
        if self._process.poll() is None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(timeout=CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answer(self, kind: type[T]) -> T:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(self._last_words())
        return msgspec.json.decode(line, type=kind)

    def _last_words(self) -> str:
        code = self._process.wait()
        if self._is_late:
            return f"it took longer than {self._timeout_s:g} s"
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return f"exit code {code}: " + "\n".join(lines[-LAST_WORDS_LINES:])
