"""Other engines as systems under test, for `novainfer bench offline --peer`.

    novainfer bench offline --peer "transformers-cb=python tests/bench/peers.py transformers-cb {model}"

A peer that is not installed says so and is left out of the report. Engines that come as OpenAI-compatible servers
(vLLM, llama-server, OpenVINO's) are measured as users meet them: `novainfer bench serve http://HOST:PORT`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import sys
import time
from collections.abc import Callable
from typing import Any

from novainfer.bench.peers.run_transformers import Transformers
from novainfer.bench.statistic import Timeline
from novainfer.bench.worker import System, serve

NUM_BLOCKS = 128  # of 256 tokens: more than any of the workloads needs
MAX_BATCH_TOKENS = 2048  # NovaInfer's default


class ContinuousBatching(Transformers):
    """transformers' own continuous batching: `generate_batch`, with one manager that lives on."""

    name = "transformers-cb"

    def __init__(self, model: str) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        super().__init__(model)
        self._model.set_attn_implementation("paged|sdpa")
        # An end-of-sequence id that no token has: every request makes all its tokens.
        self._config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        # Left to itself it takes nine tenths of the memory for its cache, and seconds to fill it with zeros.
        self._batching = ContinuousBatchingConfig(num_blocks=NUM_BLOCKS, max_batch_tokens=MAX_BATCH_TOKENS)

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Timeline]:
        """All prompts at once; times are the manager's own."""
        self._config.max_new_tokens = max_tokens
        started = time.perf_counter()
        found = self._model.generate_batch(
            inputs=prompts,
            generation_config=self._config,
            continuous_batching_config=self._batching,
            record_timestamps=True,
            persistent_manager=True,
            warmup=False,
        )
        lines = []
        for prompt, output in zip(prompts, found.values(), strict=True):
            assert len(output.generated_tokens) == max_tokens
            times_s = [at - started for at in output.timestamps]
            lines.append(Timeline(num_prompt_tokens=len(prompt), times_s=times_s, counts=[1] * max_tokens))
        return lines


PEERS: dict[str, Callable[[str], Any]] = {"transformers-cb": ContinuousBatching}


def main() -> None:
    """`peers.py NAME MODEL_DIR`."""
    name, model = sys.argv[1:]
    started = time.perf_counter()
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import_s = time.perf_counter() - started

    def make() -> System:
        system: System = PEERS[name](model)
        return system

    serve(make, import_s=import_s)


if __name__ == "__main__":
    main()
