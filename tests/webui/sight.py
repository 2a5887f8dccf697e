"""The inspector by its roles and names, as its reader finds things, and requests to look at."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from tests.webui.rig import START_S, Served
from tests.webui.talk import ADMIN, until

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page

VIEWS = ("machines", "actors", "requests", "kv", "steps", "faults")
NUM_REQUESTS = 32
SLOWED_STEPS = 20
SHARED = "Be friendly, be brief, and say it when you do not know something. " * 8


@asynccontextmanager
async def running(server: Served, num_requests: int = NUM_REQUESTS, seconds: float = 0.05) -> AsyncIterator[None]:
    """So many requests, which begin alike and go on for as long as one looks: their steps take `seconds` each."""
    prompt = [f"{SHARED}This is story {number}. Once upon a time" for number in range(num_requests)]
    body = {"model": "demo", "temperature": 0.8, "ignore_eos": True}
    async with server.api(headers=ADMIN) as api:
        await one_more(server)  # their beginning is cached
        is_over = threading.Event()
        slowed = asyncio.create_task(_slow(server, api, seconds, is_over))
        body |= {"prompt": prompt, "max_tokens": 1500, "stream": True}
        task = asyncio.create_task(asyncio.to_thread(_read, server, body, is_over))

        async def all_write() -> bool:
            assert not task.done(), task.exception() or "it ended"
            return len([one for one in await requests(server) if one["state"] == "DECODE"]) == num_requests

        try:
            await until(all_write)
            yield
        finally:
            is_over.set()
            await slowed
            await task


async def _slow(server: Served, api: httpx.AsyncClient, seconds: float, is_over: threading.Event) -> None:
    """Each step takes so much longer; a few at a time, for another fault waits until those before it are over."""
    while not is_over.is_set():
        before = await last_step(server)
        await api.post("/v1/faults", json={"kind": "stall", "num_steps": SLOWED_STEPS, "seconds": seconds})

        async def are_over(before: int = before) -> bool:
            return is_over.is_set() or await last_step(server) >= before + SLOWED_STEPS

        await until(are_over)


def _read(server: Served, body: dict[str, Any], is_over: threading.Event) -> None:
    """In a thread of its own: a busy loop would be a slow reader, whose requests pause."""
    with (
        httpx.Client(base_url=server.url, verify=False, timeout=START_S, headers=ADMIN) as api,
        api.stream("POST", "/v1/completions", json=body) as reply,
    ):
        assert reply.status_code == 200, reply.read()
        for _ in reply.iter_raw():
            if is_over.is_set():
                return


async def one_more(server: Served) -> None:
    """A short request, to its end."""
    async with server.api(headers=ADMIN) as api:
        body = {"model": "demo", "prompt": SHARED, "max_tokens": 2}
        assert (await api.post("/v1/completions", json=body)).status_code == 200


async def told(server: Served, path: str) -> Any:
    """What the API says."""
    async with server.api(headers=ADMIN) as api:
        return (await api.get(path)).json()


async def requests(server: Served) -> list[dict[str, Any]]:
    """All requests that the API lists."""
    return list((await told(server, "/v1/requests"))["data"])


async def last_step(server: Served) -> int:
    """The number of the last step that has ended; -1: there was none."""
    steps = (await told(server, "/v1/steps"))["data"]
    return int(steps[-1]["step_id"]) if steps else -1


async def first(server: Served) -> dict[str, Any]:
    """The feed's snapshot."""
    async with server.api(headers=ADMIN) as api, api.stream("GET", "/v1/inspector") as reply:
        async for line in reply.aiter_lines():
            return dict(json.loads(line.removeprefix("data: ")))
    raise AssertionError("the feed ended")


async def open_inspector(page: Page, server: Served, key: str = "") -> None:
    """The page, live; `key` is as if it had been entered in this tab."""
    if key:
        await page.add_init_script(f"sessionStorage.setItem('novainfer.key', '{key}')")
    await page.goto(f"{server.url}/inspector")
    await is_live(page)


async def is_live(page: Page) -> None:
    """The feed comes, and a view of it is shown."""
    await page.get_by_role("status").get_by_text("live", exact=True).wait_for()
    await page.locator("main > :not(p)").first.wait_for()


async def view(page: Page, name: str) -> Locator:
    """Go to a view as its reader does."""
    link = page.get_by_role("navigation", name="Views").locator(f'[href="#{name}"]')
    await link.click()
    main = page.get_by_role("main", name=await link.inner_text())
    await main.wait_for()
    return main


async def figure(page: Page, name: str) -> float:
    """What the head of the page says is running, or waiting, or made each second."""
    return number(await page.get_by_role("banner").locator("li", has_text=name).inner_text())


def number(text: str) -> float:
    """The first number of a text, as it is written in English."""
    found = re.search(r"[\d,]+(\.\d+)?", text)
    assert found is not None, text
    return float(found[0].replace(",", ""))


class Relay:
    """A way to the server that can be cut: bytes as they are, so that it is the same for both versions of HTTP."""

    def __init__(self, server: Served) -> None:
        to = urlsplit(server.url)
        self._to = to.hostname, to.port
        self._scheme = to.scheme
        self._port = 0
        self._listener: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        return f"{self._scheme}://{self.host}"

    async def open(self) -> None:
        """Let connections through, at the same port as before."""
        self._listener = await asyncio.start_server(self._relay, "127.0.0.1", self._port)
        self._port = self._listener.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """End those that there are, and let no others through."""
        if self._listener is not None:
            self._listener.close()
        for end in tuple(self._ends):
            end.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(*self._to)
        self._ends |= {writer, other_writer}
        with suppress(OSError):
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass(reader, other_writer))
                both.create_task(_pass(other_reader, writer))
        self._ends -= {writer, other_writer}


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def relayed(server: Served) -> AsyncIterator[Relay]:
    """A relay to this server."""
    relay = Relay(server)
    await relay.open()
    try:
        yield relay
    finally:
        await relay.cut()
