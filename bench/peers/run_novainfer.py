"""NovaInfer as a system under test: `python -m novainfer.bench.peers.run_novainfer MODEL_DIR [OPTIONS AS JSON]`.

The engine of the library on an event loop of its own, as an application would use it: one task per request.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from novainfer import Engine, EngineConfig, SamplingParams, __version__
from novainfer.bench.peers.child import Memory, Timeline, resident, serve
from novainfer.process import settle
from novainfer.server.loop import loop_factory


class NovaInfer:
    """One engine, driven from the thread that reads the tasks."""

    name = "novainfer"
    version = __version__
    token_ids: list[list[int]]

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._runner = asyncio.Runner(loop_factory=loop_factory())
        self._engine = Engine(EngineConfig(model=model, **options))
        self._runner.run(self._engine.start())
        info = self._engine.model_info
        self.facts: dict[str, Any] = {
            "dtype": info.dtype,
            "vocab_size": info.vocab_size,
            "weight_bytes": info.weight_bytes,
            "kv_bytes_per_block": info.kv_bytes_per_block,
            "num_kv_blocks": info.num_kv_blocks,
            "kernels": info.kernels,
        }

    def answer(self, prompts: list[list[Any]], max_tokens: int) -> list[Timeline]:
        """All at once, greedy, EOS ignored."""
        return self.answer_sampled(prompts, max_tokens, {"temperature": 0.0})

    def answer_sampled(self, prompts: list[list[Any]], max_tokens: int, sampling: dict[str, Any]) -> list[Timeline]:
        """All at once, sampled in this way, EOS ignored unless `sampling` says otherwise."""
        params = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **sampling})
        return self._runner.run(self._answer_all(prompts, [params] * len(prompts), [0.0] * len(prompts)))

    def answer_mixed(self, prompts: list[list[Any]], lengths: list[int], arrivals_s: list[float]) -> list[Timeline]:
        """Greedy, each with a length of its own, when its time has come."""
        rows = [(SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)) for length in lengths]
        return self._runner.run(self._answer_all(prompts, rows, arrivals_s))

    def answer_by_clients(self, prompts: list[list[Any]], max_tokens: int, clients: int) -> list[Timeline]:
        """Greedy, so many open at any time; the times of each are from when it was sent."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        return self._runner.run(self._answer_in_turn(prompts, params, clients))

    def read_weights(self) -> float | None:
        """Bytes a second of one reading of the packed weights, where they lie."""
        from novainfer.bench.roofline import read_packed_weights

        found = read_packed_weights()
        return None if found is None else found[0] / found[1]

    def counters(self) -> dict[str, float]:
        """Steps, and drafts where there are any."""
        found = self._engine.statistics()
        counts: dict[str, float] = {"steps": found.steps}
        if (drafts := found.speculation) is not None:
            counts["num_draft_tokens"] = drafts.num_draft_tokens_total
            counts["num_accepted_tokens"] = drafts.num_accepted_tokens_total
        return counts

    async def _answer_all(
        self, prompts: list[list[Any]], params: list[SamplingParams], arrivals_s: list[float]
    ) -> list[Timeline]:
        started = time.perf_counter()
        self.token_ids = [[] for _ in prompts]
        answers = zip(prompts, self.token_ids, params, (started + at for at in arrivals_s), strict=True)
        return await asyncio.gather(*(self._answer_one(*answer) for answer in answers))

    async def _answer_in_turn(self, prompts: list[list[Any]], params: SamplingParams, clients: int) -> list[Timeline]:
        self.token_ids = [[] for _ in prompts]
        lines = [Timeline(num_prompt_tokens=len(prompt)) for prompt in prompts]
        waiting = iter(enumerate(zip(prompts, self.token_ids, strict=True)))

        async def client() -> None:
            for at, (prompt, token_ids) in waiting:
                lines[at] = await self._answer_one(prompt, token_ids, params, time.perf_counter())

        await asyncio.gather(*(client() for _ in range(clients)))
        return lines

    async def _answer_one(
        self, prompt: list[Any], token_ids: list[int], params: SamplingParams, begins_s: float
    ) -> Timeline:
        line = Timeline(num_prompt_tokens=len(prompt), times_s=[], counts=[])
        if (wait_s := begins_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        async for delta in self._engine.generate(prompt, params):
            if delta.token_ids:
                line.times_s.append(time.perf_counter() - begins_s)
                line.counts.append(len(delta.token_ids))
                line.num_prompt_tokens = delta.num_prompt_tokens
                token_ids += delta.token_ids
        return line

    def memory(self) -> Memory:
        """Resident bytes, and what of them are weights and pages of the KV cache."""
        from novainfer.bench.resident import cache_bytes

        memory = resident()
        memory.weight_bytes = self._engine.model_info.weight_bytes
        memory.kv_bytes = cache_bytes()
        return memory


def main() -> None:
    """Import what the model needs before the clock runs: its time is told apart."""
    settle()
    started = time.perf_counter()
    import_module_names = ("torch", "transformers", "novainfer.llm")
    for name in import_module_names:
        __import__(name)
    import_s = time.perf_counter() - started
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    serve(lambda: NovaInfer(sys.argv[1], options), import_s=import_s)


if __name__ == "__main__":
    main()
