"""Documents as padded batches of similar length, the same for a seed on every run and after every resume."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer

from tools.demo.corpus import Document, DrillMix, documents

__all__ = ["CALLS", "DRILLS", "SKILLS", "Batch", "batches", "encode"]

_DOCUMENTS_PER_CHUNK = 2_000
# (first chunk, drills from there on): none, then at about steps 900, 2,050 and 2,760 more and more of them.
DRILLS = (
    (0, DrillMix()),
    (15, DrillMix(share=0.22)),
    (32, DrillMix(share=0.40, scrambles=0.3, weights=(40, 25, 25, 0))),
    (42, DrillMix(share=0.50, scrambles=0.25, recalls=0.35, weights=(70, 20, 25, 0))),
)
# What follows (`extend.py`): most chats offer tools; then some do, some think, and the rest is much as before.
_REHEARSAL = DrillMix(scrambles=0.1, objects=0.1, recalls=0.33, weights=(25, 0, 45, 100))
_FACTS = DrillMix(scrambles=0.22, objects=0.08, recalls=0.35, weights=(25, 0, 45, 60))
CALLS = ((0, replace(_REHEARSAL, share=0.12, tools=0.64, choices=0.4, beginnings=0.3, thoughts=0.06, plain=0.03)),)
SKILLS = (
    (0, replace(_REHEARSAL, share=0.34, tools=0.42, choices=0.2, beginnings=0.5, thoughts=0.07, plain=0.03)),
    (10, replace(_FACTS, share=0.32, tools=0.32, choices=0.15, beginnings=0.2, thoughts=0.12, plain=0.04)),
)
_LENGTH_STEP = 32  # rows are padded to a multiple of this, so that few shapes occur


@dataclass(frozen=True)
class Batch:
    """One training step.

    input_ids: `[num_rows, length]` int64, right-padded. targets: `[num_trained]` int64. places: `[num_trained]` int64,
    the flat index in `input_ids` whose next token is the target; one that weighs more is there as often.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[int]]:
    """The token ids of a document and, for each, how much it weighs in the loss."""
    ids: list[int] = []
    weights: list[int] = []
    for piece, weight in document.pieces:
        piece_ids = tokenizer.encode(piece, add_special_tokens=False).ids
        ids += piece_ids
        weights += [int(weight)] * len(piece_ids)
    # The first token of plain text is never predicted: nothing comes before it.
    weights[0] = 0
    return ids, weights


def _batch(rows: list[tuple[list[int], list[int]]], length: int) -> Batch:
    input_ids = torch.zeros((len(rows), length), dtype=torch.int64)
    places: list[int] = []
    targets: list[int] = []
    for row, (ids, weights) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        for at, (token_id, weight) in enumerate(zip(ids, weights, strict=True)):
            places += [row * length + at - 1] * weight
            targets += [token_id] * weight
    return Batch(input_ids, torch.tensor(targets), torch.tensor(places))


def batches(
    tokenizer: Tokenizer,
    seed: int,
    *,
    tokens_per_batch: int,
    context: int,
    share_long: float,
    mixes: Sequence[tuple[int, DrillMix]] = DRILLS,
) -> Iterator[Batch]:
    """Endless batches of at most `tokens_per_batch` padded tokens; rows over `context` tokens are cut.

    `mixes`: (first chunk of 2,000 documents, what they are drawn from), in order.
    """
    for chunk in itertools.count():
        mix = [mix for first, mix in mixes if first <= chunk][-1]
        source = documents(seed * 1_000_003 + chunk, share_long=share_long, drill_mix=mix)
        drawn = itertools.islice(source, _DOCUMENTS_PER_CHUNK)
        rows = [encode(tokenizer, document) for document in drawn]
        rows = sorted(((ids[:context], weights[:context]) for ids, weights in rows), key=lambda row: len(row[0]))
        made: list[tuple[list[tuple[list[int], list[int]]], int]] = []
        group: list[tuple[list[int], list[int]]] = []
        for row in rows:
            length = -(-len(row[0]) // _LENGTH_STEP) * _LENGTH_STEP
            if group and length * (len(group) + 1) > tokens_per_batch:
                made.append((group, -(-len(group[-1][0]) // _LENGTH_STEP) * _LENGTH_STEP))
                group = []
            group.append(row)
        made.append((group, -(-len(group[-1][0]) // _LENGTH_STEP) * _LENGTH_STEP))
        random.Random(seed + chunk).shuffle(made)
        for group_rows, length in made:
            yield _batch(group_rows, length)
