"""Compile the C++ files beside this module once per machine and give the path of the shared library.

The library is compiled at first use, a few seconds with g++, for the instruction sets of this CPU, and kept
in `$XDG_CACHE_HOME/novainfer/native` (or `~/.cache/...`) under a hash of everything that decides its
content. Builders may race: each compiles in a directory of its own and renames its result into place, which
is atomic.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from novainfer.kernels.errors import KernelUnavailableError

__all__ = ["build_library", "cache_dir", "cpu_flags", "isa_flags"]

SOURCE_DIR = Path(__file__).parent
COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-ffp-contract=off", "-w")
# Fastest first: the features /proc/cpuinfo must name, and the flags that use them.
ISA_LEVELS: tuple[tuple[frozenset[str], tuple[str, ...]], ...] = (
    (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma"}),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma", "-mavx2"),
    ),
    (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mavx2"),
    ),
    (frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
)
COMPILE_TIMEOUT_S = 300.0  # seconds on a loaded machine; 5 s on a quiet one


def cpu_flags() -> frozenset[str]:
    """Features of this machine's CPU as /proc/cpuinfo names them; empty where that cannot be read."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def isa_flags(flags: frozenset[str]) -> list[tuple[str, ...]]:
    """The compiler's flags for each level of instruction sets that a CPU with these features has, the best first."""
    return [compiler_flags for needed, compiler_flags in ISA_LEVELS if needed <= flags]


def cache_dir() -> Path:
    """Where compiled libraries are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "novainfer" / "native"


def build_library(compiler: str | None = None, isa: tuple[str, ...] | None = None) -> Path:
    """The path of the compiled library, compiling it when this cache has none.

    `isa` overrides the instruction sets detected (tests build the lesser ones). Raises
    `KernelUnavailableError` with the reason when it cannot be built here.
    """
    levels = isa_flags(cpu_flags()) if isa is None else [isa]
    if not levels:
        raise KernelUnavailableError("native kernels need an x86-64 CPU with AVX2 on Linux")
    compiler = compiler or os.environ.get("CXX") or "g++"
    program = shutil.which(compiler)
    if program is None:
        raise KernelUnavailableError(f"native kernels need a C++ compiler; {compiler} was not found")
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    if not sources:
        raise KernelUnavailableError(f"the native kernels' sources are not in {SOURCE_DIR}")
    failures: list[KernelUnavailableError] = []
    for level in levels:  # a compiler older than the CPU knows only the lesser ones
        flags = (*COMMON_FLAGS, *level)
        try:
            library = cache_dir() / f"{_key(program, flags, sources)}.so"
            if not library.exists():
                _compile(program, flags, sources, library)
            return library
        except KernelUnavailableError as error:
            failures.append(error)
    raise failures[0]


def _key(program: str, flags: tuple[str, ...], sources: list[Path]) -> str:
    digest = hashlib.sha256()
    digest.update(_finish(_start([program, "-dumpfullversion", "-dumpversion"])).encode())
    digest.update("\0".join((program, *flags)).encode())
    for path in (*sources, *sorted(SOURCE_DIR.glob("*.h"))):
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _start(command: list[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise KernelUnavailableError(f"{command[0]} could not be run: {error}") from error


def _finish(process: subprocess.Popen[str]) -> str:
    try:
        output, errors = process.communicate(timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise KernelUnavailableError(f"the C++ compiler did not end within {COMPILE_TIMEOUT_S:.0f} s") from error
    if process.returncode != 0:
        first = next((line for line in errors.splitlines() if "error" in line), errors.strip()[:200])
        raise KernelUnavailableError(f"the C++ compiler failed: {first}")
    return output


def _compile(program: str, flags: tuple[str, ...], sources: list[Path], library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as work:
            objects = [str(Path(work) / f"{source.stem}.o") for source in sources]
            compilers = [
                _start([program, *flags, "-c", "-o", target, str(source)])
                for target, source in zip(objects, sources, strict=True)
            ]
            failures: list[KernelUnavailableError] = []
            for compiler in compilers:  # all of them, before their directory goes
                try:
                    _finish(compiler)
                except KernelUnavailableError as error:
                    failures.append(error)
            if failures:
                raise failures[0]
            built = Path(work) / library.name
            _finish(_start([program, *flags, "-shared", "-o", str(built), *objects]))
            built.rename(library)
    except OSError as error:
        raise KernelUnavailableError(f"{library.parent} cannot hold the native library: {error}") from error


if __name__ == "__main__":  # `make setup` builds ahead, so that the first start need not
    try:
        print(build_library())
    except KernelUnavailableError as error:
        print(f"{error}: torch's kernels will be used")
