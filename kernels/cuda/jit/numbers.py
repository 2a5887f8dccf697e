"""Numbers as the GPU computes them, in the interpreter too: it truncates to bf16, and multiplies bf16's bits."""

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
    return x.to(dtype)


@triton.jit
def dot(a, b, sums):
    """`sums + a @ b` on the tensor cores, fp32 [M, N]; fp32 operands are multiplied as they are, not as TF32."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")
