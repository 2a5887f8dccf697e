"""What goes wrong at a server and on the way to it, as the chat's reader meets it: each has a way on."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.webui.line import BROKEN, line_to
from tests.webui.rig import Served, Watched, faults_of_access
from tests.webui.talk import (
    ADMIN,
    ADMIN_KEY,
    STORY,
    answers,
    ask,
    ask_slowly,
    button,
    ended,
    field,
    has_begun,
    live,
    paste,
    text_of,
    until,
)

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "for-the-page"
# One answer at a time, and one that waits: a third is refused.
ROOM = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--max-client-reqs", "2")
FLAGS = ("--admin-key", ADMIN_KEY, "--api-key", KEY, "--journal", "{folder}/journal", *ROOM)


@pytest_asyncio.fixture(loop_scope="module")
async def known(page: Page) -> Page:
    """A page whose reader gave the key on another day."""
    await page.add_init_script(f"localStorage.setItem('novainfer.key', '{KEY}')")
    return page


async def _alone(served: Served, page: Page) -> str:
    """What the last question's answer is when nothing comes between: the same seed gives the same text."""
    figures = await answers(page).last.get_by_role("list", name="Figures of this answer").inner_text()
    seed = re.search(r"seed (\d+)", figures)
    assert seed is not None
    body = {"messages": [{"role": "user", "content": STORY}], "seed": int(seed[1])}
    async with served.api(headers=ADMIN) as api:
        answer = (await api.post("/v1/chat/completions", json=body)).json()
    text: str = answer["choices"][0]["message"]["content"]
    return text.strip()


async def test_the_page_asks_for_a_key_and_goes_on_with_it(served: Served, page: Page, watched: Watched) -> None:
    watched.allow("401")
    await page.goto(served.url)
    await page.get_by_text("The server wants an API key.").wait_for()
    assert await faults_of_access(page) == []
    await ask(page, "What is the capital of France?")
    notice = answers(page).last.get_by_role("status")
    await notice.get_by_text("The server wants an API key.").wait_for()
    for key, said in (("another", "The server wants an API key."), (KEY, "Paris")):
        await notice.get_by_label("API key").fill(key)
        await notice.get_by_label("API key").press("Enter")
        await answers(page).last.get_by_text(said).wait_for()
    assert "Paris" in await ended(page)
    await page.reload()
    await button(page, "New chat").first.click()
    await button(page, "What is 17 + 25?").click()  # the key is kept, and nothing is asked for
    await ended(page)


async def test_an_answer_waits_for_a_server_that_is_full_and_comes_by_itself(
    served: Served, known: Page, watched: Watched
) -> None:
    watched.allow("503")
    await known.goto(served.url)
    async with served.api(headers=ADMIN) as api:
        await api.post("/v1/faults", json={"kind": "stall", "num_steps": 1, "seconds": 1})
        body = {"messages": [{"role": "user", "content": STORY}]}
        others = []
        for state in ("PREFILL", "WAITING"):
            others.append(asyncio.create_task(api.post("/v1/chat/completions", json=body)))
            await until(lambda state=state: _has_one(served, state))
        await ask(known, "What is the capital of France?")
        await known.get_by_text("The server has its hands full.").wait_for()
        assert "Paris" in await ended(known)
        await asyncio.gather(*others)


async def _has_one(served: Served, state: str) -> bool:
    return state in [one["state"] for one in await live(served)]


async def test_a_limit_is_waited_for_and_no_longer_than_its_reader_wants(
    served: Served, known: Page, watched: Watched
) -> None:
    watched.allow("429")
    error = {"message": "too many", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
    headers = {"retry-after": "60"}
    await known.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=429, headers=headers, json={"error": error})
    )
    await known.goto(served.url)
    await ask(known, "What is the capital of France?")
    await known.get_by_text("The limit of this key is reached.").wait_for()
    await known.get_by_text(re.compile(r"Next try in [56]\d seconds\.")).wait_for()
    assert await faults_of_access(known) == []
    await button(answers(known).last, "Cancel").click()
    await button(answers(known).last, "Try again").click()
    await known.get_by_text(re.compile(r"Next try in [56]\d seconds\.")).wait_for()
    await known.unroute("**/v1/chat/completions")
    await button(answers(known).last, "Try now").click()
    assert "Paris" in await ended(known)


async def test_an_answer_goes_on_when_its_worker_is_killed(served: Served, known: Page) -> None:
    await known.goto(served.url)
    await ask_slowly(served, known)
    before = await has_begun(known)
    os.kill(served.worker(), signal.SIGKILL)
    text = await ended(known)
    assert text.startswith(before)
    assert text == await _alone(served, known)


async def test_an_answer_goes_on_behind_its_last_event_when_the_connection_is_lost(
    served: Served, context: BrowserContext
) -> None:
    async with line_to(served.url) as line:
        page = await context.new_page()
        watched = Watched(page, line.url)
        watched.allow(BROKEN)
        await page.add_init_script(f"localStorage.setItem('novainfer.key', '{KEY}')")
        await page.goto(line.url)
        await ask_slowly(served, page)
        before = await has_begun(page)
        line.cut()
        await page.get_by_text("The connection was lost.").wait_for()
        assert await faults_of_access(page) == []
        at_cut = await text_of(answers(page).last)
        assert at_cut.startswith(before)
        line.mend()
        await until(lambda: _longer(page, at_cut))
        await page.reload()  # and behind what a reload had
        await until(lambda: _longer(page, at_cut))
        await _end_stalls(served)
        text = await ended(page)
        assert text == await _alone(served, page)
        watched.check()


async def _longer(page: Page, before: str) -> bool:
    return len(await text_of(answers(page).last)) > len(before)


async def _end_stalls(served: Served) -> None:
    """What the worker was told to do goes with it."""
    os.kill(served.worker(), signal.SIGKILL)


async def test_what_has_outgrown_the_context_says_what_to_shorten(
    served: Served, known: Page, watched: Watched
) -> None:
    watched.allow("400")
    await known.goto(served.url)
    await field(known).fill("What is the capital of France?")
    await paste(known, "Once upon a time, there was a dragon. " * 300)
    assert await field(known).input_value() == "What is the capital of France?", "a long paste goes beside it"
    await field(known).press("Enter")
    notice = answers(known).last.get_by_role("status")
    await notice.get_by_text("The conversation has outgrown what the model can read.").wait_for()
    await notice.get_by_text("Remove or shorten “Pasted text”").wait_for()
    assert await faults_of_access(known) == []
    await button(notice, "Edit the question").click()
    await button(known, "Remove Pasted text").click()
    await known.get_by_role("textbox", name="Edit the question").press("Enter")
    await known.get_by_role("group", name="Version 2 of 2").wait_for()
    assert "Paris" in await ended(known)
