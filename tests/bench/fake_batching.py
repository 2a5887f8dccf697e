"""A system that makes the tokens it is asked for: `fake_batching.py NAME LOG`. What "short" makes is too little, and
"slow" never ends; both begin well. The log says which system was there when."""

import sys
import threading
from pathlib import Path
from typing import Any

from novainfer.bench.statistic import Timeline
from novainfer.bench.worker import Memory, resident, serve


class FakeBatching:
    version = "1"

    def __init__(self) -> None:
        self.name, log = sys.argv[1:3]
        self.facts: dict[str, Any] = {}
        self._log = Path(log)
        self._num_tasks = 0
        self.note("begins")

    def note(self, what: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{self.name} {what}\n")

    def answer_sampled(self, prompts: list[list[int]], max_tokens: int, sampling: dict[str, Any]) -> list[Timeline]:
        self._num_tasks += 1
        if self._num_tasks == 2 and self.name == "slow":
            threading.Event().wait()
        missing = 1 if self._num_tasks == 2 and self.name == "short" else 0
        return [
            Timeline(num_prompt_tokens=len(prompt), times_s=[0.1], counts=[length - missing])
            for prompt, length in zip(prompts, sampling["lengths"], strict=True)
        ]

    def memory(self) -> Memory:
        return resident()


if __name__ == "__main__":
    system = FakeBatching
    made = []

    def make() -> FakeBatching:
        made.append(system())
        return made[0]

    serve(make, import_s=0.0)
    made[0].note("ends")
