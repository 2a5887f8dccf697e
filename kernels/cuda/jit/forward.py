"""What stands between the product of queries, keys and values, and attention: one function."""

import triton
import triton.language as tl

from novainfer.kernels.cuda.jit.attention import cells_of, size_of
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
    key_scales,
    value_scales,
    num_heads,
    num_kv_heads,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """HEADS heads of one row of qkv [T, heads, HEAD_DIM]: their bias, norm and rotation, and where they go.

    A query stays where it is; a key and a value go to their slot of one layer's keys and values [slots, num_kv_heads,
    HEAD_DIM], or nowhere where that is negative. LARGEST is what a cell of these holds at most where they are
    quantised, with scales [slots, num_kv_heads]; else None.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    num_rotated = num_heads + num_kv_heads
    num_all = num_rotated + num_kv_heads
    element = qkv.dtype.element_ty
    row = qkv + token * num_all * HEAD_DIM
    low, high, inside = halves(row, head, num_all, at, HEAD_DIM)
    if HAS_BIAS:
        begin = bias + head * HEAD_DIM + at
        low += tl.load(begin, inside, other=0.0).to(tl.float32)
        high += tl.load(begin + HEAD_DIM // 2, inside, other=0.0).to(tl.float32)
    new_low, new_high = low, high
    if HAS_NORM:
        new_low, new_high = head_normed(low, high, head, num_heads, q_norm, k_norm, at, eps, HEAD_DIM)
        # Rounded as where the norm is an operation of its own, and so are keys and values before they are quantised.
        new_low, new_high = rounded(new_low, element).to(tl.float32), rounded(new_high, element).to(tl.float32)
    new_low, new_high = rotated(new_low, new_high, cos_sin, tl.load(positions + token), at, HEAD_DIM)
    low, high = tl.where(head < num_rotated, new_low, low), tl.where(head < num_rotated, new_high, high)
    put_halves(row, head, at, low, high, inside & (head < num_heads), HEAD_DIM)
    slot = tl.load(slot_mapping + token)
    last_key = tl.where(slot >= 0, num_rotated, 0)  # no head is before it where nothing is kept
    last_value = tl.where(slot >= 0, num_all, 0)
    is_key = (head >= num_heads) & (head < last_key)
    is_value = (head >= num_rotated) & (head < last_value)
    key = slot * num_kv_heads + head - num_heads
    value = key - num_kv_heads
    if LARGEST is not None:
        low, high = rounded(low, element).to(tl.float32), rounded(high, element).to(tl.float32)
        largest = tl.max(tl.maximum(size_of(low), size_of(high)), 1, keep_dims=True)
        scale = tl.div_rn(largest, LARGEST)
        tl.store(key_scales + key, scale, is_key)
        tl.store(value_scales + value, scale, is_value)
        low, high = cells_of(low, scale, LARGEST, ROUNDS), cells_of(high, scale, LARGEST, ROUNDS)
    put_halves(keys, key, at, low, high, inside & is_key, HEAD_DIM)
    put_halves(values, value, at, low, high, inside & is_value, HEAD_DIM)
