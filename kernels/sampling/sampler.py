"""From logits to tokens on the device: masks, bias, penalties, temperature, filters, one draw a row.

The order is vLLM's: the step's mask; allowed ids, banned ids, stop ids while too early, logit bias; penalties;
temperature; min_p; top_k; top_p. Log probabilities are those of the raw logits, before all of this but the mask
(vLLM's default, `raw_logprobs`, where a grammar's mask is written into the logits before the sampler sees them). A
batch in which every row is greedy, and whose logits nothing changes, is one argmax.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import ClassVar, Self

import msgspec
import torch
from torch import Tensor

from novainfer.fsm.messages.step import NO_TOKEN, NONE_ALLOWED, Logprobs, SeqParams
from novainfer.kernels.masks import Masks
from novainfer.kernels.memory import lazy_zeros
from novainfer.kernels.sampling.draw import draw
from novainfer.kernels.sampling.draw_row import argmax, draw_row, logprobs_of_row
from novainfer.kernels.sampling.drawn import Draw, DrawnAtOnce
from novainfer.kernels.sampling.logits import apply_masks, apply_penalties, changes_until
from novainfer.kernels.sampling.uniform import uniforms
from novainfer.kernels.sampling.verify import Positions, Sampled
from novainfer.kernels.step import must_lie_in

__all__ = ["LOGIT_ROWS_MAX", "RowSampler", "TorchSampler"]

# Rows whose logits exist at once: bounds their memory (64 rows of 152k tokens: 20 MB in bf16 and 39 MB in fp32),
# and a matrix product of 64 rows is already bound by arithmetic.
LOGIT_ROWS_MAX = 64

TEMPERATURE_GREEDY_MAX = 1e-5  # vLLM's bound: below it, dividing logits overflows before it changes a draw


class TorchSampler:
    """Sampling state of every slot, and the draw: all rows at once, with plain torch on any device.

    `history[slot, position]` holds the tokens of the sequences whose penalties need them. What is sampled
    is written at its own position, so that computing a rolled-back step again overwrites what it had
    written.
    """

    name: ClassVar[str] = "torch"
    row_invariant: ClassVar[bool] = False  # its reductions are torch's
    rows_max = LOGIT_ROWS_MAX

    def __init__(self, vocab_size: int, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._rows: list[SeqParams] = [SeqParams(slot=slot) for slot in range(max_num_seqs)]
        self._plain_from = [0.0] * max_num_seqs  # the position from which a slot's token is an argmax, or inf
        self._history_shape = (max_num_seqs, max_model_len + 1)  # the last token is sampled, never computed
        self._history: Tensor | None = None
        # Tokens so far; and of a part's rows copies, weights, sums and their order in 32 and 64 bits.
        self.scratch_bytes = 4 * math.prod(self._history_shape) + 64 * LOGIT_ROWS_MAX * vocab_size

    @classmethod
    def refuses(cls, vocab_size: int, device: torch.device) -> str | None:
        """As in `Sampler`: nothing is refused."""
        return None

    @classmethod
    def over(cls, vocab_size: int, max_num_seqs: int, max_model_len: int, device: torch.device) -> Self:
        """As in `Sampler`."""
        return cls(vocab_size, max_num_seqs, max_model_len, device)

    def admit(self, row: SeqParams) -> None:
        """A sequence takes a slot: keep how it samples and, where penalties need it, its tokens so far."""
        must_lie_in("admitted slots", [row.slot], len(self._rows))
        self._rows[row.slot] = msgspec.structs.replace(row, token_ids=None)  # they may be many, and lie in the history
        self._plain_from[row.slot] = _plain_from(row)
        if row.needs_history:
            if row.token_ids is None:
                raise ValueError("penalties need the tokens so far")
            must_lie_in("token_ids", row.token_ids, self.vocab_size)
            tokens = torch.tensor(row.token_ids, dtype=torch.int32)
            self._tokens()[row.slot, : len(tokens)] = tokens.to(self.device)

    def draw(self, logits: Tensor, at: Positions) -> Draw:
        """As in `Sampler`; the tokens are waited for."""
        return DrawnAtOnce(self._sample(logits, at), self.device)

    def _sample(self, logits: Tensor, at: Positions) -> Sampled:
        slots, positions, drafts, masks = at
        plain = [self._plain_from[slot] <= position for slot, position in zip(slots, positions, strict=True)]
        masked: set[int] = set()
        if masks is not None:
            masked.update(masks.rows)
            logits = logits.masked_fill(self._forbidden(masks, len(slots)), -torch.inf)
            plain = [is_plain and row not in masked for row, is_plain in enumerate(plain)]
        if all(plain):
            return Sampled(self._most_likely(logits), [])
        rows = [self._rows[slot] for slot in slots]
        if drafts:
            self._suppose(rows, slots, positions, drafts)
        u = uniforms([row.seed for row in rows], positions).tolist()
        token_ids, logprobs = self._sample_rows(logits, rows, at, plain, masked, u)
        self._suppose(rows, slots, positions, token_ids)
        return Sampled(token_ids, logprobs if any(entry is not None for entry in logprobs) else [])

    def _suppose(
        self, rows: Sequence[SeqParams], slots: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """What penalties count from now on: drafts first, and then what was drawn in their places."""
        for row, slot, position, token_id in zip(rows, slots, positions, token_ids, strict=True):
            if row.needs_history and token_id >= 0:
                self._tokens()[slot, position] = token_id

    def _most_likely(self, logits: Tensor) -> list[int]:
        largest, ids = logits.max(-1)
        found: list[int] = ids.masked_fill_(~largest.isfinite(), NO_TOKEN).tolist()
        return found

    def _sample_rows(
        self,
        logits: Tensor,
        rows: list[SeqParams],
        at: Positions,
        plain: list[bool],
        masked: Collection[int],
        u: list[float],
    ) -> tuple[list[int], list[Logprobs | None]]:
        logits = logits.float()
        asked = [i for i, row in enumerate(rows) if row.logprobs is not None]
        raw = logits[asked]  # a copy: masks overwrite
        for i, row in enumerate(rows):
            if not plain[i]:
                self._apply(logits[i], row, at.slots[i], at.positions[i], is_masked=i in masked)
        largest, tokens = logits.max(-1)
        is_finite = largest.isfinite()
        random = [i for i, row in enumerate(rows) if row.temperature >= TEMPERATURE_GREEDY_MAX]
        if random:
            numbers = torch.tensor([u[i] for i in random], dtype=torch.float64, device=self.device)
            tokens[random] = draw(logits[random], [rows[i] for i in random], numbers)
        raw_largest = largest.clone()
        raw_largest[asked] = raw.amax(-1)
        is_finite &= raw_largest.isfinite()
        tokens.masked_fill_(~is_finite, NO_TOKEN)
        for i in masked:
            if largest[i] == -torch.inf and raw_largest[i] < torch.inf:
                tokens[i] = NONE_ALLOWED
        token_ids: list[int] = tokens.tolist()
        logprobs: list[Logprobs | None] = [None] * len(rows)
        for i, row in zip(asked, raw.cpu().numpy(), strict=True):
            if token_ids[i] >= 0:
                logprobs[i] = logprobs_of_row(row, token_ids[i], rows[i].logprobs or 0)
        return token_ids, logprobs

    def _forbidden(self, masks: Masks, num_rows: int) -> Tensor:
        """What the masks forbid; bool [num_rows, vocab_size]."""
        forbidden = torch.zeros(num_rows, self.vocab_size, dtype=torch.bool)
        forbidden[list(masks.rows)] = torch.from_numpy(~masks.allowed(self.vocab_size))
        return forbidden.to(self.device)

    def _apply(self, x: Tensor, row: SeqParams, slot: int, position: int, *, is_masked: bool) -> None:
        apply_masks(x, row, position, is_masked=is_masked)
        if row.needs_history:
            apply_penalties(x, row, self._tokens()[slot, :position])

    def _tokens(self) -> Tensor:
        if self._history is None:
            self._history = lazy_zeros(self._history_shape, torch.int32, self.device)
        return self._history


class RowSampler(TorchSampler):
    """The same on a CPU without native kernels, row by row: a row of fp32 logits stays in the cache of a core."""

    name = "numpy"
    row_invariant = True

    @classmethod
    def refuses(cls, vocab_size: int, device: torch.device) -> str | None:
        """As in `Sampler`: numpy reads the CPU's memory only."""
        return None if device.type == "cpu" else f"numpy cannot read the memory of {device.type}"

    def _most_likely(self, logits: Tensor) -> list[int]:
        found: list[int] = argmax(logits).tolist()
        return found

    def _sample_rows(
        self,
        logits: Tensor,
        rows: list[SeqParams],
        at: Positions,
        plain: list[bool],
        masked: Collection[int],
        u: list[float],
    ) -> tuple[list[int], list[Logprobs | None]]:
        token_ids: list[int] = []
        logprobs: list[Logprobs | None] = []
        for i, row in enumerate(rows):
            if i and at.drafts and at.drafts[i - 1] not in (NO_TOKEN, token_ids[-1]):
                token_ids.append(NO_TOKEN)
                logprobs.append(None)
                continue
            if plain[i]:
                token_ids.append(int(argmax(logits[i : i + 1])[0]))
                logprobs.append(None)
                continue
            x = logits[i].float()
            raw = x.clone() if row.logprobs is not None else None
            self._apply(x, row, at.slots[i], at.positions[i], is_masked=i in masked)
            if raw is not None and not bool(raw.amax() < torch.inf):
                token_id = NO_TOKEN  # its log probabilities would be none, wherever the NaN lies
            elif i in masked and x.amax() == -torch.inf:
                token_id = NONE_ALLOWED
            elif row.temperature < TEMPERATURE_GREEDY_MAX:
                token_id = int(argmax(x[None])[0])
            else:
                token_id = draw_row(x.numpy(), row, u[i])
            token_ids.append(token_id)
            if raw is None or token_id < 0:
                logprobs.append(None)
            else:
                logprobs.append(logprobs_of_row(raw.numpy(), token_id, row.logprobs or 0))
        return token_ids, logprobs


def _plain_from(row: SeqParams) -> float:
    """From which position on the row is greedy, without anything that changes or reports its logits."""
    if row.logprobs is not None or row.temperature >= TEMPERATURE_GREEDY_MAX:
        return math.inf
    return changes_until(row)
