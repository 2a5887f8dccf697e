"""The native library for Arm, cross-compiled and run under an emulator: x86's bits where results are exact."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from novainfer.kernels.cpu import build
from novainfer.kernels.cpu.levels import ARM_LEVELS, X86_LEVELS, Level, levels

COMPILER = "aarch64-linux-gnu-g++"  # Debian: g++-aarch64-linux-gnu
EMULATOR = next(filter(shutil.which, ("qemu-aarch64-static", "qemu-aarch64")), None)  # qemu-user-static, qemu-user
LIBRARIES = "/usr/aarch64-linux-gnu"
DRIVER = Path(__file__).with_name("library_driver.cpp")
TOLERANCE = {"bf16": 5e-3, "f32": 1e-6}  # of the largest value of a result
# Sums across a vector are added up in another order than on x86, by its width; an infinite row is no number anywhere.
CLOSE = {"attention", "rms_norm", "add_rms_norm", "qk_norm", "likely", "logprobs", "infinite"}

Results = dict[str, tuple[str, bytes]]


def run(library: Path, level: Level, compiler: str, *emulator: str) -> Results:
    """What the driver prints, by name, with its type."""
    program = library.with_suffix(".driver")
    command = [compiler, "-O1", "-std=c++17", "-ffp-contract=off", "-w", *level.flags, f"-I{build.SOURCE_DIR}"]
    subprocess.run([*command, "-o", str(program), str(DRIVER), str(library)], check=True, timeout=300)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: Results = {}
    for line in done.stdout.splitlines():
        name, kind, digits = line.split(" ")
        assert name not in found
        found[name] = kind, bytes.fromhex(digits)
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """On this CPU, by the least of its instruction sets."""
    here = levels()
    if not here or here[-1] not in X86_LEVELS:
        pytest.skip("what Arm computes is compared with x86-64 with AVX2")
    library = tmp_path_factory.mktemp("x86") / "library.so"
    build.compile_library(here[-1], library)
    return run(library, here[-1], "g++")


def numbers(kind: str, data: bytes) -> NDArray[np.float32]:
    if kind == "bf16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.float32)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} was not found")
@pytest.mark.skipif(EMULATOR is None, reason="qemu-aarch64 was not found")
@pytest.mark.parametrize("level", ARM_LEVELS, ids=lambda level: level.name)
def test_arm_computes_what_x86_does(
    level: Level, expected: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EMULATOR is not None
    monkeypatch.setenv("CXX", COMPILER)
    library = tmp_path / "library.so"
    build.compile_library(level, library)
    found = run(library, level, COMPILER, EMULATOR, "-L", LIBRARIES)
    assert list(found) == list(expected)
    for name, (kind, data) in found.items():
        if name.split("/")[0] not in CLOSE:
            assert data == expected[name][1], name
            continue
        got, wanted = numbers(kind, data), numbers(*expected[name])
        finite = np.isfinite(wanted)
        assert np.array_equal(np.isfinite(got), finite), name
        if name.split("/")[0] == "infinite":
            assert not finite.any()
            continue
        assert np.abs(got - wanted)[finite].max() <= TOLERANCE[kind] * np.abs(wanted[finite]).max(), name
