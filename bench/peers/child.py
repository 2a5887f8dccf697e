"""The child's end of the pipe: a system under test in a process of its own. Nothing but Python's own library.

A peer lives in an environment that knows nothing of NovaInfer, so its program finds this file beside itself. The child
reads one JSON object a line from stdin and answers with one a line on stdout: first `Ready`, then for each `Task` a
`Result`. Whatever else it prints goes to stderr. Only one child works at a time: the others wait for a line, which
costs nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .launch import die_with_parent, tree

__all__ = [
    "Memory",
    "Ready",
    "Result",
    "System",
    "Task",
    "Timeline",
    "forget_peaks",
    "resident",
    "serve",
    "tree_memory",
]


@dataclass(kw_only=True, slots=True)
class Timeline:
    """One request: when each piece of its answer came, in seconds since the request was sent, and its tokens.

    `counts[i]` tokens came at `times_s[i]`.
    """

    num_prompt_tokens: int
    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer."""
        return sum(self.counts)


@dataclass(kw_only=True, slots=True)
class Memory:
    """Bytes of physical memory: now, at the highest since the last task began, and what of it is known by name.

    `kv_bytes` counts the pages of the KV cache that are there, not those that were never touched.
    """

    resident_bytes: int
    peak_bytes: int
    weight_bytes: int = 0
    kv_bytes: int = 0


@dataclass(kw_only=True, slots=True)
class Ready:
    """The child has loaded its model: in `load_s` seconds, imports (`import_s`) not counted.

    `load_cpu_s` are the seconds of all its threads meanwhile.
    """

    name: str
    version: str
    import_s: float
    load_s: float
    memory: Memory
    load_cpu_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Task:
    """Answer `prompts` (token ids, or messages), `at_once` of them at a time (0: all), with `max_tokens` tokens each.

    With `clients` that many are open at any time: the next one is sent when one has ended, as clients of a server do.
    `lengths` are the tokens of each answer, where they differ; `arrivals_s` when each request is sent, in seconds since
    the task began (none: all at once). `sampling` are fields of SamplingParams, for systems that know them (default:
    greedy). The model's weights are read `num_reads` times before and after, by systems that can, to see how fast the
    machine is just then.
    """

    prompts: list[list[Any]]
    max_tokens: int
    at_once: int = 0
    clients: int = 0
    lengths: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    num_reads: int = 0
    keeps_tokens: bool = False  # the result holds the tokens of the answers


@dataclass(kw_only=True, slots=True)
class Result:
    """How it went; `read_bytes_per_s` are the readings of the weights."""

    wall_s: float
    cpu_s: float  # of this process, and of those that it has started
    timelines: list[Timeline]
    memory: Memory
    read_bytes_per_s: list[float] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)  # what the system has counted during the task
    token_ids: list[list[int]] = field(default_factory=list)


class System(Protocol):
    """What a child runs; `answer` gives one timeline a prompt.

    It may have `answer_sampled(prompts, max_tokens, sampling)`; `answer_by_clients(prompts, max_tokens, clients)`;
    `answer_mixed(prompts, lengths, arrivals_s)`, without which it is asked for no such work; `read_weights()`:
    bytes a second, or None; `counters()`, which only grow; `token_ids`, the answers that it gave last; `cpu_s()`,
    where processes of its own do the work.
    """

    name: str
    version: str
    facts: dict[str, Any]

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Timeline]: ...
    def memory(self) -> Memory: ...


def resident() -> Memory:
    """This process's memory; from /proc where there is one, else the peak alone."""
    found = _told("self")
    if found is not None:
        return found
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    return Memory(resident_bytes=peak, peak_bytes=peak)


def _told(pid: int | str) -> Memory | None:
    """What /proc tells of a process's memory; of one that has ended it tells nothing."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    kib = {key: int(value) for key, value in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE)}
    return Memory(resident_bytes=kib["VmRSS"] * 1024, peak_bytes=kib["VmHWM"] * 1024) if len(kib) == 2 else None


def tree_memory(pid: int) -> Memory:
    """Of a process and those below it; pages that they share count for each of them."""
    found = [memory for each in tree(pid) if (memory := _told(each)) is not None]
    return Memory(
        resident_bytes=sum(memory.resident_bytes for memory in found),
        peak_bytes=sum(memory.peak_bytes for memory in found),
    )


def forget_peaks(pid: int) -> None:
    """Let the highest size of a process, and of those below it, be what it is now."""
    for each in tree(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{each}/clear_refs").write_text("5")  # man 5 proc: resets VmHWM


def serve(make: Callable[[], System], *, import_s: float) -> None:
    """The child's life: load, then one task a line until stdin ends, or its parent does."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it ends what it has started
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not spoil the protocol
    started, cpu = time.perf_counter(), time.process_time()
    system = make()
    load_s, load_cpu_s = time.perf_counter() - started, time.process_time() - cpu

    def tell(message: Ready | Result) -> None:
        answers.write(json.dumps(asdict(message)).encode() + b"\n")
        answers.flush()

    facts = {"takes_arrivals": hasattr(system, "answer_mixed"), **system.facts}
    tell(
        Ready(
            name=system.name,
            version=system.version,
            import_s=import_s,
            load_s=load_s,
            load_cpu_s=load_cpu_s,
            memory=system.memory(),
            facts=facts,
        )
    )
    for line in sys.stdin.buffer:
        tell(_do(system, Task(**json.loads(line))))


def _do(system: Any, task: Task) -> Result:
    size = task.at_once or len(task.prompts)
    groups = [task.prompts[at : at + size] for at in range(0, len(task.prompts), size)]
    forget_peaks(os.getpid())
    counted = _counters(system)
    reads = _readings(system, task.num_reads)
    cpu_clock: Callable[[], float] = getattr(system, "cpu_s", time.process_time)
    started, cpu = time.perf_counter(), cpu_clock()
    timelines: list[Timeline] = []
    token_ids: list[list[int]] = []
    for group in groups:
        timelines += _answer(system, group, task)
        token_ids += getattr(system, "token_ids", []) if task.keeps_tokens else []
    wall_s, cpu_s = time.perf_counter() - started, cpu_clock() - cpu
    reads += _readings(system, task.num_reads)
    return Result(
        wall_s=wall_s,
        cpu_s=cpu_s,
        timelines=timelines,
        memory=system.memory(),
        read_bytes_per_s=reads,
        counters={name: count - counted.get(name, 0) for name, count in _counters(system).items()},
        token_ids=token_ids,
    )


def _answer(system: Any, prompts: list[list[Any]], task: Task) -> list[Timeline]:
    timelines: list[Timeline]
    if task.clients:
        timelines = system.answer_by_clients(prompts, task.max_tokens, task.clients)
    elif task.lengths or task.arrivals_s:
        lengths = task.lengths or [task.max_tokens] * len(prompts)
        timelines = system.answer_mixed(prompts, lengths, task.arrivals_s or [0.0] * len(prompts))
    elif task.sampling:
        timelines = system.answer_sampled(prompts, task.max_tokens, task.sampling)
    else:
        timelines = system.answer(prompts, task.max_tokens)
    return timelines


def _counters(system: Any) -> dict[str, float]:
    found: dict[str, float] = getattr(system, "counters", dict)()
    return found


def _readings(system: Any, count: int) -> list[float]:
    read = getattr(system, "read_weights", lambda: None)
    return [rate for rate in (read() for _ in range(count)) if rate is not None]
