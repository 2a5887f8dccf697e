"""The demo model as the engine computes it, in any of its modes, with the `generate` of transformers.

Run as `python -m tools.demo.in_mode --precision int8` to see how far a mode is from `full`: both are given the
same expected replies token by token, and asked at each what they would have said.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # must be set before torch loads its OpenMP: others share the cores

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from novainfer.fsm.messages.mode import AUTO, CHECKPOINT, INT8, KV_CACHE_DTYPES, QUANTIZATIONS
from novainfer.fsm.messages.step import Logprobs, SeqParams, StepDone, StepPlan
from novainfer.kernels.demo import model_path
from novainfer.kernels.ops import grouped
from novainfer.kernels.runtime.runner import ModelRunner
from tools.demo.questions import GROUPS, prompt_of
from tools.demo.vocabulary import CONTEXT

__all__ = ["ModeModel", "main"]

_ROWS = 64


class ModeModel:
    """Greedy, up to 64 rows at a time."""

    def __init__(self, folder: Path, precision: str = CHECKPOINT, kv_cache_dtype: str = AUTO) -> None:
        self.runner = ModelRunner.load(
            folder,
            max_num_seqs=_ROWS,
            max_num_batched_tokens=CONTEXT,
            max_model_len=CONTEXT,
            dtype="float32",
            quantization=None if precision == CHECKPOINT else precision,
            kv_cache_dtype=kv_cache_dtype,
        )
        size = self.runner.info.block_size
        self._blocks_per_row = CONTEXT // size
        self.runner.fit(mode="fixed", num_blocks=_ROWS * self._blocks_per_row)

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, *, do_sample: bool = False, max_new_tokens: int = 256
    ) -> Tensor:
        """As transformers' `generate` with left padding: int64 [rows, prompt] -> [rows, prompt + what came]."""
        assert not do_sample
        ends = self.runner.info.eos_token_ids
        prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        said: list[list[int]] = [[] for _ in prompts]

        def take(row: int, token_id: int, logprobs: Logprobs | None) -> int | None:
            said[row].append(token_id)
            is_over = token_id in ends or len(said[row]) == max_new_tokens
            return None if is_over or len(prompts[row]) + len(said[row]) == CONTEXT else token_id

        self._run(prompts, [SeqParams(slot=slot) for slot in range(len(prompts))], take)
        longest = max(map(len, said))
        padded = [tokens + [ends[0]] * (longest - len(tokens)) for tokens in said]
        return torch.cat((input_ids, torch.tensor(padded)), dim=1)

    def score(self, prompts: Sequence[list[int]], replies: Sequence[list[int]]) -> list[list[tuple[float, int]]]:
        """For each token of each reply: its log probability, and the token that is the most likely one there."""
        scores: list[list[tuple[float, int]]] = [[] for _ in prompts]

        def force(row: int) -> SeqParams:
            return SeqParams(slot=row, allowed_token_ids=[replies[row][len(scores[row])]], logprobs=1)

        def take(row: int, token_id: int, logprobs: Logprobs | None) -> int | None:
            assert logprobs is not None
            scores[row].append((logprobs[0], logprobs[1][0]))
            if len(scores[row]) == len(replies[row]):
                return None
            self._admissions.append(force(row))
            return token_id

        self._run(prompts, [force(row) for row in range(len(prompts))], take)
        return scores

    def _run(
        self,
        prompts: Sequence[list[int]],
        rows: Sequence[SeqParams],
        take: Callable[[int, int, Logprobs | None], int | None],
    ) -> None:
        """Prefill one by one, then decode together until `take(row, token, logprobs)` gives no next token."""
        assert len(prompts) <= _ROWS
        self._admissions: list[SeqParams] = []
        lengths = [len(prompt) for prompt in prompts]
        following: dict[int, int] = {}

        def note(slots: list[int], sampled: StepDone) -> None:
            logprobs = sampled.logprobs or [None] * len(slots)
            for slot, token_id, entry in zip(slots, sampled.token_ids, logprobs, strict=True):
                token = take(slot, token_id, entry)
                if token is None:
                    following.pop(slot, None)
                else:
                    following[slot] = token

        for slot, prompt in enumerate(prompts):
            indexes = list(range(self._blocks_per_row))
            blocks = [slot * self._blocks_per_row + index for index in indexes]
            table = ([slot] * len(indexes), indexes, blocks)
            batch = StepPlan([slot], [len(prompt)], [len(prompt)], prompt, *table, [0], [rows[slot]])
            note([slot], self.runner.execute(batch))
        while following:
            slots, tokens = list(following), list(following.values())
            for slot in slots:
                lengths[slot] += 1
            admissions, self._admissions = self._admissions, []
            batch = StepPlan(slots, [1] * len(slots), [lengths[slot] for slot in slots], tokens)
            batch.sample_seqs, batch.admissions = list(range(len(slots))), admissions
            note(slots, self.runner.execute(batch))


def main() -> None:
    """Prints, for each group and all together, how a precision differs from the checkpoint's; JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--precision", default=INT8, choices=(CHECKPOINT, *QUANTIZATIONS))
    parser.add_argument("--kv-cache-dtype", default=AUTO, choices=KV_CACHE_DTYPES)
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--questions", type=int, default=192, help="per group")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=grouped.INT4_GROUP_SIZES[0], help="of int4")
    args = parser.parse_args()
    grouped.INT4_GROUP_SIZES = (args.group_size,)
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    models = [ModeModel(args.model), ModeModel(args.model, args.precision, args.kv_cache_dtype)]
    report: dict[str, dict[str, float]] = {}
    sums: list[list[float]] = []
    for group in GROUPS:
        rng = random.Random(f"{args.seed} {group}")
        questions = [GROUPS[group](rng) for _ in range(args.questions)]
        prompts = tokenizer([prompt_of(tokenizer, question) for question in questions]).input_ids
        replies = tokenizer([f"{question.reply}<|im_end|>" for question in questions]).input_ids
        # Tokens; equal greedy choices; the nats of each precision.
        found = [0.0, 0.0, 0.0, 0.0]
        for at in range(0, len(prompts), _ROWS):
            part = slice(at, at + _ROWS)
            scored = [model.score(prompts[part], replies[part]) for model in models]
            for exact, other in zip(*(chain.from_iterable(rows) for rows in scored), strict=True):
                found = [found[0] + 1, found[1] + (exact[1] == other[1]), found[2] - exact[0], found[3] - other[0]]
        sums.append(found)
        report[group] = _summary(found)
    report["all"] = _summary([sum(column) for column in zip(*sums, strict=True)])
    for group, numbers in report.items():
        print(group, numbers)
    print(json.dumps(report))


def _summary(found: list[float]) -> dict[str, float]:
    count, same, nats, nats_of_other = found
    return {
        "tokens": count,
        "same_greedy_token": round(same / count, 5),
        "perplexity_checkpoint": round(math.exp(nats / count), 5),
        "perplexity": round(math.exp(nats_of_other / count), 5),
    }


if __name__ == "__main__":
    main()
