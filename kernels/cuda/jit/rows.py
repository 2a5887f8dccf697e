"""The small operations between matrix products, one program a row or a part of one."""

import triton
import triton.language as tl

from novainfer.kernels.cuda.jit.numbers import rounded


@triton.jit
def silu_mul(gate_up, out, intermediate_size, BLOCK: tl.constexpr):
    """`silu(gate) * up` of [M, 2 * I] into [M, I]; a program computes BLOCK elements of one row, in fp32."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < intermediate_size
    gate = tl.load(gate_up + row * 2 * intermediate_size + at, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * intermediate_size + intermediate_size + at, inside, other=0.0).to(tl.float32)
    # Rounded in between, as torch rounds what `F.silu` gives.
    silu = rounded(gate / (1.0 + tl.exp(-gate)), out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * intermediate_size + at, rounded(silu * up, out.dtype.element_ty), inside)
