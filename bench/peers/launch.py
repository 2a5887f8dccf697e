"""Processes that end when they should: a server on a port of its own; and what a process and those below it use.

Nothing but Python's own library: peers' programs use it, too, in environments that know nothing of NovaInfer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

__all__ = ["Server", "ServerError", "die_with_parent", "environment_with", "process_cpu_s", "tree", "tree_cpu_s"]

LAST_WORDS_LINES = 3
STOP_TIMEOUT_S = 20.0
PR_SET_PDEATHSIG = 1  # man 2 prctl

LIBC = ctypes.CDLL(None)


class ServerError(Exception):
    """A server that did not start; the message holds its last words."""


class Server:
    """An HTTP server in a process of its own, on a free port of the loopback; "{port}" in its command is that port."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str | None] | None = None) -> None:
        """What is None in `environment` is unset."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the server)
        try:
            self._process = subprocess.Popen(
                [word.replace("{port}", str(self.port)) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment_with(environment or {}),
                process_group=0,  # by which its workers can be ended, too
                preexec_fn=die_with_parent,
            )
        except OSError as error:  # there is no such program
            self._log.close()
            raise ServerError(str(error)) from None
        self.pid = self._process.pid

    def wait_until_ready(self, timeout_s: float) -> None:
        """Until `GET /health` is answered with success; raises `ServerError` where that does not happen."""
        ends_s = time.perf_counter() + timeout_s
        while time.perf_counter() < ends_s:
            if self._process.poll() is not None:
                self._log.seek(0)
                words = self._log.read().decode("utf-8", "replace").strip().splitlines()[-LAST_WORDS_LINES:]
                raise ServerError(f"exit code {self._process.returncode}: {' / '.join(words)}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:  # urllib's own errors are such: nothing listens yet, or the status is 503
                time.sleep(0.05)
        raise ServerError(f"it was not ready within {timeout_s:.0f} s")

    def close(self) -> None:
        """End it, and whatever of its workers is left; any number of times."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def environment_with(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment; what is None in `changes` is unset."""
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


def die_with_parent() -> None:
    """Have Linux send this process SIGTERM when its parent ends, however it ends; elsewhere nothing."""
    if hasattr(LIBC, "prctl"):
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def tree(pid: int) -> list[int]:
    """A process and those below it, at any depth; itself alone where there is no /proc."""
    found = [pid]
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            for child in map(int, listing.read_text().split()):
                found += tree(child)
    return found


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process and those below it, where /proc tells them."""
    return sum(map(process_cpu_s, tree(pid)))


def process_cpu_s(pid: int) -> float:
    """CPU seconds of one process and its threads, finer than the ticks of `stat`; 0 where they are not told."""
    clock = ctypes.c_int()
    try:
        if LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
            return 0.0
        return time.clock_gettime(clock.value)
    except (AttributeError, OSError):  # macOS has no such clock; or the process has just ended
        return 0.0
