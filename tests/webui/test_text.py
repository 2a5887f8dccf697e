"""What an answer's text becomes: lists, tables, coloured code that can be copied, and formulas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.webui.rig import Served, faults_of_access
from tests.webui.talk import answers, ask, button, ended

if TYPE_CHECKING:
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
    await page.route("**/v1/chat/completions", _answer)
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


async def _answer(route: Route) -> None:
    """`TEXT` in pieces, as the demo model has learnt no Markdown."""
    pieces = [TEXT[at : at + 40] for at in range(0, len(TEXT), 40)]
    chunks = [{"delta": {"content": piece}, "finish_reason": None} for piece in pieces]
    chunks.append({"delta": {}, "finish_reason": "stop"})
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "demo"}
    events = [json.dumps({**head, "choices": [{"index": 0, **chunk}]}) for chunk in chunks]
    body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    await route.fulfill(status=200, content_type="text/event-stream", body=body)
