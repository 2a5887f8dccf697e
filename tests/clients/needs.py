"""What a test needs of `make clients`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.clients.environments import asked_for, is_made


def environment(name: str) -> pytest.MarkDecorator:
    """Skips what has no environment. Where a run is about some of them (`NOVAINFER_CLIENTS`), these must be there."""
    is_skipped = not asked_for() and not is_made(name)
    return pytest.mark.skipif(is_skipped, reason=f"there is no environment of {name}: `make clients` makes it")


def each(names: Iterable[str]) -> list[Any]:
    """Each of them as a parameter, or each that this run is about."""
    asked = asked_for()
    return [pytest.param(name, marks=environment(name)) for name in names if not asked or name in asked]
