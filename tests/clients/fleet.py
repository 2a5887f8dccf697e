"""Two replicas of the demo model and a router in front of them, each a process as its users start it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.clients.environments import HOME

WAIT_S = 120.0  # on a machine with other things to do
ADMIN = "admin-key"
MASTER_KEY = f"sk-{secrets.token_hex(16)}"  # LiteLLM's proxy starts with one only


def free_port() -> int:
    """One that nothing listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Program:
    """A process that listens at a port of this machine, and what it says."""

    def __init__(self, name: str, port: int, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self._log = log

    @property
    def said(self) -> str:
        """The end of what it has said so far."""
        return self._log.read_text(errors="replace")[-4000:]

    async def wait_until_ready(self, path: str) -> None:
        """Wait until it answers well at this path."""
        async with httpx.AsyncClient(base_url=self.url) as client, asyncio.timeout(WAIT_S):
            while True:
                assert self.process.returncode is None, f"{self.name} has ended: {self.said}"
                with suppress(httpx.TransportError):
                    if (await client.get(path)).is_success:
                        return
                await asyncio.sleep(0.1)

    async def wait(self) -> int:
        """Wait until it has ended; gives its exit status."""
        async with asyncio.timeout(WAIT_S):
            return await self.process.wait()


@asynccontextmanager
async def program(name: str, port: int, command: list[str], folder: Path) -> AsyncIterator[Program]:
    """Start one, and end it."""
    log = folder / f"{name}-{port}.log"
    env = {**os.environ, "NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            yield Program(name, port, process, log)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await process.wait()


class Replica:
    """`novainfer serve`, and where it tells which prefixes it has."""

    def __init__(self, program: Program, events: int, replays: int) -> None:
        self.program = program
        self.url = program.url
        self.events = f"tcp://127.0.0.1:{events}"
        self.replays = f"tcp://127.0.0.1:{replays}"
        self.client = httpx.AsyncClient(base_url=program.url, timeout=WAIT_S)  # as the router: whose prefixes it shares

    async def inject(self, kind: str, **how: Any) -> None:
        """Let something fail, or be slow, in it."""
        key = {"authorization": f"Bearer {ADMIN}"}
        (await self.client.post("/v1/faults", json={"kind": kind, **how}, headers=key)).raise_for_status()

    async def num_running(self) -> int:
        """Requests that it computes now."""
        found: int = (await self.client.get("/load")).json()["num_running"]
        return found

    async def num_answered(self) -> int:
        """Requests that it has answered well, ever."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return sum(round(float(line.split()[-1])) for line in lines if line.startswith("vllm:request_success_total{"))


def _vllm_router(port: int, replicas: list[Replica], folder: Path) -> list[str]:
    """`kv_aware`: where the longest prefix is, by what replicas tell."""
    sources = [
        word
        for replica in replicas
        for word in (
            *("--kv-event-source", f"{replica.url}={replica.events}"),
            *("--kv-event-replay-source", f"{replica.url}={replica.replays}"),
        )
    ]
    return [
        *(str(HOME / "vllm-router" / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *(replica.url for replica in replicas), "--policy", "kv_aware", *sources),
        *("--kv-event-block-size", "16", "--kv-event-model", "demo", "--prometheus-port", str(free_port())),
        *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
    ]


def _smg(port: int, replicas: list[Replica], folder: Path) -> list[str]:
    """`cache_aware`: where it has sent such a beginning before."""
    return [
        *(str(HOME / "smg" / "bin" / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *(replica.url for replica in replicas), "--policy", "cache_aware"),
        *("--prometheus-port", str(free_port()), "--load-monitor-interval", "1"),
        *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
    ]


def _litellm_proxy(port: int, replicas: list[Replica], folder: Path) -> list[str]:
    """By chance; what fails is tried elsewhere."""
    found = {
        "model_list": [
            {
                "model_name": "demo",
                "litellm_params": {"model": "hosted_vllm/demo", "api_base": f"{replica.url}/v1", "api_key": "none"},
            }
            for replica in replicas
        ],
        "general_settings": {"master_key": MASTER_KEY},
        "router_settings": {"num_retries": 3, "retry_after": 0, "allowed_fails": 0, "cooldown_time": 5},
    }
    (folder / "litellm.yaml").write_text(yaml.safe_dump(found))
    command = str(HOME / "litellm-proxy" / "bin" / "litellm")
    return [command, "--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]


COMMANDS: dict[str, Callable[[int, list[Replica], Path], list[str]]] = {
    "vllm-router": _vllm_router,
    "smg": _smg,
    "litellm-proxy": _litellm_proxy,
}
READY = {"vllm-router": "/readiness", "smg": "/readiness", "litellm-proxy": "/health/readiness"}


class Fleet:
    """A router, what is behind it, and a client in front."""

    def __init__(self, router: Program, replicas: list[Replica]) -> None:
        self.router = router
        self.replicas = replicas
        key = {"authorization": f"Bearer {MASTER_KEY}"} if router.name == "litellm-proxy" else {}
        self.client = httpx.AsyncClient(base_url=router.url, timeout=WAIT_S, headers=key)

    async def ask(self, text: str, max_tokens: int, where: httpx.AsyncClient | None = None) -> dict[str, Any]:
        """A whole answer, through the router unless it is said where; a failure says why."""
        response = await (where or self.client).post("/v1/chat/completions", json=body(text, max_tokens))
        assert response.is_success, f"{response.status_code}: {response.text[:500]}; {self.router.said}"
        found: dict[str, Any] = response.json()
        return found

    async def stream(self, text: str, max_tokens: int) -> Streamed:
        """Begin a streamed answer: what it has given so far can be looked at while it comes."""
        streamed = Streamed()
        streamed.task = asyncio.create_task(streamed.read(self.client, body(text, max_tokens, stream=True)))
        return streamed


def body(text: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Greedy, and as long as it was asked for."""
    messages = [{"role": "user", "content": text}]
    wishes = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return {"model": "demo", "messages": messages, **wishes, **more}


class Streamed:
    """What came of one stream."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.error: str | None = None  # an error event, or how the connection ended
        self.num_done = 0
        self.task: asyncio.Task[None]

    async def read(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    self.error = f"{response.status_code}: {(await response.aread()).decode()}"
                    return
                async for line in response.aiter_lines():
                    self._take(line)
        except httpx.TransportError as error:
            self.error = type(error).__name__

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.num_done += 1
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.error = "an error event"
                return
            for choice in event["choices"]:
                self.text += choice["delta"].get("content") or ""
                self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def is_whole(self) -> bool:
        """It came to its end, and said so once."""
        return (self.finish_reason, self.error, self.num_done) == ("length", None, 1)

    @property
    def fate(self) -> str:
        """How it ended, in words for a table."""
        if self.is_whole:
            return "whole"
        done = ", then [DONE]" if self.num_done else ""
        return f"{self.error or 'cut off without a word'}{done}"


@asynccontextmanager
async def fleet(router: str, folder: Path) -> AsyncIterator[Fleet]:
    """Start two replicas and a router in front of them, and end them."""
    async with AsyncExitStack() as stack:
        replicas = []
        for _ in range(2):
            port, events, replays = free_port(), free_port(), free_port()
            told = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{events}",
                "replay_endpoint": f"tcp://*:{replays}",
            }
            command = [
                *(
                    sys.executable,
                    "-m",
                    "novainfer.server.cli.main",
                    "serve",
                    "--port",
                    str(port),
                    "--num-threads",
                    "1",
                ),
                *("--admin-key", ADMIN, "--shutdown-timeout", "60", "--no-recorder"),
                *("--kv-events-config", json.dumps(told)),
            ]
            found = await stack.enter_async_context(program("replica", port, command, folder))
            replica = Replica(found, events, replays)
            stack.push_async_callback(replica.client.aclose)
            replicas.append(replica)
        await asyncio.gather(*(replica.program.wait_until_ready("/health") for replica in replicas))
        port = free_port()
        command = COMMANDS[router](port, replicas, folder)
        front = await stack.enter_async_context(program(router, port, command, folder))
        await front.wait_until_ready(READY[router])
        made = Fleet(front, replicas)
        stack.push_async_callback(made.client.aclose)
        await until(lambda: _serves(made))
        yield made


async def _serves(fleet: Fleet) -> bool:
    return (await fleet.client.post("/v1/chat/completions", json=body("Hello", 1))).is_success


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
