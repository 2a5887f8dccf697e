"""Trains the demo model on the CPU: `python -m tools.demo.train --out FOLDER`.

Corpus, tokenizer, initial weights, the order of the batches and the learning rates follow from the seed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # must be set before torch loads its OpenMP: others share the cores

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from novainfer.kernels.demo import model_path
from tools.demo.batches import Batch, batches
from tools.demo.corpus import END, END_OF_TEXT
from tools.demo.vocabulary import CONTEXT, save_tokenizer, train_tokenizer

__all__ = ["build_config", "build_optimizers", "fit", "loss_of_replies", "main", "rate_factor", "save_checkpoint"]

SEED = 1
VOCAB_SIZE = 1280
PEAK_MUON, PEAK_ADAMW = 8e-3, 4e-3  # between two pairs that were tried for 100 steps and did about equally well
# (step, share of the peak rate), straight lines in between: a rise, a plateau, a slow fall, a faster one.
SCHEDULE = ((0, 0.0), (60, 1.0), (1000, 1.0), (2000, 0.474), (2700, 0.242), (3700, 0.01))
_CONFIG_KEYS = (
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "sliding_window",
    "tie_word_embeddings",
    "use_cache",
    "use_sliding_window",
    "vocab_size",
)
SHARE_LONG = 0.04  # of the documents; about a fifth of the tokens


def build_config(tokenizer: Tokenizer) -> Qwen2Config:
    """The shape of the model: 3 query heads share a key head; q, k and v have biases; the embedding is tied."""
    return Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        use_sliding_window=False,
        max_window_layers=6,
        initializer_range=0.04,
    )


def rate_factor(step: int, *, steps: int) -> float:
    """The share of the peak learning rate at a step of a run of `steps`: `SCHEDULE` stretched to that length."""
    at = (step + 1) * SCHEDULE[-1][0] / steps
    for (start, low), (end, high) in itertools.pairwise(SCHEDULE):
        if at <= end:
            return low + (high - low) * (at - start) / (end - start)
    return SCHEDULE[-1][1]


def save_checkpoint(model: Qwen2ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the checkpoint: weights rounded to bf16 (half the size), to be computed with in fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors makes it private to its owner
    partial.replace(folder / "model.safetensors")  # readers see the old file or the new one
    full = model.config.to_dict()
    config = {key: full[key] for key in _CONFIG_KEYS} | {"architectures": ["Qwen2ForCausalLM"], "dtype": "float32"}
    # The flat form is what Qwen2's own checkpoints have and every reader knows.
    config["rope_theta"] = full["rope_parameters"]["rope_theta"]
    _write_json(folder / "config.json", config)
    ends = [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)]
    defaults = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1], "max_new_tokens": 256}
    _write_json(folder / "generation_config.json", defaults)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def loss_of_replies(model: Any, batch: Batch, *, autocast: bool = True) -> torch.Tensor:
    """Mean cross-entropy over the trained places; logits are computed for those only."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[batch.places])
    return torch.nn.functional.cross_entropy(logits.float(), batch.targets)


def build_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding, norms and biases; each with its own peak rate.

    Muon reached in 100 steps the loss that AdamW alone reached in about 150.
    """
    layers = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(layers, lr=PEAK_MUON, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_ADAMW, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def fit(
    model: torch.nn.Module,
    loss_of: Callable[[Batch], torch.Tensor],
    source: Iterable[Batch],
    optimizers: list[torch.optim.Optimizer],
    *,
    steps: int,
    factor_of: Callable[[int], float],
    save: Callable[[int], None],
    save_every: int = 100,
    first: int = 0,
) -> None:
    """Trains on `source` from step `first` to `steps`, saying every 20 steps how it goes; `save` gets steps done.

    `factor_of` a step is its share of the peak learning rates, those that the optimizers were built with.
    """
    peaks = [optimizer.defaults["lr"] for optimizer in optimizers]
    losses: list[float] = []
    began_s, num_tokens = time.monotonic(), 0
    for step, batch in enumerate(itertools.islice(source, first, steps), first):
        factor = factor_of(step)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        num_tokens += batch.input_ids.numel()
        if (step + 1) % 20 == 0:
            elapsed_s = time.monotonic() - began_s
            mean = sum(losses) / len(losses)
            losses.clear()
            speed = f"{num_tokens / elapsed_s:,.0f} tok/s {elapsed_s:.0f} s"
            print(f"step {step + 1} loss {mean:.4f} rate {factor:.2f} {speed}", flush=True)
        if (step + 1) % save_every == 0 or step + 1 == steps:
            save(step + 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=model_path(), help="folder of the checkpoint")
    parser.add_argument("--state", type=Path, help="file of the training state, to resume from")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=SCHEDULE[-1][0], help="the schedule is stretched to this length")
    parser.add_argument("--tokens-per-batch", type=int, default=8192)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fp32", action="store_true", help="train without bf16 autocast")
    return parser.parse_args()


def main() -> None:
    """Trains, saving the checkpoint and the training state now and then, and at the end."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(args.seed, vocab_size=VOCAB_SIZE)
    model = Qwen2ForCausalLM._from_config(build_config(tokenizer), dtype=torch.float32)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    optimizers = build_optimizers(model)
    first = 0
    if args.state is not None and args.state.exists():
        state = torch.load(args.state, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
    source = batches(
        tokenizer, args.seed, tokens_per_batch=args.tokens_per_batch, context=CONTEXT, share_long=SHARE_LONG
    )

    def save(step: int) -> None:
        save_checkpoint(model, tokenizer, args.out)
        if args.state is not None:
            state = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step,
            }
            partial = args.state.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(args.state)

    fit(
        model,
        lambda batch: loss_of_replies(model, batch, autocast=not args.fp32),
        source,
        optimizers,
        first=first,
        steps=args.steps,
        factor_of=lambda step: rate_factor(step, steps=args.steps),
        save=save,
        save_every=args.save_every,
    )


if __name__ == "__main__":
    main()
