"""Products of rows with a weight, whose sums have one order for a row whatever rows are beside it."""

import triton
import triton.language as tl

from novainfer.kernels.cuda.jit.numbers import rounded, row_dot


@triton.jit
def multiplied(x, weight, sums):
    """`sums + x @ weight` on the tensor cores: int8 in int32, fp8 and wider numbers in fp32."""
    if x.dtype == tl.int8:
        sums = tl.dot(x, weight, sums, out_dtype=tl.int32)
    elif x.dtype == tl.float8e4nv:
        # Hopper adds fp8 in fewer bits than fp32 has: so often the sums move into registers that have all.
        sums = tl.dot(x, weight, sums, max_num_imprecise_acc=128)
    else:
        sums = row_dot(x, weight, sums)
    return sums


@triton.jit
def store_product(
    sums,
    row,
    column,
    num_rows,
    out_features,
    x_scale,
    weight_scale,
    bias,
    out,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """The sums of rows [BLOCK_M] and columns [BLOCK_N], scaled and with their bias, rounded once."""
    wide = sums.to(tl.float32)
    if HAS_SCALE:
        wide = wide * tl.load(x_scale + row, row < num_rows, other=0.0)[:, None]
        wide = wide * tl.load(weight_scale + column, column < out_features, other=0.0)[None, :]
    if HAS_BIAS:
        wide += tl.load(bias + column, column < out_features, other=0.0).to(tl.float32)[None, :]
    inside = (row < num_rows)[:, None] & (column < out_features)[None, :]
    at = row.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(out + at, rounded(wide, out.dtype.element_ty), inside)


@triton.jit
def part_of_sum(
    x_rows,
    weight_rows,
    x_inside,
    weight_inside,
    sums,
    begin,
    end,
    BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr,
):
    """`sums + x[:, begin:end] @ weight[:, begin:end].T`, of rows that begin at x_rows and weight_rows."""
    for first in range(begin, end, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        x_mask, weight_mask = x_inside, weight_inside
        if not WHOLE_K:
            x_mask, weight_mask = x_inside & (at < end)[None, :], weight_inside & (at < end)[:, None]
        x_tile = tl.load(x_rows + at[None, :], x_mask, other=0.0)
        weight_tile = tl.load(weight_rows + at[:, None], weight_mask, other=0.0)
        sums = multiplied(x_tile, weight_tile, sums)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def product(
    x,
    weight,
    x_scale,
    weight_scale,
    bias,
    out,
    parts,
    num_rows,
    out_features,
    in_features,
    x_stride,
    part_features,
    num_parts,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A tile of `x @ weight.T`, x [num_rows, in_features] (rows `x_stride` apart), weight [out_features, in_features].

    The sum of an element is that of its parts in their order, and a part that of its `part_features` in steps of
    BLOCK_K. PARTS is "one" where there is one; "apart" where a program computes one of them, into parts [num_parts,
    num_rows, out_features] for `sum_parts`; "in order" where it computes all: then it adds the same numbers in the same
    order.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + row.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + column.to(tl.int64)[None, :] * in_features
    x_inside, weight_inside = (row < num_rows)[:, None], (column < out_features)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), parts.dtype.element_ty)
    if PARTS == "in order":
        for part in range(num_parts):
            sums = tl.zeros((BLOCK_M, BLOCK_N), parts.dtype.element_ty)
            begin = part * part_features
            end = tl.minimum(begin + part_features, in_features)
            total += part_of_sum(x_rows, weight_rows, x_inside, weight_inside, sums, begin, end, BLOCK_K, WHOLE_K)
    else:
        begin = tl.program_id(2) * part_features
        end = tl.minimum(begin + part_features, in_features)
        total = part_of_sum(x_rows, weight_rows, x_inside, weight_inside, total, begin, end, BLOCK_K, WHOLE_K)
    if PARTS == "apart":
        at = (tl.program_id(2).to(tl.int64) * num_rows + row)[:, None] * out_features + column[None, :]
        tl.store(parts + at, total, x_inside & weight_inside)
    else:
        store_product(total, row, column, num_rows, out_features, x_scale, weight_scale, bias, out, HAS_SCALE, HAS_BIAS)


@triton.jit(do_not_specialize=["num_rows"])
def sum_parts(
    x_scale,
    weight_scale,
    bias,
    out,
    parts,
    num_rows,
    out_features,
    num_parts,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Add what programs of `product` computed apart, in the order in which one of them would have."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < num_rows)[:, None] & (column < out_features)[None, :]
    at = row.to(tl.int64)[:, None] * out_features + column[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), parts.dtype.element_ty)
    size = (tl.zeros((), tl.int64) + num_rows) * out_features
    for _ in range(num_parts):
        total += tl.load(parts + at, inside, other=0)
        at += size
    store_product(total, row, column, num_rows, out_features, x_scale, weight_scale, bias, out, HAS_SCALE, HAS_BIAS)


@triton.jit
def quantise_rows(x, q, scale, width, x_stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of x [M, width] as q [M, width] and scale fp32 [M], by the definition in kernels/ops/quantised.py.

    The scale of a row with a number that is not finite is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), tl.float32)
    wrong = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        wide = tl.load(x + row * x_stride + at, at < width, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(wide))
        wrong += wide * 0.0
    of_row = tl.math.div_rn(tl.max(most, 0), LARGEST) + tl.sum(wrong, 0)
    tl.store(scale + row, of_row)
    step = tl.where(of_row > 0, of_row, 1.0)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        wide = tl.load(x + row * x_stride + at, at < width, other=0.0).to(tl.float32)
        steps = tl.math.div_rn(wide, tl.zeros((BLOCK,), tl.float32) + step)
        if q.dtype.element_ty == tl.int8:
            # What is added has no room for less than ones: the sum is rounded to the nearest, of two to the even one.
            steps = ((steps + 12582912.0) - 12582912.0).to(tl.int8)
        else:
            steps = rounded(steps, q.dtype.element_ty)
        tl.store(q + row * width + at, steps, at < width)
