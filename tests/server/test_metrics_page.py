"""docs/metrics.md lists what a server tells Prometheus, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from novainfer.fsm.schedule.speculation import SpeculationStatistics
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ONLY_WHEN_KNOWN = {("nova_queue_drain_rate", "gauge")}


async def test_the_page_lists_every_metric_with_its_kind(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = engine.statistics()
    speculation = SpeculationStatistics(3, 9, 5, [3, 1, 1])
    monkeypatch.setattr(engine, "statistics", lambda: replace(plain, speculation=speculation))
    server = await serve(engine, metrics_compat=True)
    async with httpx.AsyncClient(base_url=server.url) as client:
        told = set(re.findall(r"^# TYPE (\S+) (\w+)$", (await client.get("/metrics")).text, re.MULTILINE))
    listed = set(re.findall(r"^\| `(\S+)` \| (\w+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert listed - ONLY_WHEN_KNOWN == told - ONLY_WHEN_KNOWN
