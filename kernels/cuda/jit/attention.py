"""Paged attention: a tile of query rows of one sequence and one key head walks over the sequence's tokens in the cache.

All query heads that share a key head are rows of one tile, so that a block of keys is read once for them. Softmax is
computed as it goes: of each row the `peak` (largest score so far, as a power of two), `total` (sum of the weights
relative to it) and `acc` (the weighted values). Rows that nothing has been added to have peak -inf, total 0 and acc 0.

The cache of a layer is [num_blocks, block_size, num_kv_heads, head_dim]; quantised, with a scale per token and head
[num_blocks, block_size, num_kv_heads].
"""

import triton
import triton.language as tl

from novainfer.kernels.cuda.jit.numbers import dot, rounded, row_dot


@triton.jit
def _weight(peak):
    """What weights are taken relative to: those of a row without a token (its peak is -inf) are 0 then, not NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _walk(
    q,
    peak,
    total,
    acc,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    kv_head,
    begin,
    end,
    lowest,
    first_seen,
    last_seen,
    context_len,
    scale_log2e,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    QUANTISED: tl.constexpr,
    INVARIANT: tl.constexpr,
):
    """Add tokens `begin` (a multiple of BLOCK_N) to `end` to the rows q [M, PADDED_DIM].

    Row i sees tokens `first_seen[i]` (WINDOWED; `lowest` or later) to `last_seen[i]`; without MASKED every row sees all
    of them.
    """
    columns = tl.arange(0, PADDED_DIM)
    # A weight times the scale of a value may be too small for fp16: there `acc` is in units of the largest scale that a
    # row sees in a tile, which no token decides that the row does not see.
    HAS_UNIT: tl.constexpr = QUANTISED and q.dtype == tl.float16
    unit = tl.full([q.shape[0]], 1.0, tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        # What is behind the context is not read: tables and cells may hold anything there, and NaN survives a product.
        inside = tokens < context_len
        if WINDOWED:
            inside = inside & (tokens >= lowest)
        if MASKED:
            blocks = tl.load(table + tokens // BLOCK_SIZE, inside, other=0)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE)
        cells = (blocks.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        at = cells[:, None] * HEAD_DIM + columns[None, :]
        if HEAD_DIM != PADDED_DIM:
            read = inside[:, None] & (columns[None, :] < HEAD_DIM)
            k = tl.load(keys + at, read, other=0.0)
            v = tl.load(values + at, read, other=0.0)
        elif MASKED:
            k = tl.load(keys + at, inside[:, None], other=0.0)
            v = tl.load(values + at, inside[:, None], other=0.0)
        else:
            k = tl.load(keys + at)
            v = tl.load(values + at)
        if QUANTISED:  # exact: neither has more than eight bits
            k = k.to(tl.float32).to(q.dtype)
            v = v.to(tl.float32).to(q.dtype)
        scores = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
        scores = row_dot(q, tl.trans(k), scores) if INVARIANT else dot(q, tl.trans(k), scores)
        scores = scores * scale_log2e
        if QUANTISED:
            scores = scores * tl.load(key_scales + cells, inside, other=0.0)[None, :]
        if MASKED:
            seen = tokens[None, :] <= last_seen[:, None]
            if WINDOWED:
                seen = seen & (tokens[None, :] >= first_seen[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        relative = _weight(higher)
        weights = tl.exp2(scores - relative[:, None])
        shrink = tl.exp2(peak - relative)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        if QUANTISED:
            scales = tl.load(value_scales + cells, inside, other=0.0)[None, :]
            if HAS_UNIT:
                seen_scales = tl.where(scores == float("-inf"), 0.0, scales)
                largest = tl.max(seen_scales, 1)
                largest = tl.where(largest > 0.0, largest, unit)
                share = 1.0 / largest
                scales = seen_scales * share[:, None]
                shrink = shrink * (unit * share)
                unit = largest
            weights = weights * scales
        acc = acc * shrink[:, None]
        weights = rounded(weights, q.dtype)
        acc = row_dot(weights, v, acc) if INVARIANT else dot(weights, v, acc)
        peak = higher
    if HAS_UNIT:
        acc = acc * unit[:, None]
    return peak, total, acc


@triton.jit
def _rows(
    query,
    row,
    num_queries,
    last,
    kv_head,
    query_stride,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """`num_queries` rows of the step from `row` on, times the heads of one group: (q, which are used, what each sees).

    `last` is the last token that the first of them sees. Rows of the tile without a query see what the last one sees,
    and are zeros.
    """
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, PADDED_DIM)
    used = rows < num_queries * GROUP
    at = (row + rows // GROUP).to(tl.int64) * query_stride + (kv_head * GROUP + rows % GROUP) * HEAD_DIM
    q = tl.load(query + at[:, None] + columns[None, :], used[:, None] & (columns[None, :] < HEAD_DIM), other=0.0)
    last_seen = last + tl.minimum(rows // GROUP, num_queries - 1)
    return q, used, tl.maximum(last_seen - window + 1, 0), last_seen


@triton.jit
def _put(
    out,
    total,
    acc,
    row,
    kv_head,
    used,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The rows of a tile into out [T, num_heads, HEAD_DIM]; rows without a token are zeros."""
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, PADDED_DIM)
    at = (row + rows // GROUP).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP
    inside = used[:, None] & (columns[None, :] < HEAD_DIM)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at[:, None] * HEAD_DIM + columns[None, :], rounded(acc, out.dtype.element_ty), inside)


@triton.jit
def _put_part(
    sums,
    stats,
    peak,
    total,
    acc,
    row,
    kv_head,
    used,
    split,
    num_splits,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The rows of a tile as one of the parts that `merge` puts together.

    sums fp32 [T, num_heads, num_splits, PADDED_DIM]; stats fp32 [T, num_heads, num_splits, 2]: peak and total.
    """
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, PADDED_DIM)
    at = (row + rows // GROUP).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP
    at = at * num_splits + split
    tl.store(sums + at[:, None] * PADDED_DIM + columns[None, :], acc, used[:, None])
    tl.store(stats + at * 2, peak, used)
    tl.store(stats + at * 2 + 1, total, used)


@triton.jit
def _sequence(query_start, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """Which sequence a tile of the step belongs to.

    Sequence s is given the tiles from `query_start[s] // BLOCK_Q + s` on: as many as it needs, or one more, found
    without a table that the host would have to make.
    """
    before = 0
    for first in range(0, num_seqs, 128):
        seqs = first + tl.arange(0, 128)
        starts = tl.load(query_start + seqs, seqs < num_seqs, other=0)
        before += tl.sum(((seqs < num_seqs) & (starts // BLOCK_Q + seqs <= tile)).to(tl.int32), 0)
    return before - 1


@triton.jit
def _tiles_of_a_split(context_len, lowest, num_splits, BLOCK_N: tl.constexpr, TILES_MIN: tl.constexpr):
    """(the first tile of tokens that is walked over, the end of them, how many of them one split takes)."""
    first = lowest // BLOCK_N
    end = tl.cdiv(context_len, BLOCK_N)
    return first, end, tl.maximum(tl.cdiv(end - first, num_splits), TILES_MIN)


@triton.jit(do_not_specialize=["table_stride", "num_splits", "window"], do_not_specialize_on_alignment=["context_lens"])
def decode(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    block_tables,
    query_start,
    context_lens,
    out,
    sums,
    stats,
    query_stride,
    table_stride,
    num_splits,
    scale_log2e,
    window,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERIES_MAX: tl.constexpr,
    TILES_MIN: tl.constexpr,
    WINDOWED: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """All rows of a sequence with QUERIES_MAX at most (others: `prefill`), over one split of its tokens.

    Grid [num_kv_heads, num_seqs, num_splits]. With one split the rows go into `out`, with more into `sums` and `stats`
    (`_put_part`), from those splits that have tokens.
    """
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - row
    context_len = tl.load(context_lens + seq)
    if num_queries > QUERIES_MAX:
        return
    last = context_len - num_queries
    lowest = tl.maximum(last - window + 1, 0) if WINDOWED else 0
    first, end, each = _tiles_of_a_split(context_len, lowest, num_splits, BLOCK_N, TILES_MIN)
    first += split * each
    end = tl.minimum(first + each, end)
    if (num_splits > 1) & (first >= end):
        return
    q, used, first_seen, last_seen = _rows(
        query, row, num_queries, last, kv_head, query_stride, window, GROUP, HEAD_DIM, PADDED_DIM, BLOCK_M
    )
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    peak, total, acc = _walk(
        q, peak, total, acc, keys, values, key_scales, value_scales,
        block_tables + seq.to(tl.int64) * table_stride, kv_head, first * BLOCK_N, end * BLOCK_N,
        lowest, first_seen, last_seen, context_len, scale_log2e,
        NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, True, WINDOWED, QUANTISED, False,
    )  # fmt: skip
    if num_splits == 1:
        _put(out, total, acc, row, kv_head, used, GROUP, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_M)
    else:
        _put_part(
            sums, stats, peak, total, acc, row, kv_head, used, split, num_splits,
            GROUP, NUM_KV_HEADS, PADDED_DIM, BLOCK_M,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_splits", "window"], do_not_specialize_on_alignment=["context_lens"])
def merge(
    out,
    sums,
    stats,
    query_start,
    context_lens,
    num_splits,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERIES_MAX: tl.constexpr,
    TILES_MIN: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """The parts of one row and head that `decode` left, put together. Grid [NUM_HEADS, num_seqs, QUERIES_MAX]."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    query = tl.program_id(2)
    row = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - row
    context_len = tl.load(context_lens + seq)
    if (num_queries > QUERIES_MAX) | (query >= num_queries):
        return
    lowest = tl.maximum(context_len - num_queries - window + 1, 0) if WINDOWED else 0
    first, end, each = _tiles_of_a_split(context_len, lowest, num_splits, BLOCK_N, TILES_MIN)
    num_used = tl.cdiv(end - first, each)
    columns = tl.arange(0, PADDED_DIM)
    at = ((row + query).to(tl.int64) * NUM_HEADS + head) * num_splits
    # A row of one group's tile: [1] and [1, PADDED_DIM], reduced over the parts.
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for start in range(0, num_used, SPLITS_AT_ONCE):
        splits = start + tl.arange(0, SPLITS_AT_ONCE)
        there = splits < num_used
        peaks = tl.load(stats + (at + splits) * 2, there, other=float("-inf"))
        totals = tl.load(stats + (at + splits) * 2 + 1, there, other=0.0)
        parts = tl.load(sums + (at + splits)[:, None] * PADDED_DIM + columns[None, :], there[:, None], other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        relative = _weight(higher)
        weights = tl.exp2(peaks - relative)
        shrink = tl.exp2(peak - relative)
        total = total * shrink + tl.sum(totals * weights, 0)
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        peak = higher
    to = out + ((row + query).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + columns
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(to, rounded(acc, out.dtype.element_ty), columns < HEAD_DIM)


@triton.jit(do_not_specialize=["table_stride", "num_seqs", "window"], do_not_specialize_on_alignment=["context_lens"])
def prefill(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    block_tables,
    query_start,
    context_lens,
    out,
    query_stride,
    table_stride,
    num_seqs,
    scale_log2e,
    window,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERIES_MAX: tl.constexpr,
    WINDOWED: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """A tile of rows of a sequence with more than QUERIES_MAX (others: `decode`).

    Grid [(T // BLOCK_Q + num_seqs) * NUM_KV_HEADS], BLOCK_Q = BLOCK_M // GROUP: programs without a tile end at once.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    # Backwards: the last tiles of a sequence see the most tokens, and the longest work shall not begin last.
    tile = tl.num_programs(0) // NUM_KV_HEADS - 1 - tl.program_id(0) // NUM_KV_HEADS
    seq = _sequence(query_start, tile, num_seqs, BLOCK_Q)
    row = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - row
    context_len = tl.load(context_lens + seq)
    first_query = (tile - row // BLOCK_Q - seq) * BLOCK_Q
    if (num_queries <= QUERIES_MAX) | (first_query >= num_queries):
        return
    last = context_len - num_queries + first_query  # that the tile's first row sees
    num_rows = tl.minimum(num_queries - first_query, BLOCK_Q)
    row += first_query
    q, used, first_seen, last_seen = _rows(
        query, row, num_rows, last, kv_head, query_stride, window, GROUP, HEAD_DIM, PADDED_DIM, BLOCK_M
    )
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    table = block_tables + seq.to(tl.int64) * table_stride
    end = tl.cdiv(last + num_rows, BLOCK_N) * BLOCK_N
    all_end = (last + 1) // BLOCK_N * BLOCK_N  # before it every row sees every token, up to its window
    begin = 0
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(last - window + 1, 0)
        begin = lowest // BLOCK_N * BLOCK_N
        all_begin = tl.cdiv(tl.maximum(last + num_rows - window, 0), BLOCK_N) * BLOCK_N
        all_begin = tl.minimum(all_begin, end)
        peak, total, acc = _walk(
            q, peak, total, acc, keys, values, key_scales, value_scales, table, kv_head, begin, all_begin,
            lowest, first_seen, last_seen, context_len, scale_log2e,
            NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, True, WINDOWED, QUANTISED, False,
        )  # fmt: skip
        begin = all_begin
        all_end = tl.maximum(all_end, begin)
    peak, total, acc = _walk(
        q, peak, total, acc, keys, values, key_scales, value_scales, table, kv_head, begin, all_end,
        lowest, first_seen, last_seen, context_len, scale_log2e,
        NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, False, WINDOWED, QUANTISED, False,
    )  # fmt: skip
    peak, total, acc = _walk(
        q, peak, total, acc, keys, values, key_scales, value_scales, table, kv_head, all_end, end,
        lowest, first_seen, last_seen, context_len, scale_log2e,
        NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, True, WINDOWED, QUANTISED, False,
    )  # fmt: skip
    _put(out, total, acc, row, kv_head, used, GROUP, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_M)


@triton.jit
def _merged(peak, total, acc, other_peak, other_total, other_acc):
    """Rows [N] and [N, PADDED_DIM] with those of later tokens put to them.

    A product and a sum are one `fma` each, so that no compiler chooses which bits come out.
    """
    higher = tl.maximum(peak, other_peak)
    relative = _weight(higher)
    shrink = tl.exp2(peak - relative)
    share = tl.exp2(other_peak - relative)
    total = tl.fma(total, shrink, other_total * share)
    acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), other_acc * share[:, None])
    return higher, total, acc


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "num_splits", "window"],
    do_not_specialize_on_alignment=["context_lens"],
)
def invariant(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    block_tables,
    query_start,
    context_lens,
    out,
    sums,
    stats,
    query_stride,
    table_stride,
    num_seqs,
    num_splits,
    scale_log2e,
    window,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """A tile of any rows of a sequence, so that a row has the same bits in every step.

    A context is cut every SPLIT tokens, each part is walked over by itself, and parts are put together in their order:
    here, where `num_splits` is 0, or else by `merge_invariant` from what the programs of each part leave in `sums` and
    `stats`. One function with one tile serves prefill, chunks and decode, since tiles of other sizes are multiplied by
    other instructions, which add up in another order. What a row does not see adds exactly nothing to it.

    Grid [(T // BLOCK_Q + num_seqs) * NUM_KV_HEADS, max(num_splits, 1)], BLOCK_Q = BLOCK_M // GROUP.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tl.num_programs(0) // NUM_KV_HEADS - 1 - tl.program_id(0) // NUM_KV_HEADS
    seq = _sequence(query_start, tile, num_seqs, BLOCK_Q)
    row = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - row
    context_len = tl.load(context_lens + seq)
    first_query = (tile - row // BLOCK_Q - seq) * BLOCK_Q
    if first_query >= num_queries:
        return
    last = context_len - num_queries + first_query
    num_rows = tl.minimum(num_queries - first_query, BLOCK_Q)
    row += first_query
    lowest = tl.maximum(last - window + 1, 0) if WINDOWED else 0
    first = lowest // SPLIT
    end = tl.cdiv(last + num_rows, SPLIT)
    if num_splits > 0:
        split = tl.program_id(1)
        if (split < first) | (split >= end):
            return
        first = split
        end = split + 1
    q, used, first_seen, last_seen = _rows(
        query, row, num_rows, last, kv_head, query_stride, window, GROUP, HEAD_DIM, PADDED_DIM, BLOCK_M
    )
    table = block_tables + seq.to(tl.int64) * table_stride
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    for split in range(first, end):
        part_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        part_total = tl.zeros([BLOCK_M], tl.float32)
        part = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        part_peak, part_total, part = _walk(
            q, part_peak, part_total, part, keys, values, key_scales, value_scales, table, kv_head,
            tl.maximum(split * SPLIT, lowest // BLOCK_N * BLOCK_N), tl.minimum((split + 1) * SPLIT, last + num_rows),
            lowest, first_seen, last_seen, context_len, scale_log2e,
            NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, True, WINDOWED, QUANTISED, True,
        )  # fmt: skip
        peak, total, acc = _merged(peak, total, acc, part_peak, part_total, part)
    if num_splits > 0:
        _put_part(
            sums, stats, peak, total, acc, row, kv_head, used, first, num_splits,
            GROUP, NUM_KV_HEADS, PADDED_DIM, BLOCK_M,
        )  # fmt: skip
    else:
        _put(out, total, acc, row, kv_head, used, GROUP, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_M)


@triton.jit(do_not_specialize=["num_splits", "window"], do_not_specialize_on_alignment=["context_lens"])
def merge_invariant(
    out,
    sums,
    stats,
    query_start,
    context_lens,
    num_splits,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """The parts of one row and head that `invariant` left, put together. Grid [NUM_HEADS, num_seqs, max_query_len]."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    query = tl.program_id(2)
    row = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - row
    last = tl.load(context_lens + seq) - num_queries + query
    if query >= num_queries:
        return
    first = tl.maximum(last - window + 1, 0) // SPLIT if WINDOWED else 0
    end = tl.cdiv(last + 1, SPLIT)
    one = tl.arange(0, 1)
    columns = tl.arange(0, PADDED_DIM)[None, :]
    at = ((row + query).to(tl.int64) * NUM_HEADS + head) * num_splits + one
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, PADDED_DIM], tl.float32)
    for split in range(first, end):
        peak, total, acc = _merged(
            peak, total, acc,
            tl.load(stats + (at + split) * 2),
            tl.load(stats + (at + split) * 2 + 1),
            tl.load(sums + (at + split)[:, None] * PADDED_DIM + columns),
        )  # fmt: skip
    to = out + ((row + query).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + columns
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(to, rounded(acc, out.dtype.element_ty), columns < HEAD_DIM)


@triton.jit
def size_of(x):
    """What a scale is measured by: absolute values, infinite where x is not a number."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def cells_of(x, scale, LARGEST: tl.constexpr, ROUNDS: tl.constexpr):
    """x fp32 in units of its scale, as `kernels.ops.kv_cache.quantise` has it, to the last bit."""
    cells = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale) + tl.zeros_like(x))
    cells = tl.where(cells == cells, cells, 0.0)  # the scale says what was not finite
    cells = tl.minimum(tl.maximum(cells, -LARGEST), LARGEST)
    if ROUNDS:
        cells = (cells + 12582912.0) - 12582912.0  # 1.5 * 2**23: nothing is left behind the point, ties are even
    return cells


@triton.jit
def quantised(x, LARGEST: tl.constexpr, ROUNDS: tl.constexpr):
    """(x fp32 [N] in units of its scale, the scale)."""
    scale = tl.div_rn(tl.max(size_of(x), 0), LARGEST)
    return cells_of(x, scale, LARGEST, ROUNDS), scale


@triton.jit
def write(
    key,
    value,
    slot_mapping,
    keys,
    values,
    key_scales,
    value_scales,
    key_stride,
    value_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """A token's key and value of one head to its slot; none where that is below 0. Grid [T, NUM_KV_HEADS].

    LARGEST is what a cell holds at most where the cache is quantised, else None.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + row)
    columns = tl.arange(0, PADDED_DIM)
    inside = columns < HEAD_DIM
    kept = columns < tl.where(slot >= 0, HEAD_DIM, 0)
    k = tl.load(key + row * key_stride + head * HEAD_DIM + columns, inside, other=0.0)
    v = tl.load(value + row * value_stride + head * HEAD_DIM + columns, inside, other=0.0)
    cell = slot * NUM_KV_HEADS + head
    if LARGEST is not None:
        k, key_scale = quantised(k.to(tl.float32), LARGEST, ROUNDS)
        v, value_scale = quantised(v.to(tl.float32), LARGEST, ROUNDS)
        tl.store(key_scales + cell, key_scale, slot >= 0)
        tl.store(value_scales + cell, value_scale, slot >= 0)
        k, v = rounded(k, keys.dtype.element_ty), rounded(v, values.dtype.element_ty)
    tl.store(keys + cell * HEAD_DIM + columns, k, kept)
    tl.store(values + cell * HEAD_DIM + columns, v, kept)
