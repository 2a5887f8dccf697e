"""nano-vllm's workload: 256 requests with 100 to 1,024 tokens in and out, seeded as there; beside transformers.

The engine runs as an application would use it, in a process of its own; so does transformers' continuous batching. Both
answer the same requests, in turns and never at once, and tokens a second are those of the answers (nano-vllm's
bench.py).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from novainfer.bench.gpu.roof import GpuRoof
from novainfer.bench.ideal import Geometry, Roof, decode_step_s
from novainfer.bench.worker import Child, ChildError, Memory, Ready, Task, resident, serve

__all__ = ["measure_serving", "requests"]

NUM_REQUESTS = 256
TOKENS_MIN, TOKENS_MAX = 100, 1024
VOCAB_USED = 10_000  # of the ids, as there
MODULE = "novainfer.bench.gpu.serving"
OURS = "novainfer"
WARM_UP, WARM_UP_TOKENS = 8, 16  # requests before those that count, and what each of them makes
PEER_TIMEOUT_S = 180.0  # for a turn of a peer, from its start on: a GPU is lent for minutes


def requests(
    num_requests: int = NUM_REQUESTS, tokens_max: int = TOKENS_MAX, largest_id: int = VOCAB_USED
) -> tuple[list[list[int]], list[int]]:
    """Prompts, and how many tokens each answer has."""
    chance = random.Random(0)
    first = min(TOKENS_MIN, tokens_max)
    prompts = [
        [chance.randint(0, largest_id) for _ in range(chance.randint(first, tokens_max))] for _ in range(num_requests)
    ]
    return prompts, [chance.randint(first, tokens_max) for _ in range(num_requests)]


def measure_serving(
    folder: Path,
    roof: GpuRoof,
    *,
    device: str = "cuda",
    repeat: int = 3,
    num_requests: int = NUM_REQUESTS,
    tokens_max: int = TOKENS_MAX,
    options: dict[str, Any] | None = None,
    peers: Sequence[str] = ("transformers",),
) -> dict[str, Any]:
    """Output tokens a second of each system, in turns, and the ratio of the median to the roof.

    One system is on the GPU at a time, in a process of its own for each turn: memory is theirs alone then. A peer that
    fails, or takes longer than `PEER_TIMEOUT_S`, is left out from then on, and `skipped` says why.
    """
    vocab_size = Geometry.read(folder).config.vocab_size
    prompts, lengths = requests(num_requests, tokens_max, min(VOCAB_USED, vocab_size - 1))
    arguments = json.dumps({"device": device, **(options or {})})
    systems = [OURS, *peers]
    task = Task(prompts=[*prompts], max_tokens=tokens_max, sampling={"lengths": lengths})
    turns: dict[str, list[_Turn]] = {}
    skipped: dict[str, str] = {}
    if device == "cuda":
        torch.cuda.empty_cache()  # what this process has used before is theirs now
    for number in range(repeat):
        for name in systems[:: 1 if number % 2 == 0 else -1]:
            if name in skipped:
                continue
            try:
                turns.setdefault(name, []).append(_turn(name, command_of(name, folder, arguments), task))
            except ChildError as error:
                if name == OURS:
                    raise
                skipped[name] = str(error)
                turns.pop(name, None)
    rates = {name: [turn.tokens_per_s for turn in found] for name, found in turns.items()}
    facts = {name: found[-1].ready.facts | {"load_s": found[-1].ready.load_s} for name, found in turns.items()}
    versions = {name: found[-1].ready.version for name, found in turns.items()}
    ideal_s = _ideal_s(folder, roof, [len(prompt) for prompt in prompts], lengths)
    return {
        "num_requests": num_requests,
        "output_tokens": sum(lengths),
        "prompt_tokens": sum(map(len, prompts)),
        "tokens_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "runs": rates,
        "roof_tokens_per_s": sum(lengths) / ideal_s,
        "share_of_roof": statistics.median(rates[OURS]) * ideal_s / sum(lengths),
        "facts": facts,
        "versions": versions,
        "skipped": skipped,
    }


@dataclass(frozen=True, slots=True)
class _Turn:
    tokens_per_s: float
    ready: Ready


def command_of(name: str, folder: Path, arguments: str) -> list[str]:
    """What starts a system: `main`, with JSON options."""
    return [sys.executable, "-m", MODULE, name, str(folder), arguments]


def _turn(name: str, command: Sequence[str], task: Task) -> _Turn:
    """Start a system, warm it up with a few of the requests, have it answer them all, and end it."""
    lengths = task.sampling["lengths"]
    few = Task(prompts=task.prompts[:WARM_UP], max_tokens=task.max_tokens)
    few.sampling = {"lengths": [min(length, WARM_UP_TOKENS) for length in lengths[:WARM_UP]]}
    with Child(command, timeout_s=None if name == OURS else PEER_TIMEOUT_S) as child:
        child.run(few)
        result = child.run(task)
        made, wanted = sum(sum(line.counts) for line in result.timelines), sum(lengths)
        if made != wanted:
            raise ChildError(f"{name} made {made} tokens of {wanted}")
        return _Turn(made / result.wall_s, child.ready)


def _ideal_s(folder: Path, roof: GpuRoof, prompt_lens: Sequence[int], lengths: Sequence[int]) -> float:
    """All prompts by arithmetic alone, then one step for each token of the longest answer, of those still running."""
    geometry = Geometry.read(folder)
    limits = Roof(bytes_per_s=roof.read_bytes_per_s, flops_per_s=roof.bfloat16_flop_per_s)
    flops = 2.0 * sum(prompt_lens) * geometry.body_parameters
    flops += sum(geometry.attention_flops(geometry.seen(0, length)) for length in prompt_lens)
    total = flops / limits.flops_per_s
    for made in range(1, max(lengths)):
        contexts = [prompt + made for prompt, length in zip(prompt_lens, lengths, strict=True) if length > made]
        total += decode_step_s(geometry, limits, len(contexts), sum(contexts) // len(contexts))
    return total


class OurEngine:
    """The library, a worker in a process, as `novainfer serve` has it."""

    name = OURS

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from novainfer import Engine, EngineConfig, __version__
        from novainfer.server.loop import loop_factory

        self.version = __version__
        self._runner = asyncio.Runner(loop_factory=loop_factory())
        began_s = time.perf_counter()
        self._engine = Engine(EngineConfig(model=model, **{"worker": "process", **options}))
        self._runner.run(self._engine.start())
        info = self._engine.model_info
        self.facts: dict[str, Any] = {
            "dtype": info.dtype,
            "kernels": info.kernels,
            "num_kv_blocks": info.num_kv_blocks,
            "start_s": time.perf_counter() - began_s,
        }

    def answer_sampled(self, prompts: list[list[Any]], max_tokens: int, sampling: dict[str, Any]) -> list[Any]:
        """All at once, each with a length of its own."""
        return self._runner.run(self._answer_all(prompts, sampling["lengths"]))

    async def _answer_all(self, prompts: list[list[Any]], lengths: list[int]) -> list[Any]:
        began_s = time.perf_counter()
        return list(
            await asyncio.gather(
                *(self._one(prompt, length, began_s) for prompt, length in zip(prompts, lengths, strict=True))
            )
        )

    async def _one(self, prompt: list[Any], length: int, began_s: float) -> Any:
        from novainfer import SamplingParams
        from novainfer.bench.statistic import Timeline

        line = Timeline(num_prompt_tokens=len(prompt), times_s=[], counts=[])
        params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.6)
        async for delta in self._engine.generate(prompt, params):
            if delta.token_ids:
                line.times_s.append(time.perf_counter() - began_s)
                line.counts.append(len(delta.token_ids))
        return line

    def memory(self) -> Memory:
        """Of this process, which has no weights."""
        return resident()


class TransformersBatching:
    """transformers' own continuous batching, each request with a length of its own.

    What it settles by itself is left to it (CUDA graphs, batch size, memory): those are its best settings on a machine
    that has nothing but torch; with flash-attn installed it takes that.
    """

    name = "transformers"

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import torch
        import transformers

        self.version = transformers.__version__
        self._model = (
            transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
            .to(options["device"])
            .eval()
        )
        self.facts: dict[str, Any] = {"dtype": "bfloat16", "attention": "sdpa (paged)"}

    def answer_sampled(self, prompts: list[list[int]], max_tokens: int, sampling: dict[str, Any]) -> list[Any]:
        """All at once; only the end of the whole is seen, and what each was given."""
        from transformers import GenerationConfig

        from novainfer.bench.statistic import Timeline

        lengths: list[int] = sampling["lengths"]
        config = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=True, temperature=0.6, eos_token_id=-1, pad_token_id=0, use_cache=True
        )
        began_s = time.perf_counter()
        made: dict[str, int] = {}
        with self._model.continuous_batching_context_manager(generation_config=config) as manager:
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                manager.add_request(prompt, request_id=f"r{number}", max_new_tokens=length)
            while len(made) < len(prompts):
                found = manager.get_result(timeout=1.0)
                if found is not None and found.is_finished():
                    made[found.request_id] = len(found.generated_tokens)
        ended_s = time.perf_counter() - began_s
        return [
            Timeline(num_prompt_tokens=len(prompt), times_s=[ended_s], counts=[made[f"r{number}"]])
            for number, prompt in enumerate(prompts)
        ]

    def memory(self) -> Memory:
        """Of this process."""
        return resident()


def main() -> None:
    """`SYSTEM MODEL OPTIONS`: one end of the pipe."""
    systems: dict[str, Any] = {OURS: OurEngine, "transformers": TransformersBatching}
    name, model, options = sys.argv[1:4]
    began_s = time.perf_counter()
    for module in ("torch", "transformers"):
        __import__(module)
    import_s = time.perf_counter() - began_s
    serve(lambda: systems[name](model, json.loads(options)), import_s=import_s)


if __name__ == "__main__":
    main()
