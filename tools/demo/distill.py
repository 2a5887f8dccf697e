"""Distils a draft from the demo model: `python -m tools.demo.distill --out FOLDER`.

The draft reads the same corpus, in an order of its own, and learns what the demo model would say at each trained place:
the whole distribution, not the right answer, since a draft is right when it says what its target says.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # must be set before torch loads its OpenMP: others share the cores

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from novainfer.kernels.demo import model_path
from tools.demo.attention import use_blocks
from tools.demo.batches import SKILLS, Batch, batches
from tools.demo.extend import SHARE_LONG, extension_factor, load_with_markers
from tools.demo.train import SEED, build_config, build_optimizers, fit, rate_factor, save_checkpoint
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
    parser.add_argument("--begin-with", type=Path, help="folder of an earlier draft, to teach it what is new only")
    parser.add_argument("--steps", type=int, default=STEPS, help="the schedule is stretched to this length")
    parser.add_argument("--tokens-per-batch", type=int, default=8192)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    target = Qwen2ForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    if args.begin_with is None:
        draft = Qwen2ForCausalLM._from_config(draft_config(build_config(tokenizer)), dtype=torch.float32)
    else:
        draft, _ = load_with_markers(args.begin_with)
    for model in (draft, target):
        use_blocks(model)
    print(f"{sum(p.numel() for p in draft.parameters()):,} parameters", flush=True)
    source = batches(
        tokenizer,
        SEED + 1,
        tokens_per_batch=args.tokens_per_batch,
        context=CONTEXT,
        share_long=SHARE_LONG,
        mixes=SKILLS,
    )
    fit(
        draft,
        lambda batch: _loss(draft, target, batch),
        source,
        build_optimizers(draft),
        steps=args.steps,
        factor_of=lambda step: (rate_factor if args.begin_with is None else extension_factor)(step, steps=args.steps),
        save=lambda step: save_checkpoint(draft, tokenizer, args.out),
        save_every=args.save_every,
    )


if __name__ == "__main__":
    main()
