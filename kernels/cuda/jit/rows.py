"""The small operations between matrix products, one program a row or a part of one; computed in fp32."""

import triton
import triton.language as tl

from novainfer.kernels.cuda.jit.numbers import rounded


@triton.jit
def silu_mul(gate_up, out, intermediate_size, BLOCK: tl.constexpr):
    """`silu(gate) * up` of [M, 2 * I] into [M, I]; a program computes BLOCK elements of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < intermediate_size
    gate = tl.load(gate_up + row * 2 * intermediate_size + at, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * intermediate_size + intermediate_size + at, inside, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * intermediate_size + at, rounded(silu * up, out.dtype.element_ty), inside)


@triton.jit
def rms_norm(x, residual, weight, out, x_stride, width, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    """The norm of rows of x [M, width] into out; with a residual [M, width], of what that is when x is added to it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    wide = tl.load(x + row * x_stride + at, inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        sums = residual + row * width + at
        added = rounded(wide + tl.load(sums, inside, other=0.0).to(tl.float32), residual.dtype.element_ty)
        tl.store(sums, added, inside)
        wide = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = wide * scale * tl.load(weight + at, inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, rounded(normed, out.dtype.element_ty), inside)


@triton.jit
def halves(rows, head, last_head, at, HEAD_DIM: tl.constexpr):
    """Both halves in fp32 of heads [HEADS, 1] before `last_head` at places [1, BLOCK], and which places are theirs."""
    inside = (head < last_head) & (at < HEAD_DIM // 2)
    begin = rows + head * HEAD_DIM + at
    low = tl.load(begin, inside, other=0.0).to(tl.float32)
    return low, tl.load(begin + HEAD_DIM // 2, inside, other=0.0).to(tl.float32), inside


@triton.jit
def put_halves(rows, head, at, low, high, inside, HEAD_DIM: tl.constexpr):
    """Both halves of heads, rounded."""
    begin = rows + head * HEAD_DIM + at
    tl.store(begin, rounded(low, rows.dtype.element_ty), inside)
    tl.store(begin + HEAD_DIM // 2, rounded(high, rows.dtype.element_ty), inside)


@triton.jit
def head_normed(low, high, head, num_heads, q_norm, k_norm, at, eps, HEAD_DIM: tl.constexpr):
    """The halves of heads, normed: by `q_norm` [HEAD_DIM] before `num_heads`, by `k_norm` from there on."""
    inside = at < HEAD_DIM // 2
    # Contracted here, as in `rotated`: a head must have the same bits by whichever function it is normed.
    squares = tl.sum(tl.fma(low, low, high * high), 1, keep_dims=True)
    scale = tl.rsqrt(tl.fma(squares, 1.0 / HEAD_DIM, eps))
    is_query = head < num_heads
    of_q = tl.load(q_norm + at, inside, other=0.0).to(tl.float32)
    of_k = tl.load(k_norm + at, inside, other=0.0).to(tl.float32)
    low = low * scale * tl.where(is_query, of_q, of_k)
    of_q = tl.load(q_norm + HEAD_DIM // 2 + at, inside, other=0.0).to(tl.float32)
    of_k = tl.load(k_norm + HEAD_DIM // 2 + at, inside, other=0.0).to(tl.float32)
    return low, high * scale * tl.where(is_query, of_q, of_k)


@triton.jit
def rotated(low, high, cos_sin, position, at, HEAD_DIM: tl.constexpr):
    """The halves of heads at `position`, rotated by the angles of cos_sin fp32 [max_positions, HEAD_DIM]."""
    inside = at < HEAD_DIM // 2
    angles = cos_sin + position * HEAD_DIM + at
    cos = tl.load(angles, inside, other=0.0)
    sin = tl.load(angles + HEAD_DIM // 2, inside, other=0.0)
    # Contracted here and not by the compiler, which may choose otherwise from one function to the next.
    return tl.fma(low, cos, -(high * sin)), tl.fma(high, cos, low * sin)


@triton.jit
def qk_norm(
    qkv,
    q_norm,
    k_norm,
    stride,
    num_heads,
    num_normed,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Norm HEADS heads of one row in place: queries by `q_norm`, keys behind them by `k_norm`."""
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    row = qkv + tl.program_id(0).to(tl.int64) * stride
    low, high, inside = halves(row, head, num_normed, at, HEAD_DIM)
    low, high = head_normed(low, high, head, num_heads, q_norm, k_norm, at, eps, HEAD_DIM)
    put_halves(row, head, at, low, high, inside, HEAD_DIM)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rope(
    qkv, cos_sin, positions, stride, num_rotated, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr
):
    """Rotate HEADS heads of one row in place."""
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    token = tl.program_id(0).to(tl.int64)
    row = qkv + token * stride
    low, high, inside = halves(row, head, num_rotated, at, HEAD_DIM)
    low, high = rotated(low, high, cos_sin, tl.load(positions + token), at, HEAD_DIM)
    put_halves(row, head, at, low, high, inside, HEAD_DIM)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def embed(weight, ids, token_pool, out, width, HAS_POOL: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of the embedding of one token; -1 - slot is the token that the pool holds for the slot."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    token = tl.load(ids + row)
    if HAS_POOL:
        last = tl.load(token_pool - 1 - token, token < 0, other=0)
        token = tl.where(token < 0, tl.maximum(last, 0), token)
    tl.store(out + row * width + at, tl.load(weight + token * width + at, inside), inside)
