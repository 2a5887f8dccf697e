"""vLLM as a system under test: `python -m … MODEL_DIR OPTIONS`, its asynchronous engine in this process.

Best settings on a CPU: compiled (no `enforce_eager`), prefix cache; its environment says how many threads, which
libraries, and how large a KV cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from .child import Memory, Timeline, serve, tree_memory
from .launch import tree_cpu_s

NAMED = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "LD_PRELOAD", "OMP_WAIT_POLICY")  # told with the result


class Vllm:
    """One engine on an event loop of its own; its core is a process beside this one."""

    name = "vllm"

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.version: str = vllm.__version__
        self._runner = asyncio.Runner()
        self._made = 0
        arguments = AsyncEngineArgs(
            model=model,
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_seqs"],
            max_num_batched_tokens=options["max_num_batched_tokens"],
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self._engine = self._runner.run(_called(AsyncLLM.from_engine_args, arguments))
        self.facts = {
            "dtype": str(self._engine.model_config.dtype).removeprefix("torch."),
            "environment": {name: os.environ.get(name) for name in NAMED},
        }

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Timeline]:
        """All at once, greedy, EOS ignored."""
        return self.answer_mixed(prompts, [max_tokens] * len(prompts), [0.0] * len(prompts))

    def answer_mixed(self, prompts: list[list[int]], lengths: list[int], arrivals_s: list[float]) -> list[Timeline]:
        """Each request when its time has come."""

        async def all_of_them() -> list[Timeline]:
            began_s = time.perf_counter()
            rows = zip(prompts, lengths, arrivals_s, strict=True)
            return list(await asyncio.gather(*(self._one(*row, began_s) for row in rows)))

        return self._runner.run(all_of_them())

    async def _one(self, prompt: list[int], length: int, arrival_s: float, began_s: float) -> Timeline:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        self._made += 1
        number = str(self._made)
        await asyncio.sleep(max(0.0, arrival_s - (time.perf_counter() - began_s)))
        line = Timeline(num_prompt_tokens=len(prompt))
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params, number):
            count = sum(len(choice.token_ids) for choice in output.outputs)
            if count:
                line.times_s.append(time.perf_counter() - began_s - arrival_s)
                line.counts.append(count)
        return line

    def memory(self) -> Memory:
        """Of this process and of those that it has started, the engine's core among them."""
        return tree_memory(os.getpid())

    def cpu_s(self) -> float:
        """Likewise; where /proc tells it."""
        return tree_cpu_s(os.getpid())


async def _called(function: Any, *arguments: Any) -> Any:
    return function(*arguments)  # it wants a running loop


def main() -> None:
    """Imports first, and then the clock of the load."""
    options = json.loads(sys.argv[2])
    began_s = time.perf_counter()
    for module in ("vllm", "vllm.engine.arg_utils", "vllm.v1.engine.async_llm"):
        __import__(module)
    serve(lambda: Vllm(sys.argv[1], options), import_s=time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
