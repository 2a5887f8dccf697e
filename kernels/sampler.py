"""From logits to tokens on the device: adornments, penalties, temperature, filters, one draw a row.

The order is vLLM's: allowed ids, banned ids, stop ids while too early, logit bias; penalties; temperature;
min_p; top_k; top_p. Log probabilities are those of the raw logits, before all of this (vLLM's default,
`raw_logprobs`). A batch in which every row is greedy and unadorned is one argmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from novainfer.kernels.batch import Admission, Logprobs, Sampled, SamplingRow
from novainfer.kernels.draw import draw
from novainfer.kernels.draw_row import argmax, draw_row, log_normaliser, most_likely
from novainfer.kernels.memory import lazy_zeros
from novainfer.kernels.uniform import uniforms

__all__ = ["Sampler"]

TEMPERATURE_GREEDY_MAX = 1e-5  # vLLM's bound: below it, dividing logits overflows before it changes a draw


class Sampler:
    """Sampling state of every slot, and the draw.

    `history[slot, position]` holds the tokens of the sequences whose penalties need them. What is sampled
    is written at its own position, so that computing a rolled-back step again overwrites what it had
    written.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._on_cpu = device.type == "cpu"
        self._rows: list[SamplingRow] = [SamplingRow() for _ in range(max_num_seqs)]
        self._plain = [True] * max_num_seqs  # greedy, unadorned, without log probabilities
        self._history_shape = (max_num_seqs, max_model_len + 1)  # the last token is sampled, never computed
        self._history: Tensor | None = None

    def admit(self, admission: Admission) -> None:
        """A sequence takes a slot: keep how it samples and, where penalties need it, its tokens so far."""
        row = admission.sampling
        self._rows[admission.slot] = row
        self._plain[admission.slot] = (
            row.temperature < TEMPERATURE_GREEDY_MAX
            and row.logprobs is None
            and not row.needs_history
            and not _adorned(row)
        )
        if row.needs_history:
            assert admission.token_ids is not None, "penalties need the tokens so far"
            tokens = torch.tensor(admission.token_ids, dtype=torch.int32)
            self._tokens()[admission.slot, : len(tokens)] = tokens.to(self.device)

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Sampled:
        """Draw one token a row.

        logits [n, vocab_size] in the model's dtype (may be overwritten); slots and positions [n]: whose row
        it is, and the absolute position that the sampled token will have.
        """
        if all(self._plain[slot] for slot in slots):
            return Sampled(self._argmax(logits).tolist())
        rows = [self._rows[slot] for slot in slots]
        logits = logits.float()
        asked = [i for i, row in enumerate(rows) if row.logprobs is not None]
        raw = logits[asked] if asked else None  # a copy: adornments overwrite
        for i, (row, slot, position) in enumerate(zip(rows, slots, positions, strict=True)):
            if _adorned(row):
                _adorn(logits[i], row, position)
            if row.needs_history:
                _penalise(logits[i], row, self._tokens()[slot, :position])
        token_ids: list[int] = self._draw(logits, rows, positions).tolist()
        for row, slot, position, token_id in zip(rows, slots, positions, token_ids, strict=True):
            if row.needs_history:
                self._tokens()[slot, position] = token_id
        sampled = Sampled(token_ids)
        if raw is not None:
            sampled.logprobs = [None] * len(rows)
            found = self._logprobs(raw, [token_ids[i] for i in asked], [rows[i].logprobs or 0 for i in asked])
            for i, logprobs in zip(asked, found, strict=True):
                sampled.logprobs[i] = logprobs
        return sampled

    def _tokens(self) -> Tensor:
        if self._history is None:
            self._history = lazy_zeros(self._history_shape, torch.int32, self.device)
        return self._history

    def _argmax(self, logits: Tensor) -> Tensor:
        return torch.from_numpy(argmax(logits)) if self._on_cpu else logits.argmax(-1)

    def _draw(self, logits: Tensor, rows: list[SamplingRow], positions: Sequence[int]) -> Tensor:
        """Argmax of the greedy rows, a draw for the others -> int64 [n]."""
        random = [i for i, row in enumerate(rows) if row.temperature >= TEMPERATURE_GREEDY_MAX]
        tokens = self._argmax(logits) if len(random) < len(rows) else torch.empty(len(rows), dtype=torch.int64)
        if not random:
            return tokens
        chosen = [rows[i] for i in random]
        u = uniforms([r.seed for r in chosen], [r.choice for r in chosen], [positions[i] for i in random])
        if self._on_cpu:
            x = logits.numpy()
            for i, row, number in zip(random, chosen, u.tolist(), strict=True):
                x[i] /= np.float32(row.temperature)
                tokens[i] = draw_row(x[i], row.top_k, row.top_p, row.min_p, number)
            return tokens
        device, vocab_size = self.device, self.vocab_size
        indexes = torch.tensor(random, device=device)
        temperatures = torch.tensor([r.temperature for r in chosen], dtype=torch.float32, device=device)
        top_k = [r.top_k if 0 < r.top_k < vocab_size else vocab_size for r in chosen]
        tokens = tokens.to(device)
        tokens[indexes] = draw(
            logits[indexes] / temperatures[:, None],
            torch.tensor(top_k, device=device),
            torch.tensor([r.top_p for r in chosen], dtype=torch.float64, device=device),
            torch.tensor([r.min_p for r in chosen], dtype=torch.float32, device=device),
            torch.from_numpy(u).to(device),
        )
        return tokens

    def _logprobs(self, raw: Tensor, tokens: list[int], num_top: list[int]) -> list[Logprobs]:
        """Log-softmax of raw logits fp32 [n, vocab_size] at the sampled tokens and at the most likely ones."""
        found: list[Logprobs] = []
        for row, token_id, count in zip(raw.cpu().numpy(), tokens, num_top, strict=True):
            normaliser = log_normaliser(row)
            ids = most_likely(row, count) if count else np.empty(0, dtype=np.int64)
            ids = ids[np.argsort(-row[ids], kind="stable")][:count]
            found.append((float(row[token_id]) - normaliser, ids.tolist(), (row[ids] - normaliser).tolist()))
        return found


def _adorned(row: SamplingRow) -> bool:
    return bool(row.allowed_ids is not None or row.banned_ids or row.logit_bias or row.min_position)


def _adorn(logits: Tensor, row: SamplingRow, position: int) -> None:
    """Allowed ids, banned ids, stop ids while too early, bias; fp32 [vocab_size], in place.

    Where the stop ids would leave nothing (they are all that is allowed), they stay: some token must be
    drawn.
    """
    if row.allowed_ids is not None:
        allowed = torch.tensor(row.allowed_ids, device=logits.device)
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept
    if row.banned_ids:
        logits[torch.tensor(row.banned_ids, device=logits.device)] = -torch.inf
    if row.stop_ids and position < row.min_position:
        stops = torch.tensor(row.stop_ids, device=logits.device)
        kept = logits[stops]
        logits[stops] = -torch.inf
        if row.allowed_ids is not None and not bool(torch.isfinite(logits.amax())):
            logits[stops] = kept
    if row.logit_bias:
        biased = torch.tensor(list(row.logit_bias), device=logits.device)
        logits[biased] += torch.tensor(list(row.logit_bias.values()), device=logits.device)


def _penalise(logits: Tensor, row: SamplingRow, tokens: Tensor) -> None:
    """Repetition over prompt and output, presence and frequency over the output; fp32 [vocab_size], in place."""
    if row.repetition_penalty != 1.0:
        seen = tokens.long()
        values = logits[seen]
        # Duplicates write the same value twice.
        logits[seen] = torch.where(values > 0, values / row.repetition_penalty, values * row.repetition_penalty)
    output = tokens[row.prompt_len :]
    if len(output) and (row.presence_penalty or row.frequency_penalty):
        ids, counts = torch.unique(output.long(), return_counts=True)
        logits[ids] -= row.frequency_penalty * counts + row.presence_penalty
