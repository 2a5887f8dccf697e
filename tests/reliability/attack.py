"""What an attack is, and how it is tried: a server as users start it, the attack, and a normal client beside it.

The normal client asks for one short answer after the other, all through the attack; each must be what it was before.
When the attack is over, everything must be back: live requests, connections, tasks, descriptors, processes, and memory
up to a stated slack. What a first round takes for good is no leak: pages of the KV cache that had not been written, the
highest water of an allocator. So memory is judged by what the rounds behind it add. How long the normal client waited
is reported, not judged: the machine may be busy.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import re
import resource
import signal
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.reliability.trials import percentile

ATTACKER_KEY, NEIGHBOUR_KEY = "attacker", "neighbour"  # two clients
TIMEOUT_S = 60.0  # of an attack, and until everything is back: a hang is a failure
MEMORY_SLACK_KIB = 64 * 1024  # what an allocator may keep after an attack, on top of what was there before
DESCRIPTORS_SLACK = 2  # the loop's own, opened when they are first needed
NEIGHBOUR = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
ANSWERS_BESIDE = 20  # that the normal client gets before the attack ends; it is repeated for them, up to
ROUNDS_MAX = 10  # times
ROUNDS_ALONE = 10  # short answers before the attacks: what the normal client feels without one
OVER_TLS = "NOVA_ATTACK_OVER_TLS"  # a variable of the attacker's environment


@functools.cache  # reading the system's certificates takes longer than the server's part of a handshake
def over_tls(version: str) -> ssl.SSLContext | None:
    """What an attacker encrypts with, where its target does, for "h2" or "http/1.1"; no certificate is checked."""
    if OVER_TLS not in os.environ:
        return None
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([version])
    return context


async def open_connection(
    port: int, version: str, **settings: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of an attacker, encrypted where its target wants that."""
    return await asyncio.open_connection("127.0.0.1", port, ssl=over_tls(version), **settings)


def shut_down(writer: asyncio.StreamWriter) -> None:
    """Say that no more comes: over TLS, which has no such half, by ending the connection."""
    if writer.can_write_eof():
        writer.write_eof()
    else:
        writer.close()


@dataclass
class Target:
    """A running server, seen from outside."""

    process: asyncio.subprocess.Process
    url: str
    log: Any  # its stderr, a file

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_text(self) -> str:
        """All that it wrote to stderr."""
        with open(self.log.name, errors="replace") as file:
            return file.read()


@dataclass(frozen=True)
class Attack:
    """One attack: what it does, in words; how many times; and how. `run` takes the port and the number, and
    returns what it saw, in a few words.

    `sample` is the number in `make test`, 0 for none. `flags` and `limits` (of resource.setrlimit) are the server's.
    `may_refuse`: while it lasts, the server may refuse the normal client, if it says so and serves it afterwards.
    """

    name: str
    what: str
    number: int
    run: Callable[[int, int], Awaitable[str]]
    sample: int = 0
    flags: tuple[str, ...] = ()
    limits: tuple[tuple[int, int], ...] = ()
    may_refuse: bool = False


@dataclass
class Left:
    """What there is of a server at one moment."""

    live: int
    connections: int
    tasks: int
    descriptors: int  # of all processes
    processes: int
    memory_kib: int  # of all processes, as `memory_kib`

    def beyond(self, before: Left) -> dict[str, Any]:
        """What there is more than before; of requests, all."""
        return {
            "live": self.live,
            "connections": self.connections - before.connections,
            "tasks": self.tasks - before.tasks,
            "descriptors": self.descriptors - before.descriptors,
            "processes": self.processes - before.processes,
            "mib": round((self.memory_kib - before.memory_kib) / 1024, 1),
        }

    def most(self, other: Left) -> Left:
        """The larger of each."""
        return Left(*map(max, astuple(self), astuple(other)))


@dataclass
class Report:
    """What came of one attack; times in seconds."""

    name: str
    what: str
    number: int
    rounds: int = 0
    seen: str = ""  # in the last round
    served: int = 0
    refused: int = 0
    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    before: Left | None = None
    first: Left | None = None  # what there was after the first round
    most: Left | None = None  # of each, while it lasted
    after: Left | None = None

    def row(self) -> dict[str, Any]:
        """As JSON can hold it; milliseconds and MiB."""
        assert self.before is not None and self.first is not None  # noqa: PT018
        assert self.most is not None and self.after is not None  # noqa: PT018
        times = {}
        for name, found in (("alone", self.alone_s), ("beside", self.beside_s)):
            ordered = sorted(found) or [0.0]
            times[name] = {f"p{p}_ms": round(percentile(ordered, p / 100) * 1e3, 1) for p in (50, 99)}
        return {
            "name": self.name,
            "what": self.what,
            "number": self.number,
            "rounds": self.rounds,
            "seen": self.seen,
            "neighbour": {"served": self.served, "refused": self.refused, **times},
            "most": self.most.beyond(self.before),
            "first_round_mib": self.first.beyond(self.before)["mib"],
            "left": self.after.beyond(self.before),
        }


def children(pid: int) -> list[int]:
    """The processes that `pid` has started, and that still run."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    fields = stat.read().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(name))
    return found


def memory_kib(pid: int) -> int:
    """What a process has written, in memory or in swap: pages of files come and go as the machine has room for them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "VmSwap:")))


@asynccontextmanager
async def serving(flags: tuple[str, ...] = (), limits: tuple[tuple[int, int], ...] = ()) -> AsyncIterator[Target]:
    """A ready `novainfer serve` of the demo model; it must end with 0, and without a traceback in its log."""

    def limit() -> None:
        for what, most in limits:
            resource.setrlimit(what, (most, most))

    with tempfile.NamedTemporaryFile("w+", prefix="novainfer-attack-") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "novainfer.server", "--port", "0", "--worker", "process"),
            *("--api-key", ATTACKER_KEY, "--api-key", NEIGHBOUR_KEY, "--admin-key", "boss"),
            *("--shutdown-timeout", "5", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            preexec_fn=limit if limits else None,
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(TIMEOUT_S):
                line = (await process.stdout.readline()).decode()
            found = re.search(r"at (https?://127\.0\.0\.1:\d+) \(ready in", line)
            target = Target(process, found[1] if found else "", log)
            assert found is not None, f"no ready line: {line!r}, {target.log_text()}"
            yield target
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    code = await process.wait()
            except TimeoutError:
                process.kill()
                raise
        text = target.log_text()
        assert code == 0, f"exit code {code}: {text[-4000:]}"
        assert "Traceback" not in text, text[:4000]


def left(target: Target, text: str) -> Left:
    """What there is now; `text` is what `/metrics` says."""
    numbers = {}
    for name in ("nova_live_requests", "nova_connections", "nova_tasks"):
        found = re.search(rf"^{name} ([0-9.e+]+)$", text, re.MULTILINE)
        assert found is not None, f"{name} is not in /metrics"
        numbers[name] = int(float(found[1]))
    pids = [target.pid, *children(target.pid)]
    return Left(
        live=numbers["nova_live_requests"],
        connections=numbers["nova_connections"],
        tasks=numbers["nova_tasks"],
        descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        processes=len(pids) - 1,
        memory_kib=sum(map(memory_kib, pids)),
    )


class Neighbour:
    """A normal client: one short answer after the other, over one connection, and each must be right.

    `idle_may_close`: the server may close that connection between two answers, for want of descriptors; the next
    request then goes over another one.
    """

    def __init__(self, target: Target, *, idle_may_close: bool = False) -> None:
        self._target = target
        self._idle_may_close = idle_may_close
        headers = {"authorization": f"Bearer {NEIGHBOUR_KEY}"}
        self._client = httpx.AsyncClient(base_url=target.url, headers=headers, timeout=TIMEOUT_S, verify=False)
        self.text = ""

    async def __aenter__(self) -> Neighbour:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *args: Any) -> None:
        await self._client.__aexit__(*args)

    async def ask(self) -> float | None:
        """One answer; how long it took in seconds, or None when it was refused in order."""
        loop = asyncio.get_running_loop()
        at_s = loop.time()
        response = await self._send("POST", "/v1/completions", json=NEIGHBOUR)
        if response.status_code in (429, 503):
            assert "retry-after" in response.headers
            return None
        assert response.status_code == 200, f"{response.status_code}: {response.text[:500]}"
        text = response.json()["choices"][0]["text"]
        self.text = self.text or text
        assert text == self.text
        return loop.time() - at_s

    async def look(self) -> Left:
        return left(self._target, (await self._send("GET", "/metrics")).text)

    async def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            return await self._client.request(method, path, **more)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):  # closed while it was idle
            if not self._idle_may_close:
                raise
        return await self._client.request(method, path, **more)

    async def look_alone(self) -> Left:
        """What there is with this client's one connection: API processes tell of theirs a moment later."""
        async with asyncio.timeout(TIMEOUT_S):
            while (found := await self.look()).connections != 1:  # noqa: ASYNC110 - from outside
                await asyncio.sleep(0.05)
        return found

    async def all_back(self, before: Left, memory_kib: float) -> Left:
        """Wait until what the attack took is back, memory to `memory_kib` and its slack.

        Raises AssertionError, with what is missing, if it never is.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while missing := self._missing(before, after := await self.look(), memory_kib):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not back after {TIMEOUT_S:g} s: {', '.join(missing)}") from None
        return after

    def _missing(self, before: Left, after: Left, memory_kib: float) -> list[str]:
        bounds = {
            "live": 0,
            "connections": before.connections,
            "tasks": before.tasks,
            "descriptors": before.descriptors + DESCRIPTORS_SLACK,
            "memory_kib": memory_kib + MEMORY_SLACK_KIB,
        }
        found = [
            f"{name} {getattr(after, name)} > {most}" for name, most in bounds.items() if getattr(after, name) > most
        ]
        if after.processes != before.processes:
            found.append(f"{after.processes} processes, {before.processes} before")
        return found


@asynccontextmanager
async def attacker(attack: Attack, target: Target, number: int) -> AsyncIterator[Attacker]:
    """The attack's own process, so that the normal client beside it has a loop of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.reliability.attacks", "--attack", attack.name),
        *("--port", str(target.port), "--number", str(number)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | ({OVER_TLS: "1"} if target.url.startswith("https") else {}),
    )
    try:
        yield Attacker(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Attacker:
    """Does one round of its attack for each line that it is sent, and says what it saw."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    async def ready(self) -> None:
        assert await self._stdout.readline() == b"ready\n"

    async def round(self) -> str:
        self._stdin.write(b"go\n")
        line = await self._stdout.readline()
        assert line, "the attack failed: its error is above"
        return line.decode().strip()


async def attack(target: Target, attack: Attack, number: int, *, rounds_max: int = ROUNDS_MAX) -> Report:
    """Try it, until the normal client has had its chance to notice."""
    report = Report(attack.name, attack.what, number)
    few_descriptors = any(what == resource.RLIMIT_NOFILE for what, _ in attack.limits)
    neighbour = Neighbour(target, idle_may_close=few_descriptors)
    async with neighbour, attacker(attack, target, number) as other:
        await other.ready()
        for _ in range(ROUNDS_ALONE):
            took_s = await neighbour.ask()
            assert took_s is not None
            report.alone_s.append(took_s)
        report.before = report.most = await neighbour.look_alone()

        async def rounds(most: int) -> None:
            """One or, where the normal client has had few answers yet, several up to `most`."""
            for at in range(most):
                if at and len(report.beside_s) >= ANSWERS_BESIDE:
                    break
                report.seen = await other.round()
                report.rounds += 1

        async def beside(most: int) -> None:
            async with asyncio.timeout(ROUNDS_MAX * TIMEOUT_S), asyncio.TaskGroup() as tasks:
                attacking = tasks.create_task(rounds(most))
                while not attacking.done() or not report.beside_s:
                    took_s = await neighbour.ask()
                    if took_s is not None:
                        report.beside_s.append(took_s)
                    else:
                        assert attack.may_refuse, "the normal client was refused"
                        report.refused += 1
                        await asyncio.sleep(0.05)
                    assert report.most is not None
                    report.most = report.most.most(await neighbour.look())

        await beside(1)
        if rounds_max > 1:
            report.first = await neighbour.all_back(report.before, math.inf)
            await beside(rounds_max - 1)
        else:
            report.first = report.before
        report.after = await neighbour.all_back(report.before, report.first.memory_kib)
        report.served = len(report.beside_s)
        assert await neighbour.ask() is not None
    assert target.process.returncode is None, "the server died"
    assert "Traceback" not in target.log_text(), target.log_text()[:4000]
    return report
