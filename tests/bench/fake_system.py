"""A system under test whose token takes as long as it is told, without waiting: `fake_system.py SECONDS [fail]`.

With `die=N` it dies at its Nth task; with `mixed` it takes requests that come one by one, and really waits. With
`sleep-beside=FILE` it sleeps a moment while there is such a file.
"""

import os
import sys
import time
from typing import Any

from novainfer.bench.statistic import Timeline
from novainfer.bench.worker import Memory, resident, serve


class FakeSystem:
    name = "fake"
    version = "1"

    def __init__(self) -> None:
        if "fail" in sys.argv:
            raise RuntimeError("this peer is not installed")
        self.facts: dict[str, Any] = {"vocab_size": 512}
        self.token_ids = [[1, 2, 3 if "other" in sys.argv else 4]]

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Timeline]:
        self.asked = getattr(self, "asked", 0) + 1
        if f"die={self.asked}" in sys.argv:
            print("it died on the way", file=sys.stderr, flush=True)
            os._exit(7)
        assert all(prompts), "a prompt of 0 tokens"
        if any(
            os.path.exists(path) for name, _, path in (a.partition("=") for a in sys.argv) if name == "sleep-beside"
        ):
            time.sleep(0.2)
        times_s = [float(sys.argv[1]) * (at + 1) for at in range(max_tokens)]
        return [Timeline(num_prompt_tokens=len(prompts), times_s=times_s, counts=[1] * max_tokens) for _ in prompts]

    def answer_sampled(self, prompts: list[list[int]], max_tokens: int, sampling: dict[str, Any]) -> list[Timeline]:
        """Twice as slow when it draws."""
        lines = self.answer(prompts, max_tokens)
        for line in lines:
            line.times_s = [at * (2 if sampling["temperature"] else 1) for at in line.times_s]
        return lines

    def answer_by_clients(self, prompts: list[list[int]], max_tokens: int, clients: int) -> list[Timeline]:
        return self.answer(prompts, max_tokens)

    def counters(self) -> dict[str, float]:
        """Asked before and after a task: two drafts of each, of which one and a half were right."""
        self.tasks = getattr(self, "tasks", 0) + 1
        return {"num_draft_tokens": 2 * self.tasks, "num_accepted_tokens": 1.5 * self.tasks}

    def read_weights(self) -> float | None:
        """Twice as fast each time."""
        if "packed" not in sys.argv:
            return None
        self.rate = 2 * getattr(self, "rate", 0.5e6)
        return self.rate

    def memory(self) -> Memory:
        memory = resident()
        memory.weight_bytes, memory.kv_bytes = 1_000_000, 2_000_000
        return memory


class MixedSystem(FakeSystem):
    def answer_mixed(self, prompts: list[list[int]], lengths: list[int], arrivals_s: list[float]) -> list[Timeline]:
        """One request after the other; each takes as long as a token does."""
        began_s = time.perf_counter()
        lines = []
        for prompt, length, arrival_s in zip(prompts, lengths, arrivals_s, strict=True):
            time.sleep(max(0.0, arrival_s - (time.perf_counter() - began_s)) + float(sys.argv[1]))
            at = time.perf_counter() - began_s - arrival_s
            lines.append(Timeline(num_prompt_tokens=len(prompt), times_s=[at], counts=[length]))
        return lines


if __name__ == "__main__":
    serve(MixedSystem if "mixed" in sys.argv else FakeSystem, import_s=0.0)
