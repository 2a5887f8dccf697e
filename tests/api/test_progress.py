"""Progress bars show at a terminal, count what was loaded, and leave no thread."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from novainfer.progress import LoadingBar


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_loading_is_shown_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = LoadingBar()
    for num_done in range(1, 4):
        bar(num_done, 3)
    assert "loading" in terminal.getvalue()


def test_nothing_is_written_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    threads = threading.active_count()
    bar = LoadingBar()
    bar(1, 2)
    bar(2, 2)
    assert file.getvalue() == ""
    assert threading.active_count() == threads
