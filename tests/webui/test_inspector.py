"""Each view of the inspector while 32 requests run, and what it shows is what the API says."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.webui.rig import TIMEOUT_MS, Served, Watched, faults_of_access, shoot
from tests.webui.sight import (
    NUM_REQUESTS,
    VIEWS,
    figure,
    first,
    last_step,
    number,
    one_more,
    open_inspector,
    requests,
    running,
    told,
    view,
)
from tests.webui.talk import ADMIN_KEY, button, until

if TYPE_CHECKING:
    from playwright.async_api import Browser, Locator, Page

pytestmark = pytest.mark.asyncio(loop_scope="module")
FLAGS = ("--admin-key", ADMIN_KEY)
WRITING = {"DECODE", "PAUSED"}  # the second while its reader, this busy process, has enough to read


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def looking(browser: Browser, served: Served) -> AsyncIterator[Page]:
    """One page for all tests here, which are about what it shows while 32 requests run."""
    context = await browser.new_context(ignore_https_errors=True, locale="en-GB")
    context.set_default_timeout(TIMEOUT_MS)
    page = await context.new_page()
    watched = Watched(page, served.url)
    async with running(served):
        await open_inspector(page, served)
        yield page
    await context.close()
    watched.allow("403")  # of what only an admin key may do
    watched.check()


async def counted(machine: Locator, arrow: str) -> float:
    """How often an arrow was taken, as it is read out."""
    said = await machine.get_by_role("button", name=re.compile(f"^{arrow}:")).get_attribute("aria-label")
    return number(str(said).rpartition("taken ")[2])


async def test_the_head_says_what_runs(looking: Page) -> None:
    async def is_said() -> bool:
        return await figure(looking, "running") == NUM_REQUESTS and await figure(looking, "tokens/s") > 0

    await until(is_said)
    assert await figure(looking, "waiting") == 0


async def test_machines_light_up_and_count_and_an_arrow_tells_its_last_times(looking: Page, served: Served) -> None:
    main = await view(looking, "machines")
    tables = (await told(served, "/v1/machines"))["data"]
    assert await main.locator("h2").all_text_contents() == [table["name"] for table in tables]
    request = main.locator("#machine-Request")
    await request.get_by_role("img", name=f"DECODE: {NUM_REQUESTS}").wait_for()
    await request.get_by_text(f"{NUM_REQUESTS} now").wait_for()
    engine = main.locator("#machine-Engine")
    before = await counted(engine, "AHEAD to WAITING_WORKER")
    assert before > 0

    async def is_more() -> bool:
        return await counted(engine, "AHEAD to WAITING_WORKER") > before + 3

    await until(is_more)
    await one_more(served)  # the others were there before anybody looked
    arrow = request.get_by_role("button", name=re.compile("^PREFILL to DECODE:"))
    await arrow.focus()
    await arrow.press("Enter")
    panel = main.get_by_role("region", name="PREFILL → DECODE")
    times = panel.get_by_role("button", name=re.compile("^cmpl-"))
    await times.first.wait_for()
    ids = {one["id"] for one in await requests(served)}
    assert await times.count() <= 100
    assert set(await times.all_inner_texts()) <= ids
    before = number(await panel.locator("ul b").inner_text())
    await one_more(served)
    await panel.locator("ul b", has_text=re.compile(f"^(?!{before:,.0f}$)")).wait_for()
    await panel.get_by_role("button", name="Close").click()
    await panel.wait_for(state="detached")
    assert await arrow.get_attribute("aria-pressed") == "false"


async def test_actors_are_those_of_the_api_and_none_is_late(looking: Page, served: Served) -> None:
    main = await view(looking, "actors")
    actors = (await told(served, "/v1/actors"))["data"]
    assert await main.get_by_role("heading", level=2).all_inner_texts() == [actor["name"] for actor in actors]
    worker = main.get_by_role("listitem").filter(has_text="worker-0")
    await worker.get_by_text("of 1 min 0 s").wait_for()  # a step's own deadline
    assert await main.locator(".late").count() == 0
    assert f"process\n{actors[2]['pid']}" in await worker.inner_text()

    async def handled() -> float:
        return number((await worker.inner_text()).partition("messages handled")[2])

    before = await handled()

    async def is_more() -> bool:
        return await handled() > before

    await until(is_more)


async def test_requests_are_sorted_filtered_and_opened(looking: Page, served: Served) -> None:
    main = await view(looking, "requests")
    rows = main.locator("tbody tr:not(.room)")
    state = main.get_by_role("combobox", name="State")
    await state.select_option("live ones")
    await main.get_by_text(re.compile(rf"^{NUM_REQUESTS} of \d+ requests")).wait_for()
    assert set(await rows.locator("td:nth-child(2)").all_inner_texts()) <= WRITING
    id_ = await rows.locator("td:first-child").first.inner_text()
    row = rows.filter(has=looking.get_by_role("button", name=f"Open {id_}", exact=True))
    (of_api,) = (one for one in await requests(served) if one["id"] == id_)

    async def has_caught_up() -> bool:
        _, prompt, cached, output, blocks = map(number, await row.locator("td.number").all_inner_texts())
        assert (prompt, cached) == (of_api["prompt_tokens"], of_api["cached_tokens"])
        return output >= of_api["generated_tokens"] and blocks >= of_api["blocks"] > 0

    await until(has_caught_up)
    await main.get_by_role("columnheader", name="Request").get_by_role("button").click()
    shown = await rows.locator("td:first-child").all_inner_texts()
    assert shown == sorted(shown)
    await main.get_by_role("columnheader", name="Request").get_by_role("button").click()
    assert await main.get_by_role("columnheader", name="Request").get_attribute("aria-sort") == "descending"
    assert (await rows.locator("td:first-child").first.inner_text()) > shown[0]
    await main.get_by_role("searchbox", name="Find").fill(f"{shown[0]}x")
    await main.get_by_text("None of them matches.").wait_for()
    await main.get_by_role("searchbox", name="Find").fill(shown[0])
    await rows.get_by_role("button", name=f"Open {shown[0]}", exact=True).click()
    detail = main.get_by_role("region", name=shown[0])
    states = detail.locator("tbody td:first-child")
    await states.nth(2).wait_for()
    shown_states = await states.all_inner_texts()
    assert shown_states[:3] == ["WAITING", "PREFILL", "DECODE"]
    assert set(shown_states[3:]) <= WRITING
    assert await detail.locator("svg rect").count() >= len(shown_states)
    assert looking.url.endswith(f"#requests/{shown[0]}")
    await looking.keyboard.press("Escape")
    await button(detail, "Close").click()
    await main.get_by_role("searchbox", name="Find").fill("")
    await state.select_option("any")


async def test_the_map_has_blocks_by_owner_and_shared_prefixes_as_the_api_counts_them(
    looking: Page, served: Served
) -> None:
    main = await view(looking, "kv")
    snapshot = await first(served)
    assert f"{snapshot['kv']['total']:,} blocks of {snapshot['kv']['block_size']} tokens" in await main.inner_text()

    async def legend() -> dict[str, float]:
        rows = await main.locator("tbody tr").all_inner_texts()
        return {row.split("\t")[0].strip(): number(row.split("\t")[1]) for row in rows}

    async def agrees() -> bool:
        api = {one["state"]: one["blocks"] for one in (await told(served, "/v1/kv"))["data"]}
        shown = await legend()
        # Each was asked at another moment: a step may have come between.
        return all(
            abs(shown.get(name.upper(), 0) - api.get(name, 0)) <= NUM_REQUESTS for name in ("free", "cached", "DECODE")
        )

    await until(agrees)
    shown = await legend()
    assert shown["DECODE"] >= NUM_REQUESTS
    assert shown["with several readers"] >= 8
    grid = main.get_by_role("slider", name="Map of KV blocks")
    await grid.focus()
    said = set()
    for _ in range(12):
        await looking.keyboard.press("ArrowRight")
        said.add(str(await grid.get_attribute("aria-valuetext")))
    assert any(re.search(rf"DECODE, {NUM_REQUESTS} readers$", text) for text in said), said
    assert len(await colours(grid)) > 3


async def colours(canvas: Locator) -> list[int]:
    """The colours of a canvas of which there is more than the edge of a letter."""
    found = await canvas.evaluate(
        """(canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const counts = new Map();
            for (const one of new Uint32Array(data.buffer)) counts.set(one, (counts.get(one) ?? 0) + 1);
            return [...counts].filter(([, count]) => count > 20).map(([colour]) => colour);
        }"""
    )
    return list(found)


async def test_steps_have_bars_and_percentiles(looking: Page, served: Served) -> None:
    main = await view(looking, "steps")
    flame = main.locator("canvas").first
    await until(lambda: _has_bars(flame))
    await main.get_by_text(f"{NUM_REQUESTS} sequences").wait_for()
    phases = main.locator("tbody tr")
    assert [row.split("\t")[0].strip() for row in await phases.all_inner_texts()] == [
        "schedule",
        "kernel",
        "sample",
        "detokenise",
        "send",
    ]
    kernel = await phases.nth(1).locator("td.number").all_inner_texts()
    assert all(text.endswith(("ms", "s")) and number(text) > 0 for text in kernel), "a step takes 50 ms and more"
    await one_more(served)  # the first tokens of the others may be longer ago than is told
    for title in ("Time to first token", "Between tokens"):
        figures = main.get_by_role("figure").filter(has_text=title).locator("p span")
        await figures.nth(2).wait_for()
        assert [text.split()[0] for text in await figures.all_inner_texts()] == ["p50", "p95", "p99"]
        assert all(number(text) > 0 for text in await figures.locator("b").all_inner_texts())
    await button(main, "Freeze").click()
    frozen = await flame.evaluate("(canvas) => canvas.toDataURL()")
    before = await last_step(served)

    async def has_gone_on() -> bool:
        return await last_step(served) > before + 10

    await until(has_gone_on)
    assert await flame.evaluate("(canvas) => canvas.toDataURL()") == frozen
    await button(main, "Go on").click()


async def _has_bars(flame: Locator) -> bool:
    return len(await colours(flame)) > 5


async def test_axe_finds_nothing_serious_in_any_view(looking: Page, served: Served) -> None:
    """Light over one protocol and dark over the other: both in all views, in half the time."""
    scheme: Any = "dark" if served.url.startswith("https") else "light"
    await looking.emulate_media(color_scheme=scheme)
    for name in VIEWS:
        main = await view(looking, name)
        await main.locator("h2, table").first.wait_for()
        if name == "requests":
            await main.locator("tbody button").first.click()
            await main.locator(".detail tbody td").first.wait_for()
        assert await faults_of_access(looking) == [], name
        await shoot(looking, f"inspector-{name}-{scheme}")


async def test_without_a_key_nothing_can_be_injected(looking: Page) -> None:
    main = await view(looking, "faults")
    await main.get_by_text("Drills need the server's admin key").wait_for()
    assert await main.get_by_role("button").all_inner_texts() == ["Dump the recorder"]
    await button(main, "Dump the recorder").click()
    await main.get_by_role("status").get_by_text("admin").wait_for()
