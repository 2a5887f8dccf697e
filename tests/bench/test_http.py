"""`bench http` beside stock servers: what is counted, over which time, and that all of them are asked for the same."""

from __future__ import annotations

import importlib.util
from typing import Any

import msgspec
import pytest

from novainfer import Delta
from novainfer.bench import http
from novainfer.bench.load import Chunk, Drive
from novainfer.bench.peers import run_asgi
from novainfer.bench.statistic import Timeline, lags_s
from novainfer.server.openai.chunks import ChunkOptions, CompletionChunks
from novainfer.server.openai.replies import Tally


def timeline(times_s: list[float], counts: list[int] | None = None) -> Timeline:
    return Timeline(num_prompt_tokens=1, times_s=times_s, counts=counts or [1] * len(times_s))


def test_a_lag_is_counted_from_the_tick_of_its_token() -> None:
    ticks = [100.0, 101.0, 102.0, 103.0, 104.0]
    found = lags_s(timeline([1.25, 2.5, 4.0], [1, 1, 2]), 100.0, ticks)
    assert found == pytest.approx([0.25, 0.5, 1.0, 0.0])
    late = lags_s(timeline([2.5, 2.75, 3.25]), 100.0, ticks)  # the first came a tick late
    assert late == pytest.approx([1.5, 0.75, 0.25])


def test_tokens_from_before_the_first_tick_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="before the first tick"):
        lags_s(timeline([0.5]), 0.0, [1.0, 2.0])


def test_cpu_is_counted_while_all_streams_are_open() -> None:
    lines = [timeline([1.0, 2.0, 3.0, 4.0, 5.0]), timeline([0.5, 1.5, 2.5, 3.5, 4.5])]
    found = Drive(wall_s=6.0, timelines=lines, began_s=[10.0, 11.0], whole_s=[5.0, 4.5])
    samples = [http.CpuSample(10.0 + at, {7: at * at, 8: 1.0}) for at in range(8)]
    # All are open from 11.5 to 15.0: the samples at 12 and at 15, between which come 3 + 3 tokens.
    assert http.cpu_between(found, samples) == ({7: 25.0 - 4.0, 8: 0.0}, 6)
    assert http.cpu_between(found, [samples[0], samples[-1]]) == ({7: 49.0, 8: 0.0}, 10)


def test_the_peers_event_has_the_size_of_our_own() -> None:
    encoder = CompletionChunks(
        "cmpl-" + 32 * "0", 1763900000, "fake", Tally(1, 1), ChunkOptions(token_ids=True), echoes=[""], n=1
    )
    ours = encoder.delta(Delta(request_id="cmpl", index=0, text="a", token_ids=[97]))
    assert len(ours) == len(run_asgi.EVENT)
    read = [msgspec.json.decode(event[6:], type=Chunk) for event in (ours, run_asgi.EVENT)]
    assert [one.choices for one in read] == [read[0].choices] * 2


@pytest.mark.slow
@pytest.mark.parametrize("version", ["h1", "h2"])
def test_all_servers_are_asked_for_the_same(version: Any) -> None:
    report, text = http.run(
        (0,), http.PEERS, requests=6, tokens=30, device_ms=5, version=version, connections=2, repeat=1
    )
    here = {name for name in http.PEERS if importlib.util.find_spec(name) is not None}
    asked = here - {"uvicorn"} if version == "h2" else here
    assert {"novainfer", "hypercorn"} <= asked
    assert set(report["ways"]) == {"0"} | asked
    assert set(report["skipped"]) == set(http.PEERS) - asked
    for name, row in report["ways"].items():
        assert ("engine_us" in row) is (name == "0")
        assert row["lag_ms_p50"] >= 0
        assert row["tokens_per_s"] > 0
    for name, reason in report["skipped"].items():
        assert f"{name} is left out: {reason}" in text


def test_peers_are_not_asked_over_tls() -> None:
    assert http.why_not("hypercorn", "h1", tls=True) == "peers are asked in clear text"
    assert http.why_not("hypercorn", "h1", tls=False) is None
    assert http.why_not("json", "h1", tls=False) is None
    assert "not installed" in (http.why_not("no_such_server", "h1", tls=False) or "")
