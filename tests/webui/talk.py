"""The chat by its roles and names, as its reader finds things, and the server as it is asked beside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tests.webui.rig import START_S, Served

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page

ADMIN_KEY = "for-drills"
STORY = "Tell me a story about a dragon called Ida"  # some 140 tokens
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


def field(page: Page) -> Locator:
    """Where questions are written."""
    return page.get_by_role("textbox", name="Message", exact=True)


async def paste(page: Page, text: str) -> None:
    """Into the field where questions are written."""
    script = """(field, text) => {
        const clipboardData = new DataTransfer();
        clipboardData.setData("text/plain", text);
        field.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
    }"""
    await field(page).evaluate(script, text)


def answers(page: Page) -> Locator:
    """The answers that are shown."""
    return page.get_by_role("article", name="Assistant")


def button(page: Page | Locator, name: str) -> Locator:
    """The button of exactly this name."""
    return page.get_by_role("button", name=name, exact=True)


async def ask(page: Page, text: str) -> None:
    """Write a question and send it."""
    await field(page).fill(text)
    await field(page).press("Enter")


async def ended(page: Page, num_answers: int = 1) -> str:
    """The text of the last answer, when there are so many and it is not being made any more."""
    answer = answers(page).nth(num_answers - 1)
    await page.locator('article[aria-label="Assistant"][aria-busy="false"]').nth(num_answers - 1).wait_for()
    return await text_of(answer)


async def text_of(answer: Locator) -> str:
    """What an answer says, without what stands under it."""
    return (await _words(answer).inner_text()).strip()


async def has_begun(page: Page) -> str:
    """The text of the last answer as soon as there is some."""
    await _words(answers(page).last).wait_for()
    return await text_of(answers(page).last)


def _words(answer: Locator) -> Locator:
    return answer.locator(":scope > div:not(.foot):not(.waiting)").first


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    """What `condition` gives, once it is true."""
    async with asyncio.timeout(START_S):
        while not (found := await condition()):  # noqa: ASYNC110  a server elsewhere sets no event
            await asyncio.sleep(0.05)
    return found


async def live(server: Served) -> list[dict[str, Any]]:
    """The requests that the server works on, or has waiting."""
    async with server.api(headers=ADMIN) as api:
        listed = (await api.get("/v1/requests")).json()["data"]
    return [one for one in listed if not one["state"].startswith(("FINISHED", "OVERFLOW"))]


async def ask_slowly(server: Served, page: Page, text: str = STORY) -> None:
    """Ask, and have each step of the answer take a tenth of a second: long enough to do something meanwhile.

    Its first steps take so long that the others can be told to, on a busy machine, too. What is left of them is void
    when the answer has ended.
    """
    async with server.api(headers=ADMIN) as api:

        async def is_told() -> bool:
            # Told before the request has come to the device it would be void: it is told until the first step is over.
            for one in await live(server):
                body = {"kind": "stall", "num_steps": 1000, "seconds": 0.1, "request": one["id"]}
                is_taken = (await api.post("/v1/faults", json=body)).status_code == 200
                if is_taken and one["state"] == "DECODE":
                    return True
            return False

        first = {"kind": "stall", "num_steps": 4, "seconds": 0.5}
        assert (await api.post("/v1/faults", json=first)).status_code == 200
        await ask(page, text)
        await until(is_told)
