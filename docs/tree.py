"""Writes the tree in docs/architecture.md: by folder, one line for each source file, the first of its docstring.

python docs/tree.py            # write it
python docs/tree.py --check    # exit code 1 when it is out of date
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
ROOMS = ("fsm", "actors", "kernels", "api", "server", "bench", "tools")
HEADING = "## The tree\n"


def tree() -> str:
    """The section's text, from the files as they are."""
    lines = [HEADING, "Each line is the first sentence of the file itself (`make docs` writes this section)."]
    for room in ROOMS:
        files = [p for p in (ROOT / room).rglob("*") if p.suffix in {".py", ".cpp", ".h"} and _is_source(p)]
        for folder in sorted({path.parent for path in files}):
            name = folder.relative_to(ROOT).as_posix()
            lines += ["", f"### {name}/", "", f"{_sentence(folder / '__init__.py')}.", ""]
            mine = sorted(path for path in files if path.parent == folder and path.name != "__init__.py")
            if mine:
                lines += ["| file | what it is |", "| --- | --- |"]
            lines += [f"| [`{path.name}`](../{name}/{path.name}) | {_sentence(path)} |" for path in mine]
    return "\n".join(lines) + "\n"


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and path.stat().st_size > 0


def _sentence(path: Path) -> str:
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
