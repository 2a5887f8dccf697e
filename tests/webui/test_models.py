"""Several models behind a key: the chat asks one of them, and the inspector watches the one that is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.webui.rig import ROOT, Served, Watched, faults_of_access
from tests.webui.talk import ADMIN, ADMIN_KEY, answers, ask, button

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO = ROOT / "kernels" / "demo" / "model"
FLAGS = (
    "--api-key",
    "alice",
    "--admin-key",
    ADMIN_KEY,
    "--model",
    f"first={DEMO}",
    "--model",
    f"second={DEMO}",
    "--max-loaded-models",
    "2",
)
NO_KEY = r"status of 401"


async def test_a_question_that_was_asked_without_a_key_goes_to_a_model_when_there_is_one(
    served: Served, page: Page, watched: Watched
) -> None:
    watched.allow(NO_KEY)
    await page.goto(served.url)
    await ask(page, "What is the capital of France?")
    await page.get_by_role("main").get_by_label("API key").fill(ADMIN_KEY)
    await button(page, "Use this key").click()
    await answers(page).last.get_by_text("Paris").first.wait_for()  # before, it is the question for a key


async def test_the_inspector_watches_the_model_that_is_chosen(served: Served, page: Page, watched: Watched) -> None:
    watched.allow(NO_KEY)
    async with served.api(headers=ADMIN) as api:
        for model in ("first", "second"):  # both are loaded now: a server has to be told which one is meant
            asked = {"model": model, "prompt": "Once", "max_tokens": 5}
            (await api.post("/v1/completions", json=asked, headers={"x-request-id": f"of-{model}"})).raise_for_status()
    await page.goto(f"{served.url}/inspector#requests")
    await page.get_by_role("main").get_by_label("API key").fill(ADMIN_KEY)
    await button(page.get_by_role("main"), "Use").click()
    await page.get_by_text("of-first").wait_for()
    assert await page.get_by_text("of-second").count() == 0
    await page.get_by_label("Model", exact=True).select_option("second")
    await page.get_by_text("of-second").wait_for()
    assert await page.get_by_text("of-first").count() == 0
    assert await faults_of_access(page) == []
    await page.reload()
    await page.get_by_text("of-second").wait_for()
    assert await page.get_by_label("Model", exact=True).input_value() == "second"
    await page.keyboard.press("6")
    async with page.expect_response(lambda response: "/v1/recorder/dump" in response.url) as dumped:
        await button(page, "Dump the recorder").click()
    assert (await dumped.value).ok
