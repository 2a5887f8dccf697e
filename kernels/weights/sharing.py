"""Weights packed into an arena that other processes map, or found there: `arena`, seen from the loader."""

from __future__ import annotations

import platform
from typing import Any, Literal

import torch
from torch import Tensor

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.config import ModelConfig
from novainfer.kernels.models.decoder import Decoder
from novainfer.kernels.ops.registry import Linear, SharedLinear
from novainfer.kernels.ops.selection import Selection
from novainfer.kernels.weights.arena import ALIGNMENT, Arena, fingerprint_of
from novainfer.kernels.weights.checkpoint import Checkpoint
from novainfer.kernels.weights.entries import GroupedEntry
from novainfer.kernels.weights.header import tensor_shapes
from novainfer.kernels.weights.loader import (
    LinearSpec,
    OnProgress,
    WeightReader,
    linear_kernel,
    linear_specs,
    load_decoder,
)

__all__ = ["MappedWeights", "SharingReader", "Weights", "load_shared", "open_arena"]

Weights = Literal["own", "packed", "mapped"]

TENSORS_MAX = 4  # of a product: weight, scale, shift, bias
PANEL_MAX = 64  # rows and columns of a weight are padded to multiples of at most this


def open_arena(fd: int, config: ModelConfig, checkpoint: Checkpoint, kernels: Selection) -> Arena | None:
    """The arena for the weights of this model on these kernels; None where each process must have its own."""
    if kernels.device.type != "cpu":
        return None
    layouts = []
    for spec in linear_specs(config):
        kernel = linear_kernel(spec, checkpoint, kernels)
        if not hasattr(kernel, "shared_layout"):
            return None
        layouts.append([spec.layer, spec.part, spec.expert, *spec.names, kernel.shared_layout()])
    shapes = tensor_shapes(config)
    facts: dict[str, Any] = {
        "files": [[str(file), *identity] for file, identity in checkpoint.identities.items()],
        "shapes": shapes,
        "dtype": str(kernels.dtype),
        "layouts": layouts,
        "codes": [[e.name, e.layout, *e.form] for e in checkpoint.entries.values() if isinstance(e, GroupedEntry)],
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    num_bytes_max = sum(
        (spec.out_features + PANEL_MAX)
        * ((spec.in_features + PANEL_MAX) * kernels.dtype.itemsize + 2 * torch.float32.itemsize)
        for spec in linear_specs(config)
    )
    num_bytes_max += sum(
        torch.Size(shape).numel() * kernels.dtype.itemsize for shape in shapes.values() if len(shape) == 1
    )
    num_bytes_max += config.vocab_size * config.hidden_size * kernels.dtype.itemsize  # embeddings beside the head
    num_bytes_max += TENSORS_MAX * ALIGNMENT * len(shapes)
    return Arena.open(fd, fingerprint_of(facts), num_bytes_max)


def load_shared(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: Selection,
    max_model_len: int,
    on_progress: OnProgress | None,
    fd: int,
) -> tuple[tuple[Decoder, int], Weights]:
    """What `load_decoder` gives, and where the weights are now; raises `LoadError`."""
    arena = open_arena(fd, config, checkpoint, kernels)
    if arena is None:
        return load_decoder(config, checkpoint, kernels, max_model_len, on_progress), "own"
    if arena.is_filled:
        loaded = load_decoder(
            config, checkpoint, kernels, max_model_len, source=MappedWeights(checkpoint, kernels, arena)
        )
        if on_progress is not None:
            on_progress(len(checkpoint.entries), len(checkpoint.entries))
        return loaded, "mapped"
    reader = SharingReader(checkpoint, tensor_shapes(config), kernels, on_progress, arena)
    try:
        loaded = load_decoder(config, checkpoint, kernels, max_model_len, source=reader)
        arena.finish()
    except BaseException:
        arena.abandon()
        raise
    return loaded, "packed"


class SharingReader(WeightReader):
    """Reads and packs as `WeightReader` does, and keeps everything in the arena."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: dict[str, tuple[int, ...]],
        kernels: Selection,
        on_progress: OnProgress | None,
        arena: Arena,
    ) -> None:
        super().__init__(checkpoint, shapes, kernels, on_progress)
        self.arena = arena

    def tensor(self, name: str) -> Tensor:
        """A tensor that is kept as it is."""
        return self.arena.put(name, super().tensor(name))

    def linear(self, spec: LinearSpec) -> Linear:
        """A product on memory of the arena; its own is freed."""
        packed = super().linear(spec)
        assert isinstance(packed, SharedLinear)
        shared = [self.arena.put(f"{_key(spec)}.{i}", tensor) for i, tensor in enumerate(packed.tensors)]
        over: Linear = type(packed).over(spec.out_features, spec.in_features, self.kernels.dtype, shared)
        return over


class MappedWeights:
    """Gives what another process has put into the arena, and reads nothing."""

    def __init__(self, checkpoint: Checkpoint, kernels: Selection, arena: Arena) -> None:
        self.checkpoint = checkpoint
        self.kernels = kernels
        self.arena = arena
        self.num_bytes = 0
        self.num_read = 0

    def tensor(self, name: str) -> Tensor:
        """A tensor that is kept as it is."""
        tensor = self.arena.get(name)
        if tensor is None:
            raise LoadError(f"the shared weights hold no {name}")
        self.num_bytes += tensor.nbytes
        return tensor

    def linear(self, spec: LinearSpec) -> Linear:
        """A product on memory of the arena."""
        kernel = linear_kernel(spec, self.checkpoint, self.kernels)
        found = [self.arena.get(f"{_key(spec)}.{i}") for i in range(TENSORS_MAX)]
        tensors = [tensor for tensor in found if tensor is not None]
        linear: Linear = kernel.over(spec.out_features, spec.in_features, self.kernels.dtype, tensors)
        self.num_bytes += linear.weight_bytes
        return linear


def _key(spec: LinearSpec) -> str:
    return f"{spec.layer}.{spec.part}" if spec.expert is None else f"{spec.layer}.{spec.part}.{spec.expert}"
