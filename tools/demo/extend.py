"""Teaches the trained model to call tools and to think: `python -m tools.demo.extend --model FOLDER --out FOLDER`.

It goes on from the weights that `train.py` has made, with the old lessons among the new ones. Calls come first
(`--calls`), at a rate that stays; without it the rate falls to nothing over the run, which brings back what was learnt
before. Four tokens of the old vocabulary become the markers.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # must be set before torch loads its OpenMP: others share the cores

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM

from novainfer.fsm.parsing.formats import MARKERS
from novainfer.kernels.demo import model_path
from tools.demo.attention import use_blocks
from tools.demo.batches import CALLS, SKILLS, batches
from tools.demo.train import SEED, build_optimizers, fit, loss_of_replies, save_checkpoint
from tools.demo.vocabulary import CONTEXT, with_markers

__all__ = ["PEAK", "SHARE_LONG", "extension_factor", "load_with_markers", "main"]

STEPS = 3000
SHARE_LONG = 0.012  # of the documents: a third of what the training had, since attention to them takes most of a step
_RISE = 20  # steps
PEAK = 0.4  # of the rates that the training began with


def extension_factor(step: int, *, steps: int, falls: bool = True, peak: float = PEAK) -> float:
    """The share of the first rates at a step of `steps`: a short rise, and then as it is or a line down to 0."""
    rise = min(1.0, (step + 1) / _RISE)
    return rise * peak * (1 - step / steps if falls else 1)


def load_with_markers(folder: Path) -> tuple[Qwen2ForCausalLM, Tokenizer]:
    """The checkpoint in fp32 and its tokenizer; where it has no markers yet they begin near the mean of all tokens."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if all(before.token_to_id(marker) is not None for marker in MARKERS):
        return model, before
    tokenizer = with_markers(before)
    embedding = model.get_input_embeddings().weight
    ids = [tokenizer.token_to_id(marker) for marker in MARKERS]
    with torch.no_grad():
        noise = torch.randn(len(ids), embedding.shape[1]) * embedding.std(0) / 4
        embedding[ids] = embedding.mean(0) + noise
    return model, tokenizer


def main() -> None:
    """Trains, saving the checkpoint now and then, and at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=model_path(), help="folder of the checkpoint to go on from")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--seed", type=int, default=SEED + 2, help="neither the training's nor the draft's")
    parser.add_argument("--steps", type=int, default=STEPS, help="the schedule is stretched to this length")
    parser.add_argument("--calls", action="store_true", help="mostly calls, at a rate that does not fall")
    parser.add_argument("--peak", type=float, default=PEAK, help="share of the rates that the training began with")
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model, tokenizer = load_with_markers(args.model)
    use_blocks(model)
    source = batches(
        tokenizer,
        args.seed,
        tokens_per_batch=args.tokens_per_batch,
        context=CONTEXT,
        share_long=SHARE_LONG / 4 if args.calls else SHARE_LONG,
        mixes=CALLS if args.calls else SKILLS,
    )
    fit(
        model,
        lambda batch: loss_of_replies(model, batch),
        source,
        build_optimizers(model),
        steps=args.steps,
        factor_of=lambda step: extension_factor(step, steps=args.steps, falls=not args.calls, peak=args.peak),
        save=lambda step: save_checkpoint(model, tokenizer, args.out),
        save_every=args.save_every,
    )


if __name__ == "__main__":
    main()
