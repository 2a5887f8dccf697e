"""Both pages load as built, with nothing from elsewhere, under a policy that lets nothing inline run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.webui.rig import Served, Watched, faults_of_access

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("path", ["/", "/inspector"])
async def test_a_page_loads_with_nothing_on_its_console_and_nothing_from_elsewhere(
    served: Served, page: Page, watched: Watched, path: str
) -> None:
    answer = await page.goto(served.url + path, wait_until="load")
    assert answer is not None
    assert answer.status == 200
    await page.locator("main").first.wait_for()
    names = [url.rpartition("/")[2] for url in watched.asked]
    other = "Inspector-" if path == "/" else "Chat-"
    assert any(name.endswith(".js") for name in names)
    assert not [name for name in names if name.startswith(other)], "each page has scripts of its own"
    protocol = await page.evaluate("performance.getEntriesByType('navigation')[0].nextHopProtocol")
    assert protocol == ("h2" if served.url.startswith("https") else "http/1.1")


@pytest.mark.parametrize("path", ["/", "/inspector"])
async def test_axe_finds_nothing_serious(served: Served, page: Page, path: str) -> None:
    await page.goto(served.url + path)
    await page.locator("main").first.wait_for()
    assert await faults_of_access(page) == []


async def test_nothing_inline_runs(served: Served, page: Page, watched: Watched) -> None:
    """The policy itself, as a browser reads it: what slips into the document is text."""
    await page.goto(served.url)
    ran = await page.evaluate(
        """async () => {
            const box = document.createElement("div");
            box.innerHTML = "<img src=/none.png onerror='window.ran = 1'><a href='javascript:window.ran=2'>x</a>";
            document.body.append(box);
            const script = document.createElement("script");
            script.textContent = "window.ran = 3";
            document.body.append(script);
            box.querySelector("a").click();
            await new Promise((done) => setTimeout(done, 300));
            return window.ran ?? 0;
        }"""
    )
    assert ran == 0
    assert sum("Content Security Policy" in said for said in watched.said) >= 2, "it was refused, not merely late"
    watched.allow("Content Security Policy|404")
