"""W5: the systems of one precision as servers, asked by streaming clients over HTTP/1.1, in turns."""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import click

from novainfer.bench.load import Load, drive
from novainfer.bench.peers.known import OURS, SystemSpec
from novainfer.bench.serve import CLIENTS, VOCAB_SIZE, W5, find_model
from novainfer.bench.statistic import medians, ratios, spread, summary

__all__ = ["HTTP_WORK", "Server", "measure_http"]

HTTP_WORK = W5
READY_TIMEOUT_S = 400.0  # vLLM compiles for minutes when it starts first
LAST_WORDS_LINES = 3


class ServerError(Exception):
    """A server that did not start; the message holds its last words."""


class Server:
    """One of them, in a process of its own."""

    def __init__(self, spec: SystemSpec) -> None:
        assert spec.server is not None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [word.replace("{port}", str(port)) for word in spec.server]
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the server)
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        environment |= {"OMP_WAIT_POLICY": "passive"} if spec.name == OURS else {}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environment
        )

    def wait_until_ready(self) -> Load:
        """The model that it serves; raises `ServerError`."""
        ends_s = time.perf_counter() + READY_TIMEOUT_S
        while time.perf_counter() < ends_s:
            if self._process.poll() is not None:
                self._log.seek(0)
                words = self._log.read().decode("utf-8", "replace").strip().splitlines()[-LAST_WORDS_LINES:]
                raise ServerError(f"exit code {self._process.returncode}: {' / '.join(words)}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return find_model(self.url, None)
            except (OSError, urllib.error.URLError, click.ClickException):
                time.sleep(0.2)
        raise ServerError(f"it was not ready within {READY_TIMEOUT_S:.0f} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def measure_http(
    specs: Sequence[SystemSpec], work: Any, repeat: int, skipped: dict[str, str], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Each server's rates and times, and our ratio to it; those that do not start go to `skipped`."""
    runs: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        loads: dict[str, Load] = {}
        for spec in specs:
            if spec.server is None:
                continue
            progress(f"{spec.precision}: starting {spec.name} as a server")
            try:
                loads[spec.name] = stack.enter_context(Server(spec)).wait_until_ready()
            except ServerError as error:
                if spec.name == OURS:
                    raise click.ClickException(f"our server did not start: {error}") from None
                skipped[f"{spec.name} server"] = str(error)
        for load in loads.values():
            asyncio.run(drive(load, "h1", [[1, 2, 3, 4]], 2, 1))
        for repetition in range(repeat):
            names = list(loads)
            shift = repetition % len(names)
            for name in names[shift:] + names[:shift]:
                prompts = work.prompts(VOCAB_SIZE, repetition)
                found = asyncio.run(drive(loads[name], "h1", prompts, work.max_tokens, CLIENTS))
                runs.setdefault(name, []).append(summary(found.timelines, found.wall_s))
                progress(f"{work.name} {name}: {runs[name][-1]['output_tok_s']:.1f} output tok/s")
    own = [record["output_tok_s"] for record in runs[OURS]]
    compared: dict[str, Any] = {}
    for name, records in runs.items():
        pairs = ratios(own, [record["output_tok_s"] for record in records])
        pace = {"ratio": statistics.median(pairs), "ratio_spread": spread(pairs), "runs": records}
        compared[name] = medians(records) | pace
    return {"title": f"{work.title}, {CLIENTS} clients", "systems": compared}
