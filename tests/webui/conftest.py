"""Browser tests: one server a file, each test in an empty profile, whose console and network must be clean."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from novainfer.server.page.files import Page as Built
from tests.webui.rig import AXE, CHROMIUM, ONE_SEED, TIMEOUT_MS, Served, Watched, serving

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page

# Both ways that browsers speak to it: HTTP/1.1, and HTTP/2 where there is TLS.
FRONTS = {"http/1.1": (), "h2": ("--self-signed",)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a file share its loop, which the browser lives in; without what they need they are skipped."""
    missing = _missing()
    for item in items:
        if "tests/webui/" in item.path.as_posix():
            item.add_marker(pytest.mark.slow)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


def _missing() -> str:
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    if CHROMIUM is None:
        return "chromium is not installed (Debian's package)"
    if not Built().is_built or not AXE.is_file():
        return "the page is not built: make webui"
    return ""


@pytest.fixture(scope="module", params=FRONTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server of this file, once over each version of HTTP; a file may name more flags as `FLAGS`.

    `{folder}` in one of them is a new folder.
    """
    folder = str(tmp_path_factory.mktemp("served"))
    flags = [flag.replace("{folder}", folder) for flag in getattr(request.module, "FLAGS", ())]
    with serving(*FRONTS[request.param], *flags) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Chromium, without a window."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest.fixture
def context_options() -> dict[str, Any]:
    """More of what `Browser.new_context` takes."""
    return {}


@pytest_asyncio.fixture(loop_scope="module")
async def context(browser: Browser, context_options: dict[str, Any]) -> AsyncIterator[BrowserContext]:
    """A profile with nothing in it: several pages of it are several tabs."""
    context = await browser.new_context(ignore_https_errors=True, locale="en-GB", **context_options)
    context.set_default_timeout(TIMEOUT_MS)
    await context.add_init_script(ONE_SEED)
    yield context
    await context.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(context: BrowserContext, served: Served) -> AsyncIterator[Page]:
    """An empty tab, watched: what it writes on its console, or asks another server for, fails its test."""
    page = await context.new_page()
    page.watched = Watched(page, served.url)  # type: ignore[attr-defined]
    yield page
    page.watched.check()  # type: ignore[attr-defined]


@pytest.fixture
def watched(page: Any) -> Watched:
    """What `page` has said and asked for."""
    found: Watched = page.watched
    return found
