"""The compiled library's functions with their signatures, and the list of implementations for the registry."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from novainfer.fsm.messages.mode import AUTO, CHECKPOINT, INT4, INT8
from novainfer.kernels.cpu.build import ask_system, best_library
from novainfer.kernels.ops.forward import Layer

if TYPE_CHECKING:
    from novainfer.kernels.ops.registry import Operation

__all__ = [
    "CACHE_FORMATS",
    "DTYPE_CODES",
    "FORMAT_CODES",
    "CacheDesc",
    "LayerDesc",
    "LinearDesc",
    "ModelDesc",
    "StepDesc",
    "implementations",
    "library",
    "num_threads",
    "refuses",
]

DTYPE_CODES = {torch.bfloat16: 0, torch.float32: 1}
CACHE_FORMATS = {AUTO: 0, "int8": 1}  # `CacheFormat` in kv_cache.h, by the `kv_dtype` of a cache
FORMAT_CODES = {CHECKPOINT: 0, INT8: 1, INT4: 2}  # `WeightFormat` in linear.h

_I = ctypes.c_int
_L = ctypes.c_int64
_P = ctypes.c_void_p
_F = ctypes.c_float


class LinearDesc(ctypes.Structure):
    """Mirrors `LinearDesc` in linear.h."""

    _fields_ = (
        ("weight", _P),
        ("bias", _P),
        ("n", _L),
        ("k", _L),
        ("dtype", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("scale", _P),
        ("shift", _P),
        ("group_size", _L),
    )


class CacheDesc(ctypes.Structure):
    """Mirrors `CacheDesc` in kv_cache.h."""

    _fields_ = (
        ("data", _P),
        ("num_blocks", _L),
        ("block_size", _L),
        ("num_layers", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("format", ctypes.c_int32),
    )


_DESC = ctypes.POINTER(LinearDesc)
_CACHE = ctypes.POINTER(CacheDesc)
_BY_ANNOTATION: dict[str, Any] = {
    "Linear": _DESC,
    "Linear | None": _DESC,
    "list[Linear] | None": ctypes.POINTER(_DESC),
    "Tensor": _P,
    "Tensor | None": _P,
    "int": _L,
    "int | None": _L,
    "bool": _L,
}


class LayerDesc(ctypes.Structure):
    """A `Layer` field by field, in its order; mirrors `LayerDesc` in forward.cpp."""

    _fields_ = tuple((field.name, _BY_ANNOTATION[str(field.type)]) for field in dataclasses.fields(Layer))


class ModelDesc(ctypes.Structure):
    """Mirrors `ModelDesc` in forward.cpp."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerDesc)),
        ("num_layers", _L),
        ("final_norm", _P),
        ("cos_sin", _P),
        ("cache", _CACHE),
        ("eps", _F),
        ("scale", _F),
    )


class StepDesc(ctypes.Structure):
    """Mirrors `StepDesc` in forward.cpp."""

    _fields_ = (
        ("num_tokens", _L),
        ("num_seqs", _L),
        ("num_samples", _L),
        ("positions", _P),
        ("slot_mapping", _P),
        ("block_tables", _P),
        ("table_stride", _L),
        ("query_start", _P),
        ("context_lens", _P),
        ("logit_rows", _P),
        ("residual", _P),
        ("out", _P),
    )


_STATUS = object()  # Status in abi.h: an int that becomes an exception
_MODEL = ctypes.POINTER(ModelDesc)
_STEP = ctypes.POINTER(StepDesc)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "nova_ask_system": (_I, ()),
    "nova_linear_bytes": (_L, (_DESC,)),
    "nova_linear_columns": (_L, (_DESC,)),
    "nova_linear_pack": (_STATUS, (_DESC, _P, _P, _I)),
    "nova_linear_pack_codes": (_STATUS, (_DESC, _P, _P, _I)),
    "nova_linear_round": (_STATUS, (_DESC, _P, _P, _P, _I)),
    "nova_linear_rows": (_STATUS, (_DESC, _P, _L, _P, _I)),
    "nova_linear": (_STATUS, (_DESC, _P, _L, _L, _P, _I)),
    "nova_cache_block_bytes": (_L, (_CACHE,)),
    "nova_cache_write": (_STATUS, (_CACHE, _I, _P, _L, _P, _L, _P, _L, _I)),
    "nova_attend": (_STATUS, (_CACHE, _I, _P, _L, _P, _L, _P, _P, _L, _F, _L, _P, _I)),
    "nova_attend_plan": (_STATUS, (_CACHE, _P, _L, _P, _P, _L, _L, _I, _P, _P)),
    "nova_rms_norm": (_STATUS, (_I, _P, _L, _P, _F, _P, _L, _L, _I)),
    "nova_add_rms_norm": (_STATUS, (_I, _P, _P, _P, _F, _P, _L, _L, _I)),
    "nova_silu_mul": (_STATUS, (_I, _P, _P, _L, _L, _I)),
    "nova_choose_experts": (_STATUS, (_I, _P, _L, _L, _L, _I, _P, _P, _I)),
    "nova_mix_experts": (_STATUS, (_I, _P, _P, _P, _P, _P, _P, _L, _L, _L, _I)),
    "nova_qk_norm": (_STATUS, (_I, _P, _L, _P, _P, _I, _I, _I, _F, _L, _I)),
    "nova_rope": (_STATUS, (_I, _P, _L, _P, _P, _I, _I, _L, _I)),
    "nova_read": (ctypes.c_uint64, (_P, _L, _I)),
    "nova_forward": (_STATUS, (_MODEL, _STEP, _I)),
    "nova_draw_scratch_bytes": (_L, (_L,)),
    "nova_draw": (_STATUS, (_P, _I)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The library for this CPU, compiled at first use; raises `KernelUnavailableError` with the reason."""
    return best_library(bind)


def bind(path: Path) -> ctypes.CDLL:
    """Load a library and give every function its signature.

    Raises OSError or AttributeError for one of no use, and `KernelUnavailableError` where the system forbids its use.
    """
    lib = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes = arguments
        if result is _STATUS:
            function.restype = _I
            function.errcheck = _check
        else:
            function.restype = result
    ask_system(lib)
    return lib


def _check(status: int, function: Any, arguments: Any) -> None:
    """What the library could not throw; the arrays it was to fill hold nothing of use then."""
    if status == 0:
        return
    if status == 1:
        raise MemoryError(f"{function.__name__} ran out of memory")
    if status == 3:
        raise IndexError(f"{function.__name__} was given a number out of range")
    raise RuntimeError(f"{function.__name__} failed")


num_threads = torch.get_num_threads


def refuses(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why nothing here computes in this dtype on this device; None where it does."""
    if device.type != "cpu":
        return f"runs on cpu, not on {device.type}"
    return None if dtype in DTYPE_CODES else f"computes in bfloat16 and float32, not in {dtype}"


def implementations() -> list[tuple[Operation, type]]:
    """What this machine can use, fastest first; raises `KernelUnavailableError` with the reason."""
    library()
    from novainfer.kernels.cpu.attention import NativeAttention
    from novainfer.kernels.cpu.forward import NativeForward
    from novainfer.kernels.cpu.linear import NativeLinear
    from novainfer.kernels.cpu.ops import NativeRowOps
    from novainfer.kernels.cpu.quantised import NativeGroupedLinear, NativeInt8Linear
    from novainfer.kernels.cpu.sampling import NativeSampler

    return [
        ("linear", NativeLinear),
        ("linear", NativeInt8Linear),
        ("linear", NativeGroupedLinear),
        ("attention", NativeAttention),
        ("ops", NativeRowOps),
        ("forward", NativeForward),
        ("sampler", NativeSampler),
    ]
