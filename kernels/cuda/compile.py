"""Compiling Triton functions for GPUs that are not there, and what the assembler says of them.

No GPU, no driver: Triton lowers a function to PTX, and its own ptxas assembles that for the architecture asked for. A
stack frame or local memory in the result is a register spilled; without an instruction of the tensor cores a matrix
product runs at a sixteenth of its speed. Both are faults that no test of numbers finds.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from novainfer.kernels.cuda.language import INTERPRETED, check_version
from novainfer.kernels.cuda.variant import Variant
from novainfer.kernels.errors import KernelUnavailableError

__all__ = ["CAPABILITIES", "Compiled", "all_variants", "compile_variant", "faults", "ptx_of"]

CAPABILITIES = (80, 90, 100)  # A100; H100 and H200; B200
# What each generation calls a product of its tensor cores: Ampere, Hopper, Blackwell.
MMA = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")
OWN_MMA = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)")
LOCAL_ACCESS = re.compile(r"\b(?:LDL|STL)\b")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of one variant on one architecture."""

    name: str
    arch: str  # "sm_90"
    registers: int  # of a thread
    spills: int  # instructions that read or write a thread's local memory
    stack_bytes: int  # of a thread
    shared_bytes: int  # of a block
    has_mma: bool
    num_warps: int
    num_stages: int
    has_own_mma: bool = False


def ptx_of(variant: Variant, capability: int) -> str:
    """The assembler's input; raises as `compile_variant`."""
    return str(_compiled(variant, capability).asm["ptx"])


def _compiled(variant: Variant, capability: int) -> Any:
    check_version()
    if INTERPRETED:
        raise KernelUnavailableError("Triton interprets here (TRITON_INTERPRET is set), and compiles nothing")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    config = variant.config
    names = variant.function.arg_names
    types = {name: variant.signature.get(name, "constexpr") for name in names}
    unknown = [name for name in names if types[name] == "constexpr" and name not in config.constants]
    if unknown:
        raise ValueError(f"{variant.name}: {', '.join(unknown)} are neither in its signature nor constants")
    divisible = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if types[name].startswith("*") or name in variant.aligned
    }
    source = ASTSource(fn=variant.function, signature=types, constexprs=dict(config.constants), attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=config.options)


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile for `capability` (90 is sm_90); raises `KernelUnavailableError` without a Triton that can."""
    compiled, config = _compiled(variant, capability), variant.config
    usage, num_local = _disassembled(compiled.asm["cubin"])
    return Compiled(
        name=variant.name,
        arch=f"sm_{capability}",
        registers=int(usage["registers"]),
        spills=num_local,
        stack_bytes=int(usage["stack"]),
        shared_bytes=int(compiled.metadata.shared),
        has_mma=MMA.search(compiled.asm["ptx"]) is not None,
        has_own_mma=OWN_MMA.get(capability, "no instruction") in compiled.asm["ptx"],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def faults(variant: Variant, compiled: Compiled) -> list[str]:
    """What must not be, each in a phrase."""
    found = []
    if compiled.spills or compiled.stack_bytes:
        found.append(f"spills registers ({compiled.spills} accesses, {compiled.stack_bytes} bytes of stack)")
    if variant.needs_mma and not compiled.has_mma:
        found.append("does not reach the tensor cores")
    if variant.needs_own_mma and not compiled.has_own_mma:
        found.append("does not reach the matrix instructions of its generation")
    if compiled.registers > variant.registers_max:
        found.append(f"takes {compiled.registers} registers, more than {variant.registers_max}")
    if compiled.shared_bytes > variant.shared_bytes_max:
        found.append(f"takes {compiled.shared_bytes} bytes of shared memory, more than {variant.shared_bytes_max}")
    return found


def _disassembled(cubin: bytes) -> tuple[dict[str, str], int]:
    """The resource usage, and how many instructions access local memory, by the cuobjdump that Triton brings.

    Where a function has no local memory there are none, and its instructions, long to write out, are not read.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)

        def dump(*options: str) -> str:
            command = [os.fspath(knobs.nvidia.cuobjdump.path), *options, str(file)]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        usage = USAGE.search(dump("--dump-resource-usage"))
        if usage is None:
            raise KernelUnavailableError("cuobjdump says nothing of the resources of a compiled function")
        has_local = int(usage["stack"]) or int(usage["local"])
        return usage.groupdict(), len(LOCAL_ACCESS.findall(dump("--dump-sass"))) if has_local else 0


def all_variants(capability: int) -> Iterable[Variant]:
    """Of every module that launches functions."""
    from novainfer.kernels.cuda import attention, blocks, forward, linear, row_ops, sampler

    for module in (attention, blocks, forward, linear, row_ops, sampler):
        yield from module.variants(capability)
