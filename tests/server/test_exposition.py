"""Prometheus' text as its own client reads it: every line, every label, whatever stands in a label."""

from __future__ import annotations

import math

import httpx
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from novainfer.actors.inspection.times import Histogram
from novainfer.server.operate import exposition, scrape
from novainfer.server.operate.exposition import COUNTER, GAUGE, Family, HistogramFamily, SummaryFamily
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine

Sample = tuple[str, dict[str, str], float]


def read(text: str) -> dict[str, list[Sample]]:
    return {
        family.name: [(sample.name, dict(sample.labels), float(sample.value)) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }


def test_numbers_and_labels_are_read_as_they_were_written() -> None:
    family = Family("a_total", COUNTER, "What a is", "one", "two")
    odd = 'a "quoted" \\ back\nslash'
    assert read(family.each({("x", 2): 3, (odd, "é"): 0.5})) == {
        "a": [("a_total", {"one": odd, "two": "é"}, 0.5), ("a_total", {"one": "x", "two": "2"}, 3.0)]
    }
    assert read(Family("b", GAUGE, "What b is").one(1e-7)) == {"b": [("b", {}, 1e-7)]}
    assert read(Family("c", GAUGE, "What c is", "state").each({"RUNNING": 2})) == {
        "c": [("c", {"state": "RUNNING"}, 2)]
    }
    assert Family("d", GAUGE, "What d is", "x").each({}) == "# HELP d What d is\n# TYPE d gauge\n"


def test_a_histogram_counts_up_to_all() -> None:
    histogram = Histogram((0.5, 1, 10))
    for value, times in ((0.25, 2), (1.0, 1), (3.0, 4), (99.0, 1)):
        histogram.observe(value, times)
    family = HistogramFamily("h", "What h is", "model_name")
    for _ in range(2):
        [samples] = read(family.one(histogram, "demo")).values()
        buckets = {labels["le"]: value for name, labels, value in samples if name == "h_bucket"}
        assert buckets == {"0.5": 2, "1.0": 3, "10.0": 7, "+Inf": 8}
        others = {name: value for name, _, value in samples if name != "h_bucket"}
        assert others == {"h_count": 8, "h_sum": pytest.approx(0.5 + 1 + 12 + 99)}
        assert {labels["model_name"] for _, labels, _ in samples} == {"demo"}


def test_a_summary_has_a_sum_and_a_count() -> None:
    [samples] = read(SummaryFamily("s", "What s is", "phase").each({"device": (1.5, 3)})).values()
    assert samples == [("s_count", {"phase": "device"}, 3.0), ("s_sum", {"phase": "device"}, 1.5)]


def test_a_family_keeps_a_bounded_number_of_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "KEPT_MAX", 2)
    family = Family("a", GAUGE, "What a is", "x")
    for _ in range(2):
        assert len(read(family.each({str(number): number for number in range(5)}))["a"]) == 5
    assert len(family._kept) == 2


async def test_a_whole_scrape_is_read_without_a_fault(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": "x"})
    found = read((await client.get("/metrics")).text)
    for name, samples in found.items():
        assert all(math.isfinite(value) for _, _, value in samples), name
        assert len({(sample, *sorted(labels.items())) for sample, labels, _ in samples}) == len(samples), name
    assert found["vllm:cache_config_info"] == [
        (
            "vllm:cache_config_info",
            {
                "block_size": "16",
                "cache_dtype": "auto",
                "enable_prefix_caching": "True",
                "engine": "0",
                "model_name": "fake",
                "num_gpu_blocks": "100",
            },
            1.0,
        )
    ]
    assert found["process_open_fds"][0][2] >= 3
    assert found["process_resident_memory_bytes"][0][2] > 1e6
    assert found["process_start_time_seconds"][0][2] > 0
    assert "vllm:gpu_cache_usage_perc" not in found


async def test_older_names_are_told_where_they_are_asked_for(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine, metrics_compat=True)
    async with httpx.AsyncClient(base_url=server.url) as client:
        await client.post("/v1/completions", json={"prompt": "x"})
        found = read((await client.get("/metrics")).text)
    for old, new in (
        ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
        ("gpu_prefix_cache_queries", "prefix_cache_queries"),
        ("gpu_prefix_cache_hits", "prefix_cache_hits"),
        ("time_per_output_token_seconds", "inter_token_latency_seconds"),
    ):
        values = [[value for _, _, value in found[f"vllm:{name}"]] for name in (old, new)]
        assert values[0] == values[1]
    assert found["vllm:gpu_prefix_cache_hit_rate"][0][2] == 0.5


async def test_what_is_counted_one_by_one_is_counted_once_a_second(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve(engine)
    asked, plain = 0, engine.kv

    def kv() -> object:
        nonlocal asked
        asked += 1
        return replace(plain(), total=100)

    monkeypatch.setattr(engine, "kv", kv)
    async with httpx.AsyncClient(base_url=server.url) as client:
        texts = [(await client.get("/metrics")).text for _ in range(5)]
        assert asked == 1
        assert all("nova_kv_blocks" in text for text in texts)
        monkeypatch.setattr(scrape, "WALK_S", 0.0)
        await client.get("/metrics")
        assert asked == 2
