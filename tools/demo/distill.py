"""Distils a draft from the demo model: `python -m tools.demo.distill --out FOLDER`.

The draft reads the same corpus, in an order of its own, and learns what the demo model would say at each trained place:
the whole distribution, not the right answer, since a draft is right when it says what its target says.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # must be set before torch loads its OpenMP: others share the cores

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from novainfer.kernels.demo import model_path
from tools.demo.batches import Batch, batches
from tools.demo.train import (
    PEAK_ADAMW,
    PEAK_MUON,
    SEED,
    SHARE_LONG,
    build_config,
    build_optimizers,
    rate_factor,
    save_checkpoint,
)
from tools.demo.vocabulary import CONTEXT

__all__ = ["draft_config", "main"]

STEPS = 1600
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_window_layers": 2,
}


def draft_config(target: Qwen2Config) -> Qwen2Config:
    """The shape of the draft: its target's tokenizer, context and head size, a ninth of its parameters."""
    return Qwen2Config(**(target.to_dict() | SHAPE | {"layer_types": None}))


def _logits(model: Any, batch: Batch) -> torch.Tensor:
    hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return model.lm_head(hidden.flatten(0, 1)[batch.places])  # type: ignore[no-any-return]


def _loss(draft: Any, target: Any, batch: Batch) -> torch.Tensor:
    """Mean divergence of the draft from its target over the trained places, in nats."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            wanted = _logits(target, batch).float().log_softmax(-1)
        found = _logits(draft, batch).float().log_softmax(-1)
    return torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="batchmean")


def main() -> None:
    """Trains, saving the checkpoint now and then, and at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--target", type=Path, default=model_path(), help="folder of the model to learn from")
    parser.add_argument("--steps", type=int, default=STEPS, help="the schedule is stretched to this length")
    parser.add_argument("--tokens-per-batch", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    target = Qwen2ForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    draft = Qwen2ForCausalLM._from_config(draft_config(build_config(tokenizer)), dtype=torch.float32)
    print(f"{sum(p.numel() for p in draft.parameters()):,} parameters", flush=True)
    optimizers = build_optimizers(draft)
    source = batches(
        tokenizer, SEED + 1, tokens_per_batch=args.tokens_per_batch, context=CONTEXT, share_long=SHARE_LONG
    )
    losses: list[float] = []
    began_s = time.monotonic()
    for step, batch in enumerate(itertools.islice(source, args.steps)):
        factor = rate_factor(step, steps=args.steps)
        for optimizer, peak in zip(optimizers, (PEAK_MUON, PEAK_ADAMW), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        loss = _loss(draft, target, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 20 == 0:
            mean = sum(losses) / len(losses)
            losses.clear()
            print(f"step {step + 1} loss {mean:.4f} rate {factor:.2f} {time.monotonic() - began_s:.0f} s", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            save_checkpoint(draft, tokenizer, args.out)


if __name__ == "__main__":
    main()
