"""Drawing tokens on a GPU, beside the time that reading the logits takes, and what telling it so costs the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from novainfer.bench.gpu.clock import Clock
from novainfer.fsm.messages.step import SeqParams
from novainfer.kernels.cuda.sampler import TritonSampler, num_words
from novainfer.kernels.sampling.verify import Positions

__all__ = ["BATCHES", "WAYS", "measure_sampling", "refuses"]

BATCHES = (1, 8, 64, 256)
SETS_BYTES = 160 << 20  # of logits that are read in turn: more than a second-level cache holds
NUM_TOKENS = 512  # of each sequence so far, half of them prompt
QWEN = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
# How a row samples, and how steeply probability falls with a token's rank: 2 where a model is sure, 1 where it is not.
WAYS: Mapping[str, tuple[dict[str, Any], float]] = {
    "greedy": ({}, 2.0),
    "temperature 1": ({"temperature": 1.0}, 2.0),
    "T .7, k 20, p .8": (QWEN, 2.0),
    "the same, repetition 1.05": ({**QWEN, "repetition_penalty": 1.05}, 2.0),
    "top_p .95, sure": ({"temperature": 1.0, "top_p": 0.95}, 2.0),
    "top_p .95, unsure": ({"temperature": 1.0, "top_p": 0.95}, 1.0),
    "top_k 1000": ({"temperature": 1.0, "top_k": 1000}, 1.0),
    "greedy, 5 log probabilities": ({"logprobs": 5}, 2.0),
}


def refuses(device: torch.device) -> str | None:
    """None where it can be measured; else the reason."""
    return TritonSampler.refuses(1, device)


def measure_sampling(way: str, batch: int, vocab_size: int, clock: Clock) -> dict[str, Any]:
    """Of a draw from bf16 logits: seconds in a graph, and of the host to launch it without; a record for the report."""
    params, slope = WAYS[way]
    sampler = TritonSampler.over(vocab_size, batch, NUM_TOKENS + 64, clock.device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (batch, NUM_TOKENS), generator=generator).tolist()
    row = SeqParams(slot=0, num_prompt_tokens=NUM_TOKENS // 2, **params)
    for slot in range(batch):
        sampler.admit(msgspec.structs.replace(row, slot=slot, seed=slot, token_ids=tokens[slot]))
    at = Positions(range(batch), [NUM_TOKENS] * batch)
    is_cuda = clock.device.type == "cuda"
    num_sets = max(1, min(16, SETS_BYTES // (batch * vocab_size * 2))) if is_cuda else 1
    sets = [_logits(batch, vocab_size, slope, clock.device) for _ in range(num_sets)]
    sampler.draw(sets[0], at)  # compiles

    records, flags, width = sampler.lay_out(at)
    on_device = torch.from_numpy(records).to(clock.device)
    found = torch.zeros(num_words(batch, width), dtype=torch.int64, device=clock.device)

    def drawing(logits: Tensor) -> Callable[[], None]:
        if way == "greedy":
            return lambda: sampler.draw_greedy(logits, found)
        return lambda: sampler.draw_rows(logits, on_device, found, flags, width, has_drafts=False)

    spread = clock.measure([drawing(logits) for logits in sets])
    host_s = []
    for _ in range(10 if is_cuda else 1):
        began_s = time.perf_counter()
        sampler.draw(sets[0], at)
        host_s.append(time.perf_counter() - began_s)
        if is_cuda:
            torch.cuda.synchronize(clock.device)
    return {
        "way": way,
        "batch": batch,
        "us": 1e6 * spread.median_s,
        "us_low": 1e6 * spread.low_s,
        "us_high": 1e6 * spread.high_s,
        "gb_per_s": batch * vocab_size * 2 / spread.median_s / 1e9,
        "host_us": 1e6 * statistics.median(host_s),
    }


def _logits(batch: int, vocab_size: int, slope: float, device: torch.device) -> Tensor:
    """The k-th most likely token has a probability of k to the minus `slope`, in an order of each row's own."""
    ranks = torch.rand(batch, vocab_size, device=device).argsort(1) + 1
    return (-slope * ranks.log()).bfloat16()
