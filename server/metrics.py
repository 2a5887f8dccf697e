"""What the HTTP side itself measures and counts; `server/operate/scrape.py` writes it down for Prometheus."""

from __future__ import annotations

import math
from collections import Counter

from novainfer.inspection import INTER_TOKEN_S, LATENCY_S, TTFT_S, Histogram

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)  # vLLM's
CHOICES = (1, 2, 5, 10, 20)


class Walked:
    """Lines that take long to count, and when they were."""

    def __init__(self) -> None:
        self.text = ""
        self.at_s = -math.inf


class ModelMetrics:
    """What the HTTP side measures of one model's requests, also while it is not loaded; times in seconds."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(TTFT_S)
        self.inter_token_latency = Histogram(INTER_TOKEN_S)
        self.e2e_request_latency = Histogram(LATENCY_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self.params_n = Histogram(CHOICES)
        self.params_max_tokens = Histogram(TOKENS)  # of those that say how many
        self.rejections: Counter[str] = Counter()  # by error code


class Metrics:
    """What the HTTP side itself counts."""

    def __init__(self) -> None:
        self.http_requests: Counter[tuple[str, str, int]] = Counter()  # method, route, status
        self.terminal_events: Counter[str] = Counter()  # finish | error | disconnect: one for each generation
        self.unknown_keys = 0  # requests that were refused for their key
        self.walked = Walked()
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        """Those of one model, by its name."""
        return self._models.setdefault(model, ModelMetrics())
