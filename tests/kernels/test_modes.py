"""A model can go on in another mode at any step, comes back bit for bit, and survives a switch that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GRID, Shape, save_checkpoint
from driver import CPU, Driver, make_runner

from novainfer.bench.make_checkpoint import make_checkpoint
from novainfer.fsm.messages.mode import FAST, INT8, PLAIN, Mode
from novainfer.fsm.messages.step import SeqParams
from novainfer.kernels.errors import LoadError
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime import modes
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.weights import loader

SHAPE = Shape("switched", 4, 2, 24, 96, 160, num_layers=3)
UNTIED = Shape("switched-untied", 6, 2, 16, 80, 200, tied=False)
PROMPT = [(7 * i + 3) % 127 for i in range(37)]
NATIVE = any(kernel.name == "native" for kernel in build_registry(CPU).implementations("linear"))

BEST, SAFE, LEAN, LEAST = Mode(), Mode(PLAIN), Mode(FAST, INT8), Mode(PLAIN, INT8)
FIRST, LOWER = (BEST, LEAN) if NATIVE else (SAFE, LEAST)

needs_native = pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("switched"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(UNTIED, tmp_path_factory.mktemp("switched-untied"))


def logits_of(runner: ModelRunner, num_tokens: int = 4) -> torch.Tensor:
    """Those of a prefill and some greedy steps: [num_tokens, vocab_size]."""
    sampler = runner._sampler
    driver = Driver(runner, capture=True)
    driver.generate([driver.add(0, PROMPT)], num_tokens)
    runner._sampler = sampler
    return torch.stack(driver.capturing.logits)


def native_parts(runner: ModelRunner) -> set[str]:
    """Which operations have a native kernel in them."""
    decoder = runner._decoder
    linears = [decoder.head, *(part for layer in decoder.layers for part in (layer.qkv, layer.o, layer.down))]
    found = {"linear" for linear in linears if linear.name.startswith("native")}
    found |= {"ops"} if decoder.ops.name == "native" else set()
    return found | ({"attention"} if decoder.attention.name == "native" else set())  # type: ignore[union-attr]


def is_as_before(runner: ModelRunner, expected: torch.Tensor) -> bool:
    return torch.equal(logits_of(runner), expected)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["folder", "untied"])
def test_every_mode_computes_and_the_way_back_gives_the_same_bits(
    model: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    runner = make_runner(request.getfixturevalue(model), "native", dtype=dtype)
    assert runner.info.modes == (BEST, SAFE, LEAN, LEAST)
    in_mode = {BEST: logits_of(runner)}
    full_bytes = runner.weight_bytes
    close = {"float32": {"rtol": 1e-4, "atol": 1e-4}, "bfloat16": {"rtol": 0.1, "atol": 0.1}}[dtype]
    for mode in (SAFE, LEAN, BEST, LEAN, LEAST, SAFE, LEAST, LEAN, SAFE, BEST):
        runner.switch(mode)
        assert runner.mode == mode
        assert runner._decoder.embedding.head is runner._decoder.head
        assert native_parts(runner) == (set() if mode.kernels == PLAIN else {"linear", "attention", "ops"})
        logits = logits_of(runner)
        assert torch.equal(logits, in_mode.setdefault(mode, logits))
        if mode.precision == INT8:
            assert runner.weight_bytes < (0.36 if dtype == "float32" else 0.65) * full_bytes
        else:
            assert runner.weight_bytes <= 1.2 * full_bytes
    assert not torch.equal(in_mode[SAFE], in_mode[BEST])
    torch.testing.assert_close(in_mode[SAFE][0], in_mode[BEST][0], **close)
    assert not torch.equal(in_mode[LEAN], in_mode[BEST])
    torch.testing.assert_close(in_mode[LEAST][0], in_mode[LEAN][0], **close)
    error = (in_mode[LEAN][0] - in_mode[BEST][0]).abs().max() / in_mode[BEST][0].abs().max()
    assert error < 0.1


@needs_native
@pytest.mark.parametrize("shape", GRID, ids=lambda shape: shape.name)
def test_plain_kernels_go_on_where_native_ones_stopped(shape: Shape, tmp_path: Path) -> None:
    """In the middle of a sequence, with the KV that the others have written; and back again."""
    runner = make_runner(save_checkpoint(shape, tmp_path), "native", block_size=10, max_model_len=64)
    prompt = PROMPT[:23]
    undisturbed = Driver(runner, capture=True)
    undisturbed.generate([undisturbed.add(0, prompt)], 9)
    driver = Driver(runner, capture=True)
    sequence = driver.add(1, prompt)
    for mode in (BEST, SAFE, BEST):
        runner.switch(mode)
        driver.generate([sequence], 3)
    torch.testing.assert_close(
        torch.stack(driver.capturing.logits), torch.stack(undisturbed.capturing.logits), rtol=2e-4, atol=2e-4
    )


def test_torchs_own_kernels_have_int8_but_nothing_plainer(folder: Path) -> None:
    runner = make_runner(folder, "torch")
    assert runner.info.modes == (SAFE, LEAST)
    before = logits_of(runner)
    runner.switch(LEAST)
    torch.testing.assert_close(logits_of(runner)[0], before[0], rtol=0.1, atol=0.1)
    runner.switch(SAFE)
    assert is_as_before(runner, before)
    with pytest.raises(ValueError, match=f"there are no {BEST} here, only {SAFE}, {LEAST}"):
        runner.switch(BEST)


@needs_native
def test_where_rows_must_not_know_their_batch_no_mode_lets_them(folder: Path) -> None:
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": None}
    runner = ModelRunner.load(folder, batch_invariant=True, native="require", **options)
    assert runner.info.modes == (BEST, LEAN)


def test_a_switch_leaves_cache_and_sampler_as_they_are(folder: Path) -> None:
    """A sequence in the middle of its output, with a seed and a penalty over what it has said."""
    rows = SeqParams(
        slot=0,
        temperature=1.5,
        seed=5,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        num_prompt_tokens=len(PROMPT),
    )
    undisturbed = Driver(make_runner(folder, "native" if NATIVE else "torch"))
    expected = undisturbed.generate([undisturbed.add(0, PROMPT, rows)], 12)[0]
    driver = Driver(make_runner(folder, "native" if NATIVE else "torch"))
    sequence = driver.add(0, PROMPT, rows)
    driver.generate([sequence], 6)
    for mode in reversed(driver.runner.info.modes):
        driver.runner.switch(mode)
    driver.generate([sequence], 6)
    assert sequence.tokens[len(PROMPT) :] == expected


def test_swapped_blocks_come_back_into_another_mode(folder: Path) -> None:
    runner = make_runner(folder, "native" if NATIVE else "torch")
    runner.fit(mode="fixed", num_blocks=64, swap_space_bytes=8 * runner.info.kv_bytes_per_block)
    parts = runner._decoder.attention.parts  # type: ignore[union-attr]
    for mode in reversed(runner.info.modes):
        runner.switch(mode)
        now = runner._decoder.attention.parts  # type: ignore[union-attr]
        assert [part.data_ptr() for part in now] == [part.data_ptr() for part in parts]


def failing_at(monkeypatch: pytest.MonkeyPatch, count: int, error: Callable[[], Exception]) -> None:
    """The `count`-th product that is replaced cannot be."""
    original = modes.Modes._put
    calls = []

    def put(self: modes.Modes, *args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == count:
            raise error()
        original(self, *args, **options)

    monkeypatch.setattr(modes.Modes, "_put", put)


ERRORS: list[tuple[Callable[[], Exception], type[Exception]]] = [
    (lambda: MemoryError("planted"), MemoryError),
    (lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: planted"), MemoryError),
    (lambda: torch.OutOfMemoryError("planted"), MemoryError),
    (lambda: LoadError("planted"), LoadError),
]


@pytest.mark.parametrize("planted", ERRORS)
@pytest.mark.parametrize("count", [1, 4, 13])
@pytest.mark.parametrize(
    "way", [(FIRST, LOWER), (LOWER, FIRST), (BEST, SAFE), (SAFE, LEAST), (LEAN, LEAST), (LEAST, SAFE)]
)
def test_a_switch_that_fails_leaves_the_old_mode_working(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: tuple[str, str],
    count: int,
    planted: tuple[Callable[[], Exception], type[Exception]],
) -> None:
    if not NATIVE and (BEST in way or LEAN in way):
        pytest.skip("there are no native kernels here")
    runner = make_runner(folder, "native" if NATIVE else "torch")
    full = logits_of(runner)
    runner.switch(way[0])
    before = logits_of(runner)
    with monkeypatch.context() as patch:
        failing_at(patch, count, planted[0])
        with pytest.raises(planted[1], match="planted"):
            runner.switch(way[1])
    assert runner.mode == way[0]
    assert is_as_before(runner, before)
    runner.switch(way[1])
    assert runner.mode == way[1]
    runner.switch(FIRST)
    assert is_as_before(runner, full)


def test_weights_that_are_gone_or_changed_are_not_read_again(tmp_path: Path) -> None:
    runner = make_runner(save_checkpoint(SHAPE, tmp_path), "native" if NATIVE else "torch")
    full = logits_of(runner)
    runner.switch(LOWER)  # is made of the weights in memory
    before = logits_of(runner)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(LoadError, match="cannot be read: No such file"):
        runner.switch(FIRST)
    file.write_bytes(content[:-1] + b"!")
    with pytest.raises(LoadError, match="has changed since the model was loaded"):
        runner.switch(FIRST)
    assert runner.mode == LOWER
    assert is_as_before(runner, before)
    assert not is_as_before(runner, full)


def test_a_mixture_is_served_and_mended_by_the_next_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory runs out on the way to int8, and the file is gone that the way back needs."""
    runner = make_runner(save_checkpoint(SHAPE, tmp_path), "native" if NATIVE else "torch")
    full = logits_of(runner)
    file = tmp_path / "model.safetensors"
    hidden = file.rename(tmp_path / "hidden")
    with monkeypatch.context() as patch:
        failing_at(patch, 4, lambda: MemoryError("planted"))
        with pytest.raises(MemoryError):
            runner.switch(LOWER)
    assert runner.mode == FIRST
    assert "down of layer 0" not in caplog.text
    assert f"qkv of layer 0 stays with {LOWER}" in caplog.text
    mixed = logits_of(runner)
    assert not torch.equal(mixed, full)
    torch.testing.assert_close(mixed[0], full[0], rtol=0.1, atol=0.1)
    hidden.rename(file)
    runner.switch(FIRST)
    assert is_as_before(runner, full)


def test_a_switch_without_room_does_not_begin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(folder, "native" if NATIVE else "torch")
    before = logits_of(runner)
    with monkeypatch.context() as patch:
        patch.setattr(modes, "free_bytes", lambda device: 1000)
        patch.setattr(loader.WeightReader, "linear", None)
        with pytest.raises(MemoryError, match=f"the weights for {LOWER} need .* MiB more, but only 0 MiB are free"):
            runner.switch(LOWER)
    assert is_as_before(runner, before)
    runner.switch(LOWER)
    with monkeypatch.context() as patch:
        patch.setattr(modes, "free_bytes", lambda device: runner.weight_bytes)
        patch.setattr(loader.WeightReader, "linear", None)
        with pytest.raises(MemoryError, match=f"the weights for {FIRST}"):
            runner.switch(FIRST)
    assert runner.mode == LOWER


def test_what_the_way_down_needs_first_is_held_in_reserve(folder: Path) -> None:
    runner = make_runner(folder, "native" if NATIVE else "torch")
    assert runner._modes._reserve is not None
    held = runner._modes._reserve.nbytes
    largest = max(s.out_features * s.in_features for s in loader.linear_specs(runner._decoder.config) if s.layer == 0)
    assert largest < held < largest + 32 * 2**20
    runner.switch(LOWER)
    assert runner._modes._reserve is None
    runner.switch(FIRST)
    assert runner._modes._reserve is not None


PROGRAM = """
import json, sys
from pathlib import Path
from novainfer.kernels.runtime.runner import ModelRunner

def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024

runner = ModelRunner.load(Path(sys.argv[1]), max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128)
runner.fit(mode="fixed", num_blocks=8)
runner.warm()
first, _, lower, _ = runner.info.modes
for mode in (lower, first):  # once, for what libraries allocate the first time
    runner.switch(mode)
    runner.warm()
steps = []
for mode in (first, lower, first):
    before = status("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    base = status("VmRSS")
    runner.switch(mode)
    steps.append([str(mode), runner.weight_bytes / 2**20, before, status("RssAnon"), status("VmHWM") - base])
print(json.dumps(steps))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")
def test_int8_gives_the_memory_back_and_a_switch_needs_little_beside_the_larger_weights(tmp_path: Path) -> None:
    make_checkpoint("47m", tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (_, full, at_rest, _, _), (_, int8, _, after, peak), (_, back, _, again, peak_back) = json.loads(done.stdout)
    head, scratch = 32_768 * 512 * 2 / 2**20, 16  # MiB
    assert back == full
    assert at_rest - after > 0.9 * (full - int8)
    assert peak < scratch
    assert abs(again - at_rest) < scratch
    assert after + peak_back < at_rest + 2 * head
