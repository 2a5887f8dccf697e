"""The docs say what is so: generated pages are in sync, code in the README runs, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_tree_in_the_architecture_page_is_that_of_the_files() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "tree.py"), "--check"], check=False)
    assert done.returncode == 0, "docs/architecture.md is out of date: run `make docs`"


def test_the_reference_is_that_of_the_records_and_flags() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "reference.py"), "--check"], check=False)
    assert done.returncode == 0, "docs/reference.md is out of date: run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_and_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to {missing}"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md"])
def test_the_python_of_the_page_runs(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip(), "the example prints an answer"
