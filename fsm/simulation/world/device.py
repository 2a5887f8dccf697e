"""A device whose next token depends on what its KV blocks really hold, so that no accounting mistake goes unseen.

It keeps the block table, the blocks and the slots' parameters as a real one does. A cell holds no key and no value,
but a digest of its token and of every cell before it as they were read through the block table: as in a model, equal
tokens behind another prefix are not the same. The token that it samples is a function of all cells of the context, of
its position, and of all that the slot was given: seed, penalties with the tokens that they count, allowed,
banned and biased ids, and the stop ids, which are banned before `min_tokens`. A block that was shared, evicted,
overwritten, swapped or freed wrongly changes a context, and with it a token; a slot with parameters that are
another's, too old or not there changes it too. `Sampler` and `fold` say what it should have been.

Beside each cell stands whether it was computed otherwise than in the mode that it came up in; `degraded` says of each
row that the last step sampled whether such a cell was in its context, and `degraded_pools` of each that it pooled.

One device is one epoch: whoever replaces it begins with garbage in every block, on the device and on the host.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, repeat
from math import nan
from zlib import crc32

from novainfer.fsm.device.flights import Flights
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import (
    NO_MASK,
    NO_TOKEN,
    NONE_ALLOWED,
    SAMPLED,
    STEPS_IN_FLIGHT_MAX,
    Logprobs,
    SeqParams,
    StepDone,
    StepMasks,
    StepPlan,
)
from novainfer.fsm.simulation.world.shape import BEST, is_exact

VOCAB_SIZE = 64
EOS = 0
EVERY_TOKEN = frozenset(range(VOCAB_SIZE))
CELL = 4  # bytes
GARBAGE = (
    b"\xff" * CELL
)  # what a failed step leaves in the cells it had begun to write; no cell's last byte is so large
NOT_A_NUMBER = b"\xff\xff\xff\x7f"  # nor so large as this, which is kept for a token that gives no number

# Prompt tokens that a device cannot compute, each time it tries: what becomes of the step.
POISON_LOST, POISON_EXCEPTION, POISON_OOM, POISON_HANG = POISONS = (251, 252, 253, 254)

DRAFTS_FAIL_EVERY = 32  # steps of a draft model
NANS_EVERY = 32  # rows with right guesses, in one of which what follows them is not a number

NAN_TOKEN = 250  # the step goes well, but nothing can be sampled from a context that holds this one


def cell(context: int, token_id: int) -> bytes:
    """What is kept for `token_id` behind cells whose digest is `context`."""
    if token_id == NAN_TOKEN:
        return NOT_A_NUMBER
    mixed = (context ^ (token_id + 1) * 0x01000193) * 0x9E3779B1 >> 7 & 0x7FFFFFFF
    return (mixed % 0x7FFFFFFF).to_bytes(CELL, "little")


def fold(token_ids: Iterable[int], context: int = 0) -> int:
    """The digest of the cells of `token_ids`, which follow cells whose digest is `context`."""
    for token_id in token_ids:
        context = crc32(cell(context, token_id), context)
    return context


class Sampler:
    """How one choice of one request picks its tokens."""

    __slots__ = ("_forbidden", "_salt", "_stop_ids", "params")

    def __init__(self, params: SeqParams) -> None:
        self.params = params
        bias = sorted(params.logit_bias.items())
        filters = params.temperature, params.top_p, params.top_k, params.min_p
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._salt = crc32(repr((params.seed, bias, filters, penalties)).encode())
        allowed = range(VOCAB_SIZE) if params.allowed_token_ids is None else params.allowed_token_ids
        self._forbidden = EVERY_TOKEN - frozenset(allowed) | frozenset(params.banned_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)

    def allows(self, mask: Collection[int]) -> bool:
        """Whether any of these tokens may be drawn."""
        return not self._forbidden.issuperset(mask)

    def token(
        self, context: int, position: int, history: bytes | bytearray, mask: Collection[int] | None = None
    ) -> int:
        """The token at `position`, behind cells whose digest is `context`; EOS about once in 64.

        `history` holds the tokens before it, and is looked at for penalties only. `mask` are those that are allowed.
        """
        number = crc32(context.to_bytes(4, "little"), (self._salt + position) & 0xFFFFFFFF)
        params = self.params
        if params.needs_history:
            assert len(history) >= position, f"penalties at position {position} know {len(history)} tokens"
            if params.repetition_penalty != 1:
                number = crc32(history[:position], number)
            number = crc32(history[params.num_prompt_tokens : position], number)
        forbidden = self._forbidden
        for sequence in params.banned_sequences:
            if list(history[max(position - len(sequence) + 1, 0) : position]) == sequence[:-1]:
                forbidden = forbidden | {sequence[-1]}
        if mask is not None:
            forbidden = EVERY_TOKEN - (set(mask) - forbidden)
            if len(forbidden) == VOCAB_SIZE:
                return NONE_ALLOWED
        if position < params.min_position:
            early = forbidden | self._stop_ids
            forbidden = early if len(early) < VOCAB_SIZE else forbidden  # some token must be drawn
        stride = number >> 8 | 1  # odd: it comes by every token
        while number % VOCAB_SIZE in forbidden:
            number += stride
        return number % VOCAB_SIZE


def guesses(
    sampler: Sampler,
    token_ids: Sequence[int],
    count: int,
    wrong_of_16: int,
    allowed: Callable[[Sequence[int]], Collection[int] | None] = lambda _: None,
) -> list[int]:
    """Between none and `count` tokens that `sampler` is going to pick behind `token_ids`, some of them wrong.

    `allowed` says which of them may follow tokens; None: any, or it is not known.
    """
    position, context, history = len(token_ids), fold(token_ids), bytearray(token_ids)
    dice = crc32(b"%d %d" % (sampler.params.seed, position))
    drafts: list[int] = []
    for at in range(dice % (count + 1)):
        token = max(sampler.token(context, position + at, history, allowed(history)), EOS)
        history.append(token)
        context = fold([token], context)
        is_wrong = crc32(b"%d %d" % (dice, at)) % 16 < wrong_of_16
        drafts.append((token + 1) % VOCAB_SIZE if is_wrong else token)
    return drafts


def tokens_in(masks: bytes) -> list[list[int]]:
    """The tokens that each mask allows."""
    size = VOCAB_SIZE // 8
    bits = [int.from_bytes(masks[at : at + size], "little") for at in range(0, len(masks), size)]
    return [[token for token in range(VOCAB_SIZE) if mask >> token & 1] for mask in bits]


def expected_logprob(token_id: int, num_top: int) -> Logprobs:
    """What the device says of `token_id` and the `num_top` it competed with."""
    return -token_id / 8, [(token_id + i) % VOCAB_SIZE for i in range(num_top)], [-i / 4 for i in range(num_top)]


def expected_score(context: int, token_id: int, num_top: int) -> Logprobs:
    """What the device says of `token_id` behind cells whose digest is `context`, and of as many likelier ones."""
    mixed = crc32(b"%d" % token_id, context) % 1024
    return -mixed / 8, [(mixed + i) % VOCAB_SIZE for i in range(num_top)], [-i / 4 for i in range(num_top)]


def hidden_state(context: int) -> tuple[float, ...]:
    """That of a token, cells up to and with whose own have the digest `context`: whole numbers, as sums are exact."""
    return float(context & 0xFFFF), float(context >> 16) - 2**15, 1.0


class ScriptedDevice:
    """`num_slots` rows of block table over blocks of `block_size` tokens, and `num_host_blocks` to swap them to."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        *,
        num_host_blocks: int = 0,
        epoch: int = 0,
        mode: Mode = BEST,
        wrong_drafts_of_16: int = 0,
    ) -> None:
        self.block_size = block_size
        self.epoch = epoch
        self.mode = self._exact_mode = mode
        self.is_closed = False
        self.degraded: list[bool] = []
        self.degraded_pools: list[bool] = []
        self._was_exact = True  # at all times: there is nothing to mark
        self._marks = [bytearray(block_size) for _ in range(num_blocks)]  # 1: computed otherwise
        self._host_marks = [bytearray(block_size) for _ in range(num_host_blocks)]
        self._kv = [bytearray(GARBAGE * block_size) for _ in range(num_blocks)]
        self._host = [bytearray(GARBAGE * block_size) for _ in range(num_host_blocks)]
        self._tables: list[dict[int, int]] = [{} for _ in range(num_slots)]
        self._samplers: list[Sampler | None] = [None] * num_slots
        self._histories: list[bytearray] = [bytearray() for _ in range(num_slots)]  # where they were given
        self._last_tokens = [0] * num_slots  # what each slot was given last
        self._unsampled: set[int] = set()  # slots that a mask which came too late has left without a token
        self._given: dict[int, dict[int, list[int] | None]] = {}  # masks of steps to come, by place; None: it is none
        self._wrong_drafts_of_16 = wrong_drafts_of_16
        self.last_step_id = -1  # the step that was just computed well; -1: none was, or the last one failed
        self.flights = Flights()  # what its thread knows of steps, and says of them
        self.flown: list[StepDone] = []  # computed, and not said: of the oldest steps on it
        self._staged: list[int] = []  # steps that it is told of from buffers that it still reads

    @property
    def num_blocks(self) -> int:
        """Of its cache."""
        return len(self._kv)

    def load(self, mode: Mode) -> None:
        """Compute in `mode` from now on, and call that exact."""
        self.mode = self._exact_mode = mode
        self._was_exact = True

    def fit(self, num_blocks: int) -> None:
        """Another cache, in which all is garbage; what is on the host stays."""
        self._marks = [bytearray(self.block_size) for _ in range(num_blocks)]
        self._kv = [bytearray(GARBAGE * self.block_size) for _ in range(num_blocks)]
        self._tables = [{} for _ in self._tables]

    def run(self, plan: StepPlan, took_s: float = 0.0) -> StepDone:
        """Compute one step, and say that it took `took_s`."""
        assert self.begins(plan), f"step {plan.step_id} follows {plan.after}, and {self.last_step_id} came before it"
        self._write(plan, spoil=False)
        self.last_step_id = plan.step_id
        tokens: list[int] = []
        logprobs: list[Logprobs | None] = []
        num_tokens: list[int] = []
        self.degraded, self.degraded_pools = [], []
        ends = list(accumulate(plan.query_lens))
        (masks, late), at = self._masks_of(plan), 0
        for seq, num_drafts in zip(plan.sample_seqs, plan.num_drafts or repeat(0, len(plan.sample_seqs)), strict=True):
            slot, first = plan.slots[seq], plan.context_lens[seq] - num_drafts
            sampler = self._samplers[slot]
            assert sampler is not None, f"step {plan.step_id} samples in slot {slot}, which was never given parameters"
            num_top = sampler.params.logprobs
            is_void = plan.input_ids[ends[seq] - 1] == SAMPLED and slot in self._unsampled
            for count, draft in enumerate((*plan.input_ids[ends[seq] - num_drafts : ends[seq]], None)):
                if is_void or at + count in late:
                    token = NO_MASK
                else:
                    token = self._sample(plan.step_id, sampler, slot, first + count, masks.get(at + count))
                if count and crc32(b"%d %d" % (plan.step_id, slot)) % NANS_EVERY == 0:
                    token = NO_TOKEN  # behind guesses that are right
                tokens.append(token)
                logprobs.append(None if num_top is None or token < 0 else expected_logprob(token, num_top))
                if token != draft:
                    break
            at += 1 + num_drafts
            self._last_tokens[slot] = max(token, 0)
            self._unsampled.discard(slot)
            if token == NO_MASK:
                self._unsampled.add(slot)
            num_tokens.append(count + 1)
            self.degraded.append(self._is_degraded(slot, first + count))
        counts = num_tokens if plan.num_drafts else []
        drafts, error = self._propose(plan) if plan.num_drafts_wanted else ([], None)
        draft_s = took_s / 4 if plan.num_drafts_wanted else 0.0
        known = logprobs if any(logprobs) else []
        scores = self._scores(plan, ends) if plan.score_rows else []
        sums = self._pooled(plan) if plan.pool_seqs else []
        done = plan.step_id, plan.epoch, tokens, known, took_s, counts, drafts, error, draft_s
        return StepDone(*done, scores=scores, pooled=sums)

    def give(self, masks: StepMasks) -> None:
        """Masks of a step that is computed, or will be; those of one that has ended do nothing."""
        found = tokens_in(masks.masks) if masks.masks else [None] * len(masks.places)
        self._given.setdefault(masks.step_id, {}).update(zip(masks.places, found, strict=True))

    def _masks_of(self, plan: StepPlan) -> tuple[dict[int, list[int]], set[int]]:
        """The tokens that the masks of `plan` allow, by position; and the positions whose masks have not come."""
        assert not plan.mask_ids, f"step {plan.step_id} came to the device without its masks"
        here = [at for place, at in enumerate(plan.mask_positions) if place not in plan.masks_to_come]
        masks, late = dict(zip(here, tokens_in(plan.masks), strict=True)), set[int]()
        given = self._given.get(plan.step_id, {})
        self._given = {step_id: masks for step_id, masks in self._given.items() if step_id > plan.step_id}
        for place in plan.masks_to_come:
            position = plan.mask_positions[place]
            if (mask := given.get(place)) is not None:
                masks[position] = mask
            else:
                late.add(position)
        return masks, late

    def _scores(self, plan: StepPlan, ends: list[int]) -> list[Logprobs]:
        found = []
        for row, token_id, num_top in zip(plan.score_rows, plan.score_ids, plan.score_tops, strict=True):
            seq = bisect_right(ends, row)
            cells = self._read(plan.slots[seq], plan.context_lens[seq] - ends[seq] + row + 1)
            assert GARBAGE not in cells, f"step {plan.step_id} scores what was never computed, or overwritten"
            found.append(expected_score(crc32(cells), token_id, num_top))
        return found

    def _pooled(self, plan: StepPlan) -> list[bytes]:
        found = []
        for seq, count in zip(plan.pool_seqs, plan.pool_lens, strict=True):
            slot, end = plan.slots[seq], plan.context_lens[seq]
            assert seq not in plan.sample_seqs, f"step {plan.step_id} samples behind what it pools"
            cells = self._read(slot, end)
            assert GARBAGE not in cells, f"step {plan.step_id} pools what was never computed, or overwritten"
            states = [hidden_state(crc32(cells[: at * CELL])) for at in range(end - count + 1, end + 1)]
            sums = [nan] * 3 if NOT_A_NUMBER in cells else map(sum, zip(*states, strict=True))
            found.append(struct.pack("<3d", *sums))
            self.degraded_pools.append(self._is_degraded(slot, end))
        return found

    def stage(self, plan: StepPlan) -> None:
        """A step is laid out for it in the next one of as many buffers as steps may be in flight."""
        assert len(self._staged) < STEPS_IN_FLIGHT_MAX, (
            f"step {plan.step_id} is laid out where step {self._staged[0]} is still read"
        )
        assert plan.step_id not in self._staged, f"step {plan.step_id} is launched twice"
        self._staged.append(plan.step_id)

    def unstage(self, step_id: int) -> None:
        """It has ended with a step: the oldest, or one whose launch failed and was waited for."""
        assert step_id in (self._staged[0], self._staged[-1]), f"step {step_id} ends before an older one"
        self._staged.remove(step_id)

    def begins(self, plan: StepPlan) -> bool:
        """Whether the step that `plan` was planned behind has just ended well, if there is such a step."""
        return plan.after in (0, self.last_step_id)

    def _propose(self, plan: StepPlan) -> tuple[list[list[int]], str | None]:
        """The drafts of a draft model, which fails now and then."""
        if crc32(b"%d" % plan.step_id) % DRAFTS_FAIL_EVERY == 0:
            return [], "a scripted error"
        drafts = []
        for seq, wanted in zip(plan.sample_seqs, plan.num_drafts_wanted, strict=True):
            sampler, history = self._samplers[plan.slots[seq]], self._histories[plan.slots[seq]]
            assert sampler is not None
            assert not wanted or history, f"step {plan.step_id} wants drafts behind tokens that were never told"
            drafts.append(guesses(sampler, history, wanted, self._wrong_drafts_of_16))
        return drafts, None

    def _sample(self, step_id: int, sampler: Sampler, slot: int, position: int, mask: Collection[int] | None) -> int:
        cells, history = self._read(slot, position), self._histories[slot]
        assert GARBAGE not in cells, f"step {step_id} attends to what was never computed, or overwritten"
        if mask is not None and not sampler.allows(mask):
            return NONE_ALLOWED
        if NOT_A_NUMBER in cells:
            return NO_TOKEN
        token = sampler.token(crc32(cells), position, history, mask)
        if sampler.params.token_ids is not None:
            history[position:] = bytes([max(token, 0)])  # again, when a step is computed again
        return token

    def spoil(self, plan: StepPlan) -> None:
        """Fail in the middle of a step: its blocks hold garbage where it would have written."""
        self.last_step_id = -1
        self._write(plan, spoil=True)

    def poison(self, plan: StepPlan) -> int | None:
        """The poison in this step, if there is any."""
        return next((token for token in plan.input_ids if token in POISONS), None)

    def _write(self, plan: StepPlan, *, spoil: bool) -> None:
        assert plan.epoch == self.epoch, f"step {plan.step_id} is of epoch {plan.epoch}, the device of {self.epoch}"
        assert plan.mode == self.mode, f"step {plan.step_id} is for mode {plan.mode}, the device is in {self.mode}"
        now_exact = is_exact(self.mode, self._exact_mode)
        was_exact = self._was_exact = self._was_exact and now_exact
        self._swap(plan, spoil=spoil)
        self._copy(plan, spoil=spoil)
        for spec in plan.admissions:
            self._samplers[spec.slot] = Sampler(spec)
            self._histories[spec.slot] = bytearray(spec.token_ids or ())
        for slot, index, block in zip(plan.table_slots, plan.table_indexes, plan.table_blocks, strict=True):
            self._tables[slot][index] = block
        at, kv, size, ids = 0, self._kv, self.block_size, plan.input_ids
        for slot, count, end in zip(plan.slots, plan.query_lens, plan.context_lens, strict=True):
            table, start = self._tables[slot], end - count
            context = 0 if spoil else crc32(self._read(slot, start))
            for position in range(start, end):
                token_id = ids[at] if ids[at] != SAMPLED else self._last_tokens[slot]
                found = GARBAGE if spoil else cell(context, token_id)
                offset = position % size * CELL
                kv[table[position // size]][offset : offset + CELL] = found
                if not was_exact:
                    self._marks[table[position // size]][position % size] = not now_exact
                context = crc32(found, context)
                at += 1
        assert at == len(ids), "input_ids do not match query_lens"

    def _swap(self, plan: StepPlan, *, spoil: bool) -> None:
        """All copies out, then all copies in; of a step that fails nobody knows how far they came."""
        garbage = GARBAGE * self.block_size
        for block, host in zip(plan.swap_out_blocks, plan.swap_out_hosts, strict=True):
            self._host[host] = bytearray(garbage if spoil else self._kv[block])
            self._host_marks[host] = bytearray(self._marks[block])
        for host, block in zip(plan.swap_in_hosts, plan.swap_in_blocks, strict=True):
            self._kv[block] = bytearray(garbage if spoil else self._host[host])
            self._marks[block] = bytearray(self._host_marks[host])

    def _copy(self, plan: StepPlan, *, spoil: bool) -> None:
        """All copies between blocks, in no order: of a step that fails nobody knows how far they came."""
        copied = [(bytearray(self._kv[block]), bytearray(self._marks[block])) for block in plan.copy_from_blocks]
        for (cells, marks), block in zip(copied, plan.copy_to_blocks, strict=True):
            self._kv[block] = bytearray(GARBAGE * self.block_size) if spoil else cells
            self._marks[block] = marks

    def _is_degraded(self, slot: int, length: int) -> bool:
        """Whether one of the first `length` tokens was computed otherwise than in the mode that it came up in."""
        if self._was_exact:
            return False
        table, size = self._tables[slot], self.block_size
        return any(self._marks[table[at // size]][at % size] for at in range(length))

    def _read(self, slot: int, length: int) -> bytes:
        """The cells of the first `length` tokens."""
        table, kv = self._tables[slot], self._kv
        blocks: Sequence[bytearray] = [kv[table[index]] for index in range(-(-length // self.block_size))]
        return b"".join(blocks)[: length * CELL]
