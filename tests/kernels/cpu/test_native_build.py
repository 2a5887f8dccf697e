"""The library's cache, and what happens where it cannot be built."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from novainfer.kernels.choice import build_registry
from novainfer.kernels.cpu import build, native
from novainfer.kernels.errors import KernelUnavailableError, LoadError

SOURCE = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
CPU = torch.device("cpu")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library's sources and an empty cache in the place of the real ones."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    (folder / "other.cpp").write_text("int other;\n")
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(build, "SOURCE_DIR", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def answer(path: Path) -> int:
    result: int = ctypes.CDLL(str(path)).answer()
    return result


def test_a_library_is_built_once_and_again_when_a_source_changes(sources: Path) -> None:
    first = build.build_library()
    assert answer(first) == 42
    written = first.stat().st_mtime_ns
    assert build.build_library() == first
    assert first.stat().st_mtime_ns == written
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    second = build.build_library()
    assert second != first
    assert answer(second) == 43


def test_other_instruction_sets_are_other_libraries(sources: Path) -> None:
    assert build.build_library(isa=("-mavx2",)) != build.build_library(isa=())


def test_builders_may_race(sources: Path) -> None:
    built: list[Path] = []
    threads = [threading.Thread(target=lambda: built.append(build.build_library())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 4
    assert len(set(built)) == 1
    assert answer(built[0]) == 42
    assert os.listdir(build.cache_dir()) == [built[0].name]  # nothing half made is left


def test_a_compiler_error_is_one_sentence_and_leaves_nothing(sources: Path) -> None:
    (sources / "other.cpp").write_text("this is not C++\n")
    with pytest.raises(KernelUnavailableError, match=r"compiler failed: .*other\.cpp") as caught:
        build.build_library()
    assert "\n" not in str(caught.value)
    assert os.listdir(build.cache_dir()) == []


def test_a_cache_that_cannot_be_written_is_one_sentence(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(KernelUnavailableError, match="cannot hold the native library"):
        build.build_library()


def test_without_a_compiler_the_reason_names_it(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelUnavailableError, match=r"g\+\+ was not found"):
        build.build_library()


def test_without_avx2_the_reason_names_it(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"sse2"}))
    with pytest.raises(KernelUnavailableError, match="AVX2"):
        build.build_library()


AVX512 = {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.mark.parametrize(
    ("flags", "best", "levels"),
    [
        (AVX512 | {"avx512_bf16"}, "-mavx512bf16", 3),
        (AVX512, "-mavx512f", 2),
        ({"avx2", "fma"}, "-mavx2", 1),
    ],
)
def test_the_best_instruction_set_of_the_cpu_is_taken(flags: set[str], best: str, levels: int) -> None:
    found = build.isa_flags(frozenset(flags))
    assert best in found[0]
    assert len(found) == levels


def test_without_fused_multiply_and_add_there_is_none() -> None:
    assert build.isa_flags(frozenset({"avx2"})) == []


def test_a_compiler_older_than_the_cpu_builds_for_lesser_instruction_sets(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old-g++"
    old.write_text(
        '#!/bin/sh\ncase "$*" in *-mavx512bf16*) echo "error: unrecognized option" >&2; exit 1 ;; esac\nexec g++ "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(AVX512 | {"avx512_bf16"}))
    # Only what the compiler takes matters here, not what this CPU has.
    assert build.build_library(str(old)) == build.build_library(str(old), isa=build.ISA_LEVELS[1][1])


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has built nothing yet and has no compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
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
    if not build.isa_flags(build.cpu_flags()):
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
    if not build.isa_flags(build.cpu_flags()):
        pytest.skip("this CPU lacks AVX2")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"  # one helper for two threads, however many callers there were
