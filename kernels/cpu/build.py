"""Where the native library comes from: the cache, the wheel, or a compiler, in this order.

    cache     `$XDG_CACHE_HOME/novainfer/native` (or `~/.cache/...`): what a compiler made here before
    prebuilt  the folder beside this module, which `make wheel` fills: no compiler is needed where a wheel is installed
    compiler  g++ or `$CXX`, up to a minute on two slow cores, once; what it makes goes to the cache

A library's name holds its instruction set and a hash of the sources and flags that it was made of, so one that was
made of others is not found. Its last bytes are a hash of all others: to load one that was cut off would end the
process. One that is damaged or cannot be loaded is made again. Compilers may race: each works in a directory of its own
and renames its result into place, which is atomic.

The libraries need a glibc of 2.17 and a libstdc++ of GCC 7, both older than torch's own needs: one that
was compiled on a new system runs on an old one (team.cpp pins the few symbols that have newer versions).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from novainfer.kernels.cpu.levels import LEVELS, Level, levels
from novainfer.kernels.errors import KernelUnavailableError

__all__ = ["ask_system", "best_library", "cache_dir", "compile_library", "library_of", "prebuild"]

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-ffp-contract=off", "-w")
LINK_FLAGS = ("-shared", "-s", "-Wl,--build-id=none")  # the same bytes from the same compiler, wherever it ran
HASH_BYTES = 32
COMPILE_TIMEOUT_S = 300.0  # a file's, on a loaded machine; the largest takes a slow core 28 s

T = TypeVar("T")


def cache_dir() -> Path:
    """Where compiled libraries are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "novainfer" / "native"


def prebuilt_dir() -> Path:
    """Where a wheel has its libraries."""
    return SOURCE_DIR / "prebuilt"


def best_library(load: Callable[[Path], T]) -> T:
    """`load(path)` of the library for the best instruction set that can be had here.

    Raises `KernelUnavailableError` with the reason when there is none.
    """
    found = levels()
    if not found:
        raise KernelUnavailableError("native kernels need Linux on an x86-64 CPU with AVX2 or on an Arm CPU (aarch64)")
    failures: list[KernelUnavailableError] = []
    for level in found:  # a compiler older than the CPU knows only the lesser ones
        try:
            library = library_of(level, load)
        except KernelUnavailableError as error:
            failures.append(error)
            continue
        if failures:
            logger.warning(
                "native kernels for %s cannot be used (%s); those for %s are used instead",
                found[0].name,
                failures[0],
                level.name,
            )
        return library
    raise failures[0]


def library_of(level: Level, load: Callable[[Path], T]) -> T:
    """`load(path)` of the library for one instruction set; it raises OSError or AttributeError for a file of no use.

    Raises `KernelUnavailableError` with the reason when there is none and none can be compiled.
    """
    name = _name(level)
    for path in (cache_dir() / name, prebuilt_dir() / name):
        if path.exists():
            try:
                _check(path)
                return load(path)
            except (OSError, AttributeError) as error:
                logger.warning("the native library %s cannot be loaded, and is made again: %s", path, error)
    path = cache_dir() / name
    compile_library(level, path)
    try:
        return load(path)
    except (OSError, AttributeError) as error:
        raise KernelUnavailableError(f"the native library {path} cannot be loaded: {error}") from error


def prebuild(folder: Path) -> list[Path]:
    """Compile the libraries of all of this machine's instruction sets into a folder, which then holds nothing else."""
    wanted = {_name(level): level for level in LEVELS}
    for path in folder.glob("*.so"):
        if path.name not in wanted:
            path.unlink()
    for name, level in wanted.items():
        compile_library(level, folder / name)
    return sorted(folder / name for name in wanted)


def _name(level: Level) -> str:
    digest = hashlib.sha256()
    digest.update("\0".join((*COMMON_FLAGS, *LINK_FLAGS, *level.flags)).encode())
    for path in (*_sources(), *sorted(SOURCE_DIR.glob("*.h"))):
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return f"{level.name}-{digest.hexdigest()[:32]}.so"


def _check(path: Path) -> None:
    """Raise OSError for a file that is not what was written."""
    data = path.read_bytes()
    if hashlib.sha256(data[:-HASH_BYTES]).digest() != data[-HASH_BYTES:]:
        raise OSError("it is damaged")


def _sources() -> list[Path]:
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    if not sources:
        raise KernelUnavailableError(f"the native kernels' sources are not in {SOURCE_DIR}")
    return sources


def compile_library(level: Level, library: Path) -> None:
    """Compile all sources for one instruction set; what was there under this name is replaced in one piece."""
    compiler = os.environ.get("CXX") or "g++"
    program = shutil.which(compiler)
    if program is None:
        raise KernelUnavailableError(f"native kernels need a C++ compiler; {compiler} was not found")
    flags = (*COMMON_FLAGS, *level.flags)
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as work:
            sources = _sources()
            objects = [str(Path(work) / f"{source.stem}.o") for source in sources]
            compilers = [
                _start([program, *flags, "-c", "-o", target, str(source)])
                for target, source in zip(objects, sources, strict=True)
            ]
            failures: list[KernelUnavailableError] = []
            for process in compilers:  # all of them, before their directory goes
                try:
                    _finish(process)
                except KernelUnavailableError as error:
                    failures.append(error)
            if failures:
                raise failures[0]
            built = Path(work) / library.name
            _finish(_start([program, *flags, *LINK_FLAGS, "-o", str(built), *objects]))
            with built.open("r+b") as file:
                digest = hashlib.sha256(file.read()).digest()
                file.write(digest)
            built.rename(library)
    except OSError as error:
        raise KernelUnavailableError(f"{library.parent} cannot hold the native library: {error}") from error


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


def ask_system(library: ctypes.CDLL) -> None:
    """Raise `KernelUnavailableError` where this process may not use what the library was compiled for."""
    error = library.nova_ask_system()
    if error:
        reason = os.strerror(error)
        raise KernelUnavailableError(f"the system does not let this process use the CPU's matrix unit: {reason}")


def _loadable(path: Path) -> Path:
    ask_system(ctypes.CDLL(str(path)))
    return path


def main(arguments: list[str]) -> None:
    """Without an argument, have the library of this machine ready (`make setup`: so that the first start need not).

    With a folder, all libraries of a wheel are compiled into it.
    """
    if arguments:
        print(*prebuild(Path(arguments[0])), sep="\n")
        return
    try:
        print(best_library(_loadable))
    except KernelUnavailableError as error:
        print(f"{error}: torch's kernels will be used")


if __name__ == "__main__":
    main(sys.argv[1:])
