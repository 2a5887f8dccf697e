"""Every example of docs/library.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
PARTS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
EXAMPLES = [(title, code) for title, text in PARTS for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)]


def test_the_page_has_an_example_in_each_part() -> None:
    assert len(EXAMPLES) == len(PARTS) >= 8


@pytest.mark.slow
@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_the_example_runs(title: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, f"{PAGE.name}: {title}", "exec"), {"__name__": "__main__"})
    print(capsys.readouterr().out)
