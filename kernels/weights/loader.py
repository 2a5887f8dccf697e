"""From a checkpoint on disk to a `Decoder` with packed weights, one tensor at a time.

Shapes are checked and memory is counted before the first tensor is allocated; a tensor is read, fused with
its neighbours, packed and freed before the next one, so that the weights are never held twice.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from novainfer.kernels.errors import LoadError
from novainfer.kernels.heap import release_freed_pages
from novainfer.kernels.memory import free_bytes, is_out_of_memory, lazy_zeros
from novainfer.kernels.models.angles import rope_table
from novainfer.kernels.models.config import ModelConfig, TensorSpec
from novainfer.kernels.models.decoder import Decoder, Embedding
from novainfer.kernels.ops.forward import Layer
from novainfer.kernels.ops.grouped import GroupedForm
from novainfer.kernels.ops.quantised import part_rows
from novainfer.kernels.ops.registry import Linear
from novainfer.kernels.ops.selection import Selection
from novainfer.kernels.weights.checkpoint import DTYPES, Checkpoint
from novainfer.kernels.weights.entries import GroupedEntry
from novainfer.kernels.weights.header import check_fit, tensor_shapes, zero_biases

__all__ = [
    "LinearSpec",
    "WeightReader",
    "WeightSource",
    "choose_dtype",
    "linear_bytes",
    "linear_kernel",
    "linear_specs",
    "load_decoder",
    "vector_names",
]

logger = logging.getLogger(__name__)

GIB = 1024**3
EXACT_PARTS = {"router", "shared_gate"}  # what they give is chosen by, and they are small

OnProgress = Callable[[int, int], None]
"""Called with (tensors read, tensors in all)."""


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One matrix product of the model: where it stands, and the projections that it fuses."""

    layer: int | None  # None: the output head
    part: str  # its name in `Layer`
    names: tuple[str, ...]  # of tensors, without ".weight" and ".bias"
    out_features: int
    in_features: int
    has_bias: bool = False
    gathers_rows: bool = False  # the embeddings are its rows
    expert: int | None = None  # of a part that each expert has
    is_exact: bool = False  # kept as the checkpoint has it in any precision: what is chosen by it would be others

    @property
    def is_head(self) -> bool:
        """Whether it is the output head."""
        return self.layer is None

    @property
    def weights(self) -> list[str]:
        """The tensors that are its weight, one behind the other."""
        return [f"{name}.weight" for name in self.names]


def linear_specs(config: ModelConfig) -> list[LinearSpec]:
    """All products of the model, the output head first."""
    separate = config.tensor("head")
    head = separate or config.tensor("embedding")
    assert head is not None
    stem, (rows, columns) = head.name.removesuffix(".weight"), config.shape(head)
    specs = [LinearSpec(None, "head", (stem,), rows, columns, gathers_rows=separate is None)]
    biased = {tensor.part for tensor in config.tensors if tensor.name.endswith(".bias")}
    for layer in range(config.num_layers):
        weights: dict[str, list[TensorSpec]] = {}
        for tensor in config.layer_tensors(layer):
            if len(tensor.shape) == 2:
                weights.setdefault(tensor.part, []).append(tensor)
        for part, tensors in weights.items():
            rows, columns = sum(config.shape(tensor)[0] for tensor in tensors), config.shape(tensors[0])[1]
            names = zip(*(tensor.names(layer, config.num_experts) for tensor in tensors), strict=True)
            for expert, fused in enumerate(names):
                stems = tuple(name.removesuffix(".weight") for name in fused)
                number = expert if tensors[0].is_per_expert else None
                specs.append(
                    LinearSpec(
                        layer, part, stems, rows, columns, part in biased, expert=number, is_exact=part in EXACT_PARTS
                    )
                )
    return specs


def embedding_spec(config: ModelConfig, checkpoint: Checkpoint) -> LinearSpec | None:
    """Embeddings in codes, which stay so: as a product that only gives rows; None where they are not, or are tied."""
    tensor = config.tensor("embedding")
    assert tensor is not None
    if config.tensor("head") is None or checkpoint.form([tensor.name]) is None:
        return None
    rows, columns = config.shape(tensor)
    return LinearSpec(None, "embedding", (tensor.name.removesuffix(".weight"),), rows, columns, gathers_rows=True)


def _form(spec: LinearSpec, checkpoint: Checkpoint) -> GroupedForm | None:
    """The form that a product's weight is kept in; None: in floats, as what must be exact is, codes or not.

    A kernel of codes may round activations, too.
    """
    return None if spec.is_exact else checkpoint.form(spec.weights)


def linear_kernel(spec: LinearSpec, checkpoint: Checkpoint, kernels: Selection) -> Any:
    """The class for a product: of weights in codes one that takes them as they are."""
    form = _form(spec, checkpoint)
    if form is not None:
        return kernels.grouped(spec.out_features, spec.in_features, form, gathers_rows=spec.gathers_rows)
    return kernels.linear(
        spec.out_features,
        spec.in_features,
        gathers_rows=spec.gathers_rows,
        is_head=spec.is_head,
        is_exact=spec.is_exact,
    )


def linear_bytes(spec: LinearSpec, checkpoint: Checkpoint, kernels: Selection) -> int:
    """About what the weight of a product takes."""
    form = _form(spec, checkpoint)
    if form is None:
        precision = kernels.precision.of(is_head=spec.is_head, is_exact=spec.is_exact)
        return precision.weight_bytes(spec.out_features, spec.in_features, kernels.dtype)
    per_group = torch.float32.itemsize * (1 if form.zero == 0 else 2)  # a scale, and a shift
    groups = spec.in_features // form.group_size
    return spec.out_features * (-(-spec.in_features * form.bits // 8) + groups * per_group)


def vector_names(config: ModelConfig, layer: int) -> dict[str, str]:
    """The parts of a layer that are no products (weights of norms), and the tensor of each."""
    return {
        tensor.part: tensor.name.format(layer=layer)
        for tensor in config.layer_tensors(layer)
        if len(tensor.shape) == 1 and not tensor.name.endswith(".bias")
    }


def choose_dtype(name: str, config: ModelConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The dtype to compute in: the checkpoint's own for "auto"; float16 becomes float32 on the CPU.

    CPUs compute in float16 slowly or not at all; float32 holds every float16 weight exactly, bfloat16 (half
    the memory) would round them, and can be asked for by name.
    """
    if name == "auto":
        stored = checkpoint.entries.get(_name(config, "embedding"))
        # Codes are of no dtype: bfloat16 is what the models were trained in.
        found = "float32" if stored is None else "bfloat16" if isinstance(stored, GroupedEntry) else stored.dtype
        dtype = DTYPES[config.dtype or found]
    elif name in DTYPES:
        dtype = DTYPES[name]
    else:
        raise LoadError(f"dtype must be auto, {', '.join(DTYPES)}, not {name!r}")
    if device.type == "cpu" and dtype == torch.float16:
        logger.warning("float16 is computed in float32 on the CPU; dtype=bfloat16 takes half the memory")
        dtype = torch.float32
    return dtype


class WeightSource(Protocol):
    """Where a decoder's weights come from, and how much was read of them."""

    checkpoint: Checkpoint
    kernels: Selection
    is_mapped: bool  # what it gives takes no memory of this process's own

    @property
    def num_bytes(self) -> int:
        """Of what was given."""

    @property
    def num_read(self) -> int:
        """Tensors of the checkpoint that this was made of."""

    def tensor(self, name: str) -> Tensor:
        """A tensor that is kept as it is: a norm weight, a separate embedding."""

    def linear(self, spec: LinearSpec) -> Linear:
        """The fused and packed product of a spec's projections."""


def load_decoder(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: Selection,
    max_model_len: int,
    on_progress: OnProgress | None = None,
    source: WeightSource | None = None,
) -> tuple[Decoder, int]:
    """The model with its weights packed, and the bytes they take; raises `LoadError`.

    `source` (default: the checkpoint) gives the weights.
    """
    shapes = tensor_shapes(config)
    check_fit(checkpoint.model_dir, config, checkpoint.entries)
    if source is None or not source.is_mapped:
        _check_memory(config, checkpoint, max_model_len * config.head_dim, kernels)
        _check_zero_biases(config, checkpoint)
    reader = source or WeightReader(checkpoint, shapes, kernels, on_progress)
    try:
        decoder = _build(config, reader, max_model_len)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise LoadError(
            f"the memory ran out with {reader.num_read} of {len(shapes)} tensors of the model read "
            f"(max_model_len {max_model_len}): {str(error).splitlines()[0]}"
        ) from None
    finally:
        checkpoint.close()
        release_freed_pages()
    return decoder, reader.num_bytes


def _check_zero_biases(config: ModelConfig, checkpoint: Checkpoint) -> None:
    for name in zero_biases(config, checkpoint.entries):
        bias = torch.empty(checkpoint.entries[name].shape)
        checkpoint.read_into(name, bias)
        if bool(bias.any()):
            raise LoadError(
                f"{checkpoint.entries[name].file}: {name} is not 0, and {config.architecture} has no such bias"
            )


def _check_memory(config: ModelConfig, checkpoint: Checkpoint, num_angles: int, kernels: Selection) -> None:
    count = sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values())
    specs, precision = linear_specs(config), kernels.precision
    specs += filter(None, [embedding_spec(config, checkpoint)])
    sizes = [spec.out_features * spec.in_features for spec in specs]
    weight_bytes = (count - sum(sizes)) * kernels.dtype.itemsize
    weight_bytes += sum(linear_bytes(spec, checkpoint, kernels) for spec in specs)
    if precision.is_quantised:  # the largest as it is read
        weight_bytes += max(sizes) * kernels.dtype.itemsize
    angle_bytes = 3 * num_angles * torch.float32.itemsize  # the table of cosines and sines, and what it is made from
    needed, free = weight_bytes + angle_bytes, free_bytes(kernels.device)
    if needed > free:
        name = precision.name if precision.is_quantised else str(kernels.dtype).removeprefix("torch.")
        name = checkpoint.scheme or name
        raise LoadError(
            f"the model needs {needed / GIB:.2f} GiB for its weights in {name} and its positions, but only "
            f"{free / GIB:.2f} GiB are free ({needed} and {free} bytes)"
        )


class WeightReader:
    """Reads tensors by name in the dtype of the run, fuses and packs them, counts bytes and progress."""

    is_mapped = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: dict[str, tuple[int, ...]],
        kernels: Selection,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.shapes = shapes
        self.kernels = kernels
        self.on_progress = on_progress
        self.num_bytes = 0
        self.num_read = 0

    def fused(self, names: Sequence[str]) -> Tensor:
        """The tensors of these names, one behind the other along the first dimension."""
        lengths = [self.shapes[name][0] for name in names]
        shape = (sum(lengths), *self.shapes[names[0]][1:])
        # Mapped, not from the heap: freed between small tensors that stay, heap memory would never go back.
        out = lazy_zeros(shape, self.kernels.dtype, torch.device("cpu"))
        begin = 0
        for name, length in zip(names, lengths, strict=True):
            self.checkpoint.read_into(name, out[begin : begin + length])
            begin += length
            self._count()
        return out.to(self.kernels.device)

    def tensor(self, name: str) -> Tensor:
        """A tensor that is kept as it is: a norm weight, a separate embedding."""
        tensor = self.fused([name])
        self.num_bytes += tensor.nbytes
        return tensor

    def linear(self, spec: LinearSpec) -> Linear:
        """The fused and packed product of a spec's projections."""
        form = _form(spec, self.checkpoint)
        weight = self.fused(spec.weights) if form is None else None
        bias = self.fused([f"{name}.bias" for name in spec.names]) if spec.has_bias else None
        kernel = linear_kernel(spec, self.checkpoint, self.kernels)
        packed: Linear = kernel.pack(weight, bias) if form is None else self._in_codes(spec, kernel, form, bias)
        self.num_bytes += packed.weight_bytes
        return packed

    def _in_codes(self, spec: LinearSpec, kernel: Any, form: GroupedForm, bias: Tensor | None) -> Any:
        """A product whose weight is in codes, read and packed some rows at a time."""
        device = self.kernels.device
        packed = kernel.empty_grouped(spec.out_features, spec.in_features, form, bias, self.kernels.dtype, device)
        count = part_rows(spec.in_features)
        for first in range(0, spec.out_features, count):
            last = min(first + count, spec.out_features)
            packed.put_grouped(first, self.checkpoint.grouped(spec.weights, form, first, last))
        for name in spec.weights:
            self.checkpoint.release(name)
            self._count()
        return packed

    def _count(self) -> None:
        self.num_read += 1
        if self.on_progress is not None:
            self.on_progress(self.num_read, len(self.shapes))


def _name(config: ModelConfig, part: str) -> str:
    tensor = config.tensor(part)
    assert tensor is not None
    return tensor.name


def _build(config: ModelConfig, reader: WeightSource, max_model_len: int) -> Decoder:
    specs = deque(linear_specs(config))
    head_spec = specs.popleft()
    head = reader.linear(head_spec)
    if (in_codes := embedding_spec(config, reader.checkpoint)) is not None:
        embedding = Embedding(None, reader.linear(in_codes))
    else:
        embedding = Embedding(None if head_spec.gathers_rows else reader.tensor(_name(config, "embedding")), head)
    layers = []
    for index in range(config.num_layers):
        parts: dict[str, Any] = {}
        while specs and specs[0].layer == index:
            spec = specs.popleft()
            if spec.expert is None:
                parts[spec.part] = reader.linear(spec)
            else:
                parts.setdefault(spec.part, []).append(reader.linear(spec))
        if any(isinstance(part, list) for part in parts.values()):
            parts |= {"num_active_experts": config.num_experts_per_tok, "normalises_experts": config.norm_topk_prob}
        parts |= {part: reader.tensor(name) for part, name in vector_names(config, index).items()}
        layers.append(Layer(**parts, sliding_window=config.sliding_windows[index]))
    return Decoder(
        config=config,
        embedding=embedding,
        layers=layers,
        final_norm=reader.tensor(_name(config, "final_norm")),
        head=head,
        ops=reader.kernels.ops(),
        cos_sin=rope_table(config.rope, config.head_dim, max_model_len, reader.kernels.device),
    )
