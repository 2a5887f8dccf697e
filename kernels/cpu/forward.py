"""All layers of a decoder in one native call (forward.cpp), when every part of it is native."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from novainfer.kernels.cpu.attention import NativeAttention
from novainfer.kernels.cpu.linear import PackedLinear
from novainfer.kernels.cpu.native import LayerDesc, LinearDesc, ModelDesc, StepDesc, library, num_threads
from novainfer.kernels.cpu.ops import NativeRowOps
from novainfer.kernels.ops.forward import DecoderKind, DecoderParts, Layer
from novainfer.kernels.step import StepTensors

__all__ = ["NativeForward"]

# A step below this many operations takes one thread a tenth of a millisecond: the other cores are the event loop's.
SERIAL_FLOPS_MAX = 8 << 20
LAYER_FIELDS = [field.name for field in dataclasses.fields(Layer)]


class NativeForward:
    """From embeddings to normed hidden states, bit for bit what the single operations give."""

    name: ClassVar[str] = "native"
    row_invariant: ClassVar[bool] = True

    def __init__(self, parts: DecoderParts) -> None:
        layers, final_norm, cos_sin = parts.layers, parts.final_norm, parts.cos_sin
        attention = cast(NativeAttention, parts.attention)
        descs = (LayerDesc * len(layers))()
        self._kept: list[object] = [*layers, final_norm, cos_sin, attention, descs]
        self._flops_per_token = 0
        for desc, layer in zip(descs, layers, strict=True):
            for name in LAYER_FIELDS:
                part: Tensor | PackedLinear | list[PackedLinear] | int | None = getattr(layer, name)
                if isinstance(part, PackedLinear):
                    setattr(desc, name, ctypes.pointer(part.desc))
                    self._flops_per_token += 2 * part.out_features * part.in_features
                elif isinstance(part, list):
                    pointers = (ctypes.POINTER(LinearDesc) * len(part))(*(ctypes.pointer(one.desc) for one in part))
                    self._kept.append(pointers)
                    setattr(desc, name, pointers)
                    self._flops_per_token += 2 * layer.num_active_experts * part[0].out_features * part[0].in_features
                elif isinstance(part, int):
                    setattr(desc, name, part)
                elif part is not None:
                    norm = part.contiguous()
                    self._kept.append(norm)
                    setattr(desc, name, norm.data_ptr())
        if not (final_norm.is_contiguous() and cos_sin.is_contiguous()):
            raise ValueError("the last norm and the positions' angles must be contiguous")
        self._model = ModelDesc(
            layers=descs,
            num_layers=len(layers),
            final_norm=final_norm.data_ptr(),
            cos_sin=cos_sin.data_ptr(),
            cache=ctypes.pointer(attention.descs[final_norm.dtype]),
            eps=parts.rms_norm_eps,
            scale=attention.shape.head_dim**-0.5,
        )
        self._model_pointer = ctypes.byref(self._model)
        self._forward = library().nova_forward
        self._width = final_norm.shape[0]
        self._dtype = final_norm.dtype

    @classmethod
    def refuses(cls, kind: DecoderKind) -> str | None:
        """None when all parts are native; else which is not."""
        if not issubclass(kind.attention, NativeAttention):
            return f"its attention is {kind.attention.name}"
        if kind.ops is not NativeRowOps:
            return f"its row operations are {kind.ops.name}"
        for layer in kind.layers:
            for name, linear in layer.products:
                if not issubclass(linear, PackedLinear):
                    return f"a layer's {name} is {linear.name}"
            if len(layer.products) > len(dict(layer.products)):
                return "a layer's experts are not all of one kind"
        return None

    @classmethod
    def over(cls, parts: DecoderParts) -> Self:
        """Over native parts."""
        return cls(parts)

    def __call__(self, hidden: Tensor, step: StepTensors) -> Tensor | None:
        """[num_tokens, hidden_size] (overwritten) -> [num_samples, hidden_size], or None without samples."""
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
