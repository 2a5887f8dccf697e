"""The sampler on a GPU: from logits to tokens in a few launches, and nothing is waited for.

How a slot samples is written on the host when its sequence is admitted. Each draw sends the records of its rows over,
152 bytes a row, beside their positions: a step that was told before has records of its own, so an admission disturbs
none; and so do the masks of a step, of the rows that have one. What is longer (tokens so far, lists of ids) lies on
the device, and is written there in order with all else on the stream: a step that was told before has read what stood
there. Both come from pinned memory of torch's caching allocator, which gives a piece out again only when the copy that
reads it has ended; tokens come back the same way.

Penalties are counted from the tokens of the sequence at each draw, and no count outlives it. So a position that is
drawn from twice, because a step has failed or its drafts were wrong, counts what stands before it, and nothing twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from novainfer.fsm.messages.step import NO_TOKEN, Logprobs, SeqParams
from novainfer.kernels.cuda.jit import draws, edits, scans
from novainfer.kernels.cuda.jit import records as of_record
from novainfer.kernels.cuda.language import can_compute_on, element
from novainfer.kernels.cuda.variant import Config, Variant
from novainfer.kernels.masks import Masks, mask_words, packed_mask
from novainfer.kernels.sampling.drawn import Draw
from novainfer.kernels.sampling.sampler import TEMPERATURE_GREEDY_MAX
from novainfer.kernels.sampling.verify import Positions, Sampled, logprobs_of
from novainfer.kernels.step import must_lie_in

__all__ = ["TritonSampler", "num_words", "variants"]

Words = npt.NDArray[np.int64]

# Logits and what is made of them, 256 rows of 152k tokens: 78 MB in bf16, and 156 MB each for what penalties change and
# count; and a product of as many rows is bound by arithmetic on an H100. Few sequences may have many drafts.
ROWS_MIN, ROWS_MAX = 64, 256
VOCAB_SIZE_MAX = 1 << 21  # ids are 32-bit, and so many weights of 2**40 can be summed
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Bits of a logit, seen as fp32, that are the same in all numbers of one sign; even, since two are found in a pass.
LOW_BITS = {torch.float32: 0, torch.float16: 12, torch.bfloat16: 16}

RECORD, ACTIVE, RANDOM, CHANGED, ALLOWED, LISTED, STOPS, PENALISED, MASKED = (
    constant.value
    for constant in (
        of_record.RECORD, of_record.ACTIVE, of_record.RANDOM, of_record.CHANGED, of_record.ALLOWED, of_record.LISTED,
        of_record.STOPS, of_record.PENALISED, of_record.MASKED,
    )
)  # fmt: skip
POSITION, FLAGS, DRAFT, HISTORY, LISTS, NUM_BANNED, NUM_STOPS, NUM_BIASES, LOGPROBS, MASK = (
    word.value
    for word in (
        of_record.POSITION, of_record.FLAGS, of_record.DRAFT, of_record.HISTORY, of_record.LISTS, of_record.NUM_BANNED,
        of_record.NUM_STOPS, of_record.NUM_BIASES, of_record.LOGPROBS,
        of_record.MASK,
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TritonDraw:
    """Tokens on the device, and where the host will find them."""

    token_ids: Tensor
    host: Tensor  # int64: the tokens, from `reports_at` on what `report` says of each row
    width: int  # most likely tokens of a row for which there is room
    counts: Sequence[int]  # [n] of them that are asked for, -1: no log probabilities; empty: none anywhere

    def read(self) -> Sampled:
        """As in `Draw`."""
        words: Words = self.host.numpy()
        num_rows = len(self.token_ids)
        token_ids: list[int] = words[:num_rows].tolist()
        if not self.counts:
            return Sampled(token_ids, [])
        reports = words[_reports_at(num_rows) :].reshape(num_rows, 1 + 2 * self.width)
        numbers = reports.view(np.float64)
        logprobs: list[Logprobs | None] = [
            None
            if count < 0 or token_id < 0
            else logprobs_of(
                float(values[0]),
                ids[1 : 1 + count].tolist(),
                values[1 + self.width : 1 + self.width + count].tolist(),
            )
            for token_id, count, ids, values in zip(token_ids, self.counts, reports, numbers, strict=True)
        ]
        return Sampled(token_ids, logprobs if any(entry is not None for entry in logprobs) else [])


class TritonSampler:
    """See `Sampler`: what a row gives has the same bits in any batch."""

    name: ClassVar[str] = "triton"
    row_invariant: ClassVar[bool] = True

    def __init__(self, vocab_size: int, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.rows_max = min(max(_power_of_2(max_num_seqs), ROWS_MIN), ROWS_MAX)
        self._layout = _Layout(vocab_size)
        self._records: Words = np.zeros((max_num_seqs, RECORD), dtype=np.int64)
        self._plain_from = np.zeros(max_num_seqs)  # the position from which a slot's token is an argmax, or inf
        self._stops_until = np.zeros(max_num_seqs, dtype=np.int64)
        self._lists: list[Tensor | None] = [None] * max_num_seqs
        self._history_shape = (max_num_seqs, max_model_len + 1)  # the last token is sampled, never computed
        self._history: Tensor | None = None
        self._counts: Tensor | None = None  # all 0 between draws
        self._compiled: set[torch.dtype] = set()
        mask_bytes = max_num_seqs * vocab_size // 8
        row_bytes = 8 * vocab_size + self._layout.row_bytes + 4 * mask_words(vocab_size)  # edited, counted, masked
        self.scratch_bytes = 4 * math.prod(self._history_shape) + mask_bytes + self.rows_max * row_bytes
        self._records[:, FLAGS] = ACTIVE
        self._records[:, LOGPROBS] = -1

    @classmethod
    def refuses(cls, vocab_size: int, device: torch.device) -> str | None:
        """As in `Sampler`."""
        if vocab_size > VOCAB_SIZE_MAX:
            return f"a vocabulary of {vocab_size} tokens is more than {VOCAB_SIZE_MAX}"
        return can_compute_on(device)

    @classmethod
    def over(cls, vocab_size: int, max_num_seqs: int, max_model_len: int, device: torch.device) -> Self:
        """As in `Sampler`; lists, histories and counts take memory when the first sequence needs them."""
        return cls(vocab_size, max_num_seqs, max_model_len, device)

    def admit(self, row: SeqParams) -> None:
        """As in `Sampler`."""
        slot = row.slot
        must_lie_in("admitted slots", [slot], len(self._records))
        record = self._records[slot]
        record[:] = 0
        flags = ACTIVE
        if row.temperature >= TEMPERATURE_GREEDY_MAX:
            flags |= RANDOM
        if row.allowed_token_ids is not None:
            flags |= CHANGED | ALLOWED
        if row.banned_token_ids or row.logit_bias:
            flags |= CHANGED | LISTED
        if row.needs_history:
            flags |= CHANGED | PENALISED
            record[HISTORY] = self._admit_tokens(row)
        record[LISTS], self._lists[slot] = self._admit_lists(row)
        record[FLAGS] = flags
        record[NUM_BANNED], record[NUM_STOPS] = len(row.banned_token_ids), len(row.stop_token_ids)
        record[NUM_BIASES] = len(row.logit_bias)
        record[of_record.NUM_PROMPT.value] = row.num_prompt_tokens
        record[of_record.SEED.value] = np.uint64(row.seed & (2**64 - 1)).view(np.int64)
        record[of_record.TOP_K.value] = row.top_k
        record[LOGPROBS] = -1 if row.logprobs is None else min(row.logprobs, self.vocab_size)
        reals = record.view(np.float64)
        reals[of_record.TEMPERATURE.value] = row.temperature
        reals[of_record.TOP_P.value], reals[of_record.MIN_P.value] = row.top_p, row.min_p
        reals[of_record.REPETITION.value] = row.repetition_penalty
        reals[of_record.PRESENCE.value], reals[of_record.FREQUENCY.value] = row.presence_penalty, row.frequency_penalty
        self._stops_until[slot] = row.min_position if row.stop_token_ids else 0
        is_plain = flags == ACTIVE and row.logprobs is None
        self._plain_from[slot] = self._stops_until[slot] if is_plain else math.inf

    def _admit_tokens(self, row: SeqParams) -> int:
        """The address of the sequence's tokens on the device."""
        if row.token_ids is None:
            raise ValueError("penalties need the tokens so far")
        must_lie_in("token_ids", row.token_ids, self.vocab_size)
        if self._history is None:
            self._history = torch.zeros(self._history_shape, dtype=torch.int32, device=self.device)
        own = self._history[row.slot]
        own[: len(row.token_ids)].copy_(self._staged(np.array(row.token_ids, dtype=np.int32)), non_blocking=True)
        return own.data_ptr()

    def _admit_lists(self, row: SeqParams) -> tuple[int, Tensor | None]:
        """The address of the sequence's lists of ids on the device, and what keeps them there."""
        for name in ("banned_token_ids", "stop_token_ids", "logit_bias", "allowed_token_ids"):
            must_lie_in(name, list(getattr(row, name) or ()), self.vocab_size)
        ids = (row.banned_token_ids, row.stop_token_ids, list(row.logit_bias))
        lists: list[npt.NDArray[np.int32]] = [np.array(numbers, dtype=np.int32) for numbers in ids]
        lists.append(np.array(list(row.logit_bias.values()), dtype=np.float32).view(np.int32))
        if row.allowed_token_ids is not None:
            lists.append(packed_mask(row.allowed_token_ids, self.vocab_size))
        words = np.concatenate(lists)
        if not len(words):
            return 0, None
        kept = torch.empty(len(words), dtype=torch.int32, device=self.device)
        kept.copy_(self._staged(words), non_blocking=True)
        return kept.data_ptr(), kept

    def _staged(self, numbers: npt.NDArray[Any]) -> Tensor:
        """The same in memory that the device can read while the host goes on."""
        return torch.from_numpy(numbers).pin_memory() if self.device.type == "cuda" else torch.from_numpy(numbers)

    def draw(self, logits: Tensor, at: Positions) -> Draw:
        """As in `Sampler`: two launches where all rows are greedy and nothing changes them, else four or a few more."""
        num_rows = len(at.slots)
        if logits.shape != (num_rows, self.vocab_size) or logits.dtype not in DTYPES or logits.stride(1) != 1:
            raise ValueError(
                f"logits must be [{num_rows}, {self.vocab_size}] in fp32, fp16 or bf16, rows contiguous, not "
                f"{list(logits.shape)} in {logits.dtype}"
            )
        if logits.dtype not in self._compiled:
            self._compile(logits.dtype)
        slots, positions = np.array(at.slots), np.array(at.positions)
        if at.masks is None and (self._plain_from[slots] <= positions).all():
            tokens = torch.empty(num_rows, dtype=torch.int64, device=self.device)
            self.draw_greedy(logits, tokens)
            return TritonDraw(tokens, self._on_host(tokens), 0, ())
        records, flags, width = self.lay_out(at)
        masks = self._send_masks(at.masks, records) if at.masks is not None else None
        counts: list[int] = records[:, LOGPROBS].tolist() if width >= 0 else []
        found = torch.empty(num_words(num_rows, width), dtype=torch.int64, device=self.device)
        on_device = self._staged(records).to(self.device, non_blocking=True)
        self.draw_rows(logits, on_device, found, flags, width, has_drafts=bool(at.drafts))
        del masks  # what is allocated from now on is written behind what was launched
        return TritonDraw(found[:num_rows], self._on_host(found), width, counts)

    def lay_out(self, at: Positions) -> tuple[Words, int, int]:
        """For `draw_rows`: records [n, RECORD], what any of them has, and how many most likely tokens one asks for."""
        slots, positions = np.array(at.slots), np.array(at.positions)
        records: Words = self._records[slots]
        records[:, POSITION] = positions
        records[:, DRAFT] = at.drafts or NO_TOKEN
        records[positions < self._stops_until[slots], FLAGS] |= CHANGED | LISTED | STOPS
        if at.masks is not None:
            records[list(at.masks.rows), FLAGS] |= MASKED
        return records, int(np.bitwise_or.reduce(records[:, FLAGS])), int(records[:, LOGPROBS].max())

    def _send_masks(self, masks: Masks, records: Words) -> Tensor:
        """The masks on the device, whose addresses the records take; they must be kept until all is launched."""
        sent = self._staged(masks.words).to(self.device, non_blocking=True)
        records[:, MASK] = masks.addresses(sent.data_ptr(), len(records), self.vocab_size)
        return sent

    def draw_greedy(self, logits: Tensor, tokens: Tensor) -> None:
        """The launches of a batch that is greedy, and whose logits nothing changes; tokens int64 [n]."""
        self._layout.most_likely(logits, tokens)

    def _compile(self, dtype: torch.dtype) -> None:
        """Launch all there is over a row that is none, so that no request waits for a compiler."""
        self._compiled.add(dtype)
        logits = torch.zeros(1, self.vocab_size, dtype=dtype, device=self.device)
        records = torch.zeros(1, RECORD, dtype=torch.int64, device=self.device)
        found = torch.empty(num_words(1, 1), dtype=torch.int64, device=self.device)
        self.draw_greedy(logits, found)
        self.draw_rows(logits, records, found, CHANGED | LISTED | PENALISED | MASKED, 1, has_drafts=True)

    def draw_rows(
        self, logits: Tensor, records: Tensor, found: Tensor, flags: int, width: int, *, has_drafts: bool
    ) -> None:
        """The launches alone, all of whose shapes depend on the arguments' shapes: they can be captured in a graph.

        records int64 [n, RECORD] on the device; `flags` and `width` as `lay_out` gives them. found int64
        [num_words(n, width)]: tokens [n], and behind them what `report` says.
        """
        num_rows, layout = len(records), self._layout
        edited = None
        if flags & MASKED:
            layout.forbid(logits, records)
        if flags & CHANGED:
            edited = torch.empty(num_rows, self.vocab_size, dtype=torch.float32, device=self.device)
            # Of the same dtype where none is read, or Triton would compile the function again.
            history_counts = self._zero_counts(num_rows if flags & PENALISED else 0)
            layout.edit(logits, edited, history_counts, records, flags, has_drafts=has_drafts)
        layout.draw(logits, edited, records, found, width)

    def _zero_counts(self, num_rows: int) -> Tensor:
        if num_rows == 0:
            return torch.empty(0, dtype=torch.int32, device=self.device)
        if self._counts is None or len(self._counts) < num_rows:
            room = 1 << (num_rows - 1).bit_length()
            self._counts = None  # first, since there may be no room for both
            self._counts = torch.zeros(room, self.vocab_size, dtype=torch.int32, device=self.device)
        return self._counts

    def _on_host(self, found: Tensor) -> Tensor:
        """What stands there when the step has ended."""
        if self.device.type != "cuda":
            return found
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        return host.copy_(found, non_blocking=True)


def _reports_at(num_rows: int) -> int:
    """Where reports begin behind the tokens: 16 bytes are what Triton loads at once."""
    return num_rows + num_rows % 2


def num_words(num_rows: int, width: int) -> int:
    """What `draw_rows` finds: tokens, and where `width` is not -1, reports of so many most likely tokens."""
    return _reports_at(num_rows) + (num_rows * (1 + 2 * width) if width >= 0 else 0)


class _Layout:
    """How rows of one vocabulary are cut, and the launches."""

    def __init__(self, vocab_size: int) -> None:
        """Chunks and segments depend on nothing else, so that each function is compiled once."""
        is_large = vocab_size >= 32768
        self.vocab_size = vocab_size
        self.chunk = 4096 if is_large else 1024
        self.segment = 128 if is_large else 16
        self.num_chunks = -(-vocab_size // self.chunk)
        self.num_segments = self.num_chunks * (self.chunk // self.segment)
        self.row_bytes = (
            2 * (16 * self.num_chunks + 4 * self.num_segments) + 20 * CANDIDATES
        )  # what is found on the way

    def most_likely(self, logits: Tensor, tokens: Tensor) -> None:
        """The first most likely token of each row."""
        largest, ids = self._of_chunks(logits, torch.float32), self._of_chunks(logits, torch.int32)
        sizes = (logits.stride(0), self.vocab_size, self.num_chunks)
        scans.largest_of_chunks[self._grid(logits)](logits, largest, ids, *sizes, **self.of_chunks().arguments)
        scans.most_likely[len(logits),](largest, ids, tokens, self.num_chunks, **self.of_rows().arguments)

    def forbid(self, logits: Tensor, records: Tensor) -> None:
        """Minus infinity where a row's mask allows no token."""
        sizes = (logits.stride(0), self.vocab_size)
        edits.forbid[self._grid(logits)](logits, records, *sizes, **self.masks().arguments)

    def edit(
        self, logits: Tensor, edited: Tensor, counts: Tensor, records: Tensor, flags: int, *, has_drafts: bool
    ) -> None:
        """Logits as they are drawn from, of the rows whose own are not; fp32 [n, vocab_size]."""
        rows = (len(logits),)
        if has_drafts and flags & PENALISED:
            edits.suppose_drafts[rows](records, **Config({}, num_warps=1, num_stages=1).arguments)
        copy, grid = self.copy().arguments, self._grid(logits)
        edits.copy_logits[grid](logits, edited, counts, records, logits.stride(0), self.vocab_size, **copy)
        if flags & LISTED:
            arguments = self.lists().arguments
            edits.edit_logits[rows](logits, edited, records, logits.stride(0), self.vocab_size, **arguments)
        if flags & PENALISED:
            edits.penalise[grid](edited, counts, records, self.vocab_size, **self.penalties().arguments)

    def draw(self, logits: Tensor, edited: Tensor | None, records: Tensor, found: Tensor, width: int) -> None:
        """Tokens and reports of all rows."""
        num_rows, new = len(logits), logits.new_empty
        sizes = (logits.stride(0), self.vocab_size, self.num_chunks)
        scanned = self._scanned(logits)
        picked, value_ids = (new(num_rows, CANDIDATES, dtype=torch.int32) for _ in range(2))
        values, masses = new(num_rows, CANDIDATES, dtype=torch.float32), new(num_rows, CANDIDATES, dtype=torch.int64)
        if edited is None:
            edited = values  # nothing is read there
        own = self.scan(reported=False).arguments
        scans.scan[self._grid(logits)](logits, edited, records, *scanned, *sizes, **own)
        reported = scanned
        if width >= 0:
            reported = self._scanned(logits)
            own = self.scan(reported=True).arguments
            scans.scan[self._grid(logits)](logits, edited, records, *reported, *sizes, **own)
        own = self.draws(logits.dtype).arguments
        work = (picked, values, value_ids, masses)
        draws.draw[num_rows,](logits, edited, records, *scanned, reported[0], *work, found, *sizes, **own)
        if width >= 0:
            largest, _, sums, tops = reported
            reports = found[_reports_at(num_rows) :]
            places = (picked, values, value_ids)
            own = self.reports().arguments
            scans.report[num_rows,](logits, records, largest, sums, tops, *places, found, reports, *sizes, width, **own)

    def _grid(self, logits: Tensor) -> tuple[int, int]:
        return len(logits), self.num_chunks

    def _of_chunks(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        return logits.new_empty(len(logits), self.num_chunks, dtype=dtype)

    def _scanned(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        largest, ids, sums = (self._of_chunks(logits, dtype) for dtype in (torch.float32, torch.int32, torch.int64))
        return largest, ids, sums, logits.new_empty(len(logits), self.num_segments, dtype=torch.float32)

    # ---- configurations, each of one function ------------------------------------------------------------------------

    def of_chunks(self) -> Config:
        """`largest_of_chunks`."""
        return Config({"CHUNK": self.chunk}, num_warps=4, num_stages=1)

    def of_rows(self) -> Config:
        """`most_likely`."""
        return Config({"CHUNKS": _power_of_2(self.num_chunks)}, num_warps=1, num_stages=1)

    def copy(self) -> Config:
        """`copy_logits`."""
        return Config({"CHUNK": self.chunk, "TOKENS": TOKENS}, num_warps=4, num_stages=1)

    def masks(self) -> Config:
        """`forbid`."""
        return Config({"CHUNK": self.chunk}, num_warps=4, num_stages=1)

    def lists(self) -> Config:
        """`edit_logits`."""
        return Config({"IDS": TOKENS, "CHUNK": self.chunk}, num_warps=4, num_stages=1)

    def penalties(self) -> Config:
        """`penalise`."""
        return Config({"TOKENS": TOKENS}, num_warps=4, num_stages=1)

    def scan(self, *, reported: bool) -> Config:
        """`scan`."""
        constants = {"REPORTED": reported, "CHUNK": self.chunk, "SEGMENT": self.segment}
        return Config(constants, num_warps=4, num_stages=1)

    def draws(self, dtype: torch.dtype) -> Config:
        """`draw`."""
        return Config({"LOW_BIT": LOW_BITS[dtype], **self._of_draws()}, num_warps=16, num_stages=1)

    def reports(self) -> Config:
        """`report`."""
        return Config(self._of_draws(), num_warps=16, num_stages=1)

    def _of_draws(self) -> dict[str, int]:
        return {
            "CHUNK": self.chunk,
            "CHUNKS": _power_of_2(self.num_chunks),
            "SEGMENT": self.segment,
            "SEGMENTS": _power_of_2(self.num_segments),
            "AT_ONCE": 16,
            "CANDIDATES": CANDIDATES,
            "GUESS": GUESS,
            "TILE": min(self.chunk, 2048),
        }


CANDIDATES = 128  # logits of a row that are compared with each other, where that is enough
GUESS = 64  # so many largest ones are looked at for a top_k up to this, and for top_p and min_p
TOKENS = 256  # of a history, or ids of a list, at once


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def variants(capability: int) -> Iterator[Variant]:
    """What is launched for Qwen2's vocabulary."""
    layout = _Layout(151_936)
    sizes = {"stride": "i32", "vocab_size": "i32", "num_chunks": "i32"}
    of_chunks = {"largest": "*fp32", "ids": "*i32", "sums": "*i64", "tops": "*fp32"}
    work = {"picked": "*i32", "values": "*fp32", "value_ids": "*i32"}
    aligned = frozenset({"stride", "vocab_size"})
    for dtype in DTYPES:
        kind = element(dtype)

        def of(function: Any, config: Config, kind: str = kind, note: str = "", **signature: str) -> Variant:
            name = f"{function.__name__} {kind}{note}"
            return Variant(name, function, signature, config, aligned=aligned)

        logits = {"logits": f"*{kind}"}
        both = {**logits, "edited": "*fp32"}
        yield of(scans.largest_of_chunks, layout.of_chunks(), **logits, largest="*fp32", ids="*i32", **sizes)
        rows = {"records": "*i64", "stride": "i32", "vocab_size": "i32"}
        yield of(edits.forbid, layout.masks(), **logits, **rows)
        yield of(edits.copy_logits, layout.copy(), **both, counts="*i32", **rows)
        yield of(edits.edit_logits, layout.lists(), **both, **rows)
        for reported in (False, True):
            config, note = layout.scan(reported=reported), " reported" if reported else ""
            yield of(scans.scan, config, note=note, **both, records="*i64", **of_chunks, **sizes)
        yield of(
            draws.draw, layout.draws(dtype), **both, records="*i64", **of_chunks, raw_largest="*fp32", **work,
            masses="*i64", tokens="*i64", **sizes,
        )  # fmt: skip
        yield of(
            scans.report, layout.reports(), **logits, records="*i64", largest="*fp32", sums="*i64", tops="*fp32",
            **work, tokens="*i64", reports="*i64", **sizes, width="i32",
        )  # fmt: skip
    int_config = Config({}, num_warps=1, num_stages=1)
    yield Variant("suppose_drafts", edits.suppose_drafts, {"records": "*i64"}, int_config)
    yield Variant(
        "most_likely",
        scans.most_likely,
        {"largest": "*fp32", "ids": "*i32", "tokens": "*i64", "num_chunks": "i32"},
        layout.of_rows(),
    )
    yield Variant(
        "penalise",
        edits.penalise,
        {"edited": "*fp32", "counts": "*i32", "records": "*i64", "vocab_size": "i32"},
        layout.penalties(),
        aligned=frozenset({"vocab_size"}),
    )
