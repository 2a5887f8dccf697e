"""Drafts by a second, smaller model: how it guesses that sequences go on, beside the model that verifies its guesses.

Its KV cache is parallel to the target's: block for block the same tokens, read through the same block tables, so prefix
sharing, copies and preemption need no word about it. `drafted[block]` says how many of a block's positions it has
computed, of tokens that were no guesses, since the block was given to a sequence; what is missing (a prefix that was
computed before, a block that came back from the host, steps in which no drafts were wanted) is caught up before the
next guess. Behind the blocks that a sequence has lie scratch blocks of its slot: drafts go on where the target has no
room yet. Drafts are greedy, so they depend on the tokens alone. They are guesses: whatever is wrong here costs
acceptance, never a token.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from novainfer.fsm.messages.step import NO_TOKEN, StepDone, StepPlan
from novainfer.kernels.errors import LoadError
from novainfer.kernels.memory import in_words, is_out_of_memory
from novainfer.kernels.models.decoder import Decoder
from novainfer.kernels.models.registry import read_config
from novainfer.kernels.ops.registry import Registry, Sampler
from novainfer.kernels.ops.selection import Selection
from novainfer.kernels.sampling.drawn import joined
from novainfer.kernels.sampling.verify import Positions
from novainfer.kernels.step import StepBuffers
from novainfer.kernels.weights.checkpoint import Checkpoint
from novainfer.kernels.weights.loader import choose_dtype, load_decoder

__all__ = ["Proposer", "load_proposer"]

logger = logging.getLogger(__name__)

# Steps without drafts, of which is noted later what they have sampled: all at once costs as much as one.
LATE_STEPS = 64


def load_proposer(
    draft_dir: Path,
    target_dir: Path,
    *,
    registry: Registry,
    dtype: str,
    device: torch.device,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
    num_speculative_tokens: int,
) -> Proposer:
    """Read the draft model of `target_dir`'s model; raises `LoadError`, also when the two do not speak alike.

    `max_model_len` is the target's, and may be more than the draft's: behind its own context it proposes nothing.
    """
    config, target = read_config(draft_dir), read_config(target_dir)
    if config.vocab_size != target.vocab_size:
        raise LoadError(
            f"the draft model in {draft_dir} has a vocabulary of {config.vocab_size} tokens, and the model it drafts "
            f"for one of {target.vocab_size}: they must have the same tokenizer"
        )
    own, its = _tokens_of(draft_dir), _tokens_of(target_dir)
    if own != its and own is not None and its is not None:
        raise LoadError(
            f"the draft model in {draft_dir} and the model it drafts for must have the same tokenizer, but their "
            "tokenizer.json give tokens other ids"
        )
    context = min(max_model_len, config.max_position_embeddings)
    checkpoint = Checkpoint(draft_dir)
    kernels = Selection(registry, choose_dtype(dtype, config, checkpoint, device), device)
    with torch.inference_mode():
        decoder, weight_bytes = load_decoder(config, checkpoint, kernels, context)
    buffers = StepBuffers(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=context,
        block_size=block_size,
        vocab_size=config.vocab_size,
        device=device,
    )
    logger.info(
        "loaded the draft model %s: %s of weights, kernels %s", draft_dir, in_words(weight_bytes), kernels.names
    )
    return Proposer(decoder, kernels, buffers, num_speculative_tokens)


def _tokens_of(model_dir: Path) -> object:
    """The ids of all tokens, as the folder's tokenizer.json has them; None without one."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        added = {(token["content"], token["id"]) for token in given.get("added_tokens", ())}
        return given["model"].get("vocab"), added
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read: {error!r}") from None


class Proposer:
    """A loaded draft model: `fit` with the target, `follow` each of its steps, `propose` after it."""

    def __init__(self, decoder: Decoder, kernels: Selection, buffers: StepBuffers, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._decoder = decoder
        self._kernels = kernels
        self._buffers = buffers
        self._size = buffers.block_size
        self._num_scratch = -(-num_speculative_tokens // self._size) + 1  # blocks a slot
        # Every slot of a sampler to which nothing was admitted is greedy.
        self._sampler: Sampler = kernels.sampler(buffers.vocab_size).over(
            buffers.vocab_size, buffers.max_num_seqs, buffers.max_model_len, kernels.device
        )
        # Tokens so far of each slot, one more than its context holds; and whether they were all given.
        self._tokens: npt.NDArray[np.int32] = np.zeros((buffers.max_num_seqs, 0), dtype=np.int32)
        self._is_known = np.zeros(buffers.max_num_seqs, dtype=np.bool_)
        self._drafted: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._late_tokens: list[tuple[StepPlan, list[int]]] = []

    @property
    def bytes_per_block(self) -> int:
        """What its keys and values of one block take."""
        shape = self._decoder.attention_shape(self._size)
        found: int = self._kernels.attention(shape).bytes_per_block(shape, self._kernels.dtype)
        return found

    @property
    def scratch_bytes(self) -> int:
        """What its scratch blocks take."""
        return self._buffers.max_num_seqs * self._num_scratch * self.bytes_per_block

    def fit(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate its KV cache beside the target's of `num_blocks`, of which it has drafted nothing.

        Raises `LoadError`.
        """
        shape = self._decoder.attention_shape(self._size)
        num_all = num_blocks + self._buffers.max_num_seqs * self._num_scratch
        kernel = self._kernels.attention(shape)
        try:
            cache = kernel.allocate(shape, num_all, self._kernels.dtype, self._kernels.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise LoadError(f"{num_all} KV blocks of the draft model cannot be allocated: {error}") from None
        self._decoder.attach(cache, self._kernels.forward(self._decoder.parts(cache).kind))
        self._buffers.begin(num_all)
        self._tokens = np.zeros((self._buffers.max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._is_known[:] = False
        self._drafted = np.zeros(num_blocks, dtype=np.int64)
        self._late_tokens.clear()

    def detach(self) -> None:
        """Let the KV cache go."""
        self._decoder.detach()

    def close(self) -> None:
        """Let weights and cache go."""
        self._decoder.detach()
        self._decoder.layers.clear()

    def follow(self, plan: StepPlan) -> None:
        """The target is about to compute `plan`: blocks come to sequences, and sequences to slots."""
        if plan.admissions:
            self._note_late()
        for params in plan.admissions:
            self._is_known[params.slot] = params.token_ids is not None
            if params.token_ids is not None:
                self._tokens[params.slot, : len(params.token_ids)] = params.token_ids
        if plan.table_blocks:
            self._drafted[self._given(plan)] = 0
        if plan.swap_in_blocks or plan.copy_to_blocks:
            self._drafted[plan.swap_in_blocks] = self._drafted[plan.copy_to_blocks] = 0

    def _given(self, plan: StepPlan) -> list[int]:
        """The blocks that sequences are given, but for those of the prefix that they are admitted with."""
        admitted = {params.slot for params in plan.admissions}
        rows = zip(plan.slots, plan.context_lens, plan.query_lens, strict=True)
        prefix_lens = {slot: context - query for slot, context, query in rows if slot in admitted}
        updates = zip(plan.table_slots, plan.table_indexes, plan.table_blocks, strict=True)
        return [block for slot, at, block in updates if at * self._size >= prefix_lens.get(slot, 0)]

    def _note_late(self) -> None:
        """What was put off, all at once, before anything looks at it or changes whose it is."""
        if self._late_tokens:
            slots, places, token_ids = list[int](), list[int](), list[int]()
            for plan, sampled in self._late_tokens:
                slots += [plan.slots[seq] for seq in plan.sample_seqs]
                places += [plan.context_lens[seq] for seq in plan.sample_seqs]
                token_ids += sampled
            self._tokens[slots, places] = token_ids
            self._late_tokens.clear()

    def propose(self, plan: StepPlan, done: StepDone, block_table: npt.NDArray[np.int32]) -> list[list[int]]:
        """Drafts for each of `plan.sample_seqs`, behind the tokens that it got; `block_table` is the target's.

        As many as `plan.num_drafts_wanted` says, at most; none where a row has ended in `NO_TOKEN`, where the context
        is full, while more is to be caught up than a step holds, and where a row before it, which shares its last
        block yet, goes on with another token.
        """
        if not (plan.num_drafts or plan.num_drafts_wanted):
            if len(self._late_tokens) == LATE_STEPS:
                self._note_late()
            self._late_tokens.append((plan, done.token_ids))
            return []
        self._note_late()
        drafts: list[list[int]] = [[] for _ in plan.sample_seqs]
        rows = self._take_tokens(plan, done, block_table)
        if not rows:
            return drafts
        first, ready, left = StepPlan(), [], self._buffers.max_num_batched_tokens
        for row, seq, length, wanted in rows:
            slot = plan.slots[seq]
            count = min(wanted, self.num_speculative_tokens, self._buffers.max_model_len - length)
            if count <= 0 or left <= 0:
                continue
            if not self._is_known[slot]:
                raise ValueError(f"drafts are wanted for slot {slot}, whose tokens so far were not given")
            valid = self._bring_table(slot, plan.context_lens[seq], block_table, length)
            end = min(length, valid + left)
            left -= end - valid
            if end == length:
                first.sample_seqs.append(len(first.slots))
                ready.append((row, slot, length, count))
            first.slots.append(slot)
            first.query_lens.append(end - valid)
            first.context_lens.append(end)
            first.input_ids += self._tokens[slot, valid:end].tolist()
        if not first.slots:
            return drafts
        token_ids = self._compute(first)
        self._note_drafted()
        for step in range(1, self.num_speculative_tokens + 1):
            for (row, *_), token_id in zip(ready, token_ids, strict=True):
                if token_id != NO_TOKEN:
                    drafts[row].append(token_id)
            ready = [r for r, token_id in zip(ready, token_ids, strict=True) if token_id != NO_TOKEN and r[3] > step]
            if not ready:
                break
            token_ids = self._compute(
                StepPlan(
                    slots=[slot for _, slot, _, _ in ready],
                    query_lens=[1] * len(ready),
                    context_lens=[length + step for _, _, length, _ in ready],
                    input_ids=[drafts[row][-1] for row, _, _, _ in ready],
                    sample_seqs=list(range(len(ready))),
                )
            )
        return drafts

    def _take_tokens(
        self, plan: StepPlan, done: StepDone, block_table: npt.NDArray[np.int32]
    ) -> list[tuple[int, int, int, int]]:
        """Keep what the step has sampled; (row, sequence, tokens so far, drafts wanted) of rows that want drafts."""
        none = [0] * len(plan.sample_seqs)
        counts = done.num_tokens or [1] * len(plan.sample_seqs)
        num_drafts, wanted = plan.num_drafts or none, plan.num_drafts_wanted or none
        rows, end, lasts = [], 0, dict[int, int]()  # the tokens that blocks end with
        for row, (seq, count) in enumerate(zip(plan.sample_seqs, counts, strict=True)):
            begin, end = end, end + count
            start = plan.context_lens[seq] - num_drafts[row]
            self._tokens[plan.slots[seq], start : start + count] = done.token_ids[begin:end]
            index, place = divmod(start + count - 1, self._size)
            last = found = done.token_ids[end - 1]
            if place:  # choices of one prompt share its last block, and each would write its own token there
                last = lasts.setdefault(int(block_table[plan.slots[seq], index]), found)
            if wanted[row] > 0 and 0 <= found == last:
                rows.append((row, seq, start + count, wanted[row]))
        return rows

    def _bring_table(self, slot: int, context_len: int, block_table: npt.NDArray[np.int32], length: int) -> int:
        """Take over the blocks of a slot; how many of its first `length` - 1 tokens need not be computed again."""
        table, size = self._buffers.block_table, self._size
        num_real = min(-(-context_len // size), table.shape[1])
        real = block_table[slot, :num_real]
        table[slot, :num_real] = real
        num_scratch = min(self._num_scratch, table.shape[1] - num_real)
        begin = len(self._drafted) + slot * self._num_scratch
        table[slot, num_real : num_real + num_scratch] = range(begin, begin + num_scratch)
        drafted = self._drafted[real]
        short = np.flatnonzero(drafted < size)
        valid = num_real * size if not len(short) else int(short[0]) * size + int(drafted[short[0]])
        return min(valid, length - 1)

    def _compute(self, plan: StepPlan) -> list[int]:
        """One forward pass; the most likely token behind each of `sample_seqs`, or `NO_TOKEN`."""
        hidden = self._decoder.forward(self._buffers.fill(plan))
        if hidden is None:
            return []
        slots = [plan.slots[seq] for seq in plan.sample_seqs]
        positions = [plan.context_lens[seq] for seq in plan.sample_seqs]
        parts = Positions(slots, positions).parts(self._sampler.rows_max)
        return joined([self._sampler.draw(self._decoder.head(hidden[rows]), part) for rows, part in parts]).read()[0]

    def _note_drafted(self) -> None:
        """What the last pass, of no guesses, has written in blocks of sequences is there as long as they are theirs."""
        written = self._buffers.written
        written = written[written < len(self._drafted) * self._size]
        np.maximum.at(self._drafted, written // self._size, written % self._size + 1)
