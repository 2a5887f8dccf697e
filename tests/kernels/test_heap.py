"""Which blocks the C library's heap maps apart while a model is loaded, and once it serves."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from heap_probe import is_mapped_apart

from novainfer.actors.device.device import ModelDevice
from novainfer.kernels import heap
from tests.actors.devices import model

FOLDER = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33, which tells of its heap"
)

# Each line: whether a block of 24 MiB is mapped apart, and once one of 40.
PROGRAM = """
from novainfer.kernels import heap
from heap_probe import is_mapped_apart

print(is_mapped_apart())
heap.keep_little()
print(is_mapped_apart())
heap.keep_for_steps()
print(is_mapped_apart())
print(is_mapped_apart(mib=40))
heap.keep_little()
print(is_mapped_apart())
"""


def mapped_apart(**environment: str) -> list[int]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=FOLDER, env=env | environment, check=True, capture_output=True, text=True
    )
    return [int(line) for line in found.stdout.split()]


def test_large_blocks_are_mapped_apart_while_loading_and_kept_for_steps() -> None:
    assert mapped_apart() == [0, 1, 0, 1, 1]


@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_MMAP_THRESHOLD_": "33554432"},
        {"MALLOC_TRIM_THRESHOLD_": "67108864", "MALLOC_MMAP_THRESHOLD_": "33554432"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432"},
    ],
)
def test_what_the_environment_says_holds(environment: dict[str, str]) -> None:
    assert mapped_apart(**environment) == [0, 0, 0, 1, 0]


def test_a_device_keeps_little_while_it_loads_and_what_steps_need_once_it_is_warm() -> None:
    found: list[int] = []
    settings = model("demo", native="1").settings
    device = ModelDevice(settings, on_progress=lambda done, of: found.append(is_mapped_apart()))
    for _ in range(2):  # a worker's precision may change
        found.clear()
        device.load()
        assert found
        assert all(found)
        device.fit(128)
        device.warm(measures=False)
        assert is_mapped_apart() == 0
    device.close()


def test_where_the_c_library_is_another_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class Musl:  # it has neither of them
        pass

    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: Musl())
    heap.keep_little()
    heap.keep_for_steps()
    heap.release_freed_pages()
