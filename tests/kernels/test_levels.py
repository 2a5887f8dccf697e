"""Models compute right on CPUs with less than this one: native, torch's and oneDNN's kernels, told what to use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forced import why_not

from novainfer.kernels.cpu.levels import ISA_VARIABLE, LEVELS, cpu_flags, levels

HERE = Path(__file__).parent
# As oneDNN and torch call them; torch itself has no kernels for BF16 instructions alone.
AS_ON = {"avx512": ("AVX512_CORE", "avx512"), "avx2": ("AVX2", "avx2")}
ROOT = Path(__file__).parents[2]


def run_tests(isa: str, *arguments: str) -> str:
    """The output of a run of tests that were all passed, on a CPU that has no more than `isa`."""
    onednn, torch = AS_ON[isa]
    environment = os.environ | {ISA_VARIABLE: isa, "ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": torch}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("isa", AS_ON)
def test_a_model_computes_right_on_a_cpu_of_less(isa: str) -> None:
    if isa not in [level.name for level in levels()]:
        pytest.skip(f"native kernels for {isa}: {why_not(isa)}")
    if isa == "avx2" and "avx512f" not in cpu_flags():
        pytest.skip(f"this CPU has no more than {isa}: all other tests have run with it")
    output = run_tests(
        isa,
        str(HERE / "test_parity.py"),
        str(HERE / "test_quantization.py"),
        str(HERE / "test_attention_settings.py"),
        str(HERE / "cpu" / "test_native_ops.py"),
        "-k",
        "like-0.5b or qwen3 or sliding or normed or same_bits_in_any_batch or comes_back_bit_for_bit or takes_less",
    )
    names = [level.name for level in LEVELS]
    for better in names[: names.index(isa)]:  # it is named at the end
        assert f"not tested here: native kernels for {better}: " in output
