"""Computing in another way from one step on: the modes of a loaded model, and the switch between them.

- `full`: the fastest kernels of this machine, on the weights as they are
- `plain`: torch's kernels for every operation, over the same KV cache; for when a native kernel misbehaves
- `int8`: weights rounded to int8, for when memory has run short; everything else as in `full`

A switch replaces one product after the other. What it needs beside the larger of both layouts is, on the way to
`int8`, one product in int8 and a few MiB; on the way back, the largest product twice (as it is read, and packed).
Products get smaller from `full` to `int8`, so they make room for one another: the layers' come first and the output
head, the largest, last; on the way back it is the other way round. What the first one needs is held in reserve while
the model is in `full`, and given up when the switch begins; a way back that would not fit does not begin. int8
weights are made of those in memory; all others are read from the checkpoint again, and are bit for bit those that
were loaded first. (Qwen2.5-0.5B in bf16, two busy cores: 0.9 s either way, 0.49 GiB given back.)
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from novainfer.kernels.checkpoint import Checkpoint
from novainfer.kernels.choice import KernelChoice
from novainfer.kernels.config import ModelConfig
from novainfer.kernels.errors import LoadError
from novainfer.kernels.forward import DecoderKind, LayerKind
from novainfer.kernels.header import tensor_shapes
from novainfer.kernels.int8 import part_rows, put_in_parts
from novainfer.kernels.loader import LinearSpec, WeightReader, linear_specs
from novainfer.kernels.memory import free_bytes, is_out_of_memory, release_freed_pages
from novainfer.kernels.models.decoder import Decoder
from novainfer.kernels.registry import AttentionBackend, AttentionShape, Linear

__all__ = ["Modes", "choices_by_mode"]

logger = logging.getLogger(__name__)

MIB = 1024**2
SCRATCH_BYTES_PER_ELEMENT = 20  # of a part that is quantised: the rows, four fp32 temporaries at most, int8


def choices_by_mode(full: KernelChoice, config: ModelConfig, shape: AttentionShape) -> dict[str, KernelChoice]:
    """The modes that this machine can compute this model in, best first, and the kernels of each."""
    layout = full.attention(shape).layout
    offered = {
        "full": full,
        "plain": replace(full, registry=full.registry.without("native"), layout=layout, names={}),
        "int8": replace(full, int8=True, layout=layout, names={}),
    }
    if not any("native" in name.split("+") for name in full.names.values()):
        del offered["plain"]
    choices = {}
    for mode, choice in offered.items():
        try:
            choice.forward(_decoder_kind(choice, config, shape))
        except LoadError as error:
            logger.info("the mode %s is not offered: %s", mode, error)
        else:
            choices[mode] = choice
    return choices


def _decoder_kind(choice: KernelChoice, config: ModelConfig, shape: AttentionShape) -> DecoderKind:
    """What a decoder will be whose every part has the kernel of this choice."""
    layers: dict[int, dict[str, Any]] = {}
    biased: set[str] = set()
    for spec in linear_specs(config):
        linear = choice.linear(spec.out_features, spec.in_features, gathers_rows=spec.gathers_rows)
        if spec.layer is not None:
            layers.setdefault(spec.layer, {})[spec.part] = linear
            biased |= {spec.part} if spec.has_bias else set()
    kinds = frozenset(
        LayerKind(
            **parts,
            biased=frozenset(biased),
            has_qk_norm=config.tensor("q_norm") is not None,
            is_sliding=config.sliding_windows[layer] is not None,
        )
        for layer, parts in layers.items()
    )
    return DecoderKind(kinds, choice.ops(), choice.attention(shape), shape)


class Modes:
    """Which mode a decoder computes in; everything it has was loaded in the first of `choices`."""

    def __init__(
        self,
        decoder: Decoder,
        config: ModelConfig,
        checkpoint: Checkpoint,
        choices: dict[str, KernelChoice],
        *,
        keeps_first: bool = False,
    ) -> None:
        """`keeps_first` when the weights that it was loaded with cost nothing to keep: others hold them too."""
        self.mode = "full"
        self._decoder = decoder
        self._checkpoint = checkpoint
        self._choices = choices
        self._specs = linear_specs(config)
        self._shapes = tensor_shapes(config)
        self._modes_of = dict.fromkeys(self._specs, "full")
        self._kept = {spec: self._product(spec) for spec in self._specs if keeps_first}
        self._reserve: Tensor | None = None
        self._hold_reserve()

    @property
    def weight_bytes(self) -> int:
        """What all products take now."""
        return sum(self._product(spec).weight_bytes for spec in self._specs)

    def attach(self, cache: AttentionBackend) -> None:
        """Take a KV cache into use, with this mode's kernels over it; raises `LoadError` without one."""
        choice = self._choices[self.mode]
        kernel = choice.attention(cache.shape)
        attention = cache if type(cache) is kernel else kernel.over(cache.shape, cache.parts)
        # By what the parts are, not what they should be: after a switch that failed half way they are a mixture.
        self._decoder.attach(attention, choice.forward(self._decoder.parts(attention).kind))

    def switch(self, mode: str) -> None:
        """Compute in `mode` from now on; KV cache and sampler stay as they are.

        Raises ValueError when the mode is not offered, MemoryError when there is no room for its weights,
        `LoadError` when they cannot be read again. Then the model computes as before.
        """
        if mode not in self._choices:
            raise ValueError(f"there is no mode {mode!r} here, only {', '.join(self._choices)}")
        if mode == self.mode and set(self._modes_of.values()) == {mode}:
            return
        started_s, before, bytes_before = time.monotonic(), self.mode, self.weight_bytes
        self._reserve = None
        self._decoder.compute = None  # it would keep the old weights alive
        try:
            if mode != "full" or not self._kept:
                self._check_room(mode)
                if not self._choices[mode].int8:
                    self._checkpoint.check_unchanged()
            self._replace_products(mode)
            self.mode = mode
        finally:
            self._decoder.ops = self._choices[self.mode].ops()
            if self._decoder.attention is not None:
                self.attach(self._decoder.attention)
            self._checkpoint.close()
            release_freed_pages()
            if self.mode == "full":
                self._hold_reserve()
        logger.info(
            "computing in mode %s instead of %s: %.0f MiB of weights instead of %.0f, switched in %.1f s",
            mode,
            before,
            self.weight_bytes / MIB,
            bytes_before / MIB,
            time.monotonic() - started_s,
        )

    def _replace_products(self, mode: str) -> None:
        order = self._specs[1:] + self._specs[:1] if self._choices[mode].int8 else self._specs
        done: list[LinearSpec] = []
        try:
            for spec in order:
                if self._modes_of[spec] != mode:
                    self._put(spec, mode, in_memory=self._choices[mode].int8)
                    done.append(spec)
                    if spec.part == "down":  # the layer's last: what is freed shall not pile up on the heap
                        release_freed_pages()
        except BaseException as error:
            self._undo(done)
            if is_out_of_memory(error) and not isinstance(error, MemoryError):
                raise MemoryError(str(error)) from error
            raise

    def _undo(self, done: list[LinearSpec]) -> None:
        """Back to `self.mode`. What is in memory is not read again: the checkpoint may be what failed."""
        from_int8 = bool(done) and self._choices[self._modes_of[done[0]]].int8
        for spec in reversed(done):
            try:
                if from_int8:
                    self._checkpoint.check_unchanged()
                self._put(spec, self.mode, in_memory=not from_int8)
            except Exception as error:
                # Every product is still a whole one of either mode; the next switch replaces what is not its own.
                logger.error("%s of layer %s stays in mode %s: %s", spec.part, spec.layer, self._modes_of[spec], error)

    def _put(self, spec: LinearSpec, mode: str, *, in_memory: bool) -> None:
        """Replace one product by the same in another mode; the old one goes when the new one stands."""
        choice, old = self._choices[mode], self._product(spec)
        new: Linear
        if mode == "full" and spec in self._kept:
            new = self._kept[spec]
        elif not in_memory:
            new = WeightReader(self._checkpoint, self._shapes, choice).linear(spec)
        else:
            kernel = choice.linear(spec.out_features, spec.in_features, gathers_rows=spec.gathers_rows)
            whole = None if old.gathers_rows else old.rows(torch.arange(spec.out_features, device=choice.device))

            def rows(first: int, last: int) -> Tensor:
                if whole is not None:
                    return whole[first:last]
                return old.rows(torch.arange(first, last, device=choice.device))

            if choice.int8:
                new = kernel.empty(spec.out_features, spec.in_features, old.bias, choice.dtype, choice.device)
                put_in_parts(new, rows)  # type: ignore[arg-type]
            else:
                bias = None if old.bias is None else old.bias.to(choice.dtype)
                new = kernel.pack(rows(0, spec.out_features), bias)
        if spec.layer is None:
            self._decoder.head = self._decoder.embedding.head = new
        else:
            setattr(self._decoder.layers[spec.layer], spec.part, new)
        self._modes_of[spec] = mode

    def _product(self, spec: LinearSpec) -> Linear:
        product: Linear = (
            self._decoder.head if spec.layer is None else getattr(self._decoder.layers[spec.layer], spec.part)
        )
        return product

    def _check_room(self, mode: str) -> None:
        """An allocator that promises more than there is would have the system end the process half way."""
        choice = self._choices[mode]
        if choice.int8:
            needed = self._step_bytes(mode)
        else:
            sizes = [spec.out_features * spec.in_features * choice.dtype.itemsize for spec in self._specs]
            needed = max(0, sum(sizes) - self.weight_bytes) + 2 * max(sizes)
        free = free_bytes(choice.device)
        if needed > free:
            raise MemoryError(
                f"the weights of mode {mode} need {needed / MIB:.0f} MiB more, but only {free / MIB:.0f} MiB are free"
            )

    def _step_bytes(self, mode: str) -> int:
        """What the first products need on the way to int8: the largest of a layer, and the rows it is made of."""
        choice = self._choices[mode]
        assert choice.int8
        layer = [spec for spec in self._specs if spec.layer == 0]
        largest = max(spec.out_features * spec.in_features for spec in layer)
        parts = max(min(spec.out_features, part_rows(spec.in_features)) * spec.in_features for spec in layer)
        unpacked = 0 if all(self._product(spec).gathers_rows for spec in layer) else 2 * largest * choice.dtype.itemsize
        return largest + SCRATCH_BYTES_PER_ELEMENT * parts + unpacked

    def _hold_reserve(self) -> None:
        if "int8" in self._choices:
            with contextlib.suppress(Exception):  # a model that has just been loaded shall not fail for this
                size = self._step_bytes("int8")
                self._reserve = torch.ones(size, dtype=torch.uint8, device=self._choices["int8"].device)
