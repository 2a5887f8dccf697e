"""Compiling for GPUs that are not there, and what is said of the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from novainfer.kernels.cuda.compile import CAPABILITIES, Compiled, all_variants, faults
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


ARITHMETIC = r"""
import json, re
from novainfer.kernels.cuda import forward, row_ops
from novainfer.kernels.cuda.compile import CAPABILITIES, ptx_of

OPERATION = re.compile(r"^\s*(?:@%p\d+ )?((?:fma|mul|add|sub|div|rsqrt)\.\S*f32\S*|shfl\S*)", re.MULTILINE)
found = []
for capability in CAPABILITIES:
    of = {variant.name: variant for module in (forward, row_ops) for variant in module.variants(capability)}
    for name in ("qk_norm bf16 d128", "place_heads bf16 d128 norms"):
        operations = []
        for operation in OPERATION.findall(ptx_of(of[name], capability)):
            kind = operation.split(".")[0]
            operations += [kind] * (2 if operation.endswith("x2") else 1)  # Blackwell does two at once, here and there
            if kind == "rsqrt":
                break
        found.append(operations)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_head_is_normed_by_the_same_instructions_by_itself_and_in_the_forward() -> None:
    """Or the forward would not have the bits of its parts on a GPU, and all graphs were lost to that."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", ARITHMETIC], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 6
    for alone, within in zip(found[::2], found[1::2], strict=True):
        counts = Counter(alone)
        assert counts == Counter(within)
        assert alone[alone.index("shfl") :] == within[within.index("shfl") :]
        assert (counts["mul"], counts["fma"], counts["shfl"], counts["rsqrt"]) == (4, 5, 4, 1), "squares, mean and eps"


def reported(*options: str) -> list[dict[str, Any]]:
    """What a report without faults says, made in a process of its own: in this one Triton interprets."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "novainfer.server.cli.main", "bench", "cuda-compile", "--json", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    assert (done.returncode, report.get("faults")) == (0, []), done.stderr[-2000:]
    kernels: list[dict[str, Any]] = report["kernels"]
    return kernels


@pytest.mark.slow
def test_a_variant_of_each_function_compiles_without_a_spill() -> None:
    """On Hopper. `.ci/run` compiles all variants for it."""
    kernels = reported("--arch", "sm_90", "--sample")
    functions = {variant.function for variant in all_variants(90)}
    assert len(kernels) == len(functions) > 20
    assert {kernel["arch"] for kernel in kernels} == {"sm_90"}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_variant_compiles_for_every_architecture_without_a_spill() -> None:
    names = [(kernel["name"], kernel["arch"]) for kernel in reported()]
    assert names == [(variant.name, f"sm_{c}") for c in CAPABILITIES for variant in all_variants(c)]


SPILLING = r"""
import json
from dataclasses import replace
from novainfer.kernels.cuda import row_ops
from novainfer.kernels.cuda.compile import compile_variant, faults

class Cramped:
    def __init__(self, config):
        self.constants, self.num_warps, self.num_stages = config.constants, config.num_warps, config.num_stages
        self.options = config.options | {"maxnreg": 24}

(variant,) = [one for one in row_ops.variants(90) if one.name == "add_rms_norm bf16 8192"]
cramped = compile_variant(replace(variant, config=Cramped(variant.config)), 90)
print(json.dumps([cramped.spills, cramped.stack_bytes, cramped.registers, faults(variant, cramped)]))
"""


@pytest.mark.slow
def test_registers_that_do_not_suffice_are_seen() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SPILLING], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    spills, stack_bytes, registers, said = json.loads(done.stdout)
    assert spills > 4
    assert stack_bytes > 4
    assert registers <= 24
    assert said == [f"spills registers ({spills} accesses, {stack_bytes} bytes of stack)"]
