"""Writes the tree in docs/architecture.md: one line for each source file, the first of its docstring.

python docs/tree.py            # write it
python docs/tree.py --check    # exit code 1 when it is out of date
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
ROOMS = ("fsm", "actors", "kernels", "api", "server")
HEADING = "## The tree\n"


def tree() -> str:
    """The section's text, from the files as they are."""
    lines = [HEADING, "Each line is the first sentence of the file itself (`make docs` writes this section)."]
    for room in ROOMS:
        lines += ["", f"### {room}/", "", "| file | what it is |", "| --- | --- |"]
        files = [p for p in (ROOT / room).rglob("*") if p.suffix in {".py", ".cpp", ".h"} and _is_source(p)]
        for path in sorted(files, key=lambda p: (p.parent != ROOT / room, p)):
            name = path.relative_to(ROOT).as_posix()
            lines.append(f"| [`{name}`](../{name}) | {_first_line(path)} |")
    return "\n".join(lines) + "\n"


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and path.stat().st_size > 0


def _first_line(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = text.lstrip("/* \n")
    line = text.strip().split("\n\n")[0].replace("\n", " ").replace("// ", "")
    sentence = line.split(". ")[0].rstrip(".:")
    return sentence.replace("|", "\\|")


def page() -> str:
    """The whole page with its tree written anew."""
    text = PAGE.read_text(encoding="utf-8")
    return text[: text.index(HEADING)] + tree()


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(page() != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page(), encoding="utf-8")
