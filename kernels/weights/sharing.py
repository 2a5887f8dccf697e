"""How a decoder gets its weights: packed here, read as an earlier start has packed them, or shared through an arena."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.config import ModelConfig
from novainfer.kernels.models.decoder import Decoder
from novainfer.kernels.ops.registry import Linear, SharedLinear
from novainfer.kernels.ops.selection import Selection
from novainfer.kernels.weights.arena import ALIGNMENT, Arena
from novainfer.kernels.weights.checkpoint import Checkpoint
from novainfer.kernels.weights.header import tensor_shapes
from novainfer.kernels.weights.loader import (
    LinearSpec,
    OnProgress,
    WeightReader,
    WeightSource,
    linear_specs,
    load_decoder,
)
from novainfer.kernels.weights.packed import (
    TENSORS_MAX,
    DamagedFileError,
    KeptWeights,
    PackedFile,
    PackedWeights,
    fingerprint,
    key_of,
)

__all__ = ["SharingReader", "Weights", "load_weights"]

Weights = Literal["own", "packed", "mapped"]

PANEL_MAX = 64  # rows and columns of a weight are padded to multiples of at most this


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: Selection,
    max_model_len: int,
    on_progress: OnProgress | None = None,
    fd: int | None = None,
    cache_dir: Path | None = None,
) -> tuple[tuple[Decoder, int], Weights]:
    """What `load_decoder` gives, and where the weights are now; raises `LoadError`.

    `fd` is a memfd that processes share: the weights are put there, or found. `cache_dir` is a folder that keeps packed
    weights from one start to the next, on a CPU.
    """
    found = None if fd is None and cache_dir is None else fingerprint(config, checkpoint, kernels)
    arena = None if fd is None or found is None else Arena.open(fd, found, _bytes_max(config, kernels))
    if arena is not None and arena.is_filled:
        source = PackedWeights(checkpoint, kernels, arena)
        loaded = load_decoder(config, checkpoint, kernels, max_model_len, source=source)
        if on_progress is not None:
            on_progress(len(checkpoint.entries), len(checkpoint.entries))
        return loaded, "mapped"
    try:
        loaded = _load(config, checkpoint, kernels, max_model_len, on_progress, arena, cache_dir, found)
        if arena is not None:
            arena.finish()
    except BaseException:
        if arena is not None:
            arena.abandon()
        raise
    return loaded, "own" if arena is None else "packed"


def _load(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: Selection,
    max_model_len: int,
    on_progress: OnProgress | None,
    arena: Arena | None,
    cache_dir: Path | None,
    found: str | None,
) -> tuple[Decoder, int]:
    """From the file of an earlier start, or from the checkpoint and then into such a file."""
    folder = None if cache_dir is None or found is None else _made(cache_dir)

    def load(source: WeightSource) -> tuple[Decoder, int]:
        return load_decoder(config, checkpoint, kernels, max_model_len, source=source)

    def shared(source: WeightSource) -> WeightSource:
        return source if arena is None else SharingReader(source, arena)

    def load_kept(kept: PackedFile) -> tuple[Decoder, int]:
        loaded = load(shared(PackedWeights(checkpoint, kernels, kept)))
        kept.check()  # what fails it is dropped with this frame, before all is packed anew
        return loaded

    if folder is not None and found is not None and (kept := PackedFile.open(folder, found)) is not None:
        try:
            loaded = load_kept(kept)
        except DamagedFileError as error:
            kept.warn(kept.path, error)
            if arena is not None:
                arena.clear()
        else:
            if on_progress is not None:
                on_progress(len(checkpoint.entries), len(checkpoint.entries))
            return loaded
        finally:
            kept.close()
    source = shared(WeightReader(checkpoint, tensor_shapes(config), kernels, on_progress))
    if folder is None or found is None:
        return load(source)
    keeping = KeptWeights(source)
    loaded = load(keeping)
    PackedFile.write(folder, found, keeping.tensors)
    return loaded


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"weight_cache_dir {folder} is no folder, and cannot be made: {error.strerror}") from None
    return folder


def _bytes_max(config: ModelConfig, kernels: Selection) -> int:
    """What an arena must hold at most."""
    shapes = tensor_shapes(config)
    size, scale = kernels.dtype.itemsize, torch.float32.itemsize
    total = sum(
        (spec.out_features + PANEL_MAX) * ((spec.in_features + PANEL_MAX) * size + 2 * scale)
        for spec in linear_specs(config)
    )
    total += sum(torch.Size(shape).numel() * size for shape in shapes.values() if len(shape) == 1)
    total += config.vocab_size * config.hidden_size * size  # embeddings beside the head
    return total + TENSORS_MAX * ALIGNMENT * len(shapes)


class SharingReader:
    """Gives what another source gives, from the arena: each tensor is put there, and its own memory freed."""

    is_mapped = False

    def __init__(self, source: WeightSource, arena: Arena) -> None:
        self.checkpoint = source.checkpoint
        self.kernels = source.kernels
        self.source = source
        self.arena = arena

    @property
    def num_bytes(self) -> int:
        """Of the other one."""
        return self.source.num_bytes

    @property
    def num_read(self) -> int:
        """Of the other one."""
        return self.source.num_read

    def tensor(self, name: str) -> Tensor:
        """A tensor that is kept as it is."""
        return self.arena.put(name, self.source.tensor(name))

    def linear(self, spec: LinearSpec) -> Linear:
        """A product on memory of the arena."""
        packed = self.source.linear(spec)
        assert isinstance(packed, SharedLinear)
        shared = [self.arena.put(key_of(spec, number), tensor) for number, tensor in enumerate(packed.tensors)]
        over: Linear = type(packed).over(spec.out_features, spec.in_features, self.kernels.dtype, shared)
        return over
