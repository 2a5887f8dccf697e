"""`/metrics`: the engine's numbers under vLLM's names, which dashboards and routers know, and our own as `nova_*`.

One collector reads `engine.statistics()` when scraped. Each scrape has a registry of its own, so two apps in one
process do not collide. A histogram here costs 0.1 µs an observation (prometheus-client's: 0.5) and counts many at once.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from novainfer.server.engine import weights_in

if TYPE_CHECKING:
    from novainfer.server.service import Service

NOTHING: Mapping[str, str] = MappingProxyType({})
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's buckets (v1/metrics/buckets.py), so that its dashboards' quantiles stay right
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
INTER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
LATENCY_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

# the words of vLLM's own `finished_reason`, and ours for what it has no word for
VLLM_REASONS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_LENGTH": "length",
    "FINISHED_ABORTED": "abort",
    "FINISHED_ERROR": "error",
    "FINISHED_TIMEOUT": "timeout",
    "FINISHED_IGNORED": "ignored",
}


class Histogram:
    """Counts of observations by bucket; single-threaded."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, each with its upper bound as Prometheus writes it."""
        total, buckets = 0, []
        for bound, count in zip((*(str(float(b)) for b in self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class Metrics:
    """What the HTTP side itself measures; times in seconds."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(TTFT_S)
        self.inter_token_latency = Histogram(INTER_TOKEN_S)
        self.e2e_request_latency = Histogram(LATENCY_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self.http_requests: Counter[tuple[str, str, int]] = Counter()  # method, route, status
        self.terminal_events: Counter[str] = Counter()  # finish | error | disconnect: one for each generation
        self.rejections: Counter[str] = Counter()  # by error code

    def expose(self, service: Service) -> bytes:
        """The text of one scrape."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Scrape(service))
        ProcessCollector(registry=registry)
        return generate_latest(registry)


class _Scrape(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        yield from _http(self._service)
        if self._service.engine is not None and self._service.engine.is_ready:
            yield from _engine(self._service)
            yield from _requests(self._service)
            yield from _admission(self._service)
        if self._service.engine is not None:
            yield from _progress(self._service)


def _counter(name: str, text: str, value: float, labels: Mapping[str, str] = NOTHING) -> Metric:
    return _counters(name, text, [*labels], {tuple(labels.values()): value})


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] = NOTHING) -> Metric:
    return _gauges(name, text, [*labels], {tuple(labels.values()): value})


def _counters(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _gauges(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Any, float]) -> Metric:
    """With a number for the values of its labels: a tuple of them, or the one there is."""
    for key, number in sorted(values.items()):
        family.add_metric([str(value) for value in (key if isinstance(key, tuple) else (key,))], number)
    return family


def _http(service: Service) -> Iterator[Metric]:
    metrics = service.metrics
    names = ["method", "route", "status"]
    yield _counters("nova_http_requests", "HTTP requests answered", names, metrics.http_requests)
    ends = {kind: metrics.terminal_events[kind] for kind in ("finish", "error", "disconnect")}
    yield _counters("nova_terminal_events", "How generations ended", ["kind"], ends)
    yield _gauge("nova_live_requests", "Generations in progress", service.live.num_live)
    yield _gauge("nova_connections", "Open connections", len(service.connections))
    yield _gauge("nova_tasks", "Tasks of the server's loop", len(asyncio.all_tasks()))
    is_ready = service.is_ready and service.engine is not None and service.engine.health().is_ready
    yield _gauge("nova_ready", "1 when /readyz answers 200", float(is_ready))


def _engine(service: Service) -> Iterator[Metric]:
    engine = service.engine
    assert engine is not None
    stats = engine.statistics()
    labels = {"model_name": engine.model_info.name, "engine": "0"}
    in_use = stats.kv_blocks_owned / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
    yield _gauge("vllm:num_requests_running", "Requests in the running batch", stats.num_running, labels)
    yield _gauge("vllm:num_requests_waiting", "Requests that wait", stats.num_waiting, labels)
    yield _gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", in_use, labels)
    yield _counter("vllm:num_preemptions", "Preemptions", stats.preemptions, labels)
    yield _counter("vllm:prompt_tokens", "Prompt tokens", stats.prompt_tokens_total, labels)
    yield _counter("vllm:generation_tokens", "Generated tokens", stats.generation_tokens_total, labels)
    yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up", stats.prefix_cache_queries, labels)
    yield _counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache", stats.prefix_cache_hits, labels)
    of = tuple(labels.values())
    ends = {(*of, VLLM_REASONS.get(reason, reason)): count for reason, count in stats.requests_finished.items()}
    yield _counters("vllm:request_success", "Finished", [*labels, "finished_reason"], ends)
    if (drafts := stats.speculation) is not None:
        spec = "vllm:spec_decode_num"
        yield _counter(f"{spec}_drafts", "Rows of steps that verified drafts", drafts.num_drafts_total, labels)
        yield _counter(f"{spec}_draft_tokens", "Drafts verified", drafts.num_draft_tokens_total, labels)
        yield _counter(f"{spec}_accepted_tokens", "Drafts that were right", drafts.num_accepted_tokens_total, labels)
        name, text = f"{spec}_accepted_tokens_per_pos", "Drafts that were right, by their place in the row"
        accepted = {(*of, position): count for position, count in enumerate(drafts.accepted_per_position)}
        yield _counters(name, text, [*labels, "position"], accepted)
    yield _counter("nova_steps", "Steps", stats.steps)
    text = "KV blocks copied before a request wrote into one that it shared"
    yield _counter("nova_copied_blocks", text, stats.copied_blocks)
    yield _counter("nova_swapped_out_blocks", "KV blocks copied to the host's memory", stats.swapped_out_blocks)
    yield _counter("nova_swapped_in_blocks", "KV blocks copied back from it", stats.swapped_in_blocks)
    yield _gauges("nova_request_state", "Live choices by state", ["state"], stats.request_states)
    if (kv := engine.kv()) is not None:
        yield _gauges(
            "nova_kv_blocks", "KV blocks by their owner's state; they add up to the total", ["state"], kv.blocks
        )
    phases = SummaryMetricFamily("nova_step_seconds", "Time of steps by phase", labels=["phase"])
    for phase in ("schedule", "device", "outputs"):
        seconds, count = getattr(stats.phases, phase)
        phases.add_metric([phase], count_value=count, sum_value=seconds)
    yield phases


def _progress(service: Service) -> Iterator[Metric]:
    """Whether everything moves, and what went wrong; also while the engine is not ready."""
    engine = service.engine
    assert engine is not None
    health, actors, stats = engine.health(), engine.actors(), engine.statistics()
    yield _gauge("nova_live", "1 when no actor is stuck or dead", float(health.is_live))
    yield _gauge("nova_loop_lag_seconds", "How late the watchdog's last look came", health.lag_s)
    text = "How long each actor has been in its state"
    dwells = {(actor.name, actor.state): actor.dwell_s for actor in actors}
    yield _gauges("nova_state_dwell_seconds", text, ["actor", "state"], dwells)
    waits = {actor.name: actor.wait_s for actor in actors}
    yield _gauges(
        "nova_mailbox_wait_seconds", "For how long an actor that is stuck has taken no turn", ["actor"], waits
    )
    depths = {actor.name: actor.mailbox_depth for actor in actors}
    yield _gauges("nova_mailbox_depth", "Messages that wait for each actor", ["actor"], depths)
    yield _counters("nova_incidents", "What went wrong, by kind", ["kind"], stats.incidents)
    yield _counter("nova_worker_restarts", "Workers that were lost and replaced", stats.worker_losses)
    rungs = {rung: float(rung == stats.rung) for rung in stats.rungs}
    yield _gauges("nova_ladder_rung", "1 for the rung of the ladder that the engine works on", ["rung"], rungs)
    weights = weights_in(engine.model_info, stats.mode)
    mode = {"kernels": stats.mode.kernels, "precision": stats.mode.precision, "weights": weights}
    yield _gauge("nova_mode", "1 for the kernels and the precision that steps are computed with", 1.0, mode)
    failed = len(engine.model_info.failed_kernels)
    yield _gauge("nova_failed_kernels", "Kernels whose self-test failed at the load; others compute instead", failed)


def _admission(service: Service) -> Iterator[Metric]:
    assert service.engine is not None
    stats = service.engine.statistics().admission
    yield _gauge("nova_queued_requests", "Let in, and not run yet", stats.num_queued)
    yield _gauge("nova_queued_tokens", "Prompt tokens of those", stats.num_queued_tokens)
    yield _gauge("nova_overflow_requests", "Waiting for room in the queue", stats.num_overflow)
    yield _counter("nova_overflowed", "Streams that had to wait for room in the queue", stats.overflowed_total)
    if stats.drain_rate_per_s is not None:
        text = "Requests a second that leave the queue: what Retry-After is computed from"
        yield _gauge("nova_queue_drain_rate", text, stats.drain_rate_per_s)
    yield _counters("nova_rejections", "Streams refused at once, by what was full", ["reason"], stats.rejected_total)
    yield _counters("nova_cancels", "Requests ended before their time", ["cause"], stats.cancelled_total)
    yield _gauge("nova_stalled_streams", "Streams whose readers are slow", stats.num_stalled)
    yield _counter("nova_stalls", "How often a stream stalled", stats.stalls_total)


def _requests(service: Service) -> Iterator[Metric]:
    metrics, engine = service.metrics, service.engine
    assert engine is not None
    labels = {"model_name": engine.model_info.name, "engine": "0"}
    histograms = {
        "time_to_first_token_seconds": metrics.time_to_first_token,
        "inter_token_latency_seconds": metrics.inter_token_latency,
        "e2e_request_latency_seconds": metrics.e2e_request_latency,
        "request_prompt_tokens": metrics.prompt_tokens,
        "request_generation_tokens": metrics.generation_tokens,
    }
    for name, histogram in histograms.items():
        family = HistogramMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=list(labels))
        family.add_metric(list(labels.values()), histogram.buckets(), sum_value=histogram.sum)
        yield family
    rejected = {(*labels.values(), code): count for code, count in metrics.rejections.items()}
    yield _counters("vllm:admission_rejections", "Requests refused by admission", [*labels, "reason"], rejected)
