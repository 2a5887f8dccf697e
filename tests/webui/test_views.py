"""The chat on a phone, in the dark, by the keyboard alone, and in Chinese; pictures of it for docs/webui/."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.webui.rig import ONE_SEED, Served, Watched, faults_of_access, shoot
from tests.webui.talk import STORY, answers, ask, button, ended, field

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

pytestmark = pytest.mark.asyncio(loop_scope="module")
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
DESKTOP = {"viewport": {"width": 1280, "height": 800}}


async def _opened(browser: Browser, served: Served, **how: object) -> Page:
    """A tab of another profile, such as a phone's."""
    options = {"ignore_https_errors": True, "locale": "en-GB", **how}
    context = await browser.new_context(**options)  # type: ignore[arg-type]
    await context.add_init_script(ONE_SEED)
    page = await context.new_page()
    page.watched = Watched(page, served.url)  # type: ignore[attr-defined]
    await page.goto(served.url)
    return page


async def _converse(page: Page) -> None:
    """What there is to see: a few chats, and one with several answers."""
    for question in ("Spell the word nova", "What is 17 + 25?"):
        await ask(page, question)
        await ended(page)
        await page.keyboard.press("Control+Shift+O")
        await page.get_by_text("What would you like to know?").wait_for()
    for at, question in enumerate(("What is the capital of France?", "And Peru?", STORY), 1):
        await ask(page, question)
        await ended(page, at)


async def _fits(page: Page) -> bool:
    """Nothing is wider than the window."""
    fits: bool = await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    return fits


async def _close(page: Page) -> None:
    page.watched.check()  # type: ignore[attr-defined]
    await page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_conversation_is_read_in_light_and_in_dark(served: Served, browser: Browser, scheme: str) -> None:
    page = await _opened(browser, served, color_scheme=scheme, **DESKTOP)
    await _converse(page)
    ground = await page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (ground == "rgb(25, 24, 22)") == (scheme == "dark")
    assert await faults_of_access(page) == []
    await shoot(page, f"chat-{scheme}")
    other = {"light": "Dark", "dark": "Light"}[scheme]
    await button(page, "Colours").click()
    await page.get_by_role("menuitemradio", name=other).click()
    assert await page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != ground
    await page.reload()  # and stays so
    assert await page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != ground
    await _close(page)


async def test_a_phone_shows_one_thing_at_a_time(served: Served, browser: Browser) -> None:
    page = await _opened(browser, served, **PHONE)
    await ask(page, "What is the capital of France?")
    await ended(page)
    await button(page, "New chat").tap()
    for at, question in enumerate(("What is 17 + 25?", STORY), 1):
        await field(page).fill(question)
        await button(page, "Send").tap()
        await ended(page, at)
    assert await _fits(page)
    assert await faults_of_access(page) == []
    await shoot(page, "chat-phone")
    await button(page, "Show conversations").tap()
    listed = page.get_by_role("navigation", name="Conversations").get_by_role("listitem")
    await listed.first.wait_for()
    assert await _fits(page)
    assert await faults_of_access(page) == []
    await listed.get_by_text("What is the capital of France?").tap()
    await answers(page).last.get_by_text("Paris").wait_for()
    await page.get_by_role("navigation", name="Conversations").wait_for(state="detached")
    await button(page, "Settings of this chat").tap()
    panel = page.get_by_role("complementary", name="Settings of this chat")
    await panel.wait_for()
    assert await _fits(page)
    assert await faults_of_access(page) == []
    await button(panel, "Close").tap()
    await panel.wait_for(state="detached")
    await _close(page)


async def test_everything_is_reached_by_the_keyboard(served: Served, page: Page) -> None:
    await page.goto(served.url)
    await field(page).wait_for()
    await page.keyboard.type("What is 17 + 25?")  # the field has the focus
    await page.keyboard.press("Enter")
    await ended(page)
    await page.keyboard.press("Control+,")
    panel = page.get_by_role("complementary", name="Settings of this chat")
    await panel.wait_for()
    await page.keyboard.press("Control+,")
    await panel.wait_for(state="detached")
    await page.keyboard.press("Shift+Tab")
    await _walk_to(page, "Regenerate", "Shift+Tab")
    await page.keyboard.press("Enter")
    await page.get_by_role("group", name="Version 2 of 2").wait_for()
    await ended(page)
    await page.keyboard.press("Control+Shift+O")
    await page.get_by_text("What would you like to know?").wait_for()
    await page.keyboard.press("Control+k")
    await page.keyboard.type("no such thing")
    await page.get_by_text("No conversation has this.").wait_for()
    await page.keyboard.press("Escape")  # back to the field
    await page.keyboard.type("?")
    assert await field(page).input_value() == "?"
    await page.keyboard.press("Backspace")
    await _walk_to(page, "Keyboard", "Shift+Tab")
    await page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    await dialog.wait_for()
    assert await faults_of_access(page) == []
    await page.keyboard.press("Escape")
    await dialog.wait_for(state="detached")
    await _walk_to(page, "More about “What is 17 + 25?”", "Shift+Tab")
    await page.keyboard.press("Enter")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("ArrowDown")
    assert await page.evaluate("document.activeElement.textContent.trim()") == "Delete"
    await page.keyboard.press("Enter")
    await button(page, "Undo").wait_for()


async def _walk_to(page: Page, name: str, key: str) -> None:
    """Press `key` until the control of this name has the focus."""
    for _ in range(40):
        if await page.evaluate("document.activeElement.getAttribute('aria-label')") == name:
            return
        await page.keyboard.press(key)
    pytest.fail(f"{key} does not come to {name!r}")


async def test_the_page_speaks_chinese_where_its_reader_does(served: Served, browser: Browser) -> None:
    page = await _opened(browser, served, locale="zh-CN")
    await page.get_by_text("想了解什么？").wait_for()
    assert await page.evaluate("document.documentElement.lang") == "zh-Hans"
    message = page.get_by_role("textbox", name="消息", exact=True)
    await message.fill("Repeat after me: 你好")
    await message.press("Enter")
    answer = page.get_by_role("article", name="助手")
    await answer.get_by_text("你好").wait_for()
    await answer.get_by_role("list").get_by_text("词元/秒").wait_for()
    await button(page, "本对话的设置").click()
    assert await faults_of_access(page) == []
    await button(page, "语言").click()
    await page.get_by_role("menuitemradio", name="English").click()
    await field(page).wait_for()
    await page.reload()
    await field(page).wait_for()
    await _close(page)
