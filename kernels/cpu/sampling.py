"""The sampler on the team of threads: what sampler.py says of a row, in one call for all rows (sampling.cpp).

Weights are summed as whole multiples of 2**-40, as on CUDA: a row's token has nothing to do with the order of a sum, so
neither with the batch, nor with the number of threads, nor with the width of this CPU's vectors.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from novainfer.fsm.messages.step import Logprobs, SeqParams
from novainfer.kernels.cpu.native import DTYPE_CODES, library, num_threads
from novainfer.kernels.masks import packed_mask
from novainfer.kernels.memory import lazy_zeros
from novainfer.kernels.sampling.drawn import Draw, DrawnAtOnce
from novainfer.kernels.sampling.sampler import LOGIT_ROWS_MAX, TEMPERATURE_GREEDY_MAX
from novainfer.kernels.sampling.verify import Positions, Sampled, logprobs_of
from novainfer.kernels.step import must_lie_in

__all__ = ["NativeSampler"]

VOCAB_SIZE_MAX = 1 << 21  # as in largest.h
SERIAL_LOGITS_MAX = 512 << 10  # one thread has found the largest of so many before a second one would have woken up

_D, _F, _I32, _L, _P = ctypes.c_double, ctypes.c_float, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class SlotDesc(ctypes.Structure):
    """Mirrors `SlotDesc` in sampling.cpp."""

    _fields_ = (
        ("allowed", _P),
        ("banned", _P),
        ("stops", _P),
        ("biased", _P),
        ("biases", _P),
        ("history", _P),
        ("num_banned", _L),
        ("num_stops", _L),
        ("num_biased", _L),
        ("num_prompt", _L),
        ("stops_until", _L),
        ("seed", ctypes.c_uint64),
        ("top_p", _D),
        ("temperature", _F),
        ("min_p", _F),
        ("repetition", _F),
        ("presence", _F),
        ("frequency", _F),
        ("top_k", _I32),
        ("logprobs", _I32),
    )


class DrawDesc(ctypes.Structure):
    """Mirrors `DrawDesc` in sampling.cpp."""

    _fields_ = (
        ("slots", _P),
        ("num_slots", _L),
        ("vocab_size", _L),
        ("num_positions", _L),
        ("logits", _P),
        ("stride", _L),
        ("num_rows", _L),
        ("row_slots", _P),
        ("positions", _P),
        ("drafts", _P),
        ("masks", _P),
        ("tokens", _P),
        ("logprobs", _P),
        ("likely", _P),
        ("width", _L),
        ("scratch", _P),
        ("scratch_stride", _L),
        ("dtype", _I32),
    )


class NativeSampler:
    """See `Sampler`: each thread of the team takes row after row. Only masks are written into logits."""

    name: ClassVar[str] = "native"
    row_invariant: ClassVar[bool] = True
    rows_max = LOGIT_ROWS_MAX

    def __init__(self, vocab_size: int, max_num_seqs: int, max_model_len: int) -> None:
        self.vocab_size = vocab_size
        self._slots: Any = (SlotDesc * max_num_seqs)()
        self._lists: list[list[npt.NDArray[Any]]] = [[] for _ in range(max_num_seqs)]  # what the slots point to
        self._reports: list[int] = [-1] * max_num_seqs  # most likely tokens that each slot reports, or -1
        self._is_greedy = [True] * max_num_seqs  # and nothing changes or reports its logits, stop tokens apart
        self._history_shape = (max_num_seqs, max_model_len + 1)  # the last token is sampled, never computed
        self._history: Tensor | None = None
        self._threads_max = num_threads()
        stride = -(-library().nova_draw_scratch_bytes(vocab_size) // 4096) * 4096
        self._scratch = lazy_zeros((self._threads_max, stride), torch.uint8, torch.device("cpu"))
        mask_bytes = max_num_seqs * vocab_size // 8
        self.scratch_bytes = 4 * math.prod(self._history_shape) + mask_bytes + self._scratch.numel()
        self._call = DrawDesc(
            slots=ctypes.addressof(self._slots),
            num_slots=max_num_seqs,
            vocab_size=vocab_size,
            num_positions=max_model_len + 1,
            scratch=self._scratch.data_ptr(),
            scratch_stride=stride,
        )
        for slot in self._slots:
            slot.top_p, slot.repetition, slot.logprobs = 1.0, 1.0, -1
        self._make_room(LOGIT_ROWS_MAX)

    def _make_room(self, num_rows: int) -> None:
        """For what draws of so many rows are told, at addresses that stay: numpy takes 40 us more between two steps."""
        numbers = ctypes.c_int64 * num_rows
        self._row_slots, self._positions, self._drafts, self._tokens = numbers(), numbers(), numbers(), numbers()
        call = self._call
        call.row_slots, call.positions = ctypes.addressof(self._row_slots), ctypes.addressof(self._positions)
        call.tokens = ctypes.addressof(self._tokens)

    @classmethod
    def refuses(cls, vocab_size: int, device: torch.device) -> str | None:
        """As in `Sampler`."""
        if device.type != "cpu":
            return f"runs on cpu, not on {device.type}"
        return None if vocab_size <= VOCAB_SIZE_MAX else f"a vocabulary of {vocab_size} is more than {VOCAB_SIZE_MAX}"

    @classmethod
    def over(cls, vocab_size: int, max_num_seqs: int, max_model_len: int, device: torch.device) -> Self:
        """As in `Sampler`; histories and what draws work with become resident when the first row needs them."""
        return cls(vocab_size, max_num_seqs, max_model_len)

    def admit(self, row: SeqParams) -> None:
        """As in `Sampler`."""
        must_lie_in("admitted slots", [row.slot], len(self._slots))
        for name in ("banned_token_ids", "stop_token_ids", "logit_bias", "allowed_token_ids"):
            must_lie_in(name, list(getattr(row, name) or ()), self.vocab_size)
        lists = [
            np.array(sorted(set(row.banned_token_ids)), dtype=np.int32),
            np.array(sorted(set(row.stop_token_ids)), dtype=np.int32),
            np.array(list(row.logit_bias), dtype=np.int32),
            np.array(list(row.logit_bias.values()), dtype=np.float32),
        ]
        banned, stops, biased, biases = (numbers.ctypes.data for numbers in lists)
        if row.allowed_token_ids is not None:
            lists.append(packed_mask(row.allowed_token_ids, self.vocab_size))
        self._slots[row.slot] = SlotDesc(
            allowed=lists[4].ctypes.data if row.allowed_token_ids is not None else None,
            banned=banned,
            stops=stops,
            biased=biased,
            biases=biases,
            history=self._admit_tokens(row) if row.needs_history else None,
            num_banned=len(lists[0]),
            num_stops=len(lists[1]),
            num_biased=len(lists[2]),
            num_prompt=row.num_prompt_tokens,
            stops_until=row.min_position,
            seed=row.seed & (2**64 - 1),
            top_p=row.top_p,
            temperature=row.temperature if row.temperature >= TEMPERATURE_GREEDY_MAX else 0.0,
            min_p=row.min_p,
            repetition=row.repetition_penalty,
            presence=row.presence_penalty,
            frequency=row.frequency_penalty,
            top_k=row.top_k if 0 < row.top_k < self.vocab_size else 0,
            logprobs=-1 if row.logprobs is None else min(row.logprobs, self.vocab_size),
        )
        slot = self._slots[row.slot]
        self._lists[row.slot] = lists
        self._reports[row.slot] = slot.logprobs
        changes = slot.allowed or slot.history or slot.num_banned or slot.num_biased
        self._is_greedy[row.slot] = slot.temperature == 0 and slot.logprobs < 0 and not changes

    def _admit_tokens(self, row: SeqParams) -> int:
        """The address of the sequence's tokens so far."""
        if row.token_ids is None:
            raise ValueError("penalties need the tokens so far")
        must_lie_in("token_ids", row.token_ids, self.vocab_size)
        if self._history is None:
            self._history = lazy_zeros(self._history_shape, torch.int32, torch.device("cpu"))
        own = self._history[row.slot]
        own[: len(row.token_ids)] = torch.tensor(row.token_ids, dtype=torch.int32)
        return own.data_ptr()

    def draw(self, logits: Tensor, at: Positions) -> Draw:
        """As in `Sampler`."""
        num_rows = len(at.slots)
        if logits.shape != (num_rows, self.vocab_size) or logits.stride(1) != 1:
            raise ValueError(
                f"logits must be [{num_rows}, {self.vocab_size}], rows contiguous, not {list(logits.shape)}"
            )
        if logits.dtype not in DTYPE_CODES:
            logits = logits.float()
        threads = min(num_threads(), self._threads_max)
        if num_rows * self.vocab_size <= SERIAL_LOGITS_MAX and all(self._is_greedy[slot] for slot in at.slots):
            threads = 1
        if num_rows > len(self._tokens):
            self._make_room(num_rows)
        self._row_slots[:num_rows], self._positions[:num_rows] = list(at.slots), list(at.positions)
        call = self._call
        call.logits, call.stride, call.dtype = logits.data_ptr(), logits.stride(0), DTYPE_CODES[logits.dtype]
        call.num_rows = num_rows
        call.drafts = None
        if at.drafts:
            self._drafts[:num_rows] = list(at.drafts)
            call.drafts = ctypes.addressof(self._drafts)
        masks = None if at.masks is None else at.masks.addresses(at.masks.words.ctypes.data, num_rows, self.vocab_size)
        call.masks = None if masks is None else masks.ctypes.data
        counts = [self._reports[slot] for slot in at.slots]
        width = max(counts, default=-1)
        if width < 0:  # nothing is reported
            call.logprobs, call.likely, call.width = None, None, 0
            library().nova_draw(ctypes.byref(call), threads)
            return DrawnAtOnce(Sampled(self._tokens[:num_rows], []), logits.device)
        logprobs, likely = np.empty((num_rows, 1 + width)), np.empty((num_rows, width), dtype=np.int32)
        call.logprobs, call.likely, call.width = logprobs.ctypes.data, likely.ctypes.data, width
        library().nova_draw(ctypes.byref(call), threads)
        token_ids: list[int] = self._tokens[:num_rows]
        reports: list[Logprobs | None] = [
            None
            if count < 0 or token_id < 0
            else logprobs_of(float(values[0]), ids[:count].tolist(), values[1 : 1 + count].tolist())
            for token_id, count, ids, values in zip(token_ids, counts, likely, logprobs, strict=True)
        ]
        return DrawnAtOnce(
            Sampled(token_ids, reports if any(entry is not None for entry in reports) else []), logits.device
        )
