"""From what was found in a row's logits to its token, without a sort and without a host: one program a row."""

import triton
import triton.language as tl

from novainfer.kernels.cuda.jit.records import (
    ACTIVE,
    CHANGED,
    FLAGS,
    HISTORY,
    LOGPROBS,
    LOWEST,
    MASKED,
    MIN_P,
    MINUS_INFINITY,
    NO_ID,
    NO_TOKEN,
    NONE_ALLOWED,
    PENALISED,
    POSITION,
    RANDOM,
    RECORD,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    address,
    logits_at,
    ordered,
    real,
    small_real,
    whole,
)
from novainfer.kernels.cuda.jit.scans import collect, fixed


@triton.jit
def mixed(state):
    """SplitMix64's finaliser (kernels/sampling/uniform.py)."""
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def uniform(seed, position):
    """The number in [0, 1) of (seed, position), fp64: the bits of `uniforms`."""
    state = mixed(mixed(seed.to(tl.uint64, bitcast=True)))
    state = mixed(state ^ position.to(tl.uint64, bitcast=True))
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def target_of(u, total):
    """The place in [0, total) that u in [0, 1) points to; int64, total > 0."""
    return tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def draw(
    logits,
    edited,
    records,
    largest,
    ids,
    sums,
    tops,
    raw_largest,
    picked,
    values,
    value_ids,
    masses,
    tokens,
    stride,
    vocab_size,
    num_chunks,
    LOW_BIT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    GUESS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token of each row, of what `scan` has found; and where penalties count it, in its place. One program a row.

    Of logits that are LOW_BIT-bit multiples (bf16 as fp32: 16) no bits below that need be told apart.
    """
    row = tl.program_id(0).to(tl.int64)
    record = records + row * RECORD
    flags = whole(record, FLAGS)
    if (flags & ACTIVE) == 0:
        tl.store(tokens + row, NO_TOKEN)
        return
    chunk = tl.arange(0, CHUNKS)
    is_there = chunk < num_chunks
    of_chunks = tl.load(largest + row * num_chunks + chunk, is_there, other=float("-inf"))
    top = tl.max(of_chunks, 0)
    is_drawn = tl.abs(top) < float("inf")
    # Of the model's logits, where they are reported: they must have log probabilities.
    raw_top = tl.max(tl.load(raw_largest + row * num_chunks + chunk, is_there, other=float("-inf")), 0)
    is_drawn = is_drawn & ((whole(record, LOGPROBS) < 0) | (tl.abs(raw_top) < float("inf")))
    token = tl.full([], NO_ID, tl.int32)
    if (flags & RANDOM) == 0:
        own_ids = tl.load(ids + row * num_chunks + chunk, is_there, other=NO_ID)
        token = tl.min(tl.where(is_there & (of_chunks == top), own_ids, NO_ID), 0)
    elif is_drawn:
        token, is_drawn = draw_at_random(
            logits + row * stride,
            edited + row * vocab_size,
            record,
            flags & CHANGED,
            of_chunks,
            top,
            sums + row * num_chunks,
            tops + row * num_chunks * (CHUNK // SEGMENT),
            picked + row * CANDIDATES,
            values + row * CANDIDATES,
            value_ids + row * CANDIDATES,
            masses + row * CANDIDATES,
            vocab_size,
            num_chunks,
            LOW_BIT,
            CHUNK,
            CHUNKS,
            SEGMENT,
            SEGMENTS,
            AT_ONCE,
            CANDIDATES,
            GUESS,
            TILE,
        )
    has_none = ((flags & MASKED) != 0) & (top == float("-inf"))
    has_none = has_none & ((whole(record, LOGPROBS) < 0) | (raw_top < float("inf")))
    token = tl.where(is_drawn, token, tl.where(has_none, NONE_ALLOWED, NO_TOKEN))
    tl.store(tokens + row, token.to(tl.int64))
    if ((flags & PENALISED) != 0) & is_drawn:
        tl.store(address(record, HISTORY) + tl.load(record + POSITION), token)


@triton.jit
def draw_at_random(
    logits,
    edited,
    record,
    is_changed,
    of_chunks,
    top,
    sums,
    tops,
    picked,
    values,
    value_ids,
    masses,
    vocab_size,
    num_chunks,
    LOW_BIT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    GUESS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A token of one row, and whether there is one: by its chunks, among a few candidates, or in many passes."""
    temperature = small_real(record, TEMPERATURE)
    scaled_top = tl.div_rn(top, temperature)
    u = uniform(tl.load(record + SEED), tl.load(record + POSITION))
    top_k = whole(record, TOP_K)
    top_k = tl.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    top_p = real(record, TOP_P)
    min_p = small_real(record, MIN_P)

    # The mass of each chunk, over the row's largest logit.
    chunk = tl.arange(0, CHUNKS)
    own_sums = tl.load(sums + chunk, chunk < num_chunks, other=0)
    factors = tl.exp(tl.div_rn(of_chunks, temperature) - scaled_top).to(tl.float64)
    factors = tl.where(chunk < num_chunks, factors, 0.0)
    chunk_masses = (own_sums.to(tl.float64) * factors).to(tl.int64)

    token = tl.full([], NO_ID, tl.int32)
    if (top_k == vocab_size) & (top_p >= 1.0) & (min_p <= 0.0):
        target = target_of(u, tl.sum(chunk_masses, 0))
        ends = tl.cumsum(chunk_masses, 0)
        here = tl.sum((ends <= target).to(tl.int32), 0)
        left = target - tl.sum(tl.where(chunk < here, chunk_masses, 0), 0)
        factor = tl.sum(tl.where(chunk == here, factors, 0.0), 0)
        of_chunk = tl.sum(tl.where(chunk == here, own_sums, 0), 0)
        chunk_top = tl.max(tl.where(chunk == here, of_chunks, float("-inf")), 0)
        left = tl.minimum((left.to(tl.float64) / factor).to(tl.int64), of_chunk - 1)
        at = here * CHUNK + tl.arange(0, CHUNK)
        found = logits_at(logits, edited, is_changed, at, at < vocab_size)
        weights = tl.exp(tl.div_rn(found, temperature) - tl.div_rn(chunk_top, temperature))
        token = tl.min(tl.where(tl.cumsum(fixed(weights), 0) > left, at, NO_ID), 0)
    else:
        wanted = tl.minimum(top_k, GUESS)
        num_candidates, bound = collect(
            logits,
            edited,
            is_changed,
            tops,
            picked,
            values,
            value_ids,
            num_chunks * (CHUNK // SEGMENT),
            wanted,
            vocab_size,
            SEGMENT,
            SEGMENTS,
            AT_ONCE,
            CANDIDATES,
        )
        if num_candidates <= CANDIDATES:
            number = tl.arange(0, CANDIDATES)
            own = tl.load(values + number, number < num_candidates, other=float("-inf"))
            own_ids = tl.load(value_ids + number, number < num_candidates, other=NO_ID)
            num_larger = tl.zeros([CANDIDATES], tl.int32)
            for begin in range(0, num_candidates, AT_ONCE):
                other = begin + tl.arange(0, AT_ONCE)
                theirs = tl.load(values + other, other < num_candidates, other=float("-inf"))
                num_larger += tl.sum((theirs[None, :] > own[:, None]).to(tl.int32), 1)
            weights = tl.exp(tl.div_rn(own, temperature) - scaled_top)
            weights = tl.where((num_larger < top_k) & (weights >= min_p), weights, 0.0)
            own_masses = tl.where(number < num_candidates, fixed(weights), 0)
            total = tl.sum(own_masses, 0)
            # Whether all that counts is among them; their bound is a number of few bits.
            least = (bound ^ ((bound >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            least_weight = tl.exp(tl.div_rn(least, temperature) - scaled_top)
            is_all = (top_k <= GUESS) | (least_weight < min_p * 0.99999) | (bound == MINUS_INFINITY + 1)
            if (is_all == 0) & (top_k == vocab_size) & (min_p <= 0.0):
                of_row = tl.sum(chunk_masses, 0)
                if total.to(tl.float64) >= top_p * of_row.to(tl.float64):
                    total = of_row
                    is_all = total == of_row
            if is_all:
                if top_p < 1.0:
                    tl.store(masses + number, own_masses)
                    tl.debug_barrier()
                    before = tl.zeros([CANDIDATES], tl.int64)
                    for begin in range(0, num_candidates, AT_ONCE):
                        other = begin + tl.arange(0, AT_ONCE)
                        theirs = tl.load(masses + other, other < num_candidates, other=0)
                        their_ids = tl.load(value_ids + other, other < num_candidates, other=NO_ID)
                        is_tied = theirs[None, :] == own_masses[:, None]
                        is_before = is_tied & (their_ids[None, :] < own_ids[:, None])
                        is_before = is_before | (theirs[None, :] > own_masses[:, None])
                        before += tl.sum(tl.where(is_before, theirs[None, :], 0), 1)
                    is_kept = before.to(tl.float64) < top_p * total.to(tl.float64)
                    own_masses = tl.where(is_kept, own_masses, 0)
                    total = tl.sum(own_masses, 0)
                tl.debug_barrier()
                tl.store(masses + number, own_masses)
                tl.debug_barrier()
                ends = tl.zeros([CANDIDATES], tl.int64)
                for begin in range(0, num_candidates, AT_ONCE):
                    other = begin + tl.arange(0, AT_ONCE)
                    theirs = tl.load(masses + other, other < num_candidates, other=0)
                    their_ids = tl.load(value_ids + other, other < num_candidates, other=NO_ID)
                    ends += tl.sum(tl.where(their_ids[None, :] <= own_ids[:, None], theirs[None, :], 0), 1)
                token = tl.min(tl.where(ends > target_of(u, total), own_ids, NO_ID), 0)
        if token == NO_ID:
            low_bit = tl.where(is_changed != 0, 0, LOW_BIT)
            token = draw_in_passes(
                logits,
                edited,
                is_changed,
                vocab_size,
                temperature,
                scaled_top,
                u,
                top_k,
                top_p,
                min_p,
                low_bit,
                TILE,
            )
    return token, tl.abs(scaled_top) < float("inf")


@triton.jit
def masses_at(logits, edited, is_changed, at, vocab_size, temperature, scaled_top, floor, min_p):
    """`ordered` bits and masses of logits; those under `floor` and those of less than `min_p` have none."""
    inside = at < vocab_size
    found = logits_at(logits, edited, is_changed, at, inside)
    keys = ordered(found)
    weights = tl.exp(tl.div_rn(found, temperature) - scaled_top)
    return keys, fixed(tl.where(inside & (keys >= floor) & (weights >= min_p), weights, 0.0))


@triton.jit
def highest_bound(
    logits,
    edited,
    is_changed,
    vocab_size,
    temperature,
    scaled_top,
    floor,
    min_p,
    needed,
    low_bit,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The highest bound in `ordered` bits whose logits from there up have a mass of `needed`; or are so many.

    Two bits in each pass over the row; bits below `low_bit` (even) stay 0.
    """
    bound = tl.full([], LOWEST, tl.int32)
    for number in range((32 - low_bit) // 2):
        step = tl.full([], 1073741824, tl.int32) >> (2 * number)
        first = tl.zeros([TILE], tl.int64)
        second = tl.zeros([TILE], tl.int64)
        third = tl.zeros([TILE], tl.int64)
        for begin in range(0, vocab_size, TILE):
            at = begin + tl.arange(0, TILE)
            if COUNTS:
                inside = at < vocab_size
                keys = ordered(logits_at(logits, edited, is_changed, at, inside))
                amounts = inside.to(tl.int64)
            else:
                keys, amounts = masses_at(
                    logits, edited, is_changed, at, vocab_size, temperature, scaled_top, floor, min_p
                )
            first += tl.where(keys >= bound + step, amounts, 0)
            second += tl.where(keys >= bound + 2 * step, amounts, 0)
            third += tl.where(keys >= bound + 3 * step, amounts, 0)
        reached = (tl.sum(first, 0).to(tl.float64) >= needed).to(tl.int32)
        reached += (tl.sum(second, 0).to(tl.float64) >= needed).to(tl.int32)
        reached += (tl.sum(third, 0).to(tl.float64) >= needed).to(tl.int32)
        bound += reached * step
    return bound


@triton.jit
def draw_in_passes(
    logits,
    edited,
    is_changed,
    vocab_size,
    temperature,
    scaled_top,
    u,
    top_k,
    top_p,
    min_p,
    low_bit,
    TILE: tl.constexpr,
):
    """A token of a row that keeps more than a few candidates: bounds are found bit by bit, each in a pass over it."""
    floor = tl.full([], LOWEST, tl.int32)
    if top_k < vocab_size:
        floor = highest_bound(
            logits,
            edited,
            is_changed,
            vocab_size,
            temperature,
            scaled_top,
            LOWEST,
            min_p,
            top_k.to(tl.float64),
            low_bit,
            True,
            TILE,
        )
    sums = tl.zeros([TILE], tl.int64)
    for begin in range(0, vocab_size, TILE):
        at = begin + tl.arange(0, TILE)
        keys, masses = masses_at(logits, edited, is_changed, at, vocab_size, temperature, scaled_top, floor, min_p)
        sums += masses
    total = tl.sum(sums, 0)
    bound = tl.full([], LOWEST, tl.int32)  # logits of its bits are tied: those up to id `last` are kept
    next_bound = tl.full([], LOWEST, tl.int32)
    last = tl.full([], NO_ID, tl.int32)
    if top_p < 1.0:
        needed = tl.maximum(top_p * total.to(tl.float64), 1.0)
        bound = highest_bound(
            logits,
            edited,
            is_changed,
            vocab_size,
            temperature,
            scaled_top,
            floor,
            min_p,
            needed,
            low_bit,
            False,
            TILE,
        )
        next_bound = bound + (tl.full([], 1, tl.int32) << low_bit)
        above = tl.zeros([TILE], tl.int64)
        tied = tl.zeros([TILE], tl.int64)
        one = tl.zeros([TILE], tl.int64)
        for begin in range(0, vocab_size, TILE):
            at = begin + tl.arange(0, TILE)
            keys, masses = masses_at(logits, edited, is_changed, at, vocab_size, temperature, scaled_top, floor, min_p)
            is_tied = (keys >= bound) & (keys < next_bound)
            above += tl.where(keys >= next_bound, masses, 0)
            tied += tl.where(is_tied, masses, 0)
            one = tl.maximum(one, tl.where(is_tied, masses, 0))
        mass_above = tl.sum(above, 0)
        mass_of_one = tl.max(one, 0)
        num_tied = tl.sum(tied, 0) // mass_of_one
        missing = needed - mass_above.to(tl.float64)
        num_kept = tl.minimum(tl.ceil(missing / mass_of_one.to(tl.float64)).to(tl.int64), num_tied)
        total = mass_above + num_kept * mass_of_one
        if num_kept < num_tied:
            num_before = num_kept * 0
            for begin in range(0, vocab_size, TILE):
                at = begin + tl.arange(0, TILE)
                keys, masses = masses_at(
                    logits, edited, is_changed, at, vocab_size, temperature, scaled_top, floor, min_p
                )
                is_tied = ((keys >= bound) & (keys < next_bound)).to(tl.int64)
                numbers = num_before + tl.cumsum(is_tied, 0)
                last = tl.minimum(last, tl.min(tl.where((is_tied != 0) & (numbers == num_kept), at, NO_ID), 0))
                num_before += tl.sum(is_tied, 0)
    target = target_of(u, total)
    mass = target * 0
    mass_here = target * 0
    here = tl.full([], 0, tl.int32)
    for begin in range(0, vocab_size, TILE):
        at = begin + tl.arange(0, TILE)
        keys, masses = masses_at(logits, edited, is_changed, at, vocab_size, temperature, scaled_top, floor, min_p)
        masses = tl.where((keys >= next_bound) | ((keys >= bound) & (at <= last)), masses, 0)
        end = mass + tl.sum(masses, 0)
        is_here = (mass <= target) & (target < end)
        here = tl.where(is_here, begin, here)
        mass_here = tl.where(is_here, mass, mass_here)
        mass = end
    at = here + tl.arange(0, TILE)
    keys, masses = masses_at(logits, edited, is_changed, at, vocab_size, temperature, scaled_top, floor, min_p)
    masses = tl.where((keys >= next_bound) | ((keys >= bound) & (at <= last)), masses, 0)
    return tl.min(tl.where(mass_here + tl.cumsum(masses, 0) > target, at, NO_ID), 0)
