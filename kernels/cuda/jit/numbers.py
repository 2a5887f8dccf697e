"""Numbers as the GPU computes them, in the interpreter too.

That truncates to bf16, rounds to fp8 without carrying into the exponent, multiplies bf16's bits, and lets BLAS add up
the rows of a product in an order that depends on where they stand.
"""

import triton
import triton.language as tl

from novainfer.kernels.cuda import language

INTERPRETED = tl.constexpr(language.INTERPRETED)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 to `dtype`, to the nearest, of two the even one."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    if INTERPRETED and dtype == tl.float8e4nv:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        small = (x + 24576.0) - 24576.0  # 1.5 * 2**14: steps of 2**-9, as fp8 has below 2**-6
        x = tl.where(tl.abs(x) < 0.015625, small, tl.where(x == x, bits.to(tl.float32, bitcast=True), x))
    return x.to(dtype)


@triton.jit
def dot(a, b, sums):
    """`sums + a @ b` on the tensor cores, fp32 [M, N]; fp32 operands are multiplied as they are, not as TF32."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def row_dot(a, b, sums):
    """The same, where a row of the product shall not depend on where it stands."""
    if INTERPRETED:
        return sums + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    return dot(a, b, sums)
