"""A model that is quantised while it is loaded is the one that a switch would give, and was never there in full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import CPU, Driver, make_runner

from novainfer.bench.make_checkpoint import make_checkpoint
from novainfer.fsm.messages.mode import FAST, INT4, INT8, PLAIN, Mode
from novainfer.kernels.errors import LoadError
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime import modes
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.weights import loader

SHAPE = Shape("quantised", 4, 2, 24, 96, 160, num_layers=3)
UNTIED = Shape("quantised-untied", 6, 2, 16, 80, 200, tied=False)
PROMPT = [(7 * i + 3) % 127 for i in range(37)]
NATIVE = any(kernel.name == "native" for kernel in build_registry(CPU).implementations("linear"))
BACKENDS = ("torch", "native") if NATIVE else ("torch",)


@pytest.fixture(scope="module", params=[SHAPE, UNTIED], ids=lambda shape: shape.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param.name))


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Those of a prefill and some greedy steps: [num_tokens, vocab_size]."""
    sampler = runner._sampler
    driver = Driver(runner, capture=True)
    driver.generate([driver.add(0, PROMPT)], 4)
    runner._sampler = sampler
    return torch.stack(driver.capturing.logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_computes_what_a_model_does_that_is_switched(backend: str, dtype: str, folder: Path) -> None:
    kernels = FAST if backend == "native" else PLAIN
    switched = make_runner(folder, backend, dtype=dtype)
    switched.switch(Mode(kernels, INT8))
    runner = make_runner(folder, backend, dtype=dtype, quantization="int8")
    assert runner.mode == Mode(kernels, INT8)
    assert runner.info.kernels["linear"] == f"{backend}-int8"
    assert runner.weight_bytes == switched.weight_bytes
    assert torch.equal(logits_of(runner), logits_of(switched))


@pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")
def test_it_offers_plainer_kernels_and_no_better_precision_and_comes_back_bit_for_bit(folder: Path) -> None:
    runner = make_runner(folder, "native", quantization="int8")
    assert runner.info.modes == (Mode(FAST, INT8), Mode(PLAIN, INT8))
    assert runner._modes._reserve is None  # there is no lower precision that could need it
    first, num_bytes = logits_of(runner), runner.weight_bytes
    runner.switch(Mode(PLAIN, INT8))
    plain = logits_of(runner)
    assert not torch.equal(plain, first)
    torch.testing.assert_close(plain[0], first[0], rtol=1e-4, atol=1e-4)
    runner.switch(Mode(FAST, INT8))
    assert torch.equal(logits_of(runner), first)
    assert runner.weight_bytes == num_bytes
    with pytest.raises(ValueError, match="there are no fast kernels in precision checkpoint here"):
        runner.switch(Mode())


@pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [INT8, INT4])
def test_a_sequence_that_starts_again_has_the_same_bits_in_any_batch(
    quantization: str, dtype: str, folder: Path
) -> None:
    """Alone from its prompt on; and beside others, preempted after three tokens and computed again in chunks."""
    runner = make_runner(folder, "native", quantization=quantization, dtype=dtype)
    sampler = runner._sampler

    def first_logits(driver: Driver, *work: Any) -> torch.Tensor:
        before = len(driver.capturing.logits)
        driver.step(*work)
        return driver.capturing.logits[before]

    alone = Driver(runner, capture=True)
    sequence = alone.add(0, PROMPT)
    expected = [first_logits(alone, sequence) for _ in range(6)]
    runner._sampler = sampler
    crowd = Driver(runner, seed=1, capture=True)
    again, others = crowd.add(2, PROMPT), [crowd.add(slot, PROMPT[slot : 9 * slot + 5]) for slot in (0, 1, 3, 4)]
    got = [first_logits(crowd, again, *others) for _ in range(3)]
    crowd.release(again)
    for _ in range(3):
        crowd.step(*others, (again, 12))
    got += [first_logits(crowd, again, *others) for _ in range(3)]
    runner._sampler = sampler
    assert again.tokens == sequence.tokens
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_fp8_is_loaded_as_it_is_asked_for_and_never_gone_to(folder: Path) -> None:
    exact = make_runner(folder)
    assert all(mode.precision != "fp8" for mode in exact.info.modes)  # it would give back no more than int8
    runner = make_runner(folder, quantization="fp8")
    assert runner.info.modes == (Mode(PLAIN, "fp8"),)
    assert runner.info.kernels["linear"] == "torch-fp8"
    assert runner.weight_bytes == make_runner(folder, quantization="int8").weight_bytes
    first, expected = logits_of(runner)[0], logits_of(exact)[0]
    assert 0 < (first - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_int4_keeps_layers_in_groups_and_the_head_in_int8(backend: str, folder: Path) -> None:
    exact, runner = make_runner(folder, backend), make_runner(folder, backend, quantization="int4")
    assert {mode.precision for mode in runner.info.modes} == {INT4}
    assert (type(runner._decoder.head).precision, runner._decoder.layers[0].down.precision) == (INT8, INT4)
    assert runner.weight_bytes < 0.35 * exact.weight_bytes
    first, expected = logits_of(runner)[0], logits_of(exact)[0]
    assert 0 < (first - expected).norm() < 0.4 * expected.norm()


def test_none_is_a_word_for_the_checkpoint_as_it_is(folder: Path) -> None:
    assert make_runner(folder, quantization="none").weight_bytes == make_runner(folder).weight_bytes


@pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")
def test_a_switch_needs_room_for_a_product_as_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(folder, "native", quantization="int8")
    before = logits_of(runner)
    with monkeypatch.context() as patch:
        patch.setattr(modes, "free_bytes", lambda device: 1000)
        patch.setattr(loader.WeightReader, "linear", None)
        with pytest.raises(MemoryError, match="the weights for plain kernels in precision int8 need"):
            runner.switch(Mode(PLAIN, INT8))
    assert torch.equal(logits_of(runner), before)


@pytest.mark.parametrize("unknown", ["int3", "checkpoint", ""])
def test_a_precision_that_is_not_there_is_refused_with_those_that_are(unknown: str, folder: Path) -> None:
    with pytest.raises(LoadError, match=rf"quantization must be one of 'int8', 'int4', 'fp8', 'none', not '{unknown}'"):
        make_runner(folder, quantization=unknown)


def test_memory_is_counted_as_it_will_be_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than enough for int8, too little for fp32."""
    config = make_runner(folder)._decoder.config
    specs = loader.linear_specs(config)
    sizes = [spec.out_features * spec.in_features for spec in specs]
    rest = make_runner(folder).info.num_parameters - sum(sizes)
    angles = 3 * config.max_position_embeddings * config.head_dim
    needed = sum(sizes) + 4 * (sum(spec.out_features for spec in specs) + max(sizes) + rest + angles)
    options: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": None}
    for free, said in ((needed, None), (needed - 1, "GiB for its weights in int8 and its positions, but only")):
        with monkeypatch.context() as patch:
            patch.setattr(loader, "free_bytes", lambda device, free=free: free)
            if said is None:
                ModelRunner.load(folder, quantization="int8", dtype="float32", **options)
            else:
                with pytest.raises(LoadError, match=said):
                    ModelRunner.load(folder, quantization="int8", dtype="float32", **options)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shares memory by memfd")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quantization", [INT8, INT4])
def test_quantised_weights_are_shared_between_processes(backend: str, quantization: str, folder: Path) -> None:
    fd = os.memfd_create("novainfer-test", os.MFD_ALLOW_SEALING)
    try:
        packed = make_runner(folder, backend, weights_fd=fd, quantization=quantization)
        mapped = make_runner(folder, backend, weights_fd=fd, quantization=quantization)
        assert (packed.info.weights, mapped.info.weights) == ("packed", "mapped")
        own = make_runner(folder, backend, quantization=quantization)
        assert torch.equal(logits_of(packed), logits_of(own))
        assert torch.equal(logits_of(mapped), logits_of(own))
        assert mapped.weight_bytes == own.weight_bytes
        assert make_runner(folder, backend, weights_fd=fd).info.weights == "own"  # another precision
    finally:
        os.close(fd)


PROGRAM = """
import json, sys
from pathlib import Path
from novainfer.kernels.runtime.runner import ModelRunner

def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024

options = dict(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128)
small = ModelRunner.load(Path(sys.argv[1]), quantization="int8", **options)  # what libraries allocate the first time
small.close()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
base = status("VmRSS")
runner = ModelRunner.load(Path(sys.argv[1]), quantization="int8", **options)
print(json.dumps([runner.info.weight_bytes / 2**20, status("VmHWM") - base]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")
def test_the_full_weights_are_never_there_together(tmp_path: Path) -> None:
    make_checkpoint("47m", tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    weights, peak = json.loads(done.stdout)
    head, scratch = 32_768 * 512 * 2 / 2**20, 24  # MiB
    assert weights < 0.6 * 47_000_000 * 2 / 2**20
    assert peak < weights + head + scratch
