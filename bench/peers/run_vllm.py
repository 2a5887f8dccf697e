"""vLLM as a system under test: `python -m … MODEL_DIR OPTIONS`, its asynchronous engine in this process.

Best settings on a CPU: compiled (no `enforce_eager`), prefix cache, threads bound to the cores by itself, a KV cache
that holds every workload (`VLLM_CPU_KVCACHE_SPACE`, in GiB).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from .child import Memory, Timeline, resident, serve


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
            "cache_gib": options["cache_gib"],
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
        found = [resident(), *(resident(pid) for pid in _children())]
        return Memory(
            resident_bytes=sum(memory.resident_bytes for memory in found),
            peak_bytes=sum(memory.peak_bytes for memory in found),
        )

    def cpu_s(self) -> float:
        """Likewise; where /proc tells it."""
        ticks = os.sysconf("SC_CLK_TCK")
        total = time.process_time()
        for pid in _children():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / ticks  # user and system time
        return total


async def _called(function: Any, *arguments: Any) -> Any:
    return function(*arguments)  # it wants a running loop


def _children(pid: int | str = "self") -> list[int]:
    """Processes below one, at any depth; none where there is no /proc."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listing.read_text().split()):
            found += [child, *_children(child)]
    return found


def main() -> None:
    """Imports first, and then the clock of the load."""
    options = json.loads(sys.argv[2])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options["cache_gib"]))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    began_s = time.perf_counter()
    for module in ("vllm", "vllm.engine.arg_utils", "vllm.v1.engine.async_llm"):
        __import__(module)
    serve(lambda: Vllm(sys.argv[1], options), import_s=time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
