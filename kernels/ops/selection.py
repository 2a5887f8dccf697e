"""Which kernels one model runs on: the registry of this machine, asked with the model's shapes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from novainfer.fsm.messages.mode import AUTO, CHECKPOINT, INT4
from novainfer.kernels.errors import KernelUnavailableError, LoadError
from novainfer.kernels.ops.attention import CudnnAttention, TorchAttention
from novainfer.kernels.ops.forward import DecoderKind, OpByOpForward
from novainfer.kernels.ops.grouped import GroupedForm
from novainfer.kernels.ops.precision import ALL_PRECISIONS, Precision, precision_of
from novainfer.kernels.ops.reference import ReferenceAttention, ReferenceRowOps
from novainfer.kernels.ops.registry import AttentionShape, BlockMover, Operation, Registry
from novainfer.kernels.ops.row_ops import TorchRowOps
from novainfer.kernels.ops.selftest.attention import check_attention
from novainfer.kernels.ops.selftest.forward import check_forward
from novainfer.kernels.ops.selftest.row_ops import check_row_ops
from novainfer.kernels.ops.selftest.sampler import check_sampler
from novainfer.kernels.sampling.sampler import RowSampler, TorchSampler

__all__ = ["Selection", "build_registry"]

logger = logging.getLogger(__name__)

NATIVE_VARIABLE = "NOVAINFER_NATIVE"


def build_registry(
    device: torch.device,
    *,
    native: str | None = None,
    batch_invariant: bool = False,
    enforce_eager: bool = False,
) -> Registry:
    """All kernels for a device, fastest first.

    `native` (default: the environment's NOVAINFER_NATIVE, else "1") is "0" for torch alone, "1" for kernels of our
    own where they run (native ones on the CPU, Triton's on CUDA), "require" to raise `LoadError` where they do not.
    `enforce_eager` leaves out those that replay CUDA graphs.
    """
    mode = native if native is not None else os.environ.get(NATIVE_VARIABLE, "1")
    if mode not in ("0", "1", "require"):
        raise LoadError(f'{NATIVE_VARIABLE} must be "0", "1" or "require", not {mode!r}')
    ours = OURS.get(device.type)
    registry = Registry(batch_invariant=batch_invariant, require=ours.prefix if ours and mode == "require" else None)
    own: list[tuple[Operation, type[Any]]] = []
    if ours is not None and mode != "0":
        own = _own_implementations(ours, required=mode == "require")
    for operation, implementation in own:
        if not (enforce_eager and implementation.name.startswith(GRAPHS)):
            registry.register(operation, implementation)
    for name in ALL_PRECISIONS:
        for linear in precision_of(name).linears:
            registry.register("linear", linear)
    registry.register("attention", TorchAttention)
    if device.type == "cuda":
        registry.register("attention", CudnnAttention)
    if own and device.type == "cpu":  # not one to begin with, but one that goes on with the native kernels' cache
        from novainfer.kernels.cpu.plain_attention import NativeLayoutAttention

        registry.register("attention", NativeLayoutAttention)
    registry.register("attention", ReferenceAttention)
    for ops in (TorchRowOps, ReferenceRowOps):
        registry.register("ops", ops)
    registry.register("forward", OpByOpForward)
    for sampler in (RowSampler, TorchSampler):
        registry.register("sampler", sampler)
    return registry


class Ours(NamedTuple):
    """The kernels of our own for one kind of device."""

    prefix: str  # of their names
    title: str  # for people
    implementations: Callable[[], list[tuple[Operation, type[Any]]]]


def _own_implementations(ours: Ours, *, required: bool) -> list[tuple[Operation, type[Any]]]:
    try:
        return ours.implementations()
    except (ImportError, KernelUnavailableError) as error:
        if required:
            raise LoadError(f"{ours.title} are required, but cannot be used: {error}") from None
        logger.warning("%s cannot be used (%s); torch computes instead", ours.title, error)
        return []


def _on_cpu() -> list[tuple[Operation, type[Any]]]:
    from novainfer.kernels.cpu import native  # here and not at the top: the library is built when it is first asked for

    return native.implementations()


def _on_cuda() -> list[tuple[Operation, type[Any]]]:
    from novainfer.kernels.cuda import kernels  # likewise: it imports Triton

    return kernels.implementations()


GRAPHS = "triton-graphs"  # how the names of forwards begin that replay CUDA graphs
OURS = {
    "cpu": Ours("native", "native CPU kernels", _on_cpu),
    "cuda": Ours("triton", "Triton's kernels", _on_cuda),
}
# How the names of kernels begin that a setting `attention_backend` asks for.
ATTENTION_PREFIXES = {"triton": OURS["cuda"].prefix, "cudnn": CudnnAttention.name, "sdpa": TorchAttention.name}


@dataclass(slots=True)
class Selection:
    """Answers "which class for this operation", each proved by its self-test first, and remembers what it gave.

    Linears keep weights in `precision`; `layout` asks for attention over a KV cache that lies in this layout, and
    `attention_backend` for one of `ATTENTION_BACKENDS`.
    """

    registry: Registry
    dtype: torch.dtype
    device: torch.device
    precision: Precision = field(default_factory=lambda: precision_of(CHECKPOINT))
    layout: str | None = None
    names: dict[str, str] = field(default_factory=dict)  # operation -> names in use, for people
    row_invariant: bool = True  # whether all kernels given so far are
    attention_backend: str = AUTO

    def linear(
        self,
        out_features: int,
        in_features: int,
        *,
        gathers_rows: bool = False,
        is_head: bool = False,
        is_exact: bool = False,
    ) -> Any:
        """The class for a weight [out_features, in_features]; with `gathers_rows`, one that gives rows back.

        The output head (`is_head`) may be kept in another precision than all other products; what `is_exact` is kept
        as the checkpoint has it.
        """
        precision = self.precision.of(is_head=is_head, is_exact=is_exact)
        return self._linear(precision, out_features, in_features, gathers_rows=gathers_rows)

    def grouped(self, out_features: int, in_features: int, form: GroupedForm, *, gathers_rows: bool = False) -> Any:
        """The class for a weight that comes in groups (`GroupedWeight.form`), whatever the precision of others is.

        It packs a weight at once (`pack_grouped`), or some rows after the other (`empty_grouped`, `put_grouped`).
        """
        precision = precision_of(INT4)
        return self._linear(precision, out_features, in_features, form, gathers_rows=gathers_rows)

    def _linear(
        self,
        precision: Precision,
        out_features: int,
        in_features: int,
        form: GroupedForm | None = None,
        *,
        gathers_rows: bool,
    ) -> Any:
        def refuses(kernel: Any) -> str | None:
            if gathers_rows and not kernel.gathers_rows:
                return "cannot give embedding rows back"
            reason: str | None = kernel.refuses(out_features, in_features, self.dtype, self.device)
            if reason is None and form is not None:
                reason = kernel.refuses_form(in_features, form)
            return reason

        return self._take(
            "linear",
            self.registry.select(
                "linear",
                refuses,
                lambda kernel: precision.check(kernel, self.dtype, self.device),
                (self.dtype, self.device),
                precision.name,
            ),
        )

    def attention(self, shape: AttentionShape) -> Any:
        """The class for attention of this geometry."""
        prefix = self._attention_prefix()

        def refuses(kernel: Any) -> str | None:
            if not kernel.name.startswith(prefix):
                return f"attention_backend {self.attention_backend!r} was asked for"
            if self.layout not in (None, kernel.layout):
                return f"the cache lies in the layout {self.layout!r}, not in {kernel.layout!r}"
            reason: str | None = kernel.refuses(shape, self.dtype, self.device)
            return reason

        return self._take(
            "attention",
            self.registry.select(
                "attention",
                refuses,
                lambda kernel: check_attention(kernel, shape, self.dtype, self.device),
                (shape, self.dtype, self.device),
            ),
        )

    def _attention_prefix(self) -> str:
        if self.attention_backend == AUTO:
            return ""
        names = [kernel.name for kernel in self.registry.implementations("attention")]
        there = [
            backend for backend, prefix in ATTENTION_PREFIXES.items() if any(name.startswith(prefix) for name in names)
        ]
        if self.attention_backend not in there:
            offered = ", ".join(map(repr, (AUTO, *there)))
            raise LoadError(
                f"attention_backend must be one of {offered} on this machine's {self.device.type}, not "
                f"{self.attention_backend!r}"
            )
        return ATTENTION_PREFIXES[self.attention_backend]

    def ops(self) -> Any:
        """The class of the row operations."""
        return self._take(
            "ops",
            self.registry.select(
                "ops",
                lambda kernel: kernel.refuses(self.dtype, self.device),
                lambda kernel: check_row_ops(kernel, self.dtype, self.device),
                (self.dtype, self.device),
            ),
        )

    def forward(self, kind: DecoderKind) -> Any:
        """The class that computes all layers of a decoder of this kind."""
        return self._take(
            "forward",
            self.registry.select(
                "forward",
                lambda forward: forward.refuses(kind),
                lambda forward: check_forward(forward, kind, self.dtype, self.device),
                (kind, self.dtype, self.device),
            ),
        )

    def block_mover(self, parts: Sequence[Tensor]) -> BlockMover | None:
        """What moves blocks of a KV cache of these parts, where kernels do that: on CUDA, where Triton's are in use.

        It is no operation: what it moves has the same bits whatever moves it, so no mode differs in that.
        """
        if not self.registry.has(OURS["cuda"].prefix):
            return None
        from novainfer.kernels.cuda import blocks

        return blocks.BlockMover(parts)

    def sampler(self, vocab_size: int) -> Any:
        """The class that draws tokens of this vocabulary."""
        return self._take(
            "sampler",
            self.registry.select(
                "sampler",
                lambda sampler: sampler.refuses(vocab_size, self.device),
                lambda sampler: check_sampler(sampler, self.dtype, self.device),
                (self.dtype, self.device),
            ),
        )

    def _take(self, operation: str, kernel: Any) -> Any:
        self.row_invariant &= kernel.row_invariant
        names = self.names.get(operation, "")
        if kernel.name not in names.split("+"):
            self.names[operation] = f"{names}+{kernel.name}" if names else kernel.name
        return kernel
