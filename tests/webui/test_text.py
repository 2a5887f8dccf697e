"""What an answer's text becomes: lists, tables, coloured code that can be copied, and formulas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.webui.rig import Served, faults_of_access
from tests.webui.talk import answers, ask, button, ended

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from playwright.async_api import BrowserContext, Page, Route

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = """## Sorting

Two **steps**, one link to <https://e.example>, and $a^2 + b^2$ for $5 and $6:

1. Compare.
2. Swap.

| of | takes |
| --- | --- |
| a list | $O(n)$ |

```python
def smallest(numbers: list[int]) -> int:
    return min(numbers)  # as it is
```

$$\\frac{1}{2} \\sum_{i=1}^n i$$

The end.
"""


async def test_markdown_is_shown_and_code_is_coloured_and_copied(
    served: Served, page: Page, context: BrowserContext
) -> None:
    await context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.route("**/v1/chat/completions", _answer(TEXT))
    await page.goto(served.url)
    await ask(page, "How does one sort?")
    await ended(page)
    answer = answers(page).last
    assert await answer.get_by_role("heading", name="Sorting").count() == 1
    assert await answer.locator("ol > li").all_inner_texts() == ["Compare.", "Swap."]
    await answer.get_by_role("cell", name="a list").wait_for()
    assert await answer.get_by_role("link").get_attribute("rel") == "noopener noreferrer"
    await answer.get_by_text("for $5 and $6:").wait_for()
    await answer.locator(".hljs-keyword", has_text="def").wait_for()
    await answer.locator("math mfrac").wait_for()
    assert await answer.locator("math").count() == 3
    assert await faults_of_access(page) == []
    await button(answer, "Copy the code").click()
    await button(answer, "Copied").wait_for()
    copied = await page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("def smallest(")
    await button(answer, "Copy").click()
    assert await page.evaluate("navigator.clipboard.readText()") == TEXT


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("mark", ["- ", "> ", "1. ", "> - "])
async def test_what_is_nested_without_end_stays_in_the_window(
    served: Served, page: Page, mark: str, width: int
) -> None:
    text = "".join(f"{mark * levels}level {levels} of it\n\n" for levels in (2, 7, 30, 200)) + "The end."
    await page.set_viewport_size({"width": width, "height": 800})
    await page.route("**/v1/chat/completions", _answer(text))
    await page.goto(served.url)
    await ask(page, "How deep is it?")
    await ended(page)
    answer = answers(page).last
    for levels in (2, 7, 30, 200):
        line = answer.get_by_text(f"level {levels} of it").last
        assert await line.evaluate(WIDTH_OF_TEXT) > 60, f"{levels} levels leave a line its room"
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    assert await answer.evaluate(BEYOND) == 0


# How much of a line's text is within the window, in pixels; and how many parts of an answer reach out of it.
WIDTH_OF_TEXT = """line => {
  const range = document.createRange();
  range.selectNodeContents(line);
  const { left, right } = range.getBoundingClientRect();
  return Math.min(right, innerWidth) - left;
}"""
BEYOND = (
    "answer => [...answer.querySelectorAll('*')].filter(one => one.getBoundingClientRect().right > innerWidth).length"
)


def _answer(text: str) -> Callable[[Route], Awaitable[None]]:
    """`text` in pieces, as the demo model has learnt no Markdown."""
    pieces = [text[at : at + 40] for at in range(0, len(text), 40)]
    chunks = [{"delta": {"content": piece}, "finish_reason": None} for piece in pieces]
    chunks.append({"delta": {}, "finish_reason": "stop"})
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "demo"}
    events = [json.dumps({**head, "choices": [{"index": 0, **chunk}]}) for chunk in chunks]
    body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    return lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body)
