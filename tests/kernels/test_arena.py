"""Several processes, one copy of the weights: filled once, mapped by the others, and never half a copy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import GRID, Shape, save_checkpoint
from driver import CPU, Driver, make_runner

from novainfer.bench.make_checkpoint import make_checkpoint
from novainfer.fsm.messages.mode import PLAIN, Mode
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.weights.arena import Arena
from novainfer.kernels.weights.loader import WeightReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no memfd")

NATIVE = any(kernel.name == "native" for kernel in build_registry(CPU).implementations("linear"))
PROMPT = [(7 * i + 3) % 101 for i in range(21)]


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("novainfer-test", os.MFD_ALLOW_SEALING)
    yield made
    os.close(made)


def filled(fd: int, fingerprint: str = "a") -> dict[str, torch.Tensor]:
    arena = Arena.open(fd, fingerprint, 1 << 20)
    assert arena is not None
    assert not arena.is_filled
    tensors = {
        "x": torch.randn(33, 5),
        "y": torch.arange(9, dtype=torch.bfloat16),
        "z": torch.ones(3, dtype=torch.uint8),
    }
    for name, tensor in tensors.items():
        assert torch.equal(arena.put(name, tensor), tensor)
    arena.finish()
    return tensors


def test_its_table_holds_every_expert_of_a_large_model(fd: int) -> None:
    """4 MB of it, as of sixty thousand tensors."""
    arena = Arena.open(fd, "a", 1 << 20)
    assert arena is not None
    for number in range(100):
        arena.put(f"{number:040000}", torch.tensor([number]))
    arena.finish()
    found = Arena.open(fd, "a", 0)
    assert found is not None
    last = found.get(f"{99:040000}")
    assert last is not None
    assert last.tolist() == [99]


def test_what_was_put_in_is_found_by_who_opens_it_next(fd: int) -> None:
    tensors = filled(fd)
    arena = Arena.open(fd, "a", 0)
    assert arena is not None
    assert arena.is_filled
    for name, tensor in tensors.items():
        found = arena.get(name)
        assert found is not None
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
    assert arena.get("w") is None


def test_tensors_outlive_the_arena_they_are_of(fd: int) -> None:
    tensors = filled(fd)
    arena = Arena.open(fd, "a", 0)
    assert arena is not None
    found = arena.get("x")
    del arena
    assert torch.equal(found, tensors["x"])  # type: ignore[arg-type]


def test_other_weights_are_not_taken_for_these(fd: int) -> None:
    filled(fd)
    assert Arena.open(fd, "b", 1 << 20) is None
    assert Arena.open(fd, "a", 1 << 20) is not None


def test_nobody_can_change_a_finished_arena(fd: int) -> None:
    filled(fd)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"!", 17 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)


def run(program: str, *fds: int, arguments: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, fds), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds,
    )  # fmt: skip


OPENS = """
import sys, torch
from novainfer.kernels.weights.arena import Arena
arena = Arena.open(int(sys.argv[1]), "a", 1 << 20)
print("none" if arena is None else "filled" if arena.is_filled else "to be filled", flush=True)
if arena is not None and not arena.is_filled:
    arena.put("x", torch.full((250_000,), 7.0))
    print("half way", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_an_unfinished_arena_is_left_alone_while_its_process_lives_and_filled_anew_when_it_is_dead(fd: int) -> None:
    first = run(OPENS, fd)
    assert first.stdout is not None
    assert [first.stdout.readline().strip() for _ in range(2)] == ["to be filled", "half way"]
    second = run(OPENS, fd)
    assert second.communicate(timeout=60)[0].split("\n")[0] == "none"
    assert Arena.open(fd, "a", 1 << 20) is None
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert os.fstat(fd).st_blocks * 512 > 1_000_000
    tensors = filled(fd)
    assert os.fstat(fd).st_blocks * 512 < 100_000  # what the dead one had put there is gone
    third = run(OPENS, fd)
    assert third.communicate(timeout=60)[0].strip() == "filled"
    arena = Arena.open(fd, "a", 0)
    assert arena is not None
    assert torch.equal(arena.get("x"), tensors["x"])  # type: ignore[arg-type]


def test_one_that_is_given_up_can_be_filled_by_the_next(fd: int) -> None:
    arena = Arena.open(fd, "a", 1 << 20)
    assert arena is not None
    assert Arena.open(fd, "a", 1 << 20) is None  # the same process, another model
    arena.abandon()
    filled(fd)


def test_what_is_no_arena_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "letters"
    path.write_bytes(b"Dear Ada, " * 10)
    with path.open("r+b") as file:
        assert Arena.open(file.fileno(), "a", 1 << 20) is None
    assert path.read_bytes() == b"Dear Ada, " * 10
    reader, writer = os.pipe()
    assert Arena.open(reader, "a", 1 << 20) is None
    os.close(reader)
    os.close(writer)
    assert Arena.open(writer, "a", 1 << 20) is None


def test_an_arena_that_is_full_says_so(fd: int) -> None:
    arena = Arena.open(fd, "a", 1000)
    assert arena is not None
    with pytest.raises(MemoryError, match="too small"):
        arena.put("x", torch.zeros(1 << 20))


# ---- models ---------------------------------------------------------------------------------------------------------


def logits_of(runner: ModelRunner) -> torch.Tensor:
    sampler = runner._sampler
    driver = Driver(runner, capture=True)
    driver.generate([driver.add(0, PROMPT)], 3)
    runner._sampler = sampler
    return torch.stack(driver.capturing.logits)


@pytest.mark.parametrize("shape", GRID, ids=lambda shape: shape.name)
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_computes_the_same_bits_from_shared_weights(
    shape: Shape, backend: str, dtype: str, tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(shape, tmp_path)
    own = make_runner(tmp_path, backend, dtype=dtype)
    packed = make_runner(tmp_path, backend, dtype=dtype, weights_fd=fd)
    progress: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(WeightReader, "fused", None)  # nothing is read
        mapped = make_runner(
            tmp_path, backend, dtype=dtype, weights_fd=fd, on_progress=lambda *done: progress.append(done)
        )
    assert [r.info.weights for r in (own, packed, mapped)] == ["own", "packed", "mapped"]
    assert packed.info.weight_bytes == mapped.info.weight_bytes == own.info.weight_bytes
    assert progress
    assert progress[-1][0] == progress[-1][1]
    expected = logits_of(own)
    assert torch.equal(logits_of(packed), expected)
    packed.close()
    assert torch.equal(logits_of(mapped), expected)


def test_weights_in_a_layout_of_somebody_elses_are_not_shared(tmp_path: Path, fd: int) -> None:
    runner = make_runner(save_checkpoint(GRID[0], tmp_path), "mkldnn", weights_fd=fd)
    assert runner.info.weights == "own"
    assert os.fstat(fd).st_size == 0


@pytest.mark.parametrize("change", ["dtype", "file", "kernels"])
def test_weights_of_other_files_dtypes_or_kernels_are_not_taken(change: str, tmp_path: Path, fd: int) -> None:
    save_checkpoint(GRID[0], tmp_path)
    make_runner(tmp_path, "torch", weights_fd=fd)
    if change == "dtype":
        runner = make_runner(tmp_path, "torch", weights_fd=fd, dtype="bfloat16")
    elif change == "kernels":
        if not NATIVE:
            pytest.skip("there are no native kernels here")
        runner = make_runner(tmp_path, "native", weights_fd=fd)
    else:
        save_checkpoint(GRID[0], tmp_path, seed=1)
        runner = make_runner(tmp_path, "torch", weights_fd=fd)
    assert runner.info.weights == "own"
    assert torch.equal(
        logits_of(runner), logits_of(make_runner(tmp_path, *([runner.info.kernels["linear"]]), dtype=runner.info.dtype))
    )


@pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")
def test_shared_weights_have_no_int8_and_are_there_again_at_once(tmp_path: Path, fd: int) -> None:
    save_checkpoint(GRID[0], tmp_path)
    runner = make_runner(tmp_path, "native", weights_fd=fd)
    assert runner.info.modes == (Mode(), Mode(PLAIN))
    expected = logits_of(runner)
    runner.switch(Mode(PLAIN))
    assert not torch.equal(logits_of(runner), expected)
    (tmp_path / "model.safetensors").unlink()
    runner.switch(Mode())
    assert torch.equal(logits_of(runner), expected)


def test_a_load_that_fails_leaves_the_file_to_the_next(
    tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(GRID[0], tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "finish", lambda self: (_ for _ in ()).throw(RuntimeError("planted")))
        with pytest.raises(RuntimeError, match="planted"):
            make_runner(tmp_path, "torch", weights_fd=fd)
    assert make_runner(tmp_path, "torch", weights_fd=fd).info.weights == "packed"


SERVES = """
import json, sys
from pathlib import Path
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.fsm.messages.step import StepPlan

def read(name):
    lines = Path(f"/proc/self/{name}").read_text().splitlines()
    return {line.split()[0].rstrip(":"): int(line.split()[1]) / 1024 for line in lines if line.endswith(" kB")}

fd = int(sys.argv[1])
runner = ModelRunner.load(
    Path(sys.argv[2]), max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128,
    weights_fd=fd if fd >= 0 else None,
)
runner.fit(mode="fixed", num_blocks=8)
runner.warm()
tokens = runner.execute(StepPlan([0], [8], [8], list(range(8)), [0], [0], [0], [0])).token_ids
info = runner.info
print(json.dumps({"weights": info.weights, "bytes": info.weight_bytes / 2**20, "tokens": tokens}), flush=True)
for line in sys.stdin:
    print(json.dumps(read("smaps_rollup")), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="torch's linears have a layout that cannot be shared")
def test_two_processes_hold_one_copy(tmp_path: Path, fd: int) -> None:
    """Shares of memory (PSS) with one process, with two that share, and with two that do not; MiB."""
    make_checkpoint("47m", tmp_path)

    def start(number: int) -> tuple[subprocess.Popen[str], dict[str, object]]:
        passed = (number,) if number >= 0 else ()
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVES, str(number), str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=passed,
        )  # fmt: skip
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())

    def memory(process: subprocess.Popen[str]) -> dict[str, float]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        found: dict[str, float] = json.loads(process.stdout.readline())
        return found

    started: list[tuple[subprocess.Popen[str], dict[str, object]]] = []
    try:
        started.extend(start(number) for number in (fd, fd, -1))
        (first, packed), (second, mapped), (third, own) = started
        assert (packed["weights"], mapped["weights"], own["weights"]) == ("packed", "mapped", "own")
        assert packed["tokens"] == mapped["tokens"] == own["tokens"]
        weights = float(own["bytes"])  # type: ignore[arg-type]
        assert weights > 85
        shares = [memory(process) for process in (first, second, third)]
        # Both have the weights in their pages; each counts for half of them.
        for share in shares[:2]:
            assert share["Pss_Shmem"] == pytest.approx(weights / 2, abs=4)
            assert share["Pss_Anon"] < shares[2]["Pss_Anon"] - 0.9 * weights
        assert shares[2]["Pss_Shmem"] < 1
        first.communicate(timeout=60)
        assert memory(second)["Pss_Shmem"] == pytest.approx(weights, abs=4)
    finally:
        for process, _ in started:
            process.communicate(timeout=60)
