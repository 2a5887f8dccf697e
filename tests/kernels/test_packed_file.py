"""Packed weights kept on disk: the next start reads them and packs nothing; what is not theirs is never taken."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GRID, Shape, save_checkpoint
from driver import CPU, Driver, make_runner
from quantised_checkpoints import save_awq
from safetensors import safe_open

from novainfer.kernels.errors import LoadError
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.weights.loader import WeightReader
from novainfer.kernels.weights.packed import PackedFile

NATIVE = any(kernel.name == "native" for kernel in build_registry(CPU).implementations("linear"))
BACKEND = "native" if NATIVE else "torch"
SHAPE = Shape("in-groups", 4, 2, 32, 128, 257, intermediate_size=256)
PROMPT = [(7 * i + 3) % 101 for i in range(21)]


def logits_of(runner: ModelRunner) -> torch.Tensor:
    driver = Driver(runner, capture=True)
    driver.generate([driver.add(0, PROMPT)], 3)
    return torch.stack(driver.capturing.logits)


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function from which on a checkpoint cannot be read."""
    return lambda: monkeypatch.setattr(WeightReader, "fused", None)


@pytest.mark.parametrize("shape", [GRID[1], GRID[6]], ids=lambda shape: shape.name)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_next_start_computes_the_same_bits_and_reads_no_checkpoint(
    shape: Shape, quantization: str | None, tmp_path: Path, nothing_is_read: Callable[[], None]
) -> None:
    folder, cache = save_checkpoint(shape, tmp_path / "model"), tmp_path / "a" / "cache"
    options: dict[str, Any] = {"weight_cache_dir": cache}
    options |= {} if quantization is None else {"quantization": quantization}
    first = make_runner(folder, BACKEND, **options)
    expected = logits_of(first)
    (file,) = cache.iterdir()
    before = file.stat().st_mtime_ns
    nothing_is_read()
    progress: list[tuple[int, int]] = []
    second = make_runner(folder, BACKEND, on_progress=lambda *done: progress.append(done), **options)
    assert torch.equal(logits_of(second), expected)
    assert second.info.weight_bytes == first.info.weight_bytes
    assert second.info.weights == "own"
    assert progress[-1][0] == progress[-1][1]
    assert (file.stat().st_mtime_ns, list(cache.iterdir())) == (before, [file])


def test_what_others_have_quantised_is_kept_too(tmp_path: Path, nothing_is_read: Callable[[], None]) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    save_awq(save_checkpoint(SHAPE, tmp_path / "source"), folder)
    expected = logits_of(make_runner_of_codes(folder, cache))
    nothing_is_read()
    assert torch.equal(logits_of(make_runner_of_codes(folder, cache)), expected)


def make_runner_of_codes(folder: Path, cache: Path) -> ModelRunner:
    runner = ModelRunner.load(
        folder, max_num_seqs=6, max_num_batched_tokens=256, max_model_len=None, weight_cache_dir=cache
    )
    runner.fit(mode="fixed", num_blocks=64)
    runner.warm()
    return runner


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no memfd")
def test_processes_that_share_their_weights_put_them_there_from_the_file(
    tmp_path: Path, nothing_is_read: Callable[[], None]
) -> None:
    folder, cache = save_checkpoint(GRID[0], tmp_path / "model"), tmp_path / "cache"
    fd = os.memfd_create("novainfer-test", os.MFD_ALLOW_SEALING)
    try:
        expected = logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache))
        nothing_is_read()
        runners = [make_runner(folder, BACKEND, weight_cache_dir=cache, weights_fd=fd) for _ in range(2)]
        assert [runner.info.weights for runner in runners] == ["packed", "mapped"]
        assert all(torch.equal(logits_of(runner), expected) for runner in runners)
    finally:
        os.close(fd)


def test_what_is_packed_into_shared_memory_is_kept_from_there(
    tmp_path: Path, nothing_is_read: Callable[[], None]
) -> None:
    folder, cache = save_checkpoint(GRID[0], tmp_path / "model"), tmp_path / "cache"
    fd = os.memfd_create("novainfer-test", os.MFD_ALLOW_SEALING)
    try:
        expected = logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache, weights_fd=fd))
    finally:
        os.close(fd)
    nothing_is_read()
    assert torch.equal(logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache)), expected)


@pytest.mark.parametrize("change", ["checkpoint", "dtype", "quantization", "kernels"])
def test_a_file_of_other_weights_is_not_taken(change: str, tmp_path: Path) -> None:
    folder, cache = save_checkpoint(GRID[0], tmp_path / "model"), tmp_path / "cache"
    make_runner(folder, "torch", weight_cache_dir=cache)
    backend, options = "torch", {}
    if change == "checkpoint":
        save_checkpoint(GRID[0], folder, seed=1)
    elif change == "dtype":
        options = {"dtype": "bfloat16"}
    elif change == "quantization":
        options = {"quantization": "int8"}
    elif NATIVE:
        backend = "native"
    else:
        pytest.skip("there are no native kernels here")
    found = logits_of(make_runner(folder, backend, weight_cache_dir=cache, **options))
    assert torch.equal(found, logits_of(make_runner(folder, backend, **options)))
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", ["empty", "header", "cut", "letters", "other", "places"])
def test_a_damaged_file_is_said_and_made_anew(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, cache = save_checkpoint(GRID[0], tmp_path / "model"), tmp_path / "cache"
    expected = logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache))
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    fields = json.loads(whole[8 : 8 + length])
    if damage == "other":
        fields["__metadata__"]["fingerprint"] = "another"
    elif damage == "places":
        name = next(name for name in fields if name.startswith("0.qkv"))
        fields[name]["data_offsets"][1] += 4
    encoded = json.dumps(fields).encode().ljust(length)
    file.write_bytes(
        {
            "empty": b"",
            "header": whole[: length // 2],
            "cut": whole[:-1],
            "letters": b"Dear Ada, " * 1000,
        }.get(damage, whole[:8] + encoded + whole[8 + length :])
    )
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache)), expected)
    assert f"{file} is not read: " in caplog.text
    assert "packed anew" in caplog.text
    assert file.read_bytes() == whole


def test_a_file_that_shrinks_while_it_is_read_ends_the_load(tmp_path: Path) -> None:
    PackedFile.write(tmp_path, "f" * 64, {"x": torch.arange(100_000)[:0].float(), "y": torch.ones(5000)})
    opened = PackedFile.open(tmp_path, "f" * 64)
    assert opened is not None
    os.truncate(opened.path, 6000)
    with pytest.raises(LoadError, match="has become shorter while it was read: delete it"):
        opened.get("y")
    opened.close()


def test_any_tensors_come_back_and_the_file_is_safetensors(tmp_path: Path) -> None:
    tensors = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "numbers": torch.randn(3, 1111),
        "none": torch.empty(0, 4),
        "half": torch.randn(7, 2).bfloat16(),
        "strided": torch.arange(12, dtype=torch.int8).view(3, 4).T,
        "one": torch.tensor(2.5),
    }
    PackedFile.write(tmp_path, "g" * 64, tensors)
    opened = PackedFile.open(tmp_path, "g" * 64)
    assert opened is not None
    with safe_open(opened.path, "pt") as standard:
        for name, tensor in tensors.items():
            found = opened.get(name)
            assert found is not None
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found, tensor)
            assert torch.equal(standard.get_tensor(name), tensor)
    assert opened.get("gap") is None
    opened.close()
    assert [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]


def test_no_room_costs_the_file_and_not_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = save_checkpoint(GRID[0], tmp_path / "model"), tmp_path / "cache"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache))
    assert "No space left on device" in caplog.text
    assert list(cache.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    folder = save_checkpoint(GRID[0], tmp_path / "model")
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match=r"weight_cache_dir .*file/cache is no folder, and cannot be made: Not a dir"):
        make_runner(folder, BACKEND, weight_cache_dir=tmp_path / "file" / "cache")
