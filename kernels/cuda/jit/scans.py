"""What is found in a row's logits in one look: its largest, masses, candidates, and log probabilities.

A row is scanned in chunks, so that few rows fill a GPU. Weights are summed as fixed-point numbers: such sums have the
same bits in any order, so a row's token depends on nothing beside it, and it does not matter which of many programs
adds first.
"""

import triton
import triton.language as tl

from novainfer.kernels.cuda.jit.records import (
    ACTIVE,
    CHANGED,
    FLAGS,
    LOGPROBS,
    LOWEST,
    MINUS_INFINITY,
    NO_ID,
    NO_TOKEN,
    ONE,
    RANDOM,
    RECORD,
    TEMPERATURE,
    logits_at,
    ordered,
    small_real,
    whole,
)


@triton.jit
def fixed(weight):
    """A weight of at most 1 in fixed point; a NaN is 0."""
    return tl.where(weight > 0.0, weight * ONE, 0.0).to(tl.int64)


@triton.jit
def largest_of_chunks(logits, largest, ids, stride, vocab_size, num_chunks, CHUNK: tl.constexpr):
    """The largest logit of a chunk of a row, and its first id."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    found = logits_at(logits + row * stride, largest, 0, at, at < vocab_size)
    top = tl.max(found, 0)
    tl.store(largest + row * num_chunks + chunk, top)
    tl.store(ids + row * num_chunks + chunk, tl.min(tl.where(found == top, at, NO_ID), 0))


@triton.jit
def most_likely(largest, ids, tokens, num_chunks, CHUNKS: tl.constexpr):
    """The first most likely token of each row, of what `largest_of_chunks` has found."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_there = chunk < num_chunks
    tops = tl.load(largest + row * num_chunks + chunk, is_there, other=float("-inf"))
    top = tl.max(tops, 0)
    own = tl.load(ids + row * num_chunks + chunk, is_there, other=NO_ID)
    token = tl.min(tl.where(is_there & (tops == top), own, NO_ID), 0)
    tl.store(tokens + row, tl.where(tl.abs(top) < float("inf"), token, NO_TOKEN).to(tl.int64))


@triton.jit
def scan(
    logits,
    edited,
    records,
    largest,
    ids,
    sums,
    tops,
    stride,
    vocab_size,
    num_chunks,
    REPORTED: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Of a chunk of a row: its largest logit and the first id of that, its mass over that, the largest of its segments.

    With `REPORTED` of the model's logits at temperature 1, of the rows whose log probabilities are reported.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    record = records + row * RECORD
    flags = whole(record, FLAGS)
    is_none = (flags & ACTIVE) == 0
    is_changed = flags & CHANGED
    if REPORTED:
        is_changed = 0
        is_none = is_none | (whole(record, LOGPROBS) < 0)
    if is_none:
        return
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    own = edited + row * vocab_size
    found = logits_at(logits + row * stride, own, is_changed, at, at < vocab_size)
    top = tl.max(found, 0)
    tl.store(largest + row * num_chunks + chunk, top)
    tl.store(ids + row * num_chunks + chunk, tl.min(tl.where(found == top, at, NO_ID), 0))
    if REPORTED:
        weights = tl.exp(found - top)
    elif (flags & RANDOM) != 0:
        temperature = small_real(record, TEMPERATURE)
        weights = tl.exp(tl.div_rn(found, temperature) - tl.div_rn(top, temperature))
    else:
        weights = tl.zeros([CHUNK], tl.float32)
    tl.store(sums + row * num_chunks + chunk, tl.sum(fixed(weights), 0))
    of_segments = tl.max(tl.reshape(found, [CHUNK // SEGMENT, SEGMENT]), 1)
    segment = tl.arange(0, CHUNK // SEGMENT)
    num_segments = num_chunks * (CHUNK // SEGMENT)
    tl.store(tops + row * num_segments + chunk * (CHUNK // SEGMENT) + segment, of_segments)


@triton.jit
def collect(
    logits,
    edited,
    is_changed,
    tops,
    picked,
    values,
    value_ids,
    num_segments,
    wanted,
    vocab_size,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """All logits of a row from some bound up, `wanted` at least if there are so many above minus infinity.

    The bound is what so many segments reach, in its leading bits, so few segments hold them all. `values` and
    `value_ids` [CANDIDATES] take them. Gives how many they are, more than CANDIDATES if there is no room for them, and
    the bound in its `ordered` bits.
    """
    segment = tl.arange(0, SEGMENTS)
    keys = ordered(tl.load(tops + segment, segment < num_segments, other=float("-inf")))
    bound = tl.where(tl.sum((keys >= 0).to(tl.int32), 0) >= wanted, 0, LOWEST)
    for bit in range(18):
        higher = bound + (1073741824 >> bit)
        bound = tl.where(tl.sum((keys >= higher).to(tl.int32), 0) >= wanted, higher, bound)
    bound = tl.maximum(bound, MINUS_INFINITY + 1)
    is_picked = (keys >= bound).to(tl.int32)
    num_picked = tl.sum(is_picked, 0)
    place = tl.cumsum(is_picked, 0) - 1
    tl.store(picked + place, segment, (is_picked != 0) & (place < CANDIDATES))
    tl.debug_barrier()
    count = tl.where(num_picked > CANDIDATES, CANDIDATES + 1, 0)
    if num_picked <= CANDIDATES:
        for begin in range(0, num_picked, AT_ONCE):
            number = begin + tl.arange(0, AT_ONCE)
            own = tl.load(picked + number, number < num_picked, other=0)
            at = own[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
            inside = (number < num_picked)[:, None] & (at < vocab_size)
            found = tl.reshape(logits_at(logits, edited, is_changed, at, inside), [AT_ONCE * SEGMENT])
            reaches = (ordered(found) >= bound).to(tl.int32)
            place = count + tl.cumsum(reaches, 0) - 1
            has_room = (reaches != 0) & (place < CANDIDATES)
            tl.store(values + place, found, has_room)
            tl.store(value_ids + place, tl.reshape(at, [AT_ONCE * SEGMENT]), has_room)
            count += tl.sum(reaches, 0)
    tl.debug_barrier()
    return count, bound


@triton.jit(do_not_specialize=["width"])
def report(
    logits,
    records,
    largest,
    sums,
    tops,
    picked,
    values,
    value_ids,
    tokens,
    reports,
    stride,
    vocab_size,
    num_chunks,
    width,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    GUESS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The log probabilities of a row's token and of its most likely ones, of the model's logits.

    reports int64 [n, 1 + 2 * width]: the token's, ids of the most likely ones, theirs; bits of doubles.
    """
    row = tl.program_id(0).to(tl.int64)
    record = records + row * RECORD
    count = whole(record, LOGPROBS)
    token = tl.load(tokens + row)
    if (count < 0) | (token < 0):
        return
    own_logits = logits + row * stride
    chunk = tl.arange(0, CHUNKS)
    is_there = chunk < num_chunks
    of_chunks = tl.load(largest + row * num_chunks + chunk, is_there, other=float("-inf"))
    top = tl.max(of_chunks, 0)
    factors = tl.where(is_there, tl.exp(of_chunks - top), 0.0).to(tl.float64)
    masses = tl.load(sums + row * num_chunks + chunk, is_there, other=0).to(tl.float64)
    normaliser = top.to(tl.float64) + tl.log(tl.sum(masses * factors, 0) / ONE)
    own = reports + row * (1 + 2 * width)
    logprob = tl.load(own_logits + token).to(tl.float64) - normaliser
    tl.store(own, logprob.to(tl.int64, bitcast=True))
    if count > 0:
        num_candidates = tl.full([], CANDIDATES + 1, tl.int32)
        own_values = values + row * CANDIDATES
        own_ids = value_ids + row * CANDIDATES
        if count <= GUESS:
            num_candidates, _ = collect(
                own_logits,
                own_values,
                0,
                tops + row * num_chunks * (CHUNK // SEGMENT),
                picked + row * CANDIDATES,
                own_values,
                own_ids,
                num_chunks * (CHUNK // SEGMENT),
                count,
                vocab_size,
                SEGMENT,
                SEGMENTS,
                AT_ONCE,
                CANDIDATES,
            )
        if (num_candidates <= CANDIDATES) & (num_candidates >= count):
            number = tl.arange(0, CANDIDATES)
            found = tl.load(own_values + number, number < num_candidates, other=float("-inf"))
            found_ids = tl.load(own_ids + number, number < num_candidates, other=NO_ID)
            rank = tl.zeros([CANDIDATES], tl.int32)
            for begin in range(0, num_candidates, AT_ONCE):
                other = begin + tl.arange(0, AT_ONCE)
                theirs = tl.load(own_values + other, other < num_candidates, other=float("-inf"))
                their_ids = tl.load(own_ids + other, other < num_candidates, other=NO_ID)
                is_before = (theirs[None, :] == found[:, None]) & (their_ids[None, :] < found_ids[:, None])
                is_before = is_before | (theirs[None, :] > found[:, None])
                rank += tl.sum(is_before.to(tl.int32), 1)
            is_told = (number < num_candidates) & (rank < count)
            tl.store(own + 1 + rank, found_ids.to(tl.int64), is_told)
            of_all = (found.to(tl.float64) - normaliser).to(tl.int64, bitcast=True)
            tl.store(own + 1 + width + rank, of_all, is_told)
        else:  # many are tied: one after the other, each behind the one before it
            last = top
            last_id = tl.full([], -1, tl.int32)
            for told in range(count):
                best = tl.full([TILE], float("-inf"), tl.float32)
                best_id = tl.full([TILE], NO_ID, tl.int32)
                for begin in range(0, vocab_size, TILE):
                    at = begin + tl.arange(0, TILE)
                    found = logits_at(own_logits, own_values, 0, at, at < vocab_size)
                    is_left = (found < last) | ((found == last) & (at > last_id))
                    is_better = is_left & (at < vocab_size) & ((found > best) | (best_id == NO_ID))
                    best = tl.where(is_better, found, best)
                    best_id = tl.where(is_better, at, best_id)
                is_found = best_id != NO_ID
                last = tl.max(tl.where(is_found, best, float("-inf")), 0)
                last_id = tl.min(tl.where(is_found & (best == last), best_id, NO_ID), 0)
                tl.store(own + 1 + told, last_id.to(tl.int64))
                of_this = last.to(tl.float64) - normaliser
                tl.store(own + 1 + width + told, of_this.to(tl.int64, bitcast=True))
