"""A system under test lives in a process of its own, so that its memory is its own; this is both ends of the pipe.

The child reads one JSON object a line from stdin and answers with one a line on stdout: first `Ready`, then for each
`Task` a `Result`. Whatever else it prints goes to stderr. Only one child works at a time: the others wait for a line,
which costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import msgspec

from novainfer.bench.statistic import Timeline

T = TypeVar("T")
LAST_WORDS_LINES = 5
CLOSE_TIMEOUT_S = 20.0


class Memory(msgspec.Struct, kw_only=True):
    """Bytes of physical memory: now, at the highest since the last task began, and what of it is known by name.

    `kv_bytes` counts the blocks in use or cached, not those of the pool that were never touched.
    """

    resident_bytes: int
    peak_bytes: int
    weight_bytes: int = 0
    kv_bytes: int = 0


class Ready(msgspec.Struct, kw_only=True):
    """The child has loaded its model: in `load_s` seconds, imports (`import_s`) not counted."""

    name: str
    version: str
    import_s: float
    load_s: float
    memory: Memory
    facts: dict[str, Any] = {}


class Task(msgspec.Struct, kw_only=True):
    """Answer `prompts` (token ids, or messages), `at_once` of them at a time (0: all), with `max_tokens` tokens each.

    `sampling` are fields of SamplingParams, for systems that know them (default: greedy). The model's weights are read
    `num_reads` times before and after, by systems that can, to see how fast the machine is just then.
    """

    prompts: list[list[Any]]
    max_tokens: int
    at_once: int = 0
    sampling: dict[str, Any] = {}
    num_reads: int = 0
    keeps_tokens: bool = False  # the result holds the tokens of the answers


class Result(msgspec.Struct, kw_only=True):
    """How it went; `read_bytes_per_s` are the readings of the weights."""

    wall_s: float
    cpu_s: float
    timelines: list[Timeline]
    memory: Memory
    read_bytes_per_s: list[float] = []
    counters: dict[str, float] = {}  # what the system has counted during the task
    token_ids: list[list[int]] = []


class System(Protocol):
    """What a child runs; `answer` gives one timeline a prompt.

    It may have `answer_sampled(prompts, max_tokens, sampling)`, `read_weights()`: bytes a second, or None;
    `counters()`, which only grow; and `token_ids`, the answers that it gave last.
    """

    name: str
    version: str
    facts: dict[str, Any]

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Timeline]: ...
    def memory(self) -> Memory: ...


def resident() -> Memory:
    """This process's memory; from /proc where there is one, else the peak alone."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
        return Memory(resident_bytes=peak, peak_bytes=peak)
    kib = {key: int(value) for key, value in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE)}
    return Memory(resident_bytes=kib["VmRSS"] * 1024, peak_bytes=kib["VmHWM"] * 1024)


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets VmHWM


def serve(make: Callable[[], System], *, import_s: float) -> None:
    """The child's life: load, then one task a line until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not spoil the protocol
    started = time.perf_counter()
    system = make()
    load_s = time.perf_counter() - started

    def tell(message: msgspec.Struct) -> None:
        answers.write(msgspec.json.encode(message) + b"\n")
        answers.flush()

    tell(
        Ready(
            name=system.name,
            version=system.version,
            import_s=import_s,
            load_s=load_s,
            memory=system.memory(),
            facts=system.facts,
        )
    )
    for line in sys.stdin.buffer:
        task = msgspec.json.decode(line, type=Task)
        size = task.at_once or len(task.prompts)
        groups = [task.prompts[at : at + size] for at in range(0, len(task.prompts), size)]
        _forget_peak()
        counted = _counters(system)
        reads = _readings(system, task.num_reads)
        started, cpu = time.perf_counter(), time.process_time()
        timelines: list[Timeline] = []
        token_ids: list[list[int]] = []
        for group in groups:
            timelines += _answer(system, group, task)
            token_ids += getattr(system, "token_ids", []) if task.keeps_tokens else []
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        reads += _readings(system, task.num_reads)
        memory = system.memory()
        result = Result(wall_s=wall_s, cpu_s=cpu_s, timelines=timelines, memory=memory, read_bytes_per_s=reads)
        result.counters = {name: count - counted.get(name, 0) for name, count in _counters(system).items()}
        result.token_ids = token_ids
        tell(result)


def _answer(system: Any, prompts: list[list[Any]], task: Task) -> list[Timeline]:
    timelines: list[Timeline] = (
        system.answer_sampled(prompts, task.max_tokens, task.sampling)
        if task.sampling
        else system.answer(prompts, task.max_tokens)
    )
    return timelines


def _counters(system: Any) -> dict[str, float]:
    found: dict[str, float] = getattr(system, "counters", dict)()
    return found


def _readings(system: Any, count: int) -> list[float]:
    read = getattr(system, "read_weights", lambda: None)
    return [rate for rate in (read() for _ in range(count)) if rate is not None]


class ChildError(Exception):
    """A child ended before its answer; the message holds its last words."""


class Child:
    """The parent's end: start it, `run` tasks, `close`. Raises `ChildError` when the child is gone."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, timeout_s: float | None = None
    ) -> None:
        """A child that is not closed after `timeout_s` seconds is ended, whatever it does."""
        self._timeout_s = timeout_s
        self._is_late = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the child
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **(environment or {})},
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
