"""Documents as padded batches of similar length, the same for a seed on every run and after every resume."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from tools.demo.corpus import Document, DrillMix, documents

__all__ = ["DRILLS", "Batch", "batches", "encode"]

_DOCUMENTS_PER_CHUNK = 2_000
# (first chunk, drills from there on): none, then at about steps 900, 2,050 and 2,760 more and more of them.
DRILLS = (
    (0, DrillMix()),
    (15, DrillMix(share=0.22)),
    (32, DrillMix(share=0.40, scrambles=0.3, weights=(40, 25, 25))),
    (42, DrillMix(share=0.50, scrambles=0.25, recalls=0.35, weights=(70, 20, 25))),
)
_LENGTH_STEP = 32  # rows are padded to a multiple of this, so that few shapes occur


@dataclass(frozen=True)
class Batch:
    """One training step.

    input_ids: `[num_rows, length]` int64, right-padded. targets: `[num_trained]` int64. places: `[num_trained]` int64,
    the flat index in `input_ids` whose next token is the target.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[bool]]:
    """The token ids of a document and, for each, whether it is trained."""
    ids: list[int] = []
    trained: list[bool] = []
    for piece, is_trained in document.pieces:
        piece_ids = tokenizer.encode(piece, add_special_tokens=False).ids
        ids += piece_ids
        trained += [is_trained] * len(piece_ids)
    # The first token of plain text is never predicted: nothing comes before it.
    trained[0] = False
    return ids, trained


def _batch(rows: list[tuple[list[int], list[bool]]], length: int) -> Batch:
    input_ids = torch.zeros((len(rows), length), dtype=torch.int64)
    places: list[int] = []
    targets: list[int] = []
    for row, (ids, trained) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        for at, (token_id, is_trained) in enumerate(zip(ids, trained, strict=True)):
            if is_trained:
                places.append(row * length + at - 1)
                targets.append(token_id)
    return Batch(input_ids, torch.tensor(targets), torch.tensor(places))


def batches(
    tokenizer: Tokenizer, seed: int, *, tokens_per_batch: int, context: int, share_long: float
) -> Iterator[Batch]:
    """Endless batches of at most `tokens_per_batch` padded tokens; rows over `context` tokens are cut."""
    for chunk in itertools.count():
        mix = [mix for first, mix in DRILLS if first <= chunk][-1]
        source = documents(seed * 1_000_003 + chunk, share_long=share_long, drill_mix=mix)
        drawn = itertools.islice(source, _DOCUMENTS_PER_CHUNK)
        rows = [encode(tokenizer, document) for document in drawn]
        rows = sorted(((ids[:context], trained[:context]) for ids, trained in rows), key=lambda row: len(row[0]))
        made: list[tuple[list[tuple[list[int], list[bool]]], int]] = []
        group: list[tuple[list[int], list[bool]]] = []
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
