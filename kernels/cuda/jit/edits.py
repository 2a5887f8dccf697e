"""What changes a row's logits before they are drawn from: ids that are allowed, banned, biased, or penalised."""

import triton
import triton.language as tl

from novainfer.kernels.cuda.jit.records import (
    ALLOWED,
    CHANGED,
    DRAFT,
    FLAGS,
    FREQUENCY,
    HISTORY,
    LISTED,
    LISTS,
    MASK,
    MASKED,
    NUM_BANNED,
    NUM_BIASES,
    NUM_PROMPT,
    NUM_STOPS,
    PENALISED,
    POSITION,
    PRESENCE,
    PROMPT,
    RECORD,
    REPETITION,
    STOPS,
    address,
    logits_at,
    small_real,
    whole,
)


@triton.jit
def suppose_drafts(records):
    """Write a row's draft where its token will stand, for the rows behind it to count; one program a row."""
    record = records + tl.program_id(0) * RECORD
    draft = whole(record, DRAFT)
    if ((whole(record, FLAGS) & PENALISED) != 0) & (draft >= 0):
        tl.store(address(record, HISTORY) + tl.load(record + POSITION), draft)


@triton.jit
def forbid(logits, records, stride, vocab_size, CHUNK: tl.constexpr):
    """Write minus infinity over the logits of a chunk of a masked row whose ids its mask does not allow."""
    row = tl.program_id(0).to(tl.int64)
    record = records + row * RECORD
    if (whole(record, FLAGS) & MASKED) == 0:
        return
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < vocab_size
    bits = tl.load(address(record, MASK) + (at >> 5), inside, other=0)
    never = tl.full([CHUNK], float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * stride + at, never, inside & (((bits >> (at & 31)) & 1) == 0))


@triton.jit
def copy_logits(logits, edited, counts, records, stride, vocab_size, CHUNK: tl.constexpr, TOKENS: tl.constexpr):
    """Copy a chunk of a changed row in fp32, without the ids that are not allowed; and count a share of its tokens.

    `counts` int32 [n, vocab_size] are all 0 before; `penalise` makes them so again.
    """
    row = tl.program_id(0).to(tl.int64)
    record = records + row * RECORD
    flags = whole(record, FLAGS)
    if (flags & CHANGED) == 0:
        return
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < vocab_size
    found = tl.load(logits + row * stride + at, inside, other=0.0).to(tl.float32)
    if (flags & ALLOWED) != 0:
        num_ids = whole(record, NUM_BANNED) + whole(record, NUM_STOPS) + 2 * whole(record, NUM_BIASES)
        bits = tl.load(address(record, LISTS) + num_ids + (at >> 5), inside, other=0)
        found = tl.where(((bits >> (at & 31)) & 1) != 0, found, float("-inf"))
    tl.store(edited + row * vocab_size + at, found, inside)
    if (flags & PENALISED) != 0:
        history = address(record, HISTORY)
        num_prompt = whole(record, NUM_PROMPT)
        position = whole(record, POSITION)
        for begin in range(tl.program_id(1) * TOKENS, position, tl.num_programs(1) * TOKENS):
            place = begin + tl.arange(0, TOKENS)
            is_there = place < position
            own = counts + row * vocab_size + tl.load(history + place, is_there, other=0)
            tl.atomic_add(own, 1, is_there & (place >= num_prompt), sem="relaxed")
            tl.atomic_or(own, PROMPT, is_there & (place < num_prompt), sem="relaxed")


@triton.jit
def edit_logits(logits, edited, records, stride, vocab_size, IDS: tl.constexpr, CHUNK: tl.constexpr):
    """Ban ids, and stop ids where something is left beside them; then add biases. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    record = records + row * RECORD
    flags = whole(record, FLAGS)
    if (flags & LISTED) == 0:
        return
    own = edited + row * vocab_size
    banned = address(record, LISTS)
    num_banned = whole(record, NUM_BANNED)
    stops = banned + num_banned
    num_stops = whole(record, NUM_STOPS)
    biased = stops + num_stops
    num_biases = whole(record, NUM_BIASES)
    store_at(own, banned, num_banned, float("-inf"), IDS)
    if (flags & STOPS) != 0:
        store_at(own, stops, num_stops, float("-inf"), IDS)
        if ((flags & (ALLOWED | MASKED)) != 0) | (num_banned > 0):
            tl.debug_barrier()
            largest = tl.full([CHUNK], float("-inf"), tl.float32)
            for begin in range(0, vocab_size, CHUNK):
                at = begin + tl.arange(0, CHUNK)
                found = logits_at(logits, own, 1, at, at < vocab_size)
                largest = tl.maximum(largest, found)
            largest_of_all = tl.max(largest, 0)
            tl.debug_barrier()  # all have read
            if (largest_of_all == float("-inf")) | (largest_of_all == float("inf")):
                for begin in range(0, num_stops, IDS):
                    at = begin + tl.arange(0, IDS)
                    ids = tl.load(stops + at, at < num_stops, other=0)
                    is_allowed = at < num_stops
                    if (flags & ALLOWED) != 0:
                        bits = tl.load(biased + 2 * num_biases + (ids >> 5), at < num_stops, other=0)
                        is_allowed = is_allowed & (((bits >> (ids & 31)) & 1) != 0)
                    model = tl.load(logits + row * stride + ids, is_allowed, other=0.0).to(tl.float32)
                    tl.store(own + ids, model, is_allowed)
                tl.debug_barrier()
                store_at(own, banned, num_banned, float("-inf"), IDS)
    tl.debug_barrier()
    for begin in range(0, num_biases, IDS):
        at = begin + tl.arange(0, IDS)
        is_there = at < num_biases
        ids = tl.load(biased + at, is_there, other=0)
        bias = tl.load(biased + num_biases + at, is_there, other=0).to(tl.float32, bitcast=True)
        tl.store(own + ids, tl.load(own + ids, is_there, other=0.0) + bias, is_there)


@triton.jit
def store_at(row, ids, num_ids, value, IDS: tl.constexpr):
    """`row[ids] = value`."""
    for begin in range(0, num_ids, IDS):
        at = begin + tl.arange(0, IDS)
        tl.store(row + tl.load(ids + at, at < num_ids, other=0), value, at < num_ids)


@triton.jit
def penalise(edited, counts, records, vocab_size, TOKENS: tl.constexpr):
    """Penalise the tokens of a row that were counted, a share of its positions a program.

    The first to come to a token takes its count, and all that follow find 0: each is penalised once, and no count is
    left, so that a position that is computed again is counted from nothing again.
    """
    row = tl.program_id(0).to(tl.int64)
    record = records + row * RECORD
    if (whole(record, FLAGS) & PENALISED) == 0:
        return
    history = address(record, HISTORY)
    position = whole(record, POSITION)
    repetition = small_real(record, REPETITION)
    presence = small_real(record, PRESENCE)
    frequency = small_real(record, FREQUENCY)
    for begin in range(tl.program_id(1) * TOKENS, position, tl.num_programs(1) * TOKENS):
        place = begin + tl.arange(0, TOKENS)
        is_there = place < position
        token = tl.load(history + place, is_there, other=0)
        count = tl.atomic_xchg(counts + row * vocab_size + token, 0, is_there, sem="relaxed")
        is_first = is_there & (count != 0)
        own = edited + row * vocab_size + token
        found = tl.load(own, is_first, other=0.0)
        found = tl.where(found > 0.0, tl.div_rn(found, repetition), found * repetition)
        num_output = count & (PROMPT - 1)
        penalty = frequency * num_output.to(tl.float32) + presence
        tl.store(own, tl.where(num_output > 0, found - penalty, found), is_first)
