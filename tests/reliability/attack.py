"""What an attack is, and how it is tried: a server as users start it, the attack, and a normal client beside it.

The normal client asks for one short answer after the other, all through the attack; each must be what it was before.
When the attack is over, everything must be back: live requests, connections, tasks, descriptors, processes, and memory
up to a stated slack. How long the normal client waited is reported, not judged: the machine may be busy.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.reliability.stalled import resident_kib
from tests.reliability.trials import percentile

ATTACKER_KEY, NEIGHBOUR_KEY = "attacker", "neighbour"  # two clients
TIMEOUT_S = 60.0  # of an attack, and until everything is back: a hang is a failure
MEMORY_SLACK_KIB = 64 * 1024  # what an allocator may keep after an attack, on top of what was there before
DESCRIPTORS_SLACK = 2  # the loop's own, opened when they are first needed
NEIGHBOUR = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
ANSWERS_BESIDE = 20  # that the normal client gets before the attack ends; it is repeated for them, up to
ROUNDS_MAX = 10  # times
ROUNDS_ALONE = 10  # short answers before the attacks: what the normal client feels without one


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
    descriptors: int
    processes: int
    resident_kib: int


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
    after: Left | None = None

    def row(self) -> dict[str, Any]:
        """As JSON can hold it; milliseconds and MiB."""
        assert self.before is not None and self.after is not None  # noqa: PT018
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
            "left": {
                "live": self.after.live,
                "connections": self.after.connections - self.before.connections,
                "tasks": self.after.tasks - self.before.tasks,
                "descriptors": self.after.descriptors - self.before.descriptors,
                "processes": self.after.processes - self.before.processes,
                "mib": round((self.after.resident_kib - self.before.resident_kib) / 1024, 1),
            },
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
            found = re.search(r"at (http://127\.0\.0\.1:\d+) \(ready in", line)
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


async def look(client: httpx.AsyncClient, target: Target) -> Left:
    """What there is now."""
    text = (await client.get("/metrics")).text
    numbers = {}
    for name in ("nova_live_requests", "nova_connections", "nova_tasks"):
        found = re.search(rf"^{name} ([0-9.e+]+)$", text, re.MULTILINE)
        assert found is not None, f"{name} is not in /metrics"
        numbers[name] = int(float(found[1]))
    return Left(
        live=numbers["nova_live_requests"],
        connections=numbers["nova_connections"],
        tasks=numbers["nova_tasks"],
        descriptors=len(os.listdir(f"/proc/{target.pid}/fd")),
        processes=len(children(target.pid)),
        resident_kib=resident_kib(target.pid),
    )


class Neighbour:
    """A normal client: one short answer after the other, over one connection, and each must be right."""

    def __init__(self, target: Target) -> None:
        self._target = target
        headers = {"authorization": f"Bearer {NEIGHBOUR_KEY}"}
        self._client = httpx.AsyncClient(base_url=target.url, headers=headers, timeout=TIMEOUT_S)
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
        response = await self._client.post("/v1/completions", json=NEIGHBOUR)
        if response.status_code in (429, 503):
            assert "retry-after" in response.headers
            return None
        assert response.status_code == 200, f"{response.status_code}: {response.text[:500]}"
        text = response.json()["choices"][0]["text"]
        self.text = self.text or text
        assert text == self.text
        return loop.time() - at_s

    async def look(self) -> Left:
        return await look(self._client, self._target)

    async def all_back(self, before: Left) -> Left:
        """Wait until what the attack took is back; an AssertionError that says what is missing if it never is."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while missing := self._missing(before, after := await self.look()):  # noqa: ASYNC110 - from outside
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not back after {TIMEOUT_S:g} s: {', '.join(missing)}") from None
        return after

    def _missing(self, before: Left, after: Left) -> list[str]:
        bounds = {
            "live": 0,
            "connections": before.connections,
            "tasks": before.tasks,
            "descriptors": before.descriptors + DESCRIPTORS_SLACK,
            "resident_kib": before.resident_kib + MEMORY_SLACK_KIB,
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
    async with Neighbour(target) as neighbour, attacker(attack, target, number) as other:
        await other.ready()
        for _ in range(ROUNDS_ALONE):
            took_s = await neighbour.ask()
            assert took_s is not None
            report.alone_s.append(took_s)
        report.before = await neighbour.look()

        async def again() -> None:
            while report.rounds < rounds_max and len(report.beside_s) < ANSWERS_BESIDE:
                report.seen = await other.round()
                report.rounds += 1

        async with asyncio.timeout(ROUNDS_MAX * TIMEOUT_S), asyncio.TaskGroup() as tasks:
            rounds = tasks.create_task(again())
            while not rounds.done() or not report.beside_s:
                took_s = await neighbour.ask()
                if took_s is not None:
                    report.beside_s.append(took_s)
                else:
                    assert attack.may_refuse, "the normal client was refused"
                    report.refused += 1
                    await asyncio.sleep(0.05)
        report.after = await neighbour.all_back(report.before)
        report.served = len(report.beside_s)
        assert await neighbour.ask() is not None
    assert target.process.returncode is None, "the server died"
    assert "Traceback" not in target.log_text(), target.log_text()[:4000]
    return report
