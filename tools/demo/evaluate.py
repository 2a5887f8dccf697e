"""Held-out accuracy of the demo model, with greedy generation of transformers, or of the engine in a precision.

Run as `python -m tools.demo.evaluate`. A reply is right when it equals the expected one, character for
character. The last line printed is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # must be set before torch loads its OpenMP: others share the cores

import argparse
import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from novainfer.fsm.messages.mode import AUTO, CHECKPOINT, KV_CACHE_DTYPES, QUANTIZATIONS
from novainfer.kernels.demo import model_path
from tools.demo.in_mode import ModeModel
from tools.demo.questions import GROUPS, Question, prompt_of

__all__ = ["Score", "answer", "complete", "evaluate", "load", "main"]

_ROWS = 64  # conversations generated together


@dataclass(frozen=True)
class Score:
    """How many of a group's questions were right, and the first few that were not: (question, reply, expected)."""

    num_right: int
    num_asked: int
    by_kind: dict[str, tuple[int, int]]
    wrong: list[tuple[str, str, str]]
    num_valid_json: int | None = None


def load(folder: Path, precision: str | None = None, kv_cache_dtype: str = AUTO) -> tuple[Any, Any]:
    """The tokenizer and the model in fp32, ready to generate: transformers', or ours in a precision."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if precision is not None:
        return tokenizer, ModeModel(folder, precision, kv_cache_dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return tokenizer, model.eval()


def answer(tokenizer: Any, model: Any, chats: list[list[dict[str, str]]], *, max_new_tokens: int = 256) -> list[str]:
    """The greedy replies to chats."""
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return complete(tokenizer, model, texts, max_new_tokens=max_new_tokens)


def complete(tokenizer: Any, model: Any, texts: list[str], *, max_new_tokens: int = 256) -> list[str]:
    """How texts go on, greedily, generated together with left padding."""
    encoded = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        ids = model.generate(**encoded, do_sample=False, max_new_tokens=max_new_tokens)
    rows: list[str] = tokenizer.batch_decode(ids[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return rows


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def evaluate(tokenizer: Any, model: Any, group: str, *, seed: int, num_questions: int) -> Score:
    """Asks that many held-out questions of one group."""
    rng = random.Random(f"{seed} {group}")
    questions: list[Question] = [GROUPS[group](rng) for _ in range(num_questions)]
    # Rows of like length go together, so that little is padded.
    questions.sort(key=lambda question: sum(len(content) for _, content in question.messages))
    by_kind: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    wrong: list[tuple[str, str, str]] = []
    num_valid = 0
    for at in range(0, len(questions), _ROWS):
        rows = questions[at : at + _ROWS]
        prompts = [prompt_of(tokenizer, row) for row in rows]
        for row, reply in zip(rows, complete(tokenizer, model, prompts), strict=True):
            is_right = reply == row.reply
            by_kind[row.unseen][0] += is_right
            by_kind[row.unseen][1] += 1
            num_valid += group == "json" and _is_json(reply)
            if not is_right:
                wrong.append((row.messages[-1][1], reply, row.reply))
    kinds = {kind: (right, asked) for kind, (right, asked) in sorted(by_kind.items())}
    num_right = sum(right for right, _ in kinds.values())
    return Score(num_right, len(questions), kinds, wrong, num_valid if group == "json" else None)


def main() -> None:
    """Prints the accuracy of each group, what went wrong first, and JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--questions", type=int, default=1000, help="per group; a tenth of that for the long chats")
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument(
        "--precision", choices=(CHECKPOINT, *QUANTIZATIONS), help="compute with the engine, so (default: transformers)"
    )
    parser.add_argument("--kv-cache-dtype", default=AUTO, choices=KV_CACHE_DTYPES, help="only with --precision")
    parser.add_argument("--show", type=int, default=5, help="wrong answers to show per group")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.precision is None and args.kv_cache_dtype != AUTO:
        parser.error("--kv-cache-dtype is the engine's: give --precision, too")
    if args.questions < 1:
        parser.error(f"--questions must be at least 1, not {args.questions}")
    torch.set_num_threads(args.threads)
    tokenizer, model = load(args.model, args.precision, args.kv_cache_dtype)
    report: dict[str, Any] = {}
    for group in args.groups:
        started_s = time.monotonic()
        num_questions = -(-args.questions // 10) if group.endswith("_far") else args.questions
        score = evaluate(tokenizer, model, group, seed=args.seed, num_questions=num_questions)
        accuracy = score.num_right / score.num_asked
        report[group] = {"accuracy": round(accuracy, 4), "right": score.num_right, "asked": score.num_asked}
        if score.num_valid_json is not None:
            report[group]["valid_json"] = score.num_valid_json
        print(f"{group}: {accuracy:.1%} of {score.num_asked} ({time.monotonic() - started_s:.0f} s)", flush=True)
        for kind, (right, asked) in score.by_kind.items():
            print(f"    {kind}: {right}/{asked}")
            report[group].setdefault("kinds", {})[kind] = [right, asked]
        for question, reply, expected in score.wrong[: args.show]:
            print(f"    asked {question!r}\n      got {reply!r}\n     want {expected!r}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
