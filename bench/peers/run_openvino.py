"""OpenVINO GenAI as a system under test: `python -m … MODEL.gguf OPTIONS`, on its continuous batching.

It reads GGUF itself, F16 (computed in bf16 where the CPU has that) or quantised. Best settings: prefix cache, steps of
2,048 tokens with prompts split between them, a cache that holds every workload.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from .child import Memory, Timeline, resident, serve


class OpenVino:
    """One pipeline; requests join between its steps."""

    name = "openvino"

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = options["cache_gib"]
        scheduler.max_num_batched_tokens = options["max_num_batched_tokens"]
        scheduler.max_num_seqs = options["max_num_seqs"]
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        self._genai = openvino_genai
        self._pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {})
        self._made = 0
        self.version: str = openvino_genai.__version__
        self.facts = {"cache_gib": options["cache_gib"], "max_num_batched_tokens": options["max_num_batched_tokens"]}

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Timeline]:
        """All at once, greedy, EOS ignored."""
        return self.answer_mixed(prompts, [max_tokens] * len(prompts), [0.0] * len(prompts))

    def answer_mixed(self, prompts: list[list[int]], lengths: list[int], arrivals_s: list[float]) -> list[Timeline]:
        """Each request when its time has come, or behind the step that runs just then."""
        lines = [Timeline(num_prompt_tokens=len(prompt)) for prompt in prompts]
        waiting = sorted(range(len(prompts)), key=arrivals_s.__getitem__)
        running: dict[int, Any] = {}
        began_s = time.perf_counter()
        while waiting or running:
            now_s = time.perf_counter() - began_s
            while waiting and arrivals_s[waiting[0]] <= now_s:
                number = waiting.pop(0)
                running[number] = self._add(prompts[number], lengths[number])
            if not running:
                time.sleep(max(0.0, arrivals_s[waiting[0]] - now_s))
                continue
            self._pipe.step()
            now_s = time.perf_counter() - began_s
            for number, handle in list(running.items()):
                while handle.can_read():
                    count = sum(len(output.generated_ids) for output in handle.read().values())
                    lines[number].times_s.append(now_s - arrivals_s[number])
                    lines[number].counts.append(count)
                if lines[number].num_output_tokens >= lengths[number]:
                    del running[number]
        return lines

    def _add(self, prompt: list[int], length: int) -> Any:
        import numpy as np
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens = length
        config.ignore_eos = True
        self._made += 1
        return self._pipe.add_request(self._made, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)

    def memory(self) -> Memory:
        """Of this process; it does not tell weights and cache apart."""
        return resident()


def main() -> None:
    """Imports first, and then the clock of the load."""
    began_s = time.perf_counter()
    for module in ("numpy", "openvino", "openvino_genai"):
        __import__(module)
    serve(lambda: OpenVino(sys.argv[1], json.loads(sys.argv[2])), import_s=time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
