"""What the HTTP side itself measures and counts; `server/operate/scrape.py` writes it down for Prometheus.

A histogram here costs 0.1 µs an observation (prometheus-client's: 0.5), and counts many at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter

# vLLM's buckets (v1/metrics/buckets.py), so that its dashboards' quantiles stay right
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
INTER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
LATENCY_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts of observations by bucket; single-threaded."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Walked:
    """Lines that take long to count, and when they were."""

    def __init__(self) -> None:
        self.text = ""
        self.at_s = -math.inf


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
        self.unknown_keys = 0  # requests that were refused for their key
        self.walked = Walked()
