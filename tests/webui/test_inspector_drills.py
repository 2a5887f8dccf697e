"""The inspector where the server has keys: who sees what, the demo, and what is seen when something fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.webui.rig import TIMEOUT_MS, Served, Watched, faults_of_access
from tests.webui.sight import (
    NUM_REQUESTS,
    figure,
    is_live,
    number,
    one_more,
    open_inspector,
    relayed,
    requests,
    running,
    told,
    view,
)
from tests.webui.talk import ADMIN_KEY, button, until

if TYPE_CHECKING:
    from playwright.async_api import Browser, Locator, Page

pytestmark = pytest.mark.asyncio(loop_scope="module")
FLAGS = ("--api-key", "alice", "--admin-key", ADMIN_KEY, "--recorder-dir", "{folder}")
GOING_ON = {"RECOVERING", "PREFILL", "WAITING", "DECODE", "PAUSED", "FINISHED_LENGTH"}


async def test_a_key_is_asked_for_and_one_that_is_wrong_is_asked_for_again(
    served: Served, page: Page, watched: Watched
) -> None:
    watched.allow("401")
    await page.goto(f"{served.url}/inspector")
    field = page.get_by_role("main").get_by_label("API key")
    await field.wait_for()
    assert await faults_of_access(page) == []
    for key, status in (("nobody's", 401), ("alice", 200)):
        await page.get_by_role("alert").get_by_text("key needed").wait_for()
        await field.fill(key)
        async with page.expect_response("**/v1/inspector") as answer:
            await field.press("Enter")
        assert (await answer.value).status == status
    await is_live(page)
    assert await page.get_by_role("alert").count() == 0
    main = await view(page, "faults")
    assert await main.get_by_role("button").all_inner_texts() == ["Dump the recorder"]
    await page.reload()
    await is_live(page)  # the key is kept for this tab


async def test_the_demo_makes_everything_move_and_stops(served: Served, page: Page) -> None:
    await open_inspector(page, served, ADMIN_KEY)
    main = await view(page, "requests")
    await button(page, "Demo").click()

    async def runs() -> bool:
        return await figure(page, "running") >= 8

    await until(runs)
    await page.get_by_role("banner").get_by_text("chats done").wait_for()
    kinds = main.locator("tbody tr:not(.room) td:first-child")
    await until(lambda: _has_both(kinds))
    stop = page.get_by_role("button", name="Stop")
    await stop.click()
    await button(page, "Demo").wait_for()

    async def has_stopped() -> bool:
        return await figure(page, "running") == 0

    await until(has_stopped)
    assert not [one for one in await requests(served) if not one["state"].startswith("FINISHED")]


async def _has_both(ids: Locator) -> bool:
    """Chats and lists of texts."""
    found = await ids.all_inner_texts()
    return any(id_.startswith("chatcmpl-demo-") for id_ in found) and any(id_.startswith("cmpl-demo-") for id_ in found)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drilling(browser: Browser, served: Served) -> AsyncIterator[Page]:
    """One page with the admin key for the drills below, while 32 requests run."""
    context = await browser.new_context(ignore_https_errors=True, locale="en-GB")
    context.set_default_timeout(TIMEOUT_MS)
    page = await context.new_page()
    watched = Watched(page, served.url)
    async with running(served):
        await open_inspector(page, served, ADMIN_KEY)
        yield page
    await context.close()
    watched.check()


async def drill(page: Page, name: str) -> Locator:
    """Inject by the button, which asks whether it is meant; what the list of incidents has then first."""
    main = await view(page, "faults")
    before = await main.locator("ol > li").count()
    await button(main, name).click()
    await button(main, "No").click()
    await button(main, name).click()
    await button(main, "Yes").click()
    await main.get_by_role("status").get_by_text("Injected").wait_for()
    await main.locator("ol > li").nth(before).wait_for()
    return main.locator("ol > li").first


async def test_an_oom_is_shown_with_what_was_done_and_whom_it_touched(drilling: Page, served: Served) -> None:
    incident = await drill(drilling, "Out of memory")
    ids = {one["id"] for one in await requests(served)}
    (of_api,) = (await told(served, "/v1/errors"))["data"]
    assert of_api["message"] in await incident.inner_text()
    assert of_api["action"] in await incident.inner_text()
    touched = incident.get_by_role("button")
    assert set(await touched.all_inner_texts()) == set(of_api["requests"]) <= ids
    assert await touched.count() > 0
    assert await faults_of_access(drilling) == []
    await touched.first.click()
    await drilling.get_by_role("region", name=of_api["requests"][0]).locator("tbody td").first.wait_for()


async def test_requests_go_on_when_the_worker_is_killed_and_its_restart_is_counted(
    drilling: Page, served: Served
) -> None:
    pid = served.worker()
    incident = await drill(drilling, "Kill the worker")
    assert await incident.get_by_role("button").count() == NUM_REQUESTS
    main = await view(drilling, "actors")
    worker = main.get_by_role("listitem").filter(has_text="worker-0")
    await worker.locator(".bad", has_text="restarts").get_by_text("1", exact=True).wait_for()

    async def is_another() -> bool:
        return str(pid) not in await worker.inner_text() and "RUNNING" in await worker.inner_text()

    await until(is_another)
    touched = set((await told(served, "/v1/errors"))["data"][-1]["requests"])
    tokens = {one["id"]: one["generated_tokens"] for one in await requests(served) if one["id"] in touched}
    assert len(tokens) == NUM_REQUESTS, "none was forgotten"
    main = await view(drilling, "requests")
    await main.get_by_role("searchbox", name="Find").fill(min(tokens).rpartition("-")[0])
    rows = main.locator("tbody tr:not(.room)")

    async def go_on() -> bool:
        """Or have come to their end, as they would have without the fault."""
        cells = [await row.locator("td").all_inner_texts() for row in await rows.all()]
        assert {cell[1].strip() for cell in cells} <= GOING_ON
        return len(cells) >= 10 and all(number(cell[7]) > tokens[cell[0].strip()] for cell in cells)

    await until(go_on)


async def test_the_recorder_is_dumped(drilling: Page) -> None:
    main = await view(drilling, "faults")
    await button(main, "Dump the recorder").click()
    await main.get_by_role("status").get_by_text("Written on the server").wait_for()


async def test_the_feed_comes_back_by_itself_after_its_connection_was_lost(
    served: Served, page: Page, watched: Watched
) -> None:
    async with relayed(served) as relay:
        watched.host = relay.host
        watched.allow("net::ERR_")  # each try while there is no connection
        await page.add_init_script(f"sessionStorage.setItem('novainfer.key', '{ADMIN_KEY}')")
        await page.goto(f"{relay.url}/inspector#actors")
        await is_live(page)
        await relay.cut()
        await page.get_by_role("alert").get_by_text("connection lost").wait_for()
        worker = page.get_by_role("main").get_by_role("heading", name="worker-0")
        assert await worker.is_visible(), "what was known stays"
        await relay.open()
        await is_live(page)
        assert await page.get_by_role("alert").count() == 0
        before = await handled(page)

        async def is_more() -> bool:
            await one_more(served)
            return await handled(page) > before

        await until(is_more)


async def handled(page: Page) -> float:
    """How many messages the worker has handled."""
    worker = page.get_by_role("main").get_by_role("listitem").filter(has_text="worker-0")
    return number((await worker.inner_text()).partition("messages handled")[2])
