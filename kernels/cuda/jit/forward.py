"""What stands between the product of queries, keys and values, and attention: one function."""

import triton
import triton.language as tl

from novainfer.kernels.cuda.jit.numbers import rounded
from novainfer.kernels.cuda.jit.rows import halves, head_normed, put_halves, rotated


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def place_heads(
    qkv,
    bias,
    q_norm,
    k_norm,
    cos_sin,
    positions,
    slot_mapping,
    keys,
    values,
    num_heads,
    num_kv_heads,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """HEADS heads of one row of qkv [T, heads, HEAD_DIM]: their bias, norm and rotation, and where they go.

    A query stays where it is; a key and a value go to their slot of one layer's keys and values [slots, num_kv_heads,
    HEAD_DIM], or nowhere where that is negative.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    num_rotated = num_heads + num_kv_heads
    num_all = num_rotated + num_kv_heads
    row = qkv + token * num_all * HEAD_DIM
    low, high, inside = halves(row, head, num_all, at, HEAD_DIM)
    if HAS_BIAS:
        begin = bias + head * HEAD_DIM + at
        low += tl.load(begin, inside, other=0.0).to(tl.float32)
        high += tl.load(begin + HEAD_DIM // 2, inside, other=0.0).to(tl.float32)
    new_low, new_high = low, high
    if HAS_NORM:
        new_low, new_high = head_normed(low, high, head, num_heads, q_norm, k_norm, at, eps, HEAD_DIM)
        element = qkv.dtype.element_ty  # rounded as where the norm is an operation of its own
        new_low, new_high = rounded(new_low, element).to(tl.float32), rounded(new_high, element).to(tl.float32)
    new_low, new_high = rotated(new_low, new_high, cos_sin, tl.load(positions + token), at, HEAD_DIM)
    put_halves(row, head, at, new_low, new_high, inside & (head < num_heads), HEAD_DIM)
    slot = tl.load(slot_mapping + token)
    last_key = tl.where(slot >= 0, num_rotated, 0)  # no head is before it where nothing is kept
    last_value = tl.where(slot >= 0, num_all, 0)
    begin = slot * num_kv_heads - num_heads  # of the keys; the head follows
    is_key = inside & (head >= num_heads) & (head < last_key)
    put_halves(keys, begin + head, at, new_low, new_high, is_key, HEAD_DIM)
    is_value = inside & (head >= num_rotated) & (head < last_value)
    put_halves(values, begin - num_kv_heads + head, at, low, high, is_value, HEAD_DIM)
