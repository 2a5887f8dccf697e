"""From logits to tokens: what changes a row's logits, its parts, and the draw, without a sort and without a host.

A row is scanned in chunks, so that few rows fill a GPU; then one program a row draws. Weights are summed as fixed-point
numbers: such sums have the same bits in any order, so a row's token depends on nothing beside it, and nothing that is
added by many programs at once depends on which came first.

A record of `RECORD` 64-bit words says how a row samples; floats lie in it as the bits of doubles, lists as addresses.
"""

import triton
import triton.language as tl

RECORD = tl.constexpr(18)  # words of a record
POSITION = tl.constexpr(0)
FLAGS = tl.constexpr(1)
DRAFT = tl.constexpr(2)
HISTORY = tl.constexpr(3)  # address of the sequence's tokens, int32
LISTS = tl.constexpr(4)  # address of: banned ids, stop ids, bias ids, biases (fp32), bits of allowed ids; int32 each
NUM_BANNED = tl.constexpr(5)
NUM_STOPS = tl.constexpr(6)
NUM_BIASES = tl.constexpr(7)
NUM_PROMPT = tl.constexpr(8)
SEED = tl.constexpr(9)
TEMPERATURE = tl.constexpr(10)
TOP_K = tl.constexpr(11)
TOP_P = tl.constexpr(12)
MIN_P = tl.constexpr(13)
REPETITION = tl.constexpr(14)
PRESENCE = tl.constexpr(15)
FREQUENCY = tl.constexpr(16)
LOGPROBS = tl.constexpr(17)  # how many most likely tokens are reported; -1: nothing is

ACTIVE = tl.constexpr(1)  # without it there is no such row: it gets no token, and nothing is written for it
RANDOM = tl.constexpr(2)
CHANGED = tl.constexpr(4)  # its logits are not the model's
ALLOWED = tl.constexpr(8)  # only some ids are
LISTED = tl.constexpr(16)  # it has banned ids, stop ids that count, or biases
STOPS = tl.constexpr(32)  # its stop ids are banned at this position
PENALISED = tl.constexpr(64)

NO_TOKEN = tl.constexpr(-1)
NO_ID = tl.constexpr(2147483647)
LOWEST = tl.constexpr(-2147483648)
MINUS_INFINITY = tl.constexpr(-2139095041)  # its `ordered` bits
PROMPT = tl.constexpr(1073741824)  # bit 30 of a count: the token stands in the prompt
ONE = tl.constexpr(1099511627776.0)  # 2**40, which a weight of 1 is in fixed point: 2**22 of them can be summed


@triton.jit
def ordered(x):
    """Bits of fp32 numbers as integers of the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def whole(record, word):
    """A number of a record, in 32 bits."""
    return tl.load(record + word).to(tl.int32)


@triton.jit
def real(record, word):
    """A float of a record, in fp64."""
    return tl.load(record + word).to(tl.float64, bitcast=True)


@triton.jit
def small_real(record, word):
    """A float of a record, in fp32."""
    return real(record, word).to(tl.float32)


@triton.jit
def address(record, word):
    """A list of int32."""
    return tl.load(record + word).to(tl.pointer_type(tl.int32))


@triton.jit
def logits_at(logits, edited, is_changed, at, inside):
    """Logits of a row in fp32, or of its edited copy; a NaN is infinity, which gives no token either."""
    is_own = (at * 0 + is_changed) != 0  # of that shape: the interpreter makes integers of a bit that it repeats
    model = tl.load(logits + at, inside & (is_own == 0), other=float("-inf")).to(tl.float32)
    own = tl.load(edited + at, inside & is_own, other=float("-inf"))
    found = tl.where(is_own, own, model)
    return tl.where(found != found, float("inf"), found)


@triton.jit
def fixed(weight):
    """A weight of at most 1 in fixed point; a NaN is 0."""
    return tl.where(weight > 0.0, weight * ONE, 0.0).to(tl.int64)


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


# ---- what changes logits ---------------------------------------------------------------------------------------------


@triton.jit
def suppose_drafts(records):
    """Write a row's draft where its token will stand, for the rows behind it to count; one program a row."""
    record = records + tl.program_id(0) * RECORD
    draft = whole(record, DRAFT)
    if ((whole(record, FLAGS) & PENALISED) != 0) & (draft >= 0):
        tl.store(address(record, HISTORY) + tl.load(record + POSITION), draft)


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
        if ((flags & ALLOWED) != 0) | (num_banned > 0):
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


# ---- scanning --------------------------------------------------------------------------------------------------------


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


# ---- drawing ---------------------------------------------------------------------------------------------------------


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
    tl.store(tokens + row, tl.where(is_drawn, token, NO_TOKEN).to(tl.int64))
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
