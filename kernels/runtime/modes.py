"""Computing in another way from one step on: the modes of a loaded model, and the switch between them.

A mode is two things (fsm/messages/mode.py), and a machine offers every pair that it can compute:

- kernels, `fast`: those of our own wherever they are there, as CUDA graphs where they can be captured; `plain`: torch's
  for every operation, over the same KV cache, for when one of our own misbehaves. Between them on CUDA: `eager`,
  without graphs, and `sdpa`, where attention alone is torch's
- precision, `checkpoint`: weights in the dtype of the run; `int8`: rounded, for when memory has run short

A switch replaces one product after the other. What it needs beside the larger of both layouts is, on the way to a
lower precision, one product in it and a few MiB; on any other way, the largest product twice (as it is read, and
packed). On the way to a lower precision products get smaller, so they make room for one another: the layers' come
first and the output head, the largest, last; otherwise it is the other way round. What the first one needs is held in
reserve while the model is in its first mode, and given up when the switch begins; a way back that would not fit does
not begin. A lower precision is made of weights in memory that are as the checkpoint has them; all others are read from
the checkpoint again, and are bit for bit what a model is that is loaded so. (Qwen2.5-0.5B in bf16, two busy cores:
0.9 s either way, 0.49 GiB given back.)
"""

from __future__ import annotations

import contextlib
import logging
import time

import torch
from torch import Tensor

from novainfer.fsm.messages.mode import CHECKPOINT, EAGER, FAST, PLAIN, PRECISIONS, SDPA, Mode
from novainfer.kernels.errors import LoadError
from novainfer.kernels.heap import release_freed_pages
from novainfer.kernels.memory import free_bytes, is_out_of_memory
from novainfer.kernels.models.config import ModelConfig
from novainfer.kernels.models.decoder import Decoder
from novainfer.kernels.ops.forward import PRODUCTS, DecoderKind, LayerKind
from novainfer.kernels.ops.precision import precision_of
from novainfer.kernels.ops.quantised import part_rows, put_in_parts
from novainfer.kernels.ops.registry import AttentionBackend, AttentionShape, Linear, Registry
from novainfer.kernels.ops.selection import GRAPHS, OURS, Selection
from novainfer.kernels.weights.checkpoint import Checkpoint
from novainfer.kernels.weights.header import tensor_shapes
from novainfer.kernels.weights.loader import (
    LinearSpec,
    WeightReader,
    linear_bytes,
    linear_kernel,
    linear_specs,
    vector_names,
)

__all__ = ["Modes", "selections_by_mode"]

logger = logging.getLogger(__name__)

MIB = 1024**2
SCRATCH_BYTES_PER_ELEMENT = 20  # of a part that is quantised: the rows, four fp32 temporaries at most, int8


def selections_by_mode(
    first: Selection, config: ModelConfig, checkpoint: Checkpoint, shape: AttentionShape
) -> dict[Mode, Selection]:
    """The modes that this machine can compute this model in, best first, and the kernels of each.

    `first` is what the model is loaded with; where that is rounded, here or by others, there is no other precision.
    """
    first.forward(_decoder_kind(first, config, checkpoint, shape))
    layout = first.attention(shape).layout
    registries = _registries(first)
    found = {Mode(next(iter(registries)), first.precision.name): first}
    own = first.precision.name
    for precision in PRECISIONS if own == CHECKPOINT and checkpoint.scheme is None else (own,):
        for kernels, registry in registries.items():
            mode = Mode(kernels, precision)
            if mode in found:
                continue
            selection = Selection(registry, first.dtype, first.device, precision_of(precision), layout)
            if kernels in (FAST, EAGER):  # the others are there for when that misbehaves
                selection.attention_backend = first.attention_backend
            try:
                selection.forward(_decoder_kind(selection, config, checkpoint, shape))
            except LoadError as error:
                logger.info("%s are not offered: %s", mode, error)
            else:
                found[mode] = selection
    return found


def _registries(first: Selection) -> dict[str, Registry]:
    """Which kernels there are to choose among, best first: only what differs from the one before is another choice."""
    registry, plain = first.registry, first.registry
    for ours in OURS.values():
        plain = plain.without(ours.prefix)
    own = {name.split("+")[0].split("-")[0] for name in first.names.values()}
    if OURS["cpu"].prefix in own:
        return {FAST: registry, PLAIN: plain}
    if OURS["cuda"].prefix not in own:
        return {PLAIN: registry}
    eager, found = registry.without(GRAPHS), {}
    if first.names["forward"].startswith(GRAPHS):
        found[FAST] = registry
    found[EAGER] = eager
    if first.names["attention"].startswith(OURS["cuda"].prefix):
        found[SDPA] = eager.without(OURS["cuda"].prefix, "attention")
    return {**found, PLAIN: plain}


def _decoder_kind(
    selection: Selection, config: ModelConfig, checkpoint: Checkpoint, shape: AttentionShape
) -> DecoderKind:
    """What a decoder will be whose every part has the kernel of this selection."""
    layers: dict[int, dict[tuple[str, type[Linear]], None]] = {}
    biased: set[str] = set()
    for spec in linear_specs(config):
        linear = linear_kernel(spec, checkpoint, selection)
        if spec.layer is not None:
            layers.setdefault(spec.layer, {})[spec.part, linear] = None
            biased |= {spec.part} if spec.has_bias else set()
    kinds = frozenset(
        LayerKind(
            tuple(sorted(products, key=lambda product: PRODUCTS.index(product[0]))),
            frozenset(biased & {part for part, _ in products}),
            frozenset(vector_names(config, layer)),
            is_sliding=config.sliding_windows[layer] is not None,
            num_active_experts=config.num_experts_per_tok if config.layer_has_experts(layer) else 0,
            normalises_experts=config.norm_topk_prob and config.layer_has_experts(layer),
        )
        for layer, products in layers.items()
    )
    return DecoderKind(kinds, selection.ops(), selection.attention(shape), shape)


class Modes:
    """Which mode a decoder computes in; everything it has was loaded in the first of `selections`."""

    def __init__(
        self,
        decoder: Decoder,
        config: ModelConfig,
        checkpoint: Checkpoint,
        selections: dict[Mode, Selection],
        *,
        keeps_first: bool = False,
    ) -> None:
        """`keeps_first` when the weights that it was loaded with cost nothing to keep: others hold them too."""
        self.mode = self._first = next(iter(selections))
        self._decoder = decoder
        self._checkpoint = checkpoint
        self._selections = selections
        self._specs = linear_specs(config)
        self._shapes = tensor_shapes(config)
        self._modes_of = dict.fromkeys(self._specs, self._first)
        self._kept = {spec: self._product(spec) for spec in self._specs if keeps_first}
        self._reserve: Tensor | None = None
        self._hold_reserve()

    @property
    def weight_bytes(self) -> int:
        """What all products take now."""
        return sum(self._product(spec).weight_bytes for spec in self._specs)

    def attach(self, cache: AttentionBackend) -> None:
        """Take a KV cache into use, with this mode's kernels over it; raises `LoadError` without one."""
        selection = self._selections[self.mode]
        kernel = selection.attention(cache.shape)
        attention = cache if type(cache) is kernel else kernel.over(cache.shape, cache.parts)
        # By what the parts are, not what they should be: after a switch that failed half way they are a mixture.
        self._decoder.attach(attention, selection.forward(self._decoder.parts(attention).kind))

    def switch(self, mode: Mode) -> None:
        """Compute in `mode` from now on; KV cache and sampler stay as they are.

        Raises ValueError when the mode is not offered, MemoryError when there is no room for its weights,
        `LoadError` when they cannot be read again. Then the model computes as before.
        """
        if mode not in self._selections:
            raise ValueError(f"there are no {mode} here, only {', '.join(map(str, self._selections))}")
        if mode == self.mode and set(self._modes_of.values()) == {mode}:
            return
        started_s, before, bytes_before = time.monotonic(), self.mode, self.weight_bytes
        self._reserve = None
        self._decoder.compute = None  # it would keep the old weights alive
        try:
            if (mode != self._first or not self._kept) and not all(self._is_same(spec, mode) for spec in self._specs):
                self._check_room(mode)
                if not self._is_made_in_memory(mode):
                    self._checkpoint.check_unchanged()
            self._replace_products(mode)
            self.mode = mode
        finally:
            self._decoder.ops = self._selections[self.mode].ops()
            if self._selections[self.mode].device.type == "cuda":
                torch.cuda.empty_cache()  # graphs that were let go
            if self._decoder.attention is not None:
                self.attach(self._decoder.attention)
            self._checkpoint.close()
            release_freed_pages()
            if self.mode == self._first:
                self._hold_reserve()
        logger.info(
            "computing with %s instead of %s: %.0f MiB of weights instead of %.0f, switched in %.1f s",
            mode,
            before,
            self.weight_bytes / MIB,
            bytes_before / MIB,
            time.monotonic() - started_s,
        )

    def _replace_products(self, mode: Mode) -> None:
        in_memory = self._is_made_in_memory(mode)
        order = self._specs[1:] + self._specs[:1] if in_memory else self._specs
        done: list[LinearSpec] = []
        try:
            for spec in order:
                if self._modes_of[spec] != mode:
                    self._put(spec, mode, in_memory=in_memory)
                    if done and done[-1].layer != spec.layer:  # what is freed shall not pile up on the heap
                        release_freed_pages()
                    done.append(spec)
        except BaseException as error:
            self._undo(done)
            if is_out_of_memory(error) and not isinstance(error, MemoryError):
                raise MemoryError(str(error)) from error
            raise

    def _undo(self, done: list[LinearSpec]) -> None:
        """Back to `self.mode`. What is in memory is not read again: the checkpoint may be what failed."""
        for spec in reversed(done):
            try:
                in_memory = self._modes_of[spec].precision == CHECKPOINT
                if not in_memory:
                    self._checkpoint.check_unchanged()
                self._put(spec, self.mode, in_memory=in_memory)
            except Exception as error:
                # Every product is still a whole one of either mode; the next switch replaces what is not its own.
                logger.error("%s of layer %s stays with %s: %s", spec.part, spec.layer, self._modes_of[spec], error)

    def _put(self, spec: LinearSpec, mode: Mode, *, in_memory: bool) -> None:
        """Replace one product by the same in another mode; the old one goes when the new one stands."""
        selection, old = self._selections[mode], self._product(spec)
        if self._is_same(spec, mode):
            self._modes_of[spec] = mode
            return
        new: Linear
        if mode == self._first and spec in self._kept:
            new = self._kept[spec]
        elif not in_memory:
            new = WeightReader(self._checkpoint, self._shapes, selection).linear(spec)
        else:
            kernel = linear_kernel(spec, self._checkpoint, selection)
            whole = None if old.gathers_rows else old.rows(torch.arange(spec.out_features, device=selection.device))

            def rows(first: int, last: int) -> Tensor:
                if whole is not None:
                    return whole[first:last]
                return old.rows(torch.arange(first, last, device=selection.device))

            if selection.precision.of(is_head=spec.is_head, is_exact=spec.is_exact).is_quantised:
                new = kernel.empty(spec.out_features, spec.in_features, old.bias, selection.dtype, selection.device)
                put_in_parts(new, rows)  # type: ignore[arg-type]
            else:
                bias = None if old.bias is None else old.bias.to(selection.dtype)
                new = kernel.pack(rows(0, spec.out_features), bias)
        if spec.layer is None:
            if self._decoder.embedding.head is self._decoder.head:
                self._decoder.embedding.head = new
            self._decoder.head = new
        else:
            self._decoder.layers[spec.layer].replace(spec.part, spec.expert, new)
        self._modes_of[spec] = mode

    def _is_same(self, spec: LinearSpec, mode: Mode) -> bool:
        """Whether the product that is there is the one of `mode`: only other operations have other kernels then."""
        selection, old = self._selections[mode], self._product(spec)
        kernel = linear_kernel(spec, self._checkpoint, selection)
        is_rounded_so = spec.is_exact or self._modes_of[spec].precision == mode.precision
        return is_rounded_so and type(old) is kernel

    def _product(self, spec: LinearSpec) -> Linear:
        if spec.layer is None:
            return self._decoder.head
        return self._decoder.layers[spec.layer].product(spec.part, spec.expert)

    def _is_made_in_memory(self, mode: Mode) -> bool:
        """Whether the weights of `mode` are made of those in memory: a lower precision of what was not rounded yet."""
        return mode.precision != CHECKPOINT and all(now.precision == CHECKPOINT for now in self._modes_of.values())

    def _check_room(self, mode: Mode) -> None:
        """An allocator that promises more than there is would have the system end the process half way."""
        selection = self._selections[mode]
        if self._is_made_in_memory(mode):
            needed = self._step_bytes(mode)
        else:
            sizes = [self._bytes_of(spec, selection) for spec in self._specs]
            read = max(spec.out_features * spec.in_features for spec in self._specs) * selection.dtype.itemsize
            needed = max(0, sum(sizes) - self.weight_bytes) + read + max(sizes)
        free = free_bytes(selection.device)
        if needed > free:
            raise MemoryError(
                f"the weights for {mode} need {needed / MIB:.0f} MiB more, but only {free / MIB:.0f} MiB are free"
            )

    def _step_bytes(self, mode: Mode) -> int:
        """What the first products need on the way to a lower precision: the largest of a layer, and its rows."""
        selection = self._selections[mode]
        layer = [spec for spec in self._specs if not spec.is_head]
        largest = max(spec.out_features * spec.in_features for spec in layer)
        parts = max(min(spec.out_features, part_rows(spec.in_features)) * spec.in_features for spec in layer)
        unpacked = (
            0 if all(self._product(spec).gathers_rows for spec in layer) else 2 * largest * selection.dtype.itemsize
        )
        kept = max(self._bytes_of(spec, selection) for spec in layer)
        return kept + SCRATCH_BYTES_PER_ELEMENT * parts + unpacked

    def _bytes_of(self, spec: LinearSpec, selection: Selection) -> int:
        return linear_bytes(spec, self._checkpoint, selection)

    def _hold_reserve(self) -> None:
        smaller = next((mode for mode in self._selections if mode.precision != self._first.precision), None)
        if smaller is not None:
            with contextlib.suppress(Exception):  # a model that has just been loaded shall not fail for this
                size = self._step_bytes(smaller)
                self._reserve = torch.ones(size, dtype=torch.uint8, device=self._selections[smaller].device)
