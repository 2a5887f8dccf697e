"""`kv_cache_dtype` and `attention_backend`: what is loaded then, what it computes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import CPU, CapturingSampler, Driver

from novainfer.kernels.errors import LoadError
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime.runner import ModelRunner

SHAPE = Shape("settings", 4, 2, 32, 96, 160)
PROMPT = [(7 * i + 3) % 127 for i in range(37)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp(SHAPE.name))


def has_native() -> bool:
    return any(kernel.name == "native" for kernel in build_registry(CPU).implementations("attention"))


def load(folder: Path, **options: Any) -> ModelRunner:
    runner = ModelRunner.load(folder, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, **options)
    runner.fit(mode="fixed", num_blocks=16)
    return runner


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Those of a prefill and some greedy steps: [num_tokens, vocab_size]."""
    driver = Driver(runner, capture=True)
    driver.generate([driver.add(0, PROMPT)], 6)
    assert isinstance(driver.capturing, CapturingSampler)
    return torch.stack(driver.capturing.logits)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("int8", 0.02), ("fp8", 0.08)])
def test_a_quantised_cache_takes_less_and_costs_little(folder: Path, kv_dtype: str, bound: float) -> None:
    exact, runner = load(folder), load(folder, kv_cache_dtype=kv_dtype)
    assert runner.info.kernels["attention"] == ("native" if has_native() and kv_dtype == "int8" else "torch")
    assert runner.info.kv_bytes_per_block == 2 * 2 * 16 * 2 * (32 + 4)
    assert runner.info.kv_bytes_per_block < 0.3 * exact.info.kv_bytes_per_block
    expected, got = logits_of(exact), logits_of(runner)
    assert 0 < (got - expected).abs().max() <= bound * expected.abs().max()
    for mode in runner.info.modes:
        runner.switch(mode)
        again = logits_of(runner) if mode.precision == "checkpoint" else got
        assert (again - got).abs().max() <= bound / 4 * got.abs().max()  # last bits decide what is rounded where


def test_torchs_own_attention_can_be_asked_for(folder: Path) -> None:
    runner = load(folder, attention_backend="sdpa")
    assert runner.info.kernels["attention"] == "torch"
    expected = logits_of(load(folder))
    assert (logits_of(runner) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_what_is_not_there_is_refused_with_what_is(folder: Path, backend: str) -> None:
    with pytest.raises(
        LoadError, match=rf"attention_backend must be one of 'auto', 'sdpa' on this machine's cpu, not '{backend}'"
    ):
        load(folder, attention_backend=backend)
    with pytest.raises(LoadError, match="attention_backend must be one of 'auto', 'triton', 'cudnn', 'sdpa', not 'x'"):
        load(folder, attention_backend="x")
    with pytest.raises(LoadError, match="kv_cache_dtype must be one of 'auto', 'int8', 'fp8', not 'int4'"):
        load(folder, kv_cache_dtype="int4")


def test_a_required_native_kernel_says_that_it_keeps_no_fp8(folder: Path) -> None:
    if not has_native():
        pytest.skip("there are no native kernels here")
    with pytest.raises(
        LoadError, match="native cannot be used: keeps keys and values as they were computed or in int8"
    ):
        load(folder, native="require", kv_cache_dtype="fp8")
    assert load(folder, native="require", kv_cache_dtype="int8").info.kernels["forward"] == "native"
