"""Real allocators saying no, at every place a step allocates: an error that is told as one, and then right steps."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import Shape, save_checkpoint

from novainfer.kernels.cpu import native
from novainfer.kernels.cpu.memory import huge_zeros
from novainfer.kernels.errors import KernelUnavailableError
from novainfer.kernels.memory import free_bytes, is_out_of_memory, lazy_zeros

# Wide enough for a step of 384 tokens to need megabytes in most of its allocations.
SHAPE = Shape("wide", 8, 2, 64, 512, 2000, intermediate_size=1024)
# Large allocations are mapped, and unmapped when they are freed: none is served from what glibc's heap has kept.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}

PROGRAM = """
import os
os.environ["OMP_WAIT_POLICY"] = "passive"
import faulthandler, resource, sys
from pathlib import Path
import torch
from novainfer.fsm.messages.step import SeqParams, StepPlan
from novainfer.kernels.heap import release_freed_pages
from novainfer.kernels.memory import is_out_of_memory
from novainfer.kernels.runtime.runner import ModelRunner

faulthandler.enable()
torch.set_num_threads(2)
runner = ModelRunner.load(
    Path(sys.argv[1]), max_num_seqs=4, max_num_batched_tokens=384, max_model_len=256, native=sys.argv[2],
    dtype=sys.argv[3],
)
runner.fit(mode="fixed", num_blocks=64)
runner.warm()
tables = [(seq, i, seq * 16 + i) for seq in range(3) for i in range(16)]
batch = StepPlan(
    [0, 1, 2], [128, 200, 56], [128, 200, 56], [(7 * i) % 2000 for i in range(384)],
    *map(list, zip(*tables)), [0, 1, 2],
    [SeqParams(slot=1, temperature=1.0, seed=3), SeqParams(slot=2, logprobs=3)],
)

def size():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

expected = runner.execute(batch)
ends = {}
slack = 0
while True:
    release_freed_pages()
    resource.setrlimit(resource.RLIMIT_AS, (size() + slack, resource.RLIM_INFINITY))
    try:
        end = "done" if runner.execute(batch) == expected else "WRONG"
    except Exception as error:
        end = f"{type(error).__name__} {is_out_of_memory(error)} {str(error)[:60]!r}"
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ends[end] = ends.get(end, 0) + 1
    assert runner.execute(batch) == expected, "a step after it was wrong"
    if end == "done" and ends["done"] == 3:
        break
    slack += 64 << 10
for end, count in ends.items():
    print(count, end)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits its address space")
@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_runs_out_of_memory_anywhere_says_so_and_the_next_one_is_right(
    tmp_path: Path, kernels: str, dtype: str
) -> None:
    save_checkpoint(SHAPE, tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), kernels, dtype],
        capture_output=True, text=True, timeout=300, check=False, env=os.environ | MALLOC,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ends = {line.split(" ", 1)[1]: int(line.split(" ", 1)[0]) for line in done.stdout.splitlines()}
    assert ends.pop("done") == 3
    assert sum(ends.values()) > 5
    assert all(" True " in end for end in ends), ends
    if kernels == "1" and _native_is_here():
        assert any("nova_forward ran out of memory" in end for end in ends), ends


def _native_is_here() -> bool:
    try:
        native.library()
    except KernelUnavailableError:
        return False
    return True


def test_every_allocator_is_known_by_its_error() -> None:
    absurd = 1 << 60
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(absurd, dtype=torch.uint8)
    assert is_out_of_memory(torchs.value)
    with pytest.raises(MemoryError) as numpys:
        np.empty(absurd, dtype=np.uint8)
    assert is_out_of_memory(numpys.value)
    with pytest.raises(MemoryError) as maps:
        lazy_zeros((absurd,), torch.uint8, torch.device("cpu"))
    assert is_out_of_memory(maps.value)
    with pytest.raises(MemoryError, match="cannot be mapped") as huge:
        huge_zeros(absurd)
    assert is_out_of_memory(huge.value)
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasSgemm(handle)`"))
    assert is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    )
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert is_out_of_memory(RuntimeError("could not execute a primitive"))
    for other in (
        RuntimeError("CUDA error: an illegal memory access"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`"),
        ValueError("cannot allocate memory"),
        OSError(),
        OSError(errno.EIO, "Input/output error"),
    ):
        assert not is_out_of_memory(other)


def test_what_torch_keeps_for_later_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no tensor uses goes back to the driver before the driver is asked."""
    free, kept = [100], [900]

    def empty_cache() -> None:
        free[0], kept[0] = free[0] + kept[0], 0

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 4000))
    assert free_bytes(torch.device("cuda", 0)) == 1000


def test_what_the_library_cannot_throw_comes_as_a_number() -> None:
    with pytest.raises(MemoryError, match="strlen ran out of memory"):
        native._check(1, _Function(), ())
    with pytest.raises(IndexError, match="strlen was given a number out of range"):
        native._check(3, _Function(), ())
    with pytest.raises(RuntimeError, match="strlen failed"):
        native._check(2, _Function(), ())
    native._check(0, _Function(), ())


class _Function:
    __name__ = "strlen"
