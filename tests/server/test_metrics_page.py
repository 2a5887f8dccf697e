"""docs/metrics.md lists what a server tells Prometheus, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from novainfer import EngineConfig
from novainfer.fsm.schedule.speculation import SpeculationStatistics
from novainfer.models import Models
from novainfer.server.processes import supervisor
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine
from tests.server.in_loop import start_in_loop

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
TYPE = re.compile(r"^# TYPE (\S+) (\w+)$", re.MULTILINE)
ONLY_WHEN_KNOWN = {("nova_queue_drain_rate", "gauge")}


async def test_the_page_lists_every_metric_with_its_kind(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = engine.statistics()
    speculation = SpeculationStatistics(3, 9, 5, [3, 1, 1])
    monkeypatch.setattr(engine, "statistics", lambda: replace(plain, speculation=speculation))
    monkeypatch.setattr(supervisor, "start_process", start_in_loop)
    server = await serve(engine, metrics_compat=True, journal=tmp_path / "journal.db", api_processes=1)
    async with httpx.AsyncClient(base_url=server.url) as client:
        told = set(TYPE.findall((await client.get("/metrics")).text))
    server = await serve(Models({"fake": EngineConfig()}, lambda config: FakeEngine()))
    async with httpx.AsyncClient(base_url=server.url) as client:
        told |= set(TYPE.findall((await client.get("/metrics")).text))
    listed = set(re.findall(r"^\| `(\S+)` \| (\w+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert listed - ONLY_WHEN_KNOWN == told - ONLY_WHEN_KNOWN
