"""Compiles every Triton function for GPUs that are not there, and reports what it takes of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

from novainfer.bench.report import table

__all__ = ["run"]


def run(capabilities: Sequence[int], jobs: int, only: str = "", *, sample: bool = False) -> tuple[dict[str, Any], str]:
    """The report and its table; `only` is part of the names of the variants that are wanted.

    A `sample` is one of them of each function, which has to reach the tensor cores where any has.
    """
    from novainfer.kernels.cuda.compile import all_variants

    names = []
    for capability in capabilities:
        wanted = [variant for variant in all_variants(capability) if only in variant.name]
        if sample:
            wanted.sort(key=lambda variant: not (variant.needs_own_mma or variant.needs_mma))
            wanted = list({variant.function: variant for variant in reversed(wanted)}.values())
        names += [(variant.name, capability) for variant in wanted]
    # Triton and torch are no friends of fork; each process finds the variants anew, by their names.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(_compiled, names, chunksize=max(1, len(names) // (8 * jobs))))
    kernels = [kernel for kernel, _ in found]
    faults = [f"{kernel['name']} on {kernel['arch']} {fault}" for kernel, wrong in found for fault in wrong]
    report = {"benchmark": "cuda-compile", "kernels": kernels, "faults": faults}
    header = ("kernel", "arch", "registers", "spills", "shared bytes", "mma", "warps", "stages")
    rows = [
        (
            kernel["name"],
            kernel["arch"],
            kernel["registers"],
            kernel["spills"],
            kernel["shared_bytes"],
            "yes" if kernel["has_mma"] else "",
            kernel["num_warps"],
            kernel["num_stages"],
        )
        for kernel in kernels
    ]
    text = table("Triton functions as the assembler left them", header, rows)
    return report, "\n".join((text, *(f"FAULT: {fault}" for fault in faults)))


def _compiled(which: tuple[str, int]) -> tuple[dict[str, Any], list[str]]:
    from novainfer.kernels.cuda.compile import all_variants, compile_variant, faults

    name, capability = which
    variant = next(variant for variant in all_variants(capability) if variant.name == name)
    compiled = compile_variant(variant, capability)
    return asdict(compiled), faults(variant, compiled)
