"""How far each precision's next-token distributions are from those in fp32, on weights that mean nothing.

Run as `python -m tools.demo.divergence --shape 47m`: a random checkpoint of a real model's proportions, random prompts,
and of all their positions the KL divergence from fp32 in nats, and how often the most likely token is another one.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # must be set before torch loads its OpenMP: others share the cores

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from novainfer.bench.make_checkpoint import SHAPES, make_checkpoint
from novainfer.fsm.messages.mode import INT4, INT8
from novainfer.fsm.messages.step import SeqParams, StepPlan
from novainfer.kernels.ops import grouped
from novainfer.kernels.runtime.runner import ModelRunner

__all__ = ["logits_of", "main"]

_PROMPTS, _LENGTH = 4, 64


class _Keeping:
    """The runner's sampler, which keeps the logits it was given."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.logits: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def draw(self, logits: Tensor, at: Any) -> Any:
        self.logits += list(logits.float().clone())
        return self._sampler.draw(logits, at)


def logits_of(folder: Path, prompts: list[list[int]], **options: Any) -> Tensor:
    """Of all positions of prompts, each token computed on a step of its own: fp32 [prompts * length, vocab_size]."""
    length = len(prompts[0])
    runner = ModelRunner.load(
        folder, max_num_seqs=len(prompts), max_num_batched_tokens=1024, max_model_len=length, **options
    )
    blocks = -(-length // runner.info.block_size)
    runner.fit(mode="fixed", num_blocks=len(prompts) * blocks)
    keeping = runner._sampler = _Keeping(runner._sampler)  # type: ignore[assignment]
    slots = list(range(len(prompts)))
    for step in range(length):
        plan = StepPlan(slots, [1] * len(slots), [step + 1] * len(slots), [prompt[step] for prompt in prompts])
        plan.sample_seqs = slots
        if step == 0:
            plan.admissions = [SeqParams(slot=slot) for slot in slots]
            plan.table_slots = [slot for slot in slots for _ in range(blocks)]
            plan.table_indexes = [index for _ in slots for index in range(blocks)]
            plan.table_blocks = list(range(len(slots) * blocks))
        runner.execute(plan)
    runner.close()
    return torch.stack(keeping.logits)


def main() -> None:
    """Prints a line for each precision."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="47m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(args.seed)
    cases: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
        ("bf16", {"dtype": "bfloat16"}, (64,)),
        ("int8, W8A8", {"quantization": INT8}, (64,)),
        *((f"int4 in groups of {size}, W4A8", {"quantization": INT4}, (size,)) for size in (32, 64, 128)),
        ("int4 in groups of 64, W4A32 (torch)", {"quantization": INT4, "native": "0"}, (64,)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(args.shape, Path(folder))
        prompts = torch.randint(1000, 20_000, (_PROMPTS, _LENGTH), generator=generator).tolist()
        exact = logits_of(Path(folder), prompts, dtype="float32").log_softmax(1)
        for name, options, sizes in cases:
            grouped.INT4_GROUP_SIZES = sizes
            found = logits_of(Path(folder), prompts, **{"dtype": "float32", **options}).log_softmax(1)
            divergence = (exact.exp() * (exact - found)).sum(1)
            same = (exact.argmax(1) == found.argmax(1)).float().mean()
            print(f"{name:40} KL {divergence.mean():.2e} nats, at most {divergence.max():.2e}; same token {same:.4f}")


if __name__ == "__main__":
    main()
