"""Whole models on Triton's kernels give the tokens of the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FEW_EXPERTS, Shape, save_checkpoint
from driver import Driver, make_runner

from novainfer.kernels.ops.registry import Registry
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime.runner import ModelRunner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QWEN2 = Shape("cuda-qwen2", 3, 1, 10, 30, 127, intermediate_size=43)
QWEN3 = Shape(
    "cuda-qwen3",
    4,
    2,
    16,
    64,
    127,
    tied=False,
    family="Qwen3",
    others=(
        ("use_sliding_window", True),
        ("sliding_window", 7),
        ("layer_types", ["sliding_attention", "full_attention"]),
    ),
)
MOE = Shape(
    "cuda-qwen2-moe",
    4,
    2,
    16,
    32,
    127,
    family="Qwen2Moe",
    others=(*FEW_EXPERTS, ("mlp_only_layers", [0]), ("norm_topk_prob", True)),
)
ATTENTION = {False: "triton", True: "triton-invariant"}
PROMPTS = ([(7 * i + 3) % 127 for i in range(11)], [5, 6, 7])


@pytest.fixture(scope="module", params=[QWEN2, QWEN3, MOE], ids=lambda shape: shape.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param.name))


@pytest.fixture(autouse=True)
def proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are taken unproved where they are interpreted: tests beside this one prove each, and it takes long."""
    if DEVICE == "cpu":
        monkeypatch.setattr(Registry, "_prove", lambda *_: None)


def runner_of(folder: Path, **options: Any) -> ModelRunner:
    """Launched one by one: what is captured has tests beside this one."""
    batch_invariant = options.pop("batch_invariant", False)
    registry = build_registry(torch.device("cuda"), batch_invariant=batch_invariant, enforce_eager=True)
    return make_runner(folder, registry=registry, device=DEVICE, block_size=4, **options)


def tokens_of(runner: ModelRunner) -> list[list[int]]:
    """A prompt in two chunks beside another one, then steps of both."""
    driver = Driver(runner)
    first, second = (driver.add(slot, list(prompt)) for slot, prompt in enumerate(PROMPTS))
    driver.step((first, 6), second)
    for _ in range(3):
        driver.step(first, second)
    return [sequence.tokens for sequence in (first, second)]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_model_gives_the_tokens_of_the_reference(batch_invariant: bool, folder: Path) -> None:
    runner = runner_of(folder, dtype="float32", batch_invariant=batch_invariant)
    kernels = runner.info.kernels
    assert (kernels["ops"], kernels["attention"]) == ("triton", ATTENTION[batch_invariant])
    assert kernels["forward"] == ("triton" if batch_invariant or "qwen3" in folder.name else "triton-bias")
    assert kernels["linear"] == ("triton" if batch_invariant else "torch")
    assert runner.info.row_invariant is batch_invariant
    assert tokens_of(runner) == tokens_of(make_runner(folder, "reference", dtype="float32", block_size=4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_invariant_model_gives_a_row_the_same_bits_in_every_step(dtype: str, folder: Path) -> None:
    """The last row of a prompt: of a prefill, of a chunk beside another sequence, and decoded alone."""
    runner = runner_of(folder, dtype=dtype, batch_invariant=True)
    assert runner.info.row_invariant
    prompt = list(PROMPTS[0])
    found = []
    for lengths, others in (((11,), ()), ((7, 4), (1,)), ((4, 6, 1), ())):
        driver = Driver(runner, capture=True)
        sequence = driver.add(0, prompt)
        beside = [driver.add(slot, list(PROMPTS[slot])) for slot in others]
        for length in lengths:
            driver.step((sequence, length), *beside)
        found.append(driver.capturing.logits[-1 - len(beside)])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("folder", [QWEN2], indirect=True, ids=lambda shape: shape.name)
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_model_of_eight_bits_computes_on_the_tensor_cores_near_what_torch_widens(
    quantization: str, folder: Path
) -> None:
    runner = runner_of(folder, dtype="bfloat16", quantization=quantization)
    assert runner.info.kernels["linear"] == f"triton-{quantization}"
    assert runner.info.kernels["forward"] == "triton"
    assert {mode.precision for mode in runner.info.modes} == {quantization}
    plain = make_runner(folder, "torch", dtype="bfloat16", quantization=quantization, block_size=4)
    assert runner.weight_bytes == plain.weight_bytes
    logits, widened = (_first_logits(run) for run in (runner, plain))
    assert 0 < (logits - widened).norm() < 0.15 * widened.norm()


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_model_over_a_quantised_cache_gives_the_tokens_that_torch_gives_over_it(
    kv_cache_dtype: str, folder: Path
) -> None:
    runner = runner_of(folder, dtype="float32", kv_cache_dtype=kv_cache_dtype)
    assert runner.info.kernels["attention"] == "triton"
    plain = make_runner(folder, "torch", dtype="float32", kv_cache_dtype=kv_cache_dtype, block_size=4)
    assert runner.info.kv_bytes_per_block == plain.info.kv_bytes_per_block
    assert tokens_of(runner) == tokens_of(plain)


def _first_logits(runner: ModelRunner) -> torch.Tensor:
    driver = Driver(runner, capture=True)
    driver.step(driver.add(0, list(PROMPTS[1])))
    return driver.capturing.logits[0].float().cpu()
