"""Packed weights kept on disk: the next start reads them and packs nothing; what is not theirs is never taken."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GRID, Shape, save_checkpoint
from driver import CPU, Driver, make_runner
from quantised_checkpoints import save_awq, save_gptq
from safetensors import safe_open

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.decoder import Decoder
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.weights import sharing
from novainfer.kernels.weights.loader import WeightReader, load_decoder
from novainfer.kernels.weights.packed import HASHED_BYTES_MAX, DamagedFileError, PackedFile, checksum

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


def test_the_same_codes_read_in_another_way_are_other_weights(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    save_gptq(save_checkpoint(SHAPE, tmp_path / "source"), folder, sym=False)
    make_runner_of_codes(folder, cache)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"  # whose zero points are not one less
    (folder / "config.json").write_text(json.dumps(config))
    found = logits_of(make_runner_of_codes(folder, cache))
    assert torch.equal(found, logits_of(make_runner_of_codes(folder, tmp_path / "other")))
    assert len(list(cache.iterdir())) == 2


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


def with_header(whole: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A file whose header is a changed one of as many bytes."""
    length = int.from_bytes(whole[:8], "little")
    fields = json.loads(whole[8 : 8 + length])
    change(fields)
    encoded = json.dumps(fields).encode()
    assert len(encoded) <= length
    return whole[:8] + encoded.ljust(length) + whole[8 + length :]


def data_of(whole: bytes) -> int:
    """Where the tensors begin."""
    return 8 + int.from_bytes(whole[:8], "little")


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda whole: b"", "cut short"),
    "header": (lambda whole: whole[: data_of(whole) // 2], "cut short"),
    "cut": (lambda whole: whole[:-1], "does not lie in it"),
    "letters": (lambda whole: b"Dear Ada, " * 1000, "cut short"),
    "nested": (lambda whole: whole[:8] + b"[" * (data_of(whole) - 8) + whole[data_of(whole) :], "recursion"),
    "other": (
        lambda whole: with_header(whole, lambda fields: fields["__metadata__"].update(fingerprint="another")),
        "of other weights",
    ),
    "earlier": (
        lambda whole: with_header(whole, lambda fields: fields["__metadata__"].pop("header")),
        "of an earlier version, without checksums",
    ),
    "places": (
        lambda whole: with_header(whole, lambda fields: fields["0.qkv.0"]["data_offsets"].__setitem__(1, 4)),
        "its header is not what was written",
    ),
    # a shape of its own, which agrees with itself
    "shape": (
        lambda whole: with_header(
            whole, lambda fields: fields["model.norm.weight"].update(shape=[1], data_offsets=[0, 4])
        ),
        "its header is not what was written",
    ),
    "lost": (
        lambda whole: with_header(whole, lambda fields: fields.pop("model.norm.weight")),
        "its header is not what was written",
    ),
    "zeros": (lambda whole: whole[: data_of(whole)].ljust(len(whole), b"\0"), "is not what was written"),
    "flipped": (
        lambda whole: whole[: data_of(whole)] + bytes([whole[data_of(whole)] ^ 4]) + whole[data_of(whole) + 1 :],
        "is not what was written",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_said_and_made_anew(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, cache = save_checkpoint(GRID[0], tmp_path / "model"), tmp_path / "cache"
    expected = logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache))
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    change, reason = DAMAGES[damage]
    file.write_bytes(change(whole))
    progress: list[tuple[int, int]] = []
    with caplog.at_level(logging.WARNING):
        runner = make_runner(folder, BACKEND, weight_cache_dir=cache, on_progress=lambda *done: progress.append(done))
    assert torch.equal(logits_of(runner), expected)
    assert caplog.text.count(f"{file} is not read: ") == 1
    assert reason in caplog.text
    assert "packed anew" in caplog.text
    assert file.read_bytes() == whole
    assert progress[-1][0] == progress[-1][1]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no memfd")
def test_shared_memory_is_filled_anew_when_the_file_proves_damaged_half_way(tmp_path: Path) -> None:
    folder, cache = save_checkpoint(GRID[0], tmp_path / "model"), tmp_path / "cache"
    expected = logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache))
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fd = os.memfd_create("novainfer-test", os.MFD_ALLOW_SEALING)
    try:
        runners = [make_runner(folder, BACKEND, weight_cache_dir=cache, weights_fd=fd) for _ in range(2)]
        assert [runner.info.weights for runner in runners] == ["packed", "mapped"]
        assert all(torch.equal(logits_of(runner), expected) for runner in runners)
    finally:
        os.close(fd)
    assert file.read_bytes() == whole


def test_what_proves_damaged_at_the_end_is_dropped_before_all_is_packed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = save_checkpoint(GRID[0], tmp_path / "model"), tmp_path / "cache"
    expected = logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache))
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    norms: list[weakref.ref[torch.Tensor]] = []  # one of each decoder's tensors

    def load(*args: Any, **kwargs: Any) -> tuple[Decoder, int]:
        assert [norm() for norm in norms] in ([], [None])
        loaded = load_decoder(*args, **kwargs)
        norms.append(weakref.ref(loaded[0].final_norm))
        return loaded

    monkeypatch.setattr(sharing, "load_decoder", load)
    assert torch.equal(logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache)), expected)
    assert len(norms) == 2
    assert file.read_bytes() == whole


def test_a_file_without_what_is_needed_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, cache = save_checkpoint(GRID[0], tmp_path / "model"), tmp_path / "cache"
    expected = logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache))
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    fingerprint = json.loads(whole[8 : data_of(whole)])["__metadata__"]["fingerprint"]
    PackedFile.write(cache, fingerprint, {"model.norm.weight": torch.ones(3)})
    assert torch.equal(logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache)), expected)
    assert "is not read: the packed weights hold no " in caplog.text
    assert file.read_bytes() == whole


def test_a_file_that_shrinks_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    PackedFile.write(tmp_path, "f" * 64, {"x": torch.arange(100_000)[:0].float(), "y": torch.ones(5000)})
    opened = PackedFile.open(tmp_path, "f" * 64)
    assert opened is not None
    os.truncate(opened.path, 6000)
    with pytest.raises(DamagedFileError, match="it has become shorter while it was read"):
        opened.get("y")
    opened.close()


def test_a_disk_that_cannot_read_a_part_costs_the_file_and_not_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = save_checkpoint(GRID[0], tmp_path / "model"), tmp_path / "cache"
    expected = logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache))

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    assert torch.equal(logits_of(make_runner(folder, BACKEND, weight_cache_dir=cache)), expected)
    assert "Input/output error; the weights are packed anew" in caplog.text


@pytest.mark.parametrize("length", [0, 1, 7, HASHED_BYTES_MAX, HASHED_BYTES_MAX + 1, 8192, 100_003, 1 << 20])
def test_a_checksum_tells_a_bit_and_two_pages_that_have_changed_places(length: int) -> None:
    data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    expected = checksum(data)
    assert checksum(data.clone()) == expected
    assert checksum(torch.cat((data[:1], data))[1:]) == expected  # wherever it begins in memory
    for at in {0, length // 2, length - 1} if length else ():
        other = data.clone()
        other[at] ^= 1
        assert checksum(other) != expected
    if length >= 2 * 4096:
        assert checksum(torch.cat((data[4096:8192], data[:4096], data[8192:]))) != expected


@pytest.mark.parametrize("in_features", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_narrow_products_come_back_too(quantization: str, in_features: int, tmp_path: Path) -> None:
    shape = dataclasses.replace(GRID[0], name="narrow", intermediate_size=in_features)
    folder, cache = save_checkpoint(shape, tmp_path / "model"), tmp_path / "cache"
    options: dict[str, Any] = {"weight_cache_dir": cache, "quantization": quantization}
    expected = logits_of(make_runner(folder, BACKEND, **options))
    assert torch.equal(logits_of(make_runner(folder, BACKEND, **options)), expected)


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
