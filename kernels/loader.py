"""From a checkpoint on disk to a `Decoder` with packed weights, one tensor at a time.

Shapes are checked and memory is counted before the first tensor is allocated; a tensor is read, fused with
its neighbours, packed and freed before the next one, so that the weights are never held twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from novainfer.kernels.checkpoint import Checkpoint
from novainfer.kernels.choice import KernelChoice
from novainfer.kernels.config import DTYPES, ModelConfig
from novainfer.kernels.errors import LoadError
from novainfer.kernels.memory import free_bytes, is_out_of_memory, lazy_zeros, release_freed_pages
from novainfer.kernels.models.decoder import Decoder, Embedding, Layer, rope_table
from novainfer.kernels.registry import Linear

__all__ = ["choose_dtype", "load_decoder", "tensor_shapes"]

logger = logging.getLogger(__name__)

GIB = 1024**3
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

OnProgress = Callable[[int, int], None]
"""Called with (tensors read, tensors in all)."""


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors a checkpoint of this config must hold."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        for name, width in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{layer}self_attn.{name}.weight"] = (width, hidden)
            if config.qkv_bias:
                shapes[f"{layer}self_attn.{name}.bias"] = (width,)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, q)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes[layer + "mlp.gate_proj.weight"] = (intermediate, hidden)
        shapes[layer + "mlp.up_proj.weight"] = (intermediate, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, intermediate)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def choose_dtype(name: str, config: ModelConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The dtype to compute in: the checkpoint's own for "auto"; float16 becomes float32 on the CPU.

    CPUs compute in float16 slowly or not at all; float32 holds every float16 weight exactly, bfloat16 (half
    the memory) would round them, and can be asked for by name.
    """
    if name == "auto":
        stored = checkpoint.entries.get(EMBEDDING)
        dtype = config.dtype or (stored.dtype if stored is not None else torch.float32)
    elif name in DTYPES:
        dtype = DTYPES[name]
    else:
        raise LoadError(f"dtype must be auto, {', '.join(DTYPES)}, not {name!r}")
    if device.type == "cpu" and dtype == torch.float16:
        logger.warning("float16 is computed in float32 on the CPU; dtype=bfloat16 takes half the memory")
        dtype = torch.float32
    return dtype


def load_decoder(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: KernelChoice,
    max_model_len: int,
    on_progress: OnProgress | None = None,
) -> tuple[Decoder, int]:
    """The model with its weights packed, and the bytes they take; raises `LoadError`."""
    shapes = tensor_shapes(config)
    checkpoint.check(shapes, ignored=frozenset({HEAD}) if config.tie_word_embeddings else frozenset())
    _check_memory(shapes, max_model_len * config.head_dim, kernels)
    reader = _Reader(checkpoint, shapes, kernels, on_progress)
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


def _check_memory(shapes: dict[str, tuple[int, ...]], num_angles: int, kernels: KernelChoice) -> None:
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    angle_bytes = 3 * num_angles * torch.float32.itemsize  # the table of cosines and sines, and what it is made from
    needed, free = count * kernels.dtype.itemsize + angle_bytes, free_bytes(kernels.device)
    if needed > free:
        name = str(kernels.dtype).removeprefix("torch.")
        raise LoadError(
            f"the model needs {needed / GIB:.2f} GiB for its weights in {name} and its positions, but only "
            f"{free / GIB:.2f} GiB are free ({needed} and {free} bytes)"
        )


class _Reader:
    """Reads tensors by name in the dtype of the run, fuses and packs them, counts bytes and progress."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: dict[str, tuple[int, ...]],
        kernels: KernelChoice,
        on_progress: OnProgress | None,
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
            self.num_read += 1
            if self.on_progress is not None:
                self.on_progress(self.num_read, len(self.shapes))
        return out.to(self.kernels.device)

    def tensor(self, name: str) -> Tensor:
        """A tensor that is kept as it is: a norm weight, a separate embedding."""
        tensor = self.fused([name])
        self.num_bytes += tensor.nbytes
        return tensor

    def linear(self, names: Sequence[str], *, bias: bool = False, gathers_rows: bool = False) -> Linear:
        """The fused and packed product of these projections (names without ".weight")."""
        weight = self.fused([f"{name}.weight" for name in names])
        bias_tensor = self.fused([f"{name}.bias" for name in names]) if bias else None
        kernel = self.kernels.linear(weight.shape[0], weight.shape[1], gathers_rows=gathers_rows)
        packed: Linear = kernel.pack(weight, bias_tensor)
        if gathers_rows:
            ids = torch.linspace(0, weight.shape[0] - 1, 64, device=weight.device).long()
            if not torch.equal(packed.rows(ids), weight[ids]):
                raise LoadError(f"the linear kernel {kernel.name} does not give the embedding rows back")
        self.num_bytes += packed.weight_bytes
        return packed


def _build(config: ModelConfig, reader: _Reader, max_model_len: int) -> Decoder:
    tied = config.tie_word_embeddings
    head = reader.linear([(EMBEDDING if tied else HEAD).removesuffix(".weight")], gathers_rows=tied)
    embedding = Embedding(None if tied else reader.tensor(EMBEDDING), head)
    layers = []
    for index in range(config.num_layers):
        name = f"model.layers.{index}."
        qkv = [f"{name}self_attn.{part}_proj" for part in "qkv"]
        layers.append(
            Layer(
                input_norm=reader.tensor(name + "input_layernorm.weight"),
                qkv=reader.linear(qkv, bias=config.qkv_bias),
                o=reader.linear([name + "self_attn.o_proj"]),
                post_norm=reader.tensor(name + "post_attention_layernorm.weight"),
                gate_up=reader.linear([name + "mlp.gate_proj", name + "mlp.up_proj"]),
                down=reader.linear([name + "mlp.down_proj"]),
            )
        )
    return Decoder(
        config=config,
        embedding=embedding,
        layers=layers,
        final_norm=reader.tensor(FINAL_NORM),
        head=head,
        ops=reader.kernels.ops(),
        cos_sin=rope_table(config, max_model_len, reader.kernels.device),
    )
