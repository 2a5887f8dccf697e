"""All layers of a decoder in one native call (forward.cpp), when every part of it is native."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from novainfer.kernels.cpu.attention import NativeAttention
from novainfer.kernels.cpu.linear import PackedLinear
from novainfer.kernels.cpu.native import DTYPE_CODES, LayerDesc, ModelDesc, StepDesc, library, num_threads
from novainfer.kernels.registry import AttentionBackend, Linear
from novainfer.kernels.step import StepTensors

__all__ = ["DecoderLayer", "NativeForward"]

# A step below this many operations takes one thread a tenth of a millisecond: the other cores are the event loop's.
SERIAL_FLOPS_MAX = 8 << 20


class DecoderLayer(Protocol):
    """One layer's parts, as `models.decoder.Layer` holds them."""

    @property
    def input_norm(self) -> Tensor: ...
    @property
    def qkv(self) -> Linear: ...
    @property
    def o(self) -> Linear: ...
    @property
    def post_norm(self) -> Tensor: ...
    @property
    def gate_up(self) -> Linear: ...
    @property
    def down(self) -> Linear: ...


class NativeForward:
    """From embeddings to normed hidden states, bit for bit what the single operations give.

    It refers to the weights and the cache it was made of, and keeps them alive.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        cos_sin: Tensor,
        attention: NativeAttention,
        eps: float,
        scale: float,
    ) -> None:
        descs = (LayerDesc * len(layers))()
        self._kept: list[object] = [*layers, final_norm, cos_sin, attention, descs]
        self._flops_per_token = 0
        for desc, layer in zip(descs, layers, strict=True):
            for name in ("input_norm", "post_norm"):
                norm = getattr(layer, name).contiguous()
                self._kept.append(norm)
                setattr(desc, name, norm.data_ptr())
            for name in ("qkv", "o", "gate_up", "down"):
                linear: PackedLinear = getattr(layer, name)
                setattr(desc, name, ctypes.pointer(linear.desc))
                self._flops_per_token += 2 * linear.out_features * linear.in_features
        if not (final_norm.is_contiguous() and cos_sin.is_contiguous()):
            raise ValueError("the last norm and the positions' angles must be contiguous")
        self._model = ModelDesc(
            layers=descs,
            num_layers=len(layers),
            final_norm=final_norm.data_ptr(),
            cos_sin=cos_sin.data_ptr(),
            cache=ctypes.pointer(attention.desc),
            eps=eps,
            scale=scale,
        )
        self._model_pointer = ctypes.byref(self._model)
        self._forward = library().nova_forward
        self._width = final_norm.shape[0]
        self._dtype = final_norm.dtype

    @classmethod
    def of(
        cls,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        cos_sin: Tensor,
        attention: AttentionBackend,
        eps: float,
        scale: float,
    ) -> Self | None:
        """The fused forward pass over these parts, or None when one of them is not native."""
        linears = [linear for layer in layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        if not isinstance(attention, NativeAttention) or not layers:
            return None
        if not all(isinstance(linear, PackedLinear) for linear in linears) or final_norm.dtype not in DTYPE_CODES:
            return None
        return cls(layers, final_norm, cos_sin, attention, eps, scale)

    def __call__(self, hidden: Tensor, step: StepTensors) -> Tensor | None:
        """Embeddings [num_tokens, hidden] (contiguous; overwritten) -> [num_samples, hidden], None without samples."""
        num_tokens = hidden.shape[0]
        if hidden.dtype != self._dtype or not hidden.is_contiguous():
            raise TypeError(f"embeddings must be contiguous and {self._dtype}")
        out = torch.empty((step.num_samples, self._width), dtype=self._dtype) if step.num_samples else None
        desc = StepDesc(
            num_tokens,
            step.context_lens.shape[0],
            step.num_samples,
            step.positions.data_ptr(),
            step.slot_mapping.data_ptr(),
            step.block_tables.data_ptr(),
            step.block_tables.stride(0),
            step.query_start.data_ptr(),
            step.context_lens.data_ptr(),
            None if step.logit_rows is None else step.logit_rows.data_ptr(),
            hidden.data_ptr(),
            None if out is None else out.data_ptr(),
        )
        threads = num_threads() if num_tokens * self._flops_per_token > SERIAL_FLOPS_MAX else 1
        self._forward(self._model_pointer, ctypes.byref(desc), threads)
        return out
