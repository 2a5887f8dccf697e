"""The list of implementations on a GPU, for the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from novainfer.kernels.cuda.language import check_version

if TYPE_CHECKING:
    from novainfer.kernels.ops.registry import Operation

__all__ = ["implementations"]


def implementations() -> list[tuple[Operation, type[Any]]]:
    """All there are, fastest first; raises `KernelUnavailableError` where Triton cannot be used."""
    check_version()
    from novainfer.kernels.cuda.attention import TritonAttention, TritonInvariantAttention
    from novainfer.kernels.cuda.forward import TritonBiasForward, TritonForward
    from novainfer.kernels.cuda.graphs import GraphBiasForward, GraphForward
    from novainfer.kernels.cuda.linear import TritonFp8Linear, TritonInt8Linear, TritonLinear
    from novainfer.kernels.cuda.row_ops import TritonRowOps
    from novainfer.kernels.cuda.sampler import TritonSampler
    from novainfer.kernels.ops.linear import TorchLinear

    return [
        ("attention", TritonAttention),
        ("attention", TritonInvariantAttention),
        ("linear", TorchLinear),  # cuBLAS, where rows need not be invariant
        ("linear", TritonLinear),
        ("linear", TritonInt8Linear),
        ("linear", TritonFp8Linear),
        ("ops", TritonRowOps),
        ("forward", GraphBiasForward),
        ("forward", GraphForward),
        ("forward", TritonBiasForward),
        ("forward", TritonForward),
        ("sampler", TritonSampler),
    ]
