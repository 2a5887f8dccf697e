"""What browser tests stand on: a server of the demo model, Debian's Chromium, and all that a page says and asks for."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

if TYPE_CHECKING:
    from playwright.async_api import ConsoleMessage, Page, Request

ROOT = Path(__file__).resolve().parents[2]
AXE = ROOT / "webui" / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = shutil.which("chromium")
START_S = 120.0
TIMEOUT_MS = 30_000.0
SHOTS = os.environ.get("NOVAINFER_SCREENSHOTS")  # a folder: pictures for docs/ are written there
# All answers have one seed: the demo model is sampled, and one time in a hundred the capital of France is another town.
ONE_SEED = """
    const draw = crypto.getRandomValues.bind(crypto);
    crypto.getRandomValues = (into) => (into instanceof Uint32Array ? into.fill(2 * 13) : draw(into));
"""
# WCAG's own rules; "minor" ones are matters of taste.
SERIOUS = ("serious", "critical")


class Served:
    """A running `novainfer serve`."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def api(self, **how: Any) -> httpx.AsyncClient:
        """A client of its API, which trusts the certificate that it made for itself."""
        return httpx.AsyncClient(base_url=self.url, verify=False, timeout=START_S, **how)

    def worker(self) -> int:
        """The process that computes."""
        (found,) = (int(pid) for pid in _children(self.process.pid) if "novainfer.actors.device" in _command(int(pid)))
        return found


def _children(pid: int) -> list[str]:
    path = Path(f"/proc/{pid}/task")
    return [child for task in path.iterdir() for child in (task / "children").read_text().split()]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@contextmanager
def serving(*flags: str) -> Iterator[Served]:
    """`novainfer serve` of the demo model on a free port, ready."""
    command = (sys.executable, "-m", "novainfer.server", "--port", "0", "--shutdown-timeout", "0", *flags)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"at (https?://127\.0\.0\.1:\d+) \(ready in", line)
            assert found is not None, f"no ready line: {line!r}"
            yield Served(process, found[1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=START_S)


class Watched:
    """Everything that a page writes on its console and asks the network for."""

    def __init__(self, page: Page, url: str) -> None:
        self.host = urlsplit(url).netloc
        self.said: list[str] = []
        self.asked: list[str] = []
        self.allowed: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.said.append(f"uncaught: {error}"))
        page.on("request", self._request)

    def allow(self, pattern: str) -> None:
        """Console messages that match are what this test is about."""
        self.allowed.append(pattern)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.said.append(f"{message.type}: {message.text}")

    def _request(self, request: Request) -> None:
        self.asked.append(request.url)

    def check(self) -> None:
        """Nothing went wrong that was not allowed, and nothing but the server was asked for anything."""
        wrong = [one for one in self.said if not any(re.search(pattern, one) for pattern in self.allowed)]
        assert not wrong, wrong
        elsewhere = [url for url in self.asked if urlsplit(url).scheme in ("http", "https", "ws", "wss")]
        elsewhere = [url for url in elsewhere if urlsplit(url).netloc != self.host]
        assert not elsewhere, elsewhere


async def faults_of_access(page: Page) -> list[str]:
    """What axe finds that would keep somebody from using the page as it is now."""
    if not await page.evaluate("typeof axe !== 'undefined'"):
        await page.evaluate(AXE.read_text(encoding="utf-8") + "; 0")
    found = await page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{one['impact']}: {one['id']}: {one['help']}: {node['target']} {node.get('failureSummary', '')}"
        for one in found["violations"]
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]


async def shoot(page: Page, name: str) -> None:
    """A picture of the page as it is, where `NOVAINFER_SCREENSHOTS` names a folder."""
    if SHOTS:
        await page.screenshot(path=f"{SHOTS}/{name}.png", animations="disabled", caret="hide")
