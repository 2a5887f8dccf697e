"""The chat against a real server: what is asked, stopped, edited, kept, taken along, and shared by tabs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.webui.line import BROKEN, line_to
from tests.webui.rig import Served, Watched, faults_of_access
from tests.webui.talk import (
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
    from playwright.async_api import Browser, BrowserContext, Page, Route

pytestmark = pytest.mark.asyncio(loop_scope="module")
FLAGS = ("--admin-key", ADMIN_KEY)
# IndexedDB of a machine that is busy: it opens half a second later.
LATE_STORAGE = """
    const listen = EventTarget.prototype.addEventListener;
    IDBOpenDBRequest.prototype.addEventListener = function (type, hear, how) {
        const late = (event) => setTimeout(() => hear.call(this, event), 500);
        listen.call(this, type, type === "success" ? late : hear, how);
    };
"""


# A disk that is full while `isFull` says so, and a browser that was told to keep nothing of any page.
FULL_DISK = """
    const put = IDBObjectStore.prototype.put;
    IDBObjectStore.prototype.put = function (...given) {
        if (window.isFull) throw new DOMException("no room", "QuotaExceededError");
        return put.apply(this, given);
    };
"""
NOTHING_KEPT = """
    for (const name of ["localStorage", "sessionStorage", "indexedDB"])
        Object.defineProperty(window, name, { get() { throw new DOMException("refused", "SecurityError"); } });
"""
UNKEPT = "This browser keeps nothing for this page"


async def test_an_answer_comes_with_its_figures_and_the_next_one_finds_its_prompt_in_the_cache(
    served: Served, page: Page
) -> None:
    await page.goto(served.url)
    await ask(page, "What is the capital of France?")
    assert "Paris" in await ended(page)
    figures = answers(page).last.get_by_role("list", name="Figures of this answer")
    said = await figures.inner_text()
    for part in ("tokens", "tokens/s", "first token", "prompt tokens cached", "complete", "seed"):
        assert part in said
    await ask(page, "And what is the capital of Peru?")
    await ended(page, 2)
    cached = await answers(page).last.get_by_text("prompt tokens cached").inner_text()
    assert int(cached.split()[0]) > 0
    assert await page.title() == "What is the capital of France? – NovaInfer"
    assert await faults_of_access(page) == []


async def test_what_is_asked_before_the_browser_has_opened_its_storage_is_answered_and_kept(
    served: Served, page: Page
) -> None:
    await page.add_init_script(LATE_STORAGE)
    await page.goto(served.url)
    await ask(page, "What is the capital of France?")
    assert "Paris" in await ended(page)
    await page.reload()
    assert "Paris" in await ended(page)


async def test_what_there_was_no_room_for_is_exported_and_is_kept_when_there_is_some(
    served: Served, page: Page, tmp_path: Path
) -> None:
    await page.add_init_script(FULL_DISK)
    await page.goto(served.url)
    await field(page).wait_for()
    await page.evaluate("window.isFull = true")
    await ask(page, "What is the capital of France?")
    assert "Paris" in await ended(page)
    await page.get_by_text(UNKEPT).wait_for()
    await button(page, "Import and export").click()
    async with page.expect_download() as download:
        await page.get_by_role("menuitem", name="Export all conversations").click()
    await (await download.value).save_as(file := tmp_path / "chats.json")
    exported = json.loads(file.read_text(encoding="utf-8"))
    assert [len(one["messages"]) for one in exported["conversations"]] == [2]
    await page.evaluate("window.isFull = false")
    await page.get_by_text(UNKEPT).wait_for(state="detached")
    await page.reload()
    assert "Paris" in await ended(page)
    assert await page.get_by_role("article", name="You").inner_text() == "What is the capital of France?"


async def test_a_browser_that_keeps_nothing_is_told_and_answers(served: Served, page: Page) -> None:
    await page.add_init_script(NOTHING_KEPT)
    await page.goto(served.url)
    await ask(page, "What is the capital of France?")
    assert "Paris" in await ended(page)
    await page.get_by_text(UNKEPT).wait_for()
    await page.set_viewport_size({"width": 390, "height": 800})
    await page.reload()
    await page.get_by_text(UNKEPT).wait_for()
    await page.goto(f"{served.url}/inspector")
    await page.get_by_text("live", exact=True).wait_for()


async def test_stop_ends_the_answer_on_the_server_and_continue_goes_on_behind_its_last_word(
    served: Served, page: Page
) -> None:
    await page.goto(served.url)
    await ask_slowly(served, page)
    await has_begun(page)
    assert len(await live(served)) == 1
    await button(page, "Stop").click()
    before = await ended(page)
    await until(lambda: _none(served))
    await page.get_by_text("Stopped.").wait_for()
    await answers(page).last.get_by_role("button", name="Continue").first.click()
    await until(lambda: _longer(page, before))
    assert (await ended(page)).startswith(before)
    assert await answers(page).count() == 1


async def _none(served: Served) -> bool:
    return not await live(served)


async def _longer(page: Page, before: str) -> bool:
    return len(await text_of(answers(page).last)) > len(before)


async def test_escape_stops_and_arrow_up_edits_the_last_question(served: Served, page: Page) -> None:
    await page.goto(served.url)
    await ask_slowly(served, page)
    await has_begun(page)
    await page.keyboard.press("Escape")
    await ended(page)
    await until(lambda: _none(served))
    await field(page).press("ArrowUp")
    edited = page.get_by_role("textbox", name="Edit the question")
    await edited.wait_for()
    assert await edited.input_value() == STORY
    await edited.press("Escape")
    assert await page.evaluate("document.activeElement.tagName") == "TEXTAREA"  # back where one writes


async def test_an_edited_question_and_a_regenerated_answer_are_branches(served: Served, page: Page) -> None:
    await page.goto(served.url)
    await ask(page, "Spell nova")
    first = await ended(page)
    question = page.get_by_role("article", name="You")
    await question.hover()
    await button(question, "Edit").click()
    await page.get_by_role("textbox", name="Edit the question").fill("Spell apple")
    await page.keyboard.press("Enter")
    await page.get_by_role("group", name="Version 2 of 2").wait_for()
    second = await ended(page)
    assert second != first
    await button(question, "Previous version").click()
    await question.get_by_text("Spell nova").wait_for()
    assert await ended(page) == first
    await button(question, "Next version").click()
    await question.get_by_text("Spell apple").wait_for()
    assert await ended(page) == second
    await answers(page).last.hover()
    await button(answers(page).last, "Regenerate").click()
    await answers(page).last.get_by_role("group", name="Version 2 of 2").wait_for()
    await ended(page)
    await page.reload()
    await question.get_by_text("Spell apple").wait_for()  # the branch that was shown
    await answers(page).last.get_by_role("group", name="Version 2 of 2").wait_for()
    assert await answers(page).count() == 1


async def test_an_answer_that_a_reload_cut_is_kept_and_shown_as_cut(served: Served, page: Page) -> None:
    await page.goto(served.url)
    await ask_slowly(served, page)
    await has_begun(page)
    await page.reload()
    await page.get_by_text("The answer was cut off here.").wait_for()
    await until(lambda: _none(served))
    before = await ended(page)
    assert before.startswith("Once")
    await answers(page).last.get_by_role("button", name="Continue").first.click()
    await until(lambda: _longer(page, before))
    assert (await ended(page)).startswith(before)


async def test_an_answer_whose_connection_is_lost_is_kept_and_continued_by_a_button(
    served: Served, context: BrowserContext
) -> None:
    async with line_to(served.url) as line:
        page = await context.new_page()
        watched = Watched(page, line.url)
        watched.allow(BROKEN)
        await page.goto(line.url)
        await ask_slowly(served, page)
        begun = await has_begun(page)
        line.cut()
        await page.get_by_text("The connection was lost.").wait_for()
        before = await ended(page)
        assert before.startswith(begun)
        line.mend()
        await answers(page).last.get_by_role("status").get_by_role("button", name="Continue").click()
        await until(lambda: _longer(page, before))
        assert (await ended(page)).startswith(before)
        watched.check()


async def test_what_was_not_sent_stays_with_its_conversation_also_over_a_reload(
    served: Served, page: Page, watched: Watched
) -> None:
    await page.goto(served.url)
    await ask(page, "Spell window")
    await ended(page)
    material = "All that is known of dragons. " * 100
    listed = page.get_by_role("navigation", name="Conversations").get_by_role("button", name="Spell window").first

    async def has(text: str, num_attached: int) -> None:
        await until(lambda: _is(field(page).input_value(), text))
        await until(lambda: _is(page.get_by_role("button", name="Remove Pasted text").count(), num_attached))

    await field(page).fill("Of this:")
    await paste(page, material)
    await has("Of this:", 1)
    await button(page, "New chat").first.click()
    await has("", 0)
    await paste(page, material)
    await field(page).fill("Of another:")
    await listed.click()
    await has("Of this:", 1)
    await page.reload()
    await has("Of this:", 1)
    await button(page, "Remove Pasted text").click()
    await page.reload()
    await has("Of this:", 0)
    # There is no room for this one: it stays until the page goes, and nothing else is in its place then.
    await paste(page, "x" * 6_000_000)
    await button(page, "New chat").first.click()
    await has("Of another:", 1)
    await listed.click()
    await has("Of this:", 1)
    await page.reload()
    await has("Of this:", 0)
    # What is deleted and brought back has what was not sent.
    await paste(page, material)
    await button(page, "More about “Spell window”").click()
    await page.get_by_role("menuitem", name="Delete").click()
    await has("Of another:", 1)
    await button(page, "Undo").click()
    await has("Of this:", 1)
    watched.check()


async def test_what_is_written_stays_where_the_tab_has_no_room_for_it(
    served: Served, page: Page, watched: Watched
) -> None:
    await page.add_init_script(
        "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }"
    )
    await page.goto(served.url)
    await ask(page, "Spell window")
    await ended(page)
    await field(page).fill("Of this:")
    await button(page, "New chat").first.click()
    await until(lambda: _is(field(page).input_value(), ""))
    listed = page.get_by_role("navigation", name="Conversations")
    await listed.get_by_role("button", name="Spell window").first.click()
    await until(lambda: _is(field(page).input_value(), "Of this:"))
    watched.check()


async def test_a_conversation_is_renamed_found_deleted_and_brought_back(served: Served, page: Page) -> None:
    await page.goto(served.url)
    for text in ("What is 17 + 25?", "Spell window"):
        await button(page, "New chat").first.click()
        await ask(page, text)
        await ended(page)
    await button(page, "More about “What is 17 + 25?”").click()
    await page.get_by_role("menuitem", name="Rename").click()
    await page.get_by_role("textbox", name="Title").fill("Sums")
    await page.keyboard.press("Enter")
    listed = page.get_by_role("navigation", name="Conversations").get_by_role("listitem")
    assert await listed.count() == 2
    search = page.get_by_role("searchbox", name="Search conversations")
    await search.fill("17 +")  # in the question, and no longer in the title
    await until(lambda: _is(listed.count(), 1))
    assert "Sums" in await listed.inner_text()
    await button(page, "More about “Sums”").click()
    await page.get_by_role("menuitem", name="Delete").click()
    await page.get_by_text("No conversation has this.").wait_for()
    await button(page, "Undo").click()
    await listed.get_by_text("Sums").wait_for()
    await page.reload()
    await listed.get_by_text("Sums").wait_for()
    assert await listed.count() == 2


async def _is(coming: object, wanted: object) -> bool:
    return await coming == wanted  # type: ignore[misc]


async def test_what_was_exported_is_imported_in_another_browser(
    served: Served, page: Page, browser: Browser, tmp_path: Path
) -> None:
    await page.goto(served.url)
    await ask(page, "Count from 1 to 10")
    text = await ended(page)
    await button(answers(page).last, "Regenerate").click()
    await answers(page).last.get_by_role("group", name="Version 2 of 2").wait_for()
    await ended(page)
    await button(page, "Import and export").click()
    async with page.expect_download() as coming:
        await page.get_by_role("menuitem", name="Export all conversations").click()
    file = tmp_path / "chats.json"
    await (await coming.value).save_as(file)
    assert json.loads(file.read_text())
    elsewhere = await browser.new_context(ignore_https_errors=True, locale="en-GB")
    other = await elsewhere.new_page()
    watched = Watched(other, served.url)
    await other.goto(served.url)
    for data, said in ((file.read_text(), "1 conversation imported."), ('{"format": 1}', "could not be imported")):
        await button(other, "Import and export").click()
        async with other.expect_file_chooser() as choosing:
            await other.get_by_role("menuitem", name="Import…").click()
        await (await choosing.value).set_files(
            {"name": "chats.json", "mimeType": "application/json", "buffer": data.encode()}
        )
        await other.get_by_text(said).wait_for()
    await button(answers(other).last, "Previous version").click()
    await other.get_by_role("group", name="Version 1 of 2").wait_for()
    assert await ended(other) == text
    watched.check()
    await elsewhere.close()


async def test_two_tabs_share_conversations_and_either_can_stop_an_answer(
    served: Served, page: Page, context: BrowserContext
) -> None:
    await until(lambda: _none(served))  # what the test before left
    await page.goto(served.url)
    second = await context.new_page()
    watched = Watched(second, served.url)
    await second.goto(served.url)
    await ask_slowly(served, page)
    await has_begun(page)
    listed = second.get_by_role("navigation", name="Conversations").get_by_role("listitem")
    await listed.get_by_role("button").first.click()
    begun = await has_begun(second)
    await until(lambda: _longer(second, begun))  # it grows there, too
    assert len(await live(served)) == 1, "and is made once"
    await button(second, "Stop").click()
    text = await ended(page)
    await until(lambda: _none(served))
    assert await ended(second) == text
    watched.check()


async def test_what_a_model_says_cannot_run_script(served: Served, page: Page, watched: Watched) -> None:
    evil = (
        "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'>\n\n"
        "[a link](javascript:window.ran=3) <a href='javascript:window.ran=4'>another</a>\n\n"
        "<svg onload='window.ran = 5'></svg><iframe srcdoc='<script>parent.ran = 6</script>'></iframe>\n\n"
        "![an image](https://elsewhere.example/seen.png)\n\n"
        "```html\n</code></pre><script>window.ran = 7</script>\n```\n\n$$\\href{javascript:window.ran=8}{x}$$\n\n"
        "The end."
    )

    async def answer(route: Route) -> None:
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "demo"}
        events = []
        for piece in (evil[:37], evil[37:]):
            choices = [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]
            events.append(f"data: {json.dumps({**chunk, 'choices': choices})}\n\n")
        choices = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
        events += [f"data: {json.dumps({**chunk, 'choices': choices})}\n\n", "data: [DONE]\n\n"]
        await route.fulfill(status=200, content_type="text/event-stream", body="".join(events))

    await page.route("**/v1/chat/completions", answer)
    await page.goto(served.url)
    await ask(page, "<img src=x onerror='window.ran = 9'>")
    await answers(page).last.get_by_text("The end.").wait_for()
    links = answers(page).last.locator("a")
    for at in range(await links.count()):
        assert "javascript" not in (await links.nth(at).get_attribute("href") or "")
        await links.nth(at).click(modifiers=["Alt"], timeout=2000)
    await page.wait_for_timeout(200)
    assert await page.evaluate("window.ran ?? 0") == 0
    assert await page.locator("article iframe, article script, article [onerror], article [onload]").count() == 0
    # Nothing was fetched of elsewhere either: `page` looks at that when the test is over.
