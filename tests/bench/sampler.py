"""Drawing tokens in C++ beside numpy, interleaved: medians and ratios, of the sampler alone.

    python tests/bench/sampler.py [--dtype bfloat16] [--rows 1,8,32] [--clock cpu]

The options are those of kernels.py beside it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from kernels import LAYERS, SECONDS_PER_CASE, Clock, interleaved
from novainfer.fsm.messages.step import SeqParams
from novainfer.kernels.cpu.sampling import NativeSampler
from novainfer.kernels.sampling.sampler import RowSampler
from novainfer.kernels.sampling.verify import Positions

# How a row samples, and how steeply probability falls with a token's rank: 2 where a model is sure, 1 where it is not.
SAMPLING: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("greedy", {}, 2.0),
    ("temperature 1", {"temperature": 1.0}, 2.0),
    ("Qwen's defaults", {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}, 2.0),
    ("top_p .95, sure", {"temperature": 1.0, "top_p": 0.95}, 2.0),
    ("top_p .95, unsure", {"temperature": 1.0, "top_p": 0.95}, 1.0),
    ("frequency 1", {"temperature": 1.0, "frequency_penalty": 1.0}, 2.0),
    ("5 log probabilities", {"logprobs": 5}, 2.0),
    ("top_k 1000, unsure", {"temperature": 1.0, "top_k": 1000}, 1.0),
)
NUM_TOKENS = 512  # of each sequence so far, half of them prompt


def bench_sampler(dtype: torch.dtype, rows: list[int], clock: Clock) -> None:
    cpu, vocab_size = torch.device("cpu"), LAYERS["lm_head"][0]
    print(f"{dtype}, {torch.get_num_threads()} threads, {vocab_size} tokens; medians in us")
    print(f"{'rows':>4} {'':>20} {'native':>9} {'numpy':>9} {'numpy/native':>12}")
    for m in rows:
        at = Positions(range(m), [NUM_TOKENS] * m)
        tokens = torch.randint(vocab_size, (m, NUM_TOKENS)).tolist()
        for name, way, slope in SAMPLING:
            ranks = torch.rand(m, vocab_size).argsort(1) + 1
            logits = (-slope * ranks.log()).to(dtype)
            calls: dict[str, list[Callable[[], object]]] = {}
            for kernel in (NativeSampler, RowSampler):
                sampler = kernel.over(vocab_size, m, NUM_TOKENS + 1, cpu)
                for slot, row in enumerate(tokens):
                    sampler.admit(SeqParams(slot=slot, seed=slot, num_prompt_tokens=256, token_ids=row, **way))
                calls[kernel.name] = [lambda s=sampler, x=logits, a=at: s.draw(x, a)]
            us = interleaved(calls, SECONDS_PER_CASE, clock)
            own = us["native"]
            print(f"{m:>4} {name:>20} {own:9.0f} {us['numpy']:9.0f} {us['numpy'] / own:12.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    args = parser.parse_args()
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    with torch.inference_mode():
        bench_sampler(getattr(torch, args.dtype), [int(m) for m in args.rows.split(",")], clock)


if __name__ == "__main__":
    main()
