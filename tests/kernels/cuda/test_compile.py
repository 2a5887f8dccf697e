"""Compiling for GPUs that are not there, and what is said of the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from novainfer.kernels.cuda.compile import Compiled, all_variants, faults
from novainfer.kernels.cuda.variant import Config, Variant

PLAIN = Compiled("f", "sm_90", 96, 0, 0, 1024, True, 4, 3)


def variant(**more: object) -> Variant:
    return Variant("f", None, {}, Config({}), **more)  # type: ignore[arg-type]


def changed(**more: object) -> Compiled:
    return Compiled(**({name: getattr(PLAIN, name) for name in PLAIN.__slots__} | more))


@pytest.mark.parametrize(
    ("wanted", "compiled", "said"),
    [
        (variant(), changed(spills=3), "spills registers (3 accesses, 0 bytes of stack)"),
        (variant(), changed(stack_bytes=8), "spills registers (0 accesses, 8 bytes of stack)"),
        (variant(needs_mma=True), changed(has_mma=False), "does not reach the tensor cores"),
        (variant(needs_own_mma=True), PLAIN, "does not reach the matrix instructions of its generation"),
        (variant(registers_max=64), PLAIN, "takes 96 registers, more than 64"),
        (variant(shared_bytes_max=1023), PLAIN, "takes 1024 bytes of shared memory, more than 1023"),
    ],
)
def test_what_must_not_be_is_said(wanted: Variant, compiled: Compiled, said: str) -> None:
    assert faults(wanted, compiled) == [said]


def test_nothing_is_said_of_what_is_well() -> None:
    assert not faults(variant(needs_mma=True), PLAIN)
    assert not faults(variant(needs_own_mma=True), changed(has_own_mma=True))
    assert not faults(variant(), changed(has_mma=False))


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_names_are_of_one_variant_each(capability: int) -> None:
    names = [variant.name for variant in all_variants(capability)]
    assert names
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_a_variant_of_each_function_compiles_without_a_spill() -> None:
    """On Hopper, in a process of its own: in this one Triton interprets. `.ci/run` compiles all variants."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "novainfer.server.cli.main", "bench", "cuda-compile", "--json"]
    command += ["--arch", "sm_90", "--sample"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    assert (done.returncode, report.get("faults")) == (0, []), done.stderr[-2000:]
    functions = {variant.function for variant in all_variants(90)}
    assert len(report["kernels"]) == len(functions) > 20
    assert {kernel["arch"] for kernel in report["kernels"]} == {"sm_90"}
