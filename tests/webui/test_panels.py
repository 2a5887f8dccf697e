"""The settings of a chat and what they bring: prompts, sampling, forms, tools, thoughts, and tokens one by one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.webui.rig import Served, Watched, faults_of_access
from tests.webui.talk import answers, ask, button, ended, text_of

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def _settings(page: Page, *groups: str) -> Locator:
    """The panel, open, and these groups of it."""
    await button(page, "Settings of this chat").click()
    panel = page.get_by_role("complementary", name="Settings of this chat")
    for group in groups:
        await panel.locator("summary", has_text=group).click()
    return panel


async def _last_request(page: Page, question: str) -> dict[str, object]:
    """What the page sends with `question`."""
    async with page.expect_request("**/v1/chat/completions") as coming:
        await ask(page, question)
    body: dict[str, object] = (await coming.value).post_data_json
    return body


async def test_a_system_prompt_and_sampling_are_sent_and_kept_with_their_chat(served: Served, page: Page) -> None:
    await page.goto(served.url)
    panel = await _settings(page, "Sampling", "Length and chance")
    assert await faults_of_access(page) == []
    await panel.get_by_label("System prompt").fill("You speak like a pirate.")
    for name, value in (("Temperature", "0.5"), ("Top k", "7"), ("Most tokens", "5"), ("Seed", "11")):
        await panel.get_by_label(name, exact=True).fill(value)
    await panel.get_by_label("Stop texts").fill("x\ny")
    body = await _last_request(page, "Count from 1 to 10")
    assert body["messages"][0] == {"role": "system", "content": "You speak like a pirate."}  # type: ignore[index]
    wanted = {"temperature": 0.5, "top_k": 7, "max_completion_tokens": 5, "seed": 11, "stop": ["x", "y"]}
    assert {name: body[name] for name in wanted} == wanted
    await ended(page)
    await page.get_by_text("The answer has reached its token limit.").wait_for()
    await page.reload()
    panel = await _settings(page, "Length and chance")
    assert await panel.get_by_label("Seed", exact=True).input_value() == "11"
    await button(panel, "All as by default").click()
    assert await panel.get_by_label("Seed", exact=True).input_value() == ""
    assert await panel.get_by_label("System prompt").input_value() == "You speak like a pirate."
    await button(page, "New chat").first.click()
    assert await panel.get_by_label("System prompt").input_value() == "", "another chat has its own"


async def test_an_answer_fits_the_schema_and_one_that_is_no_json_is_not_sent(served: Served, page: Page) -> None:
    await page.goto(served.url)
    panel = await _settings(page, "Form of the answer")
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    field = panel.get_by_label("JSON schema")
    await field.fill(json.dumps(schema)[:-1])
    await panel.get_by_text("It is not JSON").wait_for()
    await page.get_by_role("textbox", name="Message", exact=True).fill("What is the capital of France?")
    assert await button(page, "Send").is_disabled()
    await button(page, "The settings need mending").wait_for()
    assert await faults_of_access(page) == []
    await field.fill(json.dumps(schema))
    await button(page, "Send").click()
    answer = json.loads(await ended(page))
    assert answer["city"] in ("Paris", "Rome")
    assert answer["large"] in (True, False)


async def test_a_call_is_answered_by_hand(served: Served, page: Page) -> None:
    await page.goto(served.url)
    panel = await _settings(page, "Tools")
    await button(panel, "Add a tool").click()
    definition = panel.get_by_label("Definition (JSON)")
    await definition.fill("{")
    await panel.get_by_text("It is not JSON").wait_for()
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"name": "get_weather", "description": "The weather of a city.", "parameters": parameters}
    await definition.fill(json.dumps(tool))
    await panel.get_by_label("Calls").select_option("always")
    await ask(page, "What is the weather in Paris?")
    await ended_call(page)
    card = page.get_by_role("region", name="Call of get_weather")
    await card.get_by_text('"city": "Paris"').wait_for()
    await card.get_by_text("Waits for its result").wait_for()
    assert await faults_of_access(page) == []
    await panel.get_by_label("Calls").select_option("when the model wants to")
    await card.get_by_label("Give the result").fill('{"temperature": 21, "sky": "sunny"}')
    await button(card, "Send the result").click()
    await card.get_by_text("Answered").wait_for()
    assert "21" in await ended(page, 2)
    await page.reload()
    await page.get_by_role("region", name="Call of get_weather").get_by_text("Answered").wait_for()


async def ended_call(page: Page) -> None:
    """The last answer has ended, with calls and perhaps no text."""
    await page.locator('article[aria-label="Assistant"][aria-busy="false"]').last.wait_for()


async def test_the_calculator_answers_by_itself(served: Served, page: Page) -> None:
    await page.goto(served.url)
    panel = await _settings(page, "Tools")
    await button(panel, "Add the calculator").click()
    await ask(page, "What is 17 * 24?")
    card = page.get_by_role("region", name="Call of calculate")
    await card.get_by_text("Answered").wait_for()
    await card.get_by_text("408", exact=True).wait_for()
    assert "408" in await ended(page, 2)


async def test_thoughts_are_folded_away(served: Served, page: Page) -> None:
    await page.goto(served.url)
    panel = await _settings(page)
    await panel.get_by_label("Thinking").select_option("Think before answering")
    await ask(page, "What is the capital of France?")
    await page.locator('article[aria-label="Assistant"][aria-busy="false"]').wait_for()
    fold = answers(page).last.locator("details")
    await fold.locator("summary", has_text="Thought").wait_for()
    thoughts = fold.locator(".thoughts")
    assert not await thoughts.is_visible()
    await fold.locator("summary").click()
    await thoughts.wait_for()
    assert (await thoughts.inner_text()).strip()
    assert await faults_of_access(page) == []
    await answers(page).last.get_by_text("Paris").first.wait_for()
    await page.reload()
    await answers(page).last.locator("summary", has_text="Thought").wait_for()


async def test_an_answer_is_read_token_by_token(served: Served, page: Page, watched: Watched) -> None:
    await page.goto(served.url)
    panel = await _settings(page, "Insight")
    await panel.get_by_label("Log probabilities").check(force=True)
    await ask(page, "What is the capital of France?")
    text = await ended(page)
    await button(answers(page).last, "Token by token").click()
    tokens = page.get_by_role("toolbar", name="Tokens with their probabilities").get_by_role("button")
    said = "".join([await one.inner_text() for one in await tokens.all()])
    assert said.startswith(text)  # and behind it the token that ends it
    assert await faults_of_access(page) == []
    await tokens.first.focus()
    shown = answers(page).last.get_by_role("status").filter(has_text="Instead of it")
    await shown.wait_for()
    first = await shown.inner_text()
    assert "%" in first
    await page.keyboard.press("ArrowRight")
    assert await tokens.nth(1).evaluate("one => one === document.activeElement")
    assert await shown.inner_text() != first
    await page.keyboard.press("Escape")
    await shown.wait_for(state="detached")
    await button(answers(page).last, "Back to the text").click()
    assert await text_of(answers(page).last) == text
