"""The modes of a GPU: without graphs, with torch's attention, torch alone; over one cache and the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import CPU, Driver

from novainfer.fsm.messages.mode import EAGER, FAST, INT8, PLAIN, SDPA, Mode
from novainfer.kernels.ops.attention import TorchAttention
from novainfer.kernels.ops.forward import OpByOpForward
from novainfer.kernels.ops.registry import Registry
from novainfer.kernels.ops.row_ops import TorchRowOps
from novainfer.kernels.ops.selection import GRAPHS, Selection, build_registry
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.weights.loader import WeightReader

SHAPE = Shape("of a GPU", 4, 2, 16, 48, 60, num_layers=2)
PROMPT = [(7 * i + 3) % 60 for i in range(9)]


class Attention(TorchAttention):
    """Kernels of a GPU, by their names; each computes what torch does."""

    name: ClassVar[str] = "triton"


class Ops(TorchRowOps):
    name: ClassVar[str] = "triton"


class Eager(OpByOpForward):
    name: ClassVar[str] = "triton"


class Graphed(OpByOpForward):
    name: ClassVar[str] = GRAPHS


def registry_of(*, graphs: bool = True, attention: bool = True) -> Registry:
    registry, torchs = Registry(), build_registry(CPU, native="0")
    if graphs:
        registry.register("forward", Graphed)
    registry.register("forward", Eager)
    registry.register("ops", Ops)
    if attention:
        registry.register("attention", Attention)
    for operation in registry._entries:
        for implementation in torchs.implementations(operation):
            registry.register(operation, implementation)
    return registry


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("of-a-gpu"))


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: bool) -> ModelRunner:
    monkeypatch.setattr(Selection, "block_mover", lambda selection, parts: None)  # Triton's own, for these names
    runner = ModelRunner.load(
        folder, registry=registry_of(**options), max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32
    )
    runner.fit(mode="fixed", num_blocks=4)
    return runner


def kernels_of(runner: ModelRunner) -> tuple[str, str, str]:
    decoder = runner._decoder
    assert decoder.attention is not None
    return type(decoder.compute).__name__, decoder.attention.name, decoder.ops.name


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({}, [FAST, EAGER, SDPA, PLAIN]),
        ({"graphs": False}, [EAGER, SDPA, PLAIN]),
        ({"attention": False}, [FAST, EAGER, PLAIN]),
    ],
)
def test_only_what_differs_is_offered(
    folder: Path, options: dict[str, Any], kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = load(folder, monkeypatch, **options).info.modes
    assert [mode.kernels for mode in modes if mode.precision != INT8] == kernels
    assert [mode.kernels for mode in modes if mode.precision == INT8] == kernels


def test_each_mode_has_its_kernels_and_goes_on_with_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = Driver(load(folder, monkeypatch), capture=True)
    undisturbed.generate([undisturbed.add(0, PROMPT)], 5)
    runner = load(folder, monkeypatch)
    read: list[Any] = []
    monkeypatch.setattr(WeightReader, "linear", lambda reader, spec: read.append(spec))
    driver, names = Driver(runner, capture=True), []
    sequence = driver.add(0, PROMPT)
    for kernels in (FAST, EAGER, SDPA, PLAIN, FAST):
        runner.switch(Mode(kernels))
        assert runner.mode == Mode(kernels)
        names.append(kernels_of(runner))
        driver.generate([sequence], 1)
    graphed = ("Graphed", "triton", "triton")
    eager, other = ("Eager", "triton", "triton"), ("Eager", "torch", "triton")
    assert names == [graphed, eager, other, ("OpByOpForward", "torch", "torch"), graphed]
    assert read == [], "weights that are the same ones are not read again"
    assert torch.equal(torch.stack(driver.capturing.logits), torch.stack(undisturbed.capturing.logits))


def test_without_room_for_weights_the_same_weights_go_on_without_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(folder, monkeypatch)
    monkeypatch.setattr("novainfer.kernels.runtime.modes.free_bytes", lambda device: 0)
    runner.switch(Mode(EAGER))
    assert kernels_of(runner)[0] == "Eager"
    with pytest.raises(MemoryError, match="need"):
        runner.switch(Mode(EAGER, INT8))
    assert (runner.mode, kernels_of(runner)[0]) == (Mode(EAGER), "Eager")
