"""The library's cache, and what happens where it cannot be built."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from novainfer.kernels.cpu import build, native
from novainfer.kernels.cpu import levels as cpu_levels
from novainfer.kernels.cpu.levels import ISA_VARIABLE, LEVELS, levels
from novainfer.kernels.errors import KernelUnavailableError, LoadError
from novainfer.kernels.ops.selection import build_registry

SOURCE = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
CPU = torch.device("cpu")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library's sources, an empty cache and no wheel in the place of the real ones."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    (folder / "other.cpp").write_text("int other;\n")
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(build, "SOURCE_DIR", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    return folder


def load(path: Path) -> Path:
    """A file of no use raises."""
    ctypes.CDLL(str(path))
    return path


def answer(path: Path) -> int:
    result: int = ctypes.CDLL(str(path)).answer()
    return result


def take_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


def test_a_library_is_built_once_and_again_when_a_source_changes(sources: Path) -> None:
    first = build.best_library(load)
    assert answer(first) == 42
    written = first.stat().st_mtime_ns
    assert build.best_library(load) == first
    assert first.stat().st_mtime_ns == written
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    second = build.best_library(load)
    assert second != first
    assert answer(second) == 43


def test_other_instruction_sets_are_other_libraries(sources: Path) -> None:
    found = {build.library_of(level, lambda path: path) for level in LEVELS}
    assert {path.name.rpartition("-")[0] for path in found} == {
        "amx",
        "avx512-bf16",
        "avx512-vnni",
        "avx512",
        "avx2-vnni",
        "avx2",
    }


def test_what_is_in_the_cache_needs_no_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build.best_library(load)
    take_the_compiler(monkeypatch)
    assert build.best_library(load) == built


def test_what_came_with_the_wheel_needs_neither_compiler_nor_cache(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build.prebuild(build.prebuilt_dir())
    assert [path.name.rpartition("-")[0] for path in built] == [
        "amx",
        "avx2",
        "avx2-vnni",
        "avx512",
        "avx512-bf16",
        "avx512-vnni",
    ]
    take_the_compiler(monkeypatch)
    assert answer(build.best_library(load)) == 42
    assert not build.cache_dir().exists()


def test_a_wheels_library_of_other_sources_is_not_taken(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.prebuild(build.prebuilt_dir())
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    assert answer(build.best_library(load)) == 43
    take_the_compiler(monkeypatch)
    (sources / "answer.h").write_text("#define ANSWER 44\n")
    with pytest.raises(KernelUnavailableError, match=r"g\+\+ was not found"):
        build.best_library(load)


def test_libraries_of_a_wheel_are_the_same_bytes_wherever_they_are_made(sources: Path, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "a" / "longer" / "path"
    made = [[path.read_bytes() for path in build.prebuild(folder)] for folder in (first, again)]
    assert made[0] == made[1]
    (first / "avx2-of-older-sources.so").write_bytes(b"")
    assert [path.read_bytes() for path in build.prebuild(first)] == made[0]
    assert len(list(first.iterdir())) == len(LEVELS)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no objdump")
def test_libraries_run_on_systems_as_old_as_is_said() -> None:
    """A glibc of 2.17, and the libstdc++ of GCC 7: Red Hat 8 and Ubuntu 20.04 have newer ones."""
    if not levels():
        pytest.skip("there are no native kernels here")
    listing = subprocess.run(["objdump", "-T", native.library()._name], capture_output=True, text=True, check=True)
    found = 0
    for name, newest in (("GLIBC", (2, 17)), ("GLIBCXX", (3, 4, 24)), ("CXXABI", (1, 3, 11))):
        for line in listing.stdout.splitlines():
            for version in re.findall(rf"\b{name}_([0-9.]+)", line):
                assert tuple(map(int, version.split("."))) <= newest, line
                found += 1
    assert found > 10


def test_a_cached_library_that_cannot_be_loaded_is_made_again(sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    built = build.best_library(lambda path: path)
    built.write_bytes(built.read_bytes()[:1000])  # the disk was full
    assert answer(build.best_library(load)) == 42
    assert "cannot be loaded, and is made again" in caplog.text


def test_one_that_cannot_be_loaded_when_it_was_just_made_is_one_sentence(sources: Path) -> None:
    def refuse(path: Path) -> Path:
        raise OSError("planted")

    with pytest.raises(KernelUnavailableError, match="cannot be loaded: planted"):
        build.best_library(refuse)


BUILDER = """
import ctypes, sys
from pathlib import Path
from novainfer.kernels.cpu import build

def answer(path):
    return path, ctypes.CDLL(str(path)).answer()

build.SOURCE_DIR = Path(sys.argv[1])
print(*build.best_library(answer))
"""


def test_processes_that_build_at_once_leave_one_whole_library(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that waits until each process has called it: both build, whichever began first."""
    callers, patient = tmp_path / "callers", tmp_path / "patient-g++"
    callers.mkdir()
    patient.write_text(
        f"#!/bin/sh\ntouch {callers}/$PPID\nfor turn in $(seq 600); do\n"
        f'  [ "$(ls {callers} | wc -l)" = 2 ] && exec g++ "$@"\n  sleep .05\ndone\nexit 1\n'
    )
    patient.chmod(0o755)
    monkeypatch.setenv("CXX", str(patient))
    processes = [
        subprocess.Popen([sys.executable, "-c", BUILDER, str(sources)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    first, second = (process.communicate(timeout=60)[0].split() for process in processes)
    assert len(os.listdir(callers)) == 2
    assert first == second
    assert first[1] == "42"
    assert os.listdir(build.cache_dir()) == [Path(first[0]).name]  # nothing half made is left


def test_a_compiler_error_is_one_sentence_and_leaves_nothing(sources: Path) -> None:
    (sources / "other.cpp").write_text("this is not C++\n")
    with pytest.raises(KernelUnavailableError, match=r"compiler failed: .*other\.cpp") as caught:
        build.best_library(load)
    assert "\n" not in str(caught.value)
    assert os.listdir(build.cache_dir()) == []


def test_a_cache_that_cannot_be_written_is_one_sentence(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(KernelUnavailableError, match="cannot hold the native library"):
        build.best_library(load)


def test_without_a_compiler_the_reason_names_it(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_the_compiler(monkeypatch)
    with pytest.raises(KernelUnavailableError, match=r"g\+\+ was not found"):
        build.best_library(load)


def test_without_avx2_the_reason_names_it(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_levels, "cpu_flags", lambda: frozenset({"sse2"}))
    with pytest.raises(KernelUnavailableError, match="AVX2"):
        build.best_library(load)


AVX512 = {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}
VNNI = {"avx512_vnni", "avx_vnni"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            AVX512 | VNNI | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
            ["amx", "avx512-bf16", "avx512-vnni", "avx512", "avx2-vnni", "avx2"],
        ),
        (AVX512 | VNNI | {"avx512_bf16"}, ["avx512-bf16", "avx512-vnni", "avx512", "avx2-vnni", "avx2"]),
        (AVX512 | {"avx512_vnni"}, ["avx512-vnni", "avx512", "avx2"]),
        ({"avx2", "fma", "avx_vnni"}, ["avx2-vnni", "avx2"]),
        (AVX512, ["avx512", "avx2"]),
        ({"avx2", "fma"}, ["avx2"]),
        ({"avx2"}, []),
    ],
)
def test_the_levels_are_those_of_the_cpu_the_best_first(
    flags: set[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    monkeypatch.setattr(cpu_levels, "cpu_flags", lambda: frozenset(flags))
    assert [level.name for level in levels()] == expected


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("aarch64", "Features\t: fp asimd evtstrm aes crc32 atomics asimdhp asimdrdm asimddp", ["neon-dot", "neon"]),
        ("aarch64", "Features\t: fp asimd evtstrm aes crc32", ["neon"]),
        ("arm64", "", []),  # macOS: torch computes
        ("riscv64", "isa\t: rv64gcv", []),
    ],
)
def test_other_machines_have_levels_of_their_own(
    machine: str, features: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{features}\nCPU part\t: 0xd0c\n")
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    monkeypatch.setattr(cpu_levels, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu_levels, "LEVELS", cpu_levels.BY_MACHINE.get(machine, ()))
    assert [level.name for level in levels()] == expected
    if expected:
        monkeypatch.setenv(ISA_VARIABLE, "neon")
        assert [level.name for level in levels()] == ["neon"]
        monkeypatch.setenv(ISA_VARIABLE, "avx2")
        with pytest.raises(LoadError, match="NOVAINFER_ISA must be one of neon-dot, neon, not 'avx2'"):
            levels()


def test_a_better_cpu_can_be_told_to_compute_as_a_lesser_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_levels, "cpu_flags", lambda: frozenset(AVX512 | {"avx512_vnni", "avx512_bf16"}))
    monkeypatch.setenv(ISA_VARIABLE, "avx512")
    assert [level.name for level in levels()] == ["avx512", "avx2"]
    monkeypatch.setenv(ISA_VARIABLE, "avx1024")
    with pytest.raises(
        LoadError,
        match="NOVAINFER_ISA must be one of amx, avx512-bf16, avx512-vnni, avx512, avx2-vnni, avx2, not 'avx1024'",
    ):
        levels()


def test_a_compiler_older_than_the_cpu_builds_for_lesser_instruction_sets(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = tmp_path / "old-g++"
    old.write_text(
        '#!/bin/sh\ncase "$*" in *-mavx512bf16*) echo "error: unrecognized option" >&2; exit 1 ;; esac\nexec g++ "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setattr(cpu_levels, "cpu_flags", lambda: frozenset(AVX512 | {"avx512_vnni", "avx512_bf16"}))
    # Only what the compiler takes matters here, not what this CPU has.
    assert build.best_library(lambda path: path).name.startswith("avx512-")
    assert "native kernels for avx512-bf16 cannot be used" in caplog.text
    assert "those for avx512-vnni are used instead" in caplog.text


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has built nothing yet and has no compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "prebuilt_dir", lambda: tmp_path / "none")
    take_the_compiler(monkeypatch)
    native.library.cache_clear()


@pytest.fixture(autouse=True)
def _forget_after() -> object:
    yield
    native.library.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_torch_computes_where_the_library_cannot_be_built(caplog: pytest.LogCaptureFixture) -> None:
    registry = build_registry(CPU, native="1")
    assert "native" not in {kernel.name for kernel in registry.implementations("linear")}
    assert [record.getMessage() for record in caplog.records if "native" in record.getMessage()] == [
        "native CPU kernels cannot be used (native kernels need a C++ compiler; g++ was not found); "
        "torch computes instead"
    ]


@pytest.mark.usefixtures("no_compiler")
def test_what_is_required_and_cannot_be_built_ends_the_load() -> None:
    with pytest.raises(LoadError, match=r"required.*g\+\+ was not found"):
        build_registry(CPU, native="require")


@pytest.mark.usefixtures("no_compiler")
def test_switched_off_nothing_is_built() -> None:
    registry = build_registry(CPU, native="0")
    assert "native" not in {kernel.name for kernel in registry.implementations("attention")}
    assert not build.cache_dir().exists()


def test_where_it_can_be_built_it_stands_first() -> None:
    if not levels():
        pytest.skip("this CPU lacks AVX2")
    registry = build_registry(CPU, native="require")
    for operation in ("linear", "attention", "ops"):
        first = registry.implementations(operation)[0]
        assert first.name == "native"
        assert first.row_invariant


PROGRAM = """
import os, threading, torch
from novainfer.kernels.cpu.linear import NativeLinear

torch.set_num_threads(2)
linear = NativeLinear.pack(torch.randn(4096, 512), None)
x = torch.randn(64, 512)
expected = linear(x)

def same():
    assert all(torch.equal(linear(x), expected) for _ in range(50))

threads = [threading.Thread(target=same) for _ in range(4)]  # one at a time has helpers, the others go alone
[thread.start() for thread in threads]
[thread.join() for thread in threads]
child = os.fork()  # has no helpers of its parent's
if child == 0:
    same()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
same()
print(sum(1 for task in os.listdir("/proc/self/task") if "novainfer" in open(f"/proc/self/task/{task}/comm").read()))
"""


@pytest.mark.slow
def test_callers_may_share_the_pool_and_fork() -> None:
    if not levels():
        pytest.skip("this CPU lacks AVX2")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"  # one helper for two threads, however many callers there were
